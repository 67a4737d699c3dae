"""Two layers in FP8: one line around their construction and their calls.

A LayerNormMLP and a TransformerLayer run forward and backward in bf16, under delayed scaling and under current
scaling, with the same weights and the same input. Delayed scaling takes its scales from earlier steps, so it runs a few
steps first.

    python examples/fp8_layer.py

prints, for each layer and recipe, which FP8 types the matrix multiplications of the lowered program read, and how far
output and weight gradients are from bf16's, as relative L2 distances. E4M3 has 3 bits of mantissa (a rounding error of
up to 6 %), E5M2, for gradients, has 2 (up to 12 %).
"""

import re

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te import DelayedScaling, Float8CurrentScaling, LayerNormMLP, TransformerLayer, autocast
from jax_te.quantize import with_max_gradients, write_back
from jax_te.training import split_model

HIDDEN, FFN, HEADS = 64, 256, 4
SHAPE = (4, 32, HIDDEN)  # [b, s, h]
RECIPES = {"bf16": None, "delayed": DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling()}
LAYERS = {
    "LayerNormMLP": lambda rngs: LayerNormMLP(HIDDEN, FFN, params_dtype=jnp.bfloat16, rngs=rngs),
    "TransformerLayer": lambda rngs: TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=jnp.bfloat16, rngs=rngs
    ),
}


@jax.jit
def forward_backward(layer, x, dy):
    """Return the output, the gradients of the parameters, and the layer with its next quantizer state.

    The gradient of a quantizer state is its next value: amax histories with this step's largest values in front, and
    the scales that were used. It is written back, not added: in the dtype of with_max_gradients the gradients of two
    uses merge by maximum. Recipes without state have nothing to write.
    """
    graphdef, params, quantizers, rest = split_model(layer)

    def forward(params, quantizers):
        return nnx.merge(graphdef, params, quantizers, rest)(x)

    y, pullback = jax.vjp(forward, params, with_max_gradients(quantizers))
    gradients, next_quantizers = pullback(dy)
    return y, gradients, nnx.merge(graphdef, params, write_back(quantizers, next_quantizers), rest)


def f8_multiplications(text):
    """Count the matrix multiplications of a lowered program that read each type of FP8."""
    found = {}
    for line in text.splitlines():
        if "dot_general" in line or "@te_gemm" in line:  # XLA's, and Transformer Engine's
            for name in set(re.findall(r"f8E\d+M\d+\w*", line)):
                found[name] = found.get(name, 0) + 1
    return found


def distance(tree, reference):
    """Return the relative L2 distance of two trees of arrays."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    pairs = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    return float(jnp.sqrt(sum(jnp.sum((a - b) ** 2) for a, b in pairs) / sum(jnp.sum(b**2) for _, b in pairs)))


def main():
    x = jax.random.normal(jax.random.key(1), SHAPE, jnp.bfloat16)
    dy = jax.random.normal(jax.random.key(2), SHAPE, jnp.bfloat16)
    for name, build in LAYERS.items():
        reference = None
        for label, recipe in RECIPES.items():
            with autocast(recipe):  # the one line; None turns quantization off
                layer = build(nnx.Rngs(0))
                found = f8_multiplications(forward_backward.lower(layer, x, dy).as_text())
                for _ in range(3 if label == "delayed" else 1):
                    y, gradients, layer = forward_backward(layer, x, dy)
            reference = (y, gradients) if reference is None else reference
            apart = distance(y, reference[0]), distance(gradients, reference[1])
            print(
                f"{name:16} {label:8} f8 operands {found or 'none'}; from bf16: y {apart[0]:.3f}, grad {apart[1]:.3f}"
            )
            if recipe is None:
                continue
            if set(found) != {"f8E4M3FN", "f8E5M2"}:
                raise SystemExit(f"{name} under {label} should multiply E4M3 and E5M2 values, found {found}")
            if not (0.0 < apart[0] < 0.06 and 0.0 < apart[1] < 0.12):
                raise SystemExit(f"{name} under {label} is further from bf16 than FP8's rounding explains: {apart}")
    print("ok: FP8 operands in both layers, results within FP8's rounding of bf16's")


if __name__ == "__main__":
    main()
