"""Attention whose sequence is split: every way of exchange gives one device's numbers, and what it sends is counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from jax_te.config import ParallelConfig
from jax_te.errors import BackendUnavailableError
from jax_te.ops import (
    BackendChoice,
    ContextParallel,
    dot_product_attention,
    reorder_to_zigzag,
    segments_from_cu_seqlens,
    undo_zigzag,
    xla,
    zigzag_positions,
)
from jax_te.ops.attention.checks import shape_of
from jax_te.ops.attention.context_parallel import block, checks
from jax_te.sharding import ShardingRules, make_mesh, named_sharding, use_rules, whole_sequences
from tests.support.context import AXES, B, D, N, S, attend, barriers_hold, compare, context_mesh, host, operands, way
from tests.support.numerics import TOLERANCE, assert_close, draw, without_type_checker

WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")
LENGTHS = jnp.array([16, 11], jnp.int32)
PACKED = segments_from_cu_seqlens(
    jnp.array([[0, 5, 9, 14], [0, 3, 16, 16]]), None, jnp.array([[0, 6, 10, 16], [0, 3, 16, 16]])
)
BIAS, SLOPES, SINK = draw("bias", (1, N, S, S)), draw("slopes", (N,)), draw("sink", (N,))
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"mask_type": "causal", "window": (3, 0)},
    "window on both sides": {"mask_type": "no_mask", "window": (3, 2)},
    "lengths": {"mask_type": "padding", "kv_lengths": LENGTHS},
    "lengths, causal": {"mask_type": "padding_causal", "kv_lengths": LENGTHS},
    "lengths, bottom right": {
        "mask_type": "padding_causal_bottom_right",
        "q_lengths": jnp.array([10, 4], jnp.int32),
        "kv_lengths": LENGTHS,
    },
    "packed": {"mask_type": "padding", "segments": PACKED},
    "packed, causal, window": {"mask_type": "padding_causal", "segments": PACKED, "window": (2, 0)},
    "alibi": {"mask_type": "causal", "bias_type": "alibi", "bias": SLOPES},
    "bias": {"mask_type": "causal", "bias_type": "post_scale_bias", "bias": BIAS},
    "bias by key": {"mask_type": "no_mask", "bias_type": "pre_scale_bias", "bias": draw("bias", (B, 1, 1, S))},
    "mask": {"mask_type": "arbitrary", "mask": draw("mask", (1, N, S, S)) > 0.5},
    "learnable": {"mask_type": "causal", "softmax_type": "learnable", "softmax_offset": SINK},
    "off by one, cap": {"mask_type": "no_mask", "softmax_type": "off-by-one", "logit_softcap": 1.5, "scale": 0.9},
    "dropout": {"mask_type": "causal", "dropout_rate": 0.4, "dropout_key": jax.random.key(3)},
    "max logits": {"mask_type": "causal", "return_max_logit": True},
}
NOT_ON_A_RING = ("bias", "bias by key", "mask")


@pytest.mark.costly(
    "a2a-no_mask-zigzag",
    slow=(
        "p2p-causal-natural",
        "a2a+p2p-causal-zigzag",
        "all_gather-no_mask-natural",
        "a2a+p2p-no_mask-natural",
        "all_gather-causal-zigzag",
        "p2p-causal-zigzag",
    ),
)
@pytest.mark.wide(
    "p2p-causal-natural",
    "p2p-causal-zigzag",
    "all_gather-causal-zigzag",
    "all_gather-no_mask-natural",
    "a2a-causal-natural",
    "a2a-no_mask-zigzag",
    "a2a+p2p-causal-zigzag",
    "a2a+p2p-no_mask-natural",
)
@pytest.mark.parametrize("zigzag", [False, True], ids=["natural", "zigzag"])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
@pytest.mark.parametrize("kind", WAYS)
def test_every_way_gives_one_devices_numbers(kind: str, mask_type: str, zigzag: bool) -> None:
    """Grouped queries; a context axis of 2 beside a tensor axis of 2, and one of 4, of both types of axis."""
    four = (mask_type == "causal") == zigzag
    mesh = context_mesh("explicit", context=4) if four else context_mesh("auto", context=2, tensor=2, data=2)
    compare(mesh, way(kind, mesh.shape["context"], zigzag=zigzag), {"mask_type": mask_type})


@pytest.mark.costly(
    "all_gather-mask",
    slow=(
        "all_gather-window on both sides",
        "a2a-dropout",
        "all_gather-packed",
        "a2a-max logits",
        "a2a-learnable",
        "a2a-bias",
        "p2p-lengths, bottom right",
        "p2p-max logits",
        "p2p-window",
        "p2p-packed, causal, window",
        "p2p-dropout",
    ),
)
@pytest.mark.wide(
    "p2p-window",
    "p2p-lengths, bottom right",
    "p2p-packed, causal, window",
    "p2p-dropout",
    "p2p-max logits",
    "all_gather-window on both sides",
    "all_gather-packed",
    "all_gather-bias by key",
    "all_gather-mask",
    "a2a-bias",
    "a2a-learnable",
    "a2a-dropout",
    "a2a-max logits",
)
@pytest.mark.parametrize(
    ("kind", "option"),
    [(kind, option) for kind in WAYS[:3] for option in OPTIONS if kind != "p2p" or option not in NOT_ON_A_RING],
)
def test_options(kind: str, option: str) -> None:
    # In a ring of two, the device before is the one behind, too: whose keys come at which step takes more devices.
    size = 4 if (kind, option) in (("p2p", "window"), ("p2p", "dropout")) else 2
    compare(context_mesh(context=size), way(kind, size, zigzag=True), OPTIONS[option])


@pytest.mark.costly(slow=("dropout",))
@pytest.mark.wide("alibi", "dropout")
@pytest.mark.parametrize("option", ["alibi", "learnable", "dropout", "max logits"])
def test_heads_split_among_tensor_ranks_and_in_groups_of_context_ranks(option: str) -> None:
    """Arrays and gradients of each head, and sums over the heads of all devices."""
    compare(context_mesh(context=4, tensor=2), way("a2a+p2p", 4, zigzag=True), OPTIONS[option])


@pytest.mark.costly("a2a-bias by key", slow=("all_gather-bias",))
@pytest.mark.parametrize(
    ("kind", "option"), [("all_gather", "bias"), ("all_gather", "bias by key"), ("a2a", "bias by key")]
)
def test_a_bias_of_which_each_device_has_one_example_or_head(kind: str, option: str) -> None:
    """Its gradient is not summed over the axes that shard it, though the shards have size 1."""
    arguments = OPTIONS[option] | ({"bias": draw("bias", (B, 2, S, S))} if option == "bias" else {})
    qkv = tuple(x[:, :, :2] for x in operands()) if option == "bias" else None
    mesh = context_mesh(data=2, context=2, tensor=2 if option == "bias" else 1)
    compare(mesh, way(kind, 2, zigzag=True), arguments, qkv)


def test_layers_in_a_scan_share_their_mask() -> None:
    """Forward keeps the mask itself for backward, not a copy for each layer."""
    with jax.set_mesh(context_mesh(context=2)):

        def loss(q: Any, k: Any, v: Any, mask: Any) -> Any:
            def layer(q: Any, _: None) -> Any:
                options: dict[str, Any] = {"mask_type": "arbitrary", "mask": mask, "out_axes": AXES}
                return dot_product_attention((q, k, v), **options, context_parallel=way("all_gather", 2)), None

            return jnp.sum(jax.lax.scan(layer, q, None, length=3)[0])

        jaxpr = jax.make_jaxpr(jax.grad(loss))(*operands(), jnp.zeros((1, 1, S, S), bool))
    assert "bool[1,1,16,16]" in str(jaxpr)
    assert "bool[3," not in str(jaxpr)


@pytest.mark.costly("all_gather", slow=("p2p",))
@pytest.mark.parametrize("kind", WAYS[:3])
def test_keys_of_another_length(kind: str) -> None:
    arguments: dict[str, Any] = {"mask_type": "causal_bottom_right"}
    compare(context_mesh(context=2), way(kind, 2, zigzag=True), arguments, operands(4, skv=24))


@pytest.mark.costly("p2p")
@pytest.mark.parametrize("kind", ["p2p", "a2a"])
def test_one_array_of_queries_keys_and_values(kind: str) -> None:
    qkv = (jnp.stack(operands(), axis=2),)
    compare(context_mesh(context=2, tensor=2), way(kind, 2), {"mask_type": "causal"}, qkv)


@pytest.mark.costly("p2p")
@pytest.mark.wide("p2p", "a2a+p2p")
@pytest.mark.parametrize("kind", WAYS)
def test_half_precision(kind: str) -> None:
    qkv, g = operands(4, dtype=jnp.bfloat16), draw("g", (B, S, N, D), jnp.bfloat16)
    arguments: dict[str, Any] = {"mask_type": "causal"}
    expected = attend(tuple(x.astype(jnp.float32) for x in qkv), g.astype(jnp.float32), arguments)
    with jax.set_mesh(context_mesh(context=2)):
        out, _, gradients, _ = attend(qkv, g, arguments, out_axes=AXES, context_parallel=way(kind, 2))
    assert {x.dtype.name for x in (out, *gradients)} == {"bfloat16"}
    for got, wanted in ((out, expected[0]), *zip(gradients, expected[2], strict=True)):
        assert_close(host(got), wanted, 4 * TOLERANCE["bfloat16"])


COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
SENT = {  # among C = 4 devices: forward, the same again in backward, and gradients (in a ring with keys and values)
    "p2p": ({"collective-permute": 3}, {"collective-permute": 1}, {"collective-permute": 4}),
    "all_gather": ({"all-gather": 2}, {"all-gather": 2}, {"reduce-scatter": 2}),
    "a2a": ({"all-to-all": 4}, {}, {"all-to-all": 4}),
    "a2a+p2p": (
        {"all-to-all": 4, "collective-permute": 1},
        {"collective-permute": 1},
        {"all-to-all": 4, "collective-permute": 2},
    ),
}


@pytest.mark.costly(slow=("a2a+p2p",))
@pytest.mark.wide("p2p", "a2a+p2p")
@pytest.mark.parametrize("kind", WAYS)
def test_what_is_communicated(kind: str) -> None:
    """Keys and values are one array for a send of a ring; backward sends them again rather than keep them."""
    mesh = context_mesh(context=4, data=2)
    with jax.set_mesh(mesh):
        qkv = tuple(jax.device_put(x, named_sharding(AXES, mesh)) for x in operands(4))

        def run(*qkv: Any) -> Any:
            return dot_product_attention(qkv, out_axes=AXES, context_parallel=way(kind, 4, zigzag=True))

        def both(*qkv: Any) -> Any:
            out, vjp = jax.vjp(run, *qkv)
            return out, vjp(out)

        found = [Counter(COLLECTIVE.findall(jax.jit(fn).lower(*qkv).compile().as_text())) for fn in (run, both)]
    forward, again, gradients = (Counter(sent) for sent in SENT[kind])
    assert found[0] == forward
    assert found[1] == forward + again + gradients or (not barriers_hold() and found[1] == forward + gradients)


def count(name: str, jaxpr: Any) -> int:
    """Uses of a primitive, in functions of functions as well."""
    inner = (count(name, sub) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params))
    return sum(inner) + sum(eqn.primitive.name == name for eqn in jaxpr.eqns)


@pytest.mark.costly
def test_a_policy_that_keeps_the_context_runs_attention_once() -> None:
    """Seen by how often keys and values are sent around."""
    with jax.set_mesh(context_mesh(context=2)):

        def run(*qkv: Any) -> Any:
            return dot_product_attention(qkv, out_axes=AXES)

        kept = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names("context"))
        counts, gradients = [], []
        for fn in (run, jax.checkpoint(run), kept):

            def both(*qkv: Any, fn: Any = fn) -> Any:
                out, vjp = jax.vjp(fn, *qkv)
                return out, vjp(draw("g", (B, S, N, D)))

            traced = jax.jit(both).trace(*operands())
            counts.append(count("ppermute", traced.jaxpr.jaxpr))
            gradients.append(jax.jit(both)(*operands())[1])
        # To the other rank and back: keys and values, or their gradients.
        assert counts == [1 + 1 + 2, 1 + 1 + 1 + 2, 1 + 1 + 2]
    for got in gradients[1:]:
        for a, b in zip(got, gradients[0], strict=True):
            assert_close(host(a), host(b), TOLERANCE["float32"])


@pytest.mark.costly
def test_without_jit_and_inside_the_users_own_shard_map() -> None:
    qkv, g = operands(), draw("g", (B, S, N, D))
    expected = attend(qkv, g, {"mask_type": "causal"})

    def gradients(qkv: Any, g: Any) -> Any:
        out, vjp = jax.vjp(lambda *qkv: dot_product_attention(qkv, out_axes=AXES), *qkv)
        return out, vjp(g)

    with jax.set_mesh(context_mesh(context=2, data=2, tensor=2)):
        eager = gradients(qkv, g)
        some = jax.shard_map(gradients, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False)
        inside = jax.jit(some)(qkv, g)
        every = jax.shard_map(
            gradients, in_specs=P("data", None, "tensor"), out_specs=P("data", None, "tensor"), check_vma=False
        )
        alone = jax.jit(every)(qkv, g)  # the context axis is the caller's, who did not split the sequence
    for out, got in (eager, inside, alone):
        assert_close(host(out), expected[0], 2 * TOLERANCE["float32"])
        for a, b in zip(got, expected[2], strict=True):
            assert_close(host(a), b, 4 * TOLERANCE["float32"])


def test_zigzag_order() -> None:
    x = np.arange(2 * 12).reshape(2, 12)
    positions = np.asarray(zigzag_positions(12, 3))
    assert positions.tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    there = reorder_to_zigzag(x, 3)
    assert isinstance(there, np.ndarray)
    np.testing.assert_array_equal(there, x[:, positions])
    np.testing.assert_array_equal(undo_zigzag(there, 3), x)
    moved = reorder_to_zigzag(jnp.asarray(x.T), 3, axis=0)
    np.testing.assert_array_equal(moved, x.T[positions])
    np.testing.assert_array_equal(zigzag_positions(12), np.arange(12))
    with jax.set_mesh(context_mesh(context=2)):
        assert zigzag_positions(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
        np.testing.assert_array_equal(undo_zigzag(reorder_to_zigzag(x)), x)
    with pytest.raises(ValueError, match=r"a sequence of 10 .* each of 2 .* multiple of 4"):
        zigzag_positions(10, 2)


CAUSAL: dict[str, Any] = {"mask_type": "causal"}
BAD: dict[str, tuple[ContextParallel, dict[str, Any], Any, str]] = {
    "sequence": (
        ContextParallel(),
        CAUSAL,
        operands(skv=S - 2),
        r"14 keys do not divide over mesh axes context = 4; pad them or change the mesh",
    ),
    "zig-zag": (
        ContextParallel(cp_load_balanced=True),
        CAUSAL,
        tuple(x[:, :12] for x in operands()),
        r"12 queries do not divide over mesh axes context = 4, twice as many in zig-zag order",
    ),
    "groups": (ContextParallel(), CAUSAL, operands(1), r"1 key/value heads \(groups\) do not divide .* tensor = 2"),
    "heads": (
        ContextParallel(cp_comm_type="a2a"),
        CAUSAL,
        operands(4),
        "'a2a' exchanges heads among 4 .* 4 query and 2 key/value heads, .* take 'p2p'",
    ),
    "no sizes": (
        ContextParallel(cp_comm_type="a2a+p2p"),
        CAUSAL,
        operands(),
        r"hierarchical_context_parallel_sizes=.* product of 4, .*; got None",
    ),
    "sizes": (way("a2a+p2p", 8), CAUSAL, operands(), r"product of 4, .*; got \(2, 4\)"),
    "bias": (
        ContextParallel(),
        OPTIONS["bias"],
        operands(),
        "post_scale_bias .* take 'all_gather' or 'a2a'",
    ),
    "mask": (way("a2a+p2p", 4), OPTIONS["mask"], operands(), "the mask .* take 'all_gather' or 'a2a'"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_what_cannot_be_split_is_refused(case: str) -> None:
    context_parallel, arguments, qkv, message = BAD[case]
    with jax.set_mesh(context_mesh(context=4, tensor=2)), pytest.raises(ValueError, match=message):
        dot_product_attention(qkv, **arguments, out_axes=AXES, context_parallel=context_parallel)


@pytest.mark.costly
def test_a_way_without_axes_is_refused() -> None:
    """It would be computed as one device's, tokens in zig-zag order taken for those in natural order."""
    zigzag = ContextParallel(cp_load_balanced=True)
    with jax.set_mesh(context_mesh(context=4, tensor=2)):
        with pytest.raises(ValueError, match=r"has 4 .*, and out_axes=None .* give out_axes"):
            dot_product_attention(operands(), mask_type="causal", context_parallel=zigzag)
        dot_product_attention(operands(), mask_type="causal")
    with jax.set_mesh(context_mesh(context=1, tensor=2)):
        dot_product_attention(operands(), mask_type="causal", context_parallel=zigzag)


def test_bad_ways() -> None:
    ring: Any = "ring"
    with without_type_checker(), pytest.raises(ValueError, match=r"cp_comm_type must be one of 'p2p', .*, got 'ring'"):
        ContextParallel(cp_comm_type=ring)
    sizes: Any = (2, 0)
    with without_type_checker(), pytest.raises(ValueError, match=r"must be \(a2a ranks, p2p ranks\), .* got \(2, 0\)"):
        ContextParallel(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=sizes)


class Diagonals:
    """A backend with masks along diagonals only, like cuDNN, given no positions; garbage where cuDNN may leave some."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.ran = 0

    def explain(self, op: str, *, attention: Any, backend: Any, unsharded: Any) -> BackendChoice:
        del backend
        if unsharded is not None:
            raise BackendUnavailableError(unsharded)
        self.asked.append(attention)
        return BackendChoice(op, "te", "asked for")

    def select(self, *arguments: Any, **options: Any) -> str:
        return self.explain(*arguments, **options).backend

    def attention_forward(self, qkv: Any, spec: Any, arrays: Any) -> Any:
        assert arrays.q_positions is None
        assert arrays.kv_positions is None
        sizes = (spec.batch, spec.q_length, spec.kv_length, spec.heads, spec.groups, spec.head_dim, spec.v_head_dim)
        assert shape_of(qkv) == sizes
        assert spec in self.asked, "what runs was asked for"
        self.ran += 1
        return xla.attention_forward(qkv, spec, arrays)

    def attention_backward(self, qkv: Any, spec: Any, arrays: Any, *rest: Any) -> Any:
        assert spec in self.asked
        gradients, *others = xla.attention_backward(qkv, spec, arrays, *rest)
        if spec.mask_type == "padding_causal_bottom_right" and arrays.segments is None:
            unread = (jnp.arange(spec.kv_length)[None] >= arrays.kv_lengths[:, None])[..., None, None]
            gradients = (gradients[0], *(jnp.where(unread, jnp.full_like(x, 7.0), x) for x in gradients[1:]))
        return (gradients, *others)


@pytest.fixture
def diagonals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Diagonals]:
    backend = Diagonals()
    monkeypatch.setattr(checks, "explain_backend", backend.explain)
    monkeypatch.setattr(block, "primitives", lambda name: {"te": backend, "xla": xla}[name])
    # Calls are resolved once for each set of rules: no other test has these, whose new axis no array here has.
    with use_rules(ShardingRules(vocab=(uuid4().hex,))):
        yield backend


ON_DIAGONALS = [
    *((kind, "causal") for kind in WAYS),
    *((kind, name) for kind in ("p2p", "all_gather") for name in ("no_mask", "learnable", "max logits")),
    *(("all_gather", name) for name in ("window", "lengths", "lengths, causal", "lengths, bottom right")),
    *(("all_gather", name) for name in ("packed", "packed, causal, window")),
    ("a2a", "bias"),
]


@pytest.mark.costly(
    "a2a-bias",
    slow=(
        "all_gather-packed, causal, window",
        "all_gather-lengths, bottom right",
        "all_gather-window",
        "p2p-max logits",
        "a2a+p2p-causal",
        "all_gather-learnable",
        "p2p-causal",
        "all_gather-causal",
    ),
)
@pytest.mark.wide(
    "p2p-causal",
    "p2p-no_mask",
    "p2p-max logits",
    "all_gather-causal",
    "all_gather-learnable",
    "all_gather-window",
    "all_gather-lengths, bottom right",
    "all_gather-packed, causal, window",
    "a2a-bias",
    "a2a+p2p-causal",
)
@pytest.mark.parametrize(("kind", "option"), ON_DIAGONALS)
def test_cudnn_is_handed_parts_along_diagonals(diagonals: Diagonals, kind: str, option: str) -> None:
    arguments = OPTIONS.get(option, {"mask_type": option})
    ranks = 4 if option == "causal" or kind == "a2a+p2p" else 2
    compare(context_mesh(context=ranks), way(kind, ranks, zigzag=True), arguments, operands(4))
    assert diagonals.ran > 0


@pytest.mark.costly
def test_cudnn_in_natural_order(diagonals: Diagonals) -> None:
    for kind in ("p2p", "all_gather"):
        compare(context_mesh(context=2), way(kind, 2), {"mask_type": "causal"})
    assert diagonals.ran > 0


@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right"])
def test_cudnn_is_handed_no_fewer_keys_than_queries(diagonals: Diagonals, mask_type: Any) -> None:
    """The first devices' queries would attend to none."""
    qkv, gather = operands(skv=S // 2), way("all_gather", 4)
    with (
        jax.set_mesh(context_mesh(context=4)),
        pytest.raises(BackendUnavailableError, match="no more queries than keys"),
    ):
        dot_product_attention(qkv, mask_type=mask_type, out_axes=AXES, context_parallel=gather)
    assert not diagonals.ran


@pytest.mark.parametrize(
    ("kind", "arguments", "reason"),
    [
        ("p2p", OPTIONS["window"], "sees all, half or none of another device's keys"),
        ("p2p", OPTIONS["packed"], r"without windows, lengths, packed sequences .*'all_gather' and 'a2a' have more"),
        ("a2a+p2p", OPTIONS["lengths"], r"\('padding' here\)"),
        ("all_gather", OPTIONS["bias"], "'all_gather' has no bias; 'a2a' has"),
        ("all_gather", OPTIONS["window on both sides"], "windows under causal masks only"),
        (
            "all_gather",
            {"mask_type": "padding_causal", "q_lengths": LENGTHS, "kv_lengths": LENGTHS + 0},
            "where their lengths may differ 'a2a'",
        ),
    ],
)
def test_what_cudnn_cannot_be_handed(diagonals: Diagonals, kind: str, arguments: dict[str, Any], reason: str) -> None:
    with jax.set_mesh(context_mesh(context=4)), pytest.raises(BackendUnavailableError, match=reason):
        dot_product_attention(operands(), **arguments, out_axes=AXES, context_parallel=way(kind, 4))
    assert not diagonals.ran


def test_the_backend_that_is_not_there_is_refused_by_name() -> None:
    with jax.set_mesh(context_mesh(context=2)), pytest.raises(BackendUnavailableError, match="backend 'te' cannot run"):
        dot_product_attention(operands(), out_axes=AXES, backend="te")


def test_a_call_is_resolved_under_the_rules_in_use() -> None:
    """The same call twice under each: none takes what was resolved under the other."""
    qkv = (jnp.ones((1, 8, 2, 8)),) * 3

    def exchanges() -> bool:
        return "ppermute" in str(jax.make_jaxpr(lambda qkv: dot_product_attention(qkv, out_axes=AXES))(qkv))

    found = []
    with jax.set_mesh(make_mesh(ParallelConfig(context=2), devices=jax.devices()[:2])):
        for _ in range(2):
            found.append(exchanges())
            with whole_sequences():
                found.append(exchanges())
    assert found == [True, False, True, False]
