"""``jax-te train``: train a GPT on text, or resume."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jax_te._validation import require_extra
from jax_te.checkpoint import Heartbeats, TrainCheckpointer
from jax_te.cli.build import HELDOUT, Trainer, contexts, warnings_as_lines
from jax_te.cli.compile_cache import keep_compiled_programs
from jax_te.cli.launch import Bounds, find_launch
from jax_te.cli.loop import LoopActions, LoopPlan, LoopResult, run_loop
from jax_te.cli.memory import check_memory
from jax_te.cli.options import GivenOptions
from jax_te.cli.processes import SharedSignal, agreed, check_same, is_first, joined
from jax_te.cli.resolve import output_folder, resolve
from jax_te.cli.run_checks import check_mesh_of_processes, check_precision, check_te_on_mesh, explain_backends
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_files import CHECKPOINT_FOLDER, LOCK_FILE, PROFILE_FOLDER, refuse_links, write_config
from jax_te.cli.run_recipe import RECIPE_FIELDS
from jax_te.cli.run_text import keep_tokenizer, run_text, run_tokenizer, unit
from jax_te.cli.sample import continue_text
from jax_te.config import ParallelConfig
from jax_te.data import ByteTokenizer, TextData, Tokenizer, byte_bigram_entropy, text_crc32
from jax_te.megatron import QuantizationReport
from jax_te.metrics import (
    EXPERTS_PLOT,
    METRICS_FILE,
    PLOT_FILE,
    PRECISION_FILE,
    PRECISION_PLOT,
    TENSORBOARD_FOLDER,
    MetricsLog,
    PrecisionLog,
    Progress,
    StepTrace,
    StepWork,
    chart_values,
    clock,
    make_progress,
    peak_flops,
    plot_experts,
    plot_losses,
    plot_precision,
    require_writers,
    train_flops,
)
from jax_te.models import UNROLL_LIMIT, runs_scanned
from jax_te.training import TrainState
from jax_te.typing import PyTree

PROMPT = "def "
SAMPLE_LENGTH = 300


def run(options: GivenOptions) -> int:
    """Return the exit status of a training run: 0, or 128 + the signal that ended it.

    Raises:
        ValueError: for conflicting options, and a folder that holds another run or is in use.
    """
    start = options.start
    launch = find_launch(start.processes)
    bounds = Bounds(start=start.start_timeout, save=start.save_timeout, step=start.step_timeout)
    output = output_folder(options)
    with joined(launch, output, bounds, debug=options.debug) as heartbeats:
        return _run(options, output, heartbeats, bounds)


def _run(options: GivenOptions, output: Path, heartbeats: Heartbeats | None, bounds: Bounds) -> int:
    keep_compiled_programs()
    progress = make_progress()
    config, resumes, trace, tokenizer, data = agreed(lambda: _read(options, output, progress))
    check_same(options=config)
    with contexts(config) as mesh:
        progress.note("checking recipes and backends")
        report = check_precision(config)
        check_te_on_mesh(config)
        backends = explain_backends(config)
        with ExitStack() as stack:
            agreed(lambda: stack.enter_context(_locked(output)))
            checkpointer = stack.enter_context(_checkpointer(config, output, bounds))
            if heartbeats is not None:
                checkpointer.share_heartbeats(heartbeats)
            trainer = Trainer(config, data, checkpointer)
            check_same(data=trainer.batches.get_state(), held_out_text=text_crc32(data.heldout))
            progress.note(
                "restoring the newest checkpoint" if resumes else "making the model and the optimizer's state"
            )
            with warnings_as_lines():
                state, first = trainer.restore() if resumes else trainer.create()
            if trace is not None and trace.first <= first:
                raise ValueError(f"--profile {config.profile}: the run has done {first} steps; give later ones")
            # Only now: a failed start must not leave a configuration that the next start would use.
            if is_first():
                keep_tokenizer(tokenizer, output)
                write_config(config, output)
            progress.facts(_facts(config, data, backends, mesh, state, output, first, report))
            return _train(trainer, tokenizer, state, first, output, progress, trace, heartbeats)


def _read(
    options: GivenOptions, output: Path, progress: Progress
) -> tuple[RunConfig, bool, StepTrace | None, Tokenizer | ByteTokenizer, TextData]:
    """Return everything that a run reads before it writes anything, and whether it resumes."""
    # Said before anything is made: a run that could not write its charts would fail at its end.
    # Those of their modules that need most: what a package itself imports may be less.
    for module in ("grain", "matplotlib.backends.backend_agg", "rich.progress"):
        require_extra(module)
    config, resumes = resolve(options, output)
    require_writers(config.metrics_writers.split(","))
    trace = _trace(config, output)
    check_memory(config, "train")
    check_mesh_of_processes(config)
    progress.note("reading the text")
    tokenizer = run_tokenizer(config, output)
    return config, resumes, trace, tokenizer, run_text(config, tokenizer)


def _checkpointer(config: RunConfig, output: Path, bounds: Bounds) -> TrainCheckpointer:
    kept = {"keep": config.keep, "keep_every": config.keep_every, "keep_best": config.keep_best}
    return TrainCheckpointer(output / CHECKPOINT_FOLDER, **kept, metric=HELDOUT, timeout=bounds.save)


def _trace(config: RunConfig, output: Path) -> StepTrace | None:
    if config.profile is None:
        return None
    trace = StepTrace(output / PROFILE_FOLDER, *map(int, config.profile.split(":")))
    if trace.last > config.steps:
        raise ValueError(f"--profile {config.profile} ends after the last of --steps {config.steps}; give earlier ones")
    return trace


def _work(config: RunConfig) -> StepWork:
    flops = train_flops(
        config.transformer_config(),
        vocab_size=config.vocab_size,
        batch_size=config.batch_size,
        sequence_length=config.seq_len,
    )
    devices = (config.parallel_config() or ParallelConfig()).num_devices
    return StepWork(tokens=config.tokens_per_step, devices=devices, flops=flops, peak=peak_flops(jax.devices()[0]))


def _train(
    trainer: Trainer,
    tokenizer: Tokenizer | ByteTokenizer,
    state: TrainState,
    first: int,
    output: Path,
    progress: Progress,
    trace: StepTrace | None,
    heartbeats: Heartbeats | None,
) -> int:
    """Run the remaining steps, draw the plots, and show what came of it; return the exit status."""
    config, data = trainer.config, trainer.data
    if first >= config.steps:
        progress.note(f"step {first} of {config.steps}: the run is complete; --steps N with a larger N goes on")
    else:
        progress.note("compiling the first step")
    of_bytes = isinstance(tokenizer, ByteTokenizer) and data.train.dtype == np.uint8
    bigram = byte_bigram_entropy(data.train, data.heldout) if of_bytes else None
    # Records after the checkpoint are cut: the resumed run writes them again.
    precision = PrecisionLog(output, resume_step=first)
    with MetricsLog(output, resume_step=first, writers=config.metrics_writers.split(",")) as log:  # type: ignore[arg-type]
        actions = _actions(trainer, log, precision, trace, heartbeats)
        skipped = int(state.skipped_steps)
        result = run_loop(
            state, trainer.batches, actions, _plan(trainer), log=log, progress=progress, first=first, skipped=skipped
        )
    trainer.checkpointer.wait()
    actions.begin("the end of the run")
    drawn = _draw(output, unit(tokenizer), bigram) if is_first() else []
    if result.stopped_by is not None:
        progress.note(f"stopped by {result.stopped_by.name}; step {result.step} is saved, and the same command resumes")
        return 128 + result.stopped_by  # as a shell reports a process that a signal ended
    # A run that was complete already took no step, and so has no held-out loss.
    heldout = trainer.evaluate(result.state) if result.heldout_loss is None else result.heldout_loss
    prompt = tokenizer.encode(PROMPT)
    if not of_bytes:  # PROMPT may not be a word of the tokenizer's
        prompt = data.heldout[: min(16, config.seq_len // 2)]
    losses = _losses(data, heldout, bigram, unit(tokenizer))
    progress.facts(_outcome(result, losses, output, drawn, tokenizer.decode(prompt)))
    sizes = config.parallel_config()
    # On a mesh the batch is split: as many copies of the prompt as it has shards.
    copies = 1 if sizes is None else sizes.batch_devices
    text = continue_text(result.state.model, tokenizer, prompt, SAMPLE_LENGTH, seed=config.seed, copies=copies)
    progress.text("sample", tokenizer.decode(prompt) + text)
    return 0


def _plan(trainer: Trainer) -> LoopPlan:
    config = trainer.config
    return LoopPlan(
        steps=config.steps,
        save_every=config.save_every,
        eval_every=config.eval_every,
        log_every=config.log_every,
        inspect_every=config.inspect_every,
        give_up_after=config.give_up_after,
        work=_work(config),
        learning_rate=trainer.learning_rate,
        eval_saved=config.keep_best is not None,
    )


def _actions(
    trainer: Trainer, log: MetricsLog, precision: PrecisionLog, trace: StepTrace | None, heartbeats: Heartbeats | None
) -> LoopActions:
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
        trace=trace,
        heartbeats=heartbeats,
    )


def _draw(output: Path, word: str, bigram: float | None) -> list[str]:
    """Draw the plots of a run, and return the files that only some runs have; ``word``: the unit of the loss."""
    plot_losses(output, unit=word, bigram_entropy=bigram)
    drawn = [EXPERTS_PLOT] if plot_experts(output) is not None else []
    return drawn + ([PRECISION_FILE, PRECISION_PLOT] if plot_precision(output) is not None else [])


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Create the folder, and lock it against other runs until this process ends."""
    output.mkdir(parents=True, exist_ok=True)
    refuse_links(output)
    if not is_first():  # one process locks for all of them
        yield
        return
    with open(output / LOCK_FILE, "a", opener=_no_link) as file:
        try:
            # The kernel drops the lock with the process, however that ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another jax-te train is running in {output}; end it, or give another --output") from None
        yield


def _facts(
    config: RunConfig,
    data: TextData,
    backends: list[str],
    mesh: Mesh | None,
    state: TrainState,
    output: Path,
    first: int,
    report: QuantizationReport | None,
) -> dict[str, str]:
    """Return the lines to show at the start."""
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    groups = "" if config.num_query_groups == config.num_heads else f" in {config.num_query_groups} groups"
    dtypes = config.params_dtype
    if config.compute_dtype != config.params_dtype:
        dtypes += f", computing in {config.compute_dtype}"
    parts = "" if config.microbatches == 1 else f" in {config.microbatches} microbatches"
    device = jax.devices()[0].device_kind
    where = f"none: one device, {device}"
    if mesh is not None:
        where = f"{config.mesh} over {mesh.size} x {device}, {config.mesh_axis_type} axes"
    name = config.preset if config.init_from is None else Path(config.init_from).name
    of_tokens, word = (_bytes, "byte") if config.tokenizer_sha256 is None else (_tokens, "token")
    return {
        "model": f"{name}: {_count(config.num_layers, 'layer')}, hidden {config.hidden_size}, "
        f"{_count(config.num_heads, 'head')}{groups}, feed-forward {config.ffn_hidden_size}, "
        f"{config.position_embedding}, {config.normalization}, {config.activation}; {size:,} parameters in {dtypes}",
        "layers": _layers(config),
        "data": f"{data.source}: {_count(data.files, 'file')}, {of_tokens(len(data.train))} to train on, "
        f"{of_tokens(len(data.heldout))} held out",
        **_tokenizer_facts(config, data),
        "batch": f"{config.batch_size} x {config.seq_len} {word}s{parts}, {_count(config.steps, 'step')}",
        "recipe": _recipe(config),
        **({} if report is None else {"rules": str(report)}),
        "backend": "\n".join(backends),
        "mesh": where,
        "MFU": _mfu(_work(config), device),
        "output": f"{output}, " + (f"resumed after step {first}" if first else "a new run"),
    }


def _tokenizer_facts(config: RunConfig, data: TextData) -> dict[str, str]:
    """Return the lines about the tokenizer and the adapters of a run, if it has them."""
    rows = {}
    if config.tokenizer is not None:
        size = "" if data.bytes_per_token is None else f", {data.bytes_per_token:.2f} bytes each"
        rows["tokens"] = f"{config.tokenizer}: {data.vocab_size:,} of them{size}"
    if config.lora_rank is not None:
        rows["LoRA"] = f"rank {config.lora_rank}, alpha {config.lora_alpha or config.lora_rank:g}; all else is frozen"
    return rows


def _mfu(work: StepWork, device: str) -> str:
    if work.peak is None:
        return f"not given: jax_te knows no published peak of {device}"
    return f"relative to {work.peak / 1e12:.0f} TFLOP/s of each device, its dense bf16 peak"


def _layers(config: RunConfig) -> str:
    form = "scanned" if runs_scanned(config.scan_layers, config.num_layers) else "unrolled"
    if config.scan_layers != "auto":
        return f"{form}: --scan-layers {'yes' if config.scan_layers else 'no'}"
    few = config.num_layers <= UNROLL_LIMIT
    return f"{form}: {_count(config.num_layers, 'layer')}, {'not ' if few else ''}more than {UNROLL_LIMIT}"


def _recipe(config: RunConfig) -> str:
    if config.recipe == "none":
        return "none: no quantization" + (", except by the rules below" if config.precision_config is not None else "")
    fields = [f"{name} {getattr(config, name)}" for name in RECIPE_FIELDS if getattr(config, name) is not None]
    if config.fp8_param:
        fields.append("kernels held quantized")
    for count, which in ((config.bf16_layers_start, "first"), (config.bf16_layers_end, "last")):
        if count:
            fields.append(f"the {which} {_count(count, 'layer')} in high precision")
    return f"{config.recipe}: {', '.join(fields)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _bytes(number: int) -> str:
    for name, size in (("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return _count(number, "byte")


def _tokens(number: int) -> str:
    return _count(number, "token")


def _losses(data: TextData, heldout: float, bigram: float | None, word: str) -> dict[str, str]:
    rows = {"held-out loss": f"{heldout:.4f} nats per {word}"}
    if bigram is not None:
        rows["byte bigrams"] = f"{bigram:.4f} nats per byte, their entropy in the same text"
    elif data.bytes_per_token:
        rows["held-out loss"] += f", {heldout / math.log(2.0) / data.bytes_per_token:.4f} bits per byte"
    return rows


def _outcome(result: LoopResult, losses: dict[str, str], output: Path, drawn: list[str], prompt: str) -> dict[str, str]:
    """Return the rows to show at the end; ``drawn``: files that only some runs have."""
    rows = dict(losses)
    if result.tokens_per_second is not None:
        rows["speed"] = f"{result.tokens_per_second:,.0f} tokens/s; {clock(result.seconds)} in all"
    skipped = int(result.state.skipped_steps)
    if skipped:
        rows["skipped"] = f"{skipped} steps, whose gradients were not finite"
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak:
        rows["memory"] = f"{peak / 2**30:.2f} GiB at the peak"
    names = [METRICS_FILE, PLOT_FILE, *drawn, TENSORBOARD_FOLDER, PROFILE_FOLDER]
    names = [name for name in names if (output / name).exists()]
    rows["files"] = f"{output}: {', '.join([*names, CHECKPOINT_FOLDER])}"
    rows["next"] = f"jax-te sample --output {output} --prompt {prompt!r}"
    return rows
