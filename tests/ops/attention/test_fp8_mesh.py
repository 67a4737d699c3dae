"""FP8 attention on meshes: the numbers of one device, and FP8 codes between devices."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.errors import BackendUnavailableError
from jax_te.ops import ContextParallel, dot_product_attention, reorder_to_zigzag, undo_zigzag
from jax_te.quantize import init_attention_state
from jax_te.recipe import DelayedScaling, Float8CurrentScaling
from jax_te.sharding import named_sharding
from tests.support.context import AXES, barriers_hold, context_mesh, host
from tests.support.numerics import assert_bitwise, assert_close, draw, quick_jit, relative_l2, with_vjp

B, S, N, D = 4, 256, 4, 128
RECIPES = {
    "delayed": DelayedScaling(fp8_dpa=True, amax_history_len=2),
    "whole": Float8CurrentScaling(fp8_dpa=True, amax_scope="whole"),
    "group": Float8CurrentScaling(fp8_dpa=True),
    "forward": DelayedScaling(fp8_dpa=True, amax_history_len=2, fp8_dpa_bwd=False),
    "backward": DelayedScaling(fp8_dpa=True, amax_history_len=2, fp8_dpa_fwd=False),
}


def arrays(groups: int = 2) -> tuple[Any, Any]:
    shapes = {"q": (B, S, N, D), "k": (B, S, groups, D), "v": (B, S, groups, D)}
    # Examples of different sizes, so that a scale of some of them is another one than that of all.
    sizes = jnp.array([1.0, 0.25, 2.0, 0.5]).reshape(B, 1, 1, 1)
    return tuple(draw(name, shape) * sizes for name, shape in shapes.items()), draw("do", (B, S, N, D), scale=1e-3)


def state_of(recipe: Any) -> Any:
    """State with scales that fit: histories of the sizes of `arrays`."""
    state = init_attention_state(recipe)
    amaxes = {"qkv": 8.0, "s": 1.0, "o": 8.0, "do": 4e-3, "dp": 1e-3, "dqkv": 1e-2, "dq": 1e-3, "dk": 1e-2, "dv": 1e-2}
    return None if state is None else {
        role: {**entry, "amax_history": entry["amax_history"].at[0].set(amaxes[role])} for role, entry in state.items()
    }  # fmt: skip


def run(recipe: Any, qkv: Any, state: Any, do: Any, **options: Any) -> tuple[Any, Any]:
    def attend(qkv: Any, state: Any) -> Any:
        return dot_product_attention(qkv, recipe=recipe, state=state, **options)

    return quick_jit(lambda qkv, state, do: with_vjp(attend, (qkv, state), do))(qkv, state, do)


def assert_one_pass_apart(out: Any, wanted: Any, gradients: Any, wanted_gradients: Any) -> None:
    """Equal but for sums of fp32 in another order, in forward, and codes that lie between two values in backward."""
    assert_close(out, wanted, 2.0**-18)
    for actual, expected in zip(gradients, wanted_gradients, strict=True):
        assert relative_l2(actual, expected) <= 0.02


@pytest.mark.costly(
    slow=(
        "auto-forward",
        "explicit-whole",
        "auto-whole",
        "explicit-forward",
        "explicit-backward",
        "auto-backward",
        "auto-delayed",
    )
)
@pytest.mark.parametrize("name", ["delayed", "whole", "forward", "backward"])
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_heads_and_examples_split(mode, name):
    """As on one device: scales are of the whole arrays, and so is the next state."""
    recipe, (qkv, do) = RECIPES[name], arrays()
    state = state_of(recipe)
    out, (gradients, after) = run(recipe, qkv, state, do)
    mesh = context_mesh(mode, data=2, context=1, tensor=2)
    with jax.set_mesh(mesh):
        place = named_sharding(AXES, mesh)
        given = jax.device_put((qkv, do), place)
        there, (split, next_state) = run(recipe, given[0], state, given[1], out_axes=AXES)
    if name == "backward":
        assert_one_pass_apart(host(there), out, jax.tree.map(host, split), gradients)
        return
    assert_bitwise(host(there), out)
    if name == "forward":  # sums of fp32 in another order
        jax.tree.map(lambda a, b: assert_close(host(a), b, 2.0**-18), split, gradients)
    else:
        jax.tree.map(lambda a, b: assert_bitwise(host(a), b), split, gradients)
    jax.tree.map(lambda a, b: assert_bitwise(host(a), b), next_state, after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "axis", "parts"), [({"data": 4}, 0, B), ({"tensor": 2}, 2, 2)], ids=["examples", "heads"]
)
def test_a_scale_of_each_device(sizes, axis, parts):
    """``amax_scope="group"``: a device's examples and heads have the numbers that they have alone.

    The state is of all.
    """
    recipe, (qkv, do) = RECIPES["group"], arrays()
    state = state_of(recipe)
    mesh = context_mesh(context=1, **sizes)
    with jax.set_mesh(mesh):
        given = jax.device_put((qkv, do), named_sharding(AXES, mesh))
        there, (together, after) = run(recipe, given[0], state, given[1], out_axes=AXES)
    found, alone = [], []
    for part in zip(*(np.split(host(x), parts, axis) for x in (*qkv, do)), strict=True):
        out, (gradients, next_state) = run(recipe, part[:3], state, part[3])
        found.append((out, gradients))
        alone.append(next_state)
    joined = jax.tree.map(lambda *each: np.concatenate(each, axis), *found)
    jax.tree.map(lambda a, b: assert_bitwise(host(a), b), (there, together), joined)
    jax.tree.map(lambda a, *each: assert_bitwise(host(a), np.max(each, axis=0)), after, *alone)


# Relative error, root mean square, of one rounding to E4M3, see test_fp8.py.
ROUNDING = 2.0**-4 / 3**0.5


def split(
    recipe: Any, way: ContextParallel, mesh: Any, qkv: Any, state: Any, do: Any, **options: Any
) -> tuple[Any, Any, Any]:
    """Output, gradients and next state of a call on a mesh, in natural order and on one device."""
    ranks, zigzag = mesh.shape["context"], way.cp_load_balanced

    def there(x: Any) -> Any:
        return reorder_to_zigzag(x, ranks, axis=1) if zigzag else x

    def back(x: Any) -> Any:
        return undo_zigzag(host(x), ranks, axis=1) if zigzag else host(x)

    with jax.set_mesh(mesh):
        given = jax.device_put(jax.tree.map(there, (qkv, do)), named_sharding(AXES, mesh))
        out, (gradients, after) = run(recipe, given[0], state, given[1], out_axes=AXES, context_parallel=way, **options)
    return back(out), jax.tree.map(back, gradients), jax.tree.map(host, after)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "whole", "forward", "backward"])
@pytest.mark.parametrize("zigzag", [False, True], ids=["natural", "zigzag"])
def test_a_split_sequence(name, zigzag):
    """Keys are all-gathered as FP8 codes; their gradients are sums of what each device has quantized."""
    recipe, (qkv, do) = RECIPES[name], arrays()
    state = state_of(recipe)
    out, (gradients, after) = run(recipe, qkv, state, do)
    way = ContextParallel(cp_comm_type="all_gather", cp_load_balanced=zigzag)
    result, (dq, dk, dv), next_state = split(recipe, way, context_mesh(context=2, tensor=2), qkv, state, do)
    if name == "backward":  # gradients of keys are sums of what the devices have rounded
        assert_close(result, out, 2.0**-18)
        assert relative_l2(dq, gradients[0]) <= 0.02
        assert max(relative_l2(*pair) for pair in zip((dk, dv), gradients[1:], strict=True)) <= 2 * ROUNDING
        return
    assert_bitwise(result, out)
    if name == "forward":
        for actual, expected in zip((dq, dk, dv), gradients, strict=True):
            assert_close(actual, expected, 2.0**-18)
        return
    assert_bitwise(dq, gradients[0])
    # Each of the two summands of a key's gradient has been rounded to E4M3, in place of their sum.
    for actual, expected in zip((dk, dv), gradients[1:], strict=True):
        assert 0.0 < relative_l2(actual, expected) <= 2 * ROUNDING
    for role in after:
        np.testing.assert_array_equal(next_state[role]["scale"], after[role]["scale"])
        # An amax of summands may be smaller than that of sums, and at most as large as they are by themselves.
        shared = role not in ("dqkv", "dk", "dv")
        if shared:
            np.testing.assert_array_equal(next_state[role]["amax_history"], after[role]["amax_history"])


@pytest.mark.costly(
    "zigzag-backward",
    slow=(
        "natural-forward",
        "zigzag-whole",
        "natural-whole",
        "zigzag-delayed",
        "zigzag-forward",
        "natural-backward",
        "natural-delayed",
    ),
)
@pytest.mark.parametrize("name", ["delayed", "whole", "forward", "backward"])
@pytest.mark.parametrize("zigzag", [False, True], ids=["natural", "zigzag"])
def test_a_sequence_exchanged_for_heads(name, zigzag):
    """All codes are those of one device, and so are outputs, gradients and the next state."""
    recipe, (qkv, do) = RECIPES[name], arrays(4)
    state = state_of(recipe)
    out, (gradients, after) = run(recipe, qkv, state, do)
    way = ContextParallel(cp_comm_type="a2a", cp_load_balanced=zigzag)
    result, actual, next_state = split(recipe, way, context_mesh(context=2, tensor=2), qkv, state, do)
    if name == "backward":
        assert_one_pass_apart(result, out, actual, gradients)
        return
    assert_bitwise(result, out)
    if name == "forward":  # sums of fp32 in another order
        jax.tree.map(lambda a, b: assert_close(a, b, 2.0**-18), actual, gradients)
    else:
        jax.tree.map(assert_bitwise, actual, gradients)
    jax.tree.map(assert_bitwise, next_state, after)


def long_arrays(s: int, groups: int) -> tuple[Any, Any]:
    shapes = {"q": (1, s, 2 * groups, D), "k": (1, s, groups, D), "v": (1, s, groups, D)}
    # A later part of the sequence is larger, so that a scale of one device's keys is another one than that of all.
    sizes = jnp.linspace(0.5, 2.0, s).reshape(1, s, 1, 1)
    q, k, v = (draw(name, shape) * sizes for name, shape in shapes.items())
    # Means that no device finds in its own part of the sequence.
    k, v = (x + sizes * draw("mean", (1, 1, groups, D)) for x in (k, v))
    return (q, k, v), draw("do", shapes["q"], scale=1e-3)


RINGS = {
    "natural": (ContextParallel(cp_comm_type="p2p"), 256, 2),
    "zigzag": (ContextParallel(cp_comm_type="p2p", cp_load_balanced=True), 512, 2),
    "four": (ContextParallel(cp_comm_type="p2p"), 512, 4),
    "groups": (ContextParallel(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2)), 256, 4),
}


@pytest.mark.costly(
    "groups-causal-group",
    slow=(
        "natural-causal-group",
        "zigzag-causal-forward",
        "four-no_mask-delayed",
        "natural-causal-delayed",
        "natural-causal-backward",
        "zigzag-causal-delayed",
    ),
)
@pytest.mark.parametrize(
    ("ring", "mask_type", "name"),
    [
        ("natural", "causal", "delayed"),
        ("natural", "causal", "group"),
        ("zigzag", "causal", "delayed"),
        ("zigzag", "causal", "forward"),
        ("natural", "causal", "backward"),
        ("four", "no_mask", "delayed"),
        ("groups", "causal", "group"),
    ],
)
def test_a_ring(ring, mask_type, name):
    """Each block has roundings of its own: of the softmax's result, of its output, of its gradients."""
    recipe, (way, s, ranks) = RECIPES[name], RINGS[ring]
    qkv, do = long_arrays(s, 2)
    state = state_of(recipe)
    out, (gradients, after) = run(recipe, qkv, state, do, mask_type=mask_type)
    mesh = context_mesh(context=ranks)
    result, actual, next_state = split(recipe, way, mesh, qkv, state, do, mask_type=mask_type)
    if name == "backward":  # gradients of keys are sums of what the devices have rounded
        assert_close(result, out, 2.0**-18)
        assert max(relative_l2(*pair) for pair in zip(actual, gradients, strict=True)) <= 2 * ROUNDING
        return
    # The codes of queries, keys and values are the same. One device has rounded the softmax's result and the output, a
    # ring both for each block, and the output again; independent roundings add up by their squares.
    assert 0.0 < relative_l2(result, out) <= 5**0.5 * ROUNDING
    # Both have rounded the results, of which a ring has summands; dp, of queries and keys; and read their outputs.
    bounds = [9**0.5 * ROUNDING] * 2 + [2**0.5 * ROUNDING]
    if name == "forward":
        bounds = [5**0.5 * ROUNDING] * 2 + [2.0**-18]  # they read the outputs, and nothing else is quantized
    for what, a, b, bound in zip(("dq", "dk", "dv"), actual, gradients, bounds, strict=True):
        assert relative_l2(a, b) <= bound, what
    assert after.keys() == next_state.keys()
    for role in after:
        np.testing.assert_array_equal(next_state[role]["scale"], after[role]["scale"], err_msg=role)
        newest, wanted = next_state[role]["amax_history"][0], after[role]["amax_history"][0]
        if role in ("qkv", "do"):
            np.testing.assert_array_equal(newest, wanted, err_msg=role)
        elif role in ("s", "o"):  # of fewer keys, of which one has a larger share
            assert wanted <= newest <= {"s": 1.0, "o": np.max(np.abs(qkv[2]))}[role] * (1 + 2.0**-4), role
        else:
            assert newest > 0.0, role


SENT = {  # between two devices, by dtype and kind: forward, the same again in backward, and gradients
    "all_gather": ({("u8", "all-gather"): 2}, {("u8", "all-gather"): 2}, {("f32", "reduce-scatter"): 2}),
    "p2p": ({("u8", "collective-permute"): 1}, {("u8", "collective-permute"): 1}, {("f32", "collective-permute"): 2}),
    "a2a": ({("u8", "all-to-all"): 4}, {}, {("u8", "all-to-all"): 4}),
}
COLLECTIVE = re.compile(r"= \(?(\w+)\[\S* .*?(all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


@pytest.mark.costly(slow=("p2p", "a2a"))
@pytest.mark.parametrize("kind", SENT)
def test_codes_travel(kind):
    """A byte for each key and value; gradients of keys are sums, which only an exchange for heads sends in FP8."""
    recipe, (qkv, do) = RECIPES["group"], long_arrays(256, 2)
    state = state_of(recipe)
    mesh = context_mesh(context=2)
    options = {"out_axes": AXES, "context_parallel": ContextParallel(cp_comm_type=kind)}
    with jax.set_mesh(mesh):
        given = jax.device_put((qkv, do), named_sharding(AXES, mesh))

        def forward(qkv: Any, state: Any) -> Any:
            return dot_product_attention(qkv, recipe=recipe, state=state, **options)

        def both(qkv: Any, state: Any, do: Any) -> Any:
            return with_vjp(forward, (qkv, state), do)

        programs = jax.jit(forward).lower(given[0], state), jax.jit(both).lower(given[0], state, given[1])
        found = [Counter(COLLECTIVE.findall(program.compile().as_text())) for program in programs]
    forward_only, again, gradients = (Counter(sent) for sent in SENT[kind])
    assert found[0] == forward_only
    assert found[1] == forward_only + again + gradients or (
        not barriers_hold() and found[1] == forward_only + gradients
    )


@pytest.mark.costly("chunk", slow=("length",))
@pytest.mark.parametrize(
    ("zigzag", "s", "skv", "words"),
    [
        pytest.param(False, 384, 384, "one block has 192 queries", id="length"),
        pytest.param(True, 256, 256, "one block has 64 keys", id="chunk"),
        pytest.param(False, 256, 512, "256 queries and 512 keys", id="keys"),
    ],
)
def test_rings_that_fp8_attention_lacks(zigzag, s, skv, words):
    recipe, way = RECIPES["group"], ContextParallel(cp_comm_type="p2p", cp_load_balanced=zigzag)
    qkv = draw("q", (1, s, 2, D)), draw("k", (1, skv, 2, D)), draw("v", (1, skv, 2, D))
    mesh = context_mesh(context=2)
    with jax.set_mesh(mesh):
        given = jax.device_put(qkv, named_sharding(AXES, mesh))
        options = {"out_axes": AXES, "context_parallel": way}
        with pytest.raises(BackendUnavailableError, match=words):
            dot_product_attention(given, recipe=recipe, state=state_of(recipe), backend="xla", **options)
        plain = jax.jit(lambda qkv: dot_product_attention(qkv, **options))(given)
        state = state_of(recipe)
        chosen = jax.jit(lambda qkv: dot_product_attention(qkv, recipe=recipe, state=state, **options))(given)
    assert_bitwise(host(chosen), host(plain))


@pytest.mark.slow
def test_a_batch_that_does_not_divide():
    """The compiler partitions plain JAX."""
    recipe, (qkv, do) = RECIPES["delayed"], arrays()
    qkv, do = jax.tree.map(lambda x: x[:3], (qkv, do))
    state = state_of(recipe)
    out, (gradients, after) = run(recipe, qkv, state, do)
    with jax.set_mesh(context_mesh(data=2, context=1)):
        there, (split, next_state) = run(recipe, qkv, state, do, out_axes=AXES)
    assert_bitwise(host(there), out)
    jax.tree.map(lambda a, b: assert_bitwise(host(a), b), (split, next_state), (gradients, after))


def test_parts_of_the_batch_have_one_scale():
    recipe = DelayedScaling(fp8_dpa=True, tp_only_amax_red=True)
    assert init_attention_state(recipe).keys() == {"qkv", "s", "o", "do", "dp", "dqkv"}
    with jax.set_mesh(context_mesh(data=2, context=1)), pytest.raises(ValueError, match="each of the mesh's 2 parts"):
        init_attention_state(recipe)
