"""The optimizer composed from optax."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import RouterOptions
from jax_te.layers import LayerNormMLP, LoRA, Router, TransformerLayer
from jax_te.training import adamw_with_schedule, learning_rate_schedule, muon_dimension_numbers, weight_decay_mask
from tests.support.numerics import NO_DROPOUT


def test_schedule_warms_up_and_decays_to_a_fraction():
    schedule = learning_rate_schedule(2.0, total_steps=100, warmup_steps=10, final_fraction=0.25)
    rates = [float(schedule(count)) for count in range(120)]
    np.testing.assert_allclose(rates[:11], np.arange(11) / 5, rtol=1e-6)
    np.testing.assert_allclose(rates[55], 0.5 + 0.75, rtol=1e-6)
    np.testing.assert_allclose(rates[100:], 0.5, rtol=1e-6)
    assert np.all(np.diff(rates[10:101]) < 0)


def test_no_warm_up_begins_at_the_top():
    assert float(learning_rate_schedule(3.0, total_steps=5)(0)) == 3.0


def test_only_matrices_decay():
    """In a Flax state, too, where names lie under the Variables."""
    params = nnx.State(
        {
            "layers": {0: {"kernel": nnx.Param(jnp.ones((2, 3, 4))), "bias": nnx.Param(jnp.ones((3, 4)))}},
            "norm": {"scale": nnx.Param(jnp.ones((2, 4))), "ln_bias": nnx.Param(jnp.ones(4))},
            "embedding": nnx.Param(jnp.ones((8, 4))),
            "core_attention": {"softmax_offset": nnx.Param(jnp.ones((2, 4)))},  # of stacked layers
        }
    )
    decayed = nnx.to_pure_dict(weight_decay_mask(params))
    assert decayed["layers"][0] == {"bias": False, "kernel": True}
    assert decayed["norm"] == {"ln_bias": False, "scale": False}
    assert decayed["embedding"] is True
    assert decayed["core_attention"] == {"softmax_offset": False}


def test_weight_decay_and_clipping():
    params = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full((2,), 2.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = adamw_with_schedule(learning_rate_schedule(0.5, total_steps=10), weight_decay=0.1)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = tx.update(zeros, tx.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.5 * 0.1 * 2.0, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], 0.0)

    grads = jax.tree.map(lambda leaf: 100.0 * leaf, params)
    with jax.numpy_dtype_promotion("standard"):
        _, state = tx.update(grads, tx.init(params), params)
    clipped = state[1][0].mu
    np.testing.assert_allclose(float(optax.tree.norm(clipped)), 0.1, rtol=1e-5)  # (1 - b1) times the norm of 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"warmup_steps": 10}, r"warmup_steps must be in \[0, total_steps\)"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"final_fraction": 1.5}, "final_fraction"),
    ],
)
def test_options_outside_their_range(options, match):
    with pytest.raises(ValueError, match=match):
        learning_rate_schedule(**{"learning_rate": 0.1, "total_steps": 10, **options})


@pytest.mark.costly
@jax.numpy_dtype_promotion("standard")  # optax relies on implicit promotion, here and below
def test_the_first_moment_may_be_bf16():
    params = {"kernel": jnp.ones((4, 4))}
    tx = adamw_with_schedule(0.1, mu_dtype=jnp.bfloat16)
    grads, state = {"kernel": jnp.full((4, 4), 0.3)}, tx.init(params)
    updates, state = tx.update(grads, state, params)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sorted(map(str, dtypes)) == ["bfloat16", "float32"]
    exact = adamw_with_schedule(0.1)
    expected, _ = exact.update(grads, exact.init(params), params)
    np.testing.assert_allclose(updates["kernel"], expected["kernel"], rtol=2**-7)


@pytest.mark.costly
@jax.numpy_dtype_promotion("standard")
def test_muon_takes_each_matrix_of_a_fused_kernel_by_itself():
    """The update of a fused kernel is that of its parts; embeddings, heads, norms, biases and adapters are Adam's."""
    key = jax.random.key(0)
    wi, grad = jax.random.normal(key, (2, 8, 2, 16))
    params = {"mlp": {"wi_kernel": wi, "wi_bias": jnp.ones((2, 16))}, "embedding": wi[:, 0], "output_kernel": wi[:, 0]}
    grads = {
        "mlp": {"wi_kernel": grad, "wi_bias": jnp.ones((2, 16))},
        "embedding": grad[:, 0],
        "output_kernel": wi[:, 1],
    }
    numbers = muon_dimension_numbers(params)
    assert numbers["embedding"] is numbers["output_kernel"] is numbers["mlp"]["wi_bias"] is None
    tx, plain = (optax.contrib.muon(0.1, muon_weight_dimension_numbers=f) for f in (muon_dimension_numbers, None))
    updates, _ = tx.update(grads, tx.init(params), params)
    adam = optax.contrib.muon(0.1, muon_weight_dimension_numbers=lambda p: jax.tree.map(lambda _: None, p))
    others, _ = adam.update(grads, adam.init(params), params)
    for name in ("embedding", "output_kernel"):
        np.testing.assert_array_equal(updates[name], others[name])
    for i in range(2):
        part = {"kernel": wi[:, i]}
        expected, _ = plain.update({"kernel": grad[:, i]}, plain.init(part), part)
        np.testing.assert_allclose(updates["mlp"]["wi_kernel"][:, i], expected["kernel"], atol=1e-6)


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_muon_on_the_variables_of_layers():
    @nnx.vmap(in_axes=0)
    def stacked(key):
        return LayerNormMLP(8, 16, rngs=nnx.Rngs(key))

    layer = nnx.eval_shape(lambda: TransformerLayer(8, 16, 2, **NO_DROPOUT, rngs=nnx.Rngs(0)))
    model = nnx.Dict(
        layer=layer,
        stack=nnx.eval_shape(lambda: stacked(jax.random.split(jax.random.key(0), 3))),
        adapted=nnx.eval_shape(lambda: LoRA(LayerNormMLP(8, 16, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0))),
        router=nnx.eval_shape(lambda: Router(8, RouterOptions(num_experts=4), bias=True, rngs=nnx.Rngs(0))),
    )
    params = nnx.state(model, nnx.Param)
    numbers = nnx.to_pure_dict(muon_dimension_numbers(params))
    assert numbers["layer"]["self_attention"]["qkv"]["kernel"] == (-3, -1)
    assert numbers["layer"]["self_attention"]["proj"]["kernel"] == (-2, -1)
    assert numbers["layer"]["layernorm_mlp"]["scale"] is None
    assert numbers["stack"]["wi_kernel"] == (-3, -1)
    assert numbers["stack"]["wo_kernel"] == (-2, -1)
    assert numbers["stack"]["wi_bias"] is None
    assert numbers["adapted"]["wi_lora_b"] is None
    assert numbers["router"]["kernel"] == (-2, -1), "as in Megatron-Core"
    assert numbers["router"]["bias"] is None
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=muon_dimension_numbers)
    state = jax.eval_shape(tx.init, params)
    updates, _ = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(updates)) == jax.tree.map(jnp.shape, nnx.to_pure_dict(params))


@pytest.mark.parametrize("wrong", [{"schedule": -1e-3}, {"weight_decay": -1.0}], ids=str)
def test_numbers_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be >= 0"):
        adamw_with_schedule(**{"schedule": 1e-3, **wrong})


def test_the_mask_reads_names_of_attributes():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        kernel: jax.Array
        wi_bias: jax.Array

    mask = weight_decay_mask({"layer": Layer(jnp.ones((2, 2)), jnp.ones((2, 2)))})
    assert (mask["layer"].kernel, mask["layer"].wi_bias) == (True, False)
    state = weight_decay_mask(nnx.State({"kernel": nnx.Param(jnp.ones((2, 2))), "bias": nnx.Param(jnp.ones((2, 2)))}))
    assert (state["kernel"].get_value(), state["bias"].get_value()) == (True, False)
