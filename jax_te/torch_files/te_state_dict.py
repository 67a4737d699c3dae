"""State dicts of ``transformer_engine.pytorch`` for the layers of this package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from jax_te.errors import CheckpointMismatchError
from jax_te.megatron import load_state_dict, state_dict
from jax_te.megatron.internal import Layout

_NAMES = {"kernel": "weight", "scale": "weight", "wi_kernel": "fc1_weight", "wi_bias": "fc1_bias"}
_NAMES |= {"wo_kernel": "fc2_weight", "wo_bias": "fc2_bias"}
_FUSED = {"scale": "layer_norm_weight", "ln_bias": "layer_norm_bias"}
# Ours → theirs behind a norm, and without one.
_PROJECTIONS = {"qkv": ("layernorm_qkv", "qkv"), "query": ("layernorm_query", "query_layer")}
_SEPARATE = ("query", "key", "value")


def load_te_state_dict(module: nnx.Module, arrays: Mapping[str, Any], *, prefix: str = "") -> None:
    """Load a state dict of a module of ``transformer_engine.pytorch`` into the layer of the same name here.

    Weights ``[out, in]`` become kernels ``[in, *out]``. Queries, keys and values may be one parameter, group by group
    (``fuse_qkv_params=True``), or ``query_weight``, ``key_weight`` and ``value_weight``. ``_extra_state`` is left out;
    quantizer states stay as they are. If anything does not fit, nothing is changed.

    Args:
        module: a layer of `jax_te.layers`: `Linear`, `LayerNormLinear`, `LayerNormMLP`, a norm, `MultiheadAttention`,
            `TransformerLayer`, or a module of these.
        arrays: by name, as `read_torch_file` gives them.
        prefix: of the names of ``arrays``, with its dot.

    Raises:
        CheckpointMismatchError: for missing and unexpected names, and for other shapes and dtypes.

    Source: ``load_state_dict`` of ``transformer_engine.pytorch``'s modules.

    >>> from jax_te.layers import Linear
    >>> layer = Linear(2, 3, rngs=nnx.Rngs(0))
    >>> load_te_state_dict(layer, {"weight": np.ones((3, 2), np.float32), "bias": np.zeros(3, np.float32)})
    >>> layer.kernel[...].shape
    (2, 3)
    """
    own = state_dict(module)
    owners = {".".join(map(str, path)): node for path, node in nnx.iter_graph(module)}
    left = {name for name in arrays if name.startswith(prefix) and not name.endswith("_extra_state")}
    found: dict[str, Any] = {}
    missing = []
    parameters = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    for name in own.keys() & parameters:
        theirs, groups = prefix + _their_name(name, own), _groups(name, owners)
        parts = [theirs] if theirs in arrays else [part for part in _separate(theirs) if part in arrays]
        whole = _whole(theirs)
        if parts:
            array = _fused([np.asarray(arrays[part]) for part in parts], groups)
        elif whole in arrays:
            parts, array = [whole], _part(np.asarray(arrays[whole]), name, own, groups)
        else:
            missing.append(theirs)
            continue
        left -= set(parts)
        found[name] = _laid_out(array, own[name].shape, name.endswith("kernel"), groups)
    if missing or left:
        raise CheckpointMismatchError(
            f"the state dict does not fit {type(module).__name__}: missing {sorted(missing)[:8]}, unexpected "
            f"{sorted(left)[:8]}"
        )
    load_state_dict(module, {**own, **found})


def _their_name(name: str, own: Mapping[str, Any]) -> str:
    """Return te.pytorch's name of a parameter."""
    *path, attribute = name.split(".")
    if _is_separate(name, own):
        *outer, part = path
        normed = ".".join((*outer, "layernorm", "scale")) in own
        kind = _NAMES.get(attribute, attribute)
        last = f"layer_norm_{kind}" if part == "layernorm" else f"{part}_{kind}"
        return ".".join((*outer, _PROJECTIONS["qkv"][0 if normed else 1], last))
    # A kernel with a norm in front has the norm's parameters beside it.
    behind_norm = sum(".".join((*path, each)) in own for each in ("scale", "kernel", "wi_kernel")) > 1
    if path and path[-1] in _PROJECTIONS:
        path[-1] = _PROJECTIONS[path[-1]][0 if behind_norm else 1]
    norms = _FUSED if behind_norm else {}
    return ".".join((*path, norms.get(attribute) or _NAMES.get(attribute, attribute)))


def _separate(name: str) -> list[str]:
    """Return the names of a parameter's three parts under ``fuse_qkv_params=False``."""
    *path, last = name.split(".")
    return [".".join((*path, f"{part}_{last}")) for part in _SEPARATE]


def _is_separate(name: str, own: Mapping[str, Any]) -> bool:
    """Return whether a parameter is one of an attention whose queries, keys and values are layers of their own."""
    path = name.split(".")
    part = path[-2] if len(path) > 1 else None
    return part in (*_SEPARATE, "layernorm") and ".".join((*path[:-2], "value.kernel")) in own


def _whole(theirs: str) -> str:
    """Return the name that a part has under ``fuse_qkv_params=True``."""
    path, _, last = theirs.rpartition(".")
    part, _, kind = last.partition("_")
    return f"{path}.{kind}" if part in _SEPARATE else theirs


def _part(array: np.ndarray, name: str, own: Mapping[str, Any], groups: int) -> np.ndarray:
    """Return the queries, keys or values of an array that has them group by group."""
    *outer, part, attribute = name.split(".")
    sizes = [math.prod(own[".".join((*outer, each, attribute))].shape) for each in _SEPARATE]
    rows = [size * len(array) // sum(sizes) // groups for size in sizes]
    at = _SEPARATE.index(part)
    split = array.reshape(groups, -1, *array.shape[1:])[:, sum(rows[:at]) : sum(rows[: at + 1])]
    return split.reshape(-1, *array.shape[1:])


def _groups(name: str, owners: Mapping[str, Any]) -> int:
    """Return into how many groups of heads te.pytorch orders the rows of a parameter."""
    *path, last = name.split(".")[:-1] or [""]
    core = getattr(owners.get(".".join(path)), "core_attention", None)
    return core.num_gqa_groups if core is not None and last in ("qkv", "key_value", *_SEPARATE) else 1


def _fused(parts: list[np.ndarray], groups: int) -> np.ndarray:
    """Return queries, keys and values as one array: of each group its queries, its key and its value."""
    if len(parts) == 1:
        return parts[0]
    split = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(split, 1).reshape(-1, *parts[0].shape[1:])


def _laid_out(array: np.ndarray, shape: tuple[int, ...], kernel: bool, groups: int) -> np.ndarray:
    """Return an array in our layout; one of another size as it is, which `load_state_dict` then refuses."""
    if array.size != math.prod(shape) or not (kernel or len(shape) > 1):
        return array
    return Layout(shape, (), kernel, groups if len(shape) > 1 + kernel else 1).from_megatron(array)
