"""Boundaries of packed sequences: those that cannot be a row's are refused where they have values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_te.layers import DotProductAttention, PackedSeqParams
from jax_te.ops import segments_from_cu_seqlens
from tests.support.numerics import TOLERANCE, assert_close, draw

S, N, D = 8, 2, 4


def boundaries(**fields: Any) -> dict[str, jax.Array]:
    return {name: jnp.array(value, jnp.int32) for name, value in fields.items()}


WRONG = {
    "decreasing": ({"cu_seqlens_q": [0, 6, 4, 8]}, "cu_seqlens_q must begin with 0 and never decrease, got"),
    "begins late": ({"cu_seqlens_q": [2, 8]}, r"must begin with 0 and never decrease, got \[2, 8\]"),
    "second row": ({"cu_seqlens_q": [[0, 4, 8], [0, 9, 8]]}, r"never decrease, got \[0, 9, 8\]"),
    "keys": ({"cu_seqlens_q": [0, 4, 8], "cu_seqlens_kv": [0, 5, 4]}, "cu_seqlens_kv must begin"),
    "overlap": ({"cu_seqlens_q": [0, 5, 8], "cu_seqlens_q_padded": [0, 4, 8]}, "are longer than what cu_seqlens_q_pad"),
}
BEYOND = {
    "beyond": ({"cu_seqlens_q": [0, 4, 99]}, "cu_seqlens_q ends at 99, beyond a row of 8 tokens"),
    "keys beyond": ({"cu_seqlens_q": [0, 4, 8], "cu_seqlens_kv": [0, 4, 9]}, "cu_seqlens_kv ends at 9, beyond a row"),
    "padded beyond": ({"cu_seqlens_q": [0, 3, 5], "cu_seqlens_q_padded": [0, 4, 12]}, "_q_padded ends at 12, beyond"),
}


def attend(packed: PackedSeqParams, rows: int = 1) -> jax.Array:
    q, k, v = (draw(name, (rows, S, N, D)) for name in "qkv")
    core = DotProductAttention(N, D, attn_mask_type="padding_causal")
    return core(q, k, v, packed_seq_params=packed)


@pytest.mark.parametrize("name", WRONG | BEYOND)
def test_what_cannot_be_a_rows_boundaries_is_refused(name: str) -> None:
    fields, message = (WRONG | BEYOND)[name]
    given = boundaries(**fields)
    packed = PackedSeqParams(**given)
    with pytest.raises(ValueError, match=message):
        attend(packed, 2 if given["cu_seqlens_q"].ndim == 2 else 1)
    if name in WRONG:
        with pytest.raises(ValueError, match=message):
            segments_from_cu_seqlens(**given)
    if "keys" not in name:
        for use in (packed.positions, packed.segment_ids):
            with pytest.raises(ValueError, match=message):
                use(S)
    assert jax.jit(attend, static_argnums=1)(packed, given["cu_seqlens_q"].ndim).shape[1:] == (S, N, D)  # no values


@pytest.mark.costly("fewer sequences", slow=("padding at the end",))
@pytest.mark.parametrize(
    "fields",
    [
        {"cu_seqlens_q": [0, 4]},
        {"cu_seqlens_q": [0, 8, 8, 8]},
        {"cu_seqlens_q": [0, 3, 5], "cu_seqlens_q_padded": [0, 4, 8]},
    ],
    ids=["padding at the end", "fewer sequences", "padding between"],
)
def test_padding_and_empty_sequences_are_allowed(fields: dict[str, list[int]]) -> None:
    packed = PackedSeqParams(**boundaries(**fields))
    assert jnp.isfinite(attend(packed)).all()
    # Values belong to no argument here: constants of a jitted function are checked, too, and pass.
    assert_close(jax.jit(lambda: attend(packed))(), attend(packed), TOLERANCE["float32"])
