"""How long a train step takes to compile, beside the same step written by hand with the library's layers."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.models import GPTModel
from jax_te.recipe import DelayedScaling, autocast
from jax_te.sharding import make_mesh
from jax_te.training import TrainState, create_train_state, make_train_step
from tests.support.states import merging

CONFIG = TransformerConfig(num_layers=2, hidden_size=128, num_attention_heads=4, ffn_hidden_size=512)
TX = optax.adamw(1e-3)
MICROBATCHES, PAIRS = 2, 3
ROOT = Path(__file__).parents[2]
LIMIT = 1.2
"""No more slack: on two cores with other work on them medians were 1.05 and 1.08, single pairs 0.99 to 1.17, and a step
whose skip has no barrier in front of it took 1.6 times as long."""


def build(rngs: nnx.Rngs) -> GPTModel:
    return GPTModel(CONFIG, vocab_size=512, max_sequence_length=64, rngs=rngs)


def loss_fn(model: Any, batch: jax.Array, key: jax.Array | None) -> jax.Array:
    return model.loss(batch[:, :-1], batch[:, 1:], dropout_key=key)


def by_hand(state: TrainState, mesh: Any) -> Any:
    """A step with microbatches, quantizer state and a skip of updates that are not finite, all that ours does here."""
    graphdef, rest = state.graphdef, state.rest

    def step(carry: Any, batch: jax.Array) -> Any:
        params, quantizers, opt_state, number = carry
        parts = batch.reshape(MICROBATCHES, -1, batch.shape[-1])
        if mesh is not None:
            parts = jax.lax.with_sharding_constraint(parts, jax.sharding.PartitionSpec(None, ("data", "fsdp")))

        def loss(params: Any, quantizers: Any, part: jax.Array, key: jax.Array) -> jax.Array:
            return loss_fn(nnx.merge(graphdef, params, merging(quantizers), rest), part, key)

        def body(sums: Any, given: Any) -> Any:
            part, number = given
            total, grads, states = sums
            key = jax.random.fold_in(jax.random.key(1), number)
            value, (grad, after) = jax.value_and_grad(loss, argnums=(0, 1))(params, quantizers, part, key)
            sums = total + value, jax.tree.map(jnp.add, grads, grad), jax.tree.map(jnp.maximum, states, after)
            return sums, None

        zeros = jax.tree.map(jnp.zeros_like, (params, quantizers))
        (total, grads, after), _ = jax.lax.scan(body, (jnp.float32(0), *zeros), (parts, jnp.arange(MICROBATCHES)))
        grads = jax.tree.map(lambda grad: grad / MICROBATCHES, grads)
        finite = jnp.isfinite(total) & jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(grads)]))
        # Else XLA computes it anew in each parameter's update, which alone takes 1.6 times as long to compile.
        finite = jax.lax.cond(finite, lambda: jnp.ones((), bool), lambda: jnp.zeros((), bool))
        updates, opt = TX.update(grads, opt_state, params)
        new, old = (optax.apply_updates(params, updates), after, opt), (params, quantizers, opt_state)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return (*new, number + 1), {
            "loss": total / MICROBATCHES,
            "grad_norm": optax.tree.norm(grads),
        }

    return jax.jit(step, donate_argnums=0)


@contextlib.contextmanager
def as_users_compile() -> Iterator[None]:
    """With XLA's optimizations, which the tests do without, and nothing from a cache."""
    with contextlib.ExitStack() as stack:
        for name in ("jax_disable_most_optimizations", "jax_enable_compilation_cache"):
            stack.callback(jax.config.update, name, jax.config.values[name])
            jax.config.update(name, False)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it
            yield


def compile_seconds(step: Any, *args: Any) -> float:
    begin = time.process_time()  # of all threads; another process's work is not in it
    step.lower(*args).compile()
    return time.process_time() - begin


def ratios(axes: dict[str, int] | None) -> list[float]:
    """Return ours over by hand, of pairs."""
    mesh = None if axes is None else make_mesh(ParallelConfig(**axes))
    with (
        as_users_compile(),
        autocast(DelayedScaling(amax_history_len=16)),
        contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh),
    ):
        state = create_train_state(build, TX, key=jax.random.key(0))
        batch = jax.random.randint(jax.random.key(2), (16, 65), 0, 512)
        carry = (state.params, state.quantizers, state.opt_state, state.step)
        found = []
        for _ in range(PAIRS + 1):
            ours = compile_seconds(make_train_step(loss_fn, TX, microbatches=MICROBATCHES), state, batch)
            found.append(ours / compile_seconds(by_hand(state, mesh), carry, batch))
    return found[1:]  # the first pair pays for what a process imports and traces once


@pytest.mark.slow
@pytest.mark.parametrize("axes", [None, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["no mesh", "mesh"])
def test_a_train_step_compiles_about_as_fast_as_one_by_hand(axes: dict[str, int] | None) -> None:
    """In a process of its own: in one that has run many tests, ours was seen to take up to twice as long."""
    start = "import jax; jax.config.update('jax_num_cpu_devices', 8)"
    code = f"{start}; from {__name__} import ratios; print(*ratios({axes}))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert statistics.median(map(float, done.stdout.split()[-PAIRS:])) < LIMIT, done.stdout
