"""Models whose parameters and computation are in fp16 or bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te._validation import checked, float_dtype, log_once
from jax_te.layers import drop_cached_kernels
from jax_te.megatron.module import MegatronModule
from jax_te.megatron.sharded_state import sharded_state_dict
from jax_te.megatron.state_dict import IncompatibleKeys, load_state_dict, state_dict
from jax_te.quantize import QuantizerState
from jax_te.typing import Array, DTypeLike

_Marked = TypeVar("_Marked", nnx.Variable, nnx.Module)

_FLOAT_TYPES, _HALF_TYPES, _BF16_TYPES = ("float32",), ("float16",), ("bfloat16",)  # Megatron's names
_WIDE_FLOATS = ("float64", *_FLOAT_TYPES, *_BF16_TYPES, *_HALF_TYPES)


@checked
def conversion_helper(val: Any, conversion: Callable[[Any], Any]) -> Any:
    """Return ``val`` with ``conversion`` applied to every value in nested tuples and lists.

    Dicts and other pytrees are passed to ``conversion`` whole. Named tuples keep their class (Megatron turns them into
    tuples).

    Source: ``megatron.core.transformer.module.conversion_helper``.

    >>> conversion_helper([1, (2, [3])], lambda x: 10 * x)
    [10, (20, [30])]
    """
    if not isinstance(val, tuple | list):
        return conversion(val)
    # Only tuples and lists, as in Megatron: a dict often holds masks and ids beside activations.
    converted = [conversion_helper(item, conversion) for item in val]
    if isinstance(val, tuple) and hasattr(val, "_fields"):
        # A named tuple takes its fields one by one, unlike other tuples.
        return type(val)(*converted)
    return tuple(converted) if isinstance(val, tuple) else converted


@checked
def fp32_to_float16(val: Any, float16_convertor: Callable[[Array], Array]) -> Any:
    """Return ``val`` with ``float16_convertor`` applied to every fp32 array in nested tuples and lists.

    Source: ``megatron.core.transformer.module.fp32_to_float16``.

    >>> x, ids = fp32_to_float16((jnp.ones(2), jnp.arange(2)), lambda x: x.astype(jnp.bfloat16))
    >>> str(x.dtype), str(ids.dtype)
    ('bfloat16', 'int32')
    """
    return conversion_helper(val, lambda x: float16_convertor(x) if _has_dtype(x, *_FLOAT_TYPES) else x)


def float16_to_fp32(val: Any) -> Any:
    """Return ``val`` with every fp16 and bf16 array in nested tuples and lists cast to fp32.

    Source: ``megatron.core.transformer.module.float16_to_fp32``.

    >>> str(float16_to_fp32([jnp.ones(2, jnp.float16)])[0].dtype)
    'float32'
    """
    halves = _HALF_TYPES + _BF16_TYPES
    return conversion_helper(val, lambda x: x.astype(jnp.float32) if _has_dtype(x, *halves) else x)


@checked
def mark_keep_in_fp32(variable_or_module: _Marked) -> _Marked:
    """Return the argument, marked: `Float16Module` does not cast a marked Variable, or any Variable of a marked module.

    The mark is the entry ``keep_in_fp32`` of the Variable's metadata, so ``nnx.split`` and ``jit`` preserve it. It does
    not change the computation: this package's layers cast kernels to the dtype of their input.

    Raises:
        TypeError: for an argument that is neither.

    Source: ``megatron.core.transformer.module.mark_keep_in_fp32``.

    >>> mark_keep_in_fp32(nnx.Param(jnp.ones(2))).get_metadata("keep_in_fp32")
    True
    """
    if isinstance(variable_or_module, nnx.Variable):
        variable_or_module.set_metadata("keep_in_fp32", True)
    else:
        for variable in _variables(variable_or_module):
            variable.set_metadata("keep_in_fp32", True)
    return variable_or_module


@checked
def convert_module_to_dtype_except_fp32_marked(module: nnx.Module, dtype: DTypeLike) -> None:
    """Cast a module's floating-point Variables in place, except those marked by `mark_keep_in_fp32`.

    Variables of every kind that hold an array are cast, including abstract ones (``jax.ShapeDtypeStruct``). Not cast
    are quantizer state, which is fp32 by definition (in Transformer Engine it is not a buffer of the module);
    parameters stored quantized; and arrays in 8 bits or fewer, which are quantized values. Cached kernels are dropped.

    Args:
        module: changed in place.
        dtype: fp32, bf16 or fp16.

    Raises:
        ValueError: for another dtype.

    Source: ``megatron.core.transformer.module.convert_module_to_dtype_except_fp32_marked``.

    >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> _ = mark_keep_in_fp32(layer.bias)
    >>> convert_module_to_dtype_except_fp32_marked(layer, jnp.bfloat16)
    >>> str(layer.kernel.dtype), str(layer.bias.dtype)
    ('bfloat16', 'float32')
    """
    dtype = float_dtype("dtype", dtype)
    for variable in _variables(module):
        if isinstance(variable, QuantizerState) or variable.get_metadata("keep_in_fp32", False):
            continue
        # Only arrays: trees, such as quantized kernels, have several dtypes.
        value: Any = variable.get_value()
        if isinstance(value, jax.ShapeDtypeStruct) and value.dtype.name in _WIDE_FLOATS:
            variable.set_value(value.update(dtype=dtype))
        elif isinstance(value, jax.Array) and _has_dtype(value, *_WIDE_FLOATS):
            variable.set_value(value.astype(dtype))
    drop_cached_kernels(module)


class ActivationDtype(nnx.Module):
    """Base of models whose attribute ``compute_dtype`` is the dtype of their activations, which `Float16Module` sets.

    >>> class Model(ActivationDtype):
    ...     def __init__(self):
    ...         self.compute_dtype = jnp.dtype("float32")
    >>> class Config:
    ...     fp16, bf16 = False, True
    >>> str(Float16Module(Config(), Model()).module.compute_dtype)
    'bfloat16'
    """

    compute_dtype: np.dtype


@checked
class Float16Module(MegatronModule):
    """A model in fp16 or bf16: parameters are cast once, inputs at the start of a call, outputs back to fp32.

    The wrapped module's parameters and other floating-point Variables are cast in place, except those marked by
    `mark_keep_in_fp32` and quantizer state. The attribute ``compute_dtype`` of a model of `jax_te.models` is set, too,
    wherever it stands in the module: it determines the dtype of activations, as the parameters' dtype does in PyTorch.
    A module of your own keeps what it has under that name, which is logged, unless it is an `ActivationDtype`.
    `jax_te.training.TrainState` holds fp32 masters.

    Args:
        config: hashable object whose attribute ``fp16`` or ``bf16`` is True.
        module: the model; cast in place.
        pre_process: whether this is the first pipeline stage, so that inputs are cast. None: the module's own
            ``pre_process``, or True if it has none; JAX has no process groups that could tell.
        post_process: whether this is the last pipeline stage, so that outputs are cast back. None: likewise.
        vp_size: number of virtual pipeline stages on each pipeline rank; None or 1 without a virtual pipeline.
        vp_stage: number of this virtual stage, from 0. None: the module's own ``vp_stage``, if it has one.
            Inputs are cast on the first, outputs on the last.

    Raises:
        ValueError: if neither or both of ``fp16`` and ``bf16`` are set (Megatron takes fp16 if both are), or
            ``vp_stage`` is not one of ``vp_size`` stages.
        AssertionError: for a ``vp_stage`` other than 0 without a virtual pipeline.
        TypeError: for a config that is not hashable.

    Source: ``megatron.core.transformer.module.Float16Module``.

    >>> from jax_te.layers import Linear
    >>> class Config:
    ...     fp16, bf16 = False, True
    >>> model = Float16Module(Config(), Linear(16, 16, rngs=nnx.Rngs(0)))
    >>> str(model.module.kernel.dtype), str(model(jnp.ones((2, 16))).dtype)
    ('bfloat16', 'float32')
    """

    def __init__(
        self,
        config: Any,
        module: nnx.Module,
        *,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_size: int | None = None,
        vp_stage: int | None = None,
    ):
        super().__init__(config)
        self.fp16, self.bf16 = bool(getattr(config, "fp16", False)), bool(getattr(config, "bf16", False))
        if self.fp16 == self.bf16:
            raise ValueError(
                f"{type(config).__name__} must have exactly one of fp16 and bf16 True, got fp16={self.fp16}, "
                f"bf16={self.bf16}"
            )
        # In an interleaved pipeline a rank has several stages, of which only one begins or ends the model.
        vp_stage = getattr(module, "vp_stage", None) if vp_stage is None else vp_stage
        first, last = _virtual_ends(vp_size, vp_stage)
        self.vp_size, self.vp_stage = vp_size, vp_stage
        self.pre_process = getattr(module, "pre_process", True) if pre_process is None else pre_process
        self.post_process = getattr(module, "post_process", True) if post_process is None else post_process
        self.casts_inputs, self.casts_outputs = self.pre_process and first, self.post_process and last
        self.dtype = jnp.dtype(jnp.float16 if self.fp16 else jnp.bfloat16)
        convert_module_to_dtype_except_fp32_marked(module, self.dtype)
        for _, submodule in nnx.iter_modules(module):
            if isinstance(submodule, ActivationDtype):
                submodule.compute_dtype = self.dtype
            elif (own := getattr(submodule, "compute_dtype", None)) is not None and own != self.dtype:
                log_once(
                    f"{type(submodule).__name__} keeps its compute_dtype {own}, though "
                    f"Float16Module runs in {self.dtype}: set it, or derive the class from jax_te.megatron."
                    "ActivationDtype, whose compute_dtype Float16Module sets"
                )
        self.module = module

    def __call__(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """Call the wrapped module.

        Args:
            inputs: fp32 arrays, also in nested tuples and lists, are cast on the first stage.
            fp32_output: whether to cast fp16 and bf16 results to fp32 on the last stage; no effect on other stages.
            kwargs: arguments passed on unchanged. Megatron's documentation says that they are cast; its code does not
                cast them, and must not: sums over a loss mask, for example, need fp32.
        """
        if self.casts_inputs:
            inputs = fp32_to_float16(inputs, lambda x: x.astype(self.dtype))
        outputs = self.module(*inputs, **kwargs)  # type: ignore[operator]  # a module without __call__ raises
        return float16_to_fp32(outputs) if self.casts_outputs and fp32_output else outputs

    def set_input_tensor(self, input_tensor: Any) -> Any:
        """Pass a pipeline stage's input to the wrapped module.

        Raises:
            TypeError: if the module has no ``set_input_tensor``; a stage's input is then an argument of its call.
        """
        if not hasattr(self.module, "set_input_tensor"):
            raise TypeError(
                f"{type(self.module).__name__} has no set_input_tensor; "
                "pass the stage's input as an argument of the call"
            )
        return self.module.set_input_tensor(input_tensor)  # type: ignore[attr-defined]

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the wrapped module's `state_dict`, whose names have no prefix ``module.``."""
        # A MegatronModule may override the method; any other module has none.
        if isinstance(self.module, MegatronModule):
            return self.module.state_dict(destination, prefix, keep_vars)
        destination = {} if destination is None else destination
        destination.update(state_dict(self.module, prefix, keep_vars))
        return destination

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the wrapped module's dict for a checkpoint."""
        if isinstance(self.module, MegatronModule):
            return self.module.state_dict_for_save_checkpoint(prefix, keep_vars)
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the wrapped module's `sharded_state_dict`, whose names have no prefix ``module.``."""
        if hasattr(self.module, "sharded_state_dict"):
            return self.module.sharded_state_dict(prefix, *args, **kwargs)  # type: ignore[operator]
        return sharded_state_dict(self.module, prefix, *args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Load into the wrapped module; names have no prefix ``module.``. Megatron's method returns nothing.

        Floating-point arrays are cast to the dtypes of the module's own, as torch does, so that an fp32 checkpoint
        loads into a model in half precision. No other function of this package casts what it loads.

        Raises:
            ValueError: listing every other difference.
        """
        own = self.state_dict()
        state_dict = {name: _as_dtype_of(own.get(name), array) for name, array in state_dict.items()}
        if isinstance(self.module, MegatronModule):
            return self.module.load_state_dict(state_dict, strict)
        return load_state_dict(self.module, state_dict, strict)


def _virtual_ends(vp_size: int | None, vp_stage: int | None) -> tuple[bool, bool]:
    """Return whether this is the first, and whether it is the last virtual stage of its pipeline rank."""
    if vp_size is None or vp_size <= 1:
        if vp_stage not in (None, 0):
            raise AssertionError(f"vp_stage {vp_stage} is given, but vp_size {vp_size} means no virtual pipeline")
        return True, True
    if vp_stage is None or not 0 <= vp_stage < vp_size:
        raise ValueError(f"vp_stage must be one of 0, ..., {vp_size - 1} for vp_size {vp_size}, got {vp_stage}")
    return vp_stage == 0, vp_stage == vp_size - 1


def _variables(module: nnx.Module) -> list[nnx.Variable]:
    return [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)]


def _as_dtype_of(own: Any, array: Any) -> Any:
    """Return ``array`` in the dtype of ``own`` if both are floating-point arrays; quantized values are not."""
    cast = _has_dtype(own, *_WIDE_FLOATS) and _has_dtype(array, *_WIDE_FLOATS)
    return array.astype(own.dtype) if cast else array


def _has_dtype(x: Any, *names: str) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and x.dtype.name in names
