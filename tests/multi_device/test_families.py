"""Each family of Hugging Face trains on 8 devices as on one, without and with each class of recipes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_te.config import MESH_AXES, ParallelConfig
from jax_te.interop.huggingface import ARCHITECTURES
from jax_te.models import T5Model
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)
from jax_te.sharding import make_mesh
from jax_te.training import PipelinedLoss, create_train_state, make_train_step
from tests.support.families import ENCODERS_ALONE, FAMILIES, LLAMA, MIXED, VOCAB, family_model

ENCODERS = ("T5", "MT5", "Bert", "Roberta")
"""Beginnings of the names of families whose attention is not causal, and has no zig-zag order."""

STEPS, B, S, H, MICROBATCHES = 3, 16, 32, LLAMA["hidden_size"], 2
"""A microbatch has an example for each of 8 devices."""

# fp32: sums over devices in another order, 2^-24 each.
TOLERANCE = 1e-5

TIE = 2.0**-3 / (B * S * H) ** 0.5
"""See ``tests/moe/test_every_mesh.py``: a value on the other side of a tie, beside as many other values."""

RECIPES: dict[str, Any] = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(amax_scope="whole"),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    # Random bits are a function of the gradient, and so another one's where a sum differs in its last bit.
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data": ({"data": 8}, {}),
    "tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, {"sequence_parallel": True, "tensor_model_parallel_size": 2}),
    "context": ({"fsdp": 2, "context": 4}, {"cp_load_balanced": True}),
    "expert": ({"fsdp": 2, "tensor": 2, "expert": 2}, {"moe_token_dispatcher_type": "alltoall"}),
    "pipeline": ({"fsdp": 2, "tensor": 2, "pipeline": 2}, {}),
    "all": ({"context": 2, "expert": 2, "pipeline": 2}, {}),
}
CASES = [
    (family, recipe, list(MESHES)[(row + column) % len(MESHES)])
    for row, family in enumerate(FAMILIES)
    for column, recipe in enumerate(RECIPES)
]
"""Each two of family, recipe and mesh meet."""


def parts(model: Any, tokens: jax.Array, key: Any) -> Any:
    if isinstance(model, T5Model):
        return model.embed_inputs(jnp.flip(tokens[:, :-1], axis=1), tokens[:, :-1])
    return model.embed_inputs(tokens[:, :-1])


def loss_of(model: Any, y: jax.Array, tokens: jax.Array, key: Any) -> jax.Array:
    further = {} if getattr(model, "mtp", None) is None else {"tokens": tokens[:, :-1]}
    return model.compute_loss(y, tokens[:, 1:], **further)


def train(family: str, recipe: str, layers: int, **fields: Any) -> dict[str, np.ndarray]:
    """Losses and norms of the gradient of the first steps, on the mesh in use, if any."""
    # A change is the gradient; Adam's would make rounding errors of small ones large.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0, momentum=0.9))
    with autocast(RECIPES[recipe]):
        state = create_train_state(
            lambda rngs: family_model(family, layers, **fields), optimizer, key=jax.random.key(0)
        )
        step = make_train_step(PipelinedLoss(parts, loss_of), optimizer, microbatches=MICROBATCHES)
        found: list[dict[str, Any]] = []
        for number in range(STEPS):
            tokens = np.random.default_rng(number).integers(0, VOCAB, (B, S + 1)).astype(np.int32)
            state, metrics = step(state, jnp.asarray(tokens))
            found.append({name: value for name, value in metrics.items() if name.endswith(("loss", "grad_norm"))})
    return {name: np.array([each[name] for each in found]) for name in found[0]}


@functools.cache
def one_device(family: str, recipe: str, layers: int) -> dict[str, np.ndarray]:
    return train(family, recipe, layers)


def test_every_family_is_here() -> None:
    assert {*FAMILIES, *ENCODERS_ALONE} == {*ARCHITECTURES}
    assert {name for sizes, _ in MESHES.values() for name in sizes} == {*MESH_AXES}


@pytest.mark.costly(slow=["MixtralForCausalLM-block-context"])
@pytest.mark.wide("MixtralForCausalLM-block-context", "DeepseekV2ForCausalLM-none-expert")
@pytest.mark.parametrize(("family", "recipe", "mesh"), CASES, ids=["-".join(case) for case in CASES])
def test_a_family_trains_as_on_one_device(family: str, recipe: str, mesh: str) -> None:
    sizes, fields = MESHES[mesh]
    # Stages run one program: of two kinds of layers each has one of each.
    layers = 4 if family in MIXED and "pipeline" in sizes else 2
    wanted = one_device(family, recipe, layers)
    if family.startswith(ENCODERS) and "context" in sizes:
        fields = {"cp_comm_type": "all_gather"}  # a ring moves no shards of T5's biases by distance
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))):
        found = train(family, recipe, layers, **fields)
    assert found.keys() == wanted.keys()
    assert np.all(np.diff(wanted["loss"]) != 0.0)
    for name, values in wanted.items():
        # Behind the first step a gradient is of other parameters. Under a recipe values beside a tie have then rounded
        # the other way (docs/troubleshooting_runs.md), in dense models, too, and a few tokens choose other experts.
        # DeepSeek-V3's form under current scaling on data=8 has norms that are off by 2.9e-6, 1.6e-3 and 4.0e-4 in
        # three steps, in which the counts of experts in its first layer with experts differ by 0, 6 and 16 of 2,048
        # choices. Each step from one device's state has all counts the same, norms within 2.9e-6, 1.8e-5 and 9.1e-5,
        # and losses within 4e-7. Without a recipe, on fsdp=2, tensor=2, pipeline=2, all counts are the same in three
        # steps as they are, and all norms within 2e-7.
        steps = 1 if name == "grad_norm" else STEPS
        tolerance = TOLERANCE if recipe == "none" else TIE
        np.testing.assert_allclose(found[name][:steps], values[:steps], rtol=tolerance, err_msg=name)
