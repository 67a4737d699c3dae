"""Arguments of Transformer Engine that have no meaning here, or another name, refused with what to do instead."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

T = TypeVar("T", bound=type)

_BUFFERS = "XLA has no user buffers, and overlaps collectives by itself; leave it out"
_RANDOM = "random numbers come from rngs= in the constructor and dropout_key= in a call; leave it out"
_CONTEXT = "the context axis of the mesh shares out sequences, ParallelConfig(context=...); leave it out"
_TENSOR = "the core has no parameters, and the tensor axis of the mesh shares out its heads; leave it out"
_PACKED = "boundaries of packed sequences are packed_seq_params=jax_te.layers.PackedSeqParams(...) here"
_FUSED = "queries, keys and values are three arrays here: give query_layer, key_layer and value_layer"
_ALLOCATED = "XLA allocates all arrays; leave it out"
_FP8_RESULT = "what one layer gives another is in the compute dtype; leave it out"
_WARM_UP = "it is for functions that PyTorch compiles ahead, and XLA compiles at the first call; leave it out"
_GENERIC = "it is not supported; leave it out"

_REASONS = {
    "device": "JAX places arrays, by jax.default_device(...) or a mesh; leave it out",
    "name": "a module is named by the attribute that holds it; leave it out",
    "get_rng_state_tracker": _RANDOM,
    "rng_tracker_name": _RANDOM,
    "ub_name": _BUFFERS,
    "ub_tp_comm_overlap": _BUFFERS,
    "ub_overlap_ag": _BUFFERS,
    "ub_overlap_rs": _BUFFERS,
    "ub_overlap_rs_dgrad": _BUFFERS,
    "ub_bulk_dgrad": _BUFFERS,
    "ub_bulk_wgrad": _BUFFERS,
    "symmetric_ar_type": "XLA chooses how devices sum; leave it out",
    "cp_group": _CONTEXT,
    "cp_global_ranks": _CONTEXT,
    "cp_stream": _CONTEXT,
    "tp_group": _TENSOR,
    "tp_size": _TENSOR,
    "sequence_parallel": _TENSOR,
    "attention_type": "the core computes what queries and keys it is given; leave it out",
    "layer_number": "no number here depends on it; leave it out",
    "seq_length": _WARM_UP,
    "micro_batch_size": _WARM_UP,
    "delay_wgrad_compute": "jax_te.training.deferred_vjp gives the kernels' gradients later; leave it out",
    "save_original_input": "backward reads the quantized input; leave it out",
    "parameters_split": "all parts are one kernel, to which out_features=(parts, size) gives an axis; leave it out",
    "return_layernorm_output_gathered": "an array on a mesh is whole for the program; leave it out",
    "checkpoint": "jax_te.te_pytorch.checkpoint(layer, x) recomputes a layer in backward; leave it out",
    "softcap": "it is the constructor's logit_softcap here",
    "num_splits": "the constructor takes it here",
    "bottom_right_diagonal": "the mask type says it here: causal or causal_bottom_right",
    "enc_dec_bottom_right_diagonal": "the mask type says it here: causal or causal_bottom_right",
    "inference_params": "the core has no cache; MultiheadAttention and TransformerLayer take one",
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_kv": _PACKED,
    "cu_seqlens_q_padded": _PACKED,
    "cu_seqlens_kv_padded": _PACKED,
    "max_seqlen_q": _PACKED,
    "max_seqlen_kv": _PACKED,
    "pad_between_seqs": _PACKED,
    "qkv_layer": _FUSED,
    "kv_layer": _FUSED,
    "qkv_interleave_dim": _FUSED,
    "fast_zero_fill": _ALLOCATED,
    "out": _ALLOCATED,
    "dgrad_out": _ALLOCATED,
    "fp8_output": _FP8_RESULT,
    "fp8_grad": _FP8_RESULT,
    "activation_params": _GENERIC,
    "bf16_backward": _GENERIC,
    "qkv_weight_interleaved": _GENERIC,
    "rotary_pos_interleaved": _GENERIC,
    "score_mod": _GENERIC,
    "score_mod_bprop": _GENERIC,
    "score_mod_bprop_tensors": _GENERIC,
    "score_mod_tensors": _GENERIC,
    "thd_attention_policies": _GENERIC,
    "thd_attention_policy_dispatch": _GENERIC,
}
"""Why a layer that does not take an argument of Transformer Engine does not, and what to do instead."""


def refuses_by_name(kind: T) -> T:
    """Return a class whose constructor and call refuse arguments of Transformer Engine by name, with the reason.

    Without it Python says that they are unexpected, as for a misspelt one.

    Raises:
        TypeError: when called with such an argument.
    """
    for method in ("__init__", "__call__"):
        if method in vars(kind):
            setattr(kind, method, _refusing(kind, method))
    return kind


def _refusing(kind: type, method: str) -> Any:
    function = vars(kind)[method]
    refused = _REASONS.keys() - _taken(kind, method)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name in refused:
                raise TypeError(
                    f"{kind.__name__} got {name}={kwargs[name]!r}, an argument of transformer_engine.pytorch that it "
                    f"does not take: {_REASONS[name]}"
                )
        return function(*args, **kwargs)

    return call


def _taken(kind: type, method: str) -> set[str]:
    """Return the names of arguments that a method takes, or hands on to the method of the class below it."""
    own = inspect.signature(vars(kind)[method]).parameters
    taken = set(own)
    if any(each.kind is each.VAR_KEYWORD for each in own.values()):
        taken |= set(inspect.signature(getattr(kind.__base__, method)).parameters)
    return taken
