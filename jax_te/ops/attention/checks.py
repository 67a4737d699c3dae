"""Build the description of an attention call, and check the call's arrays against it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_te._validation import FLOAT_DTYPES, check_float, checked
from jax_te.ops.attention.masks import normal_window
from jax_te.ops.attention.spec import (
    QKV,
    AttentionArrays,
    AttentionSpec,
    BiasType,
    MaskType,
    SoftmaxType,
    Window,
)
from jax_te.ops.integers import is_known
from jax_te.typing import Array


@checked
def attention_spec(
    qkv: QKV,
    mask_type: MaskType,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    *,
    window: Window | None = None,
    bias_type: BiasType = "no_bias",
    bias_shape: tuple[int, ...] | None = None,
    softmax_type: SoftmaxType = "vanilla",
    logit_softcap: float | None = None,
    return_max_logit: bool = False,
    max_segments: int = 0,
) -> AttentionSpec:
    """Return the description of a call, checked.

    Args:
        qkv: queries, keys and values, or anything with their shapes and dtype.
        mask_type, scale, dropout_rate, window, bias_type, softmax_type, logit_softcap, return_max_logit: see
            `dot_product_attention`.
        bias_shape, max_segments: see `AttentionSpec`.

    Raises:
        ValueError: for shapes that do not agree, an unknown mask, bias or softmax type, or a softcap that is not
            positive.
        TypeError: for queries, keys or values that are not floating point, or not of one dtype.

    >>> q = jnp.ones((1, 4, 2, 8))
    >>> attention_spec((q, q, q), "causal", logit_softcap=30.0).window
    (-1, 0)
    """
    b, sq, skv, n, g, d, dv = shape_of(qkv)
    spec = AttentionSpec(
        dtype=jnp.dtype(qkv[0].dtype),
        batch=b,
        q_length=sq,
        kv_length=skv,
        heads=n,
        groups=g,
        head_dim=d,
        v_head_dim=dv,
        mask_type=mask_type,
        window=normal_window(window, mask_type),
        scale=d**-0.5 if scale is None else float(scale),
        dropout_rate=float(dropout_rate),
        packed=len(qkv) == 1,
        bias_type=bias_type,
        bias_shape=bias_shape,
        softmax_type=softmax_type,
        logit_softcap=logit_softcap,
        return_max_logit=return_max_logit,
        max_segments=max_segments,
    )
    if spec.logit_softcap is not None and not spec.logit_softcap > 0.0:
        raise ValueError(f"logit_softcap must be > 0, or None for no cap; got {spec.logit_softcap!r}")
    # TE supports its packed layouts only with padding masks; the rule is the same for both backends.
    if spec.max_segments and not spec.is_padding:
        raise ValueError(f"packed sequences need a padding mask type, got {mask_type!r}; take {_padded(spec)}")
    return spec


def _padded(spec: AttentionSpec) -> str:
    """Return the padding mask types that can take the place of another type, for messages."""
    types = {"no_mask": "'padding'", "arbitrary": "'padding' or 'padding_causal'"}
    return types.get(spec.mask_type, f"'padding_{spec.mask_type}'")


def shape_of(qkv: QKV) -> tuple[int, int, int, int, int, int, int]:
    """Return ``b, sq, skv, n, g, d, dv`` of queries, keys and values.

    Raises:
        ValueError: for shapes that do not go together.
        TypeError: for arrays that are not fp32, bf16 or fp16, or not of one dtype.
    """
    check_float("dot_product_attention", *qkv, allowed=FLOAT_DTYPES)
    _check_one_dtype(qkv)
    if len(qkv) == 1:
        shape = qkv[0].shape
        if len(shape) != 5 or shape[2] != 3:
            raise ValueError(f"a packed qkv has shape [b, s, 3, n, d], got {shape}")
        b, s, _, n, d = shape
        _check_heads(qkv, n, n, d, d)
        return b, s, s, n, n, d, d
    q, k, v = qkv
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "q must be [b, sq, n, d], k [b, skv, g, d] and v [b, skv, g, dv]; "
            f"got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    b, sq, n, d = q.shape
    _, skv, g, _ = k.shape
    if k.shape[0] != b or k.shape[3] != d:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in batch and head size")
    _check_heads(qkv, n, g, d, v.shape[3])
    if n % g:
        raise ValueError(f"the number of query heads {n} is not divisible by the key/value heads {g}")
    return b, sq, skv, n, g, d, v.shape[3]


def _check_one_dtype(qkv: QKV) -> None:
    """Raise TypeError for queries, keys and values of several dtypes."""
    # The result has the dtype of the queries, and kernels read all three in one: a cast here would hide which of them
    # the caller meant.
    names = [str(jnp.dtype(x.dtype)) for x in qkv]
    if len(set(names)) > 1:
        given = ", ".join(f"{name} {dtype}" for name, dtype in zip("qkv", names, strict=True))
        raise TypeError(f"q, k and v must have one dtype, got {given}; cast them, for example k.astype(q.dtype)")


def _check_heads(qkv: QKV, *sizes: int) -> None:
    """Raise ValueError for a number of heads or a head size of 0."""
    if 0 in sizes:
        raise ValueError(
            "numbers of heads and head sizes must be 1 or more: batch and sequence alone may be empty; got shapes "
            f"{', '.join(str(x.shape) for x in qkv)}"
        )


def check_arrays(spec: AttentionSpec, arrays: AttentionArrays) -> None:
    """Raise ValueError or TypeError for an array that is missing or unused, or whose shape or dtype is wrong."""
    # Messages say "mask type" or "lengths of keys", not names of arguments: layers, whose names are others, leave these
    # checks to the op. A remedy names arguments where it must, those of layers, too.
    _check_mask(spec, arrays)
    _check_lengths(spec, arrays)
    _check_bias(spec, arrays.bias)
    _check_softmax_offset(spec, arrays.softmax_offset)


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    # All axes must be there: NumPy's rules would silently take [b, s, s] for [n, sq, skv].
    return len(shape) == len(full) and all(size in (1, whole) for size, whole in zip(shape, full, strict=True))


def _scores(spec: AttentionSpec) -> tuple[int, ...]:
    return (spec.batch, spec.heads, spec.q_length, spec.kv_length)


def _check_mask(spec: AttentionSpec, arrays: AttentionArrays) -> None:
    mask = arrays.mask
    if mask is None and spec.mask_type != "arbitrary":
        return
    if mask is None:
        raise ValueError(
            "mask type 'arbitrary' needs a mask, bool and broadcastable to [b, n, sq, skv], True is masked out "
            "(attention_mask of a layer); give one, or take another mask type"
        )
    if spec.mask_type != "arbitrary":
        raise ValueError(f"mask type {spec.mask_type!r} takes no mask; {_instead_of_mask(spec)}")
    # Masks of integers or floats are 1 where masked out in one library and 1 where visible in another.
    if mask.dtype != bool:
        raise TypeError(f"mask must be bool (True hides), got {mask.dtype}; compare it first, for example mask == 0")
    if not _broadcasts(mask.shape, _scores(spec)):
        raise ValueError(
            f"mask must have four axes, each 1 or as in [b, n, sq, skv] = {_scores(spec)}, got {mask.shape}"
        )


def _instead_of_mask(spec: AttentionSpec) -> str:
    """Return what to do about a mask that a call does not use, for its message."""
    if spec.max_segments:
        return "leave it out: the boundaries of packed sequences say where there is padding"
    causal = ", which with window_size=(-1, 0) is causal, too" if spec.is_causal else ""
    arbitrary = f"take mask type 'arbitrary'{causal}"
    if not spec.is_padding:
        return f"leave it out, as it would have no effect, or {arbitrary}"
    return (
        f"give the lengths without padding in its place ({_LENGTHS}), or {arbitrary}, or use a layer that reads masks "
        "of padding: TransformerLayer, TEDotProductAttention of jax_te.megatron, or the attention of jax_te.te_pytorch"
    )


_LENGTHS = (
    "kv_lengths= and q_lengths=, which are sequence_lengths= and encoder_lengths= of MultiheadAttention and "
    "TransformerLayer"
)
"""The arguments that take lengths, in messages."""


def _check_lengths(spec: AttentionSpec, arrays: AttentionArrays) -> None:
    q_lengths, kv_lengths, segments = arrays.q_lengths, arrays.kv_lengths, arrays.segments
    if segments is not None:
        if q_lengths is not None or kv_lengths is not None:
            raise ValueError("packed sequences bring their own lengths; leave other lengths out")
        for name, array in zip(segments._fields, segments, strict=True):
            if array.shape != (spec.batch, spec.max_segments):
                raise ValueError(
                    f"packed sequences need boundaries for each of the b = {spec.batch} rows of the queries, and one "
                    f"number m of sequences for all: PackedSeqParams has cu_seqlens [b, m + 1], and segments.{name} "
                    f"must be [b, m]; got {array.shape}"
                )
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise TypeError(f"segments.{name} must be integers, got {array.dtype}")
        _check_ends("queries", segments.q_offsets, segments.q_lengths, spec.q_length)
        _check_ends("keys", segments.kv_offsets, segments.kv_lengths, spec.kv_length)
        return
    _check_presence_of_lengths(spec, arrays)
    # Lengths, not masks [b, s]: padding is at the end, the only case that cuDNN's kernels support.
    for name, lengths, size in (
        ("lengths of queries", q_lengths, spec.q_length),
        ("lengths of keys", kv_lengths, spec.kv_length),
    ):
        if lengths is None:
            continue
        if lengths.shape != (spec.batch,):
            raise ValueError(f"{name} must have one entry for each example, ({spec.batch},), got {lengths.shape}")
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, got {lengths.dtype}")
        # A length beyond its row would move the diagonal of a bottom-right mask, and kernels would read behind it.
        if is_known(lengths):
            values = np.asarray(lengths)
            if ((values < 0) | (values > size)).any():
                raise ValueError(f"{name} must be from 0 to {size}, the positions of a row, got {values.tolist()}")


def _check_presence_of_lengths(spec: AttentionSpec, arrays: AttentionArrays) -> None:
    """Raise ValueError for lengths that the mask type needs and that are missing, and for those that it cannot use."""
    if spec.is_padding and arrays.kv_lengths is None:
        raise ValueError(
            f"mask type {spec.mask_type!r} needs the lengths of the keys without padding ({_LENGTHS}), boundaries of "
            "packed sequences, or, in a layer that reads it, a mask of padding; give one, or take another mask type"
        )
    if spec.is_padding or (arrays.q_lengths is None and arrays.kv_lengths is None):
        return
    if arrays.mask is not None:
        raise ValueError("a call of attention takes a mask or lengths, and got both; leave one of them out")
    raise ValueError(f"mask type {spec.mask_type!r} takes no lengths; leave them out, or take {_padded(spec)}")


def _check_ends(what: str, offsets: Array, lengths: Array, size: int) -> None:
    """Raise ValueError for known segments that reach beyond a row."""
    if not (is_known(offsets) and is_known(lengths)):
        return
    begin, length = (np.asarray(x).astype(np.int64) for x in (offsets, lengths))
    if ((begin < 0) | (length < 0) | ((length > 0) & (begin + length > size))).any():
        raise ValueError(
            f"segments of {what} must lie within a row of {size} positions, got offsets {begin.tolist()} and lengths "
            f"{length.tolist()}"
        )


def _check_bias(spec: AttentionSpec, bias: Array | None) -> None:
    if bias is None and spec.bias_type == "no_bias":
        return
    if bias is None:
        missing = "ALiBi needs slopes" if spec.bias_type == "alibi" else f"bias type {spec.bias_type!r} needs a bias"
        raise ValueError(f"{missing}; give the array, or take the bias type 'no_bias'")
    if spec.bias_type == "no_bias":
        raise ValueError(
            "bias type 'no_bias' takes no bias; leave it out, or take 'post_scale_bias' or 'pre_scale_bias' "
            "(core_attention_bias_type= of a layer)"
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"a bias must be floating point, got {bias.dtype}")
    # Only slopes: the bias [b, n, sq, skv] follows from them and from the positions of each shard.
    if spec.bias_type == "alibi":
        if bias.shape not in ((spec.heads,), (spec.batch, spec.heads)):
            raise ValueError(f"ALiBi slopes must be [n] = ({spec.heads},) or [b, n], got {bias.shape}")
    elif not _broadcasts(bias.shape, _scores(spec)):
        raise ValueError(
            f"bias must have four axes, each 1 or as in [b, n, sq, skv] = {_scores(spec)}, got {bias.shape}"
        )


def _check_softmax_offset(spec: AttentionSpec, offset: Array | None) -> None:
    if offset is None and spec.softmax_type != "learnable":
        return
    if offset is None or spec.softmax_type != "learnable":
        raise ValueError(
            f"softmax_type {spec.softmax_type!r} {'needs' if offset is None else 'takes no'} softmax_offset"
        )
    if offset.shape != (spec.heads,):
        raise ValueError(f"softmax_offset must have one entry for each head, ({spec.heads},), got {offset.shape}")
