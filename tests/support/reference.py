"""Transformer layer and GPT written from the formulas, head by head, for NumPy or jax.numpy in fp64.

Independent of jax_te but for the layout of its parameters, which come as nested dictionaries (`parameters`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.support.numerics import draw

ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
"""Largest relative error of one rounding."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Which transformer layer."""

    n: int = 4
    g: int = 4
    d: int = 8
    rms: bool = False
    activation: str = "gelu"
    rotary_base: float | None = None
    epsilon: float = 1e-5
    causal: bool = True
    zero_centered: bool = False
    residual_post_norm: bool = False
    output_norm: bool = False
    window: int | None = None
    scale: float | None = None
    qk_norm_before_rope: bool = False
    block_output_norm: bool = False
    parallel: bool = False
    input_norm: bool = True


def parameters(model: nnx.Module) -> dict[str, Any]:
    """Parameters of a model as nested dictionaries of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def randomize(model: Any) -> Any:
    """Every parameter drawn anew, so that no bias is 0 and no scale 1; kernels keep activations near size 1."""

    def fill(path: Any, value: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "scale" in name:
            return draw(name, value.shape, value.dtype, scale=0.3, shift=1.0)
        size = 0.3 if value.ndim == 1 or "bias" in name else 1.0 if "embedding" in name else value.shape[0] ** -0.5
        return draw(name, value.shape, value.dtype, scale=size)

    nnx.update(model, jax.tree_util.tree_map_with_path(fill, nnx.state(model, nnx.Param)))
    return model


def norm(xp: ModuleType, x: Any, scale: Any, bias: Any, form: Form) -> Any:
    centred = x if form.rms else x - x.mean(-1, keepdims=True)
    y = centred / xp.sqrt((centred * centred).mean(-1, keepdims=True) + form.epsilon)
    y = y * (scale + 1.0 if form.zero_centered else scale)
    return y if bias is None else y + bias


def rotation(positions: np.ndarray, d: int, base: float) -> np.ndarray:
    """One rotation matrix ``[d, d]`` for each position."""
    out = np.zeros((len(positions), d, d))
    for row, position in enumerate(positions):
        for i in range(d // 2):
            angle = position / base ** (2 * i / d)
            j = i + d // 2
            out[row, i, i], out[row, i, j] = math.cos(angle), -math.sin(angle)
            out[row, j, i], out[row, j, j] = math.sin(angle), math.cos(angle)
    return out


def attention_block(
    xp: ModuleType,
    p: dict[str, Any],
    x: Any,
    form: Form,
    positions: np.ndarray | None = None,
    source: Any = None,
    causal: bool | None = None,
    bias: Any = None,
) -> Any:
    """Projections and attention on the normalized input, one head after the other; keys and values are of ``source``,
    or of the input itself.
    """
    d, r = form.d, form.n // form.g
    source = x if source is None else source
    turn = None
    if form.rotary_base is not None:
        turn = rotation(np.arange(x.shape[1]) if positions is None else positions, d, form.rotary_base)

    def project(of: Any, name: str, component: int | None, group: int) -> Any:
        kernel, bias = p[name]["kernel"], p[name].get("bias")
        at = np.s_[group * d : (group + 1) * d] if component is None else np.s_[component, group * d : (group + 1) * d]
        y = of @ (kernel[:, at] if component is None else kernel[(slice(None), *at)])
        return y if bias is None else y + bias[at]

    def place(y: Any, which: str) -> Any:
        def normed(y: Any) -> Any:
            return norm(xp, y, p[which]["scale"], p[which].get("bias"), form) if which in p else y

        y = normed(y) if form.qk_norm_before_rope else y
        y = y if turn is None else xp.einsum("sij,bsj->bsi", turn, y)
        return y if form.qk_norm_before_rope else normed(y)

    if "qkv" in p:
        names: dict[str, Any] = {"k": ("qkv", r), "v": ("qkv", r + 1)}
    elif "key_value" in p:
        names = {"k": ("key_value", 0), "v": ("key_value", 1)}
    else:
        names = {"k": ("key", None), "v": ("value", None)}
    queries = "qkv" if "qkv" in p else "query"
    sq, skv = x.shape[1], source.shape[1]
    away = np.arange(skv)[None] - np.arange(sq)[:, None]
    seen = away <= 0 if (form.causal if causal is None else causal) else np.ones((sq, skv), bool)
    if form.window is not None:
        seen = seen & (away >= -form.window)
    out = 0.0 if p["proj"].get("bias") is None else p["proj"]["bias"]
    for head in range(form.n):
        group, component = head // r, head % r
        q = place(project(x, queries, component, group), "q_norm")
        k = place(project(source, *names["k"], group), "k_norm")
        v = project(source, *names["v"], group)
        scores = xp.einsum("bsd,btd->bst", q, k) * (1.0 / math.sqrt(d) if form.scale is None else form.scale)
        scores = xp.where(seen, scores if bias is None else scores + bias[head], -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = xp.exp(scores - top)
        rest = 0.0
        if "core_attention" in p:
            rest = xp.exp(p["core_attention"]["softmax_offset"][head] - top)
        weights = weights / (weights.sum(-1, keepdims=True) + rest)
        out = out + (weights @ v) @ p["proj"]["kernel"][head * d : (head + 1) * d]
    return out


def gelu(xp: ModuleType, x: Any) -> Any:
    return 0.5 * x * (1.0 + xp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def mlp_block(xp: ModuleType, p: dict[str, Any], x: Any, form: Form) -> Any:
    parts = []
    for i in range(p["wi_kernel"].shape[1]):
        a = x @ p["wi_kernel"][:, i]
        parts.append(a if p.get("wi_bias") is None else a + p["wi_bias"][i])
    first = {
        "gelu": lambda a: gelu(xp, a),
        "geglu": lambda a: gelu(xp, a),
        "swiglu": lambda a: a / (1.0 + xp.exp(-a)),
        "reglu": lambda a: xp.where(a > 0, a, 0.0),
        "relu": lambda a: xp.where(a > 0, a, 0.0),
        "tanh": xp.tanh,
    }[form.activation](parts[0])
    y = (first * parts[1] if len(parts) == 2 else first) @ p["wo_kernel"]
    return y if p.get("wo_bias") is None else y + p["wo_bias"]


def layer(
    xp: ModuleType,
    p: dict[str, Any],
    x: Any,
    form: Form,
    positions: np.ndarray | None = None,
    encoded: Any = None,
    bias: Any = None,
) -> Any:
    """``TransformerLayer`` on ``x [b, s, h]``; a decoder attends to ``encoded [b, skv, h]`` as well."""
    attention, mlp = p["self_attention"], p["layernorm_mlp"]

    def add(x: Any, normed: Any, y: Any, block: str) -> Any:
        if form.block_output_norm:
            y = norm(xp, y, p[f"{block}_norm"]["scale"], p[f"{block}_norm"].get("bias"), form)
        return (normed if form.residual_post_norm else x) + y

    normed = entered = x
    if form.input_norm and not form.output_norm:
        own = attention.get("layernorm") or {**attention["qkv"], "bias": attention["qkv"].get("ln_bias")}
        normed = norm(xp, x, own["scale"], own.get("bias"), form)
    x = add(x, normed, attention_block(xp, attention, normed, form, positions, bias=bias), "self_attention")
    if encoded is not None:
        cross = p["inter_attention"]
        normed = norm(xp, x, cross["query"]["scale"], cross["query"].get("ln_bias"), form)
        plain = dataclasses.replace(form, rotary_base=None, window=None)
        x = add(x, normed, attention_block(xp, cross, normed, plain, source=encoded, causal=False), "inter_attention")
    normed = entered if form.parallel else x
    if form.input_norm:
        normed = norm(xp, normed, mlp["scale"], mlp.get("ln_bias"), form)
    x = add(x, normed, mlp_block(xp, mlp, normed, form), "mlp")
    return norm(xp, x, p["layernorm"]["scale"], p["layernorm"].get("bias"), form) if form.output_norm else x


def gpt(xp: ModuleType, p: dict[str, Any], tokens: np.ndarray, form: Form) -> Any:
    """Logits of ``GPTModel`` for ``tokens [b, s]``."""
    table = p["embedding"]["embedding"]
    x = table[tokens]
    if "position_embedding" in p:
        x = x + p["position_embedding"]["embedding"][: tokens.shape[1]]
    for i in range(len(p["layers"])):
        x = layer(xp, p["layers"][i], x, form)
    x = norm(xp, x, p["final_norm"]["scale"], p["final_norm"].get("bias"), form)
    return x @ p.get("output_kernel", table.T)


def t5(
    xp: ModuleType, p: dict[str, Any], encoder_tokens: np.ndarray, tokens: np.ndarray, form: Form, buckets: Any
) -> Any:
    """Logits of ``T5Model``; ``buckets`` gives the bucket of each distance in the encoder and in the decoder."""

    def embed(tokens: np.ndarray) -> Any:
        x = p["embedding"]["embedding"][tokens]
        return x + p["position_embedding"]["embedding"][: tokens.shape[1]] if "position_embedding" in p else x

    def run(name: str, x: Any, form: Form, encoded: Any = None) -> Any:
        bias = None
        if f"{name}_bias" in p:
            away = np.arange(x.shape[1])[None] - np.arange(x.shape[1])[:, None]
            bias = xp.moveaxis(p[f"{name}_bias"]["embedding"][buckets[name](away)], -1, 0)
        for i in range(len(p[f"{name}_layers"])):
            x = layer(xp, p[f"{name}_layers"][i], x, form, encoded=encoded, bias=bias)
        return norm(xp, x, p[f"{name}_norm"]["scale"], p[f"{name}_norm"].get("bias"), form)

    encoded = run("encoder", embed(encoder_tokens), dataclasses.replace(form, causal=False))
    x = run("decoder", embed(tokens), form, encoded)
    return x @ p.get("output_kernel", p["embedding"]["embedding"].T)


def nll(xp: ModuleType, logits: Any, labels: np.ndarray) -> Any:
    """Negative log-likelihood of each label."""
    logits = logits - logits.max(-1, keepdims=True)
    chosen = (logits * np.eye(logits.shape[-1])[labels]).sum(-1)
    return xp.log(xp.exp(logits).sum(-1)) - chosen


@contextlib.contextmanager
def fp64() -> Iterator[None]:
    """jax.numpy as NumPy is: fp64, any broadcasting; and no mesh."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def value_and_vjp64(fn: Callable[..., Any], args: tuple[Any, ...], g: Any) -> tuple[Any, Any]:
    """``fn(*args)`` and the gradients of its arguments for the output gradient ``g``, all in fp64 NumPy."""
    args, g = jax.tree.map(lambda a: np.asarray(a).astype(np.float64), (args, g))

    def run(args: tuple[Any, ...], g: Any) -> tuple[Any, Any]:
        y, vjp = jax.vjp(fn, *args)
        return y, vjp(g)

    with fp64():
        return jax.tree.map(np.asarray, jax.jit(run)(*jax.tree.map(jnp.asarray, (args, g))))
