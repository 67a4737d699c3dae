"""Which arrays of layers selective recomputation keeps, and its context."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.layers import LayerNormLinear, TransformerLayer
from jax_te.remat import recomputed, run_recomputed, selective_recompute
from tests.support.numerics import NO_DROPOUT, compiled_text, draw, without_type_checker

B, S, H, F, N = 2, 8, 16, 32, 4


def kept(layer: Any, *modules: str) -> dict[tuple[int, ...], int]:
    """How many arrays of each shape that has a batch axis backward keeps of a call, its input not counted."""

    def residuals(layer: Any, x: jax.Array) -> Any:
        with selective_recompute(*modules):
            return jax.vjp(lambda layer, x: layer(x), layer, x)[1]

    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(residuals, layer, jnp.ones((B, S, H))))]
    batched = [shape for shape in shapes if shape[:1] == (B,) and math.prod(shape) > B * S]
    return {shape: batched.count(shape) for shape in sorted(set(batched))}


def build(**options: Any) -> TransformerLayer:
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **options}
    return TransformerLayer(H, F, N, rngs=nnx.Rngs(0), **(NO_DROPOUT | options))


def less(module: str) -> dict[tuple[int, ...], int]:
    plain, less = kept(build()), kept(build(), module)
    changes = {shape: less.get(shape, 0) - plain.get(shape, 0) for shape in {*plain, *less}}
    return {shape: change for shape, change in changes.items() if change}


def test_core_attention_leaves_out_scores_and_probabilities() -> None:
    changes = less("core_attn")
    assert changes
    assert all(
        S in shape[-1:] and N in shape and change < 0 for shape, change in changes.items() if shape[-2:] == (S, S)
    )
    assert not [shape for shape in kept(build(), "core_attn") if shape[-2:] == (S, S)]


def test_layernorm_leaves_out_what_norms_give() -> None:
    """In attention and in the MLP; what the MLP's activation gives may go with it, where it has no name of its own."""
    assert less("layernorm")[B, S, H] == -2
    linear = LayerNormLinear(H, 8, rngs=nnx.Rngs(0))
    assert (kept(linear), kept(linear, "layernorm")) == ({(B, S, H): 2}, {(B, S, H): 1})


def test_activation_leaves_out_what_the_activation_gives() -> None:
    changes = less("activation")
    assert changes[B, S, F] == -1


def test_mlp_leaves_out_everything_but_its_input() -> None:
    left = kept(build(), "mlp")
    assert not [shape for shape in left if F in shape]


@pytest.mark.costly("modules1")
@pytest.mark.wide("modules1", "modules2")
@pytest.mark.parametrize("modules", [("layernorm",), ("activation",), ("layernorm", "activation")])
def test_no_gemm_runs_twice_for_a_norm_or_an_activation(modules: tuple[str, ...]) -> None:
    def count(*modules: str) -> int:
        def grad(layer: Any, x: jax.Array) -> Any:
            with selective_recompute(*modules):
                return jax.grad(lambda layer, x: layer(x).sum(), argnums=(0, 1))(layer, x)

        return compiled_text(grad, build(), draw("x", (B, S, H))).count(" dot(")

    assert count(*modules) == count() > 12


def test_the_innermost_context_says_it_all_and_functions_are_traced_again() -> None:
    traces = []

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        traces.append((recomputed("mlp"), recomputed("core_attn")))
        return x

    for modules in ((), ("mlp",), ("mlp", "mlp"), ("core_attn", "mlp"), ("mlp", "core_attn")):
        with selective_recompute(*modules):
            run(jnp.zeros(()))
    assert traces == [(False, False), (True, False), (True, True)]
    with selective_recompute("mlp"), selective_recompute():
        assert not recomputed("mlp")
    assert not recomputed("mlp")


def test_of_several_modules_what_all_keep_is_kept() -> None:
    seen: list[Any] = []

    def policy(*names: str) -> Any:
        seen.append(names)
        return jax.checkpoint_policies.nothing_saveable

    run = {"mlp": (), "layernorm": ("gemm", "activation"), "activation": ("gemm", "norm")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.checkpoint_policies, "save_only_these_names", policy)
        for modules in (("layernorm",), ("layernorm", "activation"), ("layernorm", "mlp"), ("core_attn",)):
            with selective_recompute(*modules):
                run_recomputed(jnp.sin, jnp.zeros(()), kept=run)
    assert seen == [("activation", "gemm"), ("gemm",)]


def test_unknown_modules_say_what_is_allowed() -> None:
    with (
        without_type_checker(),
        pytest.raises(ValueError, match=r"unknown modules \['mla'\]; allowed: core_attn, layernorm"),
        selective_recompute("mlp", "mla"),
    ):
        pass
