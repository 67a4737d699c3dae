"""What the log says: arguments that only tune CUDA as hints, and what a user asked for and does not get as warnings."""

import ast
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te import te_pytorch
from jax_te._validation import log_once
from jax_te.config import MLATransformerConfig, TransformerConfig
from jax_te.config.megatron_fields import HINTS, Hints
from jax_te.layers import DotProductAttention, LayerNormMLP, Linear, TransformerLayer
from jax_te.megatron import TELinear, initialize_rng_tracker
from jax_te.ops import dot_product_attention
from jax_te.recipe import DelayedScaling, Float8CurrentScaling
from jax_te.te_pytorch import GroupedLinear, checkpoint

ROOT = Path(__file__).resolve().parent.parent


def config(**hints):
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, **hints)


def latent_config(**hints):
    return MLATransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, **hints)


def te_linear(**hints):
    return TELinear(
        16,
        16,
        parallel_mode=None,
        config=config(),
        init_method=nnx.initializers.zeros,
        bias=False,
        skip_bias_add=False,
        skip_weight_param_allocation=False,
        is_expert=False,
        rngs=nnx.Rngs(0),
        **hints,
    )


def other_value(default: Any, annotation: Any) -> Any:
    """A value that Megatron's field takes and that is not its default."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    if get_origin(annotation) is Literal:
        return next(name for name in kinds if name != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if isinstance(default, str):
        return "other"
    if get_origin(kinds[0]) is Literal:
        return get_args(kinds[0])[0]
    return {int: 2}.get(kinds[0], abs if "Callable" in str(annotation) else "bfloat16")


ANNOTATIONS = get_type_hints(Hints)
OTHERS = {name: other_value(default, ANNOTATIONS[name]) for name, default in HINTS.items()}
GIVEN = [
    (config, {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": False, "batch_invariant_mode": True}),
    (config, {"gradient_accumulation_fusion": True, "symmetric_ar_type": "one_shot", "use_cpu_initialization": True}),
    (config, OTHERS),
    (latent_config, {"cache_mla_latents": True}),
    (config, {"tp_comm_overlap_disable_fc1": True, "tp_comm_overlap_disable_qkv": True}),
    (
        config,
        {
            "cuda_graph_retain_backward_graph": True,
            "cuda_graph_use_single_mempool": False,
            "cuda_graph_warmup_steps": 1,
        },
    ),
    (lambda **hints: DotProductAttention(2, 8, **hints), {"num_splits": 2}),
    (lambda **hints: Linear(16, 16, rngs=nnx.Rngs(0), **hints), {"fuse_wgrad_accumulation": True}),
    (
        lambda **hints: LayerNormMLP(16, 16, rngs=nnx.Rngs(0), **hints),
        {"fuse_wgrad_accumulation": True, "micro_batch_size": 1, "seq_length": 8},
    ),
    (
        lambda **hints: TransformerLayer(16, 16, 2, rngs=nnx.Rngs(0), **hints),
        {
            "apply_query_key_layer_scaling": False,
            "attention_softmax_in_fp32": True,
            "micro_batch_size": 1,
            "seq_length": 8,
        },
    ),
    (te_linear, {"symmetric_ar_type": "one_shot", "tp_comm_buffer_name": "fc1"}),
    (
        lambda **hints: GroupedLinear(2, 16, 16, rngs=nnx.Rngs(0), **hints),
        {
            "fuse_wgrad_accumulation": True,
            "single_grouped_bias": True,
            "single_grouped_weight": True,
            "ub_name": "fc1",
            "use_grouped_tensor": True,
        },
    ),
    (lambda **hints: checkpoint(abs, 1.0, **hints), {"use_reentrant": False}),
    (initialize_rng_tracker, {"use_cudagraphable_rng": True, "use_te_rng_tracker": True}),
]


def logged(caplog, function, **hints) -> set[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="jax_te"):
        function(**hints)
    assert all(record.levelno == logging.INFO for record in caplog.records)
    return {record.getMessage().split()[0] for record in caplog.records}


@pytest.mark.parametrize(("function", "hints"), GIVEN)
def test_a_hint_is_logged_once_where_it_is_given(caplog, function, hints):
    log_once.cache_clear()
    assert logged(caplog, function) == set()
    assert logged(caplog, function, **hints) == set(hints)
    assert logged(caplog, function, **hints) == set()


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_has_a_value_that_megatrons_field_takes(name):
    wrong = 7 if isinstance(HINTS[name], str | bool) else "nonsense"
    with pytest.raises((ValueError, TypeError), match=f"{name} must be"):
        config(**{name: wrong})


@pytest.mark.slow
def test_the_table_lists_those_that_are_logged():
    text = (ROOT / "docs" / "parity.md").read_text()
    table = text.partition("| argument, field |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| [^|]* \|", table, re.MULTILINE))))
    found = set(HINTS)
    for path in (ROOT / "jax_te").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "log_hints":
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
    assert listed == found == {name for _, hints in GIVEN for name in hints}


X = jnp.ones((1, 4, 16))
LEFT_OUT: dict[str, Callable[[], Any]] = {
    "moe_shared_expert_gate": lambda: config(num_moe_experts=2, moe_shared_expert_gate=True),
    "moe_router_padding_for_fp8": lambda: config(moe_router_padding_for_fp8=True),
    "fp8_mha": lambda: DelayedScaling(fp8_mha=True),
    "attention masks": lambda: jax.eval_shape(
        lambda: te_pytorch.TransformerLayer(16, 16, 2, attn_input_format="bshd", rngs=nnx.Rngs(0))(
            X, jnp.ones((1, 1, 4, 4), bool), dropout_key=jax.random.key(0)
        )
    ),
    "attention runs in": lambda: jax.eval_shape(
        lambda: dot_product_attention((jnp.ones((1, 4, 2, 8)),) * 3, recipe=Float8CurrentScaling(fp8_dpa=True))
    ),
}


@pytest.mark.parametrize("words", LEFT_OUT)
def test_what_a_user_asked_for_and_does_not_get_is_a_warning(caplog, words):
    log_once.cache_clear()
    LEFT_OUT[words]()
    assert [
        (record.levelname, words in record.getMessage()) for record in caplog.records if record.name == "jax_te"
    ] == [("WARNING", True)]


def test_what_megatrons_scripts_set_for_every_recipe_is_no_warning(caplog):
    log_once.cache_clear()
    config(fp8="hybrid", fp8_recipe="tensorwise", fp8_amax_history_len=8)
    assert not caplog.records
