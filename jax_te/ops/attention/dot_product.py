"""Dot-product attention."""

from __future__ import annotations

import functools
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh

from jax_te._device import default_platform
from jax_te._validation import check_number, check_rate, checked, dtype_name, log_once
from jax_te.ops.attention.checks import attention_spec, check_arrays
from jax_te.ops.attention.context_parallel import ContextParallel
from jax_te.ops.attention.context_parallel.checks import (
    check_sharding,
    choose_backend,
    fp8_exchange_lacks,
    fp8_kernels_lack,
)
from jax_te.ops.attention.context_parallel.on_mesh import attention_on_mesh
from jax_te.ops.attention.context_parallel.sharding import AttentionSharding, attention_sharding
from jax_te.ops.attention.fp8 import fp8_attention
from jax_te.ops.attention.fp8_types import Fp8Call
from jax_te.ops.attention.segments import Segments
from jax_te.ops.attention.spec import (
    QKV,
    AttentionArrays,
    AttentionSpec,
    BiasType,
    MaskType,
    SoftmaxType,
    Window,
)
from jax_te.ops.backend import ambient_backend, choose_fp8, primitives, select
from jax_te.ops.integers import as_int32
from jax_te.ops.primitives import Backend
from jax_te.quantize import (
    AttentionPrecision,
    AttentionState,
    attention_precision_of,
    attention_scales_are_current,
    scales_are_frozen,
)
from jax_te.recipe import Recipe
from jax_te.sharding import ShardingRules, auto_region, constrain, current_rules, free_axes
from jax_te.typing import Array, BackendName, Key, LogicalAxes


@checked
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
    dropout_key: Key | None = None,
    return_max_logit: bool = False,
    context_parallel: ContextParallel | None = None,
    out_axes: LogicalAxes | None = None,
    recipe: Recipe | None = None,
    state: AttentionState | None = None,
    evaluation: bool = False,
    backend: BackendName | None = None,
) -> Any:
    """Return ``softmax(scale q k^T) v`` for every head; scores and softmax are fp32.

    Args:
        qkv: ``(packed [b, s, 3, n, d],)`` or ``(q [b, sq, n, d], k [b, skv, g, d], v [b, skv, g, dv])``, all of one
            dtype; query head ``i`` uses key/value head ``i // (n / g)``. A projection that gives the packed form should
            pass it on: cuDNN reads it without a copy.
        mask_type: ``"no_mask"``; ``"causal"`` (position ``i`` attends to ``0..i``); ``"causal_bottom_right"`` (the last
            query attends to all keys, the one before it to all but the last); ``"padding"``, ``"padding_causal"`` and
            ``"padding_causal_bottom_right"`` with lengths or ``segments``; ``"arbitrary"`` with ``mask``. Queries past
            their length give zeros, as do all queries of a call without keys.
        mask: bool, broadcastable to ``[b, n, sq, skv]`` with four axes; True is masked out.
        q_lengths, kv_lengths: int32 ``[b]`` valid positions; ``q_lengths`` None: ``kv_lengths``.
        segments: boundaries of several sequences in each row (``thd``), each of which attends to itself only. Padding
            mask types.
        window: ``(left, right)`` positions attended to besides a query's own; -1: all. Counted along the mask type's
            diagonal.
        bias_type: ``"pre_scale_bias"`` is added to ``q k^T``, ``"post_scale_bias"`` to ``scale q k^T``; ``"alibi"``
            takes slopes and subtracts slope times distance (Press et al. 2021).
        bias: floating-point array, broadcastable to ``[b, n, sq, skv]`` with four axes; for ALiBi ``[n]`` or
            ``[b, n]``.
        softmax_type: ``"off-by-one"`` adds 1 to the denominator, ``"learnable"`` ``exp(softmax_offset)``.
        softmax_offset: ``[n]``.
        logit_softcap: ``cap tanh(scores / cap)`` in place of the scaled scores, before a bias (Gemma Team 2024).
        scale: None: ``1 / sqrt(d)``.
        dropout_rate: dropout probability of attention; needs ``dropout_key`` unless it is 0, or the call evaluates.
        return_max_logit: whether to return the max logit of each head, too, after scale, softcap and bias.
        context_parallel: exchange of keys and values between devices if the mesh in use shards the sequence. None:
            `ContextParallel`'s defaults.
        out_axes: logical axes of the result ``[b, sq, n, dv]``, and of queries, keys and values; required on a mesh
            with Explicit axes, for context parallelism and for ``te`` on a mesh.
        recipe: recipe of the call. One with ``fp8_dpa`` quantizes queries, keys, values, the softmax's result and the
            output, and in backward the gradients; all other recipes, and None, say nothing about attention.
        state: state of such a recipe, see `jax_te.quantize.init_attention_state`; its gradient is its next value.
        evaluation: whether the call evaluates: a derivative may leave the state out, and nothing is dropped. A
            ``dropout_rate`` above 0, which FP8 attention does not have, then keeps it in the compute dtype as it does
            in training.
        backend: None for the ambient one. Calls that have no FP8 kernel run in the compute dtype under ``"auto"``, and
            are refused under the others, see `explain_backend`.

    Returns:
        ``[b, sq, n, dv]`` in the dtype of the input; with ``return_max_logit`` a tuple of it and fp32 ``[n]``, over the
        whole batch, without a gradient.

    Raises:
        ValueError: for shapes that do not agree, and for an array that is missing or unused; for known lengths and
            segments that reach beyond their row; for sizes that do not divide over the context axis, and options that
            the kind of exchange does not support; for numbers that are not finite.
        TypeError: for inputs or a bias that are not floating point, inputs of several dtypes, a mask that is not bool,
            lengths that are not integers, and a ``return_max_logit`` that is not True or False.
        BackendUnavailableError: if ``backend`` was named and has no kernel for this call; the message says why.
        QuantizerStateError: if the recipe has state for attention and none is given, or a derivative leaves it out.

    Source: ``transformer_engine.jax.attention.fused_attn``; Vaswani et al. 2017; Ainslie et al. 2023 (groups); Beltagy
    et al. 2020 (windows).

    >>> import jax.numpy as jnp
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> dot_product_attention((q, q, q)).shape
    (1, 4, 2, 8)
    """
    _check_dropout(dropout_rate, dropout_key, evaluation)
    scale, logit_softcap = _checked_numbers(scale, logit_softcap)
    spec = attention_spec(
        qkv,
        mask_type,
        scale,
        0.0 if evaluation else dropout_rate,
        window=window,
        bias_type=bias_type,
        bias_shape=None if bias is None else bias.shape,
        softmax_type=softmax_type,
        logit_softcap=logit_softcap,
        return_max_logit=return_max_logit,
        max_segments=0 if segments is None else segments.q_lengths.shape[-1],
    )
    # Without dropout the key would be one more input of every kernel and shard_map.
    key = dropout_key if spec.dropout_rate else None
    arrays = AttentionArrays(mask, q_lengths, kv_lengths, segments, bias, softmax_offset, key)
    check_arrays(spec, arrays)
    arrays = _with_wide_lengths(arrays)
    mesh = jax.sharding.get_abstract_mesh()
    asked = ambient_backend.value if backend is None else backend
    precision = attention_precision_of(recipe)
    if precision is not None:
        # With the rate in evaluation, too: what training could not run in FP8, evaluation does not.
        of_training = replace(spec, dropout_rate=float(dropout_rate))
        call = _fp8_call(mesh, of_training, precision, out_axes, context_parallel, asked, evaluation)
        if call is not None:
            precision.check_state(state)
            with jax.named_scope("dot_product_attention"):
                return fp8_attention(call, qkv, state, out_axes)
    if 0 in (spec.batch, spec.q_length, spec.kv_length):
        runner = primitives("xla")  # zeros: no kernel has anything to compute
    elif mesh.empty:
        runner = _backend(spec, asked)
    else:
        runner = _resolve(
            mesh,
            current_rules(mesh),
            spec,
            out_axes,
            context_parallel,
            has_mask=mask is not None,
            same_lengths=arrays.same_lengths(),
            backend=asked,
            platform=default_platform(),
        )
    with jax.named_scope("dot_product_attention"):
        if not isinstance(runner, AttentionSharding):
            return _run(runner, spec, qkv, arrays, out_axes)
        out, max_logit = attention_on_mesh(runner, qkv, arrays)
        return (out, max_logit) if return_max_logit else out


def _check_dropout(rate: float, key: Key | None, evaluation: bool) -> None:
    """Raise ValueError for a rate of dropout that is none, or without a key."""
    check_rate(dropout_rate=rate)
    if rate and key is None and not evaluation:
        raise ValueError(f"dropout_rate={rate} needs dropout_key; give a key, or the rate 0")


def _checked_numbers(scale: float | None, logit_softcap: float | None) -> tuple[float | None, float | None]:
    """Return the scale and softcap of a call's scores; raise ValueError for what is no finite number."""
    if scale is not None:
        check_number(scale=scale)
    if logit_softcap is not None:
        check_number(logit_softcap=logit_softcap)
        logit_softcap = float(logit_softcap)  # JAX takes no integer of more than 64 bits
    return scale, logit_softcap


def _run(backend: Backend, spec: AttentionSpec, qkv: QKV, arrays: AttentionArrays, out_axes: LogicalAxes | None) -> Any:
    """Return the output, with max logits if requested, of a call on one device, or that the compiler partitions."""

    def attend(qkv: QKV, arrays: AttentionArrays) -> Any:
        out, max_logit = backend.attention(qkv, spec, arrays)
        # Named after the constraint, so that a policy saves it in the sharding that the next layer reads.
        out = checkpoint_name(constrain(out, out_axes), "context")
        return (out, max_logit) if spec.return_max_logit else out

    axes: Any = out_axes
    if spec.return_max_logit:
        axes = (out_axes, None if out_axes is None else (out_axes[2],))
    return auto_region(attend, axes)(qkv, arrays)


def _backend(spec: AttentionSpec, asked: BackendName, unsharded: str | None = None) -> Backend:
    """Return the backend that runs a call.

    Args:
        spec: the call.
        asked: backend that the call names, or the ambient one.
        unsharded: reason why the devices of a mesh cannot run it by themselves.
    """
    return primitives(select("dot_product_attention", attention=spec, backend=asked, unsharded=unsharded))


# Cached, because the attention layers of a model make the same call.
@functools.lru_cache(maxsize=1024)
def _resolve(
    mesh: AbstractMesh,
    rules: ShardingRules,
    spec: AttentionSpec,
    axes: LogicalAxes | None,
    context_parallel: ContextParallel | None,
    *,
    has_mask: bool,
    same_lengths: bool,
    backend: BackendName,
    platform: str,
) -> Backend | AttentionSharding:
    """Return the sharding of a call on a mesh that each device runs by itself, or the backend if the compiler
    partitions it.

    ``platform``, that of the default device, is a part of the cache's key alone: the choice of the backend reads the
    device by itself, and a program may change it between calls.
    """
    del platform
    sharding, reason = _sharding(mesh, rules, spec, axes, context_parallel, has_mask=has_mask)
    if sharding is None:
        return _backend(spec, backend, unsharded=reason)
    name = choose_backend(sharding, same_lengths, backend).backend
    if name == "xla" and not sharding.context:
        # The compiler partitions plain JAX, and jax.nn's cuDNN call, as well as explicit rules would.
        return primitives(name)
    return replace(sharding, backend=name)


def _with_wide_lengths(arrays: AttentionArrays) -> AttentionArrays:
    """Return the arrays with lengths and offsets as int32, and with the lengths of the keys where queries have none."""
    # One array for both where one was given for both: `same_lengths` compares them by identity.
    wide: dict[int, Array] = {}

    def once(name: str, x: Array | None) -> Any:
        return None if x is None else wide.setdefault(id(x), as_int32(name, x))

    kv_lengths = once("kv_lengths", arrays.kv_lengths)
    q_lengths = kv_lengths if arrays.q_lengths is None else once("q_lengths", arrays.q_lengths)
    segments = arrays.segments
    if segments is not None:
        segments = Segments(*(once(f"segments.{name}", x) for name, x in segments._asdict().items()))
    return arrays._replace(q_lengths=q_lengths, kv_lengths=kv_lengths, segments=segments)


def _sharding(
    mesh: AbstractMesh,
    rules: ShardingRules,
    spec: AttentionSpec,
    axes: LogicalAxes | None,
    context_parallel: ContextParallel | None,
    *,
    has_mask: bool,
) -> tuple[AttentionSharding | None, str | None]:
    """Return the sharding of a call whose devices can run it by themselves, or the reason why they cannot.

    Both are None if nothing is split.
    """
    # Without axes a sharded sequence would be treated as unsharded, and zig-zag order as natural order.
    if axes is None and context_parallel is not None:
        _check_whole_sequences(spec, mesh, rules, context_parallel)
    cp = context_parallel or ContextParallel()
    sharding = None if axes is None else attention_sharding(spec, axes, mesh, rules, cp)
    if sharding is not None:
        try:
            check_sharding(sharding, has_mask)
        except ValueError as error:
            if sharding.context:
                raise
            # Without context parallelism the compiler can partition plain JAX, also into shards of different sizes.
            return None, str(error)
    elif prod([mesh.shape[name] for name in free_axes(mesh)]) > 1:
        return None, f"out_axes {axes} do not say how heads and examples are split"
    return sharding, None


def _fp8_call(
    mesh: AbstractMesh,
    spec: AttentionSpec,
    precision: AttentionPrecision,
    axes: LogicalAxes | None,
    context_parallel: ContextParallel | None,
    backend: BackendName,
    evaluation: bool,
) -> Fp8Call | None:
    """Return a call resolved to run in FP8; None if it runs in the compute dtype, which is logged once.

    Raises:
        BackendUnavailableError: if it cannot run in FP8, and ``backend`` is not ``"auto"``.
    """
    sharding = unsharded = exchange = None
    if not mesh.empty:
        sharding, unsharded = _sharding(mesh, current_rules(mesh), spec, axes, context_parallel, has_mask=False)
    if sharding is not None:
        exchange = fp8_exchange_lacks(sharding)
        unsharded = fp8_kernels_lack(sharding, precision)
    choice = choose_fp8(spec, precision, backend, unsharded=unsharded, exchange=exchange)
    if choice.unquantized is not None:
        log_once(f"attention runs in {dtype_name(spec.dtype)}, not in FP8 as the recipe says: {choice.unquantized}")
        return None
    if spec.is_bottom_right:
        spec = replace(spec, mask_type="causal")  # the same where there are as many queries as keys
    return Fp8Call(
        spec=spec,
        precision=precision,
        kernels="cudnn" if choice.parts["attention"] == "cudnn" else "xla",
        sharding=None if sharding is None else replace(sharding, spec=spec),
        high_precision_backend="te" if choice.parts["attention"] == "cudnn" else "xla",
        evaluation=evaluation,
        frozen_scales=scales_are_frozen.value,
        current_scales=attention_scales_are_current.value,
    )


def _check_whole_sequences(
    spec: AttentionSpec, mesh: AbstractMesh, rules: ShardingRules, context_parallel: ContextParallel
) -> None:
    """Raise ValueError if the mesh shards sequences but the call specifies no axes."""
    sharding = attention_sharding(spec, (None, "sequence", None, None), mesh, rules, context_parallel)
    if sharding is not None and sharding.context:
        raise ValueError(
            f"context_parallel is given, the mesh's context axis has {sharding.context_shards} devices, and "
            "out_axes=None does not say that they shard the sequence; give out_axes, e.g. ('batch', 'sequence', "
            "'heads', None), or leave context_parallel out"
        )
