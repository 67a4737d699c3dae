"""Which calls of attention can run in FP8: the rule is that of cuDNN's kernels, on every device and backend.

Otherwise a model would train with other numbers where there is no such kernel.
"""

from __future__ import annotations

from jax_te.ops.attention.spec import AttentionSpec

HEAD_DIM = 128
"""Size of heads that Hopper's kernels have."""

LENGTH_MULTIPLE = 128
"""Multiple of the lengths that these kernels take."""


def fp8_attention_lacks(spec: AttentionSpec) -> str | None:
    """Return the reason why a call cannot run in FP8, or None.

    >>> from jax_te.ops import attention_spec
    >>> import jax.numpy as jnp
    >>> q = jnp.ones((1, 128, 2, 64))
    >>> fp8_attention_lacks(attention_spec((q, q, q), "causal"))
    'heads of 64, and FP8 attention has heads of 128'
    """
    return _lacks_option(spec) or _lacks_size(spec)


def _lacks_option(spec: AttentionSpec) -> str | None:
    if spec.max_segments:
        return "packed sequences, and FP8 attention has one sequence in each row"
    # Where a query attends to no key, Hopper's forward kernel never ends (cuDNN 9.25 to 9.27).
    if spec.is_padding:
        return f"mask type {spec.mask_type!r}, and FP8 attention has no padding"
    square = spec.q_length == spec.kv_length
    if spec.mask_type not in ("no_mask", "causal") and not (spec.mask_type == "causal_bottom_right" and square):
        return f"mask type {spec.mask_type!r}, and FP8 attention has 'causal' and 'no_mask'"
    if spec.window[0] >= 0 or (spec.window[1] >= 0 and not spec.is_causal):
        return f"a window of {spec.window}, and FP8 attention has none"
    if spec.bias_type != "no_bias":
        return f"bias_type {spec.bias_type!r}, and FP8 attention has no bias"
    if spec.softmax_type != "vanilla":
        return f"softmax_type {spec.softmax_type!r}, and FP8 attention has 'vanilla'"
    if spec.logit_softcap is not None:
        return "a logit_softcap, and FP8 attention has none"
    if spec.dropout_rate:
        return f"dropout of {spec.dropout_rate}, and FP8 attention has none"
    if spec.return_max_logit:
        return "return_max_logit, and FP8 attention does not give max logits"
    return None


def _lacks_size(spec: AttentionSpec) -> str | None:
    heads = {spec.head_dim, spec.v_head_dim}
    if heads != {HEAD_DIM}:
        return f"heads of {' and '.join(map(str, sorted(heads)))}, and FP8 attention has heads of {HEAD_DIM}"
    for name, length in (("queries", spec.q_length), ("keys", spec.kv_length)):
        if length == 0 or length % LENGTH_MULTIPLE:
            return f"{length} {name}, and FP8 attention has multiples of {LENGTH_MULTIPLE}"
    if spec.batch == 0:
        return "no examples"
    return None
