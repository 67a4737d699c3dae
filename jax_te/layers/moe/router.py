"""The router of a mixture of experts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jax_te._validation import check_float, check_positive, checked
from jax_te.config import RouterOptions, normal_init
from jax_te.layers.mode import TrainingMode
from jax_te.layers.moe.router_state import CountsSoFar, ExpertBias, LastStep, QuantileBias
from jax_te.layers.parameters import parameter, value_or_none
from jax_te.ops import is_known, losses, reorder_to_zigzag, router_logits, routing, undo_zigzag
from jax_te.quantize import QuantizerState, count
from jax_te.random import key_for
from jax_te.remat import run_on_copies
from jax_te.sharding import auto_region, axis_ranks
from jax_te.typing import Array, DTypeLike, Initializer, Key


class Routing(NamedTuple):
    """The experts of each token of a batch.

    Args:
        probs: ``[b, s, k]``, fp32 (fp64 under ``dtype="fp64"``), what each expert's output counts.
        experts: int32 ``[b, s, k]``, numbers of the experts; of equal scores the lowest number first.
        kept: bool ``[b, s, k]``, False for those that have no room for the token. None: all have.
        losses: the router's losses by their names, without coefficients; none in evaluation.
    """

    probs: Array
    experts: Array
    kept: Array | None
    losses: dict[str, Array]


@checked
class Router(TrainingMode):
    """Choose each token's experts, and add the gradients of the load-balancing losses.

    The losses change no value: their gradients are added to those of the probabilities. A train step scales them as it
    scales the model's loss, over microbatches, too.

    Its states are fp32, and no parameters: the expert bias, the bias of quantile balancing, the counts of
    ``"global_aux_loss"``, and what `expert_metrics` reads. They are updated once a step, from the counts of training:
    `jax_te.quantize.Counting`.

    Args:
        hidden_size: ``h``.
        options: choice of experts, and methods that keep their load equal.
        bias: whether to learn a bias of the logits.
        init_method: initializer of the kernel, and of the bias. None: N(0, 0.023²).
        layer_number: number of the layer, for the random bias of ``force_biased`` below 0.
        counts_overflow: whether metrics have the share of choices for which a device of a mesh had no room.
        params_dtype: dtype of ``kernel [h, e]`` and ``bias [e]``.
        rngs: random streams, of which ``params`` draws them.

    Attributes:
        expert_bias: `QuantizerState` ``[e]``, or None.
        quantile_bias: `QuantizerState` ``[e + 1]``, or None.
        frozen: whether kernel, bias and these two states stay as they are in training, as where adapters alone are
            trained. False by default.
        balance_share: factor of the gradients of the load-balancing losses, not of the z-loss: 1 / n of a router that
            runs n times in a model and whose losses are to count as those of one run.

    Raises:
        TypeError: when called, for a mask that is not bool, or experts that are not integers.
        ValueError: for ``dtype="fp64"`` unless JAX's 64-bit mode is on; when called, for an input that is not
            ``[..., h]`` or has no token, the number of an expert that there is not, arrays that do not have its shape,
            a batch that does not divide into ``aux_loss_groups``, a missing random key; and see
            `jax_te.config.RouterOptions` for a number of tokens.

    Source: ``megatron.core.transformer.moe.router.TopKRouter``.

    >>> router = Router(16, RouterOptions(num_experts=8), rngs=nnx.Rngs(0))
    >>> probs, experts, kept, losses = router(jnp.ones((2, 4, 16)))
    >>> probs.shape, experts.dtype, kept
    ((2, 4, 2), dtype('int32'), None)
    """

    replayed: Any = None
    """A choice that all calls take; Megatron's router has one."""

    def __init__(
        self,
        hidden_size: int,
        options: RouterOptions,
        *,
        bias: bool = False,
        init_method: Initializer | None = None,
        layer_number: int | None = None,
        counts_overflow: bool = False,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_positive(hidden_size=hidden_size)
        if options.dtype == "fp64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise ValueError(
                "dtype='fp64' (moe_router_dtype) needs JAX's 64-bit mode: jax.config.update('jax_enable_x64', True) at "
                "the start of the program, or take 'fp32'"
            )
        e, init = options.num_experts, normal_init() if init_method is None else init_method
        self.options, self.layer_number = options, layer_number
        self.kernel = parameter(init, rngs, (hidden_size, e), params_dtype, ("norm", None))
        self.bias = parameter(init, rngs, (e,), params_dtype, (None,)) if bias else None
        self.expert_bias = _state(e, ExpertBias(options.bias_update_rate)) if options.enable_expert_bias else None
        by_quantiles = options.load_balancing_type == "quantile_balancing"
        self.quantile_bias = _state(e + 1, QuantileBias(options.quantile_balancing_ema)) if by_quantiles else None
        self.counts_so_far = _state(e + 1, CountsSoFar()) if "global_aux_loss" in options.losses else None
        self.counts_overflow = counts_overflow
        self.last_step = _state(e + len(self.metric_names), LastStep())
        # The caller's factor, and within a derivative that of the loss scaler, see `set_aux_loss_scale`.
        self.loss_scale: Any = nnx.data(None)
        self.scaler_scale: Any = nnx.data(None)
        self.frozen = False
        self.balance_share = 1.0

    @property
    def draws_choices(self) -> bool:
        """Whether choices are random, by ``layer_number``: ``force_load_balancing`` or ``force_biased``."""
        return self.options.force_load_balancing or self.options.force_biased is not None

    @property
    def reads_layer_number(self) -> bool:
        """Whether results depend on ``layer_number``, so that routers of other layers compute something else."""
        return self.draws_choices

    @property
    def reads_later_tokens(self) -> bool:
        """Whether a token's experts depend on how many tokens are behind it: their capacity follows from the number of
        all, and so do choices at random."""
        return self.options.expert_capacity_factor is not None or self.draws_choices

    @property
    def has_moving_bias(self) -> bool:
        """Whether training changes the bias by which it balances its load."""
        by_rate = self.expert_bias is not None and self.options.bias_update_rate > 0.0
        return not self.frozen and (by_rate or self.quantile_bias is not None)

    @property
    def has_losses(self) -> bool:
        """Whether training has losses of the router."""
        return bool(self.options.losses or self.options.z_loss_coeff)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Entries of ``last_step`` after the tokens of each expert."""
        overflow = ("overflow",) if self.counts_overflow else ()
        return ("calls", "chosen", "dropped", *overflow, *self._loss_names)

    @property
    def _loss_names(self) -> tuple[str, ...]:
        """Names of the losses of a call in training."""
        z_loss = () if self.options.z_loss_coeff is None else ("z_loss",)
        return (*self.options.losses, *z_loss)

    def __call__(
        self,
        x: Array,
        *,
        padding_mask: Array | None = None,
        key: Key | None = None,
        experts: Array | None = None,
    ) -> Any:  # a `Routing`; Megatron's subclass returns another form of it
        """Return the experts of each token.

        Args:
            x: ``[b, s, h]``, or ``[s, h]`` for one sequence.
            padding_mask: bool ``[b, s]``, True for padding, which losses and counts leave out; it is routed like any
                token.
            key: random key of ``input_jitter_eps`` in training, and of random choices, which need one in training. In
                evaluation without a key they are those of ``layer_number``, the same in each call.
            experts: integers ``[b, s, k]`` in ``[0, e)``, a previous choice, which replaces this router's own; its
                probabilities follow the same rule. Another number is refused where its value is known; in ``jit`` it
                gives its token probabilities of nan, and a mixture's output of nan.

        Returns:
            The routing, with the leading axes of ``x``.
        """
        with jax.named_scope("Router"):
            self._check_call(x, padding_mask, experts)
            mesh = jax.sharding.get_abstract_mesh()
            if mesh.empty or AxisType.Explicit not in mesh.axis_types:
                return self._routing(x, padding_mask, key, experts)
            # A choice of experts flattens and sorts tokens, and the losses sum over groups of them: an Explicit mesh
            # gives such arrays no type. The layer is an operand, because a region takes no arrays from outside.
            return run_on_copies(
                lambda run: auto_region(run, (self._axes_like(x), [])),
                lambda operands: operands[0]._routing(*operands[1:]),
                (self, x, padding_mask, key, experts),
            )

    def _axes_like(self, x: Array) -> Routing:
        """Return the axes of a call's result, which is sharded like the tokens ``x [..., h]``."""
        each = PartitionSpec(*jax.typeof(x).sharding.spec[:-1], None)
        kept = None if self.options.expert_capacity_factor is None else each
        axes_of_losses: Any = dict.fromkeys(self._loss_names if self.training else (), ())
        return Routing(each, each, kept, axes_of_losses)  # type: ignore[arg-type]

    def _routing(self, x: Array, padding_mask: Array | None, key: Key | None, experts: Array | None) -> Routing:
        """Return the result of a call."""
        logits = self._logits(x, key)
        lead, (b, s) = x.shape[:-1], x.shape[:-1] if x.ndim == 3 else (1, x.shape[0])
        token_mask = self._token_mask(padding_mask)
        logits = logits.reshape(b, s, -1)
        given = None if experts is None else experts.reshape(b * s, -1)
        chosen = self._assignment(logits.reshape(b * s, -1), given)
        kept = self._kept(chosen, b, s)
        token_mask = None if token_mask is None else token_mask.reshape(b, s)
        found, so_far = self._losses(logits, token_mask) if self.training else ({}, None)
        probs = self._with_losses(self._nan_if_trained(chosen.probs), found)
        if self.training:
            probs = self._with_counts(probs, logits, chosen.experts, kept, token_mask, found, so_far)
        values = {name: jax.lax.stop_gradient(loss) for name, loss in found.items()}
        return Routing(
            probs.reshape(*lead, -1),
            chosen.experts.reshape(*lead, -1),
            None if kept is None else kept.reshape(*lead, -1),
            values,
        )

    def _check_call(self, x: Array, padding_mask: Array | None, experts: Array | None) -> None:
        """Raise for arrays whose shapes or dtypes do not fit the router and each other."""
        h, lead = self.kernel.get_value().shape[0], x.shape[:-1]
        if x.ndim not in (2, 3) or x.shape[-1] != h or x.size == 0:
            raise ValueError(
                f"the input of a Router must be [b, s, {h}] or [s, {h}], of one token or more, got shape {x.shape}"
            )
        check_float("Router", x)
        check_padding_mask(padding_mask, lead)
        if experts is not None:
            self._check_choice(experts, lead)

    def _check_choice(self, experts: Array, lead: tuple[int, ...], name: str = "experts") -> None:
        """Raise for a given choice of another shape or dtype, or of a known number that no expert has."""
        if not jnp.issubdtype(experts.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, the numbers of experts, got {experts.dtype}")
        if experts.shape != (*lead, self.options.topk):
            raise ValueError(f"{name} must be {[*lead, self.options.topk]}, got shape {experts.shape}")
        if not is_known(experts):
            return
        numbers, e = np.asarray(experts), self.options.num_experts
        if (outside := numbers[(numbers < 0) | (numbers >= e)]).size:
            raise ValueError(f"{name} must be numbers from 0 to num_experts - 1 = {e - 1}, got {outside[0]}")

    def _logits(self, x: Array, key: Key | None) -> Array:
        """Return the logits ``[..., e]``, of the input or at random."""
        options = self.options
        jitter = 0.0 if options.input_jitter_eps is None else options.input_jitter_eps
        if (jitter_key := self.used_dropout_key(key, input_jitter_eps=jitter)) is not None:
            factors = routing.jitter_factors(x.shape, x.dtype, jitter, key_for("router_input", jitter_key))
            x = x * self._in_order_held(factors)
        dtype = {"fp32": jnp.float32, "fp64": jnp.float64, None: x.dtype}[options.dtype]
        kernel, bias = self.kernel.get_value(), value_or_none(self.bias)
        if self.frozen:
            kernel, bias = jax.lax.stop_gradient((kernel, bias))
        logits = router_logits(x, kernel, dtype)
        if bias is not None:
            logits = logits + jnp.expand_dims(bias.astype(dtype), range(logits.ndim - 1))
        if not self.draws_choices:
            return logits
        if key is None and self.training and not self.without_dropout:
            raise ValueError(
                "the router chooses experts at random (force_load_balancing, force_biased), and this call in training "
                "has no key to draw from: give key=, another one at each step; or evaluate: model.eval(), where it "
                "makes the same choice in each call without one"
            )
        fixed = jax.random.key(self.layer_number or 0)
        key = fixed if key is None else key
        drawn, logits = key_for("router_choice", key), self._in_natural_order(logits)
        if options.force_biased is None:
            return self._in_order_held(routing.balanced_at_random(logits, drawn))
        std = options.force_biased
        bias_key = key_for("router_bias", fixed if std < 0.0 else key)
        return self._in_order_held(routing.biased_at_random(logits, abs(std), drawn, bias_key))

    def _in_natural_order(self, x: Array) -> Array:
        """Return values of tokens ``[..., s, d]`` in the order of their positions."""
        return undo_zigzag(x, axis=-2) if self._is_reordered else x

    def _in_order_held(self, x: Array) -> Array:
        """Return values of tokens ``[..., s, d]`` in natural order in that of the router's input."""
        return reorder_to_zigzag(x, axis=-2) if self._is_reordered else x

    @property
    def _is_reordered(self) -> bool:
        # Without context devices, a load-balanced batch has its sequences in natural order.
        return self.options.cp_load_balanced and axis_ranks("sequence") > 1

    def _token_mask(self, padding_mask: Array | None) -> Array | None:
        """Return which tokens losses and counts include; None: all."""
        if padding_mask is None:
            return None
        if self.quantile_bias is not None:
            raise ValueError(
                "padding_mask does not go with load_balancing_type='quantile_balancing', whose quantiles are of all "
                "tokens; leave one out"
            )
        return ~padding_mask

    def _assignment(self, logits: Array, given: Array | None) -> routing.Assignment:
        """Return experts and probabilities of tokens ``[t, e]``."""
        options = self.options
        if options.load_balancing_type == "sinkhorn":
            return routing.route_by_sinkhorn(logits, options.topk, balanced=self.training, experts=given)
        if self.quantile_bias is not None and given is None:
            bias = self.quantile_bias.get_value()[:-1]
            given = routing.largest(logits.astype(jnp.float32) - bias[None], options.topk)
        bias = self.expert_bias.get_value() if self.expert_bias is not None else None
        return routing.route(logits, options, expert_bias=bias if given is None else None, experts=given)

    def _nan_if_trained(self, probs: Array) -> Array:
        """Return the probabilities, nan if an optimizer has taken the states for parameters.

        The last step's number of calls shows it, which no update leaves a whole number: the gradient of that state is
        the number of calls of the step.
        """
        if self.expert_bias is None and self.quantile_bias is None and self.counts_so_far is None:
            return probs  # what is left are metrics, which no call reads
        calls = self.last_step.get_value()[self.options.num_experts + self.metric_names.index("calls")]
        return jnp.where((calls >= 0.0) & (calls == jnp.round(calls)), probs, jnp.nan)

    def _kept(self, chosen: routing.Assignment, b: int, s: int) -> Array | None:
        """Return which experts have room for each token ``[t, k]``; None: all."""
        capacity = self.capacity(b * s)
        if capacity is None:
            return None
        options = self.options

        def by_position(x: Array) -> Array:
            return jnp.swapaxes(self._in_natural_order(x.reshape(b, s, -1)), 0, 1).reshape(b * s, -1)

        # Megatron's order of tokens: the first positions of all sequences come first.
        ordered = routing.Assignment(*map(by_position, chosen))
        room = routing.within_capacity(ordered, options.num_experts, capacity, options.token_drop_policy)
        room = self._in_order_held(jnp.swapaxes(room.reshape(s, b, -1), 0, 1)).reshape(b * s, -1)
        return jnp.take_along_axis(room, chosen.experts, axis=-1)

    def capacity(self, tokens: int) -> int | None:
        """Return the capacity of an expert for ``tokens``; None: unlimited."""
        check_positive(tokens=tokens)
        options = self.options
        if options.expert_capacity_factor is None:
            return None
        return routing.expert_capacity(tokens, options.num_experts, options.topk, options.expert_capacity_factor)

    def _losses(self, logits: Array, token_mask: Array | None) -> tuple[dict[str, Array], Array | None]:
        """Return the losses without coefficients, and the next ``counts_so_far``, for logits ``[b, s, e]``."""
        options, found, added = self.options, {}, None
        parts, (b, s, _) = options.aux_loss_groups, logits.shape
        if b % parts:
            raise ValueError(f"a batch of {b} does not divide into aux_loss_groups={parts}; change one of them")

        def groups(x: Array | None, *, sequences: bool = False) -> Any:
            if x is None:
                return None
            return x.reshape(parts, *((b // parts, s) if sequences else (-1,)), *x.shape[2:])

        if options.losses:
            scores, experts = losses.balance_scores(logits, options.topk, options.score_function, token_mask)
            for name in options.losses:
                if name == "aux_loss":
                    found[name] = losses.aux_loss(groups(scores), groups(experts), groups(token_mask))
                elif name == "seq_aux_loss":
                    of = [groups(x, sequences=True) for x in (scores, experts, token_mask)]
                    found[name] = losses.sequence_aux_loss(*of)
                else:
                    assert self.counts_so_far is not None
                    flat = [
                        None if x is None else x.reshape(b * s, *x.shape[2:]) for x in (scores, experts, token_mask)
                    ]
                    earlier = self.counts_so_far.get_value()
                    found[name], added = losses.global_aux_loss(flat[0], flat[1], earlier, flat[2])  # type: ignore[arg-type]
        if options.z_loss_coeff is not None:
            found["z_loss"] = losses.z_loss(groups(logits), groups(token_mask))
        return found, added

    def _with_losses(self, probs: Array, found: dict[str, Array]) -> Array:
        """Return the probabilities, with the losses' gradients added to theirs."""
        balance = {name: self.balance_share * coefficient for name, coefficient in self.options.losses.items()}
        coefficients = {**balance, "z_loss": self.options.z_loss_coeff or 0.0}
        terms = [coefficients[name] * loss for name, loss in found.items() if coefficients[name]]
        if not terms:
            return probs
        factors = [factor.get_value() for factor in (self.loss_scale, self.scaler_scale) if factor is not None]
        return losses.in_gradients(probs, sum(terms[1:], terms[0]), math.prod(factors, start=1.0))

    def _with_counts(
        self,
        probs: Array,
        logits: Array,
        experts: Array,
        kept: Array | None,
        token_mask: Array | None,
        found: dict[str, Array],
        so_far: Array | None,
    ) -> Array:
        """Return the probabilities, whose backward pass adds this call's counts to the states."""
        e = self.options.num_experts
        tokens = None if token_mask is None else token_mask.reshape(-1, 1)
        chosen = routing.tokens_per_expert(experts, e, tokens)
        # After dropping by capacity, as in Megatron: the actual load of an expert.
        within = kept if kept is None or tokens is None else kept & tokens
        load = chosen if kept is None else routing.tokens_per_expert(experts, e, within)
        sums = {"calls": jnp.float32(1.0), "chosen": jnp.sum(chosen), "dropped": jnp.sum(chosen - load), **found}
        sums["overflow"] = jnp.float32(0.0)  # counted where tokens are sent, see `with_overflow`
        metrics = jnp.stack([sums[name].astype(jnp.float32) for name in self.metric_names])
        quantiles = None
        if self.quantile_bias is not None:
            bias = self.quantile_bias.get_value()[:-1]
            flat = logits.reshape(-1, e)
            quantiles = jnp.append(routing.expert_quantiles(flat, bias, self.options.topk), 1.0)
        # Without counts a bias stays as it is.
        of_biases = (load, quantiles)
        if self.frozen:
            of_biases = jax.tree.map(jnp.zeros_like, of_biases)
        states = (self.expert_bias, self.quantile_bias, self.counts_so_far, self.last_step)
        return count(probs, states, (*of_biases, so_far, jnp.concatenate([load, metrics])))

    def with_overflow(self, probs: Array, overflow: Array) -> Array:
        """Return ``probs``, whose backward pass adds to the counts how many choices had no room on a device.

        Args:
            probs: any array of the forward pass on which the model's loss depends.
            overflow: fp32 ``[]``.
        """
        if not self.counts_overflow or not self.training:
            return probs
        place = self.options.num_experts + self.metric_names.index("overflow")
        counts = jnp.zeros_like(self.last_step.get_value()).at[place].set(overflow)
        return count(probs, (self.last_step,), (counts,))


def check_padding_mask(padding_mask: Array | None, lead: tuple[int, ...]) -> None:
    """Raise for a mask of padding that is not bool, or does not have the shape of the tokens, ``lead``.

    >>> check_padding_mask(jnp.zeros((2, 4), bool), (2, 4))
    """
    if padding_mask is not None and padding_mask.dtype != bool:
        raise TypeError(f"padding_mask must be bool, True for padding, got {padding_mask.dtype}")
    if padding_mask is not None and padding_mask.shape != lead:
        raise ValueError(f"padding_mask must be {list(lead)}, True for padding, got shape {padding_mask.shape}")


def _state(size: int, rule: Any) -> QuantizerState:
    return QuantizerState(jnp.zeros(size, jnp.float32), counting=rule)
