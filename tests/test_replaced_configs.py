"""`dataclasses.replace` of a configuration: as if it had been built so."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import warnings
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import pytest

from jax_te.config import (
    CudaGraphConfig,
    ExpertsConfig,
    LatentAttentionOptions,
    MLATransformerConfig,
    MoEOptions,
    NormalInit,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    RouterOptions,
    TransformerConfig,
)
from tests.support.numerics import without_type_checker

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
LATENT = LatentAttentionOptions(qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)
EXPERTS: dict[str, Any] = {"num_moe_experts": 8, "moe_ffn_hidden_size": None}
BUILT: dict[str, tuple[Any, dict[str, Any]]] = {
    "sizes alone": (TransformerConfig, SIZES),
    "all given": (
        TransformerConfig,
        SIZES
        | {"num_query_groups": 4, "ffn_hidden_size": 256, "kv_channels": 16, "activation": "gelu"}
        | {"gated_linear_unit": False, "compute_dtype": "float32", "recompute_modules": ["core_attn"]}
        | {"init_method": NormalInit(0.02), "output_layer_init_method": NormalInit(0.01)},
    ),
    "activation_func": (TransformerConfig, SIZES | {"activation_func": "silu"}),
    "gated activation_func": (TransformerConfig, SIZES | {"activation_func": jnp.tanh, "gated_linear_unit": True}),
    "gated": (TransformerConfig, SIZES | {"activation": "silu", "gated_linear_unit": True}),
    "experts": (TransformerConfig, SIZES | {"num_moe_experts": 8, "moe_layer_recompute": True}),
    "experts' devices": (
        TransformerConfig,
        SIZES | {"num_moe_experts": 8, "expert_model_parallel_size": 2, "moe_router_topk_limited_devices": 1},
    ),
    "selective": (
        TransformerConfig,
        SIZES | {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "moe_layer_recompute": True},
    ),
    "latent": (TransformerConfig, SIZES | {"latent_attention": LATENT}),
    "MLA": (MLATransformerConfig, SIZES | {"qk_head_dim": 8, "mscale_all_dim": 1.0}),
    "ExpertsConfig": (ExpertsConfig, {"num_moe_experts": 8, "moe_router_topk_limited_devices": 1}),
    "RecomputeConfig": (RecomputeConfig, {"recompute_granularity": "selective"}),
    "PrecisionConfig": (PrecisionConfig, {"fp8": "hybrid"}),
    "CudaGraphConfig": (CudaGraphConfig, {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "mlp"]}),
    "RouterOptions": (RouterOptions, {"num_experts": 8, "expert_capacity_factor": -1.0}),
    "MoEOptions": (MoEOptions, {"router": RouterOptions(num_experts=8)}),
    "ParallelConfig": (ParallelConfig, {"data": 2}),
    "PipelineConfig": (PipelineConfig, {"first_layers": 1}),
}
"""A class, and the arguments that one of its configurations is built with."""

VALUES: dict[str, list[Any]] = {
    "activation": ["gelu", "swiglu", "silu", jnp.tanh, None],
    "activation_func": ["silu", "gelu", jax.nn.relu, None],
    "compute_dtype": ["float32", "bfloat16", None],
    "cp_comm_type": ["a2a", ["p2p", "a2a"]],
    "cuda_graph_modules": ["full", ["attn"]],
    "gated_linear_unit": [True, False, None],
    "hidden_size": [64, 128, 30],
    "init_method": [NormalInit(0.02), NormalInit(0.5), None],
    "latent_attention": [LATENT, LatentAttentionOptions(), None],
    "moe_aux_loss_coeff": [0.01, [0.1, 0.2]],
    "moe_layer_freq": [1, 2, [0, 1]],
    "moe_router_load_balancing_type": ["sinkhorn", ["aux_loss", "seq_aux_loss"]],
    "output_layer_init_method": [NormalInit(0.01), None],
    "params_dtype": ["float32", "bfloat16"],
    "quant_recipe": [None, {}],
    "recompute_modules": [None, ["core_attn"], ["mlp"], ["moe"]],
    "router": [RouterOptions(num_experts=4)],
    "symmetric_ar_type": ["one_shot", None],
    "window_attn_skip_freq": [2, [0, 1]],
    "window_size": [(4, 0), [8, 0], None],
}
"""Values of fields whose annotations do not say which there are. Some are refused."""
OF_TYPE: dict[Any, list[Any]] = {
    bool: [True, False],
    int: [1, 2, 4, 8, 16, 256],
    float: [0.5, 1.0],
    str: ["gelu", "p2p", "1f1b"],
    type(None): [None],
}


def values(kind: type, name: str) -> list[Any]:
    """Return values of a field, some of which are refused."""
    if name in VALUES:
        return VALUES[name]
    hint = get_type_hints(kind)[name]
    hints = [hint, *get_args(hint)]
    names = [each for one in hints for each in get_args(one) if isinstance(each, str)]
    return names + [value for one in hints for value in OF_TYPE.get(one, [])] or [None]


def outcome(build: Any, *config: Any, **given: Any) -> Any:
    """Return the fields of the configuration that a function makes, or the error that it raises."""
    try:
        with without_type_checker(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            made = build(*config, **given)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made) if field.compare}


@pytest.mark.costly(
    "experts",
    slow=(
        "MLA",
        "gated activation_func",
        "all given",
        "gated",
        "activation_func",
        "latent",
        "selective",
        "experts' devices",
        "sizes alone",
    ),
)
@pytest.mark.parametrize("case", BUILT)
def test_a_replaced_field_is_one_that_was_given(case: str):
    kind, given = BUILT[case]
    made = kind(**given)
    assert outcome(dataclasses.replace, made) == outcome(kind, **given)
    taken = 0
    for name in [field.name for field in dataclasses.fields(kind) if field.init and not field.name.startswith("_")]:
        for value in values(kind, name):
            built = outcome(kind, **given | {name: value})
            assert outcome(dataclasses.replace, made, **{name: value}) == built, (name, value)
            taken += isinstance(built, dict)
    assert taken > len(given)


@pytest.mark.slow
def test_fields_replaced_one_after_another_are_those_given_together():
    """Among them a field that gets the value which it had, and with another size keeps it."""
    given: dict[str, list[Any]] = {
        "hidden_size": [128],
        "num_query_groups": [2, 4],
        "ffn_hidden_size": [256],
        "params_dtype": ["bfloat16"],
        "compute_dtype": ["float32", None],
        "activation": ["gelu", "swiglu"],
        "gated_linear_unit": [True, False],
        "num_moe_experts": [8],
        "moe_ffn_hidden_size": [256, 512],
        "moe_layer_recompute": [True],
    }
    one = TransformerConfig(**SIZES)
    for first, second in itertools.permutations(given, 2):
        for value, other in itertools.product(given[first], given[second]):
            built = outcome(TransformerConfig, **SIZES | {first: value, second: other})
            together = outcome(dataclasses.replace, one, **{first: value, second: other})
            assert together == built, (first, value, second, other)
            if isinstance(outcome(dataclasses.replace, one, **{first: value}), dict):
                half = dataclasses.replace(one, **{first: value})
                assert outcome(dataclasses.replace, half, **{second: other}) == built, (first, value, second, other)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_knows_what_was_given(copied: Any):
    made = copied(TransformerConfig(**SIZES, kv_channels=16))
    wide = dataclasses.replace(made, hidden_size=128)
    assert (wide.ffn_hidden_size, wide.kv_channels) == (512, 16)
    assert made == TransformerConfig(**SIZES)
    assert hash(made) == hash(TransformerConfig(**SIZES))


def test_a_list_that_changes_later_does_not_change_a_configuration():
    modules = ["mlp"]
    made = TransformerConfig(
        **SIZES, recompute_granularity="selective", recompute_modules=modules, moe_layer_recompute=True
    )
    modules.append("no such module")
    assert dataclasses.replace(made, num_layers=3).recompute_modules == ("mlp", "moe")


def test_a_derived_class_is_replaced_in_the_same_way():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(TransformerConfig):
        factor: int = 1

    made = dataclasses.replace(Mine(**SIZES), factor=2)
    pinned = dataclasses.replace(made, hidden_size=128, ffn_hidden_size=256)
    assert (made.factor, pinned.ffn_hidden_size, pinned.kv_channels) == (2, 256, 32)
    assert dataclasses.replace(made, hidden_size=128).ffn_hidden_size == 512
