"""Activation functions, plain and gated."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from jax_te._validation import check_float, checked
from jax_te.config import ActivationLike, ActivationParams
from jax_te.ops.backend import ambient_backend, backend_for
from jax_te.ops.first_order import why_backend
from jax_te.ops.linear.norm_and_activation import Activation
from jax_te.ops.linear.plan import row_plan
from jax_te.ops.primitives import Backend
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.typing import Array, BackendName, LogicalAxes


@checked
def activation(
    x: Array,
    name: ActivationLike,
    *,
    params: ActivationParams | None = None,
    out_axes: LogicalAxes | PartitionSpec | None = None,
    backend: BackendName | None = None,
) -> Array:
    """Return the product of the named functions of each component of ``x``.

    With one component, ``n_act = 1``:

    - ``"gelu"``: GELU in its tanh form; ``"gelu_exact"``: in its erf form, as in BERT; ``"qgelu"``:
      ``x sigmoid(1.702 x)``;
    - ``"relu"``: ``max(x, 0)``; ``"srelu"``: its square;
    - ``"silu"``: ``x sigmoid(x)``.

    With two, where the second multiplies a function of the first: ``"geglu"``, ``"qgeglu"``, ``"reglu"``, ``"sreglu"``,
    ``"swiglu"`` (SiLU), ``"glu"`` (the sigmoid) and ``"clamped_swiglu"``, see `jax_te.config.ActivationParams`.

    A function of one array in place of the name is called with fp32 values and differentiated by ``jax.vjp``. It must
    be elementwise, and must not contain arrays to be learned. With several components there is a tuple of functions or
    names, as in te.jax: ``("gelu_exact", "linear")``. Transformer Engine has kernels for its own names, and no exact
    GELU: backend ``"te"`` computes that and users' functions in JAX, as `explain_backend` reports.

    Args:
        x: ``[..., n_act, f]``, fp32, bf16 or fp16, computed in fp32; or fp64, computed in fp64.
        name: a key of `jax_te.config.ACTIVATIONS`, a function, or a tuple of them.
        params: parameters of ``"clamped_swiglu"``. None: ``ActivationParams()``.
        out_axes: logical axes or PartitionSpec of the result; required on a mesh with Explicit axes.
        backend: None for the ambient one.

    Returns:
        ``[..., f]`` in the dtype of ``x``.

    Raises:
        ValueError: for an unknown name, another number of components, or parameters of an activation that has none.
        TypeError: for an input that is not floating point, or an activation that is neither name nor function.

    Source: ``transformer_engine.jax.activation.activation``; Shazeer 2020 (with two components); So et al. 2021
    (``srelu``).

    >>> import jax.numpy as jnp
    >>> activation(jnp.array([[-1.0, 2.0]]), "relu").tolist()
    [0.0, 2.0]
    """
    function = Activation(name, params)
    n_act = len(function.parts())
    if x.ndim < 2 or x.shape[-2] != n_act:
        raise ValueError(f"activation: x must be [..., {n_act}, f] for {name!r}, got {x.shape}")
    check_float("activation", x)
    axes: Any = None if out_axes is None else (*out_axes[:-1], "components", out_axes[-1])
    if isinstance(out_axes, PartitionSpec):
        axes = PartitionSpec(*out_axes[:-1], None, out_axes[-1])
    plan = row_plan(x.shape, axes, out_axes, whole=0)
    chosen = backend_for("activation", backend or ambient_backend.value, None, plan.reason, dtype=x.dtype)
    return _activation(_Spec(chosen, function), plan.shards(plan.x_spec, plan.out_spec), x, None, out_axes)


class _Spec(NamedTuple):
    backend: Backend
    activation: Activation


def _fwd(spec: _Spec, x: Array) -> tuple[Array, Any]:
    return spec.backend.act(x, spec.activation), x


def _bwd(spec: _Spec, x: Array, dz: Array) -> tuple[Array, None]:
    return spec.backend.act_backward(dz, x, spec.activation), None


_activation = sharded_vjp(_fwd, _bwd, name="activation", once=lambda spec: why_backend(spec.backend.NAME))
