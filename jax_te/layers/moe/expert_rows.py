"""Rows for which the devices of a mesh have room in the layers of a model with experts, and their memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.layers.moe.mixture import MixtureOfExperts
from jax_te.typing import DTypeLike


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Sizes of the arrays of rows of one layer with experts, on each device. ``str()`` gives a line.

    Args:
        path: path of the layer in its model.
        tokens: tokens that a device has room to receive, with its own.
        rows: rows of its experts for which it has room.
        equal_load: rows that it has if all experts get the same number of tokens.
        bytes: bytes of the received tokens, and of the rows before, between and after the experts' two layers, in one
            microbatch's forward pass.

    >>> print(ExpertRows(path="moe", tokens=64, rows=128, equal_load=32, bytes=2**20))
    moe: room for 64 tokens and 128 rows on a device (32 rows under equal load), 1.0 MiB
    """

    path: str
    tokens: int
    rows: int
    equal_load: int
    bytes: int

    def __str__(self) -> str:
        room = f"room for {self.tokens:,} tokens and {self.rows:,} rows on a device"
        return f"{self.path}: {room} ({self.equal_load:,} rows under equal load), {self.bytes / 2**20:,.1f} MiB"


@checked
def expert_rows(model: nnx.Module, batch: int, sequence: int, *, dtype: DTypeLike = jnp.bfloat16) -> list[ExpertRows]:
    """Return the sizes of the arrays of rows of each layer with experts, on the mesh in use.

    Args:
        model: model, or its shapes (``nnx.eval_shape``).
        batch: examples of a microbatch, on all devices.
        sequence: length of a sequence.
        dtype: the compute dtype.

    Returns:
        One entry for each layer in which devices have rows of their own; none without a mesh.

    Raises:
        ValueError: for sizes that are not positive.

    >>> from jax_te.config import RouterOptions
    >>> from jax_te.layers import MoE
    >>> expert_rows(MoE(16, 32, RouterOptions(num_experts=4), rngs=nnx.Rngs(0)), 2, 8)
    []
    """
    check_positive(batch=batch, sequence=sequence)
    found = []
    for path, layer in nnx.iter_modules(model):
        if not isinstance(layer, MixtureOfExperts):
            continue
        fc1, fc2 = layer.experts.base_layers()
        features = fc1.kernel_shape[1]
        transport = layer.transport((batch, sequence, features))
        if transport is None:
            continue
        split = transport.placement.parts(fc1.kernel_axes)[-1]
        inner, outer = math.prod(fc1.kernel_shape[2:]) // split, fc2.kernel_shape[1] // split
        row, item = 2 * features + inner + outer, jnp.dtype(dtype).itemsize
        found.append(
            ExpertRows(
                path=".".join(map(str, path)),
                tokens=transport.received,
                rows=transport.rows,
                equal_load=transport.balanced,
                bytes=item * (transport.received * features + transport.rows * row),
            )
        )
    return found
