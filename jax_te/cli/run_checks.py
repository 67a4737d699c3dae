"""Checks before a run starts: the backend of every op, the recipe of every layer."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.cli.build import abstract_model
from jax_te.cli.module_recipes import LayerRecipes, layer_recipes, recipe_label
from jax_te.cli.objective import model_class
from jax_te.cli.option_table import flag
from jax_te.cli.precision_rules import apply_rules, rules_without_effect
from jax_te.cli.run_config import RunConfig
from jax_te.config import ParallelConfig
from jax_te.megatron import QuantizationReport
from jax_te.models import BertModel, GPTModel
from jax_te.ops import OPS, AttentionSpec, explain_backend, explain_head
from jax_te.quantize import ROLES, TensorQuantizer, quantizer_for
from jax_te.recipe import NVFP4BlockScaling, Recipe
from jax_te.sharding import axis_ranks

_LINEAR_OPS = ("dense", "layernorm_dense", "layernorm_mlp")


def explain_backends(config: RunConfig, targets: int | None = None) -> list[str]:
    """Return the backend of each op of the model, a line per backend and reason, with the parts that it leaves to
    others; call it inside `contexts`.

    Args:
        config: configuration of the run.
        targets: length of the decoder's sequence in a model with an encoder. None: the run's sequence length.

    Raises:
        BackendUnavailableError: if the requested backend cannot run one of them.
    """
    grouped: dict[tuple[str, str, str], list[str]] = {}
    recipes, model = _recipes_in_use(config), config.transformer_config()
    # The experts' op runs in models with experts alone; TE has no kernel for it.
    for op in OPS:
        if op == "grouped_dense" and not model.num_moe_experts:
            continue
        attentions = _attentions(config, targets) if op == "dot_product_attention" else {op: None}
        of_op = recipes if op in _LINEAR_OPS else [None]
        for (name, attention), recipe in itertools.product(attentions.items(), of_op):
            # Gradients of kernels are computed in fp32: a train step adds them up in it.
            choice = explain_backend(
                op,
                recipe=recipe,
                attention=attention,
                activation=config.activation,  # type: ignore[arg-type]  # one of the names
                dtype=config.compute_dtype,
            )
            label = name if len(recipes) == 1 or op not in _LINEAR_OPS else f"{name} ({recipe_label(recipe)})"
            grouped.setdefault((choice.backend, choice.reason, choice.others), []).append(label)
    if not model.fp8_output_proj:  # else one of the linear layers
        choice = explain_head(config.compute_dtype, config.vocab_size // axis_ranks("vocab"))
        grouped.setdefault((choice.backend, choice.reason, choice.others), []).append("the output head")
    if len({(backend, others) for backend, _, others in grouped}) == 1:  # then the most common reason suffices
        (backend, reason, others), _ = max(grouped.items(), key=lambda item: len(item[1]))
        return [f"{backend} for every op: {reason}{others}"]
    return [f"{backend} for {', '.join(ops)}: {reason}{others}" for (backend, reason, others), ops in grouped.items()]


def check_te_on_mesh(config: RunConfig) -> None:
    """Raise ValueError if ``--backend te`` cannot run all linear layers on the run's mesh; call it inside `contexts`.

    Transformer Engine's kernels run on each device's shard of a layer; XLA runs operations on whole tensors.

    Raises:
        ValueError: for options that would fail during the run; the message names them.
    """
    sizes = config.parallel_config()
    if config.backend != "te" or sizes is None or sizes.num_devices == 1:
        return
    where = f"and Transformer Engine runs on each device's part of --mesh {config.mesh}"
    if config.inspect_every:
        raise ValueError(
            f"--inspect-every looks at whole tensors, {where}; give --backend auto, under which XLA runs the "
            "inspections alone, or leave out --inspect-every"
        )
    # In both cases kernels are quantized outside of the op, as global arrays.
    ahead = "--fp8-param holds" if config.fp8_param else f"--microbatches {config.microbatches} keeps"
    for recipe in _recipes_in_use(config):
        quantizers = {role: quantizer_for(recipe, role) for role in ROLES}
        if isinstance(recipe, NVFP4BlockScaling) and any(quantizers.values()):
            raise ValueError(
                f"recipe {recipe_label(recipe)} scales whole tensors and their blocks, {where}; give --backend "
                "auto, under which XLA runs these layers"
            )
        in_blocks = quantizers["kernel"] is not None and not isinstance(quantizers["kernel"], TensorQuantizer)
        if in_blocks and (config.fp8_param or config.microbatches > 1):
            raise ValueError(
                f"{ahead} kernels that recipe {recipe_label(recipe)} quantized in blocks as a whole, {where}; give "
                "--backend auto, under which XLA runs these layers, or leave it out"
            )


def check_mesh_of_processes(config: RunConfig) -> None:
    """Raise ValueError if a run of several processes has a mesh without some of their devices."""
    count, devices = jax.process_count(), jax.device_count()
    if count > 1 and (config.parallel_config() or ParallelConfig()).num_devices != devices:
        raise ValueError(
            f"--mesh {config.mesh or '(none)'} does not have all {devices} devices of the {count} processes; give axes "
            f"whose product is {devices}, e.g. --mesh data={devices}, or --processes none for a run of its own"
        )


def check_precision(config: RunConfig) -> QuantizationReport | None:
    """Return the effect of the run's rules on its model, None without rules; call it inside `contexts`.

    Rules that have no effect are a warning on stderr.

    Raises:
        ValueError: if they are invalid; if nothing is quantized and an option is for runs that quantize; for a size
            that a layer's recipe cannot take; for ``--fp8-param`` with kernels that evaluation quantizes otherwise.
    """
    rules = config.quantization_rules()
    if rules is None:
        return None
    model = abstract_model(config)
    report = apply_rules(model, rules)
    idle = rules_without_effect(report)
    if idle is not None:
        print(f"jax-te: warning: --precision-config: {idle}", file=sys.stderr, flush=True)
    layers = layer_recipes(model)
    if all(layer.training is None for layer in layers):
        for name in ("fp8_param", "inspect_every"):
            if getattr(config, name):
                raise ValueError(
                    f"{flag(name)} is for runs that quantize, and --recipe {config.recipe} with the rules of "
                    "--precision-config quantizes no layer"
                )
    for layer in layers:
        _check_layer(config, layer)
    return report


def _check_layer(config: RunConfig, layer: LayerRecipes) -> None:
    kernels = [quantizer_for(recipe, "kernel") for recipe in (layer.training, layer.evaluation)]
    # A kernel that is stored quantized exists in one format only.
    if config.fp8_param and None not in kernels and kernels[0] != kernels[1]:
        raise ValueError(
            f"--fp8-param holds the kernels of {layer.module} as {recipe_label(layer.training)} has them, and its rule "
            f"in --precision-config evaluates under {recipe_label(layer.evaluation)}; leave one of them out"
        )
    for recipe in filter(None, (layer.training, layer.evaluation)):
        for kernel in layer.kernels:
            rows, *columns = getattr(layer.layer, kernel).get_value().shape
            sizes = {"input size": rows, "output size": math.prod(columns)}
            for what, size in sizes.items():
                if size % recipe.alignment:
                    raise ValueError(
                        f"--precision-config: {layer.module} runs under {recipe.name}, whose sizes must be multiples "
                        f"of {recipe.alignment}, and the {what} of its {kernel} is {size}; keep this layer in high "
                        "precision, or change the size"
                    )


def _recipes_in_use(config: RunConfig) -> list[Recipe | None]:
    """Return every recipe that a layer trains under."""
    rules, ambient = config.quantization_rules(), config.make_recipe()
    if rules is None:
        # First and last layers run under no recipe, whose ops may be another backend's.
        kept = config.bf16_layers_start or config.bf16_layers_end
        return [ambient, None] if kept else [ambient]
    model = abstract_model(config)
    apply_rules(model, rules)
    return list(dict.fromkeys(layer.training for layer in layer_recipes(model)))


def _attentions(config: RunConfig, targets: int | None) -> dict[str, AttentionSpec]:
    """Return the attention of each kind in the run's model, by a name for messages."""
    model, causal = config.transformer_config(), _causal_attention(config)
    kind, name = model_class(config), "dot_product_attention"
    if kind is GPTModel:
        return {name: causal}
    encoder = dataclasses.replace(causal, mask_type="no_mask")
    if kind is BertModel:
        return {name: encoder}
    length, scale = targets or config.seq_len, {"scale": model.softmax_scale or causal.scale}
    cross = dataclasses.replace(encoder, q_length=length, packed=False, **scale)
    if config.position_embedding == "relative":
        bias: Any = {"bias_type": "post_scale_bias", **scale}
        encoder = dataclasses.replace(encoder, bias_shape=_bias_shape(config, config.seq_len), **bias)
        causal = dataclasses.replace(causal, bias_shape=_bias_shape(config, length), **bias)
    decoder = dataclasses.replace(causal, q_length=length, kv_length=length)
    return {f"{name} of the encoder": encoder, f"{name} of the decoder": decoder, f"{name} between them": cross}


def _bias_shape(config: RunConfig, length: int) -> tuple[int, ...]:
    return (1, config.num_heads, length, length)


def _causal_attention(config: RunConfig) -> AttentionSpec:
    model = config.transformer_config()
    d = model.kv_channels or 1
    return AttentionSpec(
        dtype=jnp.dtype(config.compute_dtype),
        batch=config.batch_size // config.microbatches,
        q_length=config.seq_len,
        kv_length=config.seq_len,
        heads=config.num_heads,
        groups=config.num_query_groups,
        head_dim=d,
        v_head_dim=d,
        mask_type="causal",
        scale=d**-0.5,
        dropout_rate=model.attention_dropout,
        # Rotary embedding, and key/value heads of another number, take the fused projection apart.
        packed=config.position_embedding != "rope" and config.num_heads == config.num_query_groups,
    )
