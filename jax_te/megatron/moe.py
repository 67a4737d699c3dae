"""Mixtures of experts with Megatron's interface."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.config import TransformerConfig
from jax_te.layers import (
    Experts,
    MixtureOfExperts,
    Router,
    Routing,
    StepState,
    check_elementwise,
    gate_parameter,
)
from jax_te.layers import (
    shared_experts as apply_shared_experts,
)
from jax_te.megatron.grouped_linear import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
from jax_te.megatron.linear import TEColumnParallelLinear, TELinear, TERowParallelLinear
from jax_te.megatron.module import MegatronModule
from jax_te.megatron.state_dict import StateDicts
from jax_te.megatron.te_kwargs import condition_init_method
from jax_te.ops import Activation, as_int32
from jax_te.sharding import auto_region
from jax_te.typing import Array, Initializer, Key, NoProcessGroups


class ReplayedExperts(StepState):
    """NNX Variable that holds the experts of each token, int32 ``[b, s, k]``, which a router uses as its choice."""


@checked
class TopKRouter(StateDicts, Router):
    """`jax_te.layers.Router` of a configuration; a call returns Megatron's ``(probs, routing_map)``.

    Its ``kernel [h, e]`` is Megatron's ``weight [e, h]`` in a `state_dict`. The bias is initialized like the weight.

    Args:
        config: see `jax_te.config.ExpertsConfig`; ``add_bias_linear`` gives it a bias.
        pg_collection: None.
        is_mtp_layer: option that must be False: `jax_te.models.MegatronGPTModel` builds the layers of multi-token
            prediction itself, with routers like all others.
        layer_number: number of the layer in its stack, from 1.
        aux_loss_groups: Megatron's number of data ranks, see `jax_te.config.RouterOptions`. 1: the losses of all rows.
        rngs: random streams, of which ``params`` draws the weight.

    Raises:
        ValueError: for a configuration without experts; for ``is_mtp_layer``; see also `Router`.

    Source: ``megatron.core.transformer.moe.router.TopKRouter``.

    >>> config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4)
    >>> probs, routing_map = TopKRouter(config, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 16)))
    >>> probs.shape, routing_map.dtype
    ((16, 4), dtype('bool'))
    """

    megatron_layout = True
    reads_layer_number = Router.reads_layer_number

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: NoProcessGroups = None,
        is_mtp_layer: bool = False,
        *,
        layer_number: int | None = None,
        aux_loss_groups: int = 1,
        rngs: nnx.Rngs,
    ):
        if is_mtp_layer:
            raise ValueError(
                "is_mtp_layer=True has no use here: jax_te.models.MegatronGPTModel builds its depths by "
                "mtp_num_layers, with routers like all others; leave it False"
            )
        super().__init__(
            config.hidden_size,
            config.router_options(aux_loss_groups=aux_loss_groups),
            bias=config.add_bias_linear,
            init_method=condition_init_method(config, config.init_method),
            layer_number=layer_number,
            counts_overflow=config.moe_expert_rank_capacity_factor is not None,
            params_dtype=config.params_dtype,
            rngs=rngs,
        )
        self.config = config
        self.replayed: Any = nnx.data(None)

    def __call__(
        self,
        input: Array,
        padding_mask: Array | None = None,
        *,
        key: Key | None = None,
        experts: Array | None = None,
        return_routing: bool = False,
    ) -> Any:
        """Return probabilities and map of the tokens' experts.

        Args:
            input: ``[b, s, h]``.
            padding_mask, key: see `Router`.
            experts: see `Router`. None: those set for replay, if any.
            return_routing: whether to return a `jax_te.layers.Routing` instead, as a `MoELayer` reads it.

        Returns:
            Probabilities fp32 ``[b s, e]``, 0 for experts that a token does not use or that drop it, and bool
            ``[b s, e]``.
        """
        if experts is None and self.replayed is not None:
            experts = self._in_order_held(self.replayed.get_value())
        routing = super().__call__(input, padding_mask=padding_mask, key=key, experts=experts)
        if return_routing:
            return routing
        e = self.options.num_experts
        chosen, k = routing.experts, routing.experts.shape[-1]
        kept = jnp.ones_like(chosen, bool) if routing.kept is None else routing.kept

        def dense(values: Array, chosen: Array) -> Array:
            rows = jnp.arange(chosen.size // k, dtype=jnp.int32)[:, None]
            empty = jnp.zeros((len(rows), e), values.dtype)
            return empty.at[rows, chosen.reshape(-1, k)].set(values.reshape(-1, k), unique_indices=True)

        # Whole on Explicit axes: the order of tokens need not be that of a mesh that shards rows and sequences.
        dense = auto_region(dense, (None, None))
        return dense(jnp.where(kept, routing.probs, 0.0), chosen), dense(kept, chosen)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the router's layer in its stack, from 1."""
        self.layer_number = layer_number

    def set_target_indices(self, topk_indices: Array) -> None:
        """Replay a choice: the next calls take these experts, e.g. of another run's `Routing`.

        Args:
            topk_indices: integers ``[b, s, k]`` in ``[0, e)``, or ``[s, k]`` for one sequence, in the order of
                positions, also under ``cp_load_balanced``; a `Routing` has the layer's, see `jax_te.ops.undo_zigzag`.

        Raises:
            ValueError: unless the configuration has ``moe_enable_routing_replay``; for another shape, or a known number
                that no expert has.
            TypeError: for numbers that are not integers.

        Source: ``megatron.core.transformer.moe.router_replay.RouterReplay``.
        """
        if not self.config.moe_enable_routing_replay:
            raise ValueError("replaying a choice of experts needs moe_enable_routing_replay=True in the configuration")
        if topk_indices.ndim not in (2, 3):
            raise ValueError(
                f"topk_indices must be [b, s, {self.options.topk}] or [s, {self.options.topk}], got shape "
                f"{topk_indices.shape}"
            )
        self._check_choice(topk_indices, topk_indices.shape[:-1], "topk_indices")
        self.replayed = ReplayedExperts(as_int32("topk_indices", topk_indices))

    def clear_indices(self) -> None:
        """Choose experts again."""
        self.replayed = nnx.data(None)


@checked
class SharedExpertMLP(MegatronModule):
    """The feed-forward block that all tokens pass in addition to their experts, without norm and biases.

    Args:
        config: configuration whose ``moe_shared_expert_intermediate_size`` is ``f``.
        submodules: None: the layers are `TEColumnParallelLinear` and `TERowParallelLinear`.
        gate: whether to multiply the output by the sigmoid of the product of the input with ``gate_kernel [h, 1]``,
            Megatron's ``gate_weight [1, h]``.
        pg_collection: None.
        name: prefix of the names under which the rules of ``config.quant_recipe`` know the layers.
        rngs: random streams, of which ``params`` draws the kernels.

    Raises:
        AssertionError: for ``config.add_bias_linear``, as in Megatron.
        ValueError: for a configuration without shared experts.

    Source: ``megatron.core.transformer.moe.shared_experts.SharedExpertMLP``.

    >>> config = TransformerConfig(
    ...     num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4, add_bias_linear=False,
    ...     moe_shared_expert_intermediate_size=32,
    ... )
    >>> SharedExpertMLP(config, gate=True, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 16))).shape
    (2, 8, 16)
    """

    megatron_layout = True

    def __init__(
        self,
        config: TransformerConfig,
        submodules: None = None,
        gate: bool = False,
        pg_collection: NoProcessGroups = None,
        name: str | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config)
        if config.add_bias_linear:
            raise AssertionError("shared experts have no biases: set add_bias_linear=False")
        if (f := config.moe_shared_expert_intermediate_size) is None:
            raise ValueError("moe_shared_expert_intermediate_size is None: give the features of the shared experts")
        self.function, h = Activation(config.limited_activation), config.hidden_size
        check_elementwise(self.function)
        self.linear_fc1 = TEColumnParallelLinear(
            h,
            (len(self.function.parts()), f),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            name=_named(name, "linear_fc1"),
            rngs=rngs,
        )
        self.linear_fc2 = TERowParallelLinear(
            f,
            h,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            is_expert=False,
            name=_named(name, "linear_fc2"),
            rngs=rngs,
        )
        init = condition_init_method(config, config.init_method)
        self.gate_kernel = gate_parameter(h, init, config.params_dtype, rngs) if gate else None

    def __call__(self, hidden_states: Array, *, is_first_microbatch: bool | None = None) -> Array:
        """Apply the block. ``[b, s, h]`` -> the same shape and dtype."""
        return apply_shared_experts(self, hidden_states, is_first_microbatch)


@checked
class MoELayer(MegatronModule, MixtureOfExperts):
    """A mixture of experts of a configuration, in place of an `MLP` after a norm; see `jax_te.layers.MoE`.

    Args:
        config: see `jax_te.config.ExpertsConfig`.
        submodules: None: the layers are `TopKRouter`, `TEColumnParallelGroupedLinear`, `TERowParallelGroupedLinear` and
            `SharedExpertMLP`.
        layer_number: number of the layer in its stack, from 1.
        pg_collection: None.
        is_mtp_layer: option that must be False.
        name: prefix of the names under which the rules of ``config.quant_recipe`` know the layers, such as
            ``{name}.experts.linear_fc1``.
        aux_loss_groups: see `TopKRouter`.
        rngs: random streams, of which ``params`` draws the router and plain kernels, ``expert-parallel-rng`` those of
            experts.

    Raises:
        ValueError: for a configuration without experts; for ``is_mtp_layer``; see also `jax_te.layers.MoE`.

    Source: ``megatron.core.transformer.moe.moe_layer.MoELayer``.

    >>> config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4)
    >>> output, bias = MoELayer(config, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 16)))
    >>> output.shape, bias
    ((2, 8, 16), None)
    """

    router: TopKRouter  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        config: TransformerConfig,
        submodules: None = None,
        layer_number: int | None = None,
        pg_collection: NoProcessGroups = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        aux_loss_groups: int = 1,
        rngs: nnx.Rngs,
    ):
        super().__init__(config)
        self.dispatch, self.sequence_parallel = config.dispatch_options(), config.sequence_parallel
        self.router = TopKRouter(
            config, None, is_mtp_layer, layer_number=layer_number, aux_loss_groups=aux_loss_groups, rngs=rngs
        )
        self.experts = _experts(config, name, rngs)
        self.fc1_latent_proj, self.fc2_latent_proj = _latent(config, name, rngs)
        shared, gate = config.moe_shared_expert_intermediate_size is not None, config.moe_shared_expert_gate
        inner = _named(name, "shared_experts")
        self.shared_experts = SharedExpertMLP(config, gate=gate, name=inner, rngs=rngs) if shared else None

    def __call__(
        self,
        hidden_states: Array,
        intermediate_tensors: None = None,
        padding_mask: Array | None = None,
        *,
        key: Key | None = None,
        experts: Array | None = None,
        is_first_microbatch: bool | None = None,
    ) -> tuple[Array, None]:
        """Apply the layer.

        Args:
            hidden_states: ``[b, s, h]``.
            intermediate_tensors: None: the layer runs as one.
            padding_mask: bool ``[b, s]``, True for padding.
            key, experts: see `Router`.
            is_first_microbatch: see `Linear`.

        Returns:
            ``(output [b, s, h], None)``: the bias is in the output.
        """
        with jax.named_scope("MoELayer"):
            return self.mixed(hidden_states, padding_mask, key, experts, is_first_microbatch)[0], None

    def _routing(self, x: Array, padding_mask: Array | None, key: Key | None, chosen: Array | None) -> Routing:
        # Megatron's pair does not say which of a token's experts has which place in the sum.
        return self.router(x, padding_mask, key=key, experts=chosen, return_routing=True)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of this layer in its stack, from 1."""
        self.router.set_layer_number(layer_number)

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Do nothing, or raise a RuntimeError about deferred weight gradients, see `TELinear.backward_dw`."""
        if routed_experts:
            linear_fc1: Any = self.experts.linear_fc1
            linear_fc1.backward_dw()
        if shared_experts and self.shared_experts is not None:
            self.shared_experts.linear_fc1.backward_dw()


def _experts(config: TransformerConfig, name: str | None, rngs: nnx.Rngs) -> Experts:
    function = Activation(config.limited_activation)
    check_elementwise(function)
    h = config.hidden_size if config.moe_latent_size is None else config.moe_latent_size
    e: Any = config.num_moe_experts
    f: Any = config.moe_ffn_hidden_size  # the configuration has filled it in
    linear_fc1 = TEColumnParallelGroupedLinear(
        e,
        h,
        (len(function.parts()), f),
        config=config,
        init_method=config.init_method,
        bias=config.add_bias_linear,
        skip_bias_add=False,
        is_expert=True,
        name=_named(name, "experts.linear_fc1"),
        rngs=rngs,
    )
    linear_fc2 = TERowParallelGroupedLinear(
        e,
        f,
        h,
        config=config,
        init_method=config.output_layer_init_method,
        bias=config.add_bias_linear,
        skip_bias_add=True,
        is_expert=True,
        name=_named(name, "experts.linear_fc2"),
        rngs=rngs,
    )
    return Experts(linear_fc1, linear_fc2, function, apply_probs_on_input=config.moe_apply_probs_on_input)


def _latent(config: TransformerConfig, name: str | None, rngs: nnx.Rngs) -> tuple[Any, Any]:
    """Return the linear layers to the features of the experts and back, or None for each."""
    h, latent = config.hidden_size, config.moe_latent_size
    if latent is None:
        return None, None

    def make(k: int, n: int, init_method: Initializer, own_name: str) -> TELinear:
        return TELinear(
            k,
            n,
            parallel_mode="duplicated",
            config=config,
            init_method=init_method,
            bias=config.add_bias_linear,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
            name=_named(name, own_name),
            rngs=rngs,
        )

    into = make(h, latent, config.init_method, "fc1_latent_proj")
    return into, make(latent, h, config.output_layer_init_method, "fc2_latent_proj")


def _named(prefix: str | None, name: str) -> str | None:
    return None if prefix is None else f"{prefix}.{name}"
