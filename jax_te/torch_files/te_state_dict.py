"""State dicts of ``transformer_engine.pytorch`` for the layers of this package."""

from __future__ import annotations

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
    own, parameters = state_dict(module), _parameters(module)
    owners = {".".join(map(str, path)): node for path, node in nnx.iter_graph(module)}
    left = {name for name in arrays if name.startswith(prefix) and not name.endswith("_extra_state")}
    found: dict[str, Any] = {}
    missing = []
    for name in own.keys() & parameters:
        owner, _, attribute = name.rpartition(".")
        siblings = {each for each in ("scale", "kernel", "wi_kernel") if f"{owner}.{each}".lstrip(".") in own}
        parent, _, last = owner.rpartition(".")
        core = getattr(owners.get(parent), "core_attention", None)
        fused = len(siblings) > 1
        theirs = _FUSED.get(attribute) if fused else None
        where = ".".join(filter(None, (parent, _PROJECTIONS.get(last, (last, last))[0 if fused else 1])))
        theirs = f"{prefix}{where}.{theirs or _NAMES.get(attribute, attribute)}".replace("..", ".").lstrip(".")
        groups = core.num_gqa_groups if core is not None and last in ("qkv", "query", "key_value") else 1
        parts = [part for part in _parts(theirs) if part in arrays] if theirs not in arrays else [theirs]
        if not parts:
            missing.append(theirs)
            continue
        left -= set(parts)
        # Of each group its queries, its key and its value.
        stacked = [np.asarray(arrays[part]) for part in parts]
        if len(parts) > 1:
            split = [each.reshape(groups, -1, *each.shape[1:]) for each in stacked]
            stacked = [np.concatenate(split, 1).reshape(-1, *stacked[0].shape[1:])]
        kernel, (array,), shape = attribute.endswith("kernel"), stacked, own[name].shape
        laid_out = kernel or len(shape) > 1
        fits = array.size == own[name].size
        layout = Layout(shape, (), kernel, groups if len(shape) > 1 + kernel else 1)
        found[name] = layout.from_megatron(array) if laid_out and fits else array
    if missing or left:
        raise CheckpointMismatchError(
            f"the state dict does not fit {type(module).__name__}: missing {sorted(missing)[:8]}, unexpected "
            f"{sorted(left)[:8]}"
        )
    load_state_dict(module, {**own, **found})


def _parameters(module: nnx.Module) -> set[str]:
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def _parts(name: str) -> list[str]:
    where, _, last = name.rpartition(".")
    return [f"{where}.{part}_{last}".lstrip(".") for part in ("query", "key", "value")]
