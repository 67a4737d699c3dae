"""The options of ``jax-te eval``. Imports no jax, so that ``--help`` is instant."""

from __future__ import annotations

from dataclasses import dataclass

from jax_te.cli.options import COUNT, FOLDER, PATH, SIZE, SWITCH, InspectOptions, ModelOptions, option, options_of

_RULES = options_of(InspectOptions)["factory_modules"]
_IGNORED = options_of(ModelOptions)["ignore_fields"]


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Show the loss and the perplexity of a checkpoint on a text.

    Every token of the text but the first is predicted once, in windows that follow each other without overlap, under
    the run's recipe and on one device. The data may be of every kind that jax-te train takes.
    """

    output: str = option(FOLDER, "folder of the run", "runs/tiny")
    step: int | None = option(COUNT, "checkpoint of this step", None, shown="the newest")
    init_from: str | None = option(FOLDER, "of Hugging Face, whose model is taken in place of a run's", None)
    ignore_fields: str | None = option(_IGNORED.kind, _IGNORED.help, None, shown="none")
    tokenizer: str | None = option(PATH, "with --init-from: tokenizer.json, or a folder with it", None, shown="its own")
    data: str | None = option(PATH, "text file or folder", None, shown="the run's held-out text")
    batch_size: int | None = option(SIZE, "examples of a batch", None, shown="a microbatch of the run, or 1")
    seq_len: int | None = option(SIZE, "tokens of an example", None, shown="the run's, or at most 1024")
    factory_modules: str | None = option(_RULES.kind, _RULES.help, None)
    json: bool = option(SWITCH, "print JSON", False, shown="lines")
