"""A checkpoint that fills a state of another form: layout of layers, dtypes, recipes, adapters, meshes."""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te import DelayedScaling, ParallelConfig, autocast, make_mesh
from jax_te.checkpoint import TrainCheckpointer
from jax_te.checkpoint.convert import Conversions
from jax_te.config import RouterOptions
from jax_te.errors import CheckpointMismatchError
from jax_te.layers import GroupedLinear, LoRA, MoE, MultiheadAttention
from jax_te.ops import quantize_kernel
from jax_te.quantize import QuantizedKernel
from jax_te.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from jax_te.training import abstract_train_state, create_train_state
from tests.support.numerics import assert_bitwise
from tests.support.toy import assert_same, values

TX = optax.adam(0.1)
CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=4)
LAYERS, WIDTH, HEADS, GROUPS = 2, 32, 4, 2


class Model(nnx.Module):
    """Attention layers alone, each for itself or stacked, with one projection or three, and adapters or none."""

    def __init__(self, rngs, *, stacked=False, fused=True, lora=False, dtype="float32"):
        def layer(rngs):
            options = {"fuse_qkv_params": fused, "input_layernorm": True, "params_dtype": dtype}
            made = MultiheadAttention(WIDTH, HEADS, attention_dropout=0.0, num_gqa_groups=GROUPS, **options, rngs=rngs)
            if lora:
                made.qkv = LoRA(made.qkv, 2, rngs=rngs)
            return made

        many = nnx.split_rngs(splits=LAYERS)(nnx.vmap(layer))
        self.layers = many(rngs) if stacked else nnx.List([layer(rngs) for _ in range(LAYERS)])


def build(**form):
    return lambda rngs: Model(rngs, **form)


@functools.cache
def state_of(recipe=None, fp8_param=False, **form):
    """A train state whose masters, norms, biases and moments are random, so that no two arrays are the same."""
    with autocast(recipe):
        state = create_train_state(build(**form), TX, key=jax.random.key(1), fp8_param=fp8_param)
    draw = np.random.default_rng(0)

    def random(leaf):
        new = draw.normal(size=leaf.shape).astype(np.float32)
        return jnp.asarray(new).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    parts = {name: jax.tree.map(random, getattr(state, name)) for name in ("quantizers", "opt_state")}
    params = {} if fp8_param else {"params": jax.tree.map(random, state.params)}
    return replace(state, **parts, **params)


def wanted(recipe=None, fp8_param=False, **form):
    with autocast(recipe):
        return abstract_train_state(build(**form), TX, fp8_param=fp8_param)


def move(folder, state, target, recipe=None, **options):
    """Save one state and restore the other."""
    with autocast(recipe), TrainCheckpointer(folder) as checkpointer:
        checkpointer.save(state, {"at": 1}, 1)
        restored, data, _ = checkpointer.restore(target, **options)
    assert data == {"at": 1}
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(restored)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(target)
    ]
    return restored


def refused(folder, state, target, recipe=None, **options):
    """Return what a restore that must not work says."""
    with autocast(recipe), TrainCheckpointer(folder) as checkpointer:
        checkpointer.save(state, None, 1)
        with pytest.raises(CheckpointMismatchError) as caught:
            checkpointer.restore(target, **options)
    return str(caught.value)


def by_layer(tree):
    """Each layer's arrays under the names of separate projections, by NumPy alone."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.as_pure(tree)):
        name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if "layers" not in name:
            found["/".join(name)] = np.asarray(leaf)
            continue
        at = name.index("layers") + 1
        stacked = not name[at].isdecimal()
        rest = name[at:] if stacked else name[at + 1 :]
        for i, value in enumerate(np.asarray(leaf)) if stacked else [(int(name[at]), np.asarray(leaf))]:
            key = f"{'/'.join(name[:at])}/{i}"
            if rest == ["qkv", "scale"] or rest == ["qkv", "ln_bias"]:
                found[f"{key}/layernorm/{rest[1].removeprefix('ln_')}"] = value
            elif rest[0] == "qkv":
                for part, piece in {"query": slice(0, -2), "key": -2, "value": -1}.items():
                    found[f"{key}/{part}/{rest[1]}"] = value[..., piece, :]
            else:
                found[f"{key}/{'/'.join(rest)}"] = value
    return found


def assert_same_layers(one, other):
    one, other = by_layer(one), by_layer(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert value.tobytes() == other[name].tobytes(), name


def arrays_of(state):
    return {name: getattr(state, name) for name in ("params", "masters", "opt_state", "step", "skipped_steps")}


FORMS = {f"{s} {f}": {"stacked": s == "stacked", "fused": f == "fused"}
         for s in ("unrolled", "stacked") for f in ("fused", "separate")}  # fmt: skip


@pytest.mark.costly(slow=("unrolled fused-stacked separate",))
@pytest.mark.wide("unrolled fused-stacked separate", "unrolled separate-stacked fused")
@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("source", FORMS)
def test_layers_stacked_or_not_and_projections_fused_or_not(tmp_path, source, target):
    """Parameters and moments are the same values in other places, and come back to where they were."""
    state = state_of(**FORMS[source])
    there = move(tmp_path / "there", state, wanted(**FORMS[target]))
    assert_same_layers(arrays_of(there), arrays_of(state))
    back = move(tmp_path / "back", there, wanted(**FORMS[source]))
    assert_same(arrays_of(back), arrays_of(state))


@pytest.mark.costly
def test_a_stack_of_other_layers_is_refused(tmp_path, monkeypatch):
    state = state_of(stacked=True)
    monkeypatch.setattr("tests.checkpoint.test_convert.LAYERS", 1)
    text = refused(tmp_path, state, wanted())
    assert "unexpected: opt_state/0/mu/layers/proj/bias is float32[2, 32] there, absent here" in text
    monkeypatch.setattr("tests.checkpoint.test_convert.LAYERS", 3)
    text = refused(tmp_path / "more", state, wanted())
    assert "missing: opt_state/0/mu/layers/2/proj/bias is absent there" in text


@pytest.mark.costly
def test_dtypes_of_parameters_whose_masters_hold_the_values(tmp_path):
    exact = state_of()
    half = move(tmp_path / "half", exact, wanted(dtype="bfloat16"))
    assert_same(values(half.masters), values(exact.params))
    assert_same(values(half.params), values(jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact.params)))
    # Masters that say more than their parameters.
    half = replace(half, masters=jax.tree.map(lambda x: x * 1.001, half.masters))
    back = move(tmp_path / "back", half, wanted(stacked=True))
    assert_same_layers(back.params, half.masters)
    other = move(tmp_path / "other", half, wanted(dtype="float16"))
    assert_same(values(other.params), values(jax.tree.map(lambda x: x.astype(jnp.float16), half.masters)))


@pytest.mark.costly
def test_parameters_quantized_or_not(tmp_path, caplog):
    """With masters that are not what the parameters were quantized from, so that it shows which are read."""
    stored = state_of(CURRENT, fp8_param=True)
    stored = replace(stored, masters=jax.tree.map(lambda x: x * 1.25, stored.masters))
    exact = move(tmp_path / "exact", stored, wanted())
    flat = dict(nnx.to_flat_state(exact.params))
    for path, master in nnx.to_flat_state(stored.masters):
        assert_same(flat[path].get_value(), master.get_value())
    target = wanted(CURRENT, fp8_param=True, dtype="bfloat16")
    assert 'allow={"requantize"}: kernels quantized by the recipe here' in refused(tmp_path / "no", exact, target)
    caplog.set_level(logging.INFO, "jax_te")
    again = move(tmp_path / "again", exact, target, CURRENT, allow={"requantize"})
    assert "kernels quantized: 4 arrays, first params/layers/0/" in caplog.messages[-1]
    for path, master in nnx.to_flat_state(again.masters):
        kernel = dict(nnx.to_flat_state(again.params))[path].get_value()
        assert_same(master.get_value(), flat[path].get_value())
        if isinstance(kernel, QuantizedKernel):
            expected = quantize_kernel(master.get_value(), recipe=CURRENT, portable=True)
            assert_same(jax.tree.leaves(kernel), jax.tree.leaves(expected))
            assert kernel.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"is stored as .*; work under the recipe that the state was created with"):
        move(tmp_path / "other", exact, target, MXFP8BlockScaling(), allow={"requantize"})


@pytest.mark.slow
@pytest.mark.wide("explicit-block")
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, Float8BlockScaling()], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_kernels_quantized_on_a_mesh_have_the_bits_of_one_device(tmp_path, mode, recipe):
    allow = {"requantize", "quantizers"}
    state = state_of(stacked=True, fused=False)
    alone = move(tmp_path / "alone", state, wanted(recipe, fp8_param=True), recipe, allow=allow)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2), axis_type=mode)):
        target = wanted(recipe, fp8_param=True)
        split = move(tmp_path / mode, state, target, recipe, allow=allow)
    assert [x.sharding for x in jax.tree.leaves(split)] == [x.sharding for x in jax.tree.leaves(target)]
    assert_same(values(split), values(alone))


RECIPES = [CURRENT, Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]


@pytest.mark.costly(slow=("nvfp4",))
@pytest.mark.wide("current", "nvfp4")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_quantized_kernels_without_masters(tmp_path, recipe):
    stored = state_of(recipe, fp8_param=True, stacked=recipe is CURRENT)
    alone = {"params": stored.params}
    target = {"params": wanted().params}
    assert 'allow={"dequantize"}' in refused(tmp_path / "no", alone, target)
    exact = move(tmp_path, alone, target, allow={"dequantize"})["params"]
    expected = jax.tree.map(
        lambda x: x.dequantize() if isinstance(x, QuantizedKernel) else x,
        nnx.as_pure(stored.params),
        is_leaf=lambda node: isinstance(node, QuantizedKernel),
    )
    assert_same_layers(nnx.as_pure(exact), expected)


@pytest.mark.costly("current-True", slow=("nvfp4-True", "block-True", "nvfp4-False", "block-False"))
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("recipe", [CURRENT, Float8BlockScaling(), NVFP4BlockScaling()], ids=lambda recipe: recipe.name)
def test_quantized_kernels_of_experts_without_masters(tmp_path, recipe, stacked):
    """Each has scales of its own, in a stack of layers, too, whose two axes are no blocks."""

    def experts(rngs):
        return GroupedLinear(3, 32, (2, 16), rngs=rngs)

    make = nnx.split_rngs(splits=2)(nnx.vmap(experts)) if stacked else experts
    with autocast(recipe):
        stored = create_train_state(make, TX, key=jax.random.key(1), fp8_param=True)
    target = {"params": abstract_train_state(make, TX).params}
    exact = move(tmp_path, {"params": stored.params}, target, allow={"dequantize"})["params"]
    np.testing.assert_array_equal(exact["kernel"][...], stored.params["kernel"].get_value().dequantize())


@pytest.mark.slow
def test_delayed_scaling_begun_left_out_and_of_another_length(tmp_path):
    plain, delayed = state_of(), state_of(DELAYED)
    assert 'allow={"quantizers"}' in refused(tmp_path / "1", plain, wanted(DELAYED))
    begun = move(tmp_path / "2", plain, wanted(DELAYED), allow={"quantizers"})
    for path, state in nnx.to_flat_state(begun.quantizers):
        assert np.all(np.asarray(state.get_value()) == (1.0 if path[-1] == "scale" else 0.0))
    assert 'allow={"quantizers"}' in refused(tmp_path / "3", delayed, wanted())
    assert_same(arrays_of(move(tmp_path / "4", delayed, wanted(), allow={"quantizers"})), arrays_of(delayed))
    for length in (2, 6):
        target = wanted(DelayedScaling(amax_history_len=length))
        assert 'allow={"quantizers"}' in refused(tmp_path / f"no {length}", delayed, target)
        other = dict(
            nnx.to_flat_state(move(tmp_path / f"of {length}", delayed, target, allow={"quantizers"}).quantizers)
        )
        for path, state in nnx.to_flat_state(delayed.quantizers):
            value, found = np.asarray(state.get_value()), np.asarray(other[path].get_value())
            expected = value if path[-1] == "scale" else np.concatenate([value, np.zeros(9, np.float32)])[:length]
            assert found.tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.costly
def test_adapters(tmp_path):
    """A base into an adapted model and back, and adapters alone."""
    base, adapted = state_of(), state_of(lora=True)
    text = refused(tmp_path / "no", base, adapted)
    assert "12 missing" in text
    assert 'allow={"missing"}' in text
    assert "missing" in refused(tmp_path / "abstract", base, wanted(lora=True), allow={"missing"})
    both = move(tmp_path / "both", base, adapted, allow={"missing"})
    lora = nnx.state(adapted.model, nnx.LoRAParam)
    assert_same(nnx.state(both.model, nnx.LoRAParam), lora)
    assert_same(both.params["layers"][0]["qkv"]["base"], base.params["layers"][0]["qkv"])
    assert "unexpected" in refused(tmp_path / "adapters", adapted, wanted())
    assert_same(arrays_of(move(tmp_path / "back", both, wanted(), allow={"unexpected"})), arrays_of(base))
    with TrainCheckpointer(tmp_path / "alone") as checkpointer:
        checkpointer.save({"params": lora}, None, 1)
        assert_same(checkpointer.restore_parameters(lora)[0], lora)
    assert not any(x is y for x, y in zip(jax.tree.leaves(both), jax.tree.leaves(adapted), strict=True))


def test_nothing_is_cast_silently(tmp_path):
    state = {"params": {"w": jnp.linspace(0.0, 1.0, 8)}, "n": jnp.arange(3)}
    target = {"params": {"w": jax.ShapeDtypeStruct((8,), jnp.bfloat16)}, "n": jax.ShapeDtypeStruct((3,), jnp.int32)}
    assert 'allow={"cast"}: values rounded to another dtype' in refused(tmp_path / "no", state, target)
    cast = move(tmp_path, state, target, allow={"cast"})
    assert_same(cast, {"params": {"w": state["params"]["w"].astype(jnp.bfloat16)}, "n": state["n"]})
    for dtype in ("int16", "float32"):
        target["n"] = jax.ShapeDtypeStruct((3,), dtype)
        text = refused(tmp_path / dtype, state, target, allow={"cast"})
        assert f"n is int32[3] there, {dtype}[3] here" in text
    # Masters say more than half-precision parameters, and would be gone.
    stored = {"params": state["params"], "masters": {"w": state["params"]["w"] / 3.0}}
    stored["params"] = {"w": state["params"]["w"].astype(jnp.float16)}
    target = {"params": {"w": jax.ShapeDtypeStruct((8,), jnp.bfloat16)}}
    assert 'allow={"cast"}' in refused(tmp_path / "masters", stored, target)
    cast = move(tmp_path / "cast", stored, target, allow={"cast"})
    assert_same(cast, {"params": {"w": stored["masters"]["w"].astype(jnp.bfloat16)}})


def test_all_kinds_of_differences_are_listed(tmp_path):
    def arrays(**shapes):
        return {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}

    many = {f"m{i}": ((1,), "float32") for i in range(10)}
    text = refused(
        tmp_path,
        arrays(a=((2,), "float32"), b=((2,), "float32"), **many),
        arrays(a=((3,), "float32"), b=((2,), "int32"), c=((), "int32")),
    )
    for part in (
        "is not one of this state: 1 missing: c is absent there, int32[] here. 10 unexpected: m0 is float32[1] there, ",
        "m7 is float32[1] there, absent here; and 2 more. 1 of another shape: a is float32[2] there, float32[3] here. ",
        "1 of another dtype: b is float32[2] there, int32[2] here. Use the configuration it was saved with, or ",
        '; or give allow={"missing"}: arrays that the checkpoint lacks',
        '; or give allow={"unexpected"}: arrays that the state lacks, left out',
    ):
        assert part in text


MESHES = {
    "data": ParallelConfig(data=8),
    "fsdp": ParallelConfig(fsdp=8),
    "context": ParallelConfig(context=8),
    "tensor": ParallelConfig(tensor=2, data=4),
    "all": ParallelConfig(data=2, fsdp=2, tensor=2),
}
HALVES = {
    "data": ParallelConfig(data=4),
    "fsdp": ParallelConfig(fsdp=4),
    "context": ParallelConfig(context=4),
    "tensor": ParallelConfig(data=2, tensor=2),
    "all": ParallelConfig(fsdp=2, tensor=2),
}


@pytest.mark.costly(slow=["context-auto-same form"])
@pytest.mark.wide("context-auto-same form", "all-explicit-another form")
@pytest.mark.parametrize("form", [{}, {"stacked": True, "fused": False}], ids=["same form", "another form"])
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("axis", MESHES)
def test_from_8_devices_to_4_to_1_and_back(tmp_path, axis, mode, form):
    original = state_of()
    path = [(MESHES[axis], {}), (HALVES[axis], form), (None, {}), (MESHES[axis], form)]
    state = original
    for step, (sizes, each) in enumerate(path):
        mesh = None if sizes is None else make_mesh(sizes, axis_type=mode)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            target = wanted(**each)
            state = move(tmp_path / str(step), state, target)
        assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(target)]
        assert_same_layers(arrays_of(state), arrays_of(original))


def test_states_of_routers_begin_anew_as_new_ones_do(tmp_path):
    """Scales begin with 1; biases and counts of experts with 0."""

    def routed(**options):
        return lambda rngs: MoE(8, 8, RouterOptions(num_experts=4, **options), rngs=rngs)

    more = {"score_function": "sigmoid", "enable_expert_bias": True}
    more |= {"load_balancing_type": "global_aux_loss", "aux_loss_coeff": 0.1}
    plain = create_train_state(routed(), TX, key=jax.random.key(1))
    begun = move(tmp_path, plain, abstract_train_state(routed(**more), TX), allow={"quantizers"})
    fresh = create_train_state(routed(**more), TX, key=jax.random.key(1))
    found, expected = (dict(nnx.to_flat_state(each.quantizers)) for each in (begun, fresh))
    assert found.keys() == expected.keys()
    for path, state in expected.items():
        assert_bitwise(found[path].get_value(), state.get_value(), what=str(path))


class Counted(dict):
    """A dict that counts the names looked up in it."""

    looked_up = 0

    def __contains__(self, name):
        self.looked_up += 1
        return super().__contains__(name)


@pytest.mark.parametrize("depth", [3, 12])
def test_names_that_are_not_found_cost_little(depth):
    """Also beside an adapter's base and numbered layers, which could stand in each place of a name."""
    inner = "/".join("abcdefghijkl"[:depth])
    saved = Counted({f"params/layers/{i}/{inner}/kernel": ("float32", (4, 4)) for i in range(2)})
    saved["params/adapted/base/kernel"] = ("float32", (4, 4))
    wanted = {f"params/others/{i}/{inner}/kernel": ("float32", (4, 4)) for i in range(9)}
    wanted |= {f"params/layers/{i}/{inner}/kernel": ("float32", (3, 3)) for i in range(9)}
    conversions = Conversions(saved, wanted)
    found = [conversions.find(tuple(name.split("/")), record) for name, record in wanted.items()]
    assert found == [None] * len(wanted)
    # A few for each name, however many parts it has.
    assert saved.looked_up < 20 * len(wanted)


@pytest.mark.parametrize(
    ("saved", "new"),
    [
        ("base/proj/kernel", "proj/kernel"),  # beside a module that is called base, which no adapter has
        ("proj/kernel", "base/proj/kernel"),
        ("layers/kernel", "layers/0/kernel"),
    ],
)
def test_an_array_that_the_state_has_itself_is_no_other_one(saved, new):
    shape = (4, 3, 3) if saved == "layers/kernel" else (3, 3)
    wanted = {f"params/{saved}": ("float32", shape), f"params/{new}": ("float32", (3, 3))}
    name = ("params", *new.split("/"))
    for state, is_found in (({f"params/{new}": wanted[f"params/{new}"]}, True), (wanted, False)):
        found = Conversions({f"params/{saved}": ("float32", shape)}, state).find(name, ("float32", (3, 3)))
        assert (found is not None) is is_found


def test_projections_without_a_fused_form_are_not_fused():
    saved = {f"params/{name}/bias": ("float32", (8,)) for name in ("query", "key", "value")}
    name, record = ("params", "qkv", "bias"), ("float32", (3, 8))
    assert Conversions(saved, {"/".join(name): record}).find(name, record) is None
