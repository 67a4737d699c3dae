"""``jax-te bench --model PRESET``: whole train steps of a preset, in the forms of its layer stack."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from flax import nnx

from jax_te.bench.contestants import Contestant, SharedState, rows_of
from jax_te.bench.modules import TE_RECIPES
from jax_te.cli.internal import METHODS, MODULES, POLICIES, PRESETS, SIZE, VOCAB_SIZE, RunConfig, new_config, some_of
from jax_te.models import Execution, GPTModel
from jax_te.ops import use_backend
from jax_te.ops.internal import te
from jax_te.recipe import autocast, recipe_from_name
from jax_te.training import abstract_train_state, create_train_state, make_train_step

STACKS = ("unrolled", "scanned")
DEFAULTS: dict[str, Any] = {
    "stack": [STACKS[0]],
    "recompute": ["none"],
    "layers": None,
    "vocabulary": VOCAB_SIZE,
    "loss_chunks": 1,
    "peer": None,
}
"""Options that go with ``--model`` only, and what they are where they are not given."""

_TX = optax.adamw(1e-4)
_COUNTED = " or ".join(f"{method}:LAYERS" for method in METHODS)


def recompute(text: str) -> str:
    """An argparse type: ``none``, a policy of full recomputation, a method and its layers, or modules.

    >>> recompute("mlp,core_attn"), recompute("block:12")
    ('core_attn,mlp', 'block:12')
    """
    if text in ("none", *POLICIES):
        return text
    method, colon, count = text.partition(":")
    if colon and method in METHODS and count.isdecimal() and int(count) > 0:
        return text
    try:
        return some_of(MODULES)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be none, one of {', '.join(POLICIES)}, {_COUNTED}, or some of {','.join(MODULES)}, each once; got "
            f"{text!r}"
        ) from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Register ``--model`` and what goes with it."""
    parser.add_argument(
        "--model", choices=tuple(PRESETS),
        help="measure instead train steps of this preset of jax-te train (AdamW on fp32 masters, bf16 parameters, its "
        "own batch), every --stack with every --recompute, all of a recipe on one state. Ratios are to a recipe's "
        "first row that ran, peak_gib is arguments and temporary arrays",
    )  # fmt: skip
    group = parser.add_argument_group("with --model", argument_default=argparse.SUPPRESS)
    add = group.add_argument
    add("--stack", nargs="+", choices=STACKS, help="forms of the layer stack (default: unrolled)")
    add(
        "--recompute", nargs="+", type=recompute, metavar="WAY",
        help=f"what backward computes again: none; some of {','.join(MODULES)}; all layers, one by one, with a "
        f"policy: {', '.join(POLICIES)}; {_COUNTED} (default: none)",
    )  # fmt: skip
    add("--layers", type=SIZE, metavar="N", help="layers (default: the preset's)")
    add("--vocabulary", type=SIZE, metavar="V", help=f"rows of the embedding (default: {VOCAB_SIZE}, bytes)")
    add("--loss-chunks", type=SIZE, metavar="N", help="parts that the loss takes logits in (default: 1)")
    add("--peer", choices=("te",), help="beside a GPT of te.jax's own layers, the first row (default: none)")


def check_options(args: argparse.Namespace, others: bool) -> None:
    """Raise ValueError for options that would have no effect, or cannot be measured.

    Args:
        args: of ``jax-te bench``.
        others: whether an option is given that measures something else.
    """
    given = [name for name in DEFAULTS if hasattr(args, name)]
    if args.model is None:
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} is for whole train steps of a preset; give --model")
        return
    if others:
        raise ValueError(
            "--model measures whole train steps at the preset's sizes on one device; leave out --modules, --shape, "
            "--mesh, --sequence-parallel, --microbatches and --hlo"
        )
    if "peer" in given:
        ok, reason = te.available()
        if not ok:
            raise ValueError(f"--peer te: {reason}")
        form = PRESETS[args.model].values
        if (form["normalization"], form["position_embedding"]) != ("LayerNorm", "learned_absolute"):
            raise ValueError(
                f"--peer te is a GPT in GPT-2's form, and {args.model} is not; take one of the gpt presets"
            )


def bench_model(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all recipes.

    Raises:
        ValueError: if no contestant at all ran, with the first one's error.
    """
    args = argparse.Namespace(**(DEFAULTS | vars(args)))
    rows = []
    for name in args.recipes:
        rows += _bench_recipe(args, name)
    if all("error" in row for row in rows):
        raise ValueError(f"nothing could be measured; {rows[0]['name']}: {rows[0]['error']}")
    return rows


def _bench_recipe(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Rows of one recipe, printed; its states go when it ends."""
    ways = [_Way(args, name, stack, kept) for stack in args.stack for kept in args.recompute]
    state = SharedState(ways[0].create)
    config = ways[0].config
    tokens = jax.random.randint(jax.random.key(1), (config.batch_size, config.seq_len + 1), 0, args.vocabulary)
    contestants = [way.contestant(state, tokens) for way in ways]
    if args.peer is not None:
        contestants.insert(0, _peer(args, name, config, tokens))
    for contestant in contestants:
        contestant.start(tokens)
    for _ in range(args.rounds):
        for contestant in contestants:
            contestant.round(tokens, args.calls)
    rows = rows_of(contestants, config.tokens_per_step)
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


class _Way:
    """jax_te's model under a recipe, in one form of its stack, with one way of recomputation."""

    def __init__(self, args: argparse.Namespace, recipe: str, stack: str, kept: str):
        self.args, self.name = args, f"{recipe}, {stack}, recompute {kept}"
        self.scan, self.config = stack == "scanned", _config(args, recipe, kept)

    def build(self, rngs: nnx.Rngs) -> GPTModel:
        config = self.config
        return GPTModel(
            config.transformer_config(),
            vocab_size=self.args.vocabulary,
            max_sequence_length=config.seq_len,
            position_embedding_type=config.position_embedding,
            share_embeddings_and_output_weights=config.tie_embeddings,
            execution=Execution(config.recompute_policy, self.scan, self.args.loss_chunks),
            rngs=rngs,
        )

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with autocast(self.config.make_recipe()), use_backend(self.args.backend):
            yield

    def create(self) -> Any:
        with self.context():
            return create_train_state(self.build, _TX, key=jax.random.key(0))

    def contestant(self, state: SharedState, tokens: Any) -> Contestant:
        """Of its own is the model's graph definition only, which is no array."""
        with self.context():
            abstract = abstract_train_state(self.build, _TX)
        step = make_train_step(lambda model, batch, _: model.loss(batch[:, :-1], batch[:, 1:]), _TX)

        def lower() -> Any:
            with self.context():
                return step.lower(abstract, tokens)

        return Contestant(self.name, state, lower, lambda other: dataclasses.replace(other, graphdef=abstract.graphdef))


def _config(args: argparse.Namespace, recipe: str, kept: str) -> RunConfig:
    given = {"preset": args.model, "recipe": recipe, "params_dtype": "bfloat16"}
    if args.layers is not None:
        given["num_layers"] = args.layers
    if kept in POLICIES:
        given |= {"recompute_granularity": "full", "recompute_policy": kept}
    elif ":" in kept:
        method, _, count = kept.partition(":")
        given |= {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": int(count)}
    elif kept != "none":
        given |= {"recompute_granularity": "selective", "recompute_modules": kept}
    return new_config(given)


def _peer(args: argparse.Namespace, recipe: str, config: RunConfig, tokens: Any) -> Contestant:
    """te.jax's layers under the recipe, or in bf16 where te.jax has it not."""
    from jax_te.bench.te_jax import raw_context
    from jax_te.bench.te_jax_model import RawGPT, raw_train_step

    taken = recipe if recipe in TE_RECIPES else "none"
    model = RawGPT(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        ffn=config.ffn_hidden_size,
        vocabulary=args.vocabulary,
        length=config.seq_len,
    )

    def inside(action: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with raw_context(recipe_from_name(taken)):
                return action()

        return run

    create, step = raw_train_step(model, _TX, key=jax.random.key(0))
    state = SharedState(inside(create))
    return Contestant(f"{taken}, te.jax", state, inside(lambda: step.lower(jax.eval_shape(create), tokens)))
