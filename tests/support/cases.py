"""One call of every op, with inputs and logical axes, for the tests that run all ops the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_te import ops
from jax_te.quantize import ROLES, init_gemm_state
from jax_te.recipe import Recipe
from tests.support.numerics import draw

Call = Callable[[dict[str, Any], Any, dict[str, Any]], jax.Array]


@dataclass(frozen=True)
class Case:
    """``call(args, states, options)``: ``args`` are differentiable, ``options`` holds ``recipe`` and ``backend``."""

    op: str
    call: Call
    args: dict[str, jax.Array | None]
    axes: dict[str, tuple[str | None, ...]]
    out_axes: tuple[str | None, ...]
    g: jax.Array
    gemms: int = 0

    def run(
        self, args: dict[str, Any], states: Any = None, *, recipe: Recipe | None = None, backend: str = "xla"
    ) -> jax.Array:
        return self.call(args, states, {"recipe": recipe, "backend": backend})

    def states(self, recipe: Recipe | None) -> Any:
        """States that were at work: scales of some size, and a past. None for recipes without state and ops without
        GEMMs.
        """
        if recipe is None or not recipe.has_state or self.gemms == 0:
            return None
        fresh = init_gemm_state(recipe)
        past = {"x": 4.0, "kernel": 1.5, "grad": 0.5}
        state = {
            role: {**fresh[role], "amax_history": fresh[role]["amax_history"].at[0].set(past[role])} for role in ROLES
        }
        return state if self.gemms == 1 else (state, state)

    def astype(self, dtype: Any) -> Case:
        """The same with another compute dtype; parameters stay fp32."""
        cast = {
            name: a.astype(dtype) if name in ("x", "q", "k", "v", "qkv", "logits") else a
            for name, a in self.args.items()
        }
        return replace(self, args=cast, g=self.g if self.op == "softmax_cross_entropy" else self.g.astype(dtype))


def make_case(
    name: str,
    *,
    b: int = 4,
    s: int = 16,
    h: int = 32,
    f: int = 64,
    n: int = 4,
    groups: int = 2,
    d: int = 16,
    v: int = 64,
) -> Case:
    """The case of `CASES` with this name. Sizes suit FP8 and a mesh ``data=2, fsdp=2, tensor=2``."""
    x, out = draw("x", (b, s, h), shift=0.3), draw("g", (b, s, h), scale=0.1)
    lead = ("batch", "sequence")
    norm_args = {"scale": draw("scale", (h,), scale=0.3, shift=1.0), "ln_bias": draw("ln_bias", (h,), scale=0.3)}
    norm_axes = {"x": (*lead, "hidden"), "scale": ("norm",), "ln_bias": ("norm",)}
    options = name.partition(" ")[2]

    if name == "dense":
        axes = {"x": (*lead, "hidden"), "kernel": ("fsdp", "ffn"), "bias": ("ffn",)}

        def call(a, state, o):
            return ops.dense(
                a["x"],
                a["kernel"],
                a["bias"],
                state=state,
                options=ops.LinearOptions(out_axes=(*lead, "ffn"), kernel_axes=axes["kernel"]),
                **o,
            )

        args = {"x": x, "kernel": draw("kernel", (h, f), scale=0.2), "bias": draw("bias", (f,))}
        return Case("dense", call, args, axes, (*lead, "ffn"), draw("g", (b, s, f), scale=0.1), gemms=1)

    if name == "dense row":  # the contracted axis is the sharded one
        axes = {"x": (*lead, "ffn"), "kernel": ("ffn_fsdp", None)}

        def call(a, state, o):
            return ops.dense(
                a["x"],
                a["kernel"],
                state=state,
                options=ops.LinearOptions(out_axes=(*lead, "hidden"), kernel_axes=axes["kernel"]),
                **o,
            )

        args = {"x": draw("x", (b, s, f)), "kernel": draw("kernel", (f, h), scale=0.2)}
        return Case("dense", call, args, axes, (*lead, "hidden"), out, gemms=1)

    if name in ("layernorm", "layernorm rmsnorm"):
        norm = ops.NormSpec(kind=options or "layernorm", zero_centered_gamma=bool(options))

        def call(a, state, o):
            return ops.layernorm(
                a["x"], a["scale"], a["ln_bias"], norm=norm, out_axes=(*lead, "hidden"), backend=o["backend"]
            )

        args = {"x": x, **norm_args} | ({"ln_bias": None} if options else {})
        return Case("layernorm", call, args, norm_axes, (*lead, "hidden"), draw("g", (b, s, h)))

    if name == "layernorm_dense":
        axes = {**norm_axes, "kernel": ("fsdp", "components", "heads"), "bias": ("components", "heads")}
        out_axes = (*lead, "components", "heads")

        def call(a, state, o):
            linear = ops.LinearWeights(a["kernel"], a["bias"], state)
            sharding = ops.LinearOptions(out_axes=out_axes, kernel_axes=axes["kernel"])
            return ops.layernorm_dense(a["x"], a["scale"], a["ln_bias"], linear, options=sharding, **o)

        args = {
            "x": x,
            **norm_args,
            "kernel": draw("kernel", (h, 3, n * d), scale=0.2),
            "bias": draw("bias", (3, n * d)),
        }
        return Case("layernorm_dense", call, args, axes, out_axes, draw("g", (b, s, 3, n * d), scale=0.1), gemms=1)

    if name in ("layernorm_mlp gelu", "layernorm_mlp swiglu"):
        parts, rms = (2, True) if options == "swiglu" else (1, False)
        norm = ops.NormSpec(kind="rmsnorm" if rms else "layernorm")
        wi_axes, wo_axes = ("fsdp", "components", "ffn"), ("ffn_fsdp", None)
        axes = {
            **norm_axes,
            "wi_kernel": wi_axes,
            "wi_bias": ("components", "ffn"),
            "wo_kernel": wo_axes,
            "wo_bias": ("norm",),
        }
        mlp = ops.MlpOptions(
            norm=norm,
            activation=ops.Activation(options),
            wi=ops.LinearOptions((*lead, "hidden"), wi_axes, (*lead, "components", "ffn")),
            wo=ops.LinearOptions((*lead, "ffn"), wo_axes, (*lead, "hidden")),
        )

        def call(a, states, o):
            wi_state, wo_state = (None, None) if states is None else states
            wi = ops.LinearWeights(a["wi_kernel"], a["wi_bias"], wi_state)
            wo = ops.LinearWeights(a["wo_kernel"], a["wo_bias"], wo_state)
            return ops.layernorm_mlp(a["x"], a["scale"], a["ln_bias"], wi, wo, options=mlp, **o)

        args = {
            "x": x,
            **norm_args,
            "wi_kernel": draw("wi", (h, parts, f), scale=0.3),
            "wi_bias": draw("wi_bias", (parts, f), scale=0.3),
        }
        args |= {"wo_kernel": draw("wo", (f, h), scale=0.2), "wo_bias": draw("wo_bias", (h,), scale=0.3)}
        if rms:
            args |= {"ln_bias": None, "wi_bias": None, "wo_bias": None}
        return Case("layernorm_mlp", call, args, axes, (*lead, "hidden"), out, gemms=2)

    if name in ("activation gelu", "activation swiglu"):
        parts = 2 if options == "swiglu" else 1

        def call(a, state, o):
            return ops.activation(a["x"], options, out_axes=(*lead, "ffn"), backend=o["backend"])

        args, axes = {"x": draw("x", (b, s, parts, f), scale=2.0)}, {"x": (*lead, "components", "ffn")}
        return Case("activation", call, args, axes, (*lead, "ffn"), draw("g", (b, s, f)))

    if name.startswith("attention"):
        mask_type, packed = options.removesuffix(" packed"), options.endswith(" packed")
        lengths = jnp.asarray([s - 3 * i % s for i in range(b)], jnp.int32) if "padding" in mask_type else None
        head_axes = (*lead, "heads", None)

        def call(a, state, o):
            qkv = (a["qkv"],) if packed else (a["q"], a["k"], a["v"])
            return ops.dot_product_attention(
                qkv, mask_type=mask_type, kv_lengths=lengths, out_axes=head_axes, backend=o["backend"]
            )

        if packed:
            args, axes = {"qkv": draw("qkv", (b, s, 3, n, d))}, {"qkv": (*lead, "components", "heads", None)}
        else:
            args = {"q": draw("q", (b, s, n, d)), "k": draw("k", (b, s, groups, d)), "v": draw("v", (b, s, groups, d))}
            axes = dict.fromkeys(("q", "k", "v"), head_axes)
        return Case("dot_product_attention", call, args, axes, head_axes, draw("g", (b, s, n, d)))

    if name == "softmax_cross_entropy":
        labels = jnp.asarray([[(7 * i + 3 * j) % v for j in range(s)] for i in range(b)], jnp.int32)

        def call(a, state, o):
            return ops.softmax_cross_entropy(a["logits"], labels, out_axes=lead)

        return Case(
            name,
            call,
            {"logits": draw("logits", (b, s, v), scale=3.0)},
            {"logits": (*lead, "vocab")},
            lead,
            draw("g", (b, s)),
        )

    raise KeyError(name)


GEMM_CASES = ("dense", "dense row", "layernorm_dense", "layernorm_mlp gelu", "layernorm_mlp swiglu")
ATTENTION_CASES = (
    "attention causal",
    "attention padding",
    "attention no_mask packed",
    "attention padding_causal packed",
)
OTHER_CASES = ("layernorm", "layernorm rmsnorm", "activation gelu", "activation swiglu", "softmax_cross_entropy")
CASES = (*GEMM_CASES, *ATTENTION_CASES, *OTHER_CASES)
