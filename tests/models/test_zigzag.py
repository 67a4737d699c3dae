"""GPT whose context ranks have tokens in zig-zag order: one device's losses, gradients and logits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.layers.dropout import dropout
from jax_te.models import Execution, GPTModel, T5Model
from jax_te.models.tokens import caller_order, model_order
from jax_te.ops import undo_zigzag, zigzag_positions
from jax_te.sharding import make_mesh
from tests.support.meshes import shard
from tests.support.numerics import TOLERANCE, assert_close, quick_jit
from tests.support.reference import randomize

B, S, V, H = 2, 8, 32, 32


def config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=H, num_attention_heads=4, **fields)


def build(fields: dict[str, Any], **options: Any) -> GPTModel:
    model = GPTModel(config(**fields), vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0), **options)
    return shard(randomize(model))


def batch() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, labels and weights, of which no two are alike: each must move with its token."""
    keys = jax.random.split(jax.random.key(1), 3)
    tokens, labels = (jax.random.randint(key, (B, S), 0, V) for key in keys[:2])
    return tokens, labels, jax.random.uniform(keys[2], (B, S))


def loss_and_gradients(fields: dict[str, Any], dropped: bool, options: dict[str, Any]) -> Any:
    key = jax.random.key(2) if dropped else None
    run = quick_jit(jax.value_and_grad(lambda model: model.loss(*batch(), dropout_key=key)))
    model = build(fields, **options)
    model.set_attributes(without_dropout=not dropped)
    return jax.device_get(run(model))


@functools.cache
def one_device(position: str, dropped: bool) -> Any:
    rates = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
    return loss_and_gradients(rates, dropped, {"position_embedding_type": position})


@pytest.mark.slow
@pytest.mark.wide("explicit-p2p-learned_absolute-options1-False")
@pytest.mark.parametrize(
    ("mode", "kind", "position", "options", "dropped"),
    [
        ("auto", "p2p", "rope", {}, True),
        ("explicit", "p2p", "learned_absolute", {"execution": Execution(scan_layers=True)}, False),
        ("explicit", "all_gather", "rope", {"execution": Execution(loss_chunks=2)}, True),
        ("auto", ("all_gather", "p2p"), "learned_absolute", {}, False),
    ],
)
def test_loss_and_gradients_are_one_devices(
    mode: Any, kind: Any, position: str, options: dict[str, Any], dropped: bool
) -> None:
    """With weights of the tokens; under sequence parallelism, too, on Auto axes."""
    fields: dict[str, Any] = {"attention_dropout": 0.2, "hidden_dropout": 0.2, "cp_comm_type": kind}
    fields["cp_load_balanced"] = True
    if mode == "auto":
        fields |= {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, context=2, tensor=2), axis_type=mode)):
        loss, gradients = loss_and_gradients(fields, dropped, {"position_embedding_type": position, **options})
    expected, wanted = one_device(position, dropped)
    assert_close(loss, expected, 4 * TOLERANCE["float32"])
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert_close(got, want, 32 * TOLERANCE["float32"])


@pytest.mark.slow  # a check of the comparison with dropout
def test_dropout_is_there() -> None:
    assert abs(one_device("rope", True)[0] - one_device("rope", False)[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.wide("explicit")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_logits_are_in_natural_order(mode: Any) -> None:
    """At the natural positions and at others, given in natural order; and the losses of tokens."""
    tokens, labels, _ = batch()
    others = jnp.stack([jnp.arange(S) // 2, jnp.arange(S)[::-1]])

    def logits(fields: dict[str, Any]) -> Any:
        call = quick_jit(
            lambda model: [
                model(tokens),
                model(tokens, positions=others[1]),
                model(tokens, positions=others),
                model.loss(tokens, labels, reduction="none"),
            ]
        )
        return jax.device_get(call(build(fields, position_embedding_type="rope")))

    expected = logits({})
    with jax.set_mesh(make_mesh(ParallelConfig(context=4, tensor=2), axis_type=mode)):
        found = logits({"cp_load_balanced": True})
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, 8 * TOLERANCE["float32"])


@pytest.mark.costly
def test_layers_run_in_zigzag_order_where_context_ranks_are() -> None:
    zigzag, x = config(cp_load_balanced=True), jnp.arange(S)
    assert model_order(zigzag, x) is x
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, tensor=2))):
        assert model_order(zigzag, x) is x
    with jax.set_mesh(make_mesh(ParallelConfig(context=2))):
        model = build({"cp_load_balanced": True})
        assert all(layer.self_attention.core_attention.context_parallel.cp_load_balanced for layer in model.layers)
        assert model_order(config(), x) is x
        ordered = model_order(zigzag, x)
        np.testing.assert_array_equal(jax.device_get(ordered), zigzag_positions(S, 2))
        hidden = jnp.broadcast_to(ordered[None, :, None], (B, S, H))
        back = caller_order(zigzag, hidden, ("batch", "sequence", "hidden"))
        np.testing.assert_array_equal(jax.device_get(back)[1, :, 3], x)


def test_each_position_drops_what_it_drops_in_natural_order() -> None:
    key, axes = jax.random.key(0), ("batch", "sequence", "hidden")
    natural = dropout(jnp.ones((B, S, H)), 0.5, key, axes=axes)
    assert 0.4 < float(jnp.mean(natural == 0.0)) < 0.6
    assert len(np.unique(np.asarray(natural).reshape(-1, H), axis=0)) == B * S  # each has its own
    with jax.set_mesh(make_mesh(ParallelConfig(context=2))):
        reordered = jax.jit(lambda x: dropout(x, 0.5, key, axes=axes, zigzag=True))(jnp.ones((B, S, H)))
    np.testing.assert_array_equal(undo_zigzag(np.asarray(reordered), 2), natural)


@pytest.mark.slow
def test_what_cannot_be_reordered_is_refused() -> None:
    tokens, labels, _ = batch()
    with jax.set_mesh(make_mesh(ParallelConfig(context=4))):
        model = build({"cp_load_balanced": True})
        for call in (lambda: model(tokens[:, :4]), lambda: model.loss(tokens[:, :4], labels[:, :4])):
            with pytest.raises(ValueError, match=r"sequence of 4 .* 4 devices .* 8"):
                call()
        with pytest.raises(ValueError, match=r"KV cache.*cp_load_balanced=True.*whole_sequences"):
            model(tokens, cache=model.init_cache(B, S))
        jax.eval_shape(build({}), tokens[:, :4])  # one token a rank is enough in natural order
    with pytest.raises(ValueError, match="cp_load_balanced=True"):
        T5Model(config(cp_load_balanced=True), vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0))
