"""Multi-token prediction: losses and gradients after Megatron, its metrics, refusals, and meshes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import MLATransformerConfig, ParallelConfig, TransformerConfig
from jax_te.layers import PackedSeqParams
from jax_te.megatron import MLASelfAttention, MoELayer, TransformerLayer
from jax_te.models import BertModel, Execution, GPTModel, MegatronGPTModel, RotaryPositions, multi_token_metrics
from jax_te.ops import LossOptions
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.sharding import make_mesh
from jax_te.training import (
    DynamicLossScale,
    PipelinedLoss,
    WeightedMean,
    create_train_state,
    make_eval_step,
    make_train_step,
)
from tests.support import multi_token
from tests.support.meshes import shard
from tests.support.reference import Form, parameters, randomize, value_and_vjp64
from tests.support.states import merging

V, B, S = 32, 4, 8
GPT2 = TransformerConfig(
    num_layers=1,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=64,
    mtp_num_layers=2,
    mtp_loss_scaling_factor=0.3,
)
LLAMA = dataclasses.replace(
    GPT2, num_query_groups=2, normalization="RMSNorm", activation="swiglu", add_bias_linear=False
)
FORMS: dict[str, Any] = {
    "gpt2": (GPT2, {}, Form()),
    "llama": (
        LLAMA,
        {"position_embedding_type": RotaryPositions(100.0), "share_embeddings_and_output_weights": False},
        Form(g=2, rms=True, activation="swiglu", rotary_base=100.0),
    ),
    "one layer": (dataclasses.replace(GPT2, mtp_use_repeated_layer=True), {}, Form()),
}


def build(form: str = "gpt2", **options: Any) -> GPTModel:
    config, defaults, _ = FORMS[form]
    config = dataclasses.replace(config, **options.pop("fields", {}))
    return randomize(GPTModel(config, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0), **{**defaults, **options}))


def batch() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B, S + 1)).astype(np.int32)
    return jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:]), jnp.asarray(rng.integers(0, 2, (B, S)), jnp.float32)


def expected(
    form: str, p: Any, arrays: Any = None, borders: np.ndarray | None = None
) -> tuple[float, list[float], Any]:
    """Main loss, losses of the depths, and training's gradient."""
    _, _, how = FORMS[form]
    arrays = tuple(np.array(array) for array in (batch() if arrays is None else arrays))

    def run(xp: Any, p: Any) -> Any:
        return multi_token.losses(xp, p, arrays, how, 2, 0.3, borders)

    main, found, _ = run(np, jax.tree.map(lambda a: np.asarray(a, np.float64), p))
    _, (gradient,) = value_and_vjp64(lambda p: run(jnp, p)[2], (p,), np.ones(()))
    return float(main), [float(loss) for loss in found], gradient


def assert_gradients(found: Any, wanted: Any, factor: float = 1.0) -> None:
    found, wanted = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (found, wanted))
    assert found.keys() == wanted.keys()
    for path, gradient in wanted.items():
        size = np.abs(gradient).max()
        np.testing.assert_allclose(found[path] / factor, gradient, rtol=1e-3, atol=2e-5 * size, err_msg=str(path))


def gradients_of(model: Any, loss: Any) -> tuple[Any, Any, list[float]]:
    """Value, gradients of the parameters, and the depths' losses that backward counts."""

    @nnx.jit
    def run(model: Any) -> Any:
        wrt = nnx.DiffState(0, (nnx.Param, QuantizerState))
        return nnx.value_and_grad(lambda model: loss(merging(model)), argnums=wrt)(model)

    value, found = run(model)
    counted, grads = nnx.to_pure_dict(found), nnx.to_pure_dict(nnx.filter_state(found, nnx.Param))
    *losses, calls = counted["mtp"]["last_step"]
    assert calls == 1.0
    return value, grads, [float(loss) for loss in losses]


def test_balance_losses_of_a_repeated_layer_count_once() -> None:
    """As in Megatron: those of its runs are divided by their number."""
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": 1.0}
    fields = {**experts, "mtp_loss_scaling_factor": 0.0}
    tokens, labels, _ = batch()

    def of_router(model: GPTModel) -> Any:
        _, grads, _ = gradients_of(model, lambda model: model.loss(tokens, labels))
        return grads["mtp"]["layers"][0]["mtp_model_layer"]["mlp"]["router"]["kernel"]

    model = build("one layer", fields=fields)
    found = of_router(model)
    router = model.mtp.layers[0].mtp_model_layer.mlp.router
    assert router.balance_share == 0.5
    router.balance_share = 1.0
    np.testing.assert_allclose(found, 0.5 * of_router(model), rtol=1e-5, atol=1e-8)
    assert np.any(found)
    assert build("gpt2", fields=fields).mtp.layers[0].mtp_model_layer.mlp.router.balance_share == 1.0


@pytest.mark.slow
@pytest.mark.wide("llama")
@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_are_megatrons(form: str) -> None:
    model = build(form)
    main, depths, gradient = expected(form, parameters(model))
    value, grads, counted = gradients_of(model, lambda model: model.loss(*batch()))
    np.testing.assert_allclose([value, *counted], [main, *depths], rtol=1e-5)
    assert_gradients(grads, gradient)


@pytest.mark.slow
def test_a_mean_of_the_callers_has_the_same_gradient() -> None:
    """The reductions "sum" and "none": divided by the weights they are the mean. Ignored labels have no part."""
    model, (tokens, labels, mask) = build(), batch()
    _, _, gradient = expected("gpt2", parameters(model))
    count, ignored = jnp.sum(mask), jnp.where(mask > 0, labels, -100)

    def sums(model: Any) -> Any:
        return model.loss(tokens, labels, mask, reduction="sum") / count

    def each(model: Any) -> Any:
        losses = model.loss(tokens, labels, reduction="none", mtp_loss_mask=mask)
        return jnp.sum(losses * mask) / count

    def without(model: Any) -> Any:
        return model.loss(tokens, ignored, options=LossOptions(ignore_index=-100))

    for loss in (sums, each, without):
        assert_gradients(gradients_of(model, loss)[1], gradient)


@pytest.mark.slow
def test_megatrons_model_has_its_names_and_the_same_values() -> None:
    tokens, labels, mask = batch()
    model = MegatronGPTModel(GPT2, None, V, S, share_embeddings_and_output_weights=True, rngs=nnx.Rngs(0))
    plain = GPTModel(GPT2, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0))
    names = set(model.state_dict())
    of_layer = {"enorm.weight", "hnorm.bias", "eh_proj.weight", "final_layernorm.weight"}
    of_layer |= {"mtp_model_layer.self_attention.linear_qkv.layer_norm_weight", "mtp_model_layer.mlp.linear_fc2.bias"}
    assert {f"mtp.layers.{i}.{name}" for i in range(2) for name in of_layer} <= names
    assert not any("last_step" in name for name in names)
    # As Megatron's training program: the mask weights the caller's mean, and the depths' losses.
    value, grads, counted = gradients_of(
        model, lambda model: jnp.sum(model(tokens, labels=labels, loss_mask=mask) * mask) / jnp.sum(mask)
    )
    own, own_grads, own_counted = gradients_of(plain, lambda model: model.loss(tokens, labels, mask))
    np.testing.assert_allclose([value, *counted], [own, *own_counted], rtol=1e-6)
    norms = [float(optax.tree.norm(grad["mtp"])) for grad in (grads, own_grads)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0.0
    other = MegatronGPTModel(GPT2, None, V, S, share_embeddings_and_output_weights=True, rngs=nnx.Rngs(1))
    other.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(other.mtp.layers[1].eh_proj.kernel[...], model.mtp.layers[1].eh_proj.kernel[...])


BORDERS = np.array([[0, 3, 8, 8], [0, 8, 8, 8], [0, 1, 3, 6], [0, 4, 4, 7]], np.int32)
"""Of rows with two sequences, one, three and padding, and two beside an empty one and padding."""


def packed_batch() -> tuple[tuple[jax.Array, jax.Array, jax.Array], PackedSeqParams]:
    """Tokens, labels and weights of packed rows, whose padding has weight 0; and the boundaries."""
    tokens, labels, mask = batch()
    inside = jnp.arange(S)[None] < BORDERS[:, -1:]
    return (tokens, labels, jnp.where(inside, mask, 0.0)), PackedSeqParams(cu_seqlens_q=jnp.asarray(BORDERS))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gpt2", "llama"])
def test_depths_stop_at_the_borders_of_packed_sequences(form: str) -> None:
    model, (arrays, packed) = build(form), packed_batch()
    main, depths, gradient = expected(form, parameters(model), arrays, BORDERS)
    value, grads, counted = gradients_of(model, lambda model: model.loss(*arrays, packed_seq_params=packed))
    np.testing.assert_allclose([value, *counted], [main, *depths], rtol=1e-5)
    assert_gradients(grads, gradient)
    # Without weights padding predicts nothing further either.
    inside = jnp.where(jnp.arange(S)[None] < BORDERS[:, -1:], 1.0, 0.0)
    losses = [
        gradients_of(
            model,
            functools.partial(
                lambda mask, model: model.loss(*arrays[:2], mtp_loss_mask=mask, packed_seq_params=packed), mask
            ),
        )[2]
        for mask in (None, inside)
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_megatrons_model_packs_the_same_rows() -> None:
    (tokens, labels, mask), packed = packed_batch()
    config = FORMS["llama"][0]
    model: Any = MegatronGPTModel(
        config, None, V, S, position_embedding_type="rope", rotary_base=100.0, rngs=nnx.Rngs(0)
    )
    plain = GPTModel(config, vocab_size=V, max_sequence_length=S, **FORMS["llama"][1], rngs=nnx.Rngs(0))
    value, grads, counted = gradients_of(
        model,
        lambda model: (
            jnp.sum(model(tokens, labels=labels, loss_mask=mask, packed_seq_params=packed) * mask) / jnp.sum(mask)
        ),
    )
    own, own_grads, own_counted = gradients_of(
        plain, lambda model: model.loss(tokens, labels, mask, packed_seq_params=packed)
    )
    np.testing.assert_allclose([value, *counted], [own, *own_counted], rtol=1e-6)
    norms = [float(optax.tree.norm(grad["mtp"])) for grad in (grads, own_grads)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scaler", [None, DynamicLossScale(initial_scale=1024.0)], ids=["unscaled", "scaled"])
def test_a_train_step_reports_the_losses_of_all_microbatches(scaler: Any) -> None:
    tokens, labels, mask = batch()
    model = build()
    main, depths, gradient = expected("gpt2", parameters(model))

    def loss(model: Any, batch: Any, key: Any) -> Any:
        count = jnp.sum(batch[2])
        return WeightedMean(model.loss(*batch, reduction="sum"), count)

    optimizer = optax.sgd(1.0)

    def step(microbatches: int) -> Any:
        state = create_train_state(lambda rngs: build(), optimizer, key=jax.random.key(0), scaler=scaler)
        # A copy: the step donates the state.
        before = jax.tree.map(np.array, parameters(state.model))
        state, metrics = make_train_step(loss, optimizer, microbatches=microbatches)(state, (tokens, labels, mask))
        return state, metrics, jax.tree.map(lambda a, b: a - np.asarray(b), before, parameters(state.model))

    state, whole, change = step(1)
    found = [float(whole[name]) for name in ("loss", "mtp_1_loss", "mtp_2_loss")]
    np.testing.assert_allclose(found, [main, *depths], rtol=1e-5)
    assert_gradients(change, gradient)
    assert multi_token_metrics(state.model)["mtp_1_loss"] == whole["mtp_1_loss"]
    _, parts, _ = step(2)
    halves = []
    for rows in (slice(0, 2), slice(2, 4)):
        half = [array[rows] for array in batch()]
        _, _, counted = gradients_of(build(), functools.partial(lambda half, model: model.loss(*half), half))
        halves.append(counted)
    reported = [float(parts[name]) for name in ("mtp_1_loss", "mtp_2_loss")]
    np.testing.assert_allclose(reported, np.mean(halves, axis=0), rtol=1e-5)


@pytest.mark.costly
def test_evaluation_runs_no_depth() -> None:
    model = build()
    state = create_train_state(lambda rngs: build(), optax.sgd(0.1), key=jax.random.key(0))
    step = make_eval_step(lambda model, batch, key: model.compute_loss(jnp.ones((B, S, 32)), batch[1]))
    assert np.isfinite(step(state, batch()))
    with pytest.raises(ValueError, match="compute_loss tokens="):
        model.compute_loss(jnp.ones((B, S, 32)), batch()[1])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling(amax_history_len=2)], ids=lambda r: r.name)
def test_a_recipe_quantizes_the_depths(recipe: Any) -> None:
    tokens, labels = jnp.tile(batch()[0], (1, 2)), jnp.tile(batch()[1], (1, 2))

    def run() -> Any:
        # One layer at both depths: its state is the maximum over both calls.
        fields = {"mtp_use_repeated_layer": True, "hidden_size": 32}
        model = GPTModel(dataclasses.replace(GPT2, **fields), vocab_size=V, max_sequence_length=2 * S, rngs=nnx.Rngs(0))
        _, grads, counted = gradients_of(model, lambda model: model.loss(tokens, labels))
        return grads["mtp"]["layers"][0]["eh_proj"]["kernel"], counted

    plain, losses = run()
    with autocast(recipe):
        quantized, found = run()
    # FP8 rounds to 2**-4 of a number; a loss of random logits moves by less.
    np.testing.assert_allclose(found, losses, rtol=0.05)
    error = np.linalg.norm(quantized - plain) / np.linalg.norm(plain)
    assert 0.0 < error < 0.5


@pytest.mark.slow
def test_deepseeks_form_has_experts_and_latents_at_its_depth() -> None:
    fields: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "add_bias_linear": False}
    fields |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    fields |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 16}
    config = MLATransformerConfig(**fields, qk_layernorm=True, mtp_num_layers=1)
    optimizer = optax.sgd(0.1)
    state = create_train_state(
        lambda rngs: MegatronGPTModel(config, None, V, S, position_embedding_type="rope", rngs=rngs),
        optimizer,
        key=jax.random.key(0),
    )
    layer: Any = state.model.mtp.layers[0].mtp_model_layer
    assert isinstance(layer.self_attention, MLASelfAttention)
    assert isinstance(layer.mlp, MoELayer)
    before = np.array(layer.self_attention.linear_kv_up_proj.kernel[...])
    step = make_train_step(lambda model, batch, key: model.loss(*batch), optimizer)
    state, metrics = step(state, batch())
    # Of the last layer and the depth; each token chooses two.
    loads = [np.sum(value) for name, value in metrics.items() if name.endswith("tokens_per_expert")]
    assert loads == [2.0 * B * S] * 2
    assert float(metrics["mtp_1_loss"]) == pytest.approx(np.log(V), rel=0.1)
    after = state.model.mtp.layers[0].mtp_model_layer.self_attention.linear_kv_up_proj.kernel[...]
    assert np.any(np.asarray(after) != before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mtp_num_layers": 0}, "mtp_num_layers"),
        ({"mtp_loss_scaling_factor": -0.1}, "mtp_loss_scaling_factor"),
        ({"mtp_num_layers": None, "mtp_use_repeated_layer": True}, "no effect without mtp_num_layers"),
        ({"window_size": (4, 0), "window_attn_skip_freq": 2}, "layer's number"),
        ({"mtp_detach_heads": True}, "reach the whole model"),
        ({"mtp_hsm": True}, "are transformer layers"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(
            **{"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "mtp_num_layers": 1, **fields}
        )


def test_models_that_have_no_depths_refuse_them() -> None:
    with pytest.raises(ValueError, match="mtp_num_layers"):
        BertModel(GPT2, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0))
    two = dataclasses.replace(GPT2, num_layers=2)
    with pytest.raises(ValueError, match="build the whole model"):
        MegatronGPTModel(two, None, V, S, True, False, stage_layers=range(1), rngs=nnx.Rngs(0))
    plain = dataclasses.replace(GPT2, mtp_num_layers=None)
    with pytest.raises(ValueError, match="mtp_block_spec is for"):
        MegatronGPTModel(plain, None, V, S, mtp_block_spec=TransformerLayer, rngs=nnx.Rngs(0))


MESHES: list[Any] = [
    ({"fsdp": 2, "tensor": 4}, {}, 1),
    ({"data": 2, "tensor": 4}, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, 1),
    ({"data": 4, "context": 2}, {"cp_load_balanced": True}, 1),
    ({"data": 2, "context": 2, "tensor": 2}, {}, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize(("axes", "fields", "chunks"), MESHES, ids=["fsdp", "sequence", "zigzag", "chunks"])
def test_a_mesh_computes_what_one_device_does(axes: Any, fields: Any, chunks: int, axis_type: Any) -> None:
    def loss(model: Any) -> Any:
        return model.loss(*batch())

    # An Explicit mesh's tensor axis must divide the groups.
    groups = {"num_query_groups": 4}
    value, grads, counted = gradients_of(build("llama", fields=groups), loss)
    with jax.set_mesh(make_mesh(ParallelConfig(**axes), axis_type=axis_type)):
        model = shard(build("llama", fields=groups | fields, execution=Execution(loss_chunks=chunks)))
        on_mesh = gradients_of(model, loss)
    np.testing.assert_allclose([on_mesh[0], *on_mesh[2]], [value, *counted], rtol=1e-5)
    assert_gradients(on_mesh[1], jax.tree.map(np.asarray, grads))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize(
    "axes",
    [{"data": 2, "context": 4}, {"fsdp": 2, "context": 2, "tensor": 2}, {"data": 4, "tensor": 2}],
    ids=["context", "fsdp", "tensor"],
)
def test_packed_rows_on_a_mesh_are_those_of_one_device(axes: Any, axis_type: Any) -> None:
    """A sequence and its border lie on several devices, in zig-zag order."""

    def loss(model: Any) -> Any:
        arrays, packed = packed_batch()
        return model.loss(*arrays, packed_seq_params=packed)

    value, grads, counted = gradients_of(build("llama"), loss)
    kind = "p2p" if "tensor" in axes else "all_gather"
    fields = {"cp_load_balanced": "context" in axes, "cp_comm_type": kind}
    with jax.set_mesh(make_mesh(ParallelConfig(**axes), axis_type=axis_type)):
        on_mesh = gradients_of(shard(build("llama", fields=fields)), loss)
    np.testing.assert_allclose([on_mesh[0], *on_mesh[2]], [value, *counted], rtol=1e-5)
    assert_gradients(on_mesh[1], jax.tree.map(np.asarray, grads))


@pytest.mark.slow
@pytest.mark.parametrize("pack", [False, True], ids=["rows", "packed rows"])
def test_a_pipeline_trains_as_one_device(pack: bool) -> None:
    def borders(batch: Any) -> dict[str, Any]:
        return {"packed_seq_params": batch[3]} if pack else {}

    loss = PipelinedLoss(
        embed_inputs=lambda model, batch, key: model.embed_inputs(batch[0], dropout_key=key, **borders(batch)),
        compute_loss=lambda model, y, batch, key: model.compute_loss(
            y, batch[1], batch[2], tokens=batch[0], dropout_key=key, **borders(batch)
        ),
    )
    arrays, packed = packed_batch()
    given: Any = (*arrays, packed) if pack else batch()
    optimizer = optax.sgd(1.0)

    def step() -> Any:
        make = lambda rngs: build(fields={"num_layers": 2})  # noqa: E731
        state = create_train_state(make, optimizer, key=jax.random.key(0))
        state, metrics = make_train_step(loss, optimizer, microbatches=2)(state, given)
        return {name: float(value) for name, value in metrics.items()}, parameters(state.model)

    metrics, after = step()
    with jax.set_mesh(make_mesh(ParallelConfig(pipeline=2, data=2, tensor=2))):
        on_stages, after_stages = step()
    assert on_stages == pytest.approx(metrics, rel=1e-5)
    assert_gradients(jax.tree.map(np.asarray, after_stages), jax.tree.map(np.asarray, after))
