"""Each family of Hugging Face trains on 8 devices as on one, without and with each class of recipes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from jax_te.training import PipelinedLoss, TrainState, create_train_state, make_train_step
from tests.support.families import ENCODERS_ALONE, FAMILIES, LLAMA, MIXED, VOCAB, family_model

ENCODERS = ("T5", "MT5", "Bert", "Roberta")
"""Beginnings of the names of families whose attention is not causal, and has no zig-zag order."""

STEPS, B, S, H, MICROBATCHES = 3, 16, 32, LLAMA["hidden_size"], 2
"""A microbatch has an example for each of 8 devices."""

# fp32: sums over devices in another order, 2^-24 each.
TOLERANCE = 1e-5

DRAWS = 6
"""Steps of one device with other last bits of its parameters, beside which a step on a mesh is judged under a recipe.

Sums in another order differ in their last bits. Where a value lies at a tie of the rounding, it falls on the other
side, which moves the next amax, with it a scale, and so on. How far that goes depends on family and recipe: in Gemma
3's form under current scaling 11 of 12 draws moved the gradient's norm by 2e-5 to 2.3e-3 and the whole gradient by
0.003 to 0.067, and one draw by the last bits alone; the mesh "all" moved it as two of the draws did, to five digits.
"""

WITHIN = 2.0
"""How many times as far as the farthest draw a mesh may be: it is one draw more."""

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


def after_a_tie(recipe: str, topk: float) -> dict[str, float]:
    """What one value on the other side of a tie may move, whether or not a draw has one.

    It is off by a step of the coarsest format, and one value beside B * S * H others in a gradient's norm, beside H in
    a sum of products, such as a token's loss. The whole gradient may be off by an eighth of a step, as if one value in
    64 were; 1e-2 of it was the most in eight families with experts. An amax is one of a tensor's values, and an
    expert's that of another token if the one with the largest chose another expert: it moved by 0.085 when 2 tokens of
    512 did. A token may choose all other experts.
    """
    step = 2.0**-1 if recipe == "nvfp4" else 2.0**-2  # of E2M1, which has one bit behind the first, of E5M2 with two
    return {
        "grad_norm": step / (B * S * H) ** 0.5,
        "loss": step / H**0.5 / (B * S),
        "gradient": step / 8,
        "states": step / 2,
        "tokens_per_expert": 2 * topk,
    }


def parts(model: Any, tokens: jax.Array, key: Any) -> Any:
    if isinstance(model, T5Model):
        return model.embed_inputs(jnp.flip(tokens[:, :-1], axis=1), tokens[:, :-1])
    return model.embed_inputs(tokens[:, :-1])


def loss_of(model: Any, y: jax.Array, tokens: jax.Array, key: Any) -> jax.Array:
    further = {} if getattr(model, "mtp", None) is None else {"tokens": tokens[:, :-1]}
    return model.compute_loss(y, tokens[:, 1:], **further)


class Outcome(NamedTuple):
    """What a train step gives.

    Args:
        params, quantizers: values of these parts of the state behind it.
        metrics: see `measured`.
    """

    params: list[np.ndarray]
    quantizers: list[np.ndarray]
    metrics: dict[str, np.ndarray]


class Step(NamedTuple):
    """A train step of one device.

    Args:
        before: values of the whole state in front of it.
        outcome: what it gives.
    """

    before: list[np.ndarray]
    outcome: Outcome


class Run(NamedTuple):
    """The first train steps of one device.

    Args:
        steps: the steps.
        spread: largest distances between a step and itself with other last bits of its parameters, over all steps:
            ties are rare and reach far, and one step's draws may have none.
    """

    steps: list[Step]
    spread: dict[str, float]


def optimizer() -> optax.GradientTransformation:
    """Changes that are the gradient: Adam's would make rounding errors of small ones large."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0, momentum=0.9))


def start(family: str, layers: int, **fields: Any) -> tuple[TrainState, Any]:
    """A family's first state on the mesh in use, if any, and its train step, both for the recipe in use."""
    state = create_train_state(lambda rngs: family_model(family, layers, **fields), optimizer(), key=jax.random.key(0))
    return state, make_train_step(PipelinedLoss(parts, loss_of), optimizer(), microbatches=MICROBATCHES)


def tokens_of(number: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(number).integers(0, VOCAB, (B, S + 1)).astype(np.int32))


def values_of(tree: Any) -> list[np.ndarray]:
    """Values of a state's arrays, the key of its random numbers apart."""
    leaves = jax.tree.leaves(tree)
    return [np.array(leaf) for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]


def with_values(state: TrainState, values: Sequence[np.ndarray]) -> TrainState:
    """The state with other values of its arrays, each placed as that state's own."""
    left = iter(values)

    def placed(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # of the same seed; a copy, since a step takes its state
            return jax.random.clone(leaf)
        value = next(left)
        assert (value.shape, value.dtype) == (leaf.shape, leaf.dtype)
        return jax.device_put(value, leaf.sharding)

    found = jax.tree.map(placed, state)
    assert next(left, None) is None
    return found


def measured(metrics: dict[str, Any]) -> dict[str, np.ndarray]:
    """Losses, the gradient's norm, and numbers of tokens of each router's experts."""
    kept = ("loss", "grad_norm", "tokens_per_expert")
    return {name: np.asarray(value) for name, value in metrics.items() if name.endswith(kept)}


def outcome_of(state: TrainState, metrics: dict[str, Any]) -> Outcome:
    return Outcome(values_of(state.params), values_of(state.quantizers), measured(metrics))


def distances(found: Outcome, one: Outcome) -> dict[str, float]:
    """How far an outcome is from one device's: relative to each metric, to the gradient's norm, to each amax."""
    assert found.metrics.keys() == one.metrics.keys()
    errors = {}
    for name, value in one.metrics.items():
        if name.endswith("tokens_per_expert"):
            errors[name] = float(np.abs(found.metrics[name] - value).sum())
        else:
            errors[name] = abs(float(found.metrics[name]) / float(value) - 1.0)
    pairs = zip(found.params, one.params, strict=True)
    change = sum(np.sum((mine.astype(np.float64) - theirs) ** 2) for mine, theirs in pairs) ** 0.5
    errors["gradient"] = change / min(1.0, float(one.metrics["grad_norm"]))  # it is clipped
    states = [
        np.max(np.abs(mine - theirs), initial=0.0) / (np.max(np.abs(theirs), initial=0.0) or 1.0)
        for mine, theirs in zip(found.quantizers, one.quantizers, strict=True)
    ]
    errors["states"] = float(max(states, default=0.0))
    return errors


def with_other_last_bits(values: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Values whose last bit is one up, one down or the same, as another order of sums leaves it."""
    toward = (-np.inf, np.inf)

    def moved(value: np.ndarray) -> np.ndarray:
        if value.dtype != np.float32 or value.ndim < 2:
            return value
        neighbour = np.nextafter(value, np.asarray(rng.choice(toward, value.shape), value.dtype))
        return np.where(rng.random(value.shape) < 0.5, neighbour, value)

    return [moved(value) for value in values]


def allowed(name: str, recipe: str, outcome: Outcome, spread: dict[str, float]) -> float:
    """How far a mesh may be from one device's step in one of `distances`."""
    kind = name.rsplit("/", maxsplit=1)[-1]
    if recipe == "none":
        return 0.0 if kind == "tokens_per_expert" else TOLERANCE
    topk = outcome.metrics[name].sum() / (B * S) if kind == "tokens_per_expert" else 0.0
    base = next(limit for end, limit in after_a_tie(recipe, topk).items() if kind.endswith(end))
    return max(base, WITHIN * spread[name])


@functools.cache
def one_device(family: str, recipe: str, layers: int) -> Run:
    """The first steps without a mesh."""
    steps: list[Step] = []
    spread: dict[str, float] = {}
    with autocast(RECIPES[recipe]):
        state, step = start(family, layers)
        for number in range(STEPS):
            before = values_of(state)
            state, metrics = step(state, tokens_of(number))
            outcome = outcome_of(state, metrics)
            rng = np.random.default_rng(number)
            for _ in range(DRAWS if recipe != "none" else 0):
                other = outcome_of(*step(with_values(state, with_other_last_bits(before, rng)), tokens_of(number)))
                errors = distances(other, outcome)
                spread = {name: max(error, spread.get(name, 0.0)) for name, error in errors.items()}
            steps.append(Step(before, outcome))
    return Run(steps, spread)


def test_every_family_is_here() -> None:
    assert {*FAMILIES, *ENCODERS_ALONE} == {*ARCHITECTURES}
    assert {name for sizes, _ in MESHES.values() for name in sizes} == {*MESH_AXES}


@pytest.mark.slow
@pytest.mark.wide("MixtralForCausalLM-block-context", "DeepseekV2ForCausalLM-none-expert")
@pytest.mark.parametrize(("family", "recipe", "mesh"), CASES, ids=["-".join(case) for case in CASES])
def test_a_family_trains_as_on_one_device(family: str, recipe: str, mesh: str) -> None:
    sizes, fields = MESHES[mesh]
    if recipe == "nvfp4" and mesh == "context":
        # A block of 16 tokens is one of the device's own. Two halves of 32 tokens in order have whole ones, those of
        # one device; zig-zag pieces of 4 have others, with other scales, and a gradient that is 0.15 off.
        sizes, fields = {"fsdp": 4, "context": 2}, {}
    # Stages run one program: of two kinds of layers each has one of each.
    layers = 4 if family in MIXED and "pipeline" in sizes else 2
    wanted = one_device(family, recipe, layers)
    if family.startswith(ENCODERS) and "context" in sizes:
        fields = {"cp_comm_type": "all_gather"}  # a ring moves no shards of T5's biases by distance
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))), autocast(RECIPES[recipe]):
        state, step = start(family, layers, **fields)
        for number, one in enumerate(wanted.steps):
            # Each step from one device's state: under a recipe a few values round the other way, and steps that follow
            # each other go apart. DeepSeek-V3's form under current scaling on data=8 then has norms that are off by up
            # to 1.6e-3, and 16 of 2,048 choices of experts, instead of 9.1e-5 and none.
            state, metrics = step(with_values(state, one.before), tokens_of(number))
            for name, error in distances(outcome_of(state, metrics), one.outcome).items():
                limit = allowed(name, recipe, one.outcome, wanted.spread)
                assert error <= limit, f"{name} of step {number}: {error:.1e}, and {limit:.1e} is allowed"
    assert len({float(one.outcome.metrics["loss"]) for one in wanted.steps}) == STEPS
