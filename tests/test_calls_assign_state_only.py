"""Calls of modules assign no attribute but NNX Variables: what a call changes is state, as transformations know it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te import layers, megatron, models
from jax_te.layers import quantizable_modules
from jax_te.recipe import Float8CurrentScaling, autocast
from tests.test_bad_arguments import CONSTRUCTORS, SIZES

X = jnp.ones((2, 8, 16))
ROWS, COUNTS = jnp.ones((16, 16)), jnp.array([16, 0])
TOKENS = jnp.zeros((2, 8), jnp.int32)
HEADS = (jnp.ones((2, 8, 1, 16)),) * 3
KERNEL = jnp.ones((16, 16))


def of(*inputs: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda module: module(*inputs, **options)


CALLS: dict[Any, Callable[[Any], Any]] = {
    layers.DotGeneral: of(X, KERNEL, (((2,), (0,)), ((), ()))),
    layers.EinsumOp: of("bsh,hk->bsk", X, KERNEL),
    layers.DotProductAttention: of(*HEADS),
    layers.Embedding: of(TOKENS),
    layers.GroupedLinear: of(ROWS, COUNTS),
    layers.GroupedLoRA: of(ROWS, COUNTS),
    layers.LayerNorm: of(X),
    layers.LayerNormLinear: of(X),
    layers.LayerNormMLP: of(X),
    layers.Linear: of(X),
    layers.LoRA: of(X),
    layers.MoE: of(X),
    layers.MultiLatentAttention: of(X),
    layers.MultiheadAttention: of(X, return_max_logit=True),
    layers.RMSNorm: of(X),
    layers.RelativePositionBias: of(8, 8),
    layers.Router: of(X),
    layers.SharedExperts: of(X),
    layers.TransformerLayer: of(X, return_max_logit=True),
    megatron.Float16Module: of(X),
    megatron.MLASelfAttention: of(X),
    megatron.MLP: of(X),
    megatron.MoELayer: of(X),
    megatron.SelfAttention: of(X),
    megatron.SharedExpertMLP: of(X),
    megatron.TEColumnParallelGroupedLinear: of(ROWS, COUNTS),
    megatron.TEColumnParallelLinear: of(X),
    megatron.TEDotProductAttention: of(*HEADS),
    megatron.TEGroupedLinear: of(ROWS, COUNTS),
    megatron.TELayerNormColumnParallelLinear: of(X),
    megatron.TELinear: of(X),
    megatron.TERowParallelGroupedLinear: of(ROWS, COUNTS),
    megatron.TERowParallelLinear: of(X),
    megatron.TopKRouter: of(X),
    megatron.TransformerLayer: of(X),
    models.BertModel: of(TOKENS),
    models.GPTModel: lambda model: (model(TOKENS), model.loss(TOKENS, TOKENS), model.max_logits(TOKENS)),
    models.MegatronGPTModel: of(TOKENS, labels=TOKENS),
    models.T5Model: of(TOKENS, TOKENS),
}


class Graphable(megatron.GraphableMegatronModule):
    def __init__(self, config: Any, rngs: nnx.Rngs):
        super().__init__(config)
        self.linear = layers.Linear(16, 16, rngs=rngs)

    def forward(self, x: jax.Array) -> Any:
        return self.linear(x)


def flax_model(rngs: nnx.Rngs) -> nnx.Module:
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs))
    layers.quantize_model(model, X)
    return model


def a_stage(rngs: nnx.Rngs) -> nnx.Module:
    given = CONSTRUCTORS[models.MegatronGPTModel] | {"pre_process": False, "stage_layers": range(1, 2)}
    config = given["config"].__class__(**SIZES | {"num_layers": 2})
    stage = models.MegatronGPTModel(**given | {"config": config}, rngs=rngs)
    stage.set_input_tensor(X)
    return stage


OTHERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "a graphable module in a program": (
        lambda rngs: Graphable(CONSTRUCTORS[megatron.TransformerLayer]["config"], rngs),
        of(X),
    ),
    "layers of Flax": (flax_model, of(X)),
    "a stage": (a_stage, of()),
}


def build(cls: Any, rngs: nnx.Rngs) -> Any:
    takes_rngs = "rngs" in inspect.signature(cls.__init__).parameters
    return cls(**CONSTRUCTORS[cls], **({"rngs": rngs} if takes_rngs else {}))


def test_each_public_module_is_called() -> None:
    public = {
        getattr(room, name)
        for room in (layers, megatron, models)
        for name in room.__all__
        if inspect.isclass(getattr(room, name)) and issubclass(getattr(room, name), nnx.Module)
    }
    called = {cls for cls in public if "__call__" in dir(cls)} - {megatron.GraphableMegatronModule}
    assert called == CALLS.keys()


@pytest.mark.costly("T5Model", slow=("MoELayer", "MultiLatentAttention", "BertModel", "MoE", "MLASelfAttention"))
@pytest.mark.parametrize("name", [*CALLS, *OTHERS], ids=lambda given: getattr(given, "__name__", given))
def test_a_call_assigns_state_alone(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make, call = OTHERS.get(name) or ((lambda rngs: build(name, rngs)), CALLS[name])
    assign, assigned = nnx.Pytree.__setattr__, []

    def watched(module: Any, attribute: str, value: Any) -> None:
        if not isinstance(value, nnx.Variable):
            assigned.append(f"{type(module).__name__}.{attribute}")
        assign(module, attribute, value)

    with autocast(Float8CurrentScaling()):
        module = nnx.clone(make(nnx.Rngs(0)))
        module.set_attributes(without_dropout=True, raise_if_not_found=False)
        for _, layer in quantizable_modules(module):
            layer.is_first_microbatch = True
        graphdef, state = nnx.split(module)

        def program(state: nnx.State) -> Any:
            return call(nnx.merge(graphdef, state))

        monkeypatch.setattr(nnx.Pytree, "__setattr__", watched)
        jax.eval_shape(program, state)
    # The model's copy, which evaluates.
    allowed = {"deterministic"} if name is models.GPTModel else set()
    assert {one for one in assigned if one.rpartition(".")[2] not in allowed} == set()
