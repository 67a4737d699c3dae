"""TransformerLayer against the formulas in fp64: forward, gradients, meshes, options, errors."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.layers import TransformerLayer, rotary_embedding
from jax_te.sharding import constrain
from tests.support import reference
from tests.support.meshes import MODES, shard, use_mesh
from tests.support.numerics import NO_DROPOUT, assert_close, draw, equations, relative_l2
from tests.support.reference import ROUNDOFF, Form, parameters, randomize, value_and_vjp64

B, S, H, F, N, D = 4, 8, 32, 64, 4, 8

# A sum of F products is off by about sqrt(F) roundings; eight such sums follow one another in a layer.
TOLERANCE = 8 * ROUNDOFF["float32"] * F**0.5

GPT2 = Form(n=N, g=N, d=D)
LLAMA = Form(n=N, g=2, d=D, rms=True, activation="swiglu", rotary_base=100.0)


def build(form: Form, **options: Any) -> TransformerLayer:
    return TransformerLayer(
        H,
        F,
        N,
        num_gqa_groups=form.g,
        kv_channels=form.d,
        normalization="RMSNorm" if form.rms else "LayerNorm",
        activation=form.activation,
        bias=not form.rms,
        self_attn_mask_type="causal" if form.causal else "no_mask",
        zero_centered_gamma=form.zero_centered,
        apply_residual_connection_post_layernorm=form.residual_post_norm,
        output_layernorm=form.output_norm,
        rngs=nnx.Rngs(0),
        **(NO_DROPOUT | options),
    )


def run(form: Form, layer: TransformerLayer, x: jax.Array, g: jax.Array) -> tuple[jax.Array, Any]:
    """Output, and gradients of parameters and input as nested dictionaries; jitted."""
    graphdef, state = nnx.split(layer)

    @jax.jit
    def value_and_vjp(state: nnx.State, x: jax.Array, g: jax.Array) -> Any:
        def forward(state: nnx.State, x: jax.Array) -> jax.Array:
            rotary = rotary_embedding(jnp.arange(S), form.d, form.rotary_base) if form.rotary_base else None
            return nnx.merge(graphdef, state)(x, rotary_pos_emb=rotary)

        y, vjp = jax.vjp(forward, state, x)
        return y, vjp(g)

    y, (d_state, dx) = value_and_vjp(state, x, constrain(g, ("batch", "sequence", "hidden")))
    return y, (nnx.to_pure_dict(d_state), dx)


@functools.cache
def expected(form: Form, batch: int) -> Any:
    """Output by NumPy, gradients by JAX from the same formulas, in fp64."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), parameters(randomize(build(form))))
    x, g = np.float64(draw("x", (batch, S, H))), np.float64(draw("g", (batch, S, H)))
    _, gradients = value_and_vjp64(lambda p, x: reference.layer(jnp, p, x, form), (p, x), g)
    return reference.layer(np, p, x, form), gradients


def check(form: Form, actual: Any) -> None:
    y, gradients = expected(form, actual[0].shape[0])
    assert_close(actual[0], y, TOLERANCE, what="output")
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, (actual[1], gradients)), strict=True):
        assert_close(a, e, TOLERANCE, what=jax.tree_util.keystr(path))


@pytest.mark.costly("explicit-gpt2", slow=["auto-llama", "no mesh-gpt2"])
@pytest.mark.wide
@pytest.mark.parametrize("form", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_forward_and_gradients_follow_the_formulas_on_every_mesh(form: Form, mesh_mode: str) -> None:
    layer = shard(randomize(build(form)))
    x, g = draw("x", (B, S, H)), draw("g", (B, S, H))
    actual = run(form, layer, x, g)
    check(form, actual)
    if mesh_mode != "no mesh":
        spec = actual[0].sharding.spec
        assert spec[0] == ("data", "fsdp")
        gradients = actual[1][0]
        assert gradients["layernorm_mlp"]["wi_kernel"].sharding.spec == jax.P("fsdp", None, "tensor")
        assert gradients["self_attention"]["proj"]["kernel"].sharding.spec[0] == ("tensor", "fsdp")


@pytest.mark.costly(slow=("residual post norm",))
@pytest.mark.wide("residual post norm", "output norm")
@pytest.mark.parametrize(
    "form",
    [
        Form(residual_post_norm=True, activation="geglu"),
        Form(output_norm=True, causal=False, g=1, activation="reglu"),
        Form(zero_centered=True, rms=True, d=16, g=2),
    ],
    ids=["residual post norm", "output norm", "zero centered"],
)
def test_options_follow_the_formulas(form: Form) -> None:
    layer = randomize(build(form))
    x, g = draw("x", (2, S, H)), draw("g", (2, S, H))
    check(form, run(form, layer, x, g))


def test_bf16_stays_within_its_rounding() -> None:
    layer = randomize(build(GPT2, params_dtype=jnp.bfloat16))
    x = draw("x", (2, S, H), jnp.bfloat16)
    y = jax.jit(lambda layer, x: layer(x))(layer, x)
    assert y.dtype == jnp.bfloat16
    p = jax.tree.map(lambda a: np.asarray(a).astype(np.float64), parameters(layer))
    expected = reference.layer(np, p, np.asarray(x).astype(np.float64), GPT2)
    # Eight roundings to bf16 follow one another.
    assert_close(y, expected, 8 * ROUNDOFF["bfloat16"], what="bf16")


def test_fp32_parameters_get_fp32_gradients_under_bf16_computation() -> None:
    layer = build(GPT2)
    x = draw("x", (2, S, H), jnp.bfloat16)
    grads = jax.jit(jax.grad(lambda layer, x: layer(x).astype(jnp.float32).sum()))(layer, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(grads, nnx.Param))} == {jnp.dtype(jnp.float32)}


@pytest.mark.costly
def test_recomputing_core_attention_changes_nothing() -> None:
    """But that backward computes the scores a second time."""
    layer = randomize(build(LLAMA))
    x = draw("x", (2, S, H))

    def traced(recompute: bool) -> Any:
        loss = lambda layer, x: jnp.sum(jnp.sin(layer(x, checkpoint_core_attention=recompute)))  # noqa: E731
        return jax.jit(jax.grad(loss)).trace(layer, x)

    recomputed, kept = traced(True), traced(False)
    gemms = [sum(e.primitive.name == "dot_general" for e in equations(t.jaxpr.jaxpr)) for t in (recomputed, kept)]
    assert gemms[0] > gemms[1]
    found, expected = (trace.lower().compile()(layer, x) for trace in (recomputed, kept))
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(a, e, TOLERANCE)


@pytest.mark.slow
def test_dropout_follows_its_key_and_is_the_same_on_every_mesh() -> None:
    layer = randomize(build(GPT2, hidden_dropout=0.5, attention_dropout=0.5))
    x = draw("x", (B, S, H))
    call = jax.jit(lambda layer, x, key: layer(x, dropout_key=key))
    dropped = call(layer, x, jax.random.key(3))
    assert relative_l2(dropped, call(layer, x, jax.random.key(4))) > 0.1
    layer.eval()
    assert_close(call(layer, x, None), call(randomize(build(GPT2, **NO_DROPOUT)), x, None), TOLERANCE)
    assert relative_l2(dropped, call(layer, x, None)) > 0.1
    for mode in MODES[1:]:
        with use_mesh(mode):
            layer = shard(randomize(build(GPT2, hidden_dropout=0.5, attention_dropout=0.5)))
            assert_close(call(layer, x, jax.random.key(3)), dropped, TOLERANCE)


def test_the_two_blocks_drop_independently() -> None:
    layer = build(Form(), hidden_dropout=0.5, output_layer_init_method=jax.nn.initializers.zeros)
    for bias in (layer.self_attention.proj.bias, layer.layernorm_mlp.wo_bias):
        bias.set_value(jnp.ones(H))
    call = jax.jit(lambda layer, x, key: layer(x, dropout_key=key))
    y = call(layer, jnp.zeros((B, S, H)), jax.random.key(0))  # each block adds 0 or 2
    share = [float((y == value).mean()) for value in (0.0, 2.0, 4.0)]
    count = B * S * H
    assert np.abs(np.array(share) - [0.25, 0.5, 0.25]).max() < 4 * (0.25 / count) ** 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_type": "prefix"}, "layer_type must be one of 'encoder', 'decoder', got 'prefix'"),
        ({"hidden_dropout": 1.0}, r"hidden_dropout must be in \[0, 1\)"),
        ({"normalization": "BatchNorm"}, "normalization must be one of 'LayerNorm', 'RMSNorm', got 'BatchNorm'"),
        ({"activation": "tanh"}, "unknown activation 'tanh'"),
        ({"num_gqa_groups": 3}, "num_attention_heads 4 is not divisible by num_gqa_groups 3"),
        ({"self_attn_mask_type": "diagonal"}, "attn_mask_type must be one of.* 'diagonal'"),
        ({"layernorm_epsilon": 0.0}, "epsilon must be > 0"),
        ({"params_dtype": jnp.int32}, "params_dtype must be one of float32, bfloat16, float16, got int32"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerLayer(H, F, N, rngs=nnx.Rngs(0), **(NO_DROPOUT | options))


def test_bad_sizes_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="hidden_size 30 is not divisible by num_attention_heads 4"):
        TransformerLayer(30, F, N, **NO_DROPOUT, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"takes \[b, s, 32\], got shape \(8, 32\)"):
        build(GPT2)(draw("x", (S, H)))
    layer = TransformerLayer(H, F, N, **NO_DROPOUT, self_attn_mask_type="padding", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"a padding mask must be bool \[b, 1, 1, s\]"):
        layer(draw("x", (2, S, H)), attention_mask=jnp.zeros((1, 1, S, S), bool))
