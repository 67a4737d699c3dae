"""Optax transformations of the parameters (masters in place of rounded ones), and their extra arguments."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.transforms import MultiSteps

from jax_te.sharding import auto_region
from jax_te.typing import Array, PyTree

Transformation: TypeAlias = optax.GradientTransformation | MultiSteps
"""Update rule of an optimizer: any optax transformation."""


def as_transformation(tx: Transformation) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` as a transformation; `optax.MultiSteps` has another interface."""
    if isinstance(tx, MultiSteps):
        # Its own gradient_transformation() drops extra arguments. It declares its state's type, the protocol an
        # arbitrary one.
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)  # type: ignore[arg-type]
    return optax.with_extra_args_support(tx)


def init_opt_state(tx: optax.GradientTransformationExtraArgs, params: PyTree) -> PyTree:
    """Return the optimizer state of ``params``.

    Raises:
        ValueError: for a transformation that expects parameters of another form than a model's.
    """
    with allow_promotion():
        state = tx.init(params)
    if any(_is_lookahead(node) for node in jax.tree.leaves(state, is_leaf=_is_lookahead)):
        raise ValueError(
            "optax.lookahead updates pairs of fast and slow parameters (optax.LookaheadParams), which a model does not "
            "have: take its fast optimizer alone, or average parameters over steps, e.g. optax.contrib.schedule_free"
        )
    return state


@contextlib.contextmanager
def allow_promotion() -> Iterator[None]:
    """Allow promotion of dtypes and ranks, on which optax relies; a caller may have disabled it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def check_opt_state(tx: optax.GradientTransformationExtraArgs, opt_state: PyTree, params: PyTree) -> None:
    """Raise ValueError for an optimizer state that is not one of ``tx`` for these parameters.

    Many transformations would pass it on unchanged, or read its first parts alone.
    """
    # Without Variables, whose metadata make no difference.
    own, given = nnx.as_pure(jax.eval_shape(lambda params: init_opt_state(tx, params), params)), nnx.as_pure(opt_state)
    wanted, found = ([jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (own, given))
    if jax.tree.structure(own) != jax.tree.structure(given) or wanted != found:
        raise ValueError(
            f"the state's opt_state is not one of tx: it has {_describe(given)}, and tx needs {_describe(own)}; give "
            "the step the tx that create_train_state got, or create the state with this one"
        )


def _describe(opt_state: PyTree) -> str:
    """Return the classes of an optimizer state's parts, and their number of arrays."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda node: hasattr(node, "_fields"))
    names = ", ".join(type(part).__name__ if hasattr(part, "_fields") else "an array" for part in parts[:8])
    return f"{len(jax.tree.leaves(opt_state))} arrays in ({names}{', ...' if len(parts) > 8 else ''})"


def _is_lookahead(node: Any) -> bool:
    return isinstance(node, optax.LookaheadState)


def apply_transformation(
    tx: optax.GradientTransformationExtraArgs, grads: PyTree, opt_state: PyTree, params: PyTree, **kwargs: Any
) -> tuple[PyTree, PyTree, PyTree]:
    """Return parameters and optimizer state after an update, and the updates.

    The state keeps the dtypes of its ``init``, also where ``update`` returns wider floats, as that of optax's
    ``ademamix(mu_dtype=jnp.bfloat16)`` does.

    Args:
        tx: transformation, which gets those of ``kwargs`` that its signature names.
        grads, opt_state, params: Variables in the same structure, or parts of it.
        kwargs: pytrees of arrays and functions.

    Raises:
        ValueError: for a transformation whose updates or state have other shapes than what they update, or whose state
            becomes floating-point numbers, or wider integers, than it was.
    """
    taken = inspect.signature(tx.update).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        kwargs = {name: value for name, value in kwargs.items() if name in {parameter.name for parameter in taken}}
    given, kwargs_structure = jax.tree.flatten(kwargs)
    arrays = {i: leaf for i, leaf in enumerate(given) if isinstance(leaf, jax.Array)}

    def run(grads: PyTree, opt_state: PyTree, params: PyTree, arrays: dict[int, Array]) -> list[Array]:
        # Functions cannot be arguments of a region.
        leaves = [arrays.get(i, leaf) for i, leaf in enumerate(given)]
        with allow_promotion():
            updates, new_state = tx.update(grads, opt_state, params, **jax.tree.unflatten(kwargs_structure, leaves))
            _check_shapes("updates", updates, params)
            _check_shapes("optimizer state", new_state, opt_state)
            new_state = jax.tree_util.tree_map_with_path(_in_dtype_of, new_state, opt_state)
            return jax.tree.leaves((optax.apply_updates(params, updates), new_state, updates))

    # In a region, because on Explicit axes products and selections, such as Muon's, require a result's sharding.
    leaves, structure = jax.tree.flatten((params, opt_state, params))
    new_leaves = auto_region(run, [jax.typeof(leaf).sharding.spec for leaf in leaves])(grads, opt_state, params, arrays)
    return jax.tree.unflatten(structure, new_leaves)


def _check_shapes(name: str, new: PyTree, old: PyTree) -> None:
    """Raise ValueError for arrays whose shapes differ from those they update, even if they would broadcast."""
    shapes, expected = ([jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (new, old))
    if shapes != expected:
        raise ValueError(
            f"the transformation gave {name} of shapes {shapes} where {expected} were expected. One for gradients of "
            "single examples (optax.contrib.dpsgd) takes these, stacked, in Optimizer.update alone; one whose state "
            "changes its structure (optax.monitor) cannot be kept (take optax.snapshot)"
        )


def _in_dtype_of(path: Any, new: Any, old: Any) -> Any:
    """Return a new array of an optimizer state in the dtype of the old one, for which a step was compiled."""
    found, expected = jnp.result_type(new), jnp.result_type(old)
    if found == expected:
        return new
    # Not `found`: a Python number, which takes on the dtype of an array, has one of its own, too.
    promoted = jnp.result_type(new, old)
    both_floating = jnp.issubdtype(expected, jnp.floating) and jnp.issubdtype(promoted, jnp.floating)
    if promoted != expected and not both_floating:
        raise ValueError(
            f"the transformation changed its state at {jax.tree_util.keystr(path)} from {expected} to {found}, which "
            f"{expected} cannot hold: its init must give the dtype that its update gives"
        )
    return jnp.asarray(new).astype(expected)
