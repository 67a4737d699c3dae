"""Dot-product attention."""

from __future__ import annotations

import functools
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_te.config.internal import check_rate
from jax_te.ops.attention.checks import check_arrays
from jax_te.ops.attention.context_parallel import ContextParallel
from jax_te.ops.attention.context_parallel.call import MeshCall, mesh_call
from jax_te.ops.attention.context_parallel.checks import check_call, choose
from jax_te.ops.attention.context_parallel.run import attention_on_mesh
from jax_te.ops.attention.segments import Segments
from jax_te.ops.attention.spec import (
    QKV,
    AttentionArrays,
    AttentionSpec,
    BiasType,
    MaskType,
    SoftmaxType,
    Window,
    describe,
)
from jax_te.ops.backend import BackendName, primitives, select
from jax_te.sharding import auto_region, constrain, current_mesh
from jax_te.typing import Array, LogicalAxes


def dot_product_attention(
    qkv: QKV,
    *,
    mask_type: MaskType = "causal",
    mask: Array | None = None,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    segments: Segments | None = None,
    window: Window | None = None,
    bias_type: BiasType = "no_bias",
    bias: Array | None = None,
    softmax_type: SoftmaxType = "vanilla",
    softmax_offset: Array | None = None,
    logit_softcap: float | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    return_max_logit: bool = False,
    context_parallel: ContextParallel | None = None,
    out_axes: LogicalAxes | None = None,
    backend: BackendName | None = None,
) -> Any:
    """``softmax(scale q k^T) v`` for every head; scores and softmax are fp32.

    Args:
        qkv: ``(packed [b, s, 3, n, d],)`` or ``(q [b, sq, n, d], k [b, skv, g, d], v [b, skv, g, dv])``; query head
            ``i`` uses key/value head ``i // (n / g)``. Packed is faster where it is there already: cuDNN reads it
            without a copy.
        mask_type: ``"no_mask"``; ``"causal"`` (position ``i`` sees ``0..i``); ``"causal_bottom_right"`` (the last
            query sees all keys, the one before it all but the last); ``"padding"``, ``"padding_causal"`` and
            ``"padding_causal_bottom_right"`` with lengths or ``segments``; ``"arbitrary"`` with ``mask``. Queries past
            their length give zeros.
        mask: bool, broadcastable to ``[b, n, sq, skv]`` with four axes; True hides.
        q_lengths, kv_lengths: int32 ``[b]`` valid positions; ``q_lengths`` None: ``kv_lengths``.
        segments: several sequences in each row (``thd``), each of which sees itself only. Padding mask types.
        window: ``(left, right)`` positions seen beside a query's own; -1: all. Counted along the mask type's diagonal.
        bias_type: ``"pre_scale_bias"`` is added to ``q k^T``, ``"post_scale_bias"`` to ``scale q k^T``; ``"alibi"``
            takes slopes and subtracts slope times distance (Press et al. 2021).
        bias: floating point, broadcastable to ``[b, n, sq, skv]`` with four axes; for ALiBi ``[n]`` or ``[b, n]``.
        softmax_type: ``"off-by-one"`` adds 1 to the denominator, ``"learnable"`` ``exp(softmax_offset)``.
        softmax_offset: ``[n]``.
        logit_softcap: ``cap tanh(scores / cap)`` in place of the scaled scores, before a bias (Gemma Team 2024).
        scale: None: ``1 / sqrt(d)``.
        dropout_rate: of the probabilities; needs ``dropout_key``. Without a key there is no dropout.
        return_max_logit: also return the largest logit of each head, after scale, cap and bias.
        context_parallel: how the ranks exchange keys and values among which the mesh in use splits the sequence. None:
            as `ContextParallel`'s defaults.
        out_axes: logical axes of the result ``[b, sq, n, dv]``, and of queries, keys and values, which are split
            likewise; required on a mesh with Explicit axes, for context parallelism and for ``te`` on a mesh.
        backend: None for the ambient one.

    Returns:
        ``[b, sq, n, dv]`` in the dtype of the input; with ``return_max_logit`` a tuple of it and fp32 ``[n]``, over the
        whole batch, without a gradient.

    Raises:
        ValueError: for shapes, or an array that the call lacks or does not use; for sizes that do not divide over the
            context axis, and what the way of exchange does not have.
        TypeError: for a mask that is not bool, lengths that are no integers, a bias that is not floating point.
        BackendUnavailableError: if the backend asked for has no kernel for this call; the message says why.

    Source: ``transformer_engine.jax.attention.fused_attn``; Vaswani et al. 2017; Ainslie et al. 2023 (groups); Beltagy
    et al. 2020 (windows).

    >>> import jax.numpy as jnp
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> dot_product_attention((q, q, q)).shape
    (1, 4, 2, 8)
    """
    check_rate(dropout_rate=dropout_rate)
    spec = describe(
        qkv,
        mask_type,
        scale,
        dropout_rate if dropout_key is not None else 0.0,
        window=window,
        bias_type=bias_type,
        bias_shape=None if bias is None else bias.shape,
        softmax_type=softmax_type,
        logit_softcap=logit_softcap,
        return_max_logit=return_max_logit,
        max_segments=0 if segments is None else segments.q_lengths.shape[-1],
    )
    arrays = AttentionArrays(mask, q_lengths, kv_lengths, segments, bias, softmax_offset, dropout_key)
    check_arrays(spec, arrays)
    if q_lengths is None:
        arrays = arrays._replace(q_lengths=kv_lengths)
    if context_parallel is not None and out_axes is None:
        _check_whole(spec)
    name, call = _where(spec, arrays, out_axes, context_parallel or ContextParallel(), backend)
    fn = functools.partial(_attention, name, call or spec, out_axes)
    axes: Any = (out_axes, None if out_axes is None else (out_axes[2],)) if return_max_logit else out_axes
    return auto_region(fn, axes)(qkv, arrays)


def _check_whole(spec: AttentionSpec) -> None:
    """Raise ValueError where the mesh in use splits sequences and a call without axes does not say so."""
    mesh, sequences = current_mesh(), (None, "sequence", None, None)
    call = None if mesh is None else mesh_call(spec, sequences, mesh, ContextParallel())
    if call is not None and call.context:
        raise ValueError(
            f"context_parallel is given, the mesh has {call.context_ranks} context ranks, and out_axes=None does not "
            "say that they split the sequence; give out_axes, e.g. ('batch', 'sequence', 'heads', None), or leave "
            "context_parallel out"
        )


def _where(
    spec: AttentionSpec,
    arrays: AttentionArrays,
    axes: LogicalAxes | None,
    context_parallel: ContextParallel,
    backend: BackendName | None,
) -> tuple[str, MeshCall | None]:
    """Which backend runs a call, and how on each device of the mesh; None: on one, or as the compiler splits it."""
    mesh = current_mesh()
    call = None if mesh is None or axes is None else mesh_call(spec, axes, mesh, context_parallel)
    if call is None:
        free = 1 if mesh is None else mesh.size // prod(mesh.shape[name] for name in mesh.manual_axes)
        lacks = f"out_axes {axes} do not say how heads and examples are split" if free > 1 else None
        return select("dot_product_attention", attention=spec, backend=backend, ranks=lacks), None
    if call.context:
        check_call(call, arrays)
        choice = choose(call, arrays, backend)
        return choice.backend, replace(call, backend=choice.backend)
    try:
        check_call(call, arrays)
    except ValueError as error:  # the compiler splits what does not divide
        return select("dot_product_attention", attention=spec, backend=backend, ranks=str(error)), None
    choice = choose(call, arrays, backend)
    # The compiler can split plain JAX as well as we, and jax.nn's kernel.
    return choice.backend, None if choice.backend == "xla" else replace(call, backend=choice.backend)


def _attention(
    backend: str, spec: AttentionSpec | MeshCall, out_axes: LogicalAxes | None, qkv: QKV, arrays: AttentionArrays
) -> Any:
    with jax.named_scope("dot_product_attention"):
        if isinstance(spec, MeshCall):
            result: Any = attention_on_mesh(spec, qkv, arrays)
            spec = spec.spec
        else:
            result = primitives(backend).attention(qkv, spec, arrays)
    out, max_logit = result
    out = checkpoint_name(constrain(out, out_axes), "context")
    return (out, max_logit) if spec.return_max_logit else out
