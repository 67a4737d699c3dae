"""Attention layers and models on meshes with a context axis, and what a backend is handed on meshes without one."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.errors import BackendUnavailableError
from jax_te.layers import DotProductAttention, MultiheadAttention, PackedSeqParams, TransformerLayer, rotary_embedding
from jax_te.megatron import TEDotProductAttention
from jax_te.models import GPTModel
from jax_te.ops import dot_product_attention, reorder_to_zigzag, undo_zigzag, zigzag_positions
from jax_te.sharding import make_mesh, named_sharding
from tests.ops.attention.test_context_parallel import Diagonals, diagonals
from tests.support.context import AXES, compare, context_mesh, host, operands, way
from tests.support.meshes import shard
from tests.support.numerics import TOLERANCE, assert_close, draw, quick_jit, with_vjp, without_type_checker

__all__ = ["diagonals"]  # a fixture

B, S, H = 2, 8, 32
WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")


def layer(kind: str = "p2p", **options: Any) -> TransformerLayer:
    sizes = (2, 1) if kind == "a2a+p2p" else None
    return TransformerLayer(
        H,
        64,
        4,
        num_gqa_groups=2,
        attention_dropout=0.3,
        hidden_dropout=0.0,
        cp_comm_type=kind,
        hierarchical_context_parallel_sizes=sizes,
        rngs=nnx.Rngs(0),
        **options,
    )


def value_and_gradients(model: nnx.Module, x: Any, g: Any, positions: Any, key: Any = None) -> Any:
    """Output of a layer with rotary positions, and gradients of its parameters and input."""
    graphdef, state = nnx.split(model)

    def run(state: Any, x: Any) -> Any:
        rotary = rotary_embedding(positions, H // 4)
        return nnx.merge(graphdef, state)(x, rotary_pos_emb=rotary, dropout_key=key)

    return quick_jit(lambda *args: with_vjp(run, args[:2], args[2]))(state, x, g)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("kind", WAYS)
def test_a_layer_of_every_way_is_one_devices(kind: str, mode: str) -> None:
    """With dropout of the probabilities; in zig-zag order on Explicit axes."""
    zigzag = mode == "explicit"
    x, g, key = draw("x", (B, S, H)), draw("g", (B, S, H)), jax.random.key(1)
    expected = value_and_gradients(layer(), x, g, jnp.arange(S), key)
    with jax.set_mesh(context_mesh(mode, context=2)):
        x, g = (reorder_to_zigzag(a) if zigzag else a for a in (x, g))
        mesh = jax.sharding.get_mesh()
        x, g = (jax.device_put(a, named_sharding(("batch", "sequence", "hidden"), mesh)) for a in (x, g))
        positions = zigzag_positions(S) if zigzag else jnp.arange(S)
        model = shard(layer(kind, cp_load_balanced=zigzag))
        y, (d_state, dx) = value_and_gradients(model, x, g, positions, key)
    y, dx = (undo_zigzag(host(a), 2) if zigzag else host(a) for a in (y, dx))
    tolerance = 8 * TOLERANCE["float32"]
    assert_close(y, expected[0], tolerance)
    assert_close(dx, expected[1][1], tolerance)
    for got, wanted in zip(jax.tree.leaves(d_state), jax.tree.leaves(expected[1][0]), strict=True):
        assert_close(host(got), wanted, tolerance)


@pytest.mark.slow
def test_packed_sequences_in_zigzag_order() -> None:
    """Offsets and lengths are those of the row in natural order; positions are reordered with the tokens."""
    packed = PackedSeqParams(cu_seqlens_q=jnp.array([[0, 3, 8], [0, 6, 8]]))
    x = draw("x", (B, S, H))

    def run(model: MultiheadAttention, x: Any, positions: Any) -> Any:
        graphdef, state = nnx.split(model)
        rotary = rotary_embedding(positions, H // 4)
        return quick_jit(
            lambda state, x: nnx.merge(graphdef, state)(x, packed_seq_params=packed, rotary_pos_emb=rotary)
        )(state, x)

    def model(**options: Any) -> MultiheadAttention:
        return MultiheadAttention(
            H, 4, attention_dropout=0.0, attn_mask_type="padding_causal", rngs=nnx.Rngs(0), **options
        )

    expected = run(model(), x, packed.positions(S))
    with jax.set_mesh(context_mesh(context=2)):
        there = shard(model(cp_comm_type="all_gather", cp_load_balanced=True))
        y = run(there, reorder_to_zigzag(x), reorder_to_zigzag(packed.positions(S)))
    assert_close(undo_zigzag(host(y), 2), expected, 4 * TOLERANCE["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [pytest.param(None, marks=pytest.mark.slow), ("a2a", "all_gather")])
def test_a_model_is_one_devices(kinds: Any) -> None:
    """Its default, and a way of its own for each layer; dropout on."""

    def loss_and_gradients() -> Any:
        config = TransformerConfig(num_layers=2, hidden_size=H, num_attention_heads=4, cp_comm_type=kinds)
        model = shard(GPTModel(config, vocab_size=64, max_sequence_length=S, rngs=nnx.Rngs(0)))
        cores = [block.self_attention.core_attention for block in model.layers]
        assert [core.context_parallel.cp_comm_type for core in cores] == list(kinds or ("p2p", "p2p"))
        graphdef, state = nnx.split(model)
        tokens = jax.random.randint(jax.random.key(1), (B, S), 0, 64)

        def loss(state: Any) -> Any:
            return nnx.merge(graphdef, state).loss(tokens, jnp.roll(tokens, -1, 1), dropout_key=jax.random.key(2))

        return quick_jit(jax.value_and_grad(loss))(state)

    expected, wanted = loss_and_gradients()
    with jax.set_mesh(make_mesh(ParallelConfig(context=2, tensor=2))):
        loss, gradients = loss_and_gradients()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for got, a in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert_close(host(got), host(a), 32 * TOLERANCE["float32"])


def test_megatrons_core() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, hierarchical_context_parallel_sizes=[2, 2]
    )
    assert TEDotProductAttention(config, 1, "causal", "self", cp_comm_type=None).context_parallel == way(
        "p2p", 4
    ).__class__(hierarchical_context_parallel_sizes=(2, 2))
    qkv = tuple(draw(name, (B, S, 4, 8)) for name in "qkv")
    plain = TEDotProductAttention(config, 1, "causal", "self")
    expected = plain(*qkv, None)
    core = TEDotProductAttention(config, 1, "causal", "self", cp_comm_type="a2a+p2p", cp_load_balanced=True)
    zigzag = dataclasses.replace(config, cp_load_balanced=True)
    assert TEDotProductAttention(zigzag, 1, "causal", "self", cp_comm_type="a2a+p2p").context_parallel == (
        core.context_parallel
    )
    with jax.set_mesh(context_mesh(context=4)):
        out = quick_jit(lambda *qkv: core(*qkv, None))(*(reorder_to_zigzag(x) for x in qkv))
    assert_close(undo_zigzag(host(out), 4), expected, 2 * TOLERANCE["float32"])


def test_the_group_of_a_layer() -> None:
    model = layer()
    model.set_context_parallel_group("context", None, None, "all_gather")
    assert model.self_attention.core_attention.context_parallel.cp_comm_type == "all_gather"
    model.self_attention.set_context_parallel_group(None)
    assert model.self_attention.core_attention.context_parallel.cp_comm_type == "p2p"
    group: Any = object()
    for arguments, message in (
        ((group,), "cp_group must be None or the mesh axis 'context', .*JAX has no process groups"),
        ((None, group), "cp_global_ranks must be None, .*order of devices along the mesh's context axis"),
        ((None, None, group), "cp_stream must be None, .*no streams in JAX"),
    ):
        with without_type_checker(), pytest.raises(TypeError, match=message):
            model.set_context_parallel_group(*arguments)
    with pytest.raises(ValueError, match="cp_comm_type must be one of"):
        DotProductAttention(4, 8).set_context_parallel_group("context", cp_comm_type="ring")
    with pytest.raises(ValueError, match="cp_comm_type must be one of"):
        layer("ring")


@pytest.mark.costly("explicit-True")
@pytest.mark.parametrize(("mode", "packed"), [("auto", False), ("explicit", True)])
def test_a_kernel_that_cannot_be_split_sees_one_devices_arrays(diagonals: Diagonals, mode: str, packed: bool) -> None:
    """A mesh without context parallelism: the backend's own call, on each device's examples and heads."""
    mesh = context_mesh(mode, data=2, context=1, tensor=2)
    qkv = (jnp.stack(operands(), axis=2),) if packed else operands(4)
    sink = {"softmax_type": "learnable", "softmax_offset": draw("sink", (8,))}
    for arguments in ({"mask_type": "causal"} | sink, {"mask_type": "padding", "kv_lengths": jnp.array([16, 9])}):
        compare(mesh, way("p2p", 1), arguments, qkv)
    assert {(spec.batch, spec.heads, spec.q_length, spec.packed) for spec in diagonals.asked} == {(1, 4, 16, packed)}
    assert diagonals.ran > 0


def test_where_a_kernel_cannot_be_handed_one_devices_arrays(
    diagonals: Diagonals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("jax_te.ops.attention.dot_product"), "select", diagonals.select)
    message = r"1 key/value heads \(groups\) do not divide over mesh axes tensor = 2"
    with jax.set_mesh(context_mesh(data=2, context=1, tensor=2)):
        with pytest.raises(BackendUnavailableError, match=message):
            dot_product_attention(operands(1), out_axes=AXES)
        with pytest.raises(BackendUnavailableError, match="out_axes None do not say how heads and examples are split"):
            dot_product_attention(operands(4))
    assert not diagonals.ran


def test_the_compiler_splits_what_a_kernel_cannot_be_handed() -> None:
    """One group of keys for two tensor ranks."""

    def run(*qkv: Any) -> Any:
        return dot_product_attention(qkv, out_axes=AXES)

    expected = run(*operands(1))
    with jax.set_mesh(context_mesh(data=2, context=1, tensor=2)):
        assert_close(host(quick_jit(run)(*operands(1))), expected, TOLERANCE["float32"])
