"""``jax-te bench model``: train steps of a preset's or a file's model, next to te.jax's or Megatron-Core's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jax_te.bench import Row, Settings, Variant, bench_train_steps, check_megatron, check_same_form
from jax_te.cli.bench.options import BenchModel
from jax_te.cli.bench.preset_config import check_parameters_fit, preset_config, read_decoder, sizes_of
from jax_te.cli.bench.rows import show_rows
from jax_te.cli.build import build_model
from jax_te.cli.option_table import check_effects, flag
from jax_te.cli.run_config import RunConfig
from jax_te.config import ParallelConfig, PipelineConfig
from jax_te.data import Tokenizer, load_text
from jax_te.models import Execution
from jax_te.ops.te import available

Form = tuple[str, RunConfig, Execution]
"""Name, configuration and execution of a variant of the model."""
Forms = dict[str, list[Form]]
"""Variants of the model under each recipe, by the recipe's name."""


def run(options: BenchModel) -> int:
    """Return the exit status, 0, once the rows are printed.

    Raises:
        ValueError: for conflicting options, a peer that is not installed, a model that exceeds the memory, and if no
            train step ran, with the first one's error.
    """
    check_effects(options, {"--data": options.data is not None})
    _check_vocabulary(options)
    described = _described(options)
    forms = {recipe: _forms(options, recipe, described) for recipe in options.recipes}
    configs = [config for made in forms.values() for _, config, _ in made]
    if options.peer == "te":
        _check_te(options, configs)
    elif options.peer == "megatron":
        _check_megatron(options, configs)
    return show_rows(_rows(options, forms, _tokens(options, forms)), options.output)


def _check_vocabulary(options: BenchModel) -> None:
    """Raise ValueError for a tokenizer with another vocabulary."""
    if options.tokenizer is not None and options.vocab_size is not None:
        raise ValueError(f"--tokenizer has a vocabulary of its own; leave --vocab-size {options.vocab_size} out")


def _described(options: BenchModel) -> str | None:
    """Return the text of ``--model-config``, None without.

    Raises:
        ValueError: for a file that cannot be read or is not of a decoder, and for options that it decides.
    """
    if options.model_config is None:
        return None
    wrong = [name for name in ("preset", "vocab_size") if getattr(options, name) != getattr(BenchModel, name)]
    if wrong:
        raise ValueError(f"--model-config says what the model is; leave {', '.join(map(flag, wrong))} out")
    return read_decoder(options.model_config, "jax-te bench model")


def _check_te(options: BenchModel, configs: list[RunConfig]) -> None:
    """Raise ValueError if te.jax's GPT cannot be compared with the model."""
    if options.mesh is not None or options.microbatches > 1:
        raise ValueError("--peer te is a GPT on one device, without microbatches; leave out --mesh and --microbatches")
    if any((each.normalization, each.position_embedding) != ("LayerNorm", "learned_absolute") for each in configs):
        raise ValueError("--peer te is a GPT in GPT-2's form, and the model is not; take one of the gpt presets")
    ok, reason = available()
    if not ok:
        raise ValueError(f"--peer te: {reason}")


def _check_megatron(options: BenchModel, configs: list[RunConfig]) -> None:
    """Raise ValueError if Megatron-Core's GPT cannot be compared with the model."""
    sizes = ParallelConfig() if options.mesh is None else ParallelConfig.parse(options.mesh)
    for config in configs:
        check_same_form(config.transformer_config())
    if sizes.num_devices > 1 and any(config.num_experts is not None for config in configs):
        raise ValueError(f"--peer megatron runs experts on one device; leave --mesh {options.mesh} out")
    if sizes.num_devices != sizes.pipeline * sizes.data * sizes.fsdp * sizes.tensor:
        raise ValueError(f"--peer megatron has the axes pipeline, data, fsdp and tensor; got --mesh {options.mesh}")
    check_megatron()


def _tokens(options: BenchModel, forms: Forms) -> np.ndarray | None:
    """Return the batch of ``--data``, integers ``[b, s + 1]``: sequences that begin all over its text; None without."""
    configs = [config for made in forms.values() for _, config, _ in made]
    if options.data is None or not configs:
        return None
    batch, length, rows = configs[0].batch_size, configs[0].seq_len, configs[0].vocab_size
    tokenizer = None if options.tokenizer is None else Tokenizer(options.tokenizer)
    text = load_text(options.data, seq_len=length, tokenizer=tokenizer).train
    starts = np.linspace(0, len(text) - (length + 1), batch).astype(np.int64)
    tokens = np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)
    if not 0 <= tokens.min() <= tokens.max() < rows:
        raise ValueError(
            f"--data {options.data} has tokens from {tokens.min()} to {tokens.max()}, and the vocabulary {rows} rows; "
            f"give --vocab-size {tokens.max() + 1} or more, or a --tokenizer"
        )
    return tokens


def _rows(options: BenchModel, forms: Forms, tokens: np.ndarray | None) -> Iterator[Row]:
    profile = None if options.profile is None else Path(options.profile)
    settings = Settings(backend=options.backend, rounds=options.rounds, calls=options.calls, profile=profile)
    for made in filter(None, forms.values()):  # no variant of the model if an option is an empty list
        variants = [_variant(*form) for form in made]
        _, config, _ = made[-1]
        yield from bench_train_steps(variants, sizes_of(config), settings, peer=options.peer, tokens=tokens)


def _variant(name: str, config: RunConfig, execution: Execution) -> Variant:
    return Variant(
        name=name,
        recipe=config.make_recipe(),
        build=build_model(config, execution=execution),
        pipeline=PipelineConfig.parse(config.pipeline),
        wgrad_dtype=jnp.dtype(config.wgrad_dtype),
        reduce_gradients=config.reduce_gradients,
    )


def _forms(options: BenchModel, recipe: str, described: str | None) -> list[Form]:
    """Return name, configuration and execution of every variant of the model to measure under a recipe.

    Args:
        described: text of the ``config.json`` of the model, None for a preset's.
    """
    forms = []
    names = ("stack", "recompute", "pipeline", "batch_parts", "wgrad_dtype", "reduce_gradients")
    for stack, way, schedule, parts, wgrad, when in itertools.product(*(getattr(options, name) for name in names)):
        config = preset_config(
            options.preset,
            recipe,
            way,
            model_config=described,
            num_layers=options.num_layers,
            vocab_size=options.vocab_size if described is None else None,
            tokenizer=options.tokenizer,
            batch_size=options.batch_size,
            seq_len=options.seq_len,
            microbatches=options.microbatches,
            mesh=options.mesh,
            sequence_parallel=options.sequence_parallel,
            distributed_optimizer=options.distributed_optimizer,
            pipeline=schedule,
            batch_parts=parts,
            wgrad_dtype=wgrad,
            reduce_gradients=when,
        )
        check_parameters_fit(config)
        execution = Execution(config.recompute_policy, stack == "scanned", options.loss_chunks, parts)
        forms.append((_name(config, stack, way), config, execution))
    return forms


def _name(config: RunConfig, stack: str, way: str) -> str:
    """Return the name of a variant's row: the recipe, the stack, the recomputation, and non-default options."""
    name, sizes = f"{config.recipe}, {stack}, recompute {way}", config.parallel_config()
    if sizes is not None and sizes.pipeline > 1:
        name += f", {config.pipeline}"
    if config.batch_parts > 1:
        name += f", {config.batch_parts} parts"
    if config.wgrad_dtype != "float32":
        name += f", gradients {config.wgrad_dtype}"
    return name + (", reduced once a step" if config.reduce_gradients == "step" else "")
