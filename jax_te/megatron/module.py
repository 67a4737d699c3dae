"""Base class of Megatron's models."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jax_te._validation import checked
from jax_te.config import SYMMETRIC_AR_TYPES, TransformerConfig
from jax_te.layers import TrainingMode, drop_cached_kernels
from jax_te.megatron.sharded_state import sharded_state_dict
from jax_te.megatron.state_dict import StateDicts

_QUANTIZED_BY = ("fp8", "fp4", "quant_recipe")


@checked
def param_is_not_shared(param: nnx.Variable) -> bool:
    """Return False if the metadata of a parameter has a true ``shared``: a count of parameters then skips it.

    Raises:
        TypeError: if it is not an ``nnx.Variable``; an array carries no marks.

    Source: ``megatron.core.transformer.module.param_is_not_shared``.

    >>> param_is_not_shared(nnx.Param(jnp.ones(2))), param_is_not_shared(nnx.Param(jnp.ones(2), shared=True))
    (True, False)
    """
    return not param.get_metadata("shared", False)


def check_input_norms(config: TransformerConfig) -> None:
    """Raise ValueError for a configuration without norms in front of blocks, which Megatron's blocks begin with."""
    if not config.block_input_layernorm:
        raise ValueError(
            "block_input_layernorm=False is for jax_te.layers.TransformerLayer and GPTModel; Megatron's blocks have "
            "their norm in front, so leave it out"
        )


class MegatronModule(StateDicts, TrainingMode):
    """An NNX module with a configuration and the methods that Megatron expects of every model.

    Args:
        config: `jax_te.config.TransformerConfig` or any other hashable object; static.

    Raises:
        TypeError: if ``config`` is not hashable: modules are jitted, and their configuration is part of the cache key.

    Source: ``megatron.core.transformer.module.MegatronModule``.

    >>> from jax_te.layers import Linear
    >>> class Block(MegatronModule):
    ...     def __init__(self, config, *, rngs):
    ...         super().__init__(config)
    ...         self.linear_fc1 = Linear(2, 4, rngs=rngs)
    >>> {name: array.shape for name, array in Block(None, rngs=nnx.Rngs(0)).state_dict().items()}
    {'linear_fc1.bias': (4,), 'linear_fc1.weight': (4, 2)}
    """

    def __init__(self, config: Any):
        super().__init__()
        try:
            # Tested by calling: a frozen dataclass with a list as a field has a __hash__ that raises.
            hash(config)
        except TypeError:
            raise TypeError(
                f"config must be hashable, because it selects code under jit; got {type(config).__name__}. "
                "Declare it with @dataclass(frozen=True)"
            ) from None
        self.config = config

    @checked
    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return this module's part of a checkpoint: its `state_dict`, unless a subclass overrides this method."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    sharded_state_dict = sharded_state_dict

    def set_is_first_microbatch(self) -> None:
        """Set ``is_first_microbatch`` on every submodule that has this attribute, if the configuration quantizes.

        A configuration quantizes if ``fp8``, ``fp4`` or ``quant_recipe`` exists and is not None. Submodules whose
        ``disable_parameter_transpose_cache`` is true are skipped. A layer drops its cached kernels; its next call
        quantizes and caches them, and the later calls use these: call this method once a step, before the first
        microbatch. See `QuantizableModule.is_first_microbatch`.
        """
        # Looked up in each call: nnx.merge makes new modules, so the first call's, which Megatron caches, may be gone.
        if self._quantizes:
            self._set_everywhere("is_first_microbatch", True, unless="disable_parameter_transpose_cache")

    @checked
    def set_symmetric_ar(self, set_to: str | None = None) -> None:
        """Set ``symmetric_ar_type`` on every submodule that has this attribute.

        Megatron's method sets another attribute, which nothing reads.

        Raises:
            AssertionError: for a value that is not in `SYMMETRIC_AR_TYPES`.
        """
        if set_to not in SYMMETRIC_AR_TYPES:
            raise AssertionError(f"set_to must be one of {SYMMETRIC_AR_TYPES}, got {set_to!r}")
        self._set_everywhere("symmetric_ar_type", set_to)

    def refresh_cache(self) -> None:
        """Drop values derived from parameters; call this after parameters were changed from outside.

        These are the cached kernels of layers; a subclass may add its own. Megatron's method does nothing.
        """
        drop_cached_kernels(self)

    @property
    def _quantizes(self) -> bool:
        return any(getattr(self.config, name, None) is not None for name in _QUANTIZED_BY)

    def _set_everywhere(self, name: str, value: Any, *, unless: str = "") -> None:
        for _, module in nnx.iter_modules(self):
            # hasattr, not a class, so that users' layers with the attribute take part.
            if hasattr(module, name) and not getattr(module, unless, False):
                setattr(module, name, value)
