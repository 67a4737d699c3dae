"""A model's loss in parts, which the stages of a pipeline run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.models import StackInput
from jax_te.training.loss import LossFn, WeightedMean
from jax_te.typing import Array, Key, PyTree


@checked
@dataclass(frozen=True)
class PipelinedLoss:
    """A ``loss_fn`` in three parts: the part before the layers, the layers, and the part after them.

    On a mesh with a ``pipeline`` axis `make_train_step` needs these. Everywhere else a `PipelinedLoss` is called like
    any other ``loss_fn`` and calls its parts in order.

    The layers' parameters are on the stages of the layers: ``embed_inputs`` and ``compute_loss`` do not read them.

    Args:
        embed_inputs: ``(model, batch, key) -> StackInput``, the layers' input, such as embedded tokens.
        compute_loss: ``(model, y, batch, key) -> [ ]``, the mean loss over the batch, or a `WeightedMean` whose weight
            comes from the batch alone. ``y`` is the layers' output.
        layers: ``(model) -> layers``, the modules that the stages split. They belong to the model and
            share no parameters. The default is ``model.layers``, see `jax_te.models.ModelInParts`.

    Example:
        Prediction of next tokens, for a model whose methods of these names take the arguments of its ``loss``:

        >>> loss_fn = PipelinedLoss(
        ...     embed_inputs=lambda model, tokens, key: model.embed_inputs(tokens[:, :-1], dropout_key=key),
        ...     compute_loss=lambda model, y, tokens, key: model.compute_loss(y, tokens[:, 1:]),
        ... )
        >>> import jax
        >>> from jax_te.config import TransformerConfig
        >>> from jax_te.models import GPTModel
        >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
        >>> model = GPTModel(config, vocab_size=64, max_sequence_length=16, rngs=nnx.Rngs(0))
        >>> tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 64)
        >>> bool(loss_fn(model, tokens) == model.loss(tokens[:, :-1], tokens[:, 1:]))
        True
    """

    embed_inputs: Callable[[Any, PyTree, Array | None], StackInput]
    compute_loss: Callable[[Any, Array, PyTree, Array | None], Array | WeightedMean]
    layers: Callable[[Any], Sequence[nnx.Module]] = operator.attrgetter("layers")

    def __call__(self, model: nnx.Module, batch: PyTree, key: Key | None = None) -> Array | WeightedMean:
        """Return the loss of a batch."""
        return self.compute_loss(model, self.embed_inputs(model, batch, key).output(self.layers(model)), batch, key)


class StackArrays(NamedTuple):
    """The arrays of a `StackInput`, its keys in one array ``[layers]``, or None."""

    x: Array
    learned: dict[str, Any]
    arrays: dict[str, Any]
    keys: Array | None


def arrays_of(stack: StackInput) -> StackArrays:
    """Return the arrays of a stack's input.

    Raises:
        ValueError: for keys of some layers alone, and for keys that are plain integers.
    """
    keys = [] if stack.keys is None else list(stack.keys)
    given = [key for key in keys if key is not None]
    if given and len(given) < len(keys):
        # A stage does not know until it runs which layers are its own, and a layer is called with a key or without.
        raise ValueError(
            f"{len(given)} of {len(keys)} layers have a dropout key, and the stages of a pipeline are one program: "
            "give each layer a key, or none; a layer that is to drop nothing has rates of 0"
        )
    if any(not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) for key in given):
        raise ValueError("dropout keys of a pipeline's layers are those of jax.random.key, not of jax.random.PRNGKey")
    return StackArrays(stack.x, dict(stack.learned), dict(stack.arrays), jnp.stack(given) if given else None)


def without_gradient(tree: PyTree, error: str) -> PyTree:
    """Return arrays whose differentiation raises ``ValueError(error)``, while it is traced."""

    @jax.custom_jvp
    def same(x: Array) -> Array:
        return x

    @same.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:  # is called for a tangent that is not zero by construction
        raise ValueError(error)

    return jax.tree.map(lambda leaf: same(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, tree)


def in_parts(loss_fn: LossFn) -> PipelinedLoss:
    """Return a ``loss_fn`` whose parts a pipeline can call; raise TypeError for any other."""
    if isinstance(loss_fn, PipelinedLoss):
        return loss_fn
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    raise TypeError(
        "on a mesh with a pipeline axis loss_fn must be a jax_te.training.PipelinedLoss(embed_inputs, compute_loss), "
        f"whose parts the stages call, got {name}; for a model of jax_te use model.embed_inputs and model.compute_loss "
        "in place of model.loss (docs: pipeline); or take a mesh without a pipeline axis"
    )
