"""``jax-te bench flax``: train steps of a Transformer in plain Flax NNX, as it is and after `quantize_model`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jax_te.bench import PlainForm, PlainSizes, Row, Settings, bench_plain_flax
from jax_te.cli.bench.options import BenchFlax
from jax_te.cli.bench.rows import show_rows
from jax_te.cli.memory import check_fits, score_bytes
from jax_te.recipe import recipe_from_name


def run(options: BenchFlax) -> int:
    """Return the exit status, 0, once the rows are printed.

    Raises:
        ValueError: for sizes that are not divisible, that a recipe cannot quantize or that exceed the memory, and if no
            train step ran, with the first one's error.
    """
    if options.hidden_size % options.num_heads:
        raise ValueError(f"--hidden-size {options.hidden_size} is not divisible by --num-heads {options.num_heads}")
    _check_quantized_sizes(options)
    sizes = PlainSizes(
        layers=options.num_layers,
        hidden=options.hidden_size,
        ffn=options.ffn_hidden_size,
        heads=options.num_heads,
        vocabulary=options.vocab_size,
        batch=options.batch_size,
        sequence=options.seq_len,
    )
    _check_memory(sizes)
    profile = None if options.profile is None else Path(options.profile)
    settings = Settings(backend=options.backend, rounds=options.rounds, calls=options.calls, profile=profile)
    return show_rows(_rows(options, sizes, settings), options.output)


def _rows(options: BenchFlax, sizes: PlainSizes, settings: Settings) -> Iterator[Row]:
    # A generator: show_rows refuses a file that cannot be written before anything is measured.
    yield from bench_plain_flax(_forms(options), sizes, settings)


def _forms(options: BenchFlax) -> list[PlainForm]:
    """Return the model as it is, and under each recipe with each precision of its head, each form once."""
    forms = [PlainForm(name="none")]
    for recipe in dict.fromkeys(options.recipes):
        for head in dict.fromkeys(options.head):
            quantized = head == "quantized"
            name = f"{recipe}, head quantized" if quantized else recipe
            forms.append(PlainForm(name=name, recipe=recipe_from_name(recipe), quantizes_head=quantized))
    return forms


def _check_quantized_sizes(options: BenchFlax) -> None:
    """Raise ValueError for sizes that a recipe cannot quantize.

    `quantize_model` would leave layers of such sizes in bf16, under the name of a row that says otherwise.
    """
    for name in options.recipes:
        recipe = recipe_from_name(name)
        multiple = 1 if recipe is None else recipe.alignment
        why, remedy = f"the recipe {name}", f"leave {name} out of --recipes"
        checks = [
            ("--hidden-size", options.hidden_size, why, remedy),
            ("--ffn-hidden-size", options.ffn_hidden_size, why, remedy),
        ]
        if "quantized" in options.head:
            head = f"a head quantized under {why}"
            checks.append(("--vocab-size", options.vocab_size, head, "leave quantized out of --head"))
        for option, size, what, instead in checks:
            if size % multiple:
                raise ValueError(
                    f"{option} {size} is not divisible by {multiple}, as it must be for {what}; take the next "
                    f"multiple, {size + -size % multiple}, or {instead}"
                )


def _check_memory(sizes: PlainSizes) -> None:
    """Raise ValueError, before any allocation, for sizes that exceed the memory."""
    tokens = sizes.batch * sizes.sequence
    of_layer = 4 * sizes.hidden**2 + 2 * sizes.hidden * sizes.ffn
    parameters = sizes.layers * of_layer + 2 * sizes.vocabulary * sizes.hidden
    # Parameters and gradients in bf16, masters and two moments in fp32; logits in fp32, and of each layer a token's
    # input.
    needed = 16 * parameters + tokens * (4 * sizes.vocabulary + 2 * sizes.layers * sizes.hidden)
    needed += score_bytes(sizes.batch, sizes.heads, sizes.sequence)
    check_fits(needed, 1, "lower --batch-size, --seq-len or another size")
