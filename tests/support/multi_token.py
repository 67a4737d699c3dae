"""Multi-token prediction for NumPy or jax.numpy in fp64, after Megatron's ``multi_token_prediction.py``.

Independent of jax_te but for the layout of its parameters, as `tests.support.reference`, whose layers it runs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from tests.support import reference
from tests.support.reference import Form


def roll_tensor(x: np.ndarray, borders: np.ndarray | None = None) -> np.ndarray:
    """Megatron's ``roll_tensor``: torch.roll by -1 along the last axis, whose last entry becomes 0.

    With ``borders`` ``[b, m + 1]``, the cumulative lengths of packed sequences, it is ``_roll_tensor_packed_seq`` of
    each row of ``x [b, s]``: each sequence by itself, and what is behind the last one stays as it is.
    """
    if borders is None:
        x = np.roll(x, -1, axis=-1)
        x[..., -1] = 0
        return x
    x = np.array(x)
    for row, ends in zip(x, borders, strict=True):
        for start, end in itertools.pairwise(ends):
            if end > start:
                row[start:end] = roll_tensor(row[start:end])
    return x


def alone(xp: ModuleType, run: Callable[[Any], Any], x: Any, borders: np.ndarray | None) -> Any:
    """Results ``[b, s, h]`` of ``run`` on each packed sequence of ``x`` by itself, and on what is behind the last."""
    if borders is None:
        return run(x)
    rows = []
    for number, ends in enumerate(borders):
        pieces = itertools.pairwise(dict.fromkeys([*ends, x.shape[1]]))  # without the empty ones
        rows.append(xp.concatenate([run(x[number : number + 1, start:end]) for start, end in pieces], axis=1))
    return xp.concatenate(rows, axis=0)


def losses(
    xp: ModuleType,
    p: dict[str, Any],
    batch: tuple[np.ndarray, np.ndarray, np.ndarray],
    form: Form,
    depths: int,
    factor: float,
    borders: np.ndarray | None = None,
) -> tuple[Any, list[Any], Any]:
    """The main loss, the depths' losses, and the scalar whose gradient training takes, of a ``GPTModel``.

    ``batch``: tokens, labels and loss mask ``[b, s]``, as NumPy arrays. ``borders``: of packed rows, ``[b, m + 1]``.
    """
    tokens, labels, mask = batch
    mask = mask.astype(np.float64)
    positions, table = np.arange(tokens.shape[1]), p["embedding"]["embedding"]
    if borders is not None:
        begun = [[max(end for end in ends if end <= at) for at in positions] for ends in borders]
        positions = positions - np.array(begun)

    def embed(tokens: np.ndarray, positions: np.ndarray) -> Any:
        x = table[tokens]
        return x + p["position_embedding"]["embedding"][positions] if "position_embedding" in p else x

    def mean(x: Any, labels: np.ndarray, mask: np.ndarray) -> Any:
        each = reference.nll(xp, x @ p.get("output_kernel", table.T), labels)
        return (each * mask).sum() / max(mask.sum(), 1)

    def normalize(x: Any, parameters: dict[str, Any]) -> Any:
        return reference.norm(xp, x, parameters["scale"], parameters.get("bias"), form)

    def run_layer(layer: dict[str, Any], x: Any) -> Any:
        return reference.layer(xp, layer, x, form)

    x = embed(tokens, positions)
    for i in range(len(p["layers"])):
        layer = p["layers"][i]
        x = alone(xp, functools.partial(run_layer, layer), x, borders)
    # In Megatron the last norm is the decoder's, so that the first depth reads its output.
    x = normalize(x, p["final_norm"])
    main, found = mean(x, labels, mask), []
    for depth in range(depths):
        own = p["mtp"]["layers"][min(depth, len(p["mtp"]["layers"]) - 1)]
        tokens, positions, labels, mask = (roll_tensor(each, borders) for each in (tokens, positions, labels, mask))
        both = [normalize(embed(tokens, positions), own["enorm"]), normalize(x, own["hnorm"])]
        x = xp.concatenate(both, axis=-1) @ own["eh_proj"]["kernel"]
        x = alone(xp, functools.partial(run_layer, own["mtp_model_layer"]), x, borders)
        x = normalize(x, own["final_layernorm"])
        found.append(mean(x, labels, mask))
    return main, found, main + factor / depths * sum(found)
