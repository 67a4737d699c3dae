"""The common part of Megatron's linear layers: arguments, construction, methods."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flax import nnx

from jax_te._validation import log_hints
from jax_te.config import SYMMETRIC_AR_TYPES, ModelParallelConfig
from jax_te.layers import QuantizableModule, TensorParallel, check_context_size, expert_rngs
from jax_te.megatron.quantization.layer_precision import finish_init, will_execute_quantized
from jax_te.megatron.quantization.rules import get_quant_config_or_none
from jax_te.megatron.sharded_state import sharded_state_dict
from jax_te.megatron.state_dict import StateDicts
from jax_te.megatron.te_kwargs import condition_init_method
from jax_te.sharding import axis_ranks, current_mesh
from jax_te.typing import Initializer, SplitAxis, TensorGroup


@dataclass(frozen=True, kw_only=True)
class TELayerOptions:
    """Arguments of Megatron's linear layers other than their sizes and ``rngs``, see `TELinear`.

    The properties say them in the words of the layers of `jax_te.layers`.
    """

    config: ModelParallelConfig
    init_method: Initializer
    parallel_mode: SplitAxis | None
    bias: bool
    skip_bias_add: bool
    is_expert: bool
    tp_comm_buffer_name: str | None
    symmetric_ar_type: str | None
    tp_group: TensorGroup
    name: str | None

    @property
    def sharded(self) -> bool:
        """Whether the tensor axis shards the kernel, and the layer has a part in sequence parallelism.

        An expert's layer does not: it computes the device's tokens, like Megatron's after its token dispatcher. A layer
        that is not sharded takes and returns whole sequences.
        """
        return self.parallel_mode is not None and not self.is_expert

    @property
    def sharded_mode(self) -> SplitAxis | None:
        """The parallel mode of the kernel."""
        return self.parallel_mode if self.sharded else None

    @property
    def tp_size(self) -> int:
        """Number of tensor devices; 1 leaves it to the mesh."""
        return self.config.tensor_model_parallel_size if self.sharded else 1

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations are sharded along the sequence outside of the layer."""
        return self.config.sequence_parallel and self.sharded

    @property
    def return_bias(self) -> bool:
        """Whether calls return a bias. Not with ``skip_bias_add`` alone: without a bias they return ``(y, None)``."""
        return self.skip_bias_add and self.bias

    @property
    def kernel_init(self) -> Initializer:
        """The initializer, or zeros if the configuration asks for none."""
        return condition_init_method(self.config, self.init_method)

    def rngs_of_kernel(self, rngs: nnx.Rngs) -> nnx.Rngs:
        """Return the streams that draw the kernel; an expert has its own."""
        return expert_rngs(rngs) if self.is_expert else rngs


class TELayer(StateDicts, QuantizableModule):
    """Construction and methods of Megatron's linear layers, for `TELinear` and `TELayerNormColumnParallelLinear`.

    Attributes, all static:
        config: as given.
        in_features, out_features: of the whole kernel; of several axes of output features their product.
        parallel_mode: ``"column"``, ``"row"`` or None.
        use_bias: there is a bias.
        te_return_bias: the second element of a call's result is the bias. Megatron's name of it, which its modules
            read.
        is_expert, tp_comm_buffer_name, symmetric_ar_type, disable_parameter_transpose_cache: as given.
    """

    config: ModelParallelConfig
    in_features: int
    out_features: int
    parallel_mode: SplitAxis | None
    use_bias: bool
    te_return_bias: bool
    is_expert: bool
    tp_comm_buffer_name: str | None
    symmetric_ar_type: str | None
    disable_parameter_transpose_cache: bool
    tensor_parallel: TensorParallel

    # Megatron has these as methods, this package also as functions of any module; there is one implementation of each.
    finish_init = finish_init
    will_execute_quantized = will_execute_quantized
    sharded_state_dict = sharded_state_dict

    def _follow_rules(self, name: str | None) -> None:
        """Set the precision that ``config.quant_recipe`` assigns to a layer of this name."""
        # Without a name the rules are not applied: a rule for "*" would match layers for which it was not intended.
        if name is not None:
            finish_init(self, get_quant_config_or_none(name, self.config.quant_recipe))

    def _take_options(self, input_size: int, output_size: int | tuple[int, ...], options: TELayerOptions) -> None:
        """Set the attributes, and check the arguments that the layer behind this class does not check."""
        if options.symmetric_ar_type not in SYMMETRIC_AR_TYPES:
            raise AssertionError(
                f"symmetric_ar_type must be one of {SYMMETRIC_AR_TYPES}, got {options.symmetric_ar_type!r}"
            )
        log_hints(symmetric_ar_type=options.symmetric_ar_type, tp_comm_buffer_name=options.tp_comm_buffer_name)
        outer = output_size if isinstance(output_size, tuple) else (output_size,)
        self._set_options(input_size, math.prod(outer), options)
        self._check_tensor_ranks(last_output=outer[-1])

    def _set_options(self, in_features: int, out_features: int, options: TELayerOptions) -> None:
        self.config = options.config
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode = options.parallel_mode
        self.is_expert = options.is_expert
        self.te_return_bias = options.return_bias
        self.tp_comm_buffer_name = options.tp_comm_buffer_name
        self.symmetric_ar_type = options.symmetric_ar_type
        self.disable_parameter_transpose_cache = options.config.disable_parameter_transpose_cache

    def _check_tensor_ranks(self, *, last_output: int) -> None:
        """Raise an error if the configuration's ranks are not the mesh's, or do not divide features that they split.

        Args:
            last_output: size of the last axis of output features.
        """
        config, mode = self.config, self.parallel_mode
        check_context_size(config.context_parallel_size)
        wanted = config.tensor_model_parallel_size
        if mode is not None and not self.is_expert and wanted not in (1, self.tp_size):
            raise ValueError(
                f"config.tensor_model_parallel_size is {wanted}, and the mesh in use has {self.tp_size} tensor ranks; "
                "set a mesh with that many (jax.set_mesh), or leave it 1, which takes the mesh's"
            )
        split = {"column": last_output, "row": self.in_features}.get(mode or "", 0)
        if split % self.tp_size:
            raise AssertionError(
                f"{split} {'output' if mode == 'column' else 'input'} features of a {mode}-parallel "
                f"layer are not divisible by {self.tp_size} tensor ranks"
            )

    @property
    def tp_size(self) -> int:
        """Number of shards of the kernel on the mesh in use; without a mesh, the configured number.

        1 for a layer that is not sharded, such as an expert's.
        """
        if self.parallel_mode is None or self.is_expert:
            return 1
        return self.config.tensor_model_parallel_size if current_mesh() is None else axis_ranks("ffn")

    def backward_dw(self) -> None:
        """Do nothing if ``config.delay_wgrad_compute`` is False: gradients are already complete.

        Raises:
            RuntimeError: where it is True. Deferred weight gradients are not in the layer, which has no queue, but in
                the function that `jax_te.training.deferred_vjp` returned.
        """
        if self.config.delay_wgrad_compute:
            raise RuntimeError(
                "a JAX layer holds no weight gradients that wait: jax_te.training.deferred_vjp(fn, model, *inputs) "
                "gives (y, backward), and backward(dy).backward_dw() the gradients of the kernels"
            )

    def __repr__(self) -> str:
        sizes = {"in_features": self.in_features, "out_features": self.out_features}
        split = {"row": "in_features", "column": "out_features"}.get(self.parallel_mode or "")
        if split is not None:
            sizes[split] //= self.tp_size  # Megatron prints the sizes of one rank's kernel
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return f"{type(self).__name__}({listed}, bias={self.use_bias}, TP={self.tp_size})"


def check_stride(stride: int) -> None:
    """Raise ValueError for a stride other than 1.

    >>> check_stride(1)
    """
    if stride != 1:
        raise ValueError(
            f"stride must be 1, got {stride!r}: a kernel is one array, whose parts do not interleave over the tensor "
            "ranks; jax_te.layers.LayerNormMLP keeps gate and up projection on an axis of their own"
        )


def refuse(**given: bool) -> None:
    """Raise ValueError for an option of Megatron's that the layers do not support, if the option is on.

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
