"""The layers of `jax_te.layers` for Flax Linen, and functions that convert variables between Linen and NNX.

Classes have the names and arguments of the NNX layers, without ``rngs``, and are used like any Linen module, in
``setup`` and under ``nn.compact``; inside ``nn.remat``, ``nn.jit``, ``nn.scan`` and ``nn.vmap`` too. The numbers are
those of the NNX layers, bit for bit. An NNX model of your own becomes a Linen module in one line, see `LinenModule`.

**Recipes.** ``with autocast(recipe):`` takes effect around ``init``, around ``apply``, and around a layer's call inside
of a model (``autocast(None)`` for a first or last layer). The state of a recipe such as `DelayedScaling` is in the
collection ``_overwrite_with_gradient``, which ``init`` creates under that recipe. Differentiate with respect to this
collection as well: the gradient of a state is its next value. Flax's ``TrainState``, given the collections ``params``
and ``_overwrite_with_gradient`` as its ``params``, writes the next values back, and keeps the collection away from the
optimizer and from clipping; a loop of your own does the same. Next states of microbatches are merged by maximum
(`jax_te.quantize.merge_quantizers`), never added up; a skipped step keeps the old collection. A step outside of the
recipe keeps it, too.

Beside ``_overwrite_with_gradient`` Flax's ``TrainState`` keeps the collection ``params`` alone: others are gone after
its first step. `LoRA` shows how adapters, whose collection is ``LoRAParam``, take the place of ``params`` in it.

**Layers that are called twice, or not in every step.** ``jax.value_and_grad`` adds the next states of two calls, and
gives zeros as those of a layer that is not called. Such models need `value_and_grad`, which merges scales by maximum,
computes an expert bias once from the counts of all calls, and keeps the state of layers that are not called. Under
``jax.vmap`` and ``nn.vmap`` both give the same.

With ``jax.value_and_grad``, two calls of a layer in one trace raise `QuantizerStateError`. All else shows in the next
call, whose result is nan: turns of ``jax.lax.scan`` or ``jax.lax.map``, an ``nn.scan`` that shares the state, several
``nn.remat`` of one layer, gradients of microbatches that are added up, a layer that a step left out. For that, the
collection has a number ``uses`` beside the states of each layer: it is 1, its gradient is the number of calls, and a
layer that reads another number computes nan. The states of such a step are lost; make new ones,
``model.init(key, x)["_overwrite_with_gradient"]``. A mean over microbatches or devices is not seen: the scales are
right, and the newest amaxes too small.

**Experts.** The states of routers, such as the expert bias, are in the same collection, also without a recipe. A step
takes one gradient, since the next bias comes from the counts of all of its tokens: let the loss of several
microbatches run them, in `value_and_grad`. Losses of routers are in the gradients alone: a loop that scales its loss
enters `aux_losses_scaled` around ``apply``.

`prepare_quantization` adds state to variables without it, and changes the recipe of a running model.

**Dtypes.** A layer computes in its input's dtype. Use fp32 parameters with bf16 inputs: ``TrainState`` keeps no fp32
masters of bf16 parameters.

**Sharding.** ``init`` puts parameters into ``nn.LogicallyPartitioned`` with the logical axes of
`jax_te.sharding.ShardingRules`; `logical_axis_rules` returns these rules in Flax's form, for
``nn.logical_to_mesh_sharding(nn.get_partition_spec(variables), mesh, rules)``. ``nn.unbox`` returns plain arrays.
``nn.scan`` and ``nn.vmap`` need ``metadata_params={nn.PARTITION_NAME: ...}`` for the axis that they add, and both
collections in ``variable_axes``, as for other boxed parameters and other state.

**Dropout.** Layers with a ``dropout_key`` draw it from ``rngs={"dropout": key}``. A call in training without that
stream raises unless the layer's rates are 0; ``layer(x, deterministic=True)`` evaluates, and drops nothing.

**NNX.** `from_nnx` and `to_nnx` convert parameters and state, and checkpoints of their results are interchangeable.

**Microbatches.** A call with ``is_first_microbatch=True`` stores its cached kernels in the collection
``CachedKernel``, which must be mutable in that call and be passed to the calls with ``is_first_microbatch=False``.

A training loop in FP8, in which only ``autocast`` and the layers are new:

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
...     loss, grads = te.value_and_grad(loss_fn)(state.params)
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
from jax_te.linen.drop_in import DotGeneral, EinsumOp, dequantize_model, quantization_report, quantize_model
from jax_te.linen.layers import (
    DotProductAttention,
    Embedding,
    GroupedLinear,
    GroupedLoRA,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    LoRA,
    MoE,
    MultiheadAttention,
    MultiLatentAttention,
    RelativePositionBias,
    RMSNorm,
    Router,
    SharedExperts,
    TransformerLayer,
)
from jax_te.linen.loss_scale import aux_losses_scaled
from jax_te.linen.module import LinenModule
from jax_te.linen.quantization import prepare_quantization, value_and_grad
from jax_te.linen.sharding import logical_axis_rules

__all__ = [
    "DotGeneral",
    "DotProductAttention",
    "EinsumOp",
    "Embedding",
    "GroupedLinear",
    "GroupedLoRA",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinenModule",
    "LoRA",
    "MoE",
    "MultiLatentAttention",
    "MultiheadAttention",
    "RMSNorm",
    "RelativePositionBias",
    "Router",
    "SharedExperts",
    "TransformerLayer",
    "aux_losses_scaled",
    "dequantize_model",
    "from_nnx",
    "logical_axis_rules",
    "prepare_quantization",
    "quantization_report",
    "quantize_model",
    "to_nnx",
    "value_and_grad",
]
