"""A refused call leaves the model that it was given as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import ParallelConfig
from jax_te.layers import (
    GroupedLinear,
    GroupedLoRA,
    LayerNormMLP,
    Linear,
    LoRA,
    TransformerLayer,
    prepare_quantization,
    quantize_parameters,
)
from jax_te.recipe import DelayedScaling, autocast
from jax_te.sharding import make_mesh

BASES: dict[str, Callable[[], Any]] = {
    "Linear": lambda: Linear(16, 32, rngs=nnx.Rngs(0)),
    "LayerNormMLP": lambda: LayerNormMLP(16, 32, rngs=nnx.Rngs(0)),
    "GroupedLinear": lambda: GroupedLinear(2, 16, 32, rngs=nnx.Rngs(0)),
}


def second_is_wrong() -> Callable[..., Any]:
    """An initializer that is right once: the second kernel's adapter is refused after the first one's is made."""
    calls: list[Any] = []

    def init(key: Any, shape: Any, dtype: Any) -> Any:
        calls.append(shape)
        return jnp.ones(shape if len(calls) == 1 else (1,), dtype)

    return init


# One wrong value for each argument but the base and rngs.
WRONG: dict[str, Any] = {
    "rank": 0,
    "alpha": float("nan"),
    "freeze_base": "no",
    "init_method": lambda *_: jnp.ones(3),
    "params_dtype": "int8",
}


@pytest.mark.parametrize("argument", WRONG)
@pytest.mark.parametrize("base", BASES)
def test_a_refused_adapter_leaves_its_base_trained(base: str, argument: str) -> None:
    layer, adapter = BASES[base](), GroupedLoRA if base == "GroupedLinear" else LoRA
    before = nnx.split(layer)
    arguments: dict[str, Any] = {"rank": 2, argument: WRONG[argument]}
    with pytest.raises((ValueError, TypeError)):
        adapter(layer, **arguments, rngs=nnx.Rngs(1))
    assert nnx.split(layer)[0] == before[0]
    assert not layer.frozen


@pytest.mark.costly
def test_an_adapter_refused_at_the_second_kernel_leaves_its_base_trained() -> None:
    layer = BASES["LayerNormMLP"]()
    with pytest.raises(ValueError, match="an initializer must return"):
        LoRA(layer, 2, init_method=second_is_wrong(), rngs=nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(2), (2, 16))
    grads = nnx.grad(lambda layer: jnp.sum(layer(x)))(layer)
    assert all(jnp.any(grads[name][...] != 0) for name in ("wi_kernel", "wo_kernel"))


def test_an_exchange_that_one_core_refuses_changes_no_other() -> None:
    """Cores are visited in the order of their names: the one refused comes second."""
    layer = TransformerLayer(16, 16, 2, layer_type="decoder", rngs=nnx.Rngs(0))

    class Fixed:
        """An exchange of a core of the user's own, which cannot be replaced by another."""

    layer.self_attention.core_attention.context_parallel = Fixed()
    with pytest.raises(TypeError):
        layer.set_context_parallel_group(None, cp_comm_type="all_gather")
    assert layer.inter_attention.core_attention.context_parallel.cp_comm_type == "p2p"


def test_a_recipe_that_one_layer_refuses_prepares_no_other() -> None:
    """Experts have no scale for each part of the batch, which the linear layer before them gets."""
    model = nnx.List([BASES["Linear"](), BASES["GroupedLinear"]()])
    before = jax.tree.structure(nnx.state(model))
    mesh = make_mesh(ParallelConfig(data=2), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="tp_only_amax_red"):
        prepare_quantization(model, DelayedScaling(tp_only_amax_red=True))
    assert jax.tree.structure(nnx.state(model)) == before


def test_kernels_of_which_one_cannot_be_quantized_stay_as_they_were() -> None:
    with autocast(DelayedScaling()):
        with_state = BASES["Linear"]()
    model = nnx.List([with_state, BASES["Linear"]()])
    with autocast(DelayedScaling()), pytest.raises(ValueError, match="state"):
        quantize_parameters(model)
    assert all(isinstance(layer.kernel.get_value(), jax.Array) for layer in model)


def test_parameters_are_not_quantized_without_a_recipe():
    layer = Linear(16, 16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no layer has a recipe that quantizes one"):
        quantize_parameters(layer)
    assert isinstance(quantize_parameters(layer, only_marked=True).kernel.get_value(), jax.Array)
