"""The experts of a mixture, all at once, and the expert that all tokens share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jax_te._validation import check_positive, checked, log_once
from jax_te.config import ActivationLike, ActivationParams, normal_init
from jax_te.layers.layernorm_mlp import check_elementwise
from jax_te.layers.linear import Linear
from jax_te.layers.lora import without_adapter
from jax_te.layers.mode import TrainingMode
from jax_te.layers.parameters import parameter
from jax_te.layers.results import add_bias, output_and_bias
from jax_te.ops import (
    Activation,
    ExpertPlacement,
    LinearOptions,
    RowGroups,
    activation,
    expert_placement,
    group_alignment,
    grouped_dense,
    weighted_activation,
)
from jax_te.remat import run_recomputed
from jax_te.sharding import axis_ranks, leading_axes
from jax_te.typing import Array, DTypeLike, Initializer, TensorGroup


@runtime_checkable
class ExpertsLayer(Protocol):
    """A linear layer of all experts, as `Experts` calls it: a `GroupedLinear`, or an adapter around one."""

    def __call__(self, x: Array, groups: RowGroups, /, *, is_first_microbatch: bool | None) -> Any:
        """Return ``[rows, *n]``, alone or with a bias."""
        ...


class Experts(TrainingMode):
    """``y = (p act(x @ fc1[g] + b1[g])) @ fc2[g] + p b2[g]`` for the rows of each expert ``g``.

    Args:
        linear_fc1: `GroupedLinear` to the components of the activation, ``[e, h, n_act, f]``.
        linear_fc2: `GroupedLinear` back, ``[e, f, h]``, which returns its bias, if it has one, instead of adding it.
        function: the activation.
        apply_probs_on_input: whether to multiply the input by the probability ``p``, in place of the activation and the
            bias.

    Raises:
        ValueError: for a ``linear_fc2`` that adds its bias; when called, for a result beside its output and bias.

    >>> from jax_te.layers import GroupedLinear
    >>> fc1 = GroupedLinear(2, 16, (1, 32), bias=False, rngs=nnx.Rngs(0))
    >>> fc2 = GroupedLinear(2, 32, 16, bias=False, return_bias=True, rngs=nnx.Rngs(1))
    >>> experts, groups = Experts(fc1, fc2, Activation("gelu")), RowGroups(sizes=jnp.array([2, 1]), rows=4)
    >>> experts(jnp.ones((4, 16)).at[3].set(0), jnp.array([1.0, 1.0, 1.0, 0.0]), groups).shape
    (4, 16)
    """

    def __init__(
        self,
        linear_fc1: ExpertsLayer,
        linear_fc2: ExpertsLayer,
        function: Activation,
        *,
        apply_probs_on_input: bool = False,
    ):
        base = without_adapter(linear_fc2)
        if getattr(base, "use_bias", False) and not getattr(base, "return_bias", True):
            raise ValueError(
                "linear_fc2 adds its bias itself, which the probabilities are to weight first; build it with "
                "return_bias=True, a layer of Megatron's with skip_bias_add=True, or with bias=False"
            )
        self.linear_fc1, self.linear_fc2 = linear_fc1, linear_fc2
        self.function, self.apply_probs_on_input = function, apply_probs_on_input
        layers: tuple[Any, Any] = (linear_fc1, linear_fc2)
        for layer in layers:
            layer.of_mixture = True

    @property
    def alignment(self) -> int:
        """Alignment of an expert's rows with which the recipes in this context read them without a copy."""
        return math.lcm(*(group_alignment(layer.recipe) for layer in self.base_layers()))

    def base_layers(self) -> tuple[Any, Any]:
        """Return both layers, without adapters around them."""
        return without_adapter(self.linear_fc1), without_adapter(self.linear_fc2)

    @property
    def takes_tokens(self) -> bool:
        """Whether a call may have tokens and the permutation that makes their rows, which the first layer then gathers.

        A subclass of either with a call of its own reads rows, and so do an adapter and probabilities on the input.
        """
        own = type(self).__call__ is Experts.__call__ and not self.apply_probs_on_input
        return own and _call_takes_tokens(type(self.linear_fc1))

    def placement(self, shape: tuple[int, ...], sequence_parallel: bool) -> ExpertPlacement | None:
        """Return the placement of the experts on the mesh in use; None if one array has the rows of all experts.

        Args:
            shape: shape of the tokens ``[b, s, h]``.
            sequence_parallel: whether tokens are sharded over the tensor axis along the sequence.
        """
        layers = self.base_layers()
        kernels = tuple((layer.kernel_shape, layer.axes_of("kernel")) for layer in layers)
        placement, reason = expert_placement(shape, kernels, sequence_parallel=sequence_parallel)
        if placement is not None:
            reason = next((why for layer in layers if (why := layer.why_not_placed()) is not None), None)
        if reason is None:
            return placement
        if axis_ranks("expert") > 1:
            log_once(f"the compiler partitions the experts, which then may gather all of them: {reason}")
        return None

    def __call__(self, x: Array, probs: Array, groups: RowGroups, is_first_microbatch: bool | None = None) -> Array:
        """Apply the experts.

        Args:
            x: ``[rows, h]``, on a mesh the rows of all devices (`jax_te.ops.RowGroups`). With a ``groups.permutation``,
                which only experts that take tokens are given, tokens ``[t, h]``, of which the rows are made.
            probs: ``[rows]``, 0 in rows of padding.
            groups: rows of each expert. With ``zero_padding`` the rows of padding of ``x`` and of the output's gradient
                must hold zeros.
            is_first_microbatch: see `GroupedLinear`.

        Returns:
            ``[rows, h]`` in the dtype of ``x``.
        """
        if self.apply_probs_on_input:
            x = (x.astype(probs.dtype) * probs[:, None]).astype(x.dtype)
            # The probabilities are applied already; padding rows get no bias.
            probs = groups.filled().astype(probs.dtype)
        # No bias: the experts' have an axis of experts, and each row has its expert's.
        hidden, _ = add_bias(
            self.linear_fc1(x, groups, is_first_microbatch=is_first_microbatch), "linear_fc1", leading=None
        )
        groups = dataclasses.replace(groups, permutation=None)
        placement, axes, summands = groups.placement, (None, "ffn"), 1
        if placement is not None:
            axes, summands = PartitionSpec(*placement.row_spec, None), placement.size(placement.features)

        # The layer is an operand, whose state the call may change.
        def rest(parts: Any) -> Array:
            linear_fc2, hidden, probs, groups = parts
            if not self.apply_probs_on_input:
                z = weighted_activation(hidden, probs, self.function, placement=placement)
            else:  # nothing has multiplied the activation of rows of padding by 0
                z = activation(hidden, self.function.name, params=self.function.params, out_axes=axes)
                groups = dataclasses.replace(groups, zero_padding=False)
            result = linear_fc2(z, groups, is_first_microbatch=is_first_microbatch)
            y, bias = output_and_bias(result, "linear_fc2")
            if bias is None:
                return y
            # A GEMM with one feature, whose gradients sum rows in an order that does not depend on the device. Each
            # device among which features are split adds an equal part.
            weighted = grouped_dense(
                probs.astype(jnp.float32)[:, None] / summands,
                bias[:, None].astype(jnp.float32),
                groups=groups,
                options=LinearOptions(kernel_axes=("expert", None, None), out_axes=(None, None)),
            )
            return (y.astype(jnp.float32) + weighted).astype(y.dtype)

        return run_recomputed(rest, (self.linear_fc2, hidden, probs, groups), kept={"moe_act": ()})


@checked
class SharedExperts(TrainingMode):
    """``y = act(x @ fc1) @ fc2``, a feed-forward block without norm and biases, that all tokens pass.

    Args:
        hidden_size: ``h``.
        ffn_hidden_size: ``f``.
        activation, activation_params: see `LayerNormMLP`.
        gate: whether to multiply the output by the sigmoid of the product of the input with ``gate_kernel [h, 1]``.
        init_method: initializer of ``linear_fc1`` and the gate. None: N(0, 0.023²).
        output_layer_init_method: initializer of ``linear_fc2``. None: N(0, 0.023²).
        sequence_parallel, tp_group, tp_size: see `Linear`.
        params_dtype: dtype of the kernels.
        rngs: random streams, of which ``params`` draws the kernels.

    Raises:
        ValueError: see `LayerNormMLP`.

    Source: ``megatron.core.transformer.moe.shared_experts.SharedExpertMLP``.

    >>> SharedExperts(16, 32, gate=True, rngs=nnx.Rngs(0))(jnp.ones((2, 4, 16))).shape
    (2, 4, 16)
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: ActivationLike = "gelu",
        activation_params: ActivationParams | None = None,
        gate: bool = False,
        init_method: Initializer | None = None,
        output_layer_init_method: Initializer | None = None,
        sequence_parallel: bool = False,
        tp_group: TensorGroup = None,
        tp_size: int = 1,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_positive(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        self.function = Activation(activation, activation_params)
        check_elementwise(self.function)
        self.linear_fc1 = Linear(
            hidden_size,
            (len(self.function.parts()), ffn_hidden_size),
            bias=False,
            init_method=init_method,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            tp_size=tp_size,
            parallel_mode="column",
            params_dtype=params_dtype,
            rngs=rngs,
        )
        self.linear_fc2 = Linear(
            ffn_hidden_size,
            hidden_size,
            bias=False,
            init_method=output_layer_init_method,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            tp_size=tp_size,
            parallel_mode="row",
            params_dtype=params_dtype,
            rngs=rngs,
        )
        self.gate_kernel = gate_parameter(hidden_size, init_method, params_dtype, rngs) if gate else None

    def __call__(self, x: Array, is_first_microbatch: bool | None = None) -> Array:
        """Apply the block. ``x [b, s, h]`` -> the same shape and dtype."""
        with jax.named_scope("SharedExperts"):
            return shared_experts(self, x, is_first_microbatch)


def gate_parameter(
    hidden_size: int, init_method: Initializer | None, params_dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Param:
    """Return the gate of shared experts, ``[h, 1]``.

    >>> gate_parameter(16, None, jnp.float32, nnx.Rngs(0)).shape
    (16, 1)
    """
    init = normal_init() if init_method is None else init_method
    return parameter(init, rngs, (hidden_size, 1), params_dtype, (None, None))


def shared_experts(layer: Any, x: Array, is_first_microbatch: bool | None) -> Array:
    """Return the output for ``x`` of a layer with ``linear_fc1``, ``linear_fc2``, ``function`` and ``gate_kernel``.

    >>> shared_experts(SharedExperts(16, 32, rngs=nnx.Rngs(0)), jnp.ones((2, 4, 16)), None).shape
    (2, 4, 16)
    """
    leading, first = x.ndim - 1, is_first_microbatch
    hidden, _ = add_bias(layer.linear_fc1(x, is_first_microbatch=first), "linear_fc1", leading=leading)
    axes = (*leading_axes(x), "ffn")
    z = activation(hidden, layer.function.name, params=layer.function.params, out_axes=axes)
    y, _ = add_bias(layer.linear_fc2(z, is_first_microbatch=first), "linear_fc2", leading=leading)
    if layer.gate_kernel is None:
        return y
    gate = jax.nn.sigmoid(jnp.matmul(x, layer.gate_kernel.get_value().astype(x.dtype), precision="highest"))
    return y * gate


def _call_takes_tokens(kind: type) -> bool:
    """Return whether the class that defines the ``__call__`` of a class says so: it speaks for its own call alone."""
    caller = next(base for base in kind.__mro__ if "__call__" in vars(base))
    return vars(caller).get("takes_tokens", False)
