"""Gradients of gradients: right without a recipe, an error under one, and first derivatives undisturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_te import linen
from jax_te.layers import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, TransformerLayer, quantize_model
from jax_te.ops import dense, dot_product_attention, linear_cross_entropy, softmax_cross_entropy
from jax_te.quantize import frozen_scales
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)
from jax_te.training import create_train_state, deferred_vjp, make_train_step
from tests.support.meshes import MODES, shard, use_mesh
from tests.support.numerics import assert_bitwise, assert_close, draw

CURRENT = Float8CurrentScaling()
RECIPES = {
    "current": CURRENT,
    "delayed": DelayedScaling(amax_history_len=2),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
LAYERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: Linear(32, 32, rngs=nnx.Rngs(0)),
    "layernorm_linear": lambda: LayerNormLinear(32, 32, rngs=nnx.Rngs(0)),
    "layernorm_mlp": lambda: LayerNormMLP(32, 64, rngs=nnx.Rngs(0)),
}
REFUSED = "second derivatives do not exist under recipe"
Loss = Callable[[Any, jax.Array], jax.Array]


def loss_of(model: Any) -> tuple[Loss, Any]:
    """A function of parameters and input that is linear in the model's output, and the parameters."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, x: jnp.sum(nnx.merge(graphdef, params, rest)(x) * jnp.cos(x)), params


def penalty(loss: Loss) -> Loss:
    """The mean square of the input's gradient."""
    return lambda params, x: jnp.mean(jnp.square(jax.grad(loss, argnums=1)(params, x)))


def adapted(loss: Loss) -> Loss:
    """The loss behind one step of gradient descent, as in MAML."""
    return lambda params, x: loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x)), x)


def scanned(loss: Loss) -> Loss:
    def run(params: Any, x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, x: jax.Array) -> Any:
            return carry + loss(params, x), None

        return jax.lax.scan(step, jnp.zeros(()), jnp.stack([x, x]))[0]

    return run


AROUND: dict[str, Callable[[Loss], Loss]] = {
    "alone": lambda loss: loss,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": scanned,
    "vmap": lambda loss: lambda params, x: jnp.sum(jax.vmap(loss, (None, 0))(params, jnp.stack([x, x]))),
}
TWICE: dict[str, Callable[[Loss, Any, jax.Array], Any]] = {
    "gradient penalty": lambda loss, params, x: jax.grad(penalty(loss))(params, x),
    "MAML": lambda loss, params, x: jax.grad(adapted(loss))(params, x),
    "Hessian, reverse over reverse": lambda loss, params, x: jax.grad(
        lambda x: jnp.vdot(jax.grad(loss, argnums=1)(params, x), jnp.sin(x))
    )(x),
    "Hessian, forward over reverse": lambda loss, params, x: jax.jvp(
        lambda x: jax.grad(loss, argnums=1)(params, x), (x,), (jnp.sin(x),)
    ),
    "linear in the cotangent": lambda loss, params, x: jax.grad(lambda u: jnp.sum(jax.vjp(loss, params, x)[1](u)[1]))(
        jnp.ones(())
    ),
    "value beside a gradient": lambda loss, params, x: jax.grad(
        lambda params: jax.value_and_grad(loss, argnums=1)(params, x)[0]
    )(params),
}


@pytest.mark.costly(
    "value beside a gradient-layernorm_mlp-current",
    slow=(
        "gradient penalty-linear-current",
        "MAML-layernorm_linear-delayed",
        "linear in the cotangent-layernorm_linear-nvfp4",
        "Hessian, reverse over reverse-layernorm_mlp-block",
    ),
)
@pytest.mark.wide
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("twice", TWICE)
def test_a_recipe_refuses_them(twice: str, layer: str, recipe: str) -> None:
    x = draw("x", (32, 32))
    with autocast(RECIPES[recipe]), frozen_scales():
        loss, params = loss_of(LAYERS[layer]())
        with pytest.raises(TypeError, match=f"{REFUSED} '{recipe}'.*autocast"):
            TWICE[twice](loss, params, x)


@pytest.mark.costly(
    "gradient penalty-alone-False",
    slow=("Hessian, reverse over reverse-remat-False", "linear in the cotangent-vmap-False", "MAML-jit-True"),
)
@pytest.mark.wide
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("twice", list(TWICE)[:-1])
def test_within_transformations(twice: str, around: str, outside: bool) -> None:
    x = draw("x", (32, 32))
    with autocast(CURRENT):
        loss, params = loss_of(LAYERS["layernorm_mlp"]())
        run = jax.jit(TWICE[twice], static_argnums=0) if outside else TWICE[twice]
        with pytest.raises(TypeError, match=REFUSED):
            run(AROUND[around](loss), params, x)


@pytest.mark.costly(
    "layernorm_mlp-auto", slow=("linear-auto", "layernorm_linear-auto", "linear-explicit", "layernorm_mlp-explicit")
)
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("layer", LAYERS)
def test_on_meshes(layer: str, mode: str) -> None:
    with use_mesh(mode), autocast(CURRENT):
        loss, params = loss_of(shard(LAYERS[layer]()))
        x = draw("x", (8, 16, 32))
        for twice in TWICE.values():
            with pytest.raises(TypeError, match=REFUSED):
                jax.jit(twice, static_argnums=0)(loss, params, x)


def test_a_step_with_kept_kernels_refuses_them() -> None:
    """Whose kernels are quantized before the loss: what is differentiated are sinks, which nothing reads."""

    def loss(model: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(jax.grad(lambda x: jnp.sum(model(x) * batch))(batch)))

    with autocast(CURRENT):
        tx = optax.sgd(0.1)
        state = create_train_state(lambda rngs: Linear(32, 32, bias=False, rngs=rngs), tx, key=jax.random.key(0))
        with pytest.raises(TypeError, match=REFUSED):
            make_train_step(loss, tx, microbatches=1)(state, draw("x", (32, 32)))


@pytest.mark.costly
def test_deferred_gradients_and_drop_ins_refuse_them() -> None:
    x = draw("x", (32, 32))
    with autocast(CURRENT):
        model = LAYERS["linear"]()
        with pytest.raises(TypeError, match=REFUSED):
            jax.grad(lambda x: jnp.sum(deferred_vjp(lambda m, x: m(x), model, x)[1](jnp.cos(x)).inputs[0] ** 2))(x)
        own = nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)))
        quantize_model(own, x, rules={"*": "ambient"})
        loss, params = loss_of(own)
        with pytest.raises(TypeError, match=REFUSED):
            jax.grad(penalty(loss))(params, x)
        dropped = linen.quantize_model(nn.Dense(32), x)
        variables = dropped.init(jax.random.key(0), x)
        with pytest.raises(TypeError, match=REFUSED):
            jax.grad(penalty(lambda variables, x: jnp.sum(dropped.apply(variables, x))))(variables, x)


def test_operands_that_stay_in_high_precision_keep_them() -> None:
    """A recipe that quantizes nothing is none."""
    x, kernel = draw("x", (32, 32)), draw("kernel", (32, 32))
    recipe = Float8CurrentScaling(override_linear_precision=(True,) * 3)
    loss = lambda kernel, x: jnp.sum(dense(x, kernel, recipe=recipe) ** 2)  # noqa: E731
    plain = jax.grad(penalty(lambda kernel, x: jnp.sum((x @ kernel) ** 2)))(kernel, x)
    assert_close(jax.grad(penalty(loss))(kernel, x), plain, 1e-5)


@pytest.mark.costly("True")
@pytest.mark.parametrize("jit", [False, True])
def test_first_derivatives_beside_a_gradient_that_counts_as_constant(jit: bool) -> None:
    """Adversarial examples, made inside of the loss from a gradient whose own derivative is zero."""
    x = draw("x", (32, 32))
    with autocast(CURRENT):
        loss, params = loss_of(LAYERS["layernorm_mlp"]())

        def adversarial(params: Any, x: jax.Array, stop: Callable[[Any], Any]) -> jax.Array:
            return loss(params, x + 0.1 * stop(jax.grad(loss, argnums=1)(params, x)))

        derivative = jax.jit(jax.grad(adversarial), static_argnums=2) if jit else jax.grad(adversarial)
        for stop in (jnp.sign, jax.lax.stop_gradient):
            moved = x + 0.1 * stop(jax.jit(jax.grad(loss, argnums=1))(params, x))
            expected = jax.jit(jax.grad(loss))(params, moved)
            # One step of E4M3 where a rounding of the examples crosses a boundary.
            jax.tree.map(lambda a, e: assert_close(a, e, 2.0**-4), derivative(params, x, stop), expected)


def second(fn: Callable[..., jax.Array], args: tuple[Any, ...]) -> None:
    """Fail unless the Hessian of ``fn``, times a vector, is what differences of its gradient are."""
    directions = jax.tree.map(lambda a: jnp.sin(7.0 * jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), args)
    gradient = jax.jit(jax.grad(fn, argnums=tuple(range(len(args)))))
    step = 2.0**-7
    ahead, behind = (
        gradient(*jax.tree.map(lambda a, d, s=sign: a + s * step * d, args, directions)) for sign in (1.0, -1.0)
    )
    differences = jax.tree.map(lambda a, b: (a - b) / (2.0 * step), ahead, behind)

    def product(*args: Any) -> Any:
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient(*args), directions)))

    reverse = jax.grad(product, argnums=tuple(range(len(args))))(*args)
    forward = jax.jvp(gradient, args, directions)[1]
    for path, (a, b, c) in enumerate(zip(*map(jax.tree.leaves, (reverse, forward, differences)), strict=True)):
        # Central differences are off by step² = 6e-5 of a third derivative, and by eps / step = 2e-5 of the gradient.
        assert np.linalg.norm(a - c) <= 5e-3 * np.linalg.norm(c) + 1e-4, path
        assert_close(a, b, 1e-4)


def squares(model: Any) -> tuple[Callable[..., jax.Array], tuple[Any, Any]]:
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    run = lambda params, x: jnp.mean(jnp.sin(nnx.merge(graphdef, params, rest)(x)))  # noqa: E731
    return run, (params, draw("x", (2, 8, 32)))


WITHOUT: dict[str, Callable[[], tuple[Callable[..., jax.Array], tuple[Any, ...]]]] = {
    **{name: (lambda build=build: squares(build())) for name, build in LAYERS.items()},
    "norm": lambda: squares(LayerNorm(32, rngs=nnx.Rngs(0))),
    "transformer_layer": lambda: squares(
        TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, rngs=nnx.Rngs(0))
    ),
    "attention": lambda: (
        lambda q, k, v: jnp.mean(jnp.sin(dot_product_attention((q, k, v)))),
        tuple(draw(name, (2, 8, 2, 16)) for name in "qkv"),
    ),
    "cross-entropy": lambda: (
        lambda logits: jnp.mean(softmax_cross_entropy(logits, jnp.arange(8)) ** 2),
        (draw("logits", (8, 16)),),
    ),
    "cross-entropy of chunks": lambda: (
        lambda x, kernel: jnp.mean(linear_cross_entropy(x, kernel, jnp.arange(8)[None], chunks=2) ** 2),
        (draw("x", (1, 8, 16)), 0.3 * draw("table", (16, 32))),
    ),
}


@pytest.mark.costly(
    "cross-entropy",
    slow=("transformer_layer", "linear", "layernorm_linear", "attention", "cross-entropy of chunks", "layernorm_mlp"),
)
@pytest.mark.parametrize("name", WITHOUT)
def test_without_a_recipe_they_are_right(name: str) -> None:
    second(*WITHOUT[name]())


@pytest.mark.costly("explicit", slow=["auto"])
@pytest.mark.parametrize("mode", MODES[1:])
def test_without_a_recipe_they_are_right_on_meshes(mode: str) -> None:
    run, (params, _) = squares(LAYERS["layernorm_mlp"]())
    x = draw("x", (8, 8, 32))
    expected = jax.jit(jax.grad(penalty(run)))(params, x)
    with use_mesh(mode):
        run, (params, _) = squares(shard(LAYERS["layernorm_mlp"]()))
        found = jax.jit(jax.grad(penalty(run)))(params, x)
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-4), found, expected)


@pytest.mark.costly
def test_a_remat_policy_saves_what_it_did() -> None:
    """Not the arguments of an op beside the quantized operands that were made of them."""
    names = jax.checkpoint_policies.save_only_these_names("activation", "quantized", "gemm", "witness")
    x, kernel = draw("x", (32, 64)), draw("kernel", (64, 32))

    def run(x: jax.Array) -> jax.Array:
        named = jax.ad_checkpoint.checkpoint_name(jnp.tanh(x), "activation")
        return jnp.sum(jnp.sin(dense(named, kernel, recipe=CURRENT)))

    _, vjp = jax.vjp(jax.checkpoint(run, policy=names), x)
    kept = [leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.float32 and leaf.size]
    # The input of the region, tanh for its own derivative, and no third.
    assert kept.count((32, 64)) <= 2
    assert_bitwise(vjp(jnp.ones(()))[0], jax.vjp(run, x)[1](jnp.ones(()))[0])
