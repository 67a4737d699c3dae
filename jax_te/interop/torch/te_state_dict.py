"""State dicts of ``transformer_engine.pytorch`` for the layers of this package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from jax_te._validation import checked
from jax_te.errors import CheckpointMismatchError
from jax_te.megatron import Layout, load_variables, projection_groups

_NAMES = {"kernel": "weight", "scale": "weight", "wi_kernel": "fc1_weight", "wi_bias": "fc1_bias"}
_NAMES |= {"wo_kernel": "fc2_weight", "wo_bias": "fc2_bias"}
_FUSED = {"scale": "layer_norm_weight", "ln_bias": "layer_norm_bias"}
# Our name → te.pytorch's name with a norm, and without one.
_PROJECTIONS = {"qkv": ("layernorm_qkv", "qkv"), "query": ("layernorm_query", "query_layer")}
_SEPARATE = ("query", "key", "value")

_Shape = tuple[int, ...]


@checked
def load_te_state_dict(module: nnx.Module, arrays: Mapping[str, Any], *, prefix: str = "") -> None:
    """Load a state dict of a module of ``transformer_engine.pytorch`` into the layer of the same name here.

    Weights ``[out, in]`` become kernels ``[in, *out]``. Queries, keys and values may be one parameter, group by group
    (``fuse_qkv_params=True``), or ``query_weight``, ``key_weight`` and ``value_weight``. ``_extra_state`` is left out;
    quantizer states stay as they are. If anything does not fit, nothing is changed. Kernels of te.jax, ``[in, out]``,
    are refused by their shapes; a square one has the same shape either way, so transpose all of them.

    Args:
        module: a layer of `jax_te.layers`: `Linear`, `LayerNormLinear`, `LayerNormMLP`, a norm, `MultiheadAttention`,
            `TransformerLayer`, or a module of these.
        arrays: arrays by name, as `read_torch_file` returns them.
        prefix: prefix of the names in ``arrays``, with its dot.

    Raises:
        CheckpointMismatchError: for missing and unexpected names, and for other shapes and dtypes.

    Source: ``load_state_dict`` of ``transformer_engine.pytorch``'s modules.

    >>> from jax_te.layers import Linear
    >>> layer = Linear(2, 3, rngs=nnx.Rngs(0))
    >>> load_te_state_dict(layer, {"weight": np.ones((3, 2), np.float32), "bias": np.zeros(3, np.float32)})
    >>> layer.kernel[...].shape
    (2, 3)
    """
    # By attribute names, also inside of modules whose state dicts have Megatron's names.
    variables = {
        ".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }
    own = {
        name: tuple(variable.shape) for name, variable in variables.items() if hasattr(variable.get_value(), "shape")
    }
    owners = {".".join(map(str, path)): node for path, node in nnx.iter_graph(module)}
    wanted = {name: _wanted(name, own, arrays, prefix) for name in own}
    _check(module, own, wanted, arrays, prefix)
    laid_out: dict[str, Any] = {}
    for name, parts in wanted.items():
        groups = _groups(name, owners)
        array = _fused([np.asarray(arrays[part]) for part in parts], groups)
        if prefix + _their_name(name, own) not in parts and len(parts) == 1:
            array = _part(array, name, own, groups)
        laid_out[name] = _laid_out(array, own[name], name.endswith("kernel"), groups)
    load_variables(module, [(name, variables[name], None) for name in own], laid_out)


def _wanted(name: str, own: Mapping[str, _Shape], arrays: Mapping[str, Any], prefix: str) -> dict[str, _Shape]:
    """Return te.pytorch's arrays that make up a parameter, each with its required shape."""
    theirs = prefix + _their_name(name, own)
    parts = _separate(theirs, name, own[name])
    whole = _whole(theirs)
    if theirs not in arrays and any(part in arrays for part in parts):
        return parts
    if theirs not in arrays and whole in arrays:
        *outer, _, attribute = name.split(".")
        shapes = [_their_shape(name, own[".".join((*outer, layer, attribute))]) for layer in _SEPARATE]
        return {whole: (sum(shape[0] for shape in shapes), *shapes[0][1:])}
    return {theirs: _their_shape(name, own[name])}


def _their_shape(name: str, shape: _Shape) -> _Shape:
    """Return te.pytorch's layout of a shape: ``[out, in]`` of a kernel, ``[out]`` of a bias."""
    if name.endswith("kernel"):
        return math.prod(shape[1:]), shape[0]
    return (math.prod(shape),) if name.endswith("bias") else shape


def _check(
    module: nnx.Module,
    own: Mapping[str, _Shape],
    wanted: Mapping[str, Mapping[str, _Shape]],
    arrays: Mapping[str, Any],
    prefix: str,
) -> None:
    """Raise CheckpointMismatchError with all unexpected or missing names and wrong shapes of ``arrays``."""
    shapes = {part: (name, shape) for name, parts in wanted.items() for part, shape in parts.items()}
    given = {name for name in arrays if name.startswith(prefix) and not name.endswith("_extra_state")}
    missing, unexpected = sorted(shapes.keys() - given), sorted(given - shapes.keys())
    problems = []
    if missing or unexpected:
        problems.append(f"missing {missing[:8]}, unexpected {unexpected[:8]}")
    for part in sorted(shapes.keys() & given):
        (name, shape), given = shapes[part], tuple(np.shape(arrays[part]))
        if given != shape:
            # A kernel of te.jax has the same number of elements, so only its shape distinguishes it.
            turned = name.endswith("kernel") and given in (shape[::-1], own[name])
            hint = " ([in, out] kernels of te.jax: transpose)" if turned else ""
            problems.append(f"{part} is {list(given)} and must be {list(shape)}{hint}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointMismatchError(
            f"the state dict does not fit {type(module).__name__}: {'; '.join(problems[:8])}{more}"
        )


def _their_name(name: str, own: Mapping[str, _Shape]) -> str:
    """Return te.pytorch's name of a parameter."""
    *path, attribute = name.split(".")
    if _is_separate(name, own):
        *outer, part = path
        normed = ".".join((*outer, "layernorm", "scale")) in own
        kind = _NAMES.get(attribute, attribute)
        last = f"layer_norm_{kind}" if part == "layernorm" else f"{part}_{kind}"
        return ".".join((*outer, _PROJECTIONS["qkv"][0 if normed else 1], last))
    # A kernel with a preceding norm is stored next to the norm's parameters.
    behind_norm = sum(".".join((*path, attribute)) in own for attribute in ("scale", "kernel", "wi_kernel")) > 1
    if path and path[-1] in _PROJECTIONS:
        path[-1] = _PROJECTIONS[path[-1]][0 if behind_norm else 1]
    norms = _FUSED if behind_norm else {}
    return ".".join((*path, norms.get(attribute) or _NAMES.get(attribute, attribute)))


def _separate(theirs: str, name: str, shape: _Shape) -> dict[str, _Shape]:
    """Return the parts of a parameter under ``fuse_qkv_params=False`` with their shapes; empty if it has none."""
    *path, last = theirs.split(".")
    layer = name.split(".")[-2:-1]
    if layer not in (["qkv"], ["key_value"]) or len(shape) < 2 or not name.endswith(("kernel", "bias")):
        return {}
    inputs, components = shape[: int(name.endswith("kernel"))], shape[-2]
    counts = {"query": components - 2, "key": 1, "value": 1} if layer == ["qkv"] else {"key": 1, "value": 1}
    return {".".join((*path, f"{part}_{last}")): (n * shape[-1], *inputs) for part, n in counts.items()}


def _is_separate(name: str, own: Mapping[str, _Shape]) -> bool:
    """Return whether a parameter belongs to an attention with separate layers for queries, keys and values."""
    path = name.split(".")
    part = path[-2] if len(path) > 1 else None
    return part in (*_SEPARATE, "layernorm") and ".".join((*path[:-2], "value.kernel")) in own


def _whole(theirs: str) -> str:
    """Return the name that a part has under ``fuse_qkv_params=True``."""
    path, _, last = theirs.rpartition(".")
    part, _, kind = last.partition("_")
    return f"{path}.{kind}" if part in _SEPARATE else theirs


def _part(array: np.ndarray, name: str, own: Mapping[str, _Shape], groups: int) -> np.ndarray:
    """Return the queries, keys or values of an array that contains them group by group."""
    *outer, part, attribute = name.split(".")
    sizes = [math.prod(own[".".join((*outer, layer, attribute))]) for layer in _SEPARATE]
    rows = [size * len(array) // sum(sizes) // groups for size in sizes]
    at = _SEPARATE.index(part)
    split = array.reshape(groups, -1, *array.shape[1:])[:, sum(rows[:at]) : sum(rows[: at + 1])]
    return split.reshape(-1, *array.shape[1:])


def _groups(name: str, owners: Mapping[str, Any]) -> int:
    """Return the number of groups of heads into which te.pytorch orders the rows of a parameter."""
    *path, last = name.split(".")[:-1] or [""]
    return projection_groups(owners.get(".".join(path)), last)


def _fused(parts: list[np.ndarray], groups: int) -> np.ndarray:
    """Return queries, keys and values as one array: each group's queries, key and value in turn."""
    if len(parts) == 1:
        return parts[0]
    split = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(split, 1).reshape(-1, *parts[0].shape[1:])


def _laid_out(array: np.ndarray, shape: _Shape, kernel: bool, groups: int) -> np.ndarray:
    """Return an array in te.pytorch's layout in ours."""
    if not (kernel or len(shape) > 1):
        return array
    return Layout(shape, (), kernel, groups if len(shape) > 1 + kernel else 1).from_megatron(array)
