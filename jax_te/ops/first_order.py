"""Results without derivatives: requesting one raises an error instead of silently returning zero."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def refuse_derivatives(arrays: Any, inputs: Any, why: str) -> Any:
    """Return ``arrays``, whose derivatives with respect to ``arrays`` and ``inputs`` are refused.

    The error is raised where a derivative is used, not where JAX traces one: reverse mode whose cotangent is zero, such
    as that of a ``stop_gradient`` or of a sign, goes through. Compiled programs do not change.

    Args:
        arrays: any tree of arrays. Those that are not floating point have no derivatives in any case.
        inputs: any tree of the arrays on which ``arrays`` depend.
        why: message of the error.

    Raises:
        TypeError: when the derivative is computed.

    >>> import jax.numpy as jnp
    >>> squares = lambda x: refuse_derivatives(x * x, (), "x * x has no derivative")
    >>> jax.grad(lambda x: x + jnp.sign(squares(x)))(2.0).item()
    1.0
    >>> try:
    ...     jax.grad(squares)(2.0)
    ... except TypeError as error:
    ...     print(error)
    x * x has no derivative
    """
    leaves, treedef = jax.tree.flatten(arrays)
    refused = {i: leaf for i, leaf in enumerate(leaves) if _is_float(leaf)}
    refused = _refused(why, refused, [leaf for leaf in jax.tree.leaves(inputs) if _is_float(leaf)])
    return jax.tree.unflatten(treedef, [refused.get(i, leaf) for i, leaf in enumerate(leaves)])


def why_quantized(recipe_name: str) -> str:
    """Return the reason why an op with quantized GEMMs has no second derivatives."""
    return (
        f"second derivatives do not exist under recipe {recipe_name!r}: rounding to FP8 or FP4 has none, and a "
        "gradient of a gradient (gradient penalty, MAML, a Hessian, also the value that jax.vjp or value_and_grad "
        "gives beside an inner gradient) would lack their part. Run the function that is differentiated twice inside "
        "`with autocast(None):`, and without recipes of the layers' own (rules of quantize_model, module_recipe), "
        "which hold there, too; or make its inner derivative a constant: jax.lax.stop_gradient"
    )


def why_backend(name: str) -> str | None:
    """Return the reason why ops of a backend have no second derivatives; None if they have them."""
    if name == "pallas":
        return (
            "second derivatives do not exist in the kernels that multiply groups of rows in 16 bits on a Hopper GPU. "
            "Compute what is differentiated twice in float32, or make its inner derivative a constant: "
            "jax.lax.stop_gradient"
        )
    if name != "te":
        return None
    return (
        "second derivatives do not exist in backend 'te': Transformer Engine's kernels have none. Run the function "
        'that is differentiated twice inside `with use_backend("xla"):`, or make its inner derivative a constant: '
        "jax.lax.stop_gradient"
    )


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refused(why: str, arrays: Any, inputs: Any) -> Any:
    return arrays


@functools.partial(_refused.defjvp, symbolic_zeros=True)
def _refused_jvp(why: str, primals: Any, tangents: Any) -> Any:
    used = [tangent for tangent in jax.tree.leaves(tangents) if not isinstance(tangent, SymbolicZero)]
    return primals[0], jax.tree.map(lambda array: _tangent.bind(array, *used, why=why), primals[0])


# A tangent that can be traced and dropped, but neither computed nor transposed. An error in the rule above would come
# too early: JAX also computes tangents that nothing uses afterwards.
_tangent = Primitive("refused_tangent")


@_tangent.def_abstract_eval
def _type(array: Any, *tangents: Any, why: str) -> Any:
    return array


def _raise(*_: Any, why: str) -> NoReturn:
    raise TypeError(why)


def _batched(args: Any, axes: Any, *, why: str) -> tuple[Any, int]:
    # Only the type of the first argument counts.
    array, axis = args[0], axes[0]
    size = next(arg.shape[i] for arg, i in zip(args, axes, strict=True) if i is not None)
    array = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
    return _tangent.bind(array, *args[1:], why=why), 0


_tangent.def_impl(_raise)
ad.deflinear2(_tangent, _raise)
batching.primitive_batchers[_tangent] = _batched
mlir.register_lowering(_tangent, _raise)
