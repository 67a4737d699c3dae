"""What attention hands to TE, whose kernel needs a GPU: packed sequences as TE itself describes them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import explain_backend, segments_from_cu_seqlens
from jax_te.ops.attention.checks import attention_spec
from jax_te.ops.attention.segments import segment_positions
from tests.support.numerics import draw

pytestmark = pytest.mark.te

SIZE = 16
PACKED = {"mask_type": "padding_causal", "max_segments": 3}
CASES = {
    "one after the other": (jnp.array([[0, 5, 8, 16], [0, 16, 16, 16]]), None),
    "padding behind": (jnp.array([[0, 5, 8, 12], [0, 3, 3, 3]]), None),
    "padding between": (jnp.array([[0, 4, 6, 12], [0, 7, 9, 9]]), jnp.array([[0, 5, 8, 15], [0, 9, 16, 16]])),
}


@pytest.mark.parametrize("case", list(CASES))
def test_packed_sequences_are_described_as_te_does_from_segment_numbers(case):
    from transformer_engine.jax.attention import AttnMaskType, QKVLayout, SequenceDescriptor

    from jax_te.ops.te.attention import packed_descriptor

    lengths, padded = CASES[case]
    segments = segments_from_cu_seqlens(lengths, None, padded)
    where = segment_positions(segments.q_offsets, segments.q_lengths, SIZE)
    theirs = SequenceDescriptor.from_segment_ids_and_pos((where.segment,) * 2, (where.position,) * 2)
    arguments = (AttnMaskType.PADDING_MASK, QKVLayout.THD_THD_THD, (-1, -1), 3)
    ours, expected = (d.get_seqlens_and_offsets(*arguments) for d in (packed_descriptor(segments), theirs))
    (our_lengths, our_offsets), (their_lengths, their_offsets) = ours, expected
    for side in range(2):  # queries, keys; what TE writes for sequences that are not there varies
        there = np.asarray(their_lengths[side])[:, :3] > 0
        for got, wanted in ((our_lengths, their_lengths), (our_offsets, their_offsets)):
            got, wanted = (np.asarray(a[side])[:, :3][there] for a in (got, wanted))
            np.testing.assert_array_equal(got, wanted)
    for got, count in zip(np.asarray(ours[0][0]), (3, 1 if "behind" in case or "other" in case else 2), strict=True):
        assert (got >= 0).sum() == count
        assert (got[count:] == -1).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask_type": "arbitrary"}, "no 'arbitrary' mask"),
        ({"bias_type": "alibi"}, "no 'alibi' bias"),
        ({"logit_softcap": 30.0}, "no softcap of the logits"),
        ({"dropout_rate": 0.1}, "whatever the key"),
        ({"q_length": 64}, "reads outside its arrays in backward"),
        ({"dtype": jnp.float32}, "takes bfloat16 or float16, not float32"),
        ({"bias_type": "post_scale_bias", "bias_shape": (2, 1, 1, 128)}, "of one row or column"),
        ({"bias_type": "post_scale_bias", "bias_shape": (2, 1, 128, 128)}, None),
        ({**PACKED, "head_dim": 256, "v_head_dim": 256}, "wrong gradients and nan"),
        ({**PACKED, "v_head_dim": 192}, "wrong gradients and nan"),
        ({**PACKED, "bias_type": "post_scale_bias", "bias_shape": (1, 2, 128, 128)}, "from the beginning of each"),
        ({**PACKED, "head_dim": 192, "v_head_dim": 128}, None),
        (PACKED, None),
        ({"head_dim": 256, "v_head_dim": 256}, None),
        ({"window": (64, 0), "softmax_type": "learnable", "bias_type": "post_scale_bias"}, None),
    ],
)
def test_what_te_lacks_on_any_gpu(options, reason):
    import dataclasses

    from jax_te.ops.te.attention import unsupported

    spec = attention_spec(tuple(draw(name, (1, 128, 2, 64), jnp.bfloat16) for name in "qkv"), "causal")
    lacks = unsupported(dataclasses.replace(spec, **options))
    assert lacks is None if reason is None else reason in lacks
    if reason is not None:
        assert explain_backend("dot_product_attention", attention=dataclasses.replace(spec, **options)).backend == "xla"
