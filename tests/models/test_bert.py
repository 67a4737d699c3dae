"""BertModel against the formulas in fp64: loss, gradients, meshes, padding, recipes, errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.models import BertModel, Execution
from jax_te.ops import softmax_cross_entropy
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import create_train_state, make_train_step
from tests.support import reference
from tests.support.meshes import shard, use_mesh
from tests.support.numerics import assert_close, quick_jit
from tests.support.reference import ROUNDOFF, Form, parameters, randomize, value_and_vjp64

B, S, V, H, F, N = 4, 8, 32, 32, 64, 4
# Six sums of up to F products, each off by about sqrt(F) roundings, one after another.
TOLERANCE = 12 * ROUNDOFF["float32"] * F**0.5
CONFIG = TransformerConfig(
    num_layers=1, hidden_size=H, num_attention_heads=N, ffn_hidden_size=F, activation="relu", layernorm_epsilon=1e-3
)
FORM = Form(causal=False, residual_post_norm=True, output_norm=True, activation="relu", epsilon=1e-3)
LENGTHS = jnp.array([8, 5, 1, 8], jnp.int32)


def build(config: TransformerConfig = CONFIG, **options: Any) -> BertModel:
    return randomize(BertModel(config, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0), **options))


def batch() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    tokens, labels, types = (rng.integers(0, high, (B, S)).astype(np.int32) for high in (V, V, 2))
    return jnp.asarray(tokens), jnp.asarray(np.where(labels < V // 2, labels, -100)), jnp.asarray(types)


def formula(p: Any, tokens: np.ndarray, types: np.ndarray) -> Any:
    x = p["embedding"]["embedding"][tokens] + p["position_embedding"]["embedding"][: tokens.shape[1]]
    x = x + p["tokentype_embedding"]["embedding"][types]
    x = reference.norm(jnp, x, **p["embedding_norm"], form=FORM)
    for i in range(len(p["layers"])):
        x = reference.layer(jnp, p["layers"][i], x, FORM)
    y = jnp.maximum(x @ p["head_dense"]["kernel"] + p["head_dense"]["bias"], 0.0)
    return reference.norm(jnp, y, **p["head_norm"], form=FORM) @ p["embedding"]["embedding"].T + p["output_bias"]


@pytest.mark.costly
def test_positions_may_begin_behind_rows_that_no_input_reads() -> None:
    """As RoBERTa's, behind its padding token's number."""
    tokens, _, _ = batch()
    plain, behind = build(), build(first_position=2)
    rows = behind.position_embedding.embedding[...]
    assert rows.shape == (2 + S, H)
    plain.position_embedding.embedding.set_value(rows[2:])
    run = quick_jit(lambda model, tokens: model(tokens))
    np.testing.assert_array_equal(run(behind, tokens), run(plain, tokens))
    with pytest.raises(ValueError, match="max_sequence_length"):
        behind(jnp.zeros((1, S + 1), jnp.int32))
    with pytest.raises(ValueError, match=r"first_position must be in .*, got -1"):
        build(first_position=-1)


@pytest.mark.slow
@pytest.mark.wide("explicit")
def test_loss_and_gradients_follow_the_formulas_on_every_mesh(mesh_mode: str) -> None:
    tokens, labels, types = batch()

    def loss(p: Any) -> Any:
        counted = np.asarray(labels) >= 0
        losses = reference.nll(jnp, formula(p, np.asarray(tokens), np.asarray(types)), np.maximum(labels, 0))
        return (losses * counted).sum() / counted.sum()

    value, (expected,) = value_and_vjp64(loss, (parameters(build()),), np.ones(()))
    meshed: Any = {} if mesh_mode == "no mesh" else {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    model = shard(build(dataclasses.replace(CONFIG, **meshed)))
    run = quick_jit(jax.value_and_grad(lambda model, *a: model.loss(*a[:2], tokentypes=a[2])))
    actual, gradient = run(model, tokens, labels, types)
    assert_close(actual, value, TOLERANCE, what="loss")
    trees = parameters(gradient), expected
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, trees), strict=True):
        assert_close(a, e, TOLERANCE, what=jax.tree_util.keystr(path))


@pytest.mark.costly
def test_padding_is_not_seen_and_the_first_token_is_pooled() -> None:
    with use_mesh("explicit"):
        _check_padding_and_pooler(shard(build(add_pooler=True, add_lm_head=False)))


def _check_padding_and_pooler(model: BertModel) -> None:
    tokens, _, types = batch()
    call = quick_jit(lambda model, *a: (model(a[0], tokentypes=a[1], lengths=a[2]), model.pool(model(*a[:1]))))
    encoded, pooled = call(model, tokens, types, LENGTHS)
    valid = np.arange(S) < np.asarray(LENGTHS)[:, None]
    other, _ = call(model, jnp.where(jnp.asarray(valid), tokens, 0), types, LENGTHS)
    np.testing.assert_array_equal(np.asarray(other)[valid], np.asarray(encoded)[valid])
    p = parameters(model)["pooler"]
    plain, _ = call(model, tokens, jnp.zeros_like(types), jnp.full(B, S, jnp.int32))
    assert_close(pooled, np.tanh(np.asarray(plain)[:, 0] @ np.asarray(p["kernel"]) + np.asarray(p["bias"])), TOLERANCE)


@pytest.mark.slow
def test_layers_follow_the_recipe_and_nothing_else() -> None:
    tokens, labels, _ = batch()
    with autocast(DelayedScaling(amax_history_len=2)):
        tx = optax.sgd(0.1)
        state = create_train_state(lambda rngs: BertModel(CONFIG, **SIZES, rngs=rngs), tx, key=jax.random.key(0))
        states = {path[0] for path, _ in nnx.to_flat_state(nnx.state(state.model, QuantizerState))}
        assert states == {"layers"}
        step = make_train_step(lambda model, batch, key: model.loss(*batch), tx)
        losses = []
        for _ in range(3):
            state, metrics = step(state, (tokens, labels))
            losses.append(float(metrics["loss"]))
    assert losses[2] < losses[1] < losses[0]


SIZES = {"vocab_size": V, "max_sequence_length": S}


@pytest.mark.slow
def test_masks_dropout_and_no_token_types() -> None:
    model, (tokens, labels, _) = build(), batch()
    run = quick_jit(lambda model, *a: model.loss(a[0], a[1], a[2], dropout_key=a[3]))
    mask, labels = labels >= 0, jnp.maximum(labels, 0)
    plain = run(model, tokens, labels, mask, None)
    assert_close(plain, softmax_cross_entropy(model(tokens), labels, weights=mask, reduction="mean"), TOLERANCE)
    dropped = build(dataclasses.replace(CONFIG, hidden_dropout=0.5))
    assert float(run(dropped, tokens, labels, mask, jax.random.key(0))) != float(plain)
    dropped.eval()
    assert_close(run(dropped, tokens, labels, mask, None), plain, TOLERANCE)
    model = build(num_tokentypes=0)
    assert "tokentype_embedding" not in parameters(model)
    assert nnx.eval_shape(model, tokens).shape == (B, S, V)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokentypes": -1}, "num_tokentypes must be >= 0"),
        ({"config": dataclasses.replace(CONFIG, activation="swiglu")}, "no gate, got 'swiglu'; give add_lm_head=False"),
        ({"config": dataclasses.replace(CONFIG, cp_load_balanced=True)}, "does not follow cp_load_balanced"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.costly
def test_bad_calls_say_what_is_missing() -> None:
    tokens, labels, types = batch()
    encoder = build(add_lm_head=False, num_tokentypes=0)
    with pytest.raises(ValueError, match="build it with add_pooler=True"):
        encoder.pool(encoder(tokens))
    with pytest.raises(ValueError, match="build it with add_lm_head=True"):
        encoder.loss(tokens, labels)
    with pytest.raises(ValueError, match="build it with num_tokentypes"):
        encoder(tokens, tokentypes=types)
    with pytest.raises(ValueError, match="tokentypes must have the shape of tokens"):
        build()(tokens, tokentypes=types[:, 1:])
    with pytest.raises(ValueError, match="softcap and bias"):
        build(execution=Execution(loss_chunks=2)).loss(tokens, labels)
