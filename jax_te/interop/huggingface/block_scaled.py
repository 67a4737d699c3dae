"""FP8 tensors with a scale for each block of 128 x 128 values, DeepSeek's form: dequantized, or kept as they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jax_te.errors import mismatch
from jax_te.interop.huggingface.config_json import ConfigJson
from jax_te.interop.huggingface.mxfp4 import finite, read_mxfp4
from jax_te.interop.tables import Entry, Fields, Index, Sizes, entry_reader
from jax_te.layers import quantizable_kernels
from jax_te.quantize import BlockQuantizer, Guard, QuantizedKernel, Quantizer

Choice = Literal["dequantize", "keep"]
_BLOCK, _SCALE, _E4M3 = 128, "_scale_inv", np.dtype(ml_dtypes.float8_e4m3fn)

_INSTEAD = "save the model with its masters, and without block_scaled"


@dataclass(frozen=True)
class BlockScaled:
    """A tensor ``[R, C]`` in E4M3 with ``scale [ceil(R / 128), ceil(C / 128)]``; its values are their products."""

    data: np.ndarray
    scale: np.ndarray
    kept: bool = False
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.data.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the values, fp32 unless another dtype is asked for."""
        with np.errstate(over="ignore"):
            values = self.data.astype(np.float32) * self.scales()
        return np.asarray(finite(values, self.name), dtype)

    def scales(self) -> np.ndarray:
        """Return the scale of each value, fp32."""
        return _scale_of_each(self.scale, self.shape)


def _scale_of_each(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the scale of each value of a matrix of this shape, fp32, from that of each block."""
    rows, columns = shape
    return blocks.astype(np.float32).repeat(_BLOCK, 0)[:rows].repeat(_BLOCK, 1)[:, :columns]


FolderTensor: TypeAlias = Any
"""An array, anything that ``np.asarray`` reads, a `BlockScaled` or a `PackedMXFP4`."""


def read_block_scaled(
    values: dict[str, Any], stored: Mapping[str, np.ndarray], choice: Choice | None
) -> dict[str, FolderTensor]:
    """Return the tensors of a folder, those in FP8 or MXFP4 together with their scales.

    Args:
        values: the fields of ``config.json``, of which ``quantization_config`` is taken out.
        stored: all stored tensors.
        choice: treatment of tensors in FP8.

    Raises:
        ValueError: for another format than this one, without a choice, and for a choice if nothing is quantized.
        CheckpointMismatchError: for tensors without scales, scales without tensors, and scales that do not fit.
    """
    name = "quantization_config"
    said = ConfigJson({name: values.pop(name, None)}, "config.json").take(name, dict, {})
    if not said:
        if choice is not None:
            raise ValueError(
                f"block_scaled={choice!r} is for a folder with a quantization_config; leave it out (of commands: "
                "--dequantize)"
            )
        return dict(stored)
    form = ConfigJson(said, "config.json: quantization_config")
    method = form.take("quant_method", str, "")
    if method == "mxfp4":
        return _read_mxfp4(form, stored, choice)
    if method != "fp8":
        raise form.refused("quant_method", said.get("quant_method"), "only 'fp8' and 'mxfp4' are supported")
    form.expect("fmt", "e4m3")
    form.expect("activation_scheme", "dynamic")
    form.expect("scale_fmt", "ue8m0", "float")  # how activations are scaled elsewhere; scales of weights are stored
    if form.take("weight_block_size", list, []) != [_BLOCK, _BLOCK]:
        raise form.refused(
            "weight_block_size", said.get("weight_block_size"), f"only [{_BLOCK}, {_BLOCK}] is supported"
        )
    # The tensors show which modules those are.
    form.take("modules_to_not_convert", list, [])
    form.take("ignored_layers", list, [])
    form.finish()
    if choice not in ("dequantize", "keep"):
        raise ValueError(
            "quantization_config: the folder's kernels are FP8 with a scale for each block. Choose what they become: "
            "block_scaled='dequantize' multiplies them out (jax-te convert and eval: --dequantize), and 'keep' stores "
            f"them as they are, under autocast(Float8BlockScaling(use_f32_scales=True)); got {choice!r}"
        )
    scales = {name.removesuffix(_SCALE): tensor for name, tensor in stored.items() if name.endswith(_SCALE)}
    tensors: dict[str, FolderTensor] = {name: tensor for name, tensor in stored.items() if not name.endswith(_SCALE)}
    wrong = sorted(scales.keys() ^ {name for name, tensor in stored.items() if tensor.dtype == _E4M3})
    lines = [f"{name} has {'no tensor in E4M3' if name in scales else f'no {_SCALE[1:]}'}" for name in wrong]
    for name in sorted(scales.keys() - set(wrong)):
        problem = _problem(stored[name], scales[name])
        lines += [f"{name}{_SCALE} {problem}"] if problem else []
        tensors[name] = BlockScaled(stored[name], scales[name], kept=choice == "keep", name=name)
    if lines:
        raise mismatch("tensors in FP8 and their scales do not fit:", lines)
    return tensors


def _read_mxfp4(form: Fields, stored: Mapping[str, np.ndarray], choice: Choice | None) -> dict[str, FolderTensor]:
    form.take("modules_to_not_convert", list, [])  # the tensors show which modules those are
    form.finish()
    if choice != "dequantize":
        raise ValueError(
            "quantization_config: the folder's experts are in MXFP4, whose values are read with "
            f"block_scaled='dequantize' (jax-te convert and eval: --dequantize); got {choice!r}"
        )
    return read_mxfp4(stored)


def _problem(data: np.ndarray, scale: np.ndarray) -> str:
    blocks = [-(-size // _BLOCK) for size in data.shape]
    if data.ndim != 2 or list(scale.shape) != blocks:
        return f"is {list(scale.shape)} and must be {blocks}, for {list(data.shape)} values, of two axes"
    if scale.dtype not in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        return f"is {scale.dtype} and must be float32 or bfloat16"
    wide = scale.astype(np.float32)
    return "" if (np.isfinite(wide) & (wide > 0.0)).all() else "has scales that are not positive numbers"


def hold_block_scaled(model: nnx.Module, entries: Mapping[str, Entry], tensors: Mapping[str, FolderTensor]) -> None:
    """Replace kernels of a model of shapes that keep FP8 tensors by quantized ones, under the ambient recipe.

    Raises:
        ValueError: for a kernel that the recipe stores in another form.
    """
    waiting = {
        path: entry
        for path, entry in entries.items()
        if any(getattr(tensors[name], "kept", False) for name in entry.names)
    }
    for path, module, kernel in quantizable_kernels(model):
        if (entry := waiting.pop("/".join(map(str, path)), None)) is None:
            continue
        quantizer = module.kernel_quantizer(kernel)
        same = _scaled_in_blocks(quantizer)
        pieces = [tensors[name] for name in entry.names]
        scales = [piece.scale for piece in pieces if isinstance(piece, BlockScaled)]
        why = f"the recipe stores it as {quantizer}" if same is None else ""
        if entry.experts is not None:
            why = "kernels of experts are not kept in FP8"
        elif len(scales) < len(pieces):
            why = "its tensors are not all in FP8"
        elif same is not None and same.power_of_two and not all(map(_powers_of_two, scales)):
            why = "its scales are not powers of two, and the recipe's are"
        if why:
            raise ValueError(
                f"block_scaled='keep' cannot keep {'/'.join(map(str, path))}: {why}; load it inside of "
                "autocast(Float8BlockScaling(use_f32_scales=True)), or give block_scaled='dequantize'"
            )
        # Not in nnx.eval_shape, which on a mesh takes a Variable's value for one array, and a kept kernel is several.
        variable = getattr(module, kernel)
        variable.set_value(
            jax.eval_shape(functools.partial(module.quantized, kernel, portable=True), variable.get_value())
        )
    if waiting:
        raise ValueError(
            f"block_scaled='keep' keeps kernels of layers alone, and {', '.join([*waiting][:8])} is another parameter "
            "in FP8; give block_scaled='dequantize'"
        )


def _powers_of_two(scale: np.ndarray) -> bool:
    return bool((np.frexp(scale.astype(np.float32))[0] == 0.5).all())


def reader(
    path: str, entries: Mapping[str, Entry], tensors: Mapping[str, FolderTensor], sizes: Sizes
) -> Callable[[Index, Any], np.ndarray]:
    """Return a function of an index and a dtype that reads this part of an array of the parameters.

    Args:
        path: path of the array; for an array of a kernel that is kept quantized, a path below the kernel's.
        entries: entries of all parameters.
        tensors: tensors of the folder.
        sizes: sizes of the axes.

    Raises:
        ValueError: for scales that do not cover whole blocks in our kernel's layout.
    """
    _, guard, constant = path.rpartition("/guard/")
    if guard:
        return lambda index, dtype: np.asarray(getattr(Guard.new(), constant), dtype)[..., *index]
    name, kept, part = path.partition("/form/rowwise/")
    if not kept:
        return entry_reader(path, entries, tensors, sizes)
    entry = entries[name]
    scaled = {tensor: tensors[tensor] for tensor in entry.names}
    if part != "scale_inv":
        return functools.partial(entry.read, {tensor: stored.data for tensor, stored in scaled.items()}, sizes)
    shape = entry.shape(sizes)
    scales = {tensor: stored.scales() for tensor, stored in scaled.items() if isinstance(stored, BlockScaled)}
    matrix = entry.read(scales, sizes, (slice(None),) * len(shape), np.dtype(np.float32)).reshape(shape[0], -1)
    blocks = _blocks(matrix, name, shape, "give block_scaled='dequantize'")
    return lambda index, dtype: blocks[index].astype(dtype)


def _blocks(scales: np.ndarray, name: str, shape: tuple[int, ...], instead: str) -> np.ndarray:
    """Return the scale of each block of a matrix, from the scale of each value."""
    blocks = scales[::_BLOCK, ::_BLOCK].copy()
    if not np.array_equal(_scale_of_each(blocks, scales.shape), scales):
        raise ValueError(
            f"block_scaled='keep' cannot keep {name} {list(shape)}: its blocks of {_BLOCK} x {_BLOCK} are not those of "
            f"its tensors, since heads or features are not multiples of that; {instead}"
        )
    return blocks


def held_kernels(model: nnx.Module) -> dict[str, QuantizedKernel]:
    """Return the kernels of a model that are stored quantized, by path.

    Raises:
        ValueError: for one in another form than FP8 with a scale for each block, and if there is none.
    """
    held: dict[str, QuantizedKernel] = {}
    for path, module, name in quantizable_kernels(model):
        kernel, where = getattr(module, name).get_value(), "/".join(map(str, path))
        if isinstance(kernel, QuantizedKernel):
            if kernel.is_opaque or _scaled_in_blocks(kernel.quantizer) is None:
                raise ValueError(
                    f"block_scaled='keep' writes FP8 with a scale for each block of {_BLOCK} x {_BLOCK}, and {where} "
                    f"is stored as {kernel.quantizer}; {_INSTEAD}"
                )
            held[where] = kernel
    if not held:
        raise ValueError(
            "block_scaled='keep' writes kernels that are stored quantized, and the model has none; load it with "
            "block_scaled='keep', create its train state with fp8_param, or leave block_scaled out"
        )
    return held


def written_scales(
    path: str, kernel: QuantizedKernel, entry: Entry, sizes: Sizes, fetch: Callable[[Any], np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the scales of the tensors of a kernel, by name; its values, which are far more, stay where they are.

    Args:
        path: path of the kernel.
        kernel: a kernel that is stored quantized.
        entry: its entry in the architecture's table.
        sizes: sizes of the axes.
        fetch: function that returns an array of the kernel in host memory.

    Raises:
        ValueError: for blocks that are not blocks in their layout.
        TypeError: if arithmetic was done on the kernel's arrays.
    """
    if kernel.guard is not None:
        jax.tree.map(fetch, kernel.guard).check()
    k, *features = kernel.shape
    values = _scale_of_each(fetch(kernel.form.rowwise.scale_inv), (k, math.prod(features))).reshape(kernel.shape)
    return {name + _SCALE: _blocks(scales, path, kernel.shape, _INSTEAD) for name, scales in entry.write(values, sizes)}


def quantization_config(plain: list[str]) -> dict[str, Any]:
    """Return the field of ``config.json``; ``plain`` are the names of tensors that are not quantized."""
    modules = [name.removesuffix(".weight") for name in plain if name.endswith(".weight")]
    form = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return {**form, "weight_block_size": [_BLOCK, _BLOCK], "modules_to_not_convert": modules}


def _scaled_in_blocks(quantizer: Quantizer | None) -> BlockQuantizer | None:
    """Return a quantizer to E4M3 with a scale for each block of 128 x 128; None for another."""
    if isinstance(quantizer, BlockQuantizer) and quantizer.two_dimensional and quantizer.dtype == _E4M3:
        return quantizer
    return None
