"""Names of `jax_te.cli` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.cli.main import main
from jax_te.cli.options import METHODS, MODULES, POLICIES, SIZE, some_of
from jax_te.cli.presets import PRESETS
from jax_te.cli.resolve import new_config
from jax_te.cli.run_config import VOCAB_SIZE, RunConfig

__all__ = [
    "METHODS",
    "MODULES",
    "POLICIES",
    "PRESETS",
    "SIZE",
    "VOCAB_SIZE",
    "RunConfig",
    "main",
    "new_config",
    "some_of",
]
