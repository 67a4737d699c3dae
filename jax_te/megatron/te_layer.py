"""What Megatron's linear layers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jax_te.config import ModelParallelConfig
from jax_te.config.internal import SYMMETRIC_AR_TYPES
from jax_te.layers.internal import TensorParallel, check_context_size
from jax_te.megatron.quant_config import QuantizationConfig, get_quant_config_or_none
from jax_te.megatron.quant_layer import finish_init, will_execute_quantized
from jax_te.megatron.sharded_state import sharded_state_dict
from jax_te.sharding import current_mesh
from jax_te.sharding.internal import axis_ranks

TP_COMM_BUFFER_NAMES = (None, "qkv", "proj", "fc1", "fc2")
"""Which linear layer of a transformer layer this is, in Megatron's words."""

PARALLEL_MODES = (None, "duplicated", "column", "row")
"""``"column"`` splits the output features over the tensor ranks, ``"row"`` the input features, the others neither."""


class TELayer:
    """Methods of Megatron's linear layers; mixed into `TELinear` and `TELayerNormColumnParallelLinear`.

    Attributes, all static:
        config: as given.
        in_features, out_features: of the whole kernel.
        parallel_mode: ``"column"``, ``"row"`` or None.
        use_bias: there is a bias.
        te_return_bias: the second element of a call's result is the bias.
        is_expert, tp_comm_buffer_name, symmetric_ar_type, disable_parameter_transpose_cache: as given.
    """

    config: ModelParallelConfig
    in_features: int
    out_features: int
    parallel_mode: str | None
    use_bias: bool
    te_return_bias: bool
    is_expert: bool
    tp_comm_buffer_name: str | None
    symmetric_ar_type: str | None
    disable_parameter_transpose_cache: bool
    tensor_parallel: TensorParallel

    def _describe_layer(
        self,
        config: ModelParallelConfig,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None,
        symmetric_ar_type: str | None,
    ) -> None:
        """Set the attributes above, after checking what is not the layer's own to check."""
        if symmetric_ar_type not in SYMMETRIC_AR_TYPES:
            raise AssertionError(f"symmetric_ar_type must be one of {SYMMETRIC_AR_TYPES}, got {symmetric_ar_type!r}")
        if tp_comm_buffer_name not in TP_COMM_BUFFER_NAMES:
            raise ValueError(f"tp_comm_buffer_name must be one of {TP_COMM_BUFFER_NAMES}, got {tp_comm_buffer_name!r}")
        self.config = config
        self.in_features, self.out_features = input_size, output_size
        self.parallel_mode = parallel_mode
        self.te_return_bias = skip_bias_add and bias
        self.is_expert = is_expert
        self.tp_comm_buffer_name = tp_comm_buffer_name
        self.symmetric_ar_type = symmetric_ar_type
        self.disable_parameter_transpose_cache = config.disable_parameter_transpose_cache
        self._check_mesh()
        split = {"column": output_size, "row": input_size}.get(parallel_mode or "", 0)
        if split % self.tp_size:
            raise AssertionError(
                f"{split} {'output' if parallel_mode == 'column' else 'input'} features of a {parallel_mode}-parallel "
                f"layer are not divisible by {self.tp_size} tensor ranks"
            )

    def _check_mesh(self) -> None:
        check_context_size(self.config.context_parallel_size)
        wanted = self.config.tensor_model_parallel_size
        if self.parallel_mode is not None and wanted not in (1, self.tp_size):
            raise ValueError(
                f"config.tensor_model_parallel_size is {wanted}, and the mesh in use has {self.tp_size} tensor ranks; "
                "set a mesh with that many (jax.set_mesh), or leave it 1, which takes the mesh's"
            )

    @property
    def tp_size(self) -> int:
        """Parts that the kernel's split axis has on the mesh in use; without a mesh, as the configuration says.

        1 for a layer that is not split.
        """
        if self.parallel_mode is None:
            return 1
        return self.config.tensor_model_parallel_size if current_mesh() is None else axis_ranks("ffn")

    def finish_init(self, quantization_config: QuantizationConfig | None) -> None:
        """Take the precision of a quantization config, in place of any other; see `jax_te.megatron.finish_init`."""
        finish_init(self, quantization_config)  # type: ignore[arg-type]  # it is mixed into quantizable layers

    def will_execute_quantized(self, is_context_quantized: bool) -> bool:
        """Whether the layer runs quantized in its present mode; see `jax_te.megatron.will_execute_quantized`."""
        return will_execute_quantized(self, is_context_quantized)  # type: ignore[arg-type]

    def backward_dw(self) -> None:
        """Nothing, where ``config.delay_wgrad_compute`` is False: gradients are there already.

        Raises:
            RuntimeError: where it is True. The weight gradients that wait are not in the layer, which holds no queue,
                but in the function that `jax_te.remat.split_vjp` gave.
        """
        if self.config.delay_wgrad_compute:
            raise RuntimeError(
                "a JAX layer holds no weight gradients that wait: jax_te.remat.split_vjp(fn, params, *inputs) gives "
                "(y, backward), backward(dy) gives (dinputs, backward_dw), and backward_dw() the gradients of params"
            )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of every array by name; see `jax_te.megatron.sharded_state_dict`.

        Raises:
            ValueError: for ``sharded_offsets``.
        """
        assert isinstance(self, nnx.Module)
        return sharded_state_dict(self, prefix, sharded_offsets, metadata)

    def __repr__(self) -> str:
        sizes = {"in_features": self.in_features, "out_features": self.out_features}
        split = {"row": "in_features", "column": "out_features"}.get(self.parallel_mode or "")
        if split is not None:
            sizes[split] //= self.tp_size
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return f"{type(self).__name__}({listed}, bias={self.use_bias}, TP={self.tp_size})"

    def _tensor_parallel_arguments(self, tp_group: str | None) -> dict[str, Any]:
        """What `jax_te.layers.Linear` takes of the configuration. A layer that is not split has no part in it."""
        split = self.parallel_mode is not None
        return {
            "sequence_parallel": self.config.sequence_parallel and split,
            "tp_group": tp_group,
            "tp_size": self.config.tensor_model_parallel_size if split else 1,
            "parallel_mode": self.parallel_mode,
            "fuse_wgrad_accumulation": self.config.gradient_accumulation_fusion,
        }

    def _take_precision(self, name: str | None) -> None:
        """The precision that the configuration's rules have for a module of this name."""
        if name is not None:
            self.finish_init(get_quant_config_or_none(name, self.config.quant_recipe))


def refuse(**given: bool) -> None:
    """Raise ValueError for an option of Megatron's that Transformer Engine's layers have not, if it is on.

    >>> refuse(gather_output=False)
    """
    ways = {
        "gather_output": "the output stays split over the tensor ranks; jax_te.sharding.constrain(y, axes) gathers it",
        "skip_weight_param_allocation": "the layer has a kernel of its own; jax_te.layers.Linear can do without, for "
        "tied weights",
        "is_expert": "an expert takes TENorm and TEColumnParallelLinear in its place",
    }
    for name, on in given.items():
        if on:
            raise ValueError(f"{name}=True is not supported: {ways[name]}")
