"""The state of FP8 attention in layers, models, loops and train steps."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te import linen, value_and_grad
from jax_te.config import LatentAttentionOptions, ParallelConfig, PipelineConfig, RecomputeConfig, TransformerConfig
from jax_te.errors import BackendUnavailableError, QuantizerStateError
from jax_te.layers import (
    DotProductAttention,
    MultiheadAttention,
    MultiLatentAttention,
    TransformerLayer,
    keep_in_high_precision,
    prepare_quantization,
)
from jax_te.megatron import TEDotProductAttention, recipe_from_config, state_dict
from jax_te.megatron import TransformerLayer as MegatronTransformerLayer
from jax_te.models import GPTModel, run_layers
from jax_te.ops import use_backend
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.sharding import make_mesh
from jax_te.training import PipelinedLoss, create_train_state, make_train_step
from tests.support.numerics import NO_DROPOUT, assert_bitwise, assert_close, draw, quick_jit, with_vjp
from tests.support.states import merging

B, S, H, N = 2, 128, 256, 2
DELAYED = DelayedScaling(fp8_dpa=True, amax_history_len=3)
CURRENT = Float8CurrentScaling(fp8_dpa=True)
CURRENT_WHOLE = Float8CurrentScaling(fp8_dpa=True, amax_scope="whole")
KINDS = pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])


def layer(number: int = 1, **options: Any) -> TransformerLayer:
    return TransformerLayer(H, 256, N, layer_number=number, **NO_DROPOUT, **options, rngs=nnx.Rngs(number))


def states(model: nnx.Module) -> dict[str, np.ndarray]:
    """Quantizer states of a model's attention by path."""
    flat = nnx.to_flat_state(nnx.state(model, QuantizerState))
    found = {"/".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in flat}
    return {path: value for path, value in found.items() if "core_attention" in path}


@nnx.jit
def output(model: Any, x: Any) -> Any:
    return model(x)


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(jnp.square(model(batch) - jnp.roll(batch, 1, axis=1)))


@pytest.mark.slow
@pytest.mark.wide("delayed")
@KINDS
def test_a_layer_holds_the_state_and_a_step_moves_it_on(recipe):
    x = draw("x", (B, S, H))
    with autocast(recipe):
        model = layer()
        before = states(model)
        quick = nnx.jit(value_and_grad(lambda model, x: loss_fn(model, x, None)))
        for _ in range(3):
            quick(model, x)
        after = states(model)
        quantized = output(model, x)
    assert before.keys() == after.keys()
    assert len(after) == 2 * (6 if recipe is DELAYED else 4)
    for path, value in after.items():
        assert np.all(np.isfinite(value))
        assert np.any(value != before[path]) or path.endswith("s/amax_history"), path
    with autocast(type(recipe)(**({"amax_history_len": 3} if recipe is DELAYED else {}))):
        plain = output(model, x)
    assert np.any(np.asarray(plain) != np.asarray(quantized))


@pytest.mark.slow
def test_layers_in_high_precision_keep_their_attention_there():
    x = draw("x", (B, S, H))
    with autocast(CURRENT):
        model = keep_in_high_precision(layer())
        assert_bitwise(model(x), model(x))
        inside = model(x)
    assert_bitwise(inside, model(x))


@pytest.mark.slow
def test_prepare_quantization():
    x = draw("x", (B, S, H))
    model = layer()
    assert not states(model)
    with autocast(DELAYED), pytest.raises(QuantizerStateError, match="recipe 'delayed' with fp8_dpa=True needs"):
        # The linear layers in front of attention have theirs.
        prepare_quantization(model, DelayedScaling(amax_history_len=3))(x)
    prepare_quantization(model, DELAYED)
    with autocast(DELAYED):
        fresh = layer()
        jax.tree.map(assert_bitwise, states(model), states(fresh))
        assert_bitwise(model(x), fresh(x))
    prepare_quantization(model, CURRENT)
    assert {path.split("/")[-2] for path in states(model)} == {"dp", "dq", "dk", "dv"}
    prepare_quantization(model, None)
    assert not states(model)


@pytest.mark.costly
def test_prepare_quantization_of_stacked_layers():
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs: nnx.Rngs) -> TransformerLayer:
        return TransformerLayer(H, 256, N, **NO_DROPOUT, rngs=rngs)

    model = build(nnx.Rngs(0).split(3))
    prepare_quantization(model, DELAYED)
    with autocast(DELAYED):
        built = build(nnx.Rngs(0).split(3))
    jax.tree.map(assert_bitwise, states(model), states(built))


@pytest.mark.costly
def test_evaluation_needs_no_derivative_of_the_state():
    x = draw("x", (B, S, H))
    with autocast(DELAYED):
        model = layer()
        with pytest.raises(QuantizerStateError):
            jax.grad(lambda x: jnp.sum(model(x)))(x)
        model.eval()
        assert np.all(np.isfinite(jax.grad(lambda x: jnp.sum(model(x)))(x)))


@pytest.mark.slow
@KINDS
def test_microbatches_merge_by_maximum(recipe):
    batch = draw("x", (4, S, H)) * jnp.array([0.5, 2.0, 1.0, 0.25]).reshape(4, 1, 1)
    tx = optax.sgd(0.0)

    def after(batch: Any, microbatches: int, share: float) -> dict[str, np.ndarray]:
        def loss(*args: Any) -> Any:
            return share * loss_fn(*args)

        state = create_train_state(lambda rngs: layer(), tx, key=jax.random.key(0))
        return states(make_train_step(loss, tx, microbatches=microbatches)(state, batch)[0].model)

    with autocast(recipe):
        # A microbatch's gradients are those of its share of the loss.
        merged, halves = after(batch, 2, 1.0), [after(half, 1, 0.5) for half in (batch[:2], batch[2:])]
    for path, value in merged.items():
        np.testing.assert_allclose(value, np.maximum(*[half[path] for half in halves]), rtol=1e-5, err_msg=path)
    assert any(np.any(halves[0][path] != halves[1][path]) for path in merged)


@pytest.mark.slow
def test_recomputation_and_loops_change_nothing():
    x, layers = draw("x", (B, S, H)), 2

    def gradients(scan: bool, recompute: RecomputeConfig) -> Any:
        model = nnx.List([layer() for _ in range(layers)])

        def loss(model: Any, x: Any) -> Any:
            y = run_layers(model, x, [None] * layers, recompute=recompute, scan=scan)
            return jnp.mean(jnp.square(y - jnp.roll(x, 1, axis=1)))

        run = nnx.jit(value_and_grad(loss))
        for _ in range(2):
            value, grads = run(model, x)
        return value, jax.tree.leaves(nnx.as_pure(grads)), states(model)

    full = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    core = RecomputeConfig(recompute_granularity="selective", recompute_modules=("core_attn",))
    with autocast(DELAYED):
        plain = gradients(False, RecomputeConfig())
        for scan, recompute in ((False, core), (True, RecomputeConfig()), (True, full)):
            other = gradients(scan, recompute)
            # XLA may sum in another order inside of a loop; an FP8 value then rounds the other way here and there.
            np.testing.assert_allclose(other[0], plain[0], rtol=1e-4)
            for a, b in zip(other[1], plain[1], strict=True):
                assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)
            for path, value in other[2].items():
                np.testing.assert_allclose(value, plain[2][path], rtol=2.0**-3, err_msg=path)


def after_calls(recipe: Any) -> tuple[Any, Any]:
    """Output, gradients and states of the third call of one attention layer, each of whose states the next one has."""
    x, g = draw("x", (B, S, H)), draw("g", (B, S, H), scale=1e-3)
    with autocast(recipe):
        model = MultiheadAttention(H, N, attention_dropout=0.0, rngs=nnx.Rngs(0))
        graphdef, params, state, rest = nnx.split(model, nnx.Param, QuantizerState, ...)

        @quick_jit
        def call(params: Any, state: Any, x: Any) -> Any:
            return with_vjp(lambda *args: nnx.merge(graphdef, *args[:2], rest)(args[2]), (params, state, x), g)

        for _ in range(3):
            out, (of_params, state, of_x) = call(params, state, x)
    return jax.tree.map(np.asarray, (out, nnx.as_pure(of_params), of_x)), jax.tree.map(np.asarray, nnx.as_pure(state))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT_WHOLE], ids=["delayed", "current"])
def test_heads_on_two_devices(recipe):
    """The states are those of one device bit for bit, so no scale is one of a device's heads.

    In the output and the gradients devices add the summands of their heads in another order, 2^-24 each. Nothing in
    this layer is quantized behind such a sum. A model has layers behind it, where a value beside a tie of FP8 rounds
    the other way; docs/troubleshooting_runs.md says how far that goes.
    """
    expected, wanted = after_calls(recipe)
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=2))):
        found, after = after_calls(recipe)
    assert len(jax.tree.leaves(after)) >= 2 * (6 if recipe is DELAYED else 4)
    jax.tree.map(assert_bitwise, after, wanted)
    jax.tree.map(lambda a, b: assert_close(a, b, 2.0**-18), found, expected)


def train(mesh: str | None, recipe: Any, comm: Any = "p2p") -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of two steps of two microbatches of a small GPT, and the states of its attention behind them."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=H,
        num_attention_heads=N,
        ffn_hidden_size=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        cp_comm_type=comm,
    )
    loss = PipelinedLoss(
        lambda model, batch, key: model.embed_inputs(batch[:, :-1], dropout_key=key),
        lambda model, y, batch, key: model.compute_loss(y, batch[:, 1:]),
    )
    tokens, tx = (np.arange(4 * (S + 1)).reshape(4, S + 1) * 7) % 61, optax.adam(1e-2)
    place = contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(ParallelConfig.parse(mesh)))
    with place, autocast(recipe):
        state = create_train_state(
            lambda rngs: GPTModel(config, vocab_size=64, max_sequence_length=S, rngs=rngs), tx, key=jax.random.key(0)
        )
        step = make_train_step(loss, tx, microbatches=2, pipeline=PipelineConfig())
        losses = []
        for _ in range(2):
            state, metrics = step(state, tokens)
            losses.append(float(metrics["loss"]))
    return losses, states(state.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "mesh", "comm"),
    [
        pytest.param(DELAYED, "pipeline=2", "p2p", id="delayed"),
        pytest.param(DELAYED, "pipeline=2,context=2,tensor=1", "a2a", id="delayed-context"),
        pytest.param(CURRENT_WHOLE, "pipeline=2", "p2p", id="current"),
    ],
)
def test_stages_of_a_pipeline(recipe, mesh, comm):
    """Losses and next states of one device: each stage has the states of its layers, merged over microbatches."""
    losses, after = train(mesh, recipe, comm)
    expected, wanted = train(None, recipe)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)  # a value between two of FP8 may round the other way
    assert len(after) == len(wanted) == 2 * 2 * (6 if recipe is DELAYED else 4)
    for path, value in after.items():
        np.testing.assert_allclose(value, wanted[path], rtol=2.0**-3, err_msg=path)


@pytest.mark.slow
def test_a_captured_layer():
    """A replay's output, gradients and next state are those of the call."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=N,
        ffn_hidden_size=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        cuda_graph_impl="transformer_engine",
        fp8="e4m3",
        fp8_recipe="delayed",
        fp8_dot_product_attention=True,
    )
    x = draw("x", (B, S, H))
    with autocast(recipe_from_config(config)):
        model = MegatronTransformerLayer(config, rngs=nnx.Rngs(0))
        assert states(model)
        model._te_cuda_graph_capture(**model.get_layer_static_inputs(S, B))
        assert len(model.cuda_graphs) == 1
        graphdef, state = nnx.split(model)

        def loss(state: Any, x: Any) -> Any:
            return jnp.sum(jnp.square(nnx.merge(graphdef, merging(state))(x)[0]))

        replayed = jax.value_and_grad(loss)(state, x)
        called = jax.jit(jax.value_and_grad(loss))(state, x)
    for a, b in zip(jax.tree.leaves(replayed), jax.tree.leaves(called), strict=True):
        assert_close(a, b, 2.0**-16)


@pytest.mark.slow
def test_latent_attention_has_other_heads():
    """Of 192 and 128, as DeepSeek has them: in the compute dtype, and refused where the backend is named."""
    sizes = LatentAttentionOptions(kv_lora_rank=16, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    x = draw("x", (1, S, 32))
    with autocast(CURRENT):
        model = MultiLatentAttention(32, 2, sizes, attention_dropout=0.0, rngs=nnx.Rngs(1))
        other = output(model, x)
        with use_backend("xla"), pytest.raises(BackendUnavailableError, match="the call has heads of 128 and 192"):
            model(x)
    with autocast(Float8CurrentScaling()):
        assert_bitwise(other, output(model, x))


def test_evaluation_runs_in_fp8_only_what_training_did():
    """Dropout keeps attention in the compute dtype in training; no scale has ever been calibrated there."""
    q = draw("q", (1, S, 1, 128))
    with autocast(CURRENT):
        core = DotProductAttention(1, 128, attention_dropout=0.1)
    core.eval()
    plain = core(q, q, q)
    with autocast(CURRENT):
        assert_bitwise(core(q, q, q), plain)
        with use_backend("xla"), pytest.raises(BackendUnavailableError, match=r"dropout of 0\.1"):
            core(q, q, q)
        core.set_attributes(without_dropout=True)
        assert (core(q, q, q) != plain).any()


@pytest.mark.costly
def test_a_call_that_cannot_run_in_fp8():
    """A layer's heads of 64: in the compute dtype, and refused where the backend is named."""
    x = draw("x", (B, S, H))
    with autocast(CURRENT):
        model = TransformerLayer(H, 256, 4, **NO_DROPOUT, rngs=nnx.Rngs(0))
        other = model(x)
        with use_backend("xla"), pytest.raises(BackendUnavailableError, match="the call has heads of 64"):
            model(x)
    with autocast(Float8CurrentScaling()):
        assert_bitwise(other, model(x))


@pytest.mark.costly
def test_megatrons_core():
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=N)
    q = draw("q", (B, S, N, 128))
    with autocast(CURRENT):
        core = TEDotProductAttention(config, 1, "causal", "self", 0.0)
        own = DotProductAttention(N, 128)
        assert_bitwise(core(q, q, q, None), own(q, q, q).reshape(B, S, H))
    assert "quantizers.dp.scale" in state_dict(core)


@pytest.mark.slow
def test_linen():
    q = draw("q", (B, S, N, 128))
    module = linen.DotProductAttention(N, 128)
    with autocast(DELAYED):
        variables = module.init(jax.random.key(0), q, q, q)
        assert set(variables["_overwrite_with_gradient"]["quantizers"]) == {"qkv", "s", "o", "do", "dp", "dqkv"}

        def loss(variables: Any) -> Any:
            return jnp.mean(jnp.square(module.apply(variables, q, q, q)))

        _, grads = quick_jit(linen.value_and_grad(loss))(variables)
        after = grads["_overwrite_with_gradient"]["quantizers"]
        np.testing.assert_allclose(after["qkv"]["amax_history"][0], np.max(np.abs(q)))
        fresh = linen.prepare_quantization(module, {}, DELAYED, q, q, q)
        jax.tree.map(assert_bitwise, fresh["_overwrite_with_gradient"], variables["_overwrite_with_gradient"])
    with pytest.raises(QuantizerStateError), autocast(DELAYED):
        module.apply({}, q, q, q)


@pytest.mark.slow
def test_recomputing_the_core():
    x = draw("x", (B, S, H))
    with autocast(DELAYED):
        model = layer()

        def gradients(x: Any, recompute: bool) -> Any:
            def loss(model: Any, x: Any) -> Any:
                return jnp.mean(jnp.square(model(x, checkpoint_core_attention=recompute)))

            split, state = nnx.split(model)
            return quick_jit(lambda state, x: jax.grad(lambda s: loss(nnx.merge(split, merging(s)), x))(state))(
                state, x
            )

        jax.tree.map(assert_bitwise, gradients(x, True), gradients(x, False))
