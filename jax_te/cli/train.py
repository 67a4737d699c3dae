"""``jax-te train``: train a model on text, or resume."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import jax
import numpy as np

from jax_te._processes import Heartbeats, check_same, gather_texts, is_first
from jax_te._validation import require_extra
from jax_te.checkpoint import CHECKPOINT_FOLDER, TrainCheckpointer
from jax_te.cli.beginning import changes_there, refuse_records, set_records_aside
from jax_te.cli.build import HELDOUT, Trainer, contexts, warnings_as_lines
from jax_te.cli.compile_cache import keep_compiled_programs
from jax_te.cli.launch import Bounds, find_launch, is_launched
from jax_te.cli.loop import LoopActions, LoopPlan, LoopResult, run_loop
from jax_te.cli.memory import check_memory
from jax_te.cli.objective import predicted, run_objective
from jax_te.cli.option_table import check_effects
from jax_te.cli.options import SEVERAL_PROCESSES, GivenOptions
from jax_te.cli.processes import SharedSignal, agreed, joined
from jax_te.cli.resolve import output_folder, resolve
from jax_te.cli.run_checks import check_mesh_of_processes, check_precision, check_te_on_mesh, explain_backends
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_facts import StartedRun, end_facts, loss_facts, schedule_ended, start_facts, step_work
from jax_te.cli.run_files import PROFILE_FOLDER, label, read_config, write_config
from jax_te.cli.run_lock import is_locked, locked
from jax_te.cli.run_text import RESUME_REMEDY, keep_tokenizer, run_text, run_tokenizer, unit
from jax_te.cli.sample import continue_text
from jax_te.config import PipelineConfig
from jax_te.data import ByteTokenizer, NextTokens, Objective, TextData, Tokenizer, byte_bigram_entropy
from jax_te.megatron import QuantizationReport
from jax_te.metrics import (
    PLOTS,
    MetricsLog,
    PrecisionLog,
    Progress,
    StepTrace,
    chart_values,
    make_progress,
    plot_experts,
    plot_losses,
    plot_precision,
    require_writers,
)
from jax_te.training import TrainState, check_pipelined
from jax_te.typing import PyTree

PROMPT = "def "
SAMPLE_LENGTH = 300


def run(options: GivenOptions) -> int:
    """Return the exit status of a training run: 0, or 128 + the signal that ended it.

    Raises:
        ValueError: for conflicting options, and a folder that holds another run or is in use.
    """
    start = options.start
    check_effects(start, {SEVERAL_PROCESSES: is_launched(start.processes)})
    launch = find_launch(start.processes)
    bounds = Bounds(start=start.start_timeout, save=start.save_timeout, step=start.step_timeout)
    output = output_folder(options)
    with joined(launch, output, bounds, debug=options.debug) as heartbeats:
        return _run(options, output, heartbeats, bounds)


def _run(options: GivenOptions, output: Path, heartbeats: Heartbeats | None, bounds: Bounds) -> int:
    keep_compiled_programs()
    progress = make_progress()
    # Before anything is written for the run: a start that is refused leaves no more than the folder, in which several
    # processes find each other.
    inputs = _read_and_check(options, output, progress)
    with ExitStack() as stack:
        agreed(lambda: stack.enter_context(locked(output, progress.note)))
        if _is_outdated(inputs, options, output):
            progress.note("another jax-te train has ended in this folder meanwhile, which is read again")
            inputs = _read_and_check(options, output, progress)
        agreed(lambda: _refuse_records(inputs, output))
        config, data = inputs.config, inputs.data
        mesh = stack.enter_context(contexts(config))
        checkpointer = stack.enter_context(_checkpointer(config, output, bounds))
        if heartbeats is not None:
            checkpointer.share_heartbeats(heartbeats)
        trainer = Trainer(config, data, checkpointer, inputs.objective)
        check_same({"text of --data": trainer.data_state()})
        state, first = _start(trainer, inputs, output, progress)
        # Only now: a failed start must not leave a configuration that the next start would use. One with nothing to do
        # leaves what is there.
        if is_first() and first < config.steps:
            _prepare_folder(inputs, output, progress)
        started = StartedRun(
            config=config,
            data=data,
            objective=inputs.objective,
            backends=inputs.backends,
            mesh=mesh,
            parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            output=output,
            first=first,
            skipped=int(state.skipped_steps),
            rules=inputs.report,
        )
        progress.facts(start_facts(started))
        context = _RunContext(
            output=output,
            tokenizer=inputs.tokenizer,
            progress=progress,
            trace=inputs.trace,
            heartbeats=heartbeats,
        )
        return _train(trainer, state, first, context)


@dataclass(frozen=True, kw_only=True)
class _RunInputs:
    """Everything that a run reads before it writes anything.

    Args:
        config: configuration of the run.
        resumes: whether the run has a checkpoint to go on from.
        trace: trace of some steps. None: no step is traced.
        tokenizer: tokenizer of the run.
        objective: what its model is trained to predict.
        data: text in tokens.
        report: layers that the rules of a precision file fit. None: there are no rules.
        backends: lines that say which backend runs which operation.
    """

    config: RunConfig
    resumes: bool
    trace: StepTrace | None
    tokenizer: Tokenizer | ByteTokenizer
    objective: Objective
    data: TextData
    report: QuantizationReport | None = None
    backends: list[str] = field(default_factory=list)


def _read_and_check(options: GivenOptions, output: Path, progress: Progress) -> _RunInputs:
    """Return everything that a run reads before it writes anything, if all of it can run; all processes call this."""
    inputs = agreed(lambda: _read(options, output, progress))
    config = inputs.config
    check_same({label(entry.name): getattr(config, entry.name) for entry in fields(config)})
    with contexts(config):
        progress.note("checking recipes and backends")
        report = check_precision(config)
        check_te_on_mesh(config)
        backends = explain_backends(config, inputs.objective.lengths(config.seq_len)["labels"])
    return replace(inputs, report=report, backends=backends)


def _is_outdated(inputs: _RunInputs, options: GivenOptions, output: Path) -> bool:
    """Return whether the folder holds another run or configuration than when it was read; all processes call this.

    Only once it is locked, no other run can change it.
    """
    changed = agreed(lambda: resolve(options, output) != (inputs.config, inputs.resumes))
    return str(True) in gather_texts(str(changed))  # all read again, or none: they wait for each other


def _refuse_records(inputs: _RunInputs, output: Path) -> None:
    if is_first() and not inputs.resumes:
        refuse_records(inputs.config, output)


def _prepare_folder(inputs: _RunInputs, output: Path, progress: Progress) -> None:
    """Write what a run's folder has before its first record, and show what changes there."""
    changes = changes_there(inputs.config, output, resumes=inputs.resumes)
    if changes is not None:
        progress.note(changes)
    if not inputs.resumes:
        for name in set_records_aside(output):
            progress.note(f"a start of this run ended before its first checkpoint; its records are now {name}")
        # So that one that is missing later was moved away, see `refuse_records`.
        (output / CHECKPOINT_FOLDER).mkdir(exist_ok=True)
    keep_tokenizer(inputs.tokenizer, output)
    write_config(inputs.config, output)


def _read(options: GivenOptions, output: Path, progress: Progress) -> _RunInputs:
    """Return everything that a run reads before it writes anything."""
    # Said before anything is made: a run that could not write its charts would fail at its end.
    # Those of their modules that need most: what a package itself imports may be less.
    for module in ("grain", "matplotlib.backends.backend_agg", "rich.progress"):
        require_extra(module)
    running = is_locked(output)  # asked first: it may end, and save, at any moment
    config, resumes = resolve(options, output)
    if is_first() and not resumes and not running:
        refuse_records(config, output)
    require_writers(config.writers)
    trace = _trace(config, output)
    tokenizer = run_tokenizer(config, output)
    objective = run_objective(config, tokenizer)
    check_memory(config, "train", objective)
    check_mesh_of_processes(config)
    progress.note("reading the text")
    given = config.data if "data" in options.given else None
    data = run_text(config, tokenizer, objective, given, remedy=RESUME_REMEDY, leave_out=output)
    return _RunInputs(config=config, resumes=resumes, trace=trace, tokenizer=tokenizer, objective=objective, data=data)


def _start(trainer: Trainer, inputs: _RunInputs, output: Path, progress: Progress) -> tuple[TrainState, int]:
    """Return the state to train, new or that of the newest checkpoint, and the number of steps that it has taken."""
    progress.note("restoring the newest checkpoint" if inputs.resumes else "making the model and the optimizer's state")
    saved = read_config(output)  # not this start's configuration yet
    trained_on = None if saved is None else saved.data
    with warnings_as_lines():
        state, first = trainer.restore(trained_on) if inputs.resumes else trainer.create()
    if inputs.trace is not None and inputs.trace.first <= first:
        raise ValueError(f"--profile {inputs.config.profile}: the run has done {first} steps; give later ones")
    check_pipelined(state, PipelineConfig.parse(inputs.config.pipeline))
    return state, first


def _checkpointer(config: RunConfig, output: Path, bounds: Bounds) -> TrainCheckpointer:
    return TrainCheckpointer(
        output / CHECKPOINT_FOLDER,
        keep=config.keep,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        metric="loss" if config.keep_best is None else HELDOUT,
        timeout=bounds.save,
    )


def _trace(config: RunConfig, output: Path) -> StepTrace | None:
    if config.profile is None:
        return None
    trace = StepTrace(output / PROFILE_FOLDER, *map(int, config.profile.split(":")))
    if trace.last > config.steps:
        raise ValueError(f"--profile {config.profile} ends after the last of --steps {config.steps}; give earlier ones")
    return trace


@dataclass(frozen=True, kw_only=True)
class _RunContext:
    """What a run has beside its `Trainer`.

    Args:
        output: folder of the run.
        tokenizer: tokenizer of the run.
        progress: display of the run.
        trace: trace of some steps. None: no step is traced.
        heartbeats: heartbeats of several processes. None: one process.
    """

    output: Path
    tokenizer: Tokenizer | ByteTokenizer
    progress: Progress
    trace: StepTrace | None
    heartbeats: Heartbeats | None


def _train(trainer: Trainer, state: TrainState, first: int, context: _RunContext) -> int:
    """Run the remaining steps, draw the plots, and show what came of it; return the exit status."""
    config, data, progress = trainer.config, trainer.data, context.progress
    bigram = byte_bigram_entropy(data.train, data.heldout) if _is_of_bytes(trainer, context) else None
    if first >= config.steps:
        rate = ""
        if schedule_ended(config, first, int(state.skipped_steps)):
            rate = f", at rate {config.min_learning_rate:g} unless --decay-steps gives the schedule a later end"
        progress.note(f"step {first} of {config.steps}: the run is complete; --steps N with a larger N goes on{rate}")
        result = _result_of_no_steps(state, first, context)
    else:
        progress.note("compiling the first step")
        result = _run_steps(trainer, state, first, context)
    # A run that was killed after its last checkpoint has no plots yet.
    if is_first() and (first < config.steps or not any((context.output / name).exists() for name in PLOTS)):
        _draw(context.output, _unit(trainer, context), bigram)
    if result.stopped_by is not None:
        progress.note(f"stopped by {result.stopped_by.name}; step {result.step} is saved, and the same command resumes")
        return 128 + result.stopped_by  # as a shell reports a process that a signal ended
    _show_result(trainer, result, context, bigram)
    return 0


def _run_steps(trainer: Trainer, state: TrainState, first: int, context: _RunContext) -> LoopResult:
    """Return the result of the remaining steps, whose last checkpoint is written."""
    # Records after the checkpoint are cut: the resumed run writes them again.
    precision = PrecisionLog(context.output, resume_step=first)
    with MetricsLog(context.output, resume_step=first, writers=trainer.config.writers) as log:
        actions = _actions(trainer, log, precision, context)
        result = run_loop(
            state,
            trainer.batches,
            actions,
            _plan(trainer),
            log=log,
            progress=context.progress,
            first=first,
            skipped=int(state.skipped_steps),
        )
    trainer.checkpointer.wait()
    actions.begin("the end of the run")
    return result


def _result_of_no_steps(state: TrainState, first: int, context: _RunContext) -> LoopResult:
    """Return the result of a run that is complete already, in whose folder nothing is written."""
    if context.heartbeats is not None:
        context.heartbeats.begin("the end of the run")
    return LoopResult(state=state, step=first, stopped_by=None, heldout_loss=None, seconds=0.0, tokens_per_second=None)


def _show_result(trainer: Trainer, result: LoopResult, context: _RunContext, bigram: float | None) -> None:
    """Show losses and files of a run that is complete, and text that its model generates if it is a decoder."""
    config, data, tokenizer = trainer.config, trainer.data, context.tokenizer
    # A run that was complete already took no step, and so has no held-out loss.
    heldout = trainer.evaluate(result.state) if result.heldout_loss is None else result.heldout_loss
    losses = loss_facts(data, heldout, bigram, _unit(trainer, context), trainer.objective)
    continues_text = isinstance(trainer.objective, NextTokens)
    context.progress.facts(end_facts(result, losses, context.output, continues_text=continues_text))
    if not continues_text:
        return
    prompt = tokenizer.encode(PROMPT)
    if not _is_of_bytes(trainer, context):  # PROMPT may not be a word of the tokenizer's
        prompt = data.heldout[: min(16, config.seq_len // 2)]
    sizes = config.parallel_config()
    # On a mesh the batch is split: as many copies of the prompt as it has shards.
    copies = 1 if sizes is None else sizes.batch_devices
    text = continue_text(result.state.model, tokenizer, prompt, SAMPLE_LENGTH, seed=config.seed, copies=copies)
    context.progress.text("sample", tokenizer.decode(prompt) + text)


def _unit(trainer: Trainer, context: _RunContext) -> str:
    return predicted(trainer.objective, unit(context.tokenizer))


def _is_of_bytes(trainer: Trainer, context: _RunContext) -> bool:
    return isinstance(context.tokenizer, ByteTokenizer) and trainer.data.train.dtype == np.uint8


def _plan(trainer: Trainer) -> LoopPlan:
    config = trainer.config
    return LoopPlan(
        steps=config.steps,
        save_every=config.save_every,
        eval_every=config.eval_every,
        log_every=config.log_every,
        inspect_every=config.inspect_every,
        give_up_after=config.give_up_after,
        work=step_work(config),
        learning_rate=trainer.learning_rate,
        eval_saved=config.keep_best is not None,
    )


def _actions(trainer: Trainer, log: MetricsLog, precision: PrecisionLog, context: _RunContext) -> LoopActions:
    def inspect(step: int, state: TrainState, batch: PyTree) -> None:
        statistics = trainer.inspect(state, batch)
        precision.write(step, statistics)
        log.chart(step, chart_values(statistics))

    return LoopActions(
        step=trainer.step,
        evaluate=trainer.evaluate,
        save=trainer.save,
        check=trainer.checkpointer.check,
        inspect=inspect,
        agree=SharedSignal() if jax.process_count() > 1 else None,
        trace=context.trace,
        heartbeats=context.heartbeats,
    )


def _draw(output: Path, word: str, bigram: float | None) -> None:
    """Draw the plots of a run; ``word``: the unit of the loss."""
    plot_losses(output, unit=word, bigram_entropy=bigram)
    plot_experts(output)
    plot_precision(output)
