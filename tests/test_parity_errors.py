"""Errors: docs/parity.yaml has the types of the references, and why those of jax_te are others where they are."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te import errors, layers, te_pytorch
from jax_te.config import ModelParallelConfig, TransformerConfig
from jax_te.megatron import (
    Float16Module,
    GraphableMegatronModule,
    MatchContext,
    MegatronModule,
    QuantizationConfig,
    TEColumnParallelLinear,
    TECudaRNGStatesTracker,
    TEDelayedScaling,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TEQuantizationParams,
    TEQuantizationRecipe,
    TERowParallelLinear,
    get_fp8_autocast_for_quant_recipe,
    set_save_original_input,
)
from jax_te.recipe import Format
from tests.support.numerics import without_type_checker
from tests.test_parity import DATA

SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
CONFIG = TransformerConfig(**SIZES)
X = jnp.ones((2, 8, 32))


def linear(kind: Any = TELinear, config: Any = CONFIG, **options: Any) -> Any:
    own: dict[Any, dict[str, Any]] = {
        TELinear: {"parallel_mode": "duplicated", "skip_weight_param_allocation": False},
        TERowParallelLinear: {"input_is_parallel": True},
    }
    given = {"bias": True, "skip_bias_add": False, "is_expert": False, **own.get(kind, {"gather_output": False})}
    init = CONFIG.init_method
    return kind(32, 64, config=config, init_method=init, rngs=nnx.Rngs(0), **given | options)


def unchecked(**fields: Any) -> TransformerConfig:
    """A configuration with fields that its own check would refuse."""
    config = copy.copy(CONFIG)
    vars(config).update(fields)
    return config


def recipe(**fields: Any) -> Any:
    return TEQuantizationRecipe.parse_from_config(fields)


def params(**payload: Any) -> Any:
    return TEQuantizationParams.parse_from_config(QuantizationConfig(payload, MatchContext("proj"), "mine"))


KIND = {"transformer_engine_config_type": "TEQuantizationParams"}


def tracker(**streams: int) -> TECudaRNGStatesTracker:
    made = TECudaRNGStatesTracker()
    for name, seed in streams.items():
        made.add(name, seed)
    return made


def fork(name: str) -> None:
    with tracker().fork(name):
        pass


def transformer(**options: Any) -> Any:
    return te_pytorch.TransformerLayer(32, 64, 2, attn_input_format="bshd", rngs=nnx.Rngs(0), **options)


def in_fp8(layer: Any) -> Any:
    with te_pytorch.fp8_autocast():
        return layer(layers.Linear(24, 32, rngs=nnx.Rngs(0)))(jnp.ones((16, 24)))


class Graph(GraphableMegatronModule):
    def forward(self, hidden_states: Any, **_: Any) -> Any:
        return hidden_states


def replay(*args: Any, **kwargs: Any) -> Any:
    made = Graph(TransformerConfig(**SIZES, cuda_graph_impl="transformer_engine"))
    return made._te_cuda_graph_replay(*args, **kwargs)


HALF = TransformerConfig(**SIZES, bf16=True)
PLAIN, NORM = layers.Linear(16, 16, rngs=nnx.Rngs(0)), layers.LayerNorm(16, rngs=nnx.Rngs(0))
COLUMN, ROW, FUSED = TEColumnParallelLinear, TERowParallelLinear, TELayerNormColumnParallelLinear
THREE = ModelParallelConfig(tensor_model_parallel_size=3)

# For each error of docs/parity.yaml, a call that raises it.
CALLS: dict[str, dict[str, Callable[[], Any]]] = {
    "TEQuantizationRecipe.parse_from_config": {
        "an unknown key": lambda: recipe(fp8_recipe="mxfp8"),
        "FP8 recipe `delayed`": lambda: recipe(fp8_quantization_recipe="delayed"),
        "an FP8 and an FP4 recipe": lambda: recipe(fp8_quantization_recipe="mxfp8", fp4_quantization_recipe="nvfp4"),
        "a custom recipe without a factory": lambda: recipe(fp8_quantization_recipe="custom"),
    },
    "TEQuantizationParams.parse_from_config": {
        "no `transformer_engine_config_type`": lambda: params(training_recipe={}),
        "another `transformer_engine_config_type`": lambda: params(transformer_engine_config_type="Kitchen"),
        "no `training_recipe`": lambda: params(**KIND),
        "an unknown key": lambda: params(**KIND, training_recipe={}, more={}),
        "a blank `evaluation_recipe`": lambda: params(**KIND, training_recipe={}, evaluation_recipe=None),
    },
    "_get_fp8_autocast_for_quant_recipe": {
        "an unknown FP8 recipe": lambda: get_fp8_autocast_for_quant_recipe(
            TEQuantizationRecipe("tensor", override_nonquantized_autocast=True)
        ),
        "an unknown `fp8_format`": lambda: get_fp8_autocast_for_quant_recipe(
            TEQuantizationRecipe("mxfp8", fp8_format="e5m2", override_nonquantized_autocast=True)
        ),
        "a factory that cannot be imported": lambda: get_fp8_autocast_for_quant_recipe(
            TEQuantizationRecipe("custom", custom_recipe_factory="no.such", override_nonquantized_autocast=True)
        ),
    },
    "set_save_original_input": {"a module that does not save its input": lambda: set_save_original_input(NORM)},
    "TENorm": {
        "another `config.normalization`": lambda: TENorm(SimpleNamespace(normalization="L2Norm"), 32),
        "`fused_residual_rmsnorm` with LayerNorm": lambda: TENorm(
            SimpleNamespace(normalization="LayerNorm", fused_residual_rmsnorm=True), 32, has_residual=True
        ),
    },
    "TELinear": {
        "`skip_weight_param_allocation=True`": lambda: linear(skip_weight_param_allocation=True),
        "duplicated, with a `tp_group`": lambda: linear(tp_group="tensor"),
        "another `parallel_mode`": lambda: linear(parallel_mode="diagonal"),
        "`sharded_state_dict` of a column or row": lambda: linear(parallel_mode="column").sharded_state_dict(),
        "`backward_dw` with no gradient waiting": lambda: linear(
            config=TransformerConfig(**SIZES, delay_wgrad_compute=True)
        ).backward_dw(),
    },
    "TELayerNormColumnParallelLinear": {
        "`gather_output=True`": lambda: linear(FUSED, gather_output=True),
        "`is_expert=True`": lambda: linear(FUSED, is_expert=True),
        "`skip_weight_param_allocation=True`": lambda: linear(FUSED, skip_weight_param_allocation=True),
    },
    "TEColumnParallelLinear": {
        "`gather_output=True`": lambda: linear(COLUMN, gather_output=True),
        "`skip_weight_param_allocation=True`": lambda: linear(COLUMN, skip_weight_param_allocation=True),
        "an `output_size` that the tensor ranks do not divide": lambda: linear(COLUMN, THREE),
    },
    "TERowParallelLinear": {
        "`input_is_parallel=False`": lambda: linear(ROW, input_is_parallel=False),
        "an `input_size` that the tensor ranks do not divide": lambda: linear(ROW, THREE),
    },
    "TEDotProductAttention": {
        "a `pg_collection` without a group": lambda: TEDotProductAttention(
            CONFIG, 1, "causal", "self", pg_collection=SimpleNamespace()
        ),
        "a `config.window_attn_skip_freq` of another type": lambda: TEDotProductAttention(
            unchecked(window_size=(2, 0), window_attn_skip_freq="2"), 1, "causal", "self"
        ),
        "`config.deterministic_mode`, the environment says otherwise": lambda: TransformerConfig(
            **SIZES, deterministic_mode=True
        ),
    },
    "TEDelayedScaling": {"format `E5M2`": lambda: TEDelayedScaling(CONFIG, Format.E5M2)},
    "TECudaRNGStatesTracker": {
        "`add` with a name that is taken": lambda: tracker(a=1).add("a", 2),
        "`add` with a seed that is taken": lambda: tracker(a=1).add("b", 1),
        "`fork` with an unknown name": lambda: fork("a"),
    },
    "Linear": {
        "another `parallel_mode`": lambda: layers.Linear(16, 16, parallel_mode="diagonal", rngs=nnx.Rngs(0)),
        "another last size of the input": lambda: PLAIN(jnp.ones((2, 8))),
        "FP8 with a last size that 16 does not divide": lambda: in_fp8(lambda made: made),
    },
    "TransformerLayer": {
        "another `layer_type`": lambda: transformer(layer_type="both"),
        "another `self_attn_mask_type`": lambda: transformer(self_attn_mask_type="diagonal"),
        "a mask that is not bool": lambda: transformer(self_attn_mask_type="padding")(X, jnp.ones((2, 1, 1, 8))),
    },
    "MegatronModule": {
        "`set_symmetric_ar` with another name": lambda: MegatronModule(CONFIG).set_symmetric_ar("ring"),
    },
    "GraphableMegatronModule": {
        "a config that is not a `TransformerConfig`": lambda: Graph(ModelParallelConfig()),
        "a replay of what is not an array": lambda: replay(X, 2),
        "a replay without `hidden_states`": lambda: replay(scale=X),
        "a replay with `hidden_states` twice": lambda: replay(X, hidden_states=X),
    },
    "Float16Module": {
        "neither `fp16` nor `bf16`": lambda: Float16Module(CONFIG, PLAIN),
        "a `vp_stage` without virtual stages": lambda: Float16Module(HALF, PLAIN, vp_size=1, vp_stage=1)(X),
        "`load_state_dict` with other names": lambda: Float16Module(HALF, PLAIN).load_state_dict({"other": X}),
    },
}


def test_every_error_has_a_call():
    assert {of: list(calls) for of, calls in CALLS.items()} == {of: list(e) for of, e in DATA["errors"].items()}


@pytest.mark.parametrize(("of", "when"), [(of, when) for of, calls in CALLS.items() for when in calls])
def test_errors_are_the_references_or_a_row_says_why_not(of: str, when: str):
    """The very class, so that a program that catches the reference's catches this."""
    stated = DATA["errors"][of][when]
    if isinstance(stated, dict):
        assert stated.keys() == {"raises", "here", "because"}
        assert stated["raises"] != stated["here"]
        stated = stated["here"]
    with without_type_checker(), pytest.raises(Exception) as caught:  # noqa: PT011  # the type is what is tested
        CALLS[of][when]()
    assert type(caught.value) is (vars(builtins) | vars(errors))[stated], caught.value
