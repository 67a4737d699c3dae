"""What ``jax-te doctor --gpu`` shows: a train step's predicted time under each recipe, and which one pays."""

from __future__ import annotations

from jax_te._text import table
from jax_te.bench import predict_step
from jax_te.cli.bench.preset_config import preset_config, read_decoder, sizes_of
from jax_te.cli.command_options import DoctorOptions
from jax_te.cli.model_config import described_form
from jax_te.data import ByteTokenizer
from jax_te.typing import GpuName

_GAIN = 1.02
"""Least speed over the first recipe for which a recipe pays: less is within what the prediction is off by."""


def show_prediction(options: DoctorOptions, gpu: GpuName) -> None:
    """Print milliseconds by kind of kernel and recipe, and a line for each recipe that gains nothing.

    Raises:
        ValueError: for no model, or two, for one that is not a decoder, and for sizes that do not go together.
    """
    if (options.preset is None) == (options.model_config is None):
        raise ValueError("--gpu predicts the time of a model; give --preset or --model-config, and not both")
    if options.model_config is not None and options.vocab_size is not None:
        raise ValueError("--model-config says what the model is; leave --vocab-size out")
    if not options.recipes:
        raise ValueError("--recipes is empty; name a recipe, or leave it out")
    described = None if options.model_config is None else _described(options.model_config)
    config = preset_config(
        options.preset or "tiny",
        "none",
        model_config=described,
        num_layers=options.num_layers,
        vocab_size=options.vocab_size,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
    )
    sizes = sizes_of(config)
    times = {recipe: predict_step(sizes, recipe, gpu) for recipe in options.recipes}
    tokens, first = sizes.batch * sizes.sequence, sum(times[options.recipes[0]].values())
    kinds = [*dict.fromkeys(kind for each in times.values() for kind in each if kind != "gaps"), "gaps"]
    rows = [[kind, *(_shown(each.get(kind)) for each in times.values())] for kind in kinds]
    totals = {recipe: sum(each.values()) for recipe, each in times.items()}
    rows.append(["all", *map(_shown, totals.values())])
    rows.append(["tokens/s", *(f"{1e3 * tokens / total:,.0f}" for total in totals.values())])
    rows.append([f"speed over {options.recipes[0]}", *(f"{first / total:.2f}" for total in totals.values())])
    print(f"a step of {sizes.batch} x {sizes.sequence} tokens on one {gpu.upper()}, predicted, in ms")
    print(table(["", *options.recipes], rows, right=len(options.recipes)))
    for recipe, total in totals.items():
        if recipe != options.recipes[0] and first / total < _GAIN:
            print(f"{recipe} gains nothing here: {_reason(times[options.recipes[0]], times[recipe])}")


def _described(path: str) -> str:
    """Return the text of ``--model-config``, of a decoder that has rows for bytes, as it is predicted for text."""
    text = read_decoder(path, "jax-te doctor --gpu")
    rows = described_form(text)[1].others["vocab_size"]
    if rows < ByteTokenizer.vocab_size:
        raise ValueError(
            f"--model-config has {rows} tokens (vocab_size), and a prediction is for at least "
            f"{ByteTokenizer.vocab_size}, those of bytes; set vocab_size to {ByteTokenizer.vocab_size} in a copy of it"
        )
    return text


def _shown(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.1f}"


def _reason(first: dict[str, float], times: dict[str, float]) -> str:
    """Return what takes the time that a recipe's GEMMs save."""
    saved = first["GEMM"] - times["GEMM"]
    more = {kind: ms - first.get(kind, 0.0) for kind, ms in times.items() if ms > first.get(kind, 0.0)}
    most = max(more, key=more.__getitem__)
    name = "the time to launch many small kernels" if most == "gaps" else f"{most!r}"
    return f"GEMMs save {saved:.1f} ms, and {name} takes {more[most]:.1f} more"
