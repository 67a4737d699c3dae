"""Base class of Megatron's models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jax_te.config.internal import SYMMETRIC_AR_TYPES
from jax_te.layers.internal import drop_cached_kernels
from jax_te.megatron.sharded_state import sharded_state_dict
from jax_te.megatron.state_dict import IncompatibleKeys, load_state_dict, state_dict

_QUANTIZED_BY = ("fp8", "fp4", "quant_recipe")


def param_is_not_shared(param: nnx.Variable) -> bool:
    """Whether a parameter counts where each is counted once: False if its metadata has a true ``shared``.

    Raises:
        TypeError: if it is not an ``nnx.Variable``; an array carries no marks.

    Source: ``megatron.core.transformer.module.param_is_not_shared``.

    >>> param_is_not_shared(nnx.Param(jnp.ones(2))), param_is_not_shared(nnx.Param(jnp.ones(2), shared=True))
    (True, False)
    """
    if not isinstance(param, nnx.Variable):
        raise TypeError(f"param_is_not_shared takes an nnx.Variable, got {type(param).__name__}")
    return not param.get_metadata("shared", False)


class MegatronModule(nnx.Module):
    """An NNX module with a configuration and what Megatron expects of every model.

    Args:
        config: `jax_te.config.TransformerConfig` or any other hashable object; static.

    Raises:
        TypeError: if ``config`` is not hashable: modules are jitted, and their configuration is part of the cache key.

    Source: ``megatron.core.transformer.module.MegatronModule``.

    >>> class Block(MegatronModule):
    ...     def __init__(self, config, *, rngs):
    ...         super().__init__(config)
    ...         self.fc1 = nnx.Linear(2, 4, rngs=rngs)
    >>> list(Block(None, rngs=nnx.Rngs(0)).state_dict())
    ['fc1.bias', 'fc1.kernel']
    """

    def __init__(self, config: Any):
        super().__init__()
        try:
            hash(config)
        except TypeError:
            raise TypeError(
                f"config must be hashable, because it selects code under jit; got {type(config).__name__}. "
                "Declare it with @dataclass(frozen=True)"
            ) from None
        self.config = config

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Arrays by dotted name, see `jax_te.megatron.state_dict`.

        Args:
            destination: a dict to add them to, which is then returned.
            prefix: in front of every name, with its dot.
            keep_vars: give the Variables, not their arrays.
        """
        destination = {} if destination is None else destination
        destination.update(state_dict(self, prefix, keep_vars))
        return destination

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """What a checkpoint holds of this module: its `state_dict`, unless a subclass says otherwise."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of every array by name, see `jax_te.megatron.sharded_state_dict`.

        Submodules that have this method are asked for their part.

        Raises:
            ValueError: for ``sharded_offsets`` that are not empty.
        """
        return sharded_state_dict(self, prefix, sharded_offsets, metadata)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Put arrays of a `state_dict` into this module, see `jax_te.megatron.load_state_dict`.

        Raises:
            ValueError: listing every difference in names, shapes and dtypes.
        """
        return load_state_dict(self, state_dict, strict)

    def set_is_first_microbatch(self) -> None:
        """Set ``is_first_microbatch`` on every submodule that has it, if the configuration quantizes.

        It does where ``config.fp8``, ``config.fp4`` or ``config.quant_recipe`` is there and not None, and leaves out
        submodules whose ``disable_parameter_transpose_cache`` is true. The attribute is static: a jitted function is
        traced again where it changes. Megatron remembers the submodules of the first call; here they are looked up each
        time, since ``nnx.merge`` makes new ones.
        """
        if any(getattr(self.config, name, None) is not None for name in _QUANTIZED_BY):
            self._set_everywhere("is_first_microbatch", True, unless="disable_parameter_transpose_cache")

    def set_symmetric_ar(self, set_to: str | None = None) -> None:
        """Set ``symmetric_ar_type`` on every submodule that has it.

        Megatron writes another attribute, which nothing reads; this one sets the real one.

        Raises:
            AssertionError: for a value that is not in `SYMMETRIC_AR_TYPES`.
        """
        if set_to not in SYMMETRIC_AR_TYPES:
            raise AssertionError(f"set_to must be one of {SYMMETRIC_AR_TYPES}, got {set_to!r}")
        self._set_everywhere("symmetric_ar_type", set_to)

    def refresh_cache(self) -> None:
        """Call this after parameters were changed from outside: what is derived from them is dropped.

        Here that is the quantized kernels that layers keep between microbatches; a subclass may add its own. Megatron's
        does nothing.
        """
        drop_cached_kernels(self)

    def _set_everywhere(self, name: str, value: Any, *, unless: str = "") -> None:
        for _, module in nnx.iter_modules(self):
            if hasattr(module, name) and not getattr(module, unless, False):
                setattr(module, name, value)
