"""Memory of a gradient under each way of recomputation, by XLA's analysis of the compiled program: docs/recompute.md.

    python docs/recompute_table.py [--recipe delayed]

Nothing runs: the gradient is compiled for the default device.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Var

from jax_te.config import TransformerConfig
from jax_te.models import Execution, GPTModel
from jax_te.recipe import autocast, recipe_from_name

LAYERS, HIDDEN, HEADS, BATCH, LENGTH, VOCAB = 4, 256, 4, 4, 512, 256
FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "selective: core_attn": ({"recompute_granularity": "selective"}, {}),
    "selective: layernorm": ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, {}),
    "selective: activation": ({"recompute_granularity": "selective", "recompute_modules": ["activation"]}, {}),
    "selective: mlp": ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, {}),
    "selective: core_attn, mlp": (
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        {},
    ),
    "full, block of 2": ({**FULL, "recompute_method": "block", "recompute_num_layers": 2}, {}),
    "full, save_quantized": (FULL, {"execution": Execution("save_quantized")}),
    "full, save_gemms": (FULL, {"execution": Execution("save_gemms")}),
    "full, uniform, 1 layer": (FULL, {}),
    "full, uniform, 2 layers": ({**FULL, "recompute_num_layers": 2}, {}),
}
"""By name: fields of the configuration, and arguments of the model."""


def megabytes(way: str, recipe: str | None = None) -> tuple[float, float]:
    """Kept for backward, and the peak of temporary memory in a compiled gradient, in MiB."""
    fields, options = WAYS[way]
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        **fields,
    )
    with autocast(None if recipe is None else recipe_from_name(recipe)):
        model = nnx.eval_shape(
            lambda: GPTModel(config, vocab_size=VOCAB, max_sequence_length=LENGTH, rngs=nnx.Rngs(0), **options)
        )
        tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)

        def loss(model: Any, tokens: Any, key: Any) -> Any:
            return model.loss(tokens, tokens, dropout_key=key)

        given = model, tokens, jax.eval_shape(lambda: jax.random.key(0))
        forward = jax.make_jaxpr(lambda *args: jax.vjp(lambda model: loss(model, *args[1:]), args[0])[1])(*given).jaxpr
        compiled = jax.jit(jax.grad(loss)).lower(*given).compile()
    saved = {v for v in forward.outvars if isinstance(v, Var)} - {*forward.invars, *forward.constvars}
    residuals = sum(v.aval.size * v.aval.dtype.itemsize for v in saved)
    return residuals / 2**20, compiled.memory_analysis().temp_size_in_bytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="e.g. delayed, current (default: none)")
    recipe = parser.parse_args().recipe
    print("| recompute | residuals (MiB) | peak of temporary memory (MiB) |\n|---|---|---|")
    for way in WAYS:
        residuals, peak = megabytes(way, recipe)
        print(f"| {way} | {residuals:.0f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
