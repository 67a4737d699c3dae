"""Expert layers of jax_te next to Megatron-Core's, forward and backward, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.bench.contestants import CompiledStep, Contestant, SharedState, run_contestants
from jax_te.bench.megatron import MEGATRON_RECIPES, Megatron, megatron_experts
from jax_te.bench.settings import Row, Settings
from jax_te.config import RouterOptions
from jax_te.layers import MoE
from jax_te.ops import use_backend
from jax_te.quantize import as_float32, with_max_gradients
from jax_te.recipe import Recipe, autocast
from jax_te.training import split_model
from jax_te.typing import Array, BackendName


@dataclass(frozen=True, kw_only=True)
class ExpertsCase:
    """An expert layer: a router and gated experts, in bf16; every token is kept.

    Args:
        batch, sequence: sizes of the batch, whose tokens the layer takes at once.
        hidden_size: size of the hidden states, ``h``.
        ffn_hidden_size: size of an expert's activation, ``f``.
        router: number of experts, and method of choosing them.
        activation: activation of the experts: ``"swiglu"``, or gpt-oss's ``"clamped_swiglu"``.
        bias: whether router and experts have biases.
        recipe: precision recipe. None for bf16.
    """

    batch: int
    sequence: int
    hidden_size: int
    ffn_hidden_size: int
    router: RouterOptions
    recipe: Recipe | None
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    bias: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens of a batch."""
        return self.batch * self.sequence

    @property
    def flops(self) -> float:
        """Floating-point operations of the experts' GEMMs, forward and backward."""
        forward = 2 * self.tokens * self.router.topk * 3 * self.hidden_size * self.ffn_hidden_size
        return 3.0 * forward  # backward has two GEMMs for each of forward


def bench_experts(cases: Sequence[ExpertsCase], settings: Settings, *, peer: str | None) -> Iterator[Row]:
    """Yield rows of each case: Megatron-Core's layer, if requested, then jax_te's, timed in turn.

    Args:
        cases: layers and recipes to measure. For a recipe that Megatron-Core does not have, its bf16 layer is the peer.
        settings: settings of the measurement.
        peer: ``"megatron"``, or None.
    """
    for case in cases:
        shape = (case.batch, case.sequence, case.hidden_size)
        x, dy = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in (0, 1))
        contestants: list[Contestant] = [] if peer is None else [_megatron(case)]
        contestants.append(_ours(case, settings.backend, (x, dy)))
        for row in run_contestants(contestants, (x, dy), case.tokens, settings):
            if "ms" in row:
                row["tflops"] = float(f"{case.flops / row['ms'] / 1e9:.4g}")
            yield row
        del contestants  # their arrays and programs, before the next case's are created


def _megatron(case: ExpertsCase) -> Megatron:
    taken = case.recipe if case.recipe is not None and case.recipe.name in MEGATRON_RECIPES else None
    request = megatron_experts(
        tokens=case.tokens,
        hidden_size=case.hidden_size,
        ffn_hidden_size=case.ffn_hidden_size,
        router=case.router,
        recipe=taken,
        activation=case.activation,
        bias=case.bias,
    )
    return Megatron(f"Megatron-Core moe {'none' if taken is None else taken.name}", request=request)


def _ours(case: ExpertsCase, backend: BackendName, batch: tuple[Array, Array]) -> CompiledStep:
    """Return jax_te's layer as a step: its state are the layer's variables, its result output and gradients."""
    graphdefs: list[Any] = []  # static, so it leaves the jitted function separately from its results

    def create() -> Any:
        with autocast(case.recipe):
            layer = MoE(
                case.hidden_size,
                case.ffn_hidden_size,
                case.router,
                activation=case.activation,
                bias=case.bias,
                params_dtype=jnp.bfloat16,
                rngs=nnx.Rngs(2),
            )
        graphdef, *variables = split_model(layer)
        graphdefs.append(graphdef)
        return tuple(variables)

    def step(variables: Any, batch: tuple[Array, Array]) -> Any:
        (params, quantizers, rest), (x, dy) = variables, batch

        def apply(params: Any, quantizers: Any, x: Array) -> Array:
            # The same random choices in each step, under force_biased.
            return nnx.merge(graphdefs[0], params, quantizers, rest)(x, key=jax.random.key(0))

        y, backward = jax.vjp(apply, params, with_max_gradients(quantizers), x)
        # As in training, where the output's gradient depends on the output: backward begins when forward has ended.
        y, dy = jax.lax.optimization_barrier((y, dy))
        dparams, next_quantizers, dx = backward(dy)
        # With the output, for gradients alone do not need the last GEMM of forward, and the compiler would remove it.
        return (params, as_float32(next_quantizers), rest), (y, dparams, dx)

    def lower() -> Any:
        with autocast(case.recipe), use_backend(backend):
            return jax.jit(step, donate_argnums=0).lower(jax.eval_shape(create), batch)

    recipe = "none" if case.recipe is None else case.recipe.name
    return CompiledStep(f"jax_te moe {recipe} ({backend})", state=SharedState(jax.jit(create)), lower=lower)
