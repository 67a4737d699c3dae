"""Parameters are made where they belong: split over the mesh, and whole on no device."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.layers import LayerNormMLP, Linear
from jax_te.models import GPTModel
from jax_te.quantize import QuantizedKernel
from jax_te.recipe import Float8CurrentScaling, autocast
from jax_te.sharding import create_sharded, leaves_with_axes, make_mesh, shardings_of
from jax_te.training import create_train_state
from tests.support.numerics import assert_bitwise

CONFIG = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=8, ffn_hidden_size=64)
SMALLEST_KERNEL = 32 * 32


def gpt(rngs: Any = None) -> GPTModel:
    return GPTModel(CONFIG, vocab_size=64, max_sequence_length=8, rngs=rngs or nnx.Rngs(0))


def largest_array(compiled: Any) -> int:
    """Elements of the largest array anywhere in a device's program."""
    shapes = re.findall(r"\b[a-z]+\d+\w*\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.wide("sizes2-explicit")
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"tensor": 8}, {"fsdp": 2, "tensor": 4}])
def test_a_model_built_under_jit_is_whole_on_no_device(sizes: dict[str, int], axis_type: Any) -> None:
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes), axis_type=axis_type)):
        compiled = jax.jit(gpt).lower().compile()
        planned = shardings_of(jax.eval_shape(gpt), jax.sharding.get_mesh())
        made = jax.tree.leaves(compiled())
    assert largest_array(compiled) < SMALLEST_KERNEL
    memory, whole = compiled.memory_analysis(), sum(leaf.nbytes for leaf in made)
    assert memory.output_size_in_bytes < whole / 4  # an eighth of the kernels, and norms and biases whole
    for leaf, sharding in zip(made, planned, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"context": 8}])
def test_axes_that_split_activations_alone_have_the_parameters_on_every_device(sizes: dict[str, int]) -> None:
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))):
        model = jax.jit(lambda: LayerNormMLP(32, 64, rngs=nnx.Rngs(0)))()
    for leaf in jax.tree.leaves(model):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.sharding.device_set) == 8


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, pytest.param({"tensor": 8}, marks=pytest.mark.slow)])
def test_a_train_state_is_whole_on_no_device(sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    programs, jit = [], jax.jit

    def spy(fn: Any, **options: Any) -> Any:
        jitted = jit(fn, **options)
        if "out_shardings" not in options:
            return jitted

        def call(*args: Any) -> Any:
            programs.append(jitted.lower(*args).compile())
            return programs[-1](*args)

        return call

    mesh = make_mesh(ParallelConfig(**sizes))
    monkeypatch.setattr(jax, "jit", spy)
    state = create_train_state(gpt, optax.adamw(1e-3), key=jax.random.key(0), mesh=mesh)
    monkeypatch.undo()
    assert len(programs) == 1
    assert largest_array(programs[0]) < SMALLEST_KERNEL
    kernel = state.params["embedding"]["embedding"].get_value()
    assert kernel.sharding.spec == (P(None, "fsdp") if "fsdp" in sizes else P("tensor", None))


@pytest.mark.slow
def test_without_jit_values_and_places_are_the_same() -> None:
    def mlp() -> LayerNormMLP:
        return LayerNormMLP(32, 64, rngs=nnx.Rngs(0))

    alone = jax.tree.leaves(mlp())
    for axis_type in ("auto", "explicit"):
        with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, context=2, tensor=2), axis_type=axis_type)):
            model = mlp()
            planned = shardings_of(model, jax.sharding.get_mesh())
        for leaf, value, sharding in zip(jax.tree.leaves(model), alone, planned, strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            assert_bitwise(np.asarray(leaf), np.asarray(value))


def test_a_size_that_does_not_divide_is_named() -> None:
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=8))):
        message = r"a parameter of shape \(16, 12\): dimension 1 \('ffn'\) does not divide over mesh axes tensor = 8"
        with pytest.raises(ValueError, match=message):
            Linear(16, 12, parallel_mode="column", rngs=nnx.Rngs(0))
        Linear(16, 12, rngs=nnx.Rngs(0))


def test_axes_of_leaves() -> None:
    with autocast(Float8CurrentScaling()):
        layer = Linear(16, 32, parallel_mode="column", rngs=nnx.Rngs(0))
        layer.kernel.set_value(layer.stored_form("kernel"))
    assert isinstance(layer.kernel.get_value(), QuantizedKernel)
    found = leaves_with_axes({"layer": layer, "step": jnp.zeros(())})
    assert [leaf.shape for _, leaf, _ in found] == [
        leaf.shape for leaf in jax.tree.leaves({"layer": layer, "step": 0})[:-1]
    ] + [()]
    axes = {name: axes for name, _, axes in found}
    assert axes["layer/bias"] == ("ffn",)
    assert axes["step"] == ()
    kernel = [(leaf.shape, axes) for name, leaf, axes in found if name.startswith("layer/kernel")]
    assert ((16, 32), ("fsdp", "ffn")) in kernel
    assert all(axes == (None,) * len(shape) for shape, axes in kernel if shape != (16, 32))


def test_create_on_a_mesh_of_mixed_axis_types() -> None:
    types = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=types)
    with jax.set_mesh(mesh):
        key = jax.random.key(0)
        made = jax.jit(
            lambda key: create_sharded(
                lambda key: jax.random.normal(key, (8, 8)), key, shape=(8, 8), axes=("fsdp", "ffn")
            )
        )
        assert made(key).sharding.is_equivalent_to(jax.NamedSharding(mesh, P("fsdp", "tensor")), 2)
        assert jax.typeof(made(key)).sharding.spec[0] == "fsdp"
