"""An overflow of fp16 in a layer under each recipe, and whether output or gradients show it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import normal, ones

from jax_te.layers import LayerNormLinear, LayerNormMLP, Linear
from jax_te.quantize import frozen_scales
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)

RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
LAYERS = {"linear": Linear, "layernorm_linear": LayerNormLinear, "layernorm_mlp": LayerNormMLP}
# Factors of one input, of one output gradient, and of a kernel. Where a kernel's is not 1, what it computes overflows.
OVERFLOWS = {
    "the input": (np.inf, 1.0, {}),
    "the output's gradient": (1.0, np.inf, {}),
    "a kernel": (1.0, 1.0, {"kernel": np.inf, "wo_kernel": np.inf}),
    "the first GEMM's output": (1.0, 1.0, {"wi_kernel": 1e4}),
    "the second GEMM's input gradient": (1.0, 1.0, {"wi_kernel": 1e-3, "wo_kernel": 1e4}),
}
_EVERYWHERE, _IN_AN_MLP = list(OVERFLOWS)[:3], list(OVERFLOWS)[3:]
OVERFLOW_CASES = [(layer, overflow, recipe) for layer in LAYERS for overflow in _EVERYWHERE for recipe in RECIPES]
# Not delayed scaling, under whose first scales the large kernels would be clipped.
OVERFLOW_CASES += [("layernorm_mlp", overflow, recipe) for overflow in _IN_AN_MLP for recipe in ("current", "block")]


def check_overflow_is_seen(layer: str, overflow: str, recipe: str) -> None:
    """Fail unless output and kernel gradients are finite without the overflow, and not all finite with it.

    The layers have no biases, whose gradients are sums of what was not quantized.
    """
    x = jnp.linspace(0.5, 1.0, 128 * 128, dtype=jnp.float16).reshape(128, 128)
    with autocast(RECIPES[recipe]), frozen_scales():
        options = {"bias": False, "init_method": normal(1.0), "params_dtype": jnp.float16}
        if layer == "layernorm_mlp":
            # All of this keeps inf from becoming nan by itself: no 0 and no -inf beside it.
            options |= {"activation": "relu", "normalization": "RMSNorm", "init_method": ones}
            options |= {"output_layer_init_method": ones}
        model = LAYERS[layer](128, 128, **options, rngs=nnx.Rngs(0))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        at, grad_at, changed = OVERFLOWS[overflow]

        @jax.jit
        def finite(at, grad_at, factors):
            def forward(params):
                return nnx.merge(graphdef, params, rest)(x.at[3, 5].multiply(at))

            scaled = [(path, p.replace(p * factors.get(path[-1], one))) for path, p in nnx.to_flat_state(params)]
            y, backward = jax.vjp(forward, nnx.from_flat_state(scaled))
            (grads,) = backward(jnp.ones_like(y).at[7, 9].set(grad_at))
            found = {path[-1]: grad[...] for path, grad in nnx.to_flat_state(grads) if str(path[-1]).endswith("kernel")}
            return jax.tree.map(lambda x: jnp.isfinite(x).all(), {"y": y, **found})

        one = jnp.float16(1.0)
        factors = {"kernel": one, "wi_kernel": one, "wo_kernel": one}
        assert all(finite(one, one, factors).values())
        factors |= {name: jnp.float16(factor) for name, factor in changed.items()}
        assert not all(finite(jnp.float16(at), jnp.float16(grad_at), factors).values())
