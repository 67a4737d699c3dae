"""Differentiable functions on arrays, free of Flax, each on the backends that support it."""

from jax_te.config import ActivationParams
from jax_te.ops.attention.checks import attention_spec
from jax_te.ops.attention.context_parallel import ContextParallel, reorder_to_zigzag, undo_zigzag, zigzag_positions
from jax_te.ops.attention.dot_product import dot_product_attention
from jax_te.ops.attention.segments import Segments, segments_from_cu_seqlens
from jax_te.ops.attention.spec import AttentionSpec, BiasType, MaskType, SoftmaxType, Window
from jax_te.ops.backend import BACKENDS, OPS, BackendChoice, BackendName, OpName, explain_backend, use_backend
from jax_te.ops.integers import as_int32, is_known
from jax_te.ops.layer_loop import LOOP_NAME, scan_layers
from jax_te.ops.linear.activation import activation
from jax_te.ops.linear.dense import dense, layernorm_dense
from jax_te.ops.linear.head import explain_head, head_logits
from jax_te.ops.linear.layernorm import layernorm
from jax_te.ops.linear.layernorm_mlp import MlpOptions, layernorm_mlp
from jax_te.ops.linear.norm_and_activation import Activation, NormSpec
from jax_te.ops.linear.plan import LinearOptions
from jax_te.ops.linear.quantize_kernel import quantize_kernel
from jax_te.ops.linear.spec import LinearWeights
from jax_te.ops.lookup import look_up_rows, look_up_rows_on_devices
from jax_te.ops.loss.cross_entropy import softmax_cross_entropy
from jax_te.ops.loss.linear_cross_entropy import linear_cross_entropy
from jax_te.ops.loss.reduction import LossOptions, Reduction
from jax_te.ops.moe import dispatch, losses, permute, routing
from jax_te.ops.moe.grouped_dense import grouped_dense
from jax_te.ops.moe.logits import router_logits
from jax_te.ops.moe.placement import ExpertPlacement, expert_placement
from jax_te.ops.moe.row_groups import RowGroups, check_sizes, group_alignment, row_bound
from jax_te.ops.moe.weighted_act import weighted_activation
from jax_te.ops.residual_plan import called_jaxprs

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "BACKENDS",
    "OPS",
    "Activation",
    "ActivationParams",
    "AttentionSpec",
    "BackendChoice",
    "BackendName",
    "BiasType",
    "ContextParallel",
    "LinearOptions",
    "LinearWeights",
    "LossOptions",
    "MaskType",
    "MlpOptions",
    "NormSpec",
    "RowGroups",
    "Segments",
    "SoftmaxType",
    "Window",
    "activation",
    "attention_spec",
    "dense",
    "dot_product_attention",
    "explain_backend",
    "group_alignment",
    "grouped_dense",
    "layernorm",
    "layernorm_dense",
    "layernorm_mlp",
    "linear_cross_entropy",
    "quantize_kernel",
    "reorder_to_zigzag",
    "row_bound",
    "scan_layers",
    "segments_from_cu_seqlens",
    "softmax_cross_entropy",
    "undo_zigzag",
    "use_backend",
    "zigzag_positions",
]
