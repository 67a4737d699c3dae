"""Whole train steps of a GPT, in the forms of its layer stack and with each way of recomputation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jax_te.bench.contestants import CompiledStep, Contestant, SharedState, run_contestants
from jax_te.bench.layers import TE_RECIPES
from jax_te.bench.megatron import MEGATRON_RECIPES, Megatron, megatron_model
from jax_te.bench.settings import Row, Settings, Sizes
from jax_te.config import PipelineConfig
from jax_te.models import GPTModel
from jax_te.ops import use_backend
from jax_te.recipe import Recipe, autocast
from jax_te.sharding import named_sharding
from jax_te.training import (
    PipelinedLoss,
    StateArrays,
    TrainState,
    abstract_train_state,
    create_train_state,
    make_train_step,
)
from jax_te.typing import BackendName, DTypeLike

_TX = optax.adamw(1e-4)
_LOSS = PipelinedLoss(
    embed_inputs=lambda model, batch, key: model.embed_inputs(batch[:, :-1]),
    compute_loss=lambda model, y, batch, key: model.compute_loss(y, batch[:, 1:], tokens=batch[:, :-1]),
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """jax_te's model in one form.

    Args:
        name: name of the row.
        recipe: recipe that the step runs under, or None.
        build: function that makes the model. All models of one measurement have the same arrays.
        pipeline: pipeline schedule, on a mesh with a pipeline axis.
        wgrad_dtype: dtype of kernel gradients.
        reduce_gradients: time at which devices sum kernel gradients, see `make_train_step`.
    """

    name: str
    recipe: Recipe | None
    build: Callable[[nnx.Rngs], GPTModel]
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    wgrad_dtype: DTypeLike = jnp.float32
    reduce_gradients: Literal["microbatch", "step"] = "microbatch"

    @contextlib.contextmanager
    def context(self, backend: BackendName, mesh: Mesh | None) -> Iterator[None]:
        """Yield inside of the variant's recipe, a backend and a mesh."""
        place = contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
        with autocast(self.recipe), use_backend(backend), place:
            yield


def bench_train_steps(
    variants: Sequence[Variant],
    sizes: Sizes,
    settings: Settings,
    *,
    peer: str | None,
    tokens: np.ndarray | None = None,
) -> list[Row]:
    """Return rows of train steps (AdamW on fp32 masters) that were timed in turn, all on one state.

    Args:
        variants: variants of one model under one recipe.
        sizes: sizes of the model.
        settings: settings of the measurement.
        peer: peer whose GPT comes first: ``"te"`` (GPT-2's architecture, on one device), ``"megatron"``, or none.
        tokens: batch of every step, integers ``[b, s + 1]``, inputs and labels. None: random tokens.
    """
    first = variants[0]

    # A state of billions of parameters fits once: all contestants step the same one.
    state = SharedState(lambda: create_bench_state(first, sizes, settings.backend))
    if tokens is None:
        batch = jax.random.randint(jax.random.key(1), (sizes.batch, sizes.sequence + 1), 0, sizes.vocabulary)
    else:
        batch = jnp.asarray(tokens, jnp.int32)
    if sizes.mesh is not None:
        batch = jax.device_put(batch, named_sharding(("batch", None), sizes.mesh))
    contestants: list[Contestant] = []
    if peer == "te":
        contestants.append(_te_jax(first.recipe, sizes, batch))
    elif peer == "megatron":
        contestants.append(_megatron(first, sizes, tokens))
    contestants += [_contestant(variant, state, batch, sizes, settings.backend) for variant in variants]
    return run_contestants(contestants, batch, sizes.batch * sizes.sequence, settings)


def create_bench_state(variant: Variant, sizes: Sizes, backend: BackendName) -> TrainState:
    """Return the state at step 0 that a variant's train step takes: AdamW, fp32 masters."""
    with variant.context(backend, sizes.mesh):
        split = sizes.distributed_optimizer
        return create_train_state(variant.build, _TX, key=jax.random.key(0), distributed_optimizer=split)


def _contestant(variant: Variant, state: SharedState, tokens: Any, sizes: Sizes, backend: BackendName) -> CompiledStep:
    with variant.context(backend, sizes.mesh):
        # Shapes only: compiling needs no arrays.
        abstract = abstract_train_state(variant.build, _TX, distributed_optimizer=sizes.distributed_optimizer)
    options: dict[str, Any] = {"microbatches": sizes.microbatches, "pipeline": variant.pipeline}
    options |= {"wgrad_dtype": variant.wgrad_dtype, "reduce_gradients": variant.reduce_gradients}
    step = make_train_step(_LOSS, _TX, **options)

    def lower() -> Any:
        with variant.context(backend, sizes.mesh):
            # In the form in which the step itself passes a state.
            return step.lower(StateArrays.of(abstract), tokens)

    # Variants differ in the static graph definition alone: so a state passes from one to the next without a copy.
    def prepare(other: TrainState) -> StateArrays:
        return StateArrays.of(dataclasses.replace(other, graphdef=abstract.graphdef))

    return CompiledStep(variant.name, state=state, lower=lower, prepare=prepare, finish=StateArrays.state)


def _megatron(variant: Variant, sizes: Sizes, tokens: np.ndarray | None) -> Megatron:
    """Return Megatron-Core's GPT under the variant's recipe, or in bf16 where Megatron-Core does not have it."""
    recipe = variant.recipe
    taken = recipe if recipe is not None and recipe.name in MEGATRON_RECIPES else None
    in_fp32 = jnp.dtype(variant.wgrad_dtype) == jnp.float32
    model = megatron_model(sizes, taken, fp32_gradients=in_fp32, tokens=tokens)
    name = f"{'none' if taken is None else taken.name}, Megatron-Core"
    return Megatron(name, request=model, ranks=1 if sizes.mesh is None else sizes.mesh.size)


def _te_jax(recipe: Recipe | None, sizes: Sizes, tokens: Any) -> CompiledStep:
    """Return te.jax's layers under the recipe, or in bf16 where te.jax does not have it."""
    # Imported late: Transformer Engine is optional.
    from jax_te.bench.peers.te_jax import raw_context
    from jax_te.bench.peers.te_jax_gpt import RawGPT, raw_train_step

    taken = recipe if recipe is not None and recipe.name in TE_RECIPES else None
    model = RawGPT(
        layers=sizes.config.num_layers,
        hidden=sizes.config.hidden_size,
        heads=sizes.config.num_attention_heads,
        ffn=sizes.config.ffn_hidden_size or 0,
        vocabulary=sizes.vocabulary,
        length=sizes.sequence,
    )

    def inside(action: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with raw_context(taken):
                return action()

        return run

    create, step = raw_train_step(model, _TX, key=jax.random.key(0))
    name = f"{'none' if taken is None else taken.name}, te.jax"
    lower = inside(lambda: step.lower(jax.eval_shape(create), tokens))
    return CompiledStep(name, state=SharedState(inside(create)), lower=lower)
