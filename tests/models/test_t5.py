"""T5Model against the formulas in fp64: logits, loss, gradients, meshes, lengths, recomputation, recipes, errors."""

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

from jax_te.config import TransformerConfig
from jax_te.layers import quantizable_modules
from jax_te.layers.attention.relative_bias import relative_buckets
from jax_te.models import Execution, RelativePositions, T5Model
from jax_te.ops import LossOptions, softmax_cross_entropy
from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import create_train_state, make_train_step
from tests.support import reference
from tests.support.meshes import shard, use_mesh
from tests.support.numerics import assert_close, quick_jit, relative_l2
from tests.support.reference import ROUNDOFF, Form, parameters, randomize, value_and_vjp64

B, S, T, V, H, F, N = 4, 8, 6, 32, 32, 64, 4
# Twelve sums of up to F products, each off by about sqrt(F) roundings, one after another.
TOLERANCE = 24 * ROUNDOFF["float32"] * F**0.5

CONFIG = TransformerConfig(
    num_layers=1,
    hidden_size=H,
    num_attention_heads=N,
    ffn_hidden_size=F,
    normalization="RMSNorm",
    activation="relu",
    add_bias_linear=False,
    softmax_scale=1.0,
)
FORM = Form(rms=True, activation="relu", scale=1.0)
SIZES = {"vocab_size": V, "max_sequence_length": S}
RELATIVE = {"position_embedding_type": RelativePositions(num_buckets=8, max_distance=6)}
BUCKETS = {
    name: functools.partial(relative_buckets, num_buckets=8, max_distance=6, bidirectional=name == "encoder")
    for name in ("encoder", "decoder")
}


def build(**options: Any) -> T5Model:
    return randomize(T5Model(CONFIG, **{**SIZES, **RELATIVE, **options}, rngs=nnx.Rngs(0)))


def batch() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    source, target = (rng.integers(0, V, (B, size)).astype(np.int32) for size in (S, T + 1))
    mask = rng.integers(0, 2, (B, T)) > 0
    return jnp.asarray(source), jnp.asarray(target[:, :-1]), jnp.asarray(target[:, 1:]), jnp.asarray(mask)


def loss_and_gradient(model: T5Model, **arguments: Any) -> Any:
    return quick_jit(jax.value_and_grad(lambda model, *a: model.loss(*a, **arguments)))(model, *batch())


@pytest.mark.slow
@pytest.mark.wide("explicit")
def test_loss_and_gradients_follow_the_formulas_on_every_mesh(mesh_mode: str) -> None:
    model = build()
    source, target, labels, mask = map(np.asarray, batch())

    def formula(p: Any) -> Any:
        losses = reference.nll(jnp, reference.t5(jnp, p, source, target, FORM, BUCKETS), labels)
        return (losses * mask).sum() / mask.sum()

    value, (expected,) = value_and_vjp64(formula, (parameters(model),), np.ones(()))
    loss, gradient = loss_and_gradient(shard(model))
    assert_close(loss, value, TOLERANCE, what="loss")
    trees = parameters(gradient), expected
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, trees), strict=True):
        assert_close(a, e, TOLERANCE, what=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_ignored_labels_options_and_reductions_reach_the_loss() -> None:
    source, target, labels, mask = batch()
    ignored, smoothed = jnp.where(mask, labels, -100), LossOptions(label_smoothing=0.2)

    @quick_jit
    def losses(model: T5Model) -> Any:
        other = softmax_cross_entropy(model(source, target), ignored, options=smoothed, reduction="sum")
        return (
            (model.loss(source, target, ignored), model.loss(source, target, labels, mask)),
            (model.loss(source, target, ignored, options=smoothed, reduction="sum"), other),
        )

    for one, other in losses(build()):
        assert_close(one, other, TOLERANCE)


@pytest.mark.costly("none", slow=("learned_absolute",))
@pytest.mark.parametrize("position", ["learned_absolute", "none"])
def test_other_positions_and_a_head_of_its_own(position: str) -> None:
    model = build(encoder_num_layers=2, position_embedding_type=position, share_embeddings_and_output_weights=False)
    source, target, *_ = batch()
    p = jax.tree.map(np.float64, parameters(model))
    expected = reference.t5(np, p, np.asarray(source), np.asarray(target), FORM, BUCKETS)
    assert_close(quick_jit(lambda model, *a: model(*a))(model, source, target), expected, TOLERANCE)


@pytest.mark.costly
def test_nobody_attends_beyond_the_encoders_lengths() -> None:
    model, (source, target, *_) = build(), batch()
    call = quick_jit(lambda model, *a: model(a[0], a[1], encoder_lengths=a[2]))
    lengths = jnp.array([3, 8, 1, 5], jnp.int32)
    logits = call(model, source, target, lengths)
    other = jnp.where(jnp.arange(S)[None] < lengths[:, None], source, (source + 1) % V)
    np.testing.assert_array_equal(logits, call(model, other, target, lengths))
    alone = call(model, source[:1, :3], target[:1], lengths[:1])
    assert_close(logits[:1], alone, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, {}),
        ({"recompute_granularity": "selective"}, {}),
        ({}, {"execution": Execution(scan_layers=True, loss_chunks=3)}),
    ],
    ids=["full", "selective", "scanned"],
)
def test_recomputation_and_scanning_change_nothing(fields: dict[str, Any], options: dict[str, Any]) -> None:
    found = with_dropout(dataclasses.replace(DROPOUT, **fields), **options)
    for a, e in zip(*map(jax.tree.leaves, (found, without_either())), strict=True):
        assert_close(a, e, TOLERANCE)


DROPOUT = dataclasses.replace(CONFIG, num_layers=2, hidden_dropout=0.3)


def with_dropout(config: TransformerConfig, **options: Any) -> Any:
    model = randomize(T5Model(config, **SIZES, **RELATIVE, **options, rngs=nnx.Rngs(0)))
    return loss_and_gradient(model, dropout_key=jax.random.key(1))


@functools.cache
def without_either() -> Any:
    return with_dropout(DROPOUT)


@pytest.mark.slow  # tests/layers/test_decoder.py and tests/models/test_gpt.py have its parts
def test_sequence_parallelism_changes_no_number() -> None:
    split = dataclasses.replace(CONFIG, tensor_model_parallel_size=2, sequence_parallel=True)
    loss, gradient = loss_and_gradient(build())
    with use_mesh("auto"):
        model = shard(randomize(T5Model(split, **SIZES, **RELATIVE, rngs=nnx.Rngs(0))))
        found, found_gradient = loss_and_gradient(model)
    assert_close(found, loss, TOLERANCE)
    for a, e in zip(jax.tree.leaves(found_gradient), jax.tree.leaves(gradient), strict=True):
        assert relative_l2(jax.device_get(a), jax.device_get(e)) < TOLERANCE


@pytest.mark.slow
def test_it_trains_under_delayed_scaling() -> None:
    source, target = (jnp.tile(tokens[:1], (16, 1)) for tokens in batch()[:2])
    source, target = jnp.tile(source, (1, 2)), jnp.pad(target, ((0, 0), (0, 10)))
    sizes = {**SIZES, "max_sequence_length": 16}
    with autocast(DelayedScaling(amax_history_len=2)):
        state = create_train_state(
            lambda rngs: T5Model(CONFIG, **sizes, rngs=rngs), optax.adam(1e-2), key=jax.random.key(0)
        )
        step = make_train_step(lambda model, batch, key: model.loss(*batch), optax.adam(1e-2))
        losses = []
        for _ in range(8):
            state, metrics = step(state, (source, target, jnp.roll(target, -1, 1)))
            losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    names = [name for name, _ in quantizable_modules(state.model)]
    assert len(names) == 3 + 6  # three linear layers in the encoder's layer, six in the decoder's
    scales = jax.tree.leaves(state.quantizers)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in scales)


@pytest.mark.costly
def test_the_encoder_counts_its_own_layers() -> None:
    """Of four encoder and two decoder layers, the last of each keep to bf16, and every second one sees all."""
    config = dataclasses.replace(
        CONFIG,
        num_layers=2,
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=0,
        window_size=(4, 0),
        window_attn_skip_freq=2,
    )
    model = T5Model(config, **SIZES, encoder_num_layers=4, rngs=nnx.Rngs(0))

    def kept(layers: Any) -> list[bool]:
        return [layer.layernorm_mlp.high_precision for layer in layers]

    def windows(layers: Any) -> list[Any]:
        return [layer.self_attention.core_attention.window_size for layer in layers]

    assert kept(model.encoder_layers) == [False, False, False, True]
    assert kept(model.decoder_layers) == [False, True]
    assert windows(model.encoder_layers) == [(4, 0), None, (4, 0), None]
    assert windows(model.decoder_layers) == [(4, 0), None]


@pytest.mark.slow
def test_dropout_follows_its_key() -> None:
    model = T5Model(dataclasses.replace(CONFIG, hidden_dropout=0.5), **SIZES, rngs=nnx.Rngs(0))
    call = quick_jit(lambda model, key: model(*batch()[:2], dropout_key=key))
    dropped = call(model, jax.random.key(0))
    np.testing.assert_array_equal(dropped, call(model, jax.random.key(0)))
    model.eval()
    assert relative_l2(dropped, call(model, None)) > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_embedding_type": "rope"}, "position_embedding_type 'rope'.* relative, learned_abs"),
        ({"execution": Execution("all")}, "recompute policy 'all'.* none, full, save_gemms"),
        ({"encoder_num_layers": 0}, "encoder_num_layers.* 0"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.costly
def test_bad_tokens_say_what_is_allowed() -> None:
    model, (source, target, *_) = build(), batch()
    with pytest.raises(ValueError, match=r"9 .*max_sequence_length 8"):
        model(jnp.zeros((1, 9), jnp.int32), target)
    with pytest.raises(ValueError, match=r"tokens.* \(6,\)"):
        model(source, target[0])
    with pytest.raises(TypeError, match=r"tokens.* float32"):
        model(source.astype(jnp.float32), target)
    with pytest.raises(ValueError, match=r"labels.* \(4, 6\).* \(4, 5\)"):
        model.loss(source, target, target[:, 1:])
