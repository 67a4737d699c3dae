"""Creation of parameters, and logical axes of parameters and activations."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import brief, checked, float_dtype
from jax_te.random import EXPERT_PARALLEL_RNG
from jax_te.sharding import create_sharded, variable_axes
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes, PyTree


class StepState(nnx.Variable):
    """Base of NNX Variables that hold values of one step, which no state dict keeps."""


def parameter(
    init: Initializer, rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike, axes: LogicalAxes
) -> nnx.Param:
    """Return a parameter with one logical axis name for each dimension in its metadata, as ``logical_axes``.

    The initializer runs in fp32 and the result is cast, so one seed gives the same weights, rounded, in every dtype.
    Values depend on the key and the shape alone, never on the mesh. Under a mesh it is created sharded by its axes:
    inside of ``jax.jit`` no device holds all of it; outside, the default device does until it is sharded.

    Args:
        init: ``init(key, shape, dtype)``.
        rngs: random streams, whose ``params`` stream gives the key.
        shape: shape of the parameter.
        dtype: fp32, bf16 or fp16.
        axes: logical axes, see `jax_te.sharding.ShardingRules`.

    Raises:
        ValueError: for another dtype; if ``axes`` does not name every dimension, or one does not divide over its mesh
            axes.

    >>> kernel = parameter(jax.nn.initializers.ones, nnx.Rngs(0), (2, 4), jnp.bfloat16, ("fsdp", "ffn"))
    >>> kernel.get_metadata("logical_axes")
    ('fsdp', 'ffn')
    """
    dtype = float_dtype("params_dtype", dtype)
    if len(axes) != len(shape):
        raise ValueError(
            f"{len(axes)} logical axes {axes} for a parameter of shape {shape}; name every dimension, or use None"
        )
    axes = tuple(axes)

    def draw(key: Array) -> Array:
        value = init(key, shape, jnp.float32)
        if getattr(value, "shape", None) != shape:
            raise ValueError(f"an initializer must return an array of shape {shape}, got {brief(value)} from {init!r}")
        return value.astype(dtype)

    value = create_sharded(draw, rngs.params(), shape=shape, axes=axes)
    return nnx.Param(value, logical_axes=axes)


def constant(value: float, shape: tuple[int, ...], dtype: DTypeLike, axes: LogicalAxes) -> nnx.Param:
    """Return a `parameter` filled with one value: biases and the scales of norms.

    >>> float(constant(1.0, (4,), jnp.float32, ("norm",))[0])
    1.0
    """
    dtype = float_dtype("params_dtype", dtype)
    filled = create_sharded(lambda: jnp.full(shape, value, dtype), shape=shape, axes=tuple(axes))
    return nnx.Param(filled, logical_axes=tuple(axes))


def expert_rngs(rngs: nnx.Rngs) -> nnx.Rngs:
    """Return the stream from which kernels of experts are drawn, as ``params``.

    It is ``expert-parallel-rng`` of ``rngs`` if present, else derived from its ``params``.

    >>> expert_rngs(nnx.Rngs(0)).params() == nnx.Rngs(0).params()
    Array(False, dtype=bool)
    """
    if EXPERT_PARALLEL_RNG in rngs:
        return nnx.Rngs(params=rngs[EXPERT_PARALLEL_RNG]())
    # crc32, not hash(): Python's hash of a string differs from process to process.
    return nnx.Rngs(params=jax.random.fold_in(rngs.params(), zlib.crc32(EXPERT_PARALLEL_RNG.encode())))


def init_of_each(init: Initializer, key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return kernels ``[e, k, *n]``, each initialized by itself, since an initializer may depend on the sizes of its
    axes.

    >>> init_of_each(jax.nn.initializers.lecun_normal(), jax.random.key(0), (3, 4, 8), jnp.float32).shape
    (3, 4, 8)
    """
    return jax.vmap(lambda key: init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))


def value_or_none(variable: nnx.Variable | None) -> Array | None:
    """Return the array of an optional parameter, or None."""
    return None if variable is None else variable.get_value()


@checked
def parameter_axes(model: nnx.Module) -> PyTree:
    """Return the logical axes of every parameter: ``nnx.state(model, nnx.Param)`` with tuples of names for arrays.

    Map it to shardings with ``is_leaf=lambda node: isinstance(node, tuple)`` and `jax_te.sharding.named_sharding`; the
    result fits the parameters in ``jax.device_put`` and as ``out_shardings``.

    >>> from jax_te.layers import LayerNorm
    >>> nnx.to_pure_dict(parameter_axes(LayerNorm(4, rngs=nnx.Rngs(0))))
    {'bias': ('norm',), 'scale': ('norm',)}
    """
    return jax.tree.map(
        lambda variable: variable.replace(variable_axes(variable, variable.get_value())),
        nnx.state(model, nnx.Param),
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
