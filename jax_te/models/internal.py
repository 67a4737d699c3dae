"""Names of `jax_te.models` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.models.stack import check_recompute_policy
from jax_te.models.stack_hook import StackCall, call_of_stack, replace_stack

__all__ = [
    "StackCall",
    "call_of_stack",
    "check_recompute_policy",
    "replace_stack",
]
