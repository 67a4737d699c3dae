"""An option of a layer reaches the layers inside of it for which it is, and no others."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import MoEOptions, RouterOptions
from jax_te.layers import AttentionOptions, LayerNormLinear, Linear, MultiheadAttention, TransformerLayer

# Without biases, so that `qkv_bias` has an effect.
BASE: dict[str, Any] = {"bias": False, "layer_type": "decoder"}
BLOCKS = ("self_attention", "inter_attention", "layernorm_mlp")
SELF, CROSS, MLP = BLOCKS
ATTENTION = (SELF, CROSS)

# Keyword of TransformerLayer -> another value than its default, and the blocks that it changes.
REACHED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "layernorm_epsilon": (1e-3, BLOCKS),
    "attention_dropout": (0.5, ATTENTION),
    "apply_residual_connection_post_layernorm": (True, BLOCKS),
    "output_layernorm": (True, (SELF,)),
    "block_input_layernorm": (False, BLOCKS),
    "kv_channels": (16, ATTENTION),
    "self_attn_mask_type": ("no_mask", (SELF,)),
    "window_size": ((4, 0), (SELF,)),
    "enc_dec_attn_mask_type": ("causal", (CROSS,)),
    "enc_dec_window_size": ((4, 4), (CROSS,)),
    "softmax_scale": (0.5, ATTENTION),
    "softmax_type": ("learnable", ATTENTION),
    "logit_softcap": (2.0, ATTENTION),
    "num_splits": (2, ATTENTION),
    "cp_comm_type": ("all_gather", ATTENTION),
    "hierarchical_context_parallel_sizes": ((2, 2), ATTENTION),
    "cp_load_balanced": (True, ATTENTION),
    "qk_norm_type": ("RMSNorm", ATTENTION),
    "qk_norm_before_rope": (True, ATTENTION),
    "qk_norm_across_heads": (True, ATTENTION),
    "qkv_bias": (True, (SELF,)),
    "fuse_qkv_params": (False, (SELF, CROSS)),
    "set_parallel_mode": (False, BLOCKS),
    "sequence_parallel": (True, BLOCKS),
    "tp_group": ("tensor", BLOCKS),
    "tp_size": (2, BLOCKS),
    "fuse_wgrad_accumulation": (True, BLOCKS),
    "num_gqa_groups": (2, ATTENTION),
    "normalization": ("RMSNorm", BLOCKS),
    "zero_centered_gamma": (True, BLOCKS),
    "activation": ("swiglu", (MLP,)),
    "bias": (True, BLOCKS),
    "experts": (MoEOptions(router=RouterOptions(num_experts=4)), (MLP,)),
    "return_max_logit": (True, (SELF,)),
    "params_dtype": (jnp.bfloat16, BLOCKS),
}
# What other options are for: initial values (tested below), the residual connections, and names without effect.
OTHERS = {"init_method", "output_layer_init_method", "hidden_dropout", "drop_path_rate", "layer_number", "layer_type"}
OTHERS |= {"block_output_layernorm", "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "seq_length"}
OTHERS |= {"micro_batch_size", "rngs", "latent", "parallel_attention_mlp"}


def structure(module: nnx.Module) -> Any:
    """Attributes, and what arrays there are."""
    graphdef, state = nnx.split(module)
    return graphdef, [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def build(**options: Any) -> TransformerLayer:
    layer: TransformerLayer = nnx.eval_shape(lambda: TransformerLayer(32, 64, 4, rngs=nnx.Rngs(0), **(BASE | options)))
    return layer


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    layer = build()
    return {block: structure(getattr(layer, block)) for block in BLOCKS}


def test_every_keyword_is_listed() -> None:
    keywords = inspect.signature(TransformerLayer.__init__).parameters.values()
    names = {keyword.name for keyword in keywords if keyword.kind is inspect.Parameter.KEYWORD_ONLY}
    assert names == REACHED.keys() | OTHERS


@pytest.mark.parametrize("option", REACHED)
def test_an_option_reaches_its_blocks(option: str, plain: dict[str, Any]) -> None:
    value, blocks = REACHED[option]
    layer = build(**{option: value})
    assert [block for block in BLOCKS if structure(getattr(layer, block)) != plain[block]] == list(blocks)


def test_initializers_reach_their_kernels() -> None:
    def filled(value: float) -> Any:
        return lambda key, shape, dtype: jnp.full(shape, value, dtype)

    layer = TransformerLayer(
        32, 64, 4, **BASE, init_method=filled(1.0), output_layer_init_method=filled(2.0), rngs=nnx.Rngs(0)
    )
    found = {
        ".".join(map(str, path)): float(jnp.mean(value[...]))
        for path, value in nnx.to_flat_state(nnx.state(layer, nnx.Param))
        if "kernel" in str(path[-1])
    }
    outer = {"self_attention.proj.kernel", "inter_attention.proj.kernel", "layernorm_mlp.wo_kernel"}
    assert len(found) == 7
    assert found == {name: 2.0 if name in outer else 1.0 for name in found}


@pytest.mark.parametrize("layer", [MultiheadAttention, TransformerLayer])
def test_shared_options_are_keywords_of_both_layers(layer: type) -> None:
    """By names, types and defaults: what one layer hands on to the other, and a configuration to either."""
    taken, others = (inspect.signature(each.__init__).parameters for each in (layer, TransformerLayer))
    for name, annotation in AttentionOptions.__annotations__.items():
        assert getattr(annotation, "__forward_arg__", annotation) == str(taken[name].annotation), name
        assert taken[name].default == others[name].default, name


@pytest.mark.parametrize(
    "option",
    [
        {"sequence_parallel": True, "parallel_mode": "column"},
        {"tp_group": "tensor"},
        {"tp_size": 2},
        {"fuse_wgrad_accumulation": True},
        {"params_dtype": jnp.bfloat16},
        {"return_bias": True},
        {"skip_weight_param_allocation": True},
    ],
    ids=lambda option: next(iter(option)),
)
def test_layernorm_linear_takes_what_linear_takes(option: dict[str, Any]) -> None:
    linear: Any = nnx.eval_shape(lambda: Linear(16, 32, rngs=nnx.Rngs(0), **option))
    fused: Any = nnx.eval_shape(lambda: LayerNormLinear(16, 32, rngs=nnx.Rngs(0), **option))
    for name in ("tensor_parallel", "parallel_mode", "fuse_wgrad_accumulation", "return_bias", "kernel_axes"):
        assert getattr(fused, name) == getattr(linear, name)
    assert (fused.kernel is None) == (linear.kernel is None)
    if fused.kernel is not None:
        assert fused.kernel.dtype == linear.kernel.dtype == fused.scale.dtype
