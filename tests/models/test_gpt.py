"""GPTModel against the formulas in fp64, in both forms: logits, loss, gradients, recomputation, meshes, errors."""

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

from jax_te._validation import log_once
from jax_te.config import TransformerConfig
from jax_te.layers import Llama3Scaling, PackedSeqParams, rotary_embedding
from jax_te.models import (
    Execution,
    GPTModel,
    Multipliers,
    RotaryPositions,
    generate,
    transformer_layer,
)
from jax_te.ops import LossOptions, softmax_cross_entropy
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import create_train_state, make_train_step
from tests.support import reference
from tests.support.meshes import shard, use_mesh
from tests.support.numerics import assert_bitwise, assert_close, quick_jit, relative_l2
from tests.support.reference import ROUNDOFF, Form, parameters, randomize, value_and_vjp64
from tests.support.states import merging

B, S, V, H, F, N = 4, 8, 32, 32, 64, 4
# Eight sums of up to F products, each off by about sqrt(F) roundings, in either of two layers.
TOLERANCE = 16 * ROUNDOFF["float32"] * F**0.5

GPT2 = TransformerConfig(num_layers=2, hidden_size=H, num_attention_heads=N, ffn_hidden_size=F)
LLAMA = dataclasses.replace(
    GPT2, num_query_groups=2, normalization="RMSNorm", activation="swiglu", add_bias_linear=False
)
FORMS = {
    "gpt2": (GPT2, {}, Form()),
    "llama": (
        LLAMA,
        {"position_embedding_type": RotaryPositions(100.0), "share_embeddings_and_output_weights": False},
        Form(g=2, rms=True, activation="swiglu", rotary_base=100.0),
    ),
}
FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
QWEN = dataclasses.replace(LLAMA, qk_layernorm=True, window_size=(3, 0), window_attn_skip_freq=2, softmax_scale=0.3)


def build(form: str = "gpt2", config: TransformerConfig | None = None, **options: Any) -> GPTModel:
    of_form, defaults, _ = FORMS[form]
    return GPTModel(config or of_form, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0), **{**defaults, **options})


def batch() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B, S + 1)).astype(np.int32)
    return jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:]), jnp.asarray(rng.integers(0, 2, (B, S)) > 0)


call = jax.jit(lambda model, tokens, positions=None: model(tokens, positions=positions))


@jax.jit
def loss_and_gradient(model: GPTModel, tokens: jax.Array, labels: jax.Array, mask: jax.Array, key: Any = None) -> Any:
    return jax.value_and_grad(lambda model: merging(model).loss(tokens, labels, mask, dropout_key=key))(model)


@functools.cache
def expected(form: str) -> tuple[np.ndarray, Any, Any]:
    """Logits, masked mean loss and its gradients, in fp64."""
    tokens, labels, mask = map(np.asarray, batch())
    p = jax.tree.map(np.float64, parameters(randomize(build(form))))

    def loss(p: Any) -> Any:
        losses = reference.nll(jnp, reference.gpt(jnp, p, tokens, FORMS[form][2]), labels)
        return (losses * mask).sum() / mask.sum()

    value, (gradient,) = value_and_vjp64(loss, (p,), np.ones(()))
    return reference.gpt(np, p, tokens, FORMS[form][2]), value, gradient


@pytest.mark.slow
@pytest.mark.wide("explicit-llama")
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_follow_the_formulas_on_every_mesh(form: str, mesh_mode: str) -> None:
    model = shard(randomize(build(form)))
    value, gradient = loss_and_gradient(model, *batch())
    _, expected_value, expected_gradient = expected(form)
    assert value.dtype == jnp.float32
    assert_close(value, expected_value, TOLERANCE, what="loss")
    trees = parameters(gradient), expected_gradient
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, trees), strict=True):
        assert_close(a, e, TOLERANCE, what=jax.tree_util.keystr(path))


@pytest.mark.costly(slow=("gpt2",))
@pytest.mark.parametrize("form", FORMS)
def test_logits_follow_the_formulas(form: str) -> None:
    assert_close(call(randomize(build(form)), batch()[0]), expected(form)[0], TOLERANCE)


@pytest.mark.costly
def test_qwens_form_with_a_window_in_every_other_layer() -> None:
    """Layer 1 attends in a window, layer 2 to all."""
    options = {"vocab_size": V, "max_sequence_length": S, **FORMS["llama"][1]}
    model = randomize(GPTModel(QWEN, **options, rngs=nnx.Rngs(0)))
    form = Form(g=2, rms=True, activation="swiglu", rotary_base=100.0, qk_norm_before_rope=True, scale=0.3)
    p, tokens = jax.tree.map(np.float64, parameters(model)), np.asarray(batch()[0])
    x = p["embedding"]["embedding"][tokens]
    for i, window in enumerate((3, None)):
        x = reference.layer(np, p["layers"][i], x, dataclasses.replace(form, window=window))
    logits = reference.norm(np, x, p["final_norm"]["scale"], None, form) @ p["output_kernel"]
    assert_close(call(model, batch()[0]), logits, TOLERANCE)


GEMMA = dataclasses.replace(
    QWEN, block_output_layernorm=True, logit_softcap=2.0, add_qkv_bias=True, num_layers=3, softmax_scale=None
)


def gemma(**options: Any) -> GPTModel:
    """Gemma's options all at once, which tests/huggingface compares with transformers' models."""
    rotary = RotaryPositions(base=1000.0, window_base=10.0)
    own = {"position_embedding_type": rotary, "rngs": nnx.Rngs(0), **options}
    model = randomize(GPTModel(GEMMA, vocab_size=V, max_sequence_length=S, **own))
    model.multipliers = Multipliers(embedding=3.0, softcap=5.0)
    return model


@pytest.mark.slow
def test_gemmas_form_is_the_same_on_a_mesh_and_scanned() -> None:
    """Scanned, the pair of rotary embeddings is a constant of the loop, from which each layer takes its own."""
    loss, gradient = loss_and_gradient(gemma(), *batch())
    with use_mesh("explicit"):
        actual, actual_gradient = loss_and_gradient(shard(gemma(execution=Execution(scan_layers=True))), *batch())
    assert_close(actual, loss, TOLERANCE)
    jax.tree.map(lambda a, e: assert_close(a, e, TOLERANCE), *map(parameters, (actual_gradient, gradient)))


@pytest.mark.slow
def test_layers_with_a_window_have_rotary_positions_of_their_own() -> None:
    model = gemma()
    tokens = batch()[0]
    logits = call(model, tokens)
    model.rotary = RotaryPositions(base=10.0, window_base=1000.0)
    assert relative_l2(call(model, tokens), logits) > 1e-3
    model.rotary = RotaryPositions(base=10.0, window_base=10.0)
    shared = gemma(position_embedding_type=RotaryPositions(base=10.0))
    np.testing.assert_array_equal(call(model, tokens), call(shared, tokens))


@pytest.mark.slow
def test_a_softcap_bounds_logits_and_needs_them_whole() -> None:
    model, (tokens, labels, _) = gemma(), batch()
    logits = call(model, tokens)
    model.multipliers = Multipliers(embedding=3.0)
    plain = np.float64(call(model, tokens))
    assert np.abs(plain).max() > 5.0
    assert_close(logits, 5.0 * np.tanh(plain / 5.0), TOLERANCE)
    with pytest.raises(ValueError, match=r"build it with Execution\(loss_chunks=1\)"):
        gemma(execution=Execution(loss_chunks=2)).loss(tokens, labels)
    with pytest.raises(ValueError, match=r"softcap must be > 0"):
        Multipliers(softcap=0.0)
    with pytest.raises(ValueError, match=r"logit_softcap must be > 0"):
        dataclasses.replace(GEMMA, logit_softcap=-1.0)


@pytest.mark.slow
def test_a_scanned_stack_trains_like_an_unrolled_one() -> None:
    """Through the train step with microbatches, whose quantizer states merge by maximum."""
    tx, (tokens, labels, _) = optax.sgd(0.1), batch()
    tokens, labels = (jnp.tile(a, (4, 1)) for a in (tokens, labels))
    results = []
    with autocast(DelayedScaling(amax_history_len=2)):
        step = make_train_step(lambda model, batch, key: model.loss(*batch), tx, microbatches=2)
        for scan in (True, False):
            state = create_train_state(
                lambda _, scan=scan: randomize(build(execution=Execution(scan_layers=scan))), tx, key=jax.random.key(0)
            )
            losses = []
            for _ in range(2):
                state, metrics = step(state, (tokens, labels))
                losses.append(float(metrics["loss"]))
            results.append((losses, nnx.to_pure_dict(state.quantizers)))
    (scanned, scanned_states), (unrolled, states) = results
    assert scanned == pytest.approx(unrolled, rel=1e-3)  # a value between two FP8 values may be rounded to either
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, (scanned_states, states)), strict=True):
        assert np.asarray(e).any(), path
        np.testing.assert_allclose(a, e, rtol=0.02, err_msg=jax.tree_util.keystr(path))


def test_a_mesh_of_another_tensor_size_than_the_configs_is_refused() -> None:
    model = GPTModel(
        dataclasses.replace(GPT2, tensor_model_parallel_size=4), vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0)
    )
    with use_mesh("auto"), pytest.raises(ValueError, match=r"tp_size=4.* 2"):
        jax.eval_shape(lambda model: model(batch()[0]), model)


@pytest.mark.slow
@pytest.mark.wide("explicit-options2-llama")
@pytest.mark.parametrize(
    ("mode", "options", "form"),
    [
        ("auto", {"execution": Execution(loss_chunks=2)}, "gpt2"),
        ("explicit", {}, "gpt2"),
        ("explicit", {"execution": Execution(loss_chunks=2)}, "llama"),
    ],
)
def test_sequence_parallelism_changes_no_number(mode: str, options: dict[str, Any], form: str) -> None:
    """With dropout; what the norms and dropout see between the layers is split over the tensor shards."""
    config, defaults, _ = FORMS[form]
    config = dataclasses.replace(config, hidden_dropout=0.2, attention_dropout=0.0)
    split = dataclasses.replace(config, tensor_model_parallel_size=2, sequence_parallel=True)
    sizes: dict[str, Any] = {"vocab_size": V, "max_sequence_length": S} | defaults | options
    key = jax.random.key(3)
    loss, gradient = loss_and_gradient(GPTModel(config, **sizes, rngs=nnx.Rngs(0)), *batch(), key)
    with use_mesh(mode):
        model = shard(GPTModel(split, **sizes, rngs=nnx.Rngs(0)))
        found, found_gradient = jax.jit(
            lambda model, *args: jax.value_and_grad(lambda model: merging(model).loss(*args[:3], dropout_key=args[3]))(
                model
            )
        )(model, *batch(), key)
    assert_close(found, loss, TOLERANCE)
    for a, e in zip(jax.tree.leaves(found_gradient), jax.tree.leaves(gradient), strict=True):
        assert relative_l2(jax.device_get(a), jax.device_get(e)) < TOLERANCE


@pytest.mark.slow
def test_rotary_options_reach_the_layers() -> None:
    scaling = Llama3Scaling(factor=4.0, original_max_position_embeddings=8)
    model = randomize(build(position_embedding_type=RotaryPositions(percent=0.5, scaling=scaling)))
    expected = rotary_embedding(jnp.arange(S), H // N, 10000.0, rotary_percent=0.5, scaling=scaling)
    x = model.embedding(batch()[0])
    for layer in model.layers:
        x = layer(x, rotary_pos_emb=expected)
    logits = model.final_norm(x) @ model.embedding.embedding[...].T
    assert_close(call(model, batch()[0]), logits, TOLERANCE)
    assert relative_l2(logits, call(randomize(build(position_embedding_type="rope")), batch()[0])) > 1e-4


@pytest.mark.costly("full")
@pytest.mark.parametrize(
    ("recompute", "mode"),
    [
        (FULL, "no mesh"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (({}, "no mesh"), (FULL, "explicit"))),
    ],
    ids=["full", "none", "full on a mesh"],
)
def test_a_scan_over_the_layers_and_a_loss_in_chunks_change_nothing(recompute: dict[str, Any], mode: str) -> None:
    """Three layers, of which the last keeps to bf16 and so runs by itself; the same parameters and state."""
    with use_mesh(mode), autocast(DelayedScaling(amax_history_len=2)):
        config = dataclasses.replace(
            GPT2,
            num_layers=3,
            first_last_layers_bf16=True,
            num_layers_at_start_in_bf16=0,
            hidden_dropout=0.3,
            **recompute,
        )
        results = []
        for options in ({"execution": Execution(scan_layers=True, loss_chunks=4)}, {}):
            build = {"vocab_size": V, "max_sequence_length": S, **options}
            model = shard(randomize(GPTModel(config, **build, rngs=nnx.Rngs(0))))
            results.append(loss_and_gradient(model, *batch(), jax.random.key(5)))
    (loss, scanned), (expected_loss, unrolled) = results
    assert_close(loss, expected_loss, TOLERANCE)
    kinds = nnx.Any(nnx.Param, QuantizerState)
    trees = (nnx.to_pure_dict(nnx.state(tree, kinds)) for tree in (scanned, unrolled))
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, trees), strict=True):
        # A value on the edge between two FP8 values may be rounded to either: 2^-4 of some values, few of them.
        assert relative_l2(a, e) < 0.02, jax.tree_util.keystr(path)


def test_without_position_embedding_one_layer_does_not_see_the_order_of_earlier_tokens() -> None:
    config = dataclasses.replace(GPT2, num_layers=1)
    options = {"vocab_size": V, "max_sequence_length": S, "position_embedding_type": "none"}
    model = randomize(GPTModel(config, **options, rngs=nnx.Rngs(0)))
    logits = call(model, jnp.array([[1, 2, 3, 4], [3, 1, 2, 4]]))
    assert_close(logits[0, -1], logits[1, -1], TOLERANCE)


@pytest.mark.costly("gpt2")
@pytest.mark.parametrize("form", FORMS)
def test_positions_may_be_given(form: str) -> None:
    model, tokens = randomize(build(form)), batch()[0]
    plain, positions = call(model, tokens[:, :4]), jnp.arange(4)
    assert_close(call(model, tokens[:, :4], jnp.tile(positions, (B, 1))), plain, TOLERANCE)
    shifted = call(model, tokens[:, :4], positions + 2)
    assert (relative_l2(shifted, plain) > 1e-3) == (form == "gpt2")  # rotary attention sees distances only


@functools.cache
def with_dropout() -> Any:
    """Loss and gradients with dropout everywhere."""
    config = dataclasses.replace(GPT2, attention_dropout=0.5, hidden_dropout=0.5)
    options = {"vocab_size": V, "max_sequence_length": S}
    model = shard(randomize(GPTModel(config, **options, rngs=nnx.Rngs(0))))
    return loss_and_gradient(model, *batch(), jax.random.key(5))


@pytest.mark.costly
@pytest.mark.wide("{'recompute_granularity': 'selective'}")
@pytest.mark.parametrize("recompute", [{}, FULL, {"recompute_granularity": "selective"}], ids=str)
def test_quantizer_state_gets_its_next_value_through_recomputation(recompute: dict[str, Any]) -> None:
    with autocast(DelayedScaling(amax_history_len=2)):
        config = dataclasses.replace(GPT2, num_layers=1, **recompute)
        options = {"vocab_size": V, "max_sequence_length": S}
        model = randomize(GPTModel(config, **options, rngs=nnx.Rngs(0)))
        _, gradient = loss_and_gradient(model, *batch())
    after = nnx.to_flat_state(nnx.state(gradient, QuantizerState))
    assert len(after) == 4 * 6
    for path, variable in after:
        assert path[-1] == "scale" or variable[0] > 0.0, path
    kernel = parameters(model)["layers"][0]["layernorm_mlp"]["wi_kernel"]
    history = dict(after)["layers", 0, "layernorm_mlp", "quantizers_1", "kernel", "amax_history"]
    assert history[0] == jnp.abs(kernel).max()


@pytest.mark.slow  # tests/multi_device/test_every_mesh.py sees it in the losses
def test_dropout_is_the_same_on_a_mesh() -> None:
    value, gradient = with_dropout()
    assert relative_l2(value, expected("gpt2")[1]) > 1e-3
    with use_mesh("explicit"):
        on_mesh, gradient_on_mesh = with_dropout.__wrapped__()
    assert_close(on_mesh, value, TOLERANCE)
    for a, e in zip(*map(jax.tree.leaves, (gradient_on_mesh, gradient)), strict=True):
        assert_close(a, e, TOLERANCE)


def test_dropout_reaches_the_embedding() -> None:
    config = dataclasses.replace(GPT2, num_layers=1, hidden_dropout=0.5)
    model = randomize(GPTModel(config, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0)))
    nnx.update(model.layers, jax.tree.map(jnp.zeros_like, nnx.state(model.layers)))  # the layers add nothing
    dropped = jax.jit(lambda model, tokens: model(tokens, dropout_key=jax.random.key(0)))(model, batch()[0])
    model.eval()
    assert relative_l2(dropped, call(model, batch()[0])) > 0.1


@pytest.mark.costly
def test_generation_and_measurements_drop_nothing_in_training_either() -> None:
    config = dataclasses.replace(GPT2, num_layers=1, hidden_dropout=0.5, attention_dropout=0.5)
    model = randomize(GPTModel(config, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0)))
    tokens, key = batch()[0], jax.random.key(0)
    logits = model.max_logits(tokens)
    generated = generate(model, tokens[:, :2], steps=2, key=key, temperature=0.0)
    assert model.training
    model.eval()
    assert_bitwise(model.max_logits(tokens), logits)
    assert_bitwise(generate(model, tokens[:, :2], steps=2, key=key, temperature=0.0), generated)


@pytest.mark.costly
def test_a_mask_of_zeros_gives_zero_and_no_mask_the_mean() -> None:
    tokens, labels, _ = batch()
    model = build()
    loss = jax.jit(lambda model, mask: model.loss(tokens, labels, mask))
    assert loss(model, jnp.zeros((B, S))) == 0.0
    mean = loss(model, None)
    assert_close(mean, loss(model, jnp.ones((B, S))), TOLERANCE)
    assert abs(float(mean) - np.log(V)) < 0.1  # at the start every token is about equally likely


@pytest.mark.slow
def test_ignored_labels_options_and_reductions_reach_the_loss() -> None:
    tokens, labels, _ = batch()
    counted = jnp.asarray(np.random.default_rng(0).random((B, S)) < 0.5)
    ignored = jnp.where(counted, labels, -100)
    smoothed = LossOptions(label_smoothing=0.2)
    for model in (build(), build(execution=Execution(loss_chunks=2))):
        assert_close(model.loss(tokens, ignored), model.loss(tokens, labels, counted), TOLERANCE)
        total = model.loss(tokens, ignored, reduction="sum")
        assert_close(total, float(counted.sum()) * model.loss(tokens, ignored), TOLERANCE)
        assert_close(model.loss(tokens, ignored, reduction="none").sum(), total, TOLERANCE)
        other = softmax_cross_entropy(call(model, tokens), ignored, options=smoothed, reduction="mean")
        assert_close(model.loss(tokens, ignored, options=smoothed), other, TOLERANCE)


@pytest.mark.slow
def test_compute_dtype_is_that_of_the_logits_and_gradients_keep_their_parameters() -> None:
    config = dataclasses.replace(GPT2, compute_dtype=jnp.bfloat16)
    model = randomize(GPTModel(config, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0)))
    tokens = batch()[0]
    logits = call(model, tokens)
    assert logits.dtype == jnp.bfloat16
    assert_close(logits, expected("gpt2")[0], 16 * ROUNDOFF["bfloat16"])
    value, gradient = loss_and_gradient(model, *batch())
    assert value.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(gradient, nnx.Param))} == {jnp.dtype(jnp.float32)}


def test_an_unknown_token_turns_its_sequence_to_nan() -> None:
    logits = call(build(), batch()[0].at[1, 3].set(V))
    assert jnp.isnan(logits[1, 3:]).all()
    assert not jnp.isnan(logits[jnp.array([0, 2, 3])]).any()


def test_output_projections_start_smaller() -> None:
    p = parameters(
        GPTModel(dataclasses.replace(GPT2, hidden_size=128), vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0))
    )
    layer = p["layers"][1]
    kernels = {
        0.02: (
            layer["self_attention"]["qkv"]["kernel"],
            layer["layernorm_mlp"]["wi_kernel"],
            p["embedding"]["embedding"],
        ),
        0.01: (layer["self_attention"]["proj"]["kernel"], layer["layernorm_mlp"]["wo_kernel"]),  # 0.02 / sqrt(2 * 2)
    }
    for std, arrays in kernels.items():
        for array in arrays:
            assert abs(np.std(np.float64(array)) / std - 1) < 4 / (2 * array.size) ** 0.5  # four standard errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'.* learned_absolute, rope"),
        ({"execution": Execution("some")}, "recompute policy 'some'.* none, full, save_gemms"),
        ({"position_embedding_type": RotaryPositions(-1.0)}, r"base.* -1\.0"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_bad_input_says_what_is_allowed() -> None:
    model, (tokens, labels, mask) = build(), batch()
    with pytest.raises(ValueError, match=r"vocab_size.* 0"):
        GPTModel(GPT2, vocab_size=0, max_sequence_length=S, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"tokens.* float32"):
        model(tokens.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"tokens.* \(8,\)"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"9 .*max_sequence_length 8"):
        model(jnp.zeros((1, 9), jnp.int32))
    with pytest.raises(ValueError, match=r"positions.* \(3,\)"):
        model(tokens, positions=jnp.arange(3))
    with pytest.raises(ValueError, match=r"labels.* \(4, 8\).* \(4, 7\)"):
        model.loss(tokens, labels[:, 1:])
    with pytest.raises(ValueError, match=r"loss_mask.* \(4, 8\).* \(1, 8\)"):
        model.loss(tokens, labels, mask[:1])
    with pytest.raises(ValueError, match=r"max_len 9 .*max_sequence_length 8"):
        model.init_cache(1, 9)


@pytest.mark.costly(slow=("gpt2",))
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_have_the_logits_that_each_has_alone(form: str) -> None:
    model, tokens = randomize(build(form)), batch()[0][:2]
    packed = PackedSeqParams(cu_seqlens_q=jnp.array([[0, 3, 8], [0, 5, 5]]))
    run = jax.jit(lambda model, tokens, **options: model(tokens, **options))
    logits = run(model, tokens, packed_seq_params=packed)
    for row, start, end in ((0, 0, 3), (0, 3, 8), (1, 0, 5)):
        alone = run(model, jnp.pad(tokens[row : row + 1, start:end], ((0, 0), (0, S - end + start))))
        assert_close(logits[row, start:end], alone[0, : end - start], TOLERANCE)
    # Positions that are given stand for those from 0 on.
    there = run(model, tokens, packed_seq_params=packed, positions=packed.positions(S))
    np.testing.assert_array_equal(there, logits)
    assert not np.allclose(run(model, tokens, packed_seq_params=packed, positions=jnp.arange(S)), logits)


def test_max_logits_are_those_of_the_attention_that_is_trained() -> None:
    model, tokens = randomize(build(config=dataclasses.replace(GPT2, num_layers=1))), batch()[0][:1]
    measure = quick_jit(lambda model, tokens, **options: model.max_logits(tokens, **options))
    packed = PackedSeqParams(cu_seqlens_q=jnp.array([[0, S // 2, S]]))
    alone = measure(model, tokens.reshape(2, S // 2))
    assert_close(measure(model, tokens, packed_seq_params=packed), alone, TOLERANCE)
    # Positions that are given stand for those from 0 on.
    moved = measure(model, tokens, packed_seq_params=packed, positions=jnp.arange(S)[::-1])
    assert relative_l2(moved, alone) > 1e-2
    with pytest.raises(ValueError, match="boundaries of 3 rows"):
        model.max_logits(tokens, packed_seq_params=PackedSeqParams(cu_seqlens_q=jnp.array([[0, S]] * 3)))


@pytest.mark.parametrize(
    ("borders", "match"),
    [
        ([0, 3, 8], r"boundaries of 1 rows, cu_seqlens_q \[3\], and tokens are \[4, 8\]; give cu_seqlens_q \[4, m"),
        ([[0, 8]] * 3, "boundaries of 3 rows"),
        ([[0, 9]] * B, "cu_seqlens_q"),
    ],
    ids=["one row", "other rows", "too long"],
)
def test_boundaries_that_are_not_the_tokens_are_refused(borders: Any, match: str) -> None:
    tokens, labels, _ = batch()
    with pytest.raises(ValueError, match=match):
        build().loss(tokens, labels, packed_seq_params=PackedSeqParams(cu_seqlens_q=jnp.array(borders)))


def test_a_cache_of_another_number_of_layers_is_refused() -> None:
    model = build()
    cache = model.init_cache(B, S)
    for wrong in (cache[:-1], (*cache, cache[0])):
        with pytest.raises(ValueError, match=f"one entry for each of the {len(cache)} layers, got {len(wrong)}"):
            model(batch()[0], cache=wrong)


@pytest.mark.parametrize("number", [-1, 2])
def test_a_layer_that_the_config_does_not_have_is_refused(number: int) -> None:
    config = TransformerConfig(num_layers=2, hidden_size=H, num_attention_heads=N)
    with pytest.raises(ValueError, match=f"one of the config's 2 layers, from 0, got {number}"):
        transformer_layer(config, number, rngs=nnx.Rngs(0))


def test_a_cache_takes_no_packed_rows() -> None:
    model, packed = build(), PackedSeqParams(cu_seqlens_q=jnp.array([[0, 3, 8]] * B))
    with pytest.raises(ValueError, match="packed_seq_params do not go with a cache"):
        model(batch()[0], cache=model.init_cache(B, S), packed_seq_params=packed)


@pytest.mark.costly
def test_a_padding_mask_that_no_layer_reads_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = build(), jnp.zeros((1, 8), jnp.int32)
    log_once.cache_clear()
    assert_bitwise(model(tokens, padding_mask=jnp.ones((1, 8), bool)), model(tokens))
    assert any("padding_mask has no effect" in record.message for record in caplog.records)
