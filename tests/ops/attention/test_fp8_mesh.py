"""FP8 attention on meshes: the numbers of one device, and FP8 codes between devices."""

from __future__ import annotations

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
from tests.support.context import AXES, context_mesh, host
from tests.support.numerics import assert_bitwise, assert_close, draw, quick_jit, relative_l2, with_vjp

B, S, N, D = 4, 256, 4, 128
RECIPES = {
    "delayed": DelayedScaling(fp8_dpa=True, amax_history_len=2),
    "whole": Float8CurrentScaling(fp8_dpa=True, amax_scope="whole"),
    "group": Float8CurrentScaling(fp8_dpa=True),
    "forward": DelayedScaling(fp8_dpa=True, amax_history_len=2, fp8_dpa_bwd=False),
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


@pytest.mark.costly("auto-whole", "auto-forward", "explicit-delayed", "explicit-whole", "explicit-forward")
@pytest.mark.parametrize("name", ["delayed", "whole", "forward"])
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
    assert_bitwise(host(there), out)
    if name == "forward":  # sums of fp32 in another order
        jax.tree.map(lambda a, b: assert_close(host(a), b, 2.0**-18), split, gradients)
    else:
        jax.tree.map(lambda a, b: assert_bitwise(host(a), b), split, gradients)
    jax.tree.map(lambda a, b: assert_bitwise(host(a), b), next_state, after)


def test_a_scale_of_each_device():
    """``amax_scope="group"``: each device's examples have the numbers that they have alone; the state is of all."""
    recipe, (qkv, do) = RECIPES["group"], arrays()
    state = state_of(recipe)
    mesh = context_mesh(data=4, context=1)
    with jax.set_mesh(mesh):
        given = jax.device_put((qkv, do), named_sharding(AXES, mesh))
        there, (split, after) = run(recipe, given[0], state, given[1], out_axes=AXES)
    amaxes = []
    for i in range(B):
        out, (gradients, alone) = run(recipe, tuple(x[i : i + 1] for x in qkv), state, do[i : i + 1])
        assert_bitwise(host(there)[i : i + 1], out)
        jax.tree.map(lambda a, b, i=i: assert_bitwise(host(a)[i : i + 1], b), split, gradients)
        amaxes.append(alone)
    jax.tree.map(lambda a, *each: assert_bitwise(host(a), np.max(each, axis=0)), after, *amaxes)


@pytest.mark.costly("zigzag-delayed", "zigzag-forward", "natural-whole", "zigzag-whole")
@pytest.mark.parametrize("name", ["delayed", "whole", "forward"])
@pytest.mark.parametrize("zigzag", [False, True], ids=["natural", "zigzag"])
def test_a_split_sequence(name, zigzag):
    """Keys are all-gathered as FP8 codes; their gradients are sums of what each device has quantized."""
    recipe, (qkv, do) = RECIPES[name], arrays()
    state = state_of(recipe)
    out, (gradients, after) = run(recipe, qkv, state, do)
    mesh = context_mesh(context=2, tensor=2)
    way = ContextParallel(cp_comm_type="all_gather", cp_load_balanced=zigzag)

    def there(x: Any) -> Any:
        return reorder_to_zigzag(x, 2, axis=1) if zigzag else x

    def back(x: Any) -> Any:
        return undo_zigzag(host(x), 2, axis=1) if zigzag else host(x)

    with jax.set_mesh(mesh):
        given = jax.device_put(jax.tree.map(there, (qkv, do)), named_sharding(AXES, mesh))
        options = {"out_axes": AXES, "context_parallel": way}
        result, ((dq, dk, dv), next_state) = run(recipe, given[0], state, given[1], **options)

        def forward(qkv: Any, state: Any) -> Any:
            return dot_product_attention(qkv, recipe=recipe, state=state, **options)

        text = jax.jit(forward).lower(given[0], state).as_text()
    assert_bitwise(back(result), out)
    gathered = [line for line in text.splitlines() if "all_gather" in line and "->" in line]
    assert gathered
    assert all("ui8" in line or "f8E4M3FN" in line for line in gathered), gathered
    if name == "forward":
        for actual, expected in zip((dq, dk, dv), gradients, strict=True):
            assert_close(back(actual), expected, 2.0**-18)
        return
    assert_bitwise(back(dq), gradients[0])
    # Each of the two summands of a key's gradient has been rounded to E4M3, in place of their sum.
    for actual, expected in zip((dk, dv), gradients[1:], strict=True):
        assert 0.0 < relative_l2(back(actual), expected) <= 2 * 2.0**-4 / 3**0.5
    for role in after:
        np.testing.assert_array_equal(host(next_state[role]["scale"]), after[role]["scale"])
        # An amax of summands may be smaller than that of sums, and at most as large as they are by themselves.
        shared = role not in ("dqkv", "dk", "dv")
        if shared:
            np.testing.assert_array_equal(host(next_state[role]["amax_history"]), after[role]["amax_history"])


@pytest.mark.parametrize("kind", ["p2p", "a2a"])
def test_other_exchanges_are_refused_by_name(kind):
    recipe, (qkv, _) = RECIPES["delayed"], arrays()
    way, mesh = ContextParallel(cp_comm_type=kind), context_mesh(context=2)
    with jax.set_mesh(mesh):
        given = jax.device_put(qkv, named_sharding(AXES, mesh))
        options = {"out_axes": AXES, "context_parallel": way}
        with pytest.raises(BackendUnavailableError, match=f"cp_comm_type '{kind}' exchanges keys and values in the"):
            dot_product_attention(given, recipe=recipe, state=state_of(recipe), backend="xla", **options)
        plain = jax.jit(lambda qkv: dot_product_attention(qkv, **options))(given)
        chosen = jax.jit(lambda qkv: dot_product_attention(qkv, recipe=recipe, state=state_of(recipe), **options))(
            given
        )
    assert_bitwise(host(chosen), host(plain))


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
