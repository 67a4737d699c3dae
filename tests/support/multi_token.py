"""Multi-token prediction for NumPy or jax.numpy in fp64, after Megatron's ``multi_token_prediction.py``.

Independent of jax_te but for the layout of its parameters, as `tests.support.reference`, whose layers it runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from tests.support import reference
from tests.support.reference import Form


def roll_tensor(x: np.ndarray) -> np.ndarray:
    """Megatron's ``roll_tensor``: torch.roll by -1 along the last axis, whose last entry becomes 0."""
    x = np.roll(x, -1, axis=-1)
    x[..., -1] = 0
    return x


def losses(
    xp: ModuleType,
    p: dict[str, Any],
    batch: tuple[np.ndarray, np.ndarray, np.ndarray],
    form: Form,
    depths: int,
    factor: float,
) -> tuple[Any, list[Any], Any]:
    """The main loss, the depths' losses, and the scalar whose gradient training takes, of a ``GPTModel``.

    ``batch``: tokens, labels and loss mask ``[b, s]``, as NumPy arrays.
    """
    tokens, labels, mask = batch
    mask = mask.astype(np.float64)
    positions, table = np.arange(tokens.shape[1]), p["embedding"]["embedding"]

    def embed(tokens: np.ndarray, positions: np.ndarray) -> Any:
        x = table[tokens]
        return x + p["position_embedding"]["embedding"][positions] if "position_embedding" in p else x

    def mean(x: Any, labels: np.ndarray, mask: np.ndarray) -> Any:
        each = reference.nll(xp, x @ p.get("output_kernel", table.T), labels)
        return (each * mask).sum() / max(mask.sum(), 1)

    def normalize(x: Any, parameters: dict[str, Any]) -> Any:
        return reference.norm(xp, x, parameters["scale"], parameters.get("bias"), form)

    x = embed(tokens, positions)
    for i in range(len(p["layers"])):
        x = reference.layer(xp, p["layers"][i], x, form)
    # In Megatron the last norm is the decoder's, so that the first depth reads its output.
    x = normalize(x, p["final_norm"])
    main, found = mean(x, labels, mask), []
    for depth in range(depths):
        own = p["mtp"]["layers"][min(depth, len(p["mtp"]["layers"]) - 1)]
        tokens, positions, labels, mask = map(roll_tensor, (tokens, positions, labels, mask))
        both = [normalize(embed(tokens, positions), own["enorm"]), normalize(x, own["hnorm"])]
        x = xp.concatenate(both, axis=-1) @ own["eh_proj"]["kernel"]
        x = normalize(reference.layer(xp, own["mtp_model_layer"], x, form), own["final_layernorm"])
        found.append(mean(x, labels, mask))
    return main, found, main + factor / depths * sum(found)
