"""FP8 states of experts in checkpoints of Megatron-LM: delayed scaling's scales and amax histories of each expert.

Transformer Engine keeps the scale of the next use, and the history without the amax that the next update drops; the
states here keep the scale of the last use, and the whole history, of which the next scale is computed. One gives the
other: both compute the same scales from then on.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jax_te.errors import CheckpointMismatchError
from jax_te.interop.torch import ExtraState, read_extra_state
from jax_te.layers import GroupedLinear
from jax_te.quantize import AmaxRule, amax_rule_of
from jax_te.recipe import DelayedScaling, Format, fp8_max

_LOG = logging.getLogger("jax_te")
_OF_RANK = re.compile(
    r"(?:module\.)?decoder\.layers\.(\d{1,6})\.mlp\.experts\.(?:local_experts\.(\d{1,6})\.)?(linear_fc[12])\."
    r"_extra_state(\d{0,6})"
)
_OF_ALL = re.compile(
    r"decoder\.layers\.(?:(\d{1,6})\.)?mlp\.experts\.experts\.(linear_fc[12])\._extra_state/shard_([\d.]{1,30})_[\d.]+"
)
# Our name of an operand: the direction of Transformer Engine's arrays, and the operand's place in them.
_PLACES = {"x": ("fwd", 0), "kernel": ("fwd", 1), "grad": ("bwd", 0)}
_OPERANDS = {"fwd": 3, "bwd": 2}
_LARGEST, _TINY = (float(getattr(np.finfo(np.float32), name)) for name in ("max", "tiny"))


class StoredState(NamedTuple):
    """An expert's state in a file: a function that returns the entry's value, the GEMM there, and the entry's name."""

    value: Callable[[], Any]
    gemm: int
    what: str


States = dict[tuple[int, str], dict[int, StoredState]]
"""Number of a layer and name of a linear layer → the states of its experts by number."""


def states_of_rank(part: Mapping[str, Any], *, first_layer: int, first_expert: int, experts: int) -> States:
    """Return the states in the state dict of a rank.

    Args:
        part: the state dict.
        first_layer, first_expert: numbers in the model of the rank's first layer and expert.
        experts: number of the rank's experts.
    """
    states: States = {}
    for name, value in part.items():
        if (match := _OF_RANK.fullmatch(name)) is None:
            continue
        layer, local, linear, number = match.groups()
        place = states.setdefault((int(layer) + first_layer, linear), {})
        own = (lambda value=value: value) if isinstance(value, dict | list) or value is None else _of(value)
        if local is None and not number and name + "1" not in part:
            # One entry for all of the rank's experts.
            place |= {first_expert + i: StoredState(own, i, name) for i in range(experts)}
        else:
            place[first_expert + int(local or number or 0)] = StoredState(own, 0, name)
    return states


def states_of_all(others: Mapping[str, Callable[[], Any]]) -> States:
    """Return the states among the objects of a folder in the format ``torch_dist``."""
    states: States = {}
    for name, read in others.items():
        if (match := _OF_ALL.fullmatch(name)) is None:
            continue
        layer, linear, shard = match.groups()
        *front, expert = map(int, shard.split("."))
        number = int(layer) if layer is not None else front[0] if front else 0
        states.setdefault((number, linear), {})[expert] = StoredState(functools.partial(_first, read), 0, name)
    return states


def load_expert_states(
    model: nnx.Module, states: Mapping[tuple[int, str], Mapping[int, StoredState]], what: str
) -> None:
    """Give a model's experts the states of a checkpoint; nothing changes if one does not fit.

    Layers without states in the checkpoint keep new ones, which the log of ``jax_te`` says at level INFO.

    Raises:
        CheckpointMismatchError: for experts without a state beside others that have one, for states of another recipe,
            and for scales that do not follow from their histories.
    """
    new: list[tuple[nnx.Variable[jax.Array], np.ndarray]] = []
    for (number, name), layer in _layers(model):
        stored = [states.get((number, name), {}).get(expert) for expert in range(layer.num_gemms)]
        read = [None if state is None else _read(state, what) for state in stored]
        missing = [expert for expert, state in enumerate(read) if state is None]
        if len(missing) == len(read):
            _LOG.info("%s has no FP8 state of layer %d's %s: it is new", what, number, name)
            continue
        if missing:
            raise CheckpointMismatchError(f"{what}: experts {missing[:8]} of layer {number}'s {name} have no FP8 state")
        pairs = [(place.gemm, state) for place, state in zip(stored, read, strict=True) if place and state]
        new += _for_layer(layer, pairs, f"{what}: layer {number}'s {name}")
    for variable, array in new:
        place = variable.get_value().sharding
        variable.set_value(jax.make_array_from_callback(array.shape, place, lambda index, array=array: array[index]))


def expert_states(model: nnx.Module) -> Iterator[tuple[int, str, ExtraState]]:
    """Yield number, name and state of each layer of experts that has one under the ambient recipe."""
    for (number, name), layer in _layers(model):
        recipe = layer.recipe
        if not isinstance(recipe, DelayedScaling):
            _LOG.info("layer %d's %s is saved without its FP8 state: the recipe in use has none", number, name)
            continue
        arrays: dict[str, np.ndarray] = {}
        for direction, count in _OPERANDS.items():
            scales = np.ones((count, layer.num_gemms), np.float32)
            rows = np.zeros((recipe.amax_history_len, count, layer.num_gemms), np.float32)
            for role, (where, at) in _PLACES.items():
                if where == direction:
                    state = {key: np.asarray(variable.get_value()) for key, variable in layer.quantizers[role].items()}
                    _check_slots(state["amax_history"], recipe, f"layer {number}'s {name}")
                    scales[at], rows[:, at] = _to_te(state, recipe, direction)
            arrays |= {f"scale_{direction}": scales.reshape(-1), f"amax_history_{direction}": _flat(rows)}
        yield number, name, ExtraState(**arrays, recipe=_fields(recipe))


def of_expert(state: ExtraState, expert: int) -> ExtraState:
    """Return the part of one GEMM of a state."""
    arrays = {}
    for direction, count in _OPERANDS.items():
        scales, rows = getattr(state, f"scale_{direction}"), getattr(state, f"amax_history_{direction}")
        arrays[f"scale_{direction}"] = scales.reshape(count, -1)[:, expert].copy()
        arrays[f"amax_history_{direction}"] = rows.reshape(len(rows), count, -1)[:, :, expert].copy()
    return ExtraState(**arrays, recipe=state.recipe)


def _layers(model: nnx.Module) -> list[tuple[tuple[int, str], Any]]:
    """Return the layers of experts with states, with the numbers of their transformer layers and their names."""
    layers = []
    for path, module in nnx.iter_modules(model):
        with_state = isinstance(module, GroupedLinear) and getattr(module, "quantizers", None) is not None
        if with_state and "mtp" not in path:
            number = next((part for part in path if isinstance(part, int)), None)
            if number is not None and path[-1] in ("linear_fc1", "linear_fc2"):
                layers.append(((number, str(path[-1])), module))
    return sorted(layers, key=lambda pair: pair[0])


def _for_layer(layer: Any, pairs: list[tuple[int, ExtraState]], what: str) -> list[tuple[Any, np.ndarray]]:
    """Return the Variables of a layer's states with their values."""
    recipe = layer.recipe
    if not isinstance(recipe, DelayedScaling):
        raise CheckpointMismatchError(f"{what} has FP8 states for DelayedScaling, and the recipe in use is {recipe}")
    for _, state in pairs:
        said = {"amax_history_len": len(state.amax_history_fwd), **state.recipe}
        differing = {name: said[name] for name, value in _fields(recipe).items() if said.get(name, value) != value}
        if differing:
            raise CheckpointMismatchError(
                f"{what} has FP8 states of DelayedScaling with {differing}, and the recipe in use has "
                f"{ {name: _fields(recipe)[name] for name in differing} }; load it under that recipe, or leave the "
                "states out: fp8_states=False"
            )
    values = []
    for role, (direction, at) in _PLACES.items():
        parts = [of_expert(state, gemm) for gemm, state in pairs]
        scales = np.stack([getattr(part, f"scale_{direction}")[at] for part in parts])
        rows = np.stack([getattr(part, f"amax_history_{direction}")[:, at] for part in parts], axis=1)
        history = _from_te(scales, rows, recipe, direction, f"{what}, {role}")
        variables = layer.quantizers[role]
        values += [(variables["scale"], scales), (variables["amax_history"], history)]
    return values


def _from_te(scale: np.ndarray, rows: np.ndarray, recipe: DelayedScaling, direction: str, what: str) -> np.ndarray:
    """Return our history ``[e, n]`` of Transformer Engine's scale of the next use ``[e]`` and history ``[L, e]``."""
    length, rule = len(rows), amax_rule_of(recipe)
    history = np.zeros((scale.size, recipe.amax_history_len), np.float32)
    history[:, : length - 1] = rows[:0:-1].T  # the newest first; row 0 waits for the next one
    next_scale = _next_scale(history, scale, rule, _largest(recipe, direction))
    # The scale comes from the oldest amax, which the update has dropped from the history.
    for expert in np.flatnonzero(next_scale != scale):
        amax = _amax_of(float(scale[expert]), rule, _largest(recipe, direction))
        if rule.amax_compute_algo != "max" or amax is None or not amax > history[expert].max():
            raise CheckpointMismatchError(f"{what}: the scale of expert {expert} does not follow from its amax history")
        history[expert, length - 1] = amax
    return history


def _to_te(state: Mapping[str, np.ndarray], recipe: DelayedScaling, direction: str) -> tuple[np.ndarray, np.ndarray]:
    """Return Transformer Engine's scale of the next use ``[e]`` and history ``[L, e]`` of our state."""
    history, length = state["amax_history"], recipe.amax_history_len
    scale = _next_scale(history, state["scale"], amax_rule_of(recipe), _largest(recipe, direction))
    rows = np.zeros((length, scale.size), np.float32)
    rows[1:] = history[:, : length - 1].T[::-1]
    return scale, rows


def _next_scale(history: np.ndarray, old: np.ndarray, rule: AmaxRule, largest: float) -> np.ndarray:
    """Return the scale of the next use, as `jax_te.quantize.scale_in_use` computes it of finite amaxes.

    With others it is the old one, as in Transformer Engine.
    """
    amax = history[:, 0] if rule.amax_compute_algo == "most_recent" else history.max(axis=1)
    with np.errstate(all="ignore"):
        scale = np.minimum(np.float32(largest) / amax / np.float32(2.0**rule.margin), np.float32(_LARGEST))
    return np.where((amax >= _TINY) & np.isfinite(amax), scale, old).astype(np.float32)


def _amax_of(scale: float, rule: AmaxRule, largest: float) -> float | None:
    """Return an amax that gives this scale, None if there is none."""
    with np.errstate(all="ignore"):
        near = np.float32(largest) / (np.float32(scale) * np.float32(2.0**rule.margin))
    # Of the neighbours, since the quotient is rounded twice.
    amaxes = (near.view(np.int32) + np.arange(-4, 5, dtype=np.int32)).view(np.float32)
    fits = amaxes[_next_scale(amaxes[:, None], np.zeros(9, np.float32), rule, largest) == np.float32(scale)]
    return float(fits[0]) if fits.size else None


def _check_slots(history: np.ndarray, recipe: DelayedScaling, what: str) -> None:
    if history.shape[-1] != recipe.amax_history_len:
        raise ValueError(
            f"{what} has an amax history of {history.shape[-1]} slots, and the recipe in use one of "
            f"{recipe.amax_history_len}; save inside of autocast of the recipe that it was trained with"
        )


def _fields(recipe: DelayedScaling) -> dict[str, Any]:
    return {
        "margin": recipe.margin,
        "fp8_format": recipe.fp8_format.name,
        "amax_history_len": recipe.amax_history_len,
        "amax_compute_algo": recipe.amax_compute_algo,
    }


def _largest(recipe: DelayedScaling, direction: str) -> float:
    form: Format = recipe.fp8_format
    return float(fp8_max(form.fwd_dtype if direction == "fwd" else form.bwd_dtype))


def _flat(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(len(rows), -1)


def _of(value: Any) -> Callable[[], Any]:
    return lambda: np.asarray(value) if hasattr(value, "dtype") else value


def _first(read: Callable[[], Any]) -> Any:
    entry = read()
    return entry[0] if isinstance(entry, list) and entry else entry


def _read(stored: StoredState, what: str) -> ExtraState | None:
    value = stored.value()
    if value is None:
        return None
    if not hasattr(value, "dtype") or value.dtype != np.uint8:
        raise ValueError(
            f"{what}: {stored.what} is {str(value)[:60]}, and not the bytes that Transformer Engine 2 writes; leave "
            "the states out: fp8_states=False"
        )
    return read_extra_state(np.asarray(value).tobytes(), f"{what}: {stored.what}")
