"""A mixture of experts in place of a feed-forward block."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.config import ActivationLike, ActivationParams, DispatchOptions, RouterOptions
from jax_te.layers.layernorm_mlp import check_elementwise
from jax_te.layers.linear import Linear
from jax_te.layers.mode import TrainingMode
from jax_te.layers.moe.experts import Experts, SharedExperts
from jax_te.layers.moe.grouped_linear import GroupedLinear
from jax_te.layers.moe.router import Router, Routing
from jax_te.layers.results import add_bias, layer_output
from jax_te.ops import Activation, RowGroups, dispatch, permute
from jax_te.remat import recomputed, run_on_copies, selective_recompute
from jax_te.sharding import constrain, current_mesh, reshard
from jax_te.typing import Array, DTypeLike, Initializer, Key, TensorGroup


class MixtureOfExperts(TrainingMode):
    """Base of layers with a router and experts. It defines the computation; subclasses build the parts.

    Attributes:
        router: `Router`.
        experts: `Experts`.
        dispatch: transport of tokens to experts on other devices.
        sequence_parallel: whether tokens are sharded over the tensor axis along the sequence.
        shared_experts: a layer that all tokens pass, or None.
        fc1_latent_proj, fc2_latent_proj: linear layers to the features of the experts and back, or None.
    """

    router: Router
    experts: Experts
    dispatch: DispatchOptions
    sequence_parallel: bool
    shared_experts: Callable[..., Array] | None
    fc1_latent_proj: Linear | None
    fc2_latent_proj: Linear | None

    @property
    def reads_later_tokens(self) -> bool:
        """Whether a token's result depends on how many tokens are behind it: the devices' room for rows follows from
        the number of all."""
        return self.dispatch.rank_capacity_factor is not None

    def mixed(
        self,
        x: Array,
        padding_mask: Array | None,
        key: Key | None,
        chosen: Array | None,
        is_first_microbatch: bool | None,
    ) -> tuple[Array, Routing]:
        """Return the sum of each token's experts, and the routing."""
        if not recomputed("moe"):
            return self._mixed(x, padding_mask, key, chosen, is_first_microbatch)
        # Recomputed as a whole, without recomputation inside. The layer is an operand, whose state the call may change.
        with selective_recompute():
            return run_on_copies(
                jax.checkpoint,
                lambda operands: operands[0]._mixed(*operands[1:], is_first_microbatch),
                (self, x, padding_mask, key, chosen),
            )

    def _mixed(
        self, x: Array, padding_mask: Array | None, key: Key | None, chosen: Array | None, first: bool | None
    ) -> tuple[Array, Routing]:
        shared = self._shared(x, first)
        routing = self._routing(x, padding_mask, key, chosen)
        rows = x if self.fc1_latent_proj is None else self._project("fc1_latent_proj", x, first)
        y = self._routed(rows, routing, first)
        if chosen is not None or self.router.replayed is not None:
            y = _with_nan_of(routing.probs, y)
        if self.fc2_latent_proj is not None:
            y = self._project("fc2_latent_proj", y, first)
        return y if shared is None else y + shared, routing

    def _project(self, name: str, x: Array, first: bool | None) -> Array:
        """Return ``x`` after one of the projections around experts that work on a latent."""
        projection: Any = getattr(self, name)
        return add_bias(projection(x, is_first_microbatch=first), name, leading=x.ndim - 1)[0]

    def _routing(self, x: Array, padding_mask: Array | None, key: Key | None, chosen: Array | None) -> Routing:
        """Return the router's result for a call."""
        return self.router(x, padding_mask=padding_mask, key=key, experts=chosen)

    def _shared(self, x: Array, first: bool | None) -> Array | None:
        if self.shared_experts is None or not recomputed("shared_experts"):
            return None if self.shared_experts is None else self.shared_experts(x, is_first_microbatch=first)
        with selective_recompute():
            return run_on_copies(
                jax.checkpoint,
                lambda operands: operands[0](operands[1], is_first_microbatch=first),
                (self.shared_experts, x),
            )

    def _routed(self, x: Array, routing: Routing, first: bool | None) -> Array:
        """Return the sum of the outputs of each token's experts."""
        transport = self.transport(x.shape)
        if transport is not None:
            call = dispatch.plan_dispatch(transport, routing.experts, routing.kept)
            probs = self.router.with_overflow(routing.probs, call.overflow)
            rows, probs = dispatch.dispatch(x, probs, call)
            y = dispatch.combine(self.experts(rows, probs, _of_zeros(call.groups), first), call)
            return _sharded_like(x, y)
        # Whole on each device of a mesh, if there is one: XLA cannot partition these gathers on every mesh.
        tokens, probs = _whole_rows(x), _whole_rows(routing.probs)
        experts, kept = _whole_rows(routing.experts), _whole_rows(routing.kept)
        options = self.router.options
        plan = permute.plan_permutation(
            experts,
            options.num_experts,
            kept=kept,
            alignment=self.experts.alignment,
            capacity=self.router.capacity(len(tokens)),
            pad_to_capacity=options.pad_expert_input_to_capacity,
        )
        # Results are whole like operands: backward gathers their gradients.
        probs, groups = _whole(permute.permute_probs(probs, plan)), _of_zeros(plan.groups)
        if getattr(self.experts, "takes_tokens", False):  # a user's own module need not have it
            given, groups = tokens, dataclasses.replace(groups, permutation=plan._replace(groups=None))
        else:
            given = _whole(permute.permute(tokens, plan))
        rows = _whole(self.experts(given, probs, groups, first))
        return _sharded_like(x, _whole(permute.unpermute(rows, plan)).reshape(x.shape))

    def transport(self, shape: tuple[int, ...]) -> dispatch.Transport | None:
        """Return the exchange of tokens between the devices of the mesh in use; None if one array has all rows.

        Args:
            shape: shape of the experts' input ``[b, s, h]``.
        """
        placement = self.experts.placement(shape, self.sequence_parallel)
        if placement is None:
            return None
        options = self.router.options
        return dispatch.transport_of(
            placement,
            shape,
            options.topk,
            options.num_experts,
            alignment=self.experts.alignment,
            dispatcher=self.dispatch.dispatcher,
            capacity=self.router.capacity(math.prod(shape[:-1])),
            factor=self.dispatch.rank_capacity_factor,
            fp8=self.dispatch.fp8,
        )


@checked
class MoE(MixtureOfExperts):
    """The sum over each token's experts of ``p (act(x @ fc1 + b1) @ fc2 + b2)``, in place of a feed-forward block.

    The probability ``p`` multiplies the activation, before ``fc2``, and the bias after it. There is no norm in
    front. All shapes are static, nothing waits for the host, and sums have the same order on every device: tokens are
    gathered into rows sorted by expert, padded with zeros for each expert as the recipe's GEMMs require.

    Args:
        hidden_size: ``h``.
        ffn_hidden_size: ``f`` of an expert.
        router: number of experts, how they are chosen, and how their load is kept equal.
        activation, activation_params: see `LayerNormMLP`.
        bias: whether to learn biases in all linear layers, of the router, too.
        apply_probs_on_input: whether to multiply an expert's input by the probability, in place of its activation; for
            one expert a token.
        latent_size: features of the experts' inputs and outputs, to and from which two linear layers project. None:
            ``h``.
        shared_expert_intermediate_size: ``f`` of `SharedExperts`, which all tokens pass, too. None: no shared experts.
        shared_expert_gate: see ``gate`` of `SharedExperts`.
        init_method: initializer of the router and of kernels into an activation or the experts. None: N(0, 0.023²).
        output_layer_init_method: initializer of kernels out of them. None: N(0, 0.023²).
        dispatch: transport of tokens to experts on other devices of a mesh.
        expert_tensor_parallel: whether the tensor axis of a mesh shards an expert's kernels, unless the rule of
            ``expert`` names it (Megatron's ``expert_tensor_parallel_size``).
        sequence_parallel: whether tokens are sharded over the tensor axis along the sequence, see `Linear`.
        tp_group, tp_size: tensor-parallel group and size, see `Linear`.
        layer_number: see `Router`.
        return_routing: whether calls also return the `Routing`.
        params_dtype: dtype of the parameters.
        rngs: random streams, of which ``params`` draws the kernels; those of experts as `GroupedLinear`.

    Raises:
        ValueError: for sizes that are not positive; ``apply_probs_on_input`` with several experts a token; biases
            beside shared experts, which have none; when called, see `Router` and `GroupedLinear`.
        QuantizerStateError: when called under a recipe with state, if the layer was built without it; when
            differentiated in training without the router's states.

    Source: ``megatron.core.transformer.moe.moe_layer.MoELayer``; Shazeer et al. 2017; Fedus et al. 2022.

    >>> layer = MoE(16, 32, RouterOptions(num_experts=4), activation="swiglu", bias=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8, 16))).shape
    (2, 8, 16)
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        router: RouterOptions,
        *,
        activation: ActivationLike = "gelu",
        activation_params: ActivationParams | None = None,
        bias: bool = True,
        apply_probs_on_input: bool = False,
        latent_size: int | None = None,
        shared_expert_intermediate_size: int | None = None,
        shared_expert_gate: bool = False,
        init_method: Initializer | None = None,
        output_layer_init_method: Initializer | None = None,
        dispatch: DispatchOptions = DispatchOptions(),
        expert_tensor_parallel: bool = True,
        sequence_parallel: bool = False,
        tp_group: TensorGroup = None,
        tp_size: int = 1,
        layer_number: int | None = None,
        return_routing: bool = False,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_positive(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        if apply_probs_on_input and router.topk > 1:
            raise ValueError(
                f"apply_probs_on_input=True is for one expert a token, and the router chooses topk={router.topk}"
            )
        if bias and shared_expert_intermediate_size is not None:
            raise ValueError("shared experts have no biases, as in Megatron: set bias=False, or leave them out")
        self.dispatch, self.sequence_parallel = dispatch, sequence_parallel
        function, e = Activation(activation, activation_params), router.num_experts
        check_elementwise(function)
        into, out = init_method, output_layer_init_method
        self.router = Router(
            hidden_size,
            router,
            bias=bias,
            init_method=into,
            layer_number=layer_number,
            counts_overflow=dispatch.rank_capacity_factor is not None,
            params_dtype=params_dtype,
            rngs=rngs,
        )
        inner, wide = hidden_size if latent_size is None else latent_size, (len(function.parts()), ffn_hidden_size)
        split: Any = {"tp_group": tp_group, "tp_size": tp_size} if expert_tensor_parallel else {}
        modes = ("column", "row") if expert_tensor_parallel else (None, None)
        split |= {"params_dtype": params_dtype, "rngs": rngs}
        self.experts = Experts(
            GroupedLinear(e, inner, wide, bias, init_method=into, parallel_mode=modes[0], **split),
            GroupedLinear(
                e, ffn_hidden_size, inner, bias, init_method=out, parallel_mode=modes[1], return_bias=True, **split
            ),
            function,
            apply_probs_on_input=apply_probs_on_input,
        )

        def latent(k: int, n: int, init_method: Initializer | None) -> Linear:
            return Linear(k, n, bias, init_method=init_method, params_dtype=params_dtype, rngs=rngs)

        self.fc1_latent_proj = None if latent_size is None else latent(hidden_size, latent_size, into)
        self.fc2_latent_proj = None if latent_size is None else latent(latent_size, hidden_size, out)
        self.shared_experts = (
            None
            if shared_expert_intermediate_size is None
            else SharedExperts(
                hidden_size,
                shared_expert_intermediate_size,
                activation=activation,
                activation_params=activation_params,
                gate=shared_expert_gate,
                init_method=into,
                output_layer_init_method=out,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                tp_size=tp_size,
                params_dtype=params_dtype,
                rngs=rngs,
            )
        )
        self.return_routing = return_routing

    def __call__(
        self,
        x: Array,
        is_first_microbatch: bool | None = None,
        *,
        padding_mask: Array | None = None,
        key: Key | None = None,
        experts: Array | None = None,
    ) -> Any:
        """Apply the layer.

        Args:
            x: ``[b, s, h]``; its dtype is the dtype of computation and of the output.
            is_first_microbatch: see `Linear`.
            padding_mask, key, experts: see `Router`.

        Returns:
            ``y [b, s, h]``; with ``return_routing`` a NamedTuple of it and ``routing``.
        """
        with jax.named_scope("MoE"):
            y, routing = self.mixed(x, padding_mask, key, experts, is_first_microbatch)
            return layer_output(y, routing=routing) if self.return_routing else y


def _of_zeros(groups: RowGroups) -> RowGroups:
    """Return groups whose rows of padding hold zeros: none are filled above, and none are read, so that their gradients
    are zeros, too."""
    return dataclasses.replace(groups, zero_padding=True)


def _with_nan_of(probs: Array, y: Array) -> Array:
    """Return the output ``[b, s, h]``, nan for tokens with a probability of nan, as for a number that no expert has.

    Without it a token whose nan has no room at an expert would get 0.
    """
    return jnp.where(jnp.any(jnp.isnan(probs), axis=-1, keepdims=True), jnp.asarray(jnp.nan, y.dtype), y)


def _whole_rows(x: Array | None) -> Any:
    """Return ``[b, s, c]`` as rows ``[t, c]``, whole on each device of a mesh; None for None."""
    if x is None:
        return None
    return _whole(x).reshape(-1, x.shape[-1])


def _whole(x: Array) -> Array:
    """Return an array, and in backward its gradient, whole on each device of a mesh."""
    return constrain(x, (None,) * x.ndim)


def _sharded_like(x: Array, y: Array) -> Array:
    """Return ``y`` with the Explicit axes in the type of ``x``, of the same shape, so that both can be added."""
    mesh = current_mesh()
    return y if mesh is None else reshard(y, jax.typeof(x).sharding.spec, mesh)
