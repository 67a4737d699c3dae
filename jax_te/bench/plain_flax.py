"""Train steps of a Transformer in plain Flax NNX, as it is and after `quantize_model`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_te._device import default_platform
from jax_te.bench.contestants import CompiledStep, SharedState, run_contestants
from jax_te.bench.settings import Row, Settings
from jax_te.layers import quantize_model
from jax_te.ops import use_backend
from jax_te.quantize import QuantizerState
from jax_te.recipe import Recipe, autocast
from jax_te.training import Optimizer, value_and_grad
from jax_te.typing import Array, BackendName

_TX = optax.adamw(1e-4)


@dataclass(frozen=True, kw_only=True)
class PlainSizes:
    """Sizes of the Transformer and of its batch.

    Args:
        layers: number of layers.
        hidden, ffn: sizes of the hidden states and of the feed-forward blocks.
        heads: number of attention heads.
        vocabulary: rows of the embedding.
        batch, sequence: sizes of a step's tokens.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    batch: int
    sequence: int


@dataclass(frozen=True, kw_only=True)
class PlainForm:
    """The Transformer in one form.

    Args:
        name: name of the row.
        recipe: recipe under which it is quantized. None: it is left as it is, in bf16.
        quantizes_head: whether a rule quantizes its head, too.
    """

    name: str
    recipe: Recipe | None = None
    quantizes_head: bool = False

    @contextlib.contextmanager
    def context(self, backend: BackendName) -> Iterator[None]:
        """Yield inside of the form's recipe and a backend."""
        with autocast(self.recipe), use_backend(backend):
            yield


def bench_plain_flax(forms: Sequence[PlainForm], sizes: PlainSizes, settings: Settings) -> list[Row]:
    """Return rows of train steps that were timed in turn, all on one state.

    Parameters, activations and gradients are bf16; AdamW's moments and the masters that it updates are fp32.

    Args:
        forms: forms of the Transformer.
        sizes: its sizes.
        settings: settings of the measurement.
    """
    tokens = jax.random.randint(jax.random.key(1), (sizes.batch, sizes.sequence + 1), 0, sizes.vocabulary)
    models = [_Model(form, sizes, settings.backend) for form in forms]

    def create() -> State:
        made = [model.create() for model in models]
        # The parameters of the others are equal, and in jit nothing computes them.
        return made[0][0], {model.form.name: quantizers for model, (_, quantizers) in zip(models, made, strict=True)}

    abstract, state = jax.eval_shape(create), SharedState(jax.jit(create))
    contestants = [model.contestant(state, abstract, tokens) for model in models]
    rows = run_contestants(contestants, tokens, sizes.batch * sizes.sequence, settings)
    return [row | {"quantized_layers": model.quantized_layers} for row, model in zip(rows, models, strict=True)]


State = tuple[Any, dict[str, Any]]
"""Variables of the model and its optimizer that all forms have, and those of each form's quantizers, by its name."""


class _Model:
    """The Transformer in one form.

    Attributes:
        form: the form.
        graphdef: definition of the model and its optimizer, once `create` has run.
        quantized_layers: number of layers that the recipe quantizes, likewise.
    """

    def __init__(self, form: PlainForm, sizes: PlainSizes, backend: BackendName):
        self.form, self._sizes = form, sizes
        self._backend: BackendName = backend
        self.graphdef: Any = None
        self.quantized_layers = 0

    def create(self) -> tuple[Any, Any]:
        """Return the Variables of a new model and its optimizer, and those of its quantizers."""
        sizes, form = self._sizes, self.form
        with form.context(self._backend):
            model = _Transformer(sizes, rngs=nnx.Rngs(0))
            if form.recipe is not None:
                tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.sequence), jnp.int32)
                report = quantize_model(model, tokens, rules={"head": "ambient"} if form.quantizes_head else None)
                self.quantized_layers = len(report.quantized)
            self.graphdef, quantizers, others = nnx.split((model, Optimizer(model, _TX)), QuantizerState, ...)
        return others, quantizers

    def contestant(self, state: SharedState, abstract: State, tokens: Array) -> CompiledStep:
        """Return the train step of a state, whose shapes are ``abstract``."""
        name = self.form.name

        def step(state: State, tokens: Array) -> tuple[State, Array]:
            others, quantizers = state
            model, optimizer = nnx.merge(self.graphdef, quantizers[name], others)
            loss, gradients = value_and_grad(_loss)(model, tokens)
            optimizer.update(model, gradients)
            _, own, others = nnx.split((model, optimizer), QuantizerState, ...)
            return (others, quantizers | {name: own}), loss

        def lower() -> Any:
            with self.form.context(self._backend):
                return jax.jit(step, donate_argnums=0).lower(abstract, tokens)

        return CompiledStep(name, state=state, lower=lower)


def _loss(model: Any, tokens: Array) -> Array:
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


class _Block(nnx.Module):
    """A layer as people write it: attention and a feed-forward block, each after a norm."""

    def __init__(self, sizes: PlainSizes, *, rngs: nnx.Rngs):
        hidden, bf16 = sizes.hidden, {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.heads = sizes.heads
        self.norm1, self.norm2 = nnx.LayerNorm(hidden, **bf16), nnx.LayerNorm(hidden, **bf16)
        self.qkv, self.out = nnx.Linear(hidden, 3 * hidden, **bf16), nnx.Linear(hidden, hidden, **bf16)
        self.up, self.down = nnx.Linear(hidden, sizes.ffn, **bf16), nnx.Linear(sizes.ffn, hidden, **bf16)

    def __call__(self, x: Array) -> Array:
        b, s, hidden = x.shape
        q, k, v = jnp.split(self.qkv(self.norm1(x)).reshape(b, s, 3 * self.heads, -1), 3, axis=2)
        kernels = "cudnn" if default_platform() == "gpu" else None
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernels)
        x = x + self.out(attended.reshape(b, s, hidden))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class _Transformer(nnx.Module):
    """A decoder of Flax's layers alone."""

    def __init__(self, sizes: PlainSizes, *, rngs: nnx.Rngs):
        hidden, bf16 = sizes.hidden, {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.embed = nnx.Embed(sizes.vocabulary, hidden, **bf16)
        self.blocks = nnx.List([_Block(sizes, rngs=rngs) for _ in range(sizes.layers)])
        self.norm = nnx.LayerNorm(hidden, **bf16)
        self.head = nnx.Linear(hidden, sizes.vocabulary, use_bias=False, **bf16)

    def __call__(self, tokens: Array) -> Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
