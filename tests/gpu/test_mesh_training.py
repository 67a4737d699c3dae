"""A GPT with dropout trains through TE on the meshes and pipelines of two and four GPUs to one GPU's losses.

bf16 activations and parameters, fp32 masters. Another order of sums turns the rounding of some of a layer's values; of
the mean loss of 4,096 tokens little is left, but updates differ, and steps add up. On four CPU devices in plain JAX
the largest gap over these steps was 0.0002 nats in bf16 and 0.0006 under delayed scaling, where a value that was
rounded the other way may be a step of FP8 away, 2^-4, not 2^-9. Masks of another key move the losses by 0.008.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_te.config import ParallelConfig, PipelineConfig, TransformerConfig
from jax_te.models import GPTModel
from jax_te.ops import use_backend
from jax_te.recipe import DelayedScaling, autocast
from jax_te.sharding import make_mesh
from jax_te.training import PipelinedLoss, create_train_state, make_train_step

pytestmark = pytest.mark.gpu

STEPS, BATCH, SEQUENCE, VOCAB = 10, 4, 1024, 256
RECIPES = {"none": None, "delayed": DelayedScaling(amax_history_len=4)}
LIMIT = {"none": 0.001, "delayed": 0.003}
"""Nats."""


def train(recipe: str, seed: int = 0, *, layers: int = 2, options: Any = None, **fields: Any) -> np.ndarray:
    """Losses of the first steps on the mesh in use, if any; ``options`` are those of the step."""
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=256,
        num_attention_heads=4,
        ffn_hidden_size=512,
        params_dtype=jnp.bfloat16,
        compute_dtype=jnp.bfloat16,
        attention_dropout=0.0,  # TE's fused attention has none here
        hidden_dropout=0.5,
        **fields,
    )
    starts = jax.random.randint(jax.random.key(1), (STEPS, BATCH, 1), 0, VOCAB)
    tokens = np.asarray((starts + 3 * jnp.arange(SEQUENCE + 1)[None, None]) % VOCAB)
    tx, losses = optax.adamw(3e-4), []
    with autocast(RECIPES[recipe]), use_backend("te"):
        state = create_train_state(
            lambda rngs: GPTModel(config, vocab_size=VOCAB, max_sequence_length=SEQUENCE, rngs=rngs),
            tx,
            key=jax.random.key(0),
        )
        step = make_train_step(_loss, tx, **(options or {}))
        state = dataclasses.replace(state, rng=jax.random.fold_in(state.rng, seed))
        for batch in tokens:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    return np.array(losses)


_loss = PipelinedLoss(
    embed_inputs=lambda model, batch, key: model.embed_inputs(batch[:, :-1], dropout_key=key),
    compute_loss=lambda model, y, batch, key: model.compute_loss(y, batch[:, 1:]),
)


@functools.cache
def one_gpu(recipe: str, layers: int = 2, microbatches: int = 1) -> np.ndarray:
    return train(recipe, layers=layers, options={"microbatches": microbatches})


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("tensor", {}),
    "tensor and sequence": ("tensor", {"sequence_parallel": True}),
    "fsdp": ("fsdp", {}),
    "ring": ("context", {"cp_comm_type": "p2p"}),
    "ring, zig-zag": ("context", {"cp_comm_type": "p2p", "cp_load_balanced": True}),
    "all-gather": ("context", {"cp_comm_type": "all_gather"}),
    "all-to-all": ("context", {"cp_comm_type": "a2a"}),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gpus", [2, 4])
def test_losses_are_those_of_one_gpu(gpus: int, form: str, recipe: str) -> None:
    if jax.device_count() < gpus:
        pytest.fail(f"this test needs {gpus} GPUs, and there is {jax.device_count()}")
    axis, fields = FORMS[form]
    if fields.get("sequence_parallel"):
        fields = fields | {"tensor_model_parallel_size": gpus}
    with jax.set_mesh(make_mesh(ParallelConfig(**{axis: gpus}))):
        losses = train(recipe, **fields)
    gap = np.abs(losses - one_gpu(recipe))
    print(f"{form} on {gpus}, {recipe}: {gap.max():.4f}, last {losses[-1]:.4f}")
    assert gap.max() < LIMIT[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b", "1f1b,virtual_stages=2", "zero_bubble"])
@pytest.mark.parametrize("gpus", [2, 4])
def test_stages_of_a_pipeline_give_the_losses_of_one_gpu(gpus: int, pipeline: str, recipe: str) -> None:
    if jax.device_count() < gpus:
        pytest.fail(f"this test needs {gpus} GPUs, and there is {jax.device_count()}")
    options = {"microbatches": BATCH, "pipeline": PipelineConfig.parse(pipeline)}
    with jax.set_mesh(make_mesh(ParallelConfig(pipeline=gpus))):
        losses = train(recipe, layers=2 * gpus, options=options)
    gap = np.abs(losses - one_gpu(recipe, 2 * gpus, BATCH))
    print(f"pipeline {pipeline} on {gpus}, {recipe}: {gap.max():.4f}, last {losses[-1]:.4f}")
    assert gap.max() < LIMIT[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_key_shows_in_the_losses(recipe: str) -> None:
    gap = np.abs(train(recipe, seed=1) - one_gpu(recipe))
    print(f"another key, {recipe}: {gap.max():.4f}")
    assert gap.max() > 2 * LIMIT[recipe]
