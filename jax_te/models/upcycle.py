"""A model with experts from a trained one without."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.config import ExpertsConfig, TransformerConfig
from jax_te.layers import LoRA, RecipeModule, TrainingMode, quantizable_modules
from jax_te.megatron import ActivationDtype
from jax_te.models.gpt import GPTModel
from jax_te.quantize import QuantizedKernel
from jax_te.typing import Array

_OF_ACTIVATION = ("activation_func_clamp_value", "glu_linear_offset")
"""Fields of `ExpertsConfig` that feed-forward blocks have, too."""

_OF_BLOCK = {
    "scale": ("pre_mlp_layernorm", "scale"),
    "ln_bias": ("pre_mlp_layernorm", "bias"),
    "wi_kernel": ("mlp", "experts", "linear_fc1", "kernel"),
    "wi_bias": ("mlp", "experts", "linear_fc1", "bias"),
    "wo_kernel": ("mlp", "experts", "linear_fc2", "kernel"),
    "wo_bias": ("mlp", "experts", "linear_fc2", "bias"),
}
"""Array of a feed-forward block -> path in a layer with experts of the array that it becomes."""


@checked
def upcycle(model: GPTModel, *, rngs: nnx.Rngs, **experts: Any) -> GPTModel:
    """Return a model with experts, each of which is a copy of the feed-forward block that it takes the place of.

    The probabilities of a token's experts have the sum 1, so the new model has the outputs of ``model``, up to another
    order of sums, until the experts have learned different things. Its routers are new. Its activations and parameters
    have the dtypes of those of ``model``, whatever the configuration says (`jax_te.megatron.Float16Module` changes
    them), and it trains or evaluates as ``model`` does.

    Args:
        model: a `GPTModel` without experts and without quantized kernels; unchanged.
        rngs: random streams, of which ``params`` draws the routers.
        **experts: fields of `jax_te.config.ExpertsConfig`, with ``num_moe_experts``, such as ``moe_router_topk`` and
            ``moe_layer_freq``.

    Raises:
        ValueError: for a model of another class, with experts, with layers that have recipes, or that are frozen or in
            high precision other than the configuration says, of which some train and others evaluate, or kernels that
            are stored quantized; and for experts that would change the outputs: of another size, with shared or latent
            ones, a capacity, or probabilities whose sum is not 1.

    Source: Komatsuzaki et al. 2022; ``megatron.core.transformer.moe.upcycling_utils``.

    >>> config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32)
    >>> dense = GPTModel(config, vocab_size=32, max_sequence_length=8, rngs=nnx.Rngs(0))
    >>> upcycle(dense, num_moe_experts=4, rngs=nnx.Rngs(1)).layers[0].mlp.experts.linear_fc1.kernel.shape
    (4, 16, 1, 32)
    """
    _check_model(model)
    _check_settings(model)
    mode = _mode_of(model)
    known = {field.name for field in dataclasses.fields(ExpertsConfig) if field.compare} - {*_OF_ACTIVATION}
    if wrong := sorted(experts.keys() - known):
        raise ValueError(f"upcycle takes fields of ExpertsConfig, and {', '.join(wrong)} would change the outputs")
    config = dataclasses.replace(model.config, **experts)
    _check_same_outputs(config)
    rotary = model.rotary
    positions = rotary or ("none" if model.position_embedding is None else "learned_absolute")
    made = GPTModel(
        config,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=model.output_kernel is None,
        execution=model.execution,
        rngs=rngs,
    )
    made.multipliers = model.multipliers
    made.set_attributes(deterministic=mode.deterministic, without_dropout=mode.without_dropout)
    for _, module in nnx.iter_modules(made):
        if isinstance(module, ActivationDtype):
            module.compute_dtype = model.compute_dtype
    old = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    new = dict(nnx.to_flat_state(nnx.state(made, nnx.Param)))
    for path, variable in old.items():
        value = variable.get_value()
        if isinstance(value, QuantizedKernel):
            raise ValueError(f"{'/'.join(map(str, path))} is stored quantized; give jax_te.training.exact_model(state)")
        target = _path_of(path, config)
        new[target].set_value(_copies(value, new[target]))
    dtypes = {variable.get_value().dtype for variable in old.values()}
    if len(dtypes) == 1:
        # The routers', too, which no parameter of the model became.
        for variable in new.values():
            variable.set_value(variable.get_value().astype(*dtypes))
    nnx.update(made, nnx.from_flat_state(new.items()))
    return made


def _check_model(model: GPTModel) -> None:
    """Raise ValueError for a model that cannot be copied into another one with experts."""
    if type(model) is not GPTModel:
        raise ValueError(f"upcycle takes a GPTModel, whose constructor it calls, and got a {type(model).__name__}")
    if model.config.num_moe_experts is not None:
        raise ValueError(f"the model has {model.config.num_moe_experts} experts already; give one without")
    for path, module in nnx.iter_modules(model):
        if isinstance(module, LoRA):
            raise ValueError(
                f"{'.'.join(map(str, path))} is a LoRA, whose arrays the model with experts has no place for; put the "
                "layer that its merge() returns in its place first"
            )
    for path, module in quantizable_modules(model):
        if any(module.own_recipe(kernel) is not None for kernel in module.kernels):
            raise ValueError(
                f"{path} has a recipe of its own, which experts would not have; give a model without rules, and apply "
                "them afterwards"
            )


def _check_settings(model: GPTModel) -> None:
    """Raise ValueError for attributes of a model's modules that no configuration says, which experts would lose."""
    for parts, module in nnx.iter_modules(model):
        path = ".".join(map(str, parts))
        if getattr(module, "frozen", False):
            raise ValueError(
                f"{path} is frozen, which experts would not be; set its frozen=False, and freeze what upcycle returns"
            )
        match parts:
            case ("layers", int(number), *_):
                of_config = model.config.in_high_precision(number)
            case _:
                of_config = False
        if isinstance(module, RecipeModule) and module.high_precision != of_config:
            raise ValueError(
                f"{path} has high_precision={module.high_precision}, which the configuration does not say and experts "
                "would not have; give the model before that change, and change what upcycle returns"
            )
        if isinstance(module, ActivationDtype) and module.compute_dtype != model.compute_dtype:
            raise ValueError(
                f"{path} computes in {module.compute_dtype}, and the model in {model.compute_dtype}; give them one "
                "compute_dtype"
            )


class _Mode(NamedTuple):
    """Training or evaluation of a model's modules, see `jax_te.layers.TrainingMode`."""

    deterministic: bool
    without_dropout: bool


def _mode_of(model: GPTModel) -> _Mode:
    """Return the mode of all modules of a model; raise ValueError if they have several."""
    modules = (module for _, module in nnx.iter_modules(model) if isinstance(module, TrainingMode))
    modes = {_Mode(module.deterministic, module.without_dropout) for module in modules}
    if len(modes) > 1:
        raise ValueError(
            "some modules of the model evaluate or leave dropout out, and others do not; call model.train() or "
            "model.eval(), and model.set_attributes(without_dropout=...)"
        )
    return modes.pop()


def _check_same_outputs(config: TransformerConfig) -> None:
    """Raise ValueError for experts with which a model would not have the outputs of the one without."""
    given: Mapping[str, tuple[bool, str]] = {
        "num_moe_experts": (config.num_moe_experts is None, "give their number"),
        "moe_ffn_hidden_size": (
            config.moe_ffn_hidden_size != config.ffn_hidden_size,
            f"an expert is a copy of the block, of size {config.ffn_hidden_size}",
        ),
        "moe_shared_expert_intermediate_size": (
            config.moe_shared_expert_intermediate_size is not None,
            "shared experts would be added to the copies",
        ),
        "moe_latent_size": (config.moe_latent_size is not None, "experts of other features are no copies"),
        "mtp_num_layers": (config.mtp_num_layers is not None, "layers of further tokens are not copied"),
        "moe_expert_capacity_factor": (config.moe_expert_capacity_factor is not None, "it drops tokens"),
        "moe_expert_rank_capacity_factor": (config.moe_expert_rank_capacity_factor is not None, "it drops tokens"),
        "moe_router_load_balancing_type": (
            config.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"),
            "the chosen probabilities would not have the sum 1",
        ),
        "moe_router_pre_softmax": (config.moe_router_pre_softmax, "the chosen probabilities would not have the sum 1"),
        "moe_router_topk_scaling_factor": (
            config.moe_router_topk_scaling_factor not in (None, 1.0),
            "the probabilities would not have the sum 1",
        ),
        "moe_router_topk": (
            config.moe_router_topk == 1,
            "a probability of one expert is not 1, or has no gradient; take at least 2",
        ),
    }
    for name, (wrong, why) in given.items():
        if wrong:
            raise ValueError(f"upcycle: {name}={getattr(config, name)!r}: {why}")


def _path_of(path: tuple[Any, ...], config: TransformerConfig) -> tuple[Any, ...]:
    """Return the path in the model with experts of the array that a dense model's becomes."""
    match path:
        case ("layers", int(number), "layernorm_mlp", str(name)) if config.has_experts(number):
            return "layers", number, *_OF_BLOCK[name]
        case _:
            return path


def _copies(value: Array, variable: nnx.Variable) -> Array:
    """Return an array for a Variable: ``value``, or a copy of it for each expert along an axis in front."""
    own = variable.get_value()
    return jax.device_put(jnp.broadcast_to(value, own.shape), own.sharding)
