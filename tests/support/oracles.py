"""Independent formulas in NumPy and fp64: what the ops are compared with. Nothing here is taken from jax_te or JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
_MANTISSA_BITS = {E4M3: 3, E5M2: 2}
_SMALLEST_EXPONENT = {E4M3: -6, E5M2: -14}
F32 = np.float32
F32_MAX = np.finfo(F32).max


# ---------------------------------------------------------------- FP8


def flush(x: np.ndarray | np.float32) -> np.ndarray:
    """fp32 with subnormals as zeros, which is what XLA computes with on CPU."""
    x = np.asarray(x, F32)
    return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32(0), x), x)


def round_fp8(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Finite values within range, rounded to the nearest FP8 number, ties to the even one; fp64."""
    x = np.asarray(x, np.float64)
    _, exponent = np.frexp(x)  # x = m * 2**exponent with m in [0.5, 1)
    step = np.ldexp(1.0, np.maximum(exponent - 1, _SMALLEST_EXPONENT[dtype]) - _MANTISSA_BITS[dtype])
    return np.copysign(np.round(x / step) * step, x)


def quantize(x: np.ndarray, dtype: np.dtype, scale: np.float32) -> np.ndarray:
    """``clip(x * scale)`` in fp32, rounded to FP8."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = flush(flush(np.asarray(x).astype(F32)) * F32(scale))
        return round_fp8(np.clip(scaled, -FP8_MAX[dtype], FP8_MAX[dtype]), dtype).astype(dtype)


def scale_from_amax(amax: np.float32, dtype: np.dtype, *, margin: int = 0, old: float | None = None) -> np.float32:
    """``max / amax / 2**margin`` in fp32; the old scale where amax is not a positive finite number, if there is one.

    Without one 1 for an amax of 0, and nan for one that is not finite.
    """
    amax = F32(flush(amax))
    if not (np.isfinite(amax) and amax > 0):
        return F32((1.0 if np.isfinite(amax) else np.nan) if old is None else old)
    with np.errstate(over="ignore"):
        scale = F32(FP8_MAX[dtype]) / amax / F32(2**margin)
    return F32(min(scale, F32_MAX))


def amax(x: np.ndarray) -> np.float32:
    """Largest absolute value as fp32."""
    return F32(np.max(np.abs(np.asarray(x).astype(F32))))


@dataclass
class TransformerEngineHistory:
    """One tensor's delayed scaling as Transformer Engine keeps it.

    Slot 0 is empty until a use writes its amax there; the scale for the next use is computed at once and stored; then
    the history rolls by -1, so that the newest amax ends in the last slot, and slot 0 is emptied.
    """

    dtype: np.dtype
    length: int
    algorithm: str = "max"
    margin: int = 0
    scale: np.float32 = field(default_factory=lambda: F32(1))
    history: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.history = np.zeros(self.length, F32)

    def use(self, new_amax: np.float32) -> np.float32:
        """The scale that a tensor with this amax is quantized with."""
        in_use = self.scale
        self.history[0] = new_amax
        chosen = self.history[0] if self.algorithm == "most_recent" else np.max(self.history)
        self.scale = scale_from_amax(chosen, self.dtype, margin=self.margin, old=in_use)
        self.history = np.roll(self.history, -1)
        self.history[0] = 0.0
        return in_use


@dataclass
class Scales:
    """FP8 quantization of one linear layer's operands by NumPy: fixed scales (delayed) or each tensor's own (None,
    current).
    """

    fwd: np.dtype = E4M3
    bwd: np.dtype = E5M2
    fixed: dict[str, float] | None = None
    seen: dict[str, np.float32] = field(default_factory=dict)
    """The amax of each operand that was quantized."""

    def __call__(self, role: str, x: np.ndarray) -> np.ndarray:
        """``x`` quantized and dequantized in fp64."""
        dtype = self.bwd if role == "grad" else self.fwd
        self.seen[role] = amax(x)
        scale = scale_from_amax(self.seen[role], dtype) if self.fixed is None else F32(self.fixed[role])
        return quantize(x, dtype, scale).astype(np.float64) * np.float64(flush(F32(1) / scale))

    def forms(self, role: str, x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """The same for a GEMM that sums over the axes from ``axis`` on, and for one that sums over those before it."""
        values = self(role, x)
        return values, values


class Unquantized(Scales):
    """The same interface for high precision."""

    def __call__(self, role: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(x, np.float64)


# ---------------------------------------------------------------- ops, fp64


def wide(*arrays: object) -> tuple[np.ndarray | None, ...]:
    """Arrays in fp64; None stays."""
    return tuple(None if a is None else np.asarray(a).astype(np.float64) for a in arrays)


def norm(
    x: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray | None,
    *,
    kind: str = "layernorm",
    epsilon: float = 1e-5,
    zero_centered: bool = False,
) -> np.ndarray:
    mean = x.mean(-1, keepdims=True) if kind == "layernorm" else 0.0
    std = np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon)
    y = (x - mean) / std * (scale + 1.0 if zero_centered else scale)
    return y if bias is None else y + bias


def norm_vjp(
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    *,
    kind: str = "layernorm",
    epsilon: float = 1e-5,
    zero_centered: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of x, scale and bias: the Jacobian of each row written out and applied."""
    h = x.shape[-1]
    gamma = scale + 1.0 if zero_centered else scale
    rows, dys = x.reshape(-1, h), dy.reshape(-1, h)
    dx, normed = np.empty_like(rows), np.empty_like(rows)
    centring = np.eye(h) - (1.0 / h if kind == "layernorm" else 0.0)
    for i, row in enumerate(rows):
        centred = centring @ row
        variance = centred @ centred / h + epsilon
        normed[i] = centred / np.sqrt(variance)
        jacobian = (np.eye(h) / np.sqrt(variance) - np.outer(centred, centred) / h / variance**1.5) @ centring
        dx[i] = jacobian.T @ (dys[i] * gamma)
    return dx.reshape(x.shape), (dys * normed).sum(0), dys.sum(0)


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": lambda x: 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))),
    "quick_gelu": lambda x: x / (1.0 + np.exp(-1.702 * x)),
    "relu": lambda x: np.where(x > 0, x, 0.0),
    "squared_relu": lambda x: np.where(x > 0, x * x, 0.0),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "linear": lambda x: x,
}
COMPONENTS = {
    "gelu": ("gelu",),
    "gelu_exact": ("gelu_exact",),
    "geglu": ("gelu", "linear"),
    "qgelu": ("quick_gelu",),
    "qgeglu": ("quick_gelu", "linear"),
    "relu": ("relu",),
    "reglu": ("relu", "linear"),
    "srelu": ("squared_relu",),
    "sreglu": ("squared_relu", "linear"),
    "silu": ("silu",),
    "swiglu": ("silu", "linear"),
    "glu": ("sigmoid", "linear"),
    "clamped_swiglu": ("clamped_silu", "clamped_linear"),
}


def functions(
    name: str, *, limit: float = 7.0, alpha: float = 1.702, linear_offset: float = 1.0
) -> list[Callable[[np.ndarray], np.ndarray]]:
    """The functions of an activation's components."""
    clamped = {
        "clamped_silu": lambda x: np.minimum(x, limit) / (1.0 + np.exp(-alpha * np.minimum(x, limit))),
        "clamped_linear": lambda x: np.clip(x, -limit, limit) + linear_offset,
    }
    return [(FUNCTIONS | clamped)[part] for part in COMPONENTS[name]]


def activation(x: np.ndarray, name: str, **params: float) -> np.ndarray:
    """``x [..., n_act, f]``."""
    out = np.ones(())
    for i, f in enumerate(functions(name, **params)):
        out = out * f(x[..., i, :])
    return out


def activation_vjp(dz: np.ndarray, x: np.ndarray, name: str, **params: float) -> np.ndarray:
    """By central differences of each function: every output depends on one element of each component."""
    step, values, slopes = 1e-5, [], []
    for i, f in enumerate(functions(name, **params)):
        u = x[..., i, :]
        values.append(f(u))
        slopes.append((f(u + step) - f(u - step)) / (2 * step))
    if len(values) == 1:
        return (dz * slopes[0])[..., None, :]
    return np.stack([dz * slopes[0] * values[1], dz * values[0] * slopes[1]], axis=-2)


def linear(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """``x [..., k] @ kernel [k, *n] + bias``."""
    y = np.tensordot(x, kernel, 1)
    return y if bias is None else y + bias


def linear_vjp(g: np.ndarray, x: np.ndarray, kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of x and kernel."""
    n = kernel.ndim - 1
    dx = np.tensordot(g, kernel, (range(g.ndim - n, g.ndim), range(1, kernel.ndim)))
    return dx, np.tensordot(x, g, (range(x.ndim - 1), range(x.ndim - 1)))


def rows_sum(g: np.ndarray, trailing: int) -> np.ndarray:
    """Sum over all axes but the last ``trailing``: a bias gradient."""
    return g.sum(tuple(range(g.ndim - trailing)))


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    causal: bool = False,
    bottom_right: bool = False,
    q_lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
    mask: np.ndarray | None = None,
    window: tuple[int, int] = (-1, -1),
    pre_scale_bias: np.ndarray | None = None,
    post_scale_bias: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
    softcap: float | None = None,
    sink: np.ndarray | None = None,
    max_logit: bool = False,
) -> np.ndarray:
    """Head by head and query by query, over the keys each query may see.

    ``sink [n]`` adds ``exp(sink)`` to a head's denominators; ``max_logit`` gives each head's max logit instead.
    """
    (batch, sq, n, d), (skv, groups) = q.shape, k.shape[1:3]
    full = (batch, n, sq, skv)
    out, largest = np.zeros((batch, sq, n, v.shape[-1])), np.full(n, -np.inf)
    mask = np.broadcast_to(np.zeros((1, 1, 1, 1), bool) if mask is None else mask, full)
    before, after = (np.broadcast_to(np.zeros(()) if b is None else b, full) for b in (pre_scale_bias, post_scale_bias))
    for b, head, i in np.ndindex(batch, n, sq):
        q_length = sq if q_lengths is None else q_lengths[b]
        kv_length = skv if kv_lengths is None else kv_lengths[b]
        away = np.arange(skv) - i - (kv_length - q_length if bottom_right else 0)
        seen = ~mask[b, head, i] & (np.arange(skv) < kv_length)
        seen &= (away <= 0) | (not causal)
        seen &= ((window[0] < 0) | (away >= -window[0])) & ((window[1] < 0) | (away <= window[1]))
        if i >= q_length or not seen.any():
            continue
        group = head // (n // groups)
        scores = k[b, seen, group] @ q[b, i, head] + before[b, head, i, seen]
        scores = scores * (d**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores = scores + after[b, head, i, seen]
        if slopes is not None:
            scores = scores - slopes[head] * np.abs(away[seen])
        largest[head] = max(largest[head], scores.max())
        weights = np.exp(scores - scores.max())
        rest = 0.0 if sink is None else np.exp(sink[head] - scores.max())
        out[b, i, head] = weights / (weights.sum() + rest) @ v[b, seen, group]
    return largest if max_logit else out


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return lse - np.take_along_axis(logits, labels[..., None], -1)[..., 0]


def numeric_vjp(
    fn: Callable[..., np.ndarray], args: Sequence[np.ndarray], g: np.ndarray, step: float = 1e-5
) -> list[np.ndarray]:
    """Gradients of ``sum(fn(*args) * g)`` by central differences, element by element."""
    gradients = []
    for index, arg in enumerate(args):
        gradient, values = np.zeros_like(arg), [np.array(a) for a in args]
        for position in np.ndindex(arg.shape):
            at = arg[position]
            values[index][position] = at + step
            upper = (fn(*values) * g).sum()
            values[index][position] = at - step
            gradient[position] = (upper - (fn(*values) * g).sum()) / (2 * step)
            values[index][position] = at
        gradients.append(gradient)
    return gradients


# ---------------------------------------------------------------- quantized layers: value and gradients


def dense_layer(
    q: Scales, x: np.ndarray, kernel: np.ndarray, bias: np.ndarray | None, g: np.ndarray
) -> dict[str, np.ndarray]:
    """Output and gradients of a linear layer whose GEMM operands go through ``q``."""
    x_forms, kernel_forms = q.forms("x", x, x.ndim - 1), q.forms("kernel", kernel, 1)
    g_forms = q.forms("grad", g, g.ndim - kernel.ndim + 1)
    y = linear(x_forms[0], kernel_forms[1], wide(bias)[0])
    dx, _ = linear_vjp(g_forms[0], x_forms[0], kernel_forms[0])
    _, dkernel = linear_vjp(g_forms[1], x_forms[1], kernel_forms[0])
    return {"y": y, "x": dx, "kernel": dkernel, "bias": rows_sum(wide(g)[0], kernel.ndim - 1)}


def norm_dense_layer(
    q: Scales,
    x: np.ndarray,
    scale: np.ndarray,
    ln_bias: np.ndarray | None,
    kernel: np.ndarray,
    bias: np.ndarray | None,
    g: np.ndarray,
    **spec: object,
) -> dict[str, np.ndarray]:
    """The same behind a norm."""
    wide_x, wide_scale, wide_ln_bias = wide(x, scale, ln_bias)
    inner = dense_layer(q, norm(wide_x, wide_scale, wide_ln_bias, **spec), kernel, bias, g)
    dx, dscale, dln_bias = norm_vjp(inner["x"], wide_x, wide_scale, **spec)
    return {**inner, "x": dx, "scale": dscale, "ln_bias": dln_bias}


def norm_mlp_layer(
    q: tuple[Scales, Scales],
    x: np.ndarray,
    scale: np.ndarray,
    ln_bias: np.ndarray | None,
    wi: np.ndarray,
    wi_bias: np.ndarray | None,
    wo: np.ndarray,
    wo_bias: np.ndarray | None,
    g: np.ndarray,
    *,
    name: str = "gelu",
    params: dict[str, float] | None = None,
    **spec: object,
) -> dict[str, np.ndarray]:
    """Norm, linear, activation, linear; each linear layer has its own scales."""
    params = {} if params is None else params
    wide_x, wide_scale, wide_ln_bias, wide_wi_bias = wide(x, scale, ln_bias, wi_bias)
    normed = q[0].forms("x", norm(wide_x, wide_scale, wide_ln_bias, **spec), x.ndim - 1)[0]
    pre = linear(normed, q[0].forms("kernel", wi, 1)[1], wide_wi_bias)
    second = dense_layer(q[1], activation(pre, name, **params), wo, wo_bias, g)
    dpre = activation_vjp(second["x"], pre, name, **params)
    first = norm_dense_layer(q[0], x, scale, ln_bias, wi, wi_bias, dpre, **spec)
    return {
        "y": second["y"],
        "x": first["x"],
        "scale": first["scale"],
        "ln_bias": first["ln_bias"],
        "wi": first["kernel"],
        "wi_bias": first["bias"],
        "wo": second["kernel"],
        "wo_bias": second["bias"],
    }
