"""From a `RunConfig` to the model, the optimizer, the loss and the contexts of its run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jax_te.models import GPTModel
from jax_te.ops import OPS, AttentionSpec, explain_backend, use_backend
from jax_te.parallel import make_mesh
from jax_te.recipe import autocast
from jax_te.training.loss_scale import DynamicLossScale, LossScale
from jax_te.training.optimizer import adamw_with_schedule
from jax_te.training.run_config import VOCAB_SIZE, RunConfig
from jax_te.typing import Array, PyTree


def model_builder(config: RunConfig) -> Callable[[nnx.Rngs], GPTModel]:
    """A function that builds the run's model."""

    def build(rngs: nnx.Rngs) -> GPTModel:
        return GPTModel(
            config.transformer_config(),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=config.seq_len,
            position_embedding_type=config.position_embedding,
            share_embeddings_and_output_weights=config.tie_embeddings,
            remat=config.remat,
            rngs=rngs,
        )

    return build


def optimizer(config: RunConfig) -> optax.GradientTransformation:
    """AdamW with the run's schedule."""
    return adamw_with_schedule(
        learning_rate=config.learning_rate,
        total_steps=config.decay_steps,
        warmup_steps=config.warmup_steps,
        final_fraction=config.min_learning_rate / config.learning_rate,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
    )


def loss_scaler(config: RunConfig) -> LossScale | None:
    """fp16's gradients need one."""
    return DynamicLossScale() if "float16" in (config.params_dtype, config.compute_dtype) else None


def loss_fn(model: Any, batch: PyTree, key: Array | None) -> Array:
    """Mean loss of a batch ``{"tokens": [b, s], "labels": [b, s]}``; ``key`` None is evaluation."""
    return model.loss(batch["tokens"], batch["labels"], dropout_key=key)


@contextlib.contextmanager
def contexts(config: RunConfig) -> Iterator[Mesh | None]:
    """The ambient recipe, backend and mesh of the run; gives the mesh."""
    sizes = config.parallel_config()
    mesh = None if sizes is None else make_mesh(sizes, axis_type=config.mesh_axis_type)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        stack.enter_context(autocast(config.make_recipe()))
        stack.enter_context(use_backend(config.backend))  # type: ignore[arg-type]
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        yield mesh


def explain_backends(config: RunConfig) -> list[str]:
    """What runs each op of the model and why, one line for each backend and reason; call it inside `contexts`.

    Raises:
        BackendUnavailableError: if the backend asked for cannot run one of them.
    """
    grouped: dict[tuple[str, str], list[str]] = {}
    recipe = config.make_recipe()
    for op in OPS:
        attention = _attention(config) if op == "dot_product_attention" else None
        choice = explain_backend(op, recipe=recipe, attention=attention)
        grouped.setdefault((choice.backend, choice.reason), []).append(op)
    if len(grouped) == 1:
        ((backend, reason),) = grouped
        return [f"{backend} for every op: {reason}"]
    return [f"{backend} for {', '.join(ops)}: {reason}" for (backend, reason), ops in grouped.items()]


def _attention(config: RunConfig) -> AttentionSpec:
    d = config.hidden_size // config.num_heads
    return AttentionSpec(
        dtype=jnp.dtype(config.compute_dtype),
        batch=config.batch_size // config.microbatches,
        q_length=config.seq_len,
        kv_length=config.seq_len,
        heads=config.num_heads,
        groups=config.num_query_groups,
        head_dim=d,
        mask_type="causal",
        scale=d**-0.5,
        dropout_rate=config.dropout,
        packed=config.position_embedding != "rope" and config.num_heads == config.num_query_groups,
    )
