"""Construction of a run from its `RunConfig`: model, optimizer, data, steps, and their contexts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jax_te.checkpoint import DamagedCheckpointWarning, TrainCheckpointer
from jax_te.cli.model_config import add_adapters, build_described, load_pretrained
from jax_te.cli.objective import loss_of
from jax_te.cli.precision_rules import apply_rules
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_text import RESUME_REMEDY, check_text, text_checksums
from jax_te.config import PipelineConfig
from jax_te.data import IGNORED, Objective, TextData, TrainBatches, check_vocabulary, heldout_batches
from jax_te.layers import lora_labels
from jax_te.models import Execution, GPTModel, LanguageModel
from jax_te.ops import use_backend
from jax_te.recipe import autocast
from jax_te.sharding import make_mesh, named_sharding
from jax_te.training import (
    DynamicLossScale,
    LossScale,
    TrainState,
    abstract_train_state,
    adamw_with_schedule,
    create_train_state,
    learning_rate_schedule,
    make_eval_step,
    make_inspection,
    make_train_step,
)


def model_builder(config: RunConfig) -> Callable[[nnx.Rngs], LanguageModel]:
    """Return a function that builds the run's model, whose layers have the recipes of the run's rules, and adapters."""
    build_plain = build_model(config)
    return lambda rngs: _finished(config, build_plain(rngs), rngs)


def first_model(config: RunConfig) -> LanguageModel | Callable[[nnx.Rngs], LanguageModel]:
    """Return a run's initial model: `model_builder`'s model, with the weights of ``--init-from`` if it is given.

    Raises:
        ValueError: for a folder that cannot be read.
    """
    if config.init_from is None or config.model_config is None:
        return model_builder(config)
    fields = config.library_fields()
    model = load_pretrained(config.init_from, config.model_config, config.ignore_fields, fields, _execution(config))
    return _finished(config, model, nnx.Rngs(config.seed))


def _finished(config: RunConfig, model: LanguageModel, rngs: nnx.Rngs) -> LanguageModel:
    rules = config.quantization_rules()
    if rules is not None:
        apply_rules(model, rules)
    if config.lora_rank is not None:  # after the rules, which select layers by name
        add_adapters(model, config.lora_rank, config.lora_alpha, rngs)
    return model


def _execution(config: RunConfig) -> Execution:
    return Execution(config.recompute_policy, config.scan_layers, batch_parts=config.batch_parts)


def build_model(config: RunConfig, *, execution: Execution | None = None) -> Callable[[nnx.Rngs], Any]:
    """Return a function that builds the run's model, without the rules of its precision file and without adapters.

    Args:
        config: configuration of the run.
        execution: execution options of the layers and the loss. None: the run's.
    """
    execution = execution or _execution(config)

    def build(rngs: nnx.Rngs) -> Any:
        if config.model_config is not None:
            text, fields = config.model_config, config.library_fields()
            return build_described(text, config.ignore_fields, fields, execution, rngs)
        return GPTModel(
            config.transformer_config(),
            vocab_size=config.vocab_size,
            max_sequence_length=config.seq_len,
            position_embedding_type=config.position_embedding,
            share_embeddings_and_output_weights=config.tie_embeddings,
            execution=execution,
            rngs=rngs,
        )

    return build


def abstract_model(config: RunConfig) -> LanguageModel:
    """Return the run's model without values, before its rules are applied; call it inside `contexts`."""
    return nnx.eval_shape(lambda: build_model(config)(nnx.Rngs(0)))


def _rates(config: RunConfig, part: int) -> list[float]:
    """Return the learning rates of the updates from ``part * RATES`` on."""
    with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
        return np.asarray(jax.jit(_schedule(config))(part * RATES + jnp.arange(RATES))).tolist()


def _schedule(config: RunConfig) -> optax.Schedule:
    return learning_rate_schedule(
        config.learning_rate,
        total_steps=config.decay_steps,
        warmup_steps=config.warmup_steps,
        final_fraction=config.min_learning_rate / config.learning_rate,
    )


def optimizer(config: RunConfig) -> optax.GradientTransformation:
    """Return AdamW with the run's schedule, only for the adapters if there are any."""
    tx = adamw_with_schedule(_schedule(config), weight_decay=config.weight_decay, clip_norm=config.clip_norm)
    if config.lora_rank is None:
        return tx
    # The label "frozen" also omits decay and moments.
    return optax.multi_transform({"lora": tx, "frozen": optax.set_to_zero()}, lora_labels)


def loss_scaler(config: RunConfig) -> LossScale | None:
    """Return the loss scaler of an fp16 run, None for another dtype."""
    # The small gradients of fp16 underflow; bf16 has the exponent range of fp32.
    return DynamicLossScale() if "float16" in (config.params_dtype, config.compute_dtype) else None


@contextlib.contextmanager
def contexts(config: RunConfig) -> Iterator[Mesh | None]:
    """Yield the mesh of the run, or None, inside of its ambient recipe, backend and mesh."""
    sizes = config.parallel_config()
    mesh = None if sizes is None else make_mesh(sizes, axis_type=config.mesh_axis_type)
    with contextlib.ExitStack() as stack:
        # All three are part of the jit cache key, so all tracing for the run must happen inside.
        stack.enter_context(autocast(config.make_recipe()))
        stack.enter_context(use_backend(config.backend))
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        yield mesh


HELDOUT = "heldout_loss"
"""The metric of a checkpoint."""

RATES = 1024
"""Learning rates computed at once."""


def train_step(config: RunConfig, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Return the train step of a run; ``tx`` is the run's `optimizer`."""
    return make_train_step(
        loss_of(config),
        tx,
        microbatches=config.microbatches,
        pipeline=PipelineConfig.parse(config.pipeline),
        wgrad_dtype=jnp.dtype(config.wgrad_dtype),
        reduce_gradients=config.reduce_gradients,
    )


class Trainer:
    """The parts of a run. Create and use it inside `contexts`.

    Args:
        config: the run.
        data: tokens to train on and to evaluate.
        checkpointer: checkpointer that writes states.
        objective: what the run's model is trained to predict, see `jax_te.cli.objective.run_objective`.
    """

    def __init__(self, config: RunConfig, data: TextData, checkpointer: TrainCheckpointer, objective: Objective):
        self.config, self.data, self.checkpointer, self.objective = config, data, checkpointer, objective
        self._parts = (model_builder(config), optimizer(config))
        self.step = train_step(config, self._parts[1])
        self._eval_step = make_eval_step(loss_of(config))
        self.inspect = make_inspection(loss_of(config), microbatches=config.microbatches)
        self._sizes: dict[str, Any] = {
            "seq_len": config.seq_len,
            "vocab_size": data.vocab_size,
            "objective": objective,
        }
        if jax.process_count() > 1:  # each builds the rows of its own devices
            self._sizes["sharding"] = named_sharding(("batch", None), jax.sharding.get_mesh())
        # Many rates at once, because each would wait for the device; not all, because a run may have billions of steps.
        self._rates = functools.lru_cache(maxsize=1)(functools.partial(_rates, config))
        # Now, as the training text, not at the first evaluation: the run would have begun.
        check_vocabulary(data.heldout, data.vocab_size)
        self._checksums = text_checksums(data)
        self.batches = TrainBatches(data.train, batch_size=config.batch_size, seed=config.seed, **self._sizes)

    def learning_rate(self, update: int) -> float:
        """Return the rate of an update, counted from 0."""
        return self._rates(update // RATES)[update % RATES]

    def create(self) -> tuple[TrainState, int]:
        """Return a new state, and its step, 0."""
        key = jax.random.key(self.config.seed)
        return create_train_state(first_model(self.config), self._parts[1], key=key, **_state_options(self.config)), 0

    def restore(self, trained_on: str | None) -> tuple[TrainState, int]:
        """Return the newest checkpoint's state and step, and resume the batches from there.

        Args:
            trained_on: ``--data`` of the run before it is resumed.

        Raises:
            ValueError: for another text than the run's.
        """
        state, data_state, step = self.checkpointer.restore(abstract_state(self.config))
        check_text(self.data, data_state, self.config.data, before=trained_on, remedy=RESUME_REMEDY)
        self.batches.set_state(data_state)
        return state, step

    def data_state(self) -> dict[str, Any]:
        """Return the state of the batches, and the checksums of the text."""
        return self.batches.get_state() | self._checksums

    def save(self, step: int, state: TrainState, heldout_loss: float | None) -> None:
        """Start writing a checkpoint. A checkpoint without a held-out loss, requested by a signal, is never among the
        best."""
        loss = math.nan if heldout_loss is None else heldout_loss
        self.checkpointer.save(state, self.data_state(), step, metrics={HELDOUT: loss})

    def evaluate(self, state: TrainState) -> float:
        """Return the mean loss over the labels of the held-out batches; nan if they have none."""
        # All rows at once might not fit into memory. Those of a part are split over the stages of a pipeline as well.
        parts, sizes = self.config.microbatches, self.config.parallel_config()
        parts //= 1 if sizes is None else math.gcd(parts, sizes.pipeline)
        batches = heldout_batches(
            self.data.heldout,
            batch_size=self.config.batch_size // parts,
            num_batches=self.config.eval_batches * parts,
            **self._sizes,
        )
        # All steps are dispatched before the first result is waited for.
        found = [(self._eval_step(state, batch), (batch["labels"] != IGNORED).sum()) for batch in batches]
        total = sum(float(loss) * int(labels) for loss, labels in found)
        count = sum(int(labels) for _, labels in found)
        return total / count if count else math.nan


def abstract_state(config: RunConfig, on: AbstractMesh | None = None) -> TrainState:
    """Return the target into which a checkpoint of the run is restored; call it inside `contexts`.

    Args:
        config: the run.
        on: mesh without devices, for a call inside of the run's recipe and backend alone; the state's arrays then have
            logical axes, and no shardings.
    """
    # What runs operations comes first: JAX runs none under a mesh without devices.
    parts, options = (model_builder(config), optimizer(config)), _state_options(config)
    with contextlib.nullcontext() if on is None else jax.sharding.use_abstract_mesh(on):
        return abstract_train_state(*parts, **options)


def _state_options(config: RunConfig) -> dict[str, Any]:
    options = {"fp8_param": config.fp8_param, "distributed_optimizer": config.distributed_optimizer}
    return {"scaler": loss_scaler(config), **options}


def abstract_model_state(config: RunConfig, *, masters: bool = False) -> TrainState:
    """Return `abstract_state` without the optimizer's state and, unless requested, without masters.

    Much less is read for it: the model's parameters and state, and a few scalars.
    """
    state = abstract_state(config)
    return dataclasses.replace(state, opt_state=(), masters=state.masters if masters else nnx.State({}))


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Yield with damaged checkpoints' warnings shown as one line on stderr; others are shown as before."""

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, DamagedCheckpointWarning):
            print(f"jax-te: warning: {message}", file=sys.stderr, flush=True)
        else:
            default(message, category, *rest, **more)

    with warnings.catch_warnings():
        # Python shows a warning once per line of code; two damaged checkpoints are two lines for the user.
        warnings.simplefilter("always", DamagedCheckpointWarning)
        default, warnings.showwarning = warnings.showwarning, show
        yield
