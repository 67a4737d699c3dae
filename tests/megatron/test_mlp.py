"""An MLP and its training step, written as Megatron's users write them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.megatron import (
    Float16Module,
    MegatronModule,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
    recipe_from_config,
)
from jax_te.recipe import autocast
from jax_te.sharding import constrain, make_mesh
from jax_te.training import create_train_state, make_train_step
from jax_te.typing import Array
from tests.support.meshes import shard
from tests.support.numerics import assert_close, compiled_text, draw, value_and_vjp
from tests.support.reference import ROUNDOFF, Form, gelu, norm, parameters, randomize, value_and_vjp64

H, F = 32, 64
SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 2, "ffn_hidden_size": F}
AXES = ("batch", "sequence", "hidden")
TOLERANCE = 4 * ROUNDOFF["float32"] * F**0.5


class MLP(MegatronModule):
    """``linear_fc2(gelu(linear_fc1(x)))``; the last bias is left to a fused bias, dropout and residual addition."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        super().__init__(config)
        self.linear_fc1 = TELayerNormColumnParallelLinear(
            config.hidden_size,
            config.ffn_hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            name="decoder.layers.0.mlp.linear_fc1",
            rngs=rngs,
        )
        self.linear_fc2 = TERowParallelLinear(
            config.ffn_hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            name="decoder.layers.0.mlp.linear_fc2",
            rngs=rngs,
        )

    def __call__(self, hidden_states: Array) -> tuple[Array, Array | None]:
        intermediate, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            intermediate = intermediate + bias[None, None]
        output, output_bias = self.linear_fc2(jax.nn.gelu(intermediate))
        return output, output_bias


@pytest.mark.wide
class Gated(MegatronModule):
    """A gated MLP of Megatron's layers, whose first one has ``output_size``."""

    def __init__(self, output_size: Any):
        config = TransformerConfig(**SIZES, add_bias_linear=False)
        super().__init__(config)
        common: Any = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False}
        common |= {"skip_bias_add": False, "rngs": nnx.Rngs(0)}
        self.linear_fc1 = TELayerNormColumnParallelLinear(H, output_size, gather_output=False, **common)
        self.linear_fc2 = TERowParallelLinear(F, H, input_is_parallel=True, **common)

    def __call__(self, x: Array) -> Array:
        y, _ = self.linear_fc1(x)
        gate, up = jnp.split(y, 2, axis=-1) if y.ndim == 3 else (y[:, :, 0], y[:, :, 1])
        return self.linear_fc2(jax.nn.silu(gate) * up)[0]


@pytest.mark.costly
def test_a_gate_on_an_axis_of_its_own_needs_no_permutes():
    """Cut out of one array of ``2 f``, the gate of a token and its factor lie on different devices."""

    def permutes(output_size: Any) -> int:
        with jax.set_mesh(make_mesh(ParallelConfig(tensor=4))):
            graphdef, state = nnx.split(shard(Gated(output_size)))
            text = compiled_text(lambda state, x: nnx.merge(graphdef, state)(x), state, jnp.ones((2, 8, H)))
        return len(re.findall(r" collective-permute(?:-start)?\(", text))

    assert permutes((2, F)) == 0 < permutes(2 * F)


@pytest.mark.costly("no mesh-True", slow=("explicit-False", "auto-True", "auto-False", "explicit-True"))
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_formula(bias: bool, mesh_mode: str):
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    model = shard(randomize(MLP(TransformerConfig(**SIZES, add_bias_linear=bias, **parallel), rngs=nnx.Rngs(0))))

    def run(model: Any, x: Array) -> Array:
        y, last = model(x)
        assert (last is None) != bias
        return constrain(y, AXES) if last is None else constrain(y, AXES) + last[None, None]

    def formula(p: Any, x: Any) -> Any:
        fc1, fc2 = p["linear_fc1"], p["linear_fc2"]
        hidden = norm(jnp, x, fc1["scale"], fc1["ln_bias"], Form()) @ fc1["kernel"] + fc1.get("bias", 0.0)
        return gelu(jnp, hidden) @ fc2["kernel"] + fc2.get("bias", 0.0)

    x, g = constrain(draw("x", (4, 8, H)), AXES), constrain(draw("g", (4, 8, H)), AXES)
    y, (d_model, dx) = value_and_vjp(run, (model, x), g)
    y64, (dp, dx64) = value_and_vjp64(formula, (parameters(model), x), g)
    assert_close(y, y64, TOLERANCE, what="output")
    assert_close(dx, dx64, TOLERANCE, what="x")
    for layer, gradients in dp.items():
        for name, gradient in gradients.items():
            assert_close(parameters(d_model)[layer][name], gradient, TOLERANCE, what=f"{layer} {name}")


@pytest.mark.costly
def test_it_trains_under_its_configurations_recipe():
    """Megatron's delayed scaling in bf16, kernels quantized once a step: the loss falls, the scales follow."""
    config = TransformerConfig(**SIZES, init_method_std=0.2, bf16=True, fp8="hybrid", fp8_amax_history_len=4)
    target = draw("target", (2, 8, H))

    def loss_fn(model: Any, batch: Array, key: Array) -> Array:
        y, bias = model(batch)
        return jnp.mean((y + bias[None, None] - target) ** 2)

    with autocast(recipe_from_config(config)):
        model = Float16Module(config, MLP(config, rngs=nnx.Rngs(0)))
        state = create_train_state(model, optax.adam(1e-2), key=jax.random.key(0))
        step = make_train_step(loss_fn, optax.adam(1e-2))
        losses = []
        for _ in range(12):
            state, metrics = step(state, draw("x", (2, 8, H)))
            losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]
    trained = state.model.state_dict()
    assert trained["linear_fc1.weight"].dtype == jnp.bfloat16
    for layer in ("linear_fc1", "linear_fc2"):
        assert (trained[f"{layer}.quantizers.grad.amax_history"] > 0.0).all()
        assert trained[f"{layer}.quantizers.x.scale"] != 1.0
