"""The layers of `jax_te.layers` for Flax Linen, and what carries parameters and state between Linen and NNX.

Classes have the names and arguments of the NNX layers, without ``rngs``, and are used like any Linen module, in
``setup`` and under ``nn.compact``; inside ``nn.remat``, ``nn.jit``, ``nn.scan`` and ``nn.vmap`` too. The numbers are
those of the NNX layers, bit by bit. An NNX model of your own becomes a Linen module in one line, see `LinenModule`.

**Recipes.** ``with autocast(recipe):`` counts at ``init``, at ``apply``, and around a layer's call inside of a model
(``autocast(None)`` for a first or last layer). A recipe with state, such as `DelayedScaling`, keeps it in the
collection ``_overwrite_with_gradient``, which ``init`` makes under that recipe. Differentiate with respect to it as
well: the gradient of a state is its next value. Flax's ``TrainState``, given the collections ``params`` and
``_overwrite_with_gradient`` as its ``params``, writes that back, and keeps it from the optimizer and from clipping; in
a loop of your own do the same. Models that call a layer twice, or not always, need `value_and_grad`. Next states of
microbatches merge by maximum (`jax_te.quantize.merge_quantizers`) and are never added up; a step that is skipped keeps
its old state (`jax_te.quantize.write_back`).
`prepare_quantization` gives state to variables that have none, and changes the recipe of a running model.

**Dtypes.** A layer computes in its input's dtype. Let parameters be fp32, and inputs bf16: ``TrainState`` has no fp32
masters of bf16 parameters.

**Sharding.** ``init`` puts parameters into ``nn.LogicallyPartitioned`` with the logical axes of
`jax_te.sharding.ShardingRules`; `logical_axis_rules` gives those rules in Flax's form, for
``nn.logical_to_mesh_sharding(nn.get_partition_spec(variables), mesh, rules)``. ``nn.unbox`` gives plain arrays.
``nn.scan`` and ``nn.vmap`` need ``metadata_params={nn.PARTITION_NAME: ...}`` for the axis that they add, and both
collections in ``variable_axes``, as for other boxed parameters and other state.

**Dropout.** Layers with a ``dropout_key`` draw it from ``rngs={"dropout": key}``; without that there is no dropout.

**NNX.** `from_nnx` and `to_nnx` carry parameters and state over, and so do checkpoints of what they give.

**Microbatches.** A call with ``is_first_microbatch=True`` keeps its quantized kernels in the collection
``CachedKernel``, which must be mutable there and be given to the calls with ``is_first_microbatch=False``.

A training loop in FP8, in which nothing but ``autocast`` and the layers is new:

>>> import flax.linen as nn
>>> import optax
>>> from flax.training.train_state import TrainState
>>> import jax_te.linen as te
>>> from jax_te.recipe import DelayedScaling, autocast
>>> class Model(nn.Module):
...     @nn.compact
...     def __call__(self, x):
...         return nn.Dense(1)(te.LayerNormMLP(32, 64)(te.Linear(16, 32)(x)))
>>> model, x = Model(), jax.random.normal(jax.random.key(0), (16, 16))
>>> y = jnp.sum(x, axis=-1, keepdims=True)
>>> @jax.jit
... def train_step(state):
...     def loss_fn(params):
...         return jnp.mean((state.apply_fn(params, x) - y) ** 2)
...     loss, grads = jax.value_and_grad(loss_fn)(state.params)
...     return state.apply_gradients(grads=grads), loss
>>> tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
>>> with autocast(DelayedScaling(amax_history_len=16)):
...     variables = model.init(jax.random.key(1), x)
...     state = TrainState.create(apply_fn=model.apply, params=nn.unbox(variables), tx=tx)
...     state, first = train_step(state)
...     for _ in range(5):
...         state, loss = train_step(state)
>>> bool(loss < first), sorted(state.params)
(True, ['_overwrite_with_gradient', 'params'])
"""

from jax_te.linen.convert import from_nnx, to_nnx
from jax_te.linen.layers import (
    DotProductAttention,
    Embedding,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    LoRA,
    MultiheadAttention,
    RelativePositionBias,
    RMSNorm,
    TransformerLayer,
)
from jax_te.linen.module import LinenModule
from jax_te.linen.quantization import prepare_quantization, value_and_grad
from jax_te.linen.sharding import logical_axis_rules

__all__ = [
    "DotProductAttention",
    "Embedding",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinenModule",
    "LoRA",
    "MultiheadAttention",
    "RMSNorm",
    "RelativePositionBias",
    "TransformerLayer",
    "from_nnx",
    "logical_axis_rules",
    "prepare_quantization",
    "to_nnx",
    "value_and_grad",
]
