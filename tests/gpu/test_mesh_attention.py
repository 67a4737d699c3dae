"""cuDNN's attention through TE on meshes of two or four GPUs against one GPU: ``te`` in bf16 there, and plain JAX in
fp32 on the same inputs.

bf16 in and out: see test_attention.py for 0.01 and 0.02. A ring adds the gradients of keys in bf16 at every rank (2^-9
each), and so does the sum over ranks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import ParallelConfig
from jax_te.errors import BackendUnavailableError
from jax_te.layers import TransformerLayer, rotary_embedding
from jax_te.ops import (
    ContextParallel,
    dot_product_attention,
    reorder_to_zigzag,
    segments_from_cu_seqlens,
    undo_zigzag,
    use_backend,
    zigzag_positions,
)
from jax_te.ops.attention.segments import segment_positions
from jax_te.sharding import make_mesh, named_sharding
from tests.support.context import AXES, host
from tests.support.meshes import shard
from tests.support.numerics import draw, quick_jit, relative_l2, with_vjp

pytestmark = pytest.mark.gpu

B, S, N, G, D = 4, 1024, 8, 4, 64
WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")


@pytest.fixture
def ranks() -> int:
    """2 or 4 context ranks, by how many GPUs there are."""
    count = len(jax.devices())
    if count < 2:
        pytest.fail(f"these tests need two GPUs at least, and there is {count}")
    return 4 if count >= 4 else 2


def way(kind: str, ranks: int, *, zigzag: bool = False) -> ContextParallel:
    sizes = (2, ranks // 2) if kind == "a2a+p2p" else None
    return ContextParallel(cp_comm_type=kind, hierarchical_context_parallel_sizes=sizes, cp_load_balanced=zigzag)


def operands(*, packed: bool = False) -> tuple[jax.Array, ...]:
    if packed:
        return (draw("qkv", (B, S, 3, N, D), jnp.bfloat16),)
    return tuple(draw(name, (B, S, heads, D), jnp.bfloat16) for name, heads in (("q", N), ("k", G), ("v", G)))


def attend(qkv: Any, g: Any, **arguments: Any) -> Any:
    """Output and gradients, with that of the softmax's offset at the end if there is one."""
    sink = arguments.pop("softmax_offset", None)

    def run(qkv: Any, sink: Any) -> Any:
        return dot_product_attention(qkv, softmax_offset=sink, **arguments)

    out, (d_qkv, d_sink) = quick_jit(lambda *args: with_vjp(run, args[:2], args[2]))(qkv, sink, g)
    return (out, *d_qkv, *(() if d_sink is None else (d_sink,)))


def check(mesh: Any, context_parallel: ContextParallel, arguments: dict[str, Any], *, packed: bool = False) -> None:
    """``te`` on ``mesh`` gives what one GPU does. Padding of packed sequences may hold anything, and is left out."""
    qkv, g = operands(packed=packed), draw("g", (B, S, N, D), jnp.bfloat16)
    ranks, zigzag = mesh.shape["context"], context_parallel.cp_load_balanced
    segments = arguments.get("segments")
    inside = jnp.ones((B, S), bool)
    if segments is not None:
        inside = segment_positions(segments.q_offsets, segments.q_lengths, S).segment > 0
        g = jnp.where(inside[..., None, None], g, jnp.zeros_like(g))

    def only_inside(x: Any) -> Any:
        return x if x.ndim < 4 else jnp.where(inside.reshape(B, S, *(1,) * (x.ndim - 2)), x, jnp.zeros_like(x))

    with jax.default_matmul_precision("highest"):
        wide = tuple(x.astype(jnp.float32) for x in qkv)
        plain = attend(wide, g.astype(jnp.float32), backend="xla", **arguments)
    one = attend(qkv, g, backend="te", **arguments)
    with jax.set_mesh(mesh):

        def place(x: Any) -> Any:
            axes = AXES if x.ndim == 4 else (*AXES[:2], "components", *AXES[2:])
            return jax.device_put(reorder_to_zigzag(x, ranks) if zigzag else x, named_sharding(axes, mesh))

        found = attend(
            tuple(place(x) for x in qkv),
            place(g),
            backend="te",
            out_axes=AXES,
            context_parallel=context_parallel,
            **arguments,
        )
    found = [host(x) for x in found]
    found = [undo_zigzag(x, ranks) if zigzag and x.ndim >= 4 else x for x in found]
    for number, (got, same, exact) in enumerate(zip(found, one, plain, strict=True)):
        assert got.dtype == same.dtype
        distances = [relative_l2(only_inside(got), only_inside(host(x))) for x in (same, exact)]
        assert max(distances) < (0.01 if number == 0 else 0.02), (number, distances)


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_examples_and_heads_split(ranks: int, axis: str, axis_type: Any) -> None:
    mesh = make_mesh(ParallelConfig(**{axis: ranks}), axis_type=axis_type)
    check(mesh, ContextParallel(), {"mask_type": "causal"}, packed=axis == "tensor")
    lengths = jnp.array([S, 700, 512, 130], jnp.int32)
    check(mesh, ContextParallel(), {"mask_type": "padding_causal", "q_lengths": lengths, "kv_lengths": lengths})


@pytest.mark.parametrize("zigzag", [False, True], ids=["natural", "zigzag"])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
@pytest.mark.parametrize("kind", WAYS)
def test_every_way(ranks: int, kind: str, mask_type: str, zigzag: bool) -> None:
    check(make_mesh(ParallelConfig(context=ranks)), way(kind, ranks, zigzag=zigzag), {"mask_type": mask_type})


def test_context_beside_tensor_ranks(ranks: int) -> None:
    if ranks == 4:
        mesh = make_mesh(ParallelConfig(context=2, tensor=2), axis_type="explicit")
    else:
        mesh = make_mesh(ParallelConfig(context=2), axis_type="explicit")
    for kind in WAYS[:3]:
        check(mesh, way(kind, 2, zigzag=True), {"mask_type": "causal"})


LENGTHS = jnp.array([S, 700, 512, 130], jnp.int32)
PACKED = segments_from_cu_seqlens(
    jnp.array([[0, 300, 700, S], [0, 600, 900, 900], [0, 128, 256, 512], [0, S, S, S]], jnp.int32)
)
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"mask_type": "causal", "window": (200, 0)},
    "lengths": {"mask_type": "padding", "kv_lengths": LENGTHS},
    "lengths, causal": {"mask_type": "padding_causal", "kv_lengths": LENGTHS},
    "packed": {"mask_type": "padding", "segments": PACKED},
    "packed, causal": {"mask_type": "padding_causal", "segments": PACKED},
    "learnable": {"mask_type": "causal", "softmax_type": "learnable", "softmax_offset": draw("sink", (N,))},
}


@pytest.mark.parametrize("option", list(OPTIONS))
@pytest.mark.parametrize("kind", ["all_gather", "a2a"])
def test_options(ranks: int, kind: str, option: str) -> None:
    """Where cuDNN has kernels for the parts, on one GPU and on each; where it has none, it is cuDNN who says so."""
    reason = ""
    try:
        check(make_mesh(ParallelConfig(context=ranks)), way(kind, ranks, zigzag=True), OPTIONS[option])
    except BackendUnavailableError as error:
        reason = str(error)
        print(f"{kind}, {option}: {reason}")
    assert "cp_comm_type" not in reason


def test_a_learnable_offset_on_a_ring(ranks: int) -> None:
    check(make_mesh(ParallelConfig(context=ranks)), way("p2p", ranks, zigzag=True), OPTIONS["learnable"])


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "learnable"])
def test_what_a_ring_of_te_has_not(ranks: int, option: str) -> None:
    """``auto`` then runs plain JAX."""
    mesh, arguments = make_mesh(ParallelConfig(context=ranks)), {**OPTIONS[option], "out_axes": AXES}
    with jax.set_mesh(mesh):
        with pytest.raises(BackendUnavailableError, match="sees all, half or none of another device's keys"):
            dot_product_attention(operands(), **arguments, backend="te")
        out = dot_product_attention(operands(), **arguments)
    expected = dot_product_attention(operands(), **arguments, backend="xla")
    assert relative_l2(host(out), host(expected)) < 0.01


@pytest.mark.parametrize("kind", WAYS)
def test_a_layer(ranks: int, kind: str) -> None:
    """Zig-zag order, rotary positions; linear layers and norms on the backend that ``auto`` gives them."""
    x, g = draw("x", (B, S, N * D), jnp.bfloat16), draw("g", (B, S, N * D), jnp.bfloat16)

    def run(positions: Any, x: Any, g: Any, **options: Any) -> Any:
        layer = TransformerLayer(
            N * D,
            4 * N * D,
            N,
            num_gqa_groups=G,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            params_dtype=jnp.bfloat16,
            rngs=nnx.Rngs(0),
            **options,
        )
        graphdef, state = nnx.split(shard(layer))

        def call(x: Any, state: Any) -> Any:
            return nnx.merge(graphdef, state)(x, rotary_pos_emb=rotary_embedding(positions, D))

        return quick_jit(lambda *args: with_vjp(call, args[:2], args[2]))(x, state, g)

    with use_backend("auto"):
        y, (dx, d_state) = run(jnp.arange(S), x, g)
        with jax.set_mesh(make_mesh(ParallelConfig(context=ranks))):
            sizes = (2, ranks // 2) if kind == "a2a+p2p" else None
            options = {"hierarchical_context_parallel_sizes": sizes, "cp_comm_type": kind, "cp_load_balanced": True}
            there = run(zigzag_positions(S), reorder_to_zigzag(x), reorder_to_zigzag(g), **options)
    assert relative_l2(undo_zigzag(host(there[0]), ranks), host(y)) < 0.01
    assert relative_l2(undo_zigzag(host(there[1][0]), ranks), host(dx)) < 0.02
    for got, wanted in zip(jax.tree.leaves(there[1][1]), jax.tree.leaves(d_state), strict=True):
        assert relative_l2(host(got), host(wanted)) < 0.03
