"""The layers of `jax_te.layers` as Linen modules. `LinenModule` puts the NNX layer's docstring before each example."""

from __future__ import annotations

from jax_te import layers
from jax_te.linen.module import LinenModule


class DotProductAttention(LinenModule, nnx_class=layers.DotProductAttention, init=False):
    """
    >>> q = jnp.ones((2, 8, 4, 16))
    >>> DotProductAttention(4, 16).apply({}, q, q, q).shape
    (2, 8, 4, 16)
    """


class Embedding(LinenModule, nnx_class=layers.Embedding, init=False):
    """
    >>> layer, ids = Embedding(100, 16), jnp.zeros((2, 8), jnp.int32)
    >>> layer.apply(layer.init(jax.random.key(0), ids), ids).shape
    (2, 8, 16)
    """


class LayerNorm(LinenModule, nnx_class=layers.LayerNorm, init=False):
    """
    >>> layer, x = LayerNorm(2), jnp.array([[-3.0, 3.0]])
    >>> layer.apply(layer.init(jax.random.key(0), x), x).round(3).tolist()
    [[-1.0, 1.0]]
    """


class LayerNormLinear(LinenModule, nnx_class=layers.LayerNormLinear, init=False):
    """
    >>> layer, x = LayerNormLinear(16, (3, 16)), jnp.ones((2, 4, 16))
    >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
    (2, 4, 3, 16)
    """


class GroupedLinear(LinenModule, nnx_class=layers.GroupedLinear, init=False):
    """
    >>> layer, x, sizes = GroupedLinear(2, 16, 32), jnp.ones((5, 16)), jnp.array([4, 1])
    >>> layer.apply(layer.init(jax.random.key(0), x, sizes), x, sizes).shape
    (5, 32)
    """


class GroupedLoRA(LinenModule, nnx_class=layers.GroupedLoRA, init=False):
    """
    >>> layer, x, sizes = GroupedLoRA(GroupedLinear(2, 16, 32), 4), jnp.ones((5, 16)), jnp.array([4, 1])
    >>> layer.apply(layer.init(jax.random.key(0), x, sizes), x, sizes).shape
    (5, 32)
    """


class LayerNormMLP(LinenModule, nnx_class=layers.LayerNormMLP, init=False):
    """
    >>> layer, x = LayerNormMLP(16, 32, activation="swiglu"), jnp.ones((2, 4, 16))
    >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
    (2, 4, 16)
    """


class Linear(LinenModule, nnx_class=layers.Linear, init=False):
    """
    >>> layer, x = Linear(16, 32), jnp.ones((2, 16))
    >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
    (2, 32)
    """


class LoRA(LinenModule, nnx_class=layers.LoRA, init=False):
    """
    In Linen the adapter is in the collection ``LoRAParam``, and the base in ``params``.

    >>> layer, x = LoRA(Linear(16, 32), 4), jnp.ones((2, 16))
    >>> variables = layer.init(jax.random.key(0), x)
    >>> list(variables["params"]), list(variables["LoRAParam"])
    (['base'], ['lora_a', 'lora_b'])

    Flax's ``TrainState`` trains adapters as its ``params``, with the base outside of it. Beside
    ``_overwrite_with_gradient``, the state of a recipe, it would drop a collection of another name:

    >>> import optax
    >>> from flax import linen as nn
    >>> from flax.training.train_state import TrainState
    >>> from jax_te.linen import value_and_grad
    >>> from jax_te.recipe import DelayedScaling, autocast
    >>> with autocast(DelayedScaling()):
    ...     variables = nn.unbox(layer.init(jax.random.key(0), x))
    ...     base, own = variables["params"], "_overwrite_with_gradient"
    ...     trained = {"params": variables["LoRAParam"], own: variables[own]}
    ...     state = TrainState.create(apply_fn=layer.apply, params=trained, tx=optax.adam(1e-2))
    ...     def loss(trained):
    ...         variables = {"params": base, "LoRAParam": trained["params"], own: trained[own]}
    ...         return jnp.mean(layer.apply(variables, x) ** 2)
    ...     grads = value_and_grad(loss)(state.params)[1]
    ...     state = state.apply_gradients(grads=grads)
    >>> sorted(state.params), bool(jnp.any(state.params["params"]["lora_b"] != 0))
    (['_overwrite_with_gradient', 'params'], True)
    """


class MoE(LinenModule, nnx_class=layers.MoE, init=False):
    """
    The states of its router are in ``_overwrite_with_gradient``, with their next values as gradients: take one gradient
    a step. `value_and_grad` is needed unless each loss calls the layer once.

    >>> from jax_te.config import RouterOptions
    >>> layer, x = MoE(16, 32, RouterOptions(num_experts=4)), jnp.ones((2, 8, 16))
    >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
    (2, 8, 16)
    """


class MultiLatentAttention(LinenModule, nnx_class=layers.MultiLatentAttention, init=False):
    """
    >>> from jax_te.config import LatentAttentionOptions
    >>> sizes = LatentAttentionOptions(q_lora_rank=16, kv_lora_rank=16, qk_head_dim=16, v_head_dim=16)
    >>> layer, x = MultiLatentAttention(32, 4, sizes), jnp.ones((2, 8, 32))
    >>> layer.apply(layer.init(jax.random.key(0), x), x, rngs={"dropout": jax.random.key(1)}).shape
    (2, 8, 32)
    """


class MultiheadAttention(LinenModule, nnx_class=layers.MultiheadAttention, init=False):
    """
    >>> layer, x = MultiheadAttention(32, 4), jnp.ones((2, 8, 32))
    >>> layer.apply(layer.init(jax.random.key(0), x), x, rngs={"dropout": jax.random.key(1)}).shape
    (2, 8, 32)
    """


class RMSNorm(LinenModule, nnx_class=layers.RMSNorm, init=False):
    """
    >>> layer, x = RMSNorm(2), jnp.array([[2.0, 2.0]])
    >>> layer.apply(layer.init(jax.random.key(0), x), x).round(3).tolist()
    [[1.0, 1.0]]
    """


class RelativePositionBias(LinenModule, nnx_class=layers.RelativePositionBias, init=False):
    """
    >>> layer = RelativePositionBias(4)
    >>> layer.apply(layer.init(jax.random.key(0), 6, 8), 6, 8).shape
    (1, 4, 6, 8)
    """


class Router(LinenModule, nnx_class=layers.Router, init=False):
    """
    For its states see `MoE`.

    >>> from jax_te.config import RouterOptions
    >>> layer, x = Router(16, RouterOptions(num_experts=4)), jnp.ones((2, 8, 16))
    >>> layer.apply(layer.init(jax.random.key(0), x), x).probs.shape
    (2, 8, 2)
    """


class SharedExperts(LinenModule, nnx_class=layers.SharedExperts, init=False):
    """
    >>> layer, x = SharedExperts(16, 32), jnp.ones((2, 4, 16))
    >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
    (2, 4, 16)
    """


class TransformerLayer(LinenModule, nnx_class=layers.TransformerLayer, init=False):
    """
    >>> layer, x = TransformerLayer(32, 64, 4), jnp.ones((2, 8, 32))
    >>> layer.apply(layer.init(jax.random.key(0), x), x, rngs={"dropout": jax.random.key(1)}).shape
    (2, 8, 32)
    """
