"""Whole train steps of a GPT, in the forms of its layer stack and with each way of recomputation."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jax_te.bench.contestants import CompiledStep, Contestant, SharedState, rows_of
from jax_te.bench.layers import TE_RECIPES
from jax_te.bench.megatron import MEGATRON_RECIPES, MegatronGPT, megatron_model
from jax_te.bench.settings import GIB, Row, Settings, Sizes
from jax_te.config import PipelineConfig
from jax_te.models import GPTModel
from jax_te.ops import use_backend
from jax_te.recipe import Recipe, autocast
from jax_te.sharding import named_sharding
from jax_te.training import TrainState, abstract_train_state, create_train_state, make_train_step
from jax_te.typing import Array, BackendName, DTypeLike

_TX = optax.adamw(1e-4)

_ALLOCATED = 1.6
"""JAX's memory over XLA's estimate: 48.9 GiB for a step of 31.7 (llama-1b on an H100), and a margin."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """jax_te's model in one form.

    Args:
        name: name of the row.
        recipe: recipe that the step runs under, or None.
        build: function that makes the model. All models of one measurement have the same arrays.
        pipeline: pipeline schedule, on a mesh with a pipeline axis.
        wgrad_dtype: dtype of kernel gradients.
        reduce_gradients: when devices sum kernel gradients, see `make_train_step`.
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


def bench_train_steps(variants: Sequence[Variant], sizes: Sizes, settings: Settings, *, peer: str | None) -> list[Row]:
    """Return rows of train steps (AdamW on fp32 masters) that were timed in turn, all on one state.

    A peer that has memory of its own, and leaves too little for jax_te's steps, is measured before them and ended: JAX
    never gives memory back to the driver, so it cannot come after them.

    Args:
        variants: variants of one model under one recipe.
        sizes: sizes of the model.
        settings: settings of the measurement.
        peer: peer whose GPT comes first: ``"te"`` (GPT-2's architecture, on one device), ``"megatron"``, or none.
    """
    first = variants[0]

    # A state of billions of parameters fits once: all contestants step the same one.
    state = SharedState(lambda: create_bench_state(first, sizes, settings.backend))
    tokens = jax.random.randint(jax.random.key(1), (sizes.batch, sizes.sequence + 1), 0, sizes.vocabulary)
    if sizes.mesh is not None:
        tokens = jax.device_put(tokens, named_sharding(("batch", None), sizes.mesh))
    contestants: list[Contestant] = []
    if peer is not None:
        contestants.append(_te_jax(first.recipe, sizes, tokens) if peer == "te" else _megatron(first, sizes))
    contestants += [_contestant(variant, state, tokens, sizes, settings.backend) for variant in variants]
    try:
        for contestant in contestants:
            contestant.launch()
        for contestant in reversed(contestants):  # the peer comes first, and its processes import meanwhile
            contestant.begin()
        for group in _groups(contestants):
            _measure(group, tokens, settings)
            for contestant in group:
                contestant.close()
        return rows_of(contestants, sizes.batch * sizes.sequence)
    finally:
        for contestant in contestants:
            contestant.close()


def _groups(contestants: list[Contestant]) -> list[list[Contestant]]:
    """Return groups of contestants that are measured in turn: all together, or the peer and then the rest."""
    peer, *own = contestants
    needed = _ALLOCATED * max((each.memory.get("peak_gib", 0.0) * GIB for each in own), default=0.0)
    if peer.free_bytes is None or needed <= peer.free_bytes:
        return [contestants]
    free, needed = peer.free_bytes / GIB, needed / GIB
    print(
        f"{peer.name} leaves {free:.1f} GiB of a GPU, and jax_te may take {needed:.1f}: measured one after the other",
        file=sys.stderr,
        flush=True,
    )
    return [[peer], own]


def _measure(contestants: Sequence[Contestant], tokens: Array, settings: Settings) -> None:
    for contestant in reversed(contestants):
        contestant.start(tokens)
    for _ in range(settings.rounds):
        for contestant in contestants:
            contestant.round(tokens, settings.calls)
    for contestant in contestants:
        # Another process would have a profiler of its own.
        if settings.profile is not None and isinstance(contestant, CompiledStep):
            contestant.trace(tokens, settings.profile)
            print(f"{contestant.name}\n{contestant.times}\n", file=sys.stderr, flush=True)


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
    step = make_train_step(lambda model, batch, _: model.loss(batch[:, :-1], batch[:, 1:]), _TX, **options)

    def lower() -> Any:
        with variant.context(backend, sizes.mesh):
            return step.lower(abstract, tokens)

    # Variants differ in the static graph definition alone: so a state passes from one to the next without a copy.
    def prepare(other: TrainState) -> TrainState:
        return dataclasses.replace(other, graphdef=abstract.graphdef)

    return CompiledStep(variant.name, state=state, lower=lower, prepare=prepare)


def _megatron(variant: Variant, sizes: Sizes) -> MegatronGPT:
    """Return Megatron-Core's GPT under the variant's recipe, or in bf16 where Megatron-Core does not have it."""
    recipe = variant.recipe
    taken = recipe if recipe is not None and recipe.name in MEGATRON_RECIPES else None
    model = megatron_model(sizes, taken, fp32_gradients=jnp.dtype(variant.wgrad_dtype) == jnp.float32)
    name = f"{'none' if taken is None else taken.name}, Megatron-Core"
    return MegatronGPT(name, model=model, ranks=1 if sizes.mesh is None else sizes.mesh.size)


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
