"""A train step on the ``te`` backend: kernels quantized once a step and kernels held in FP8."""

import contextlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.checkpoint import TrainCheckpointer
from jax_te.config import ParallelConfig
from jax_te.errors import BackendUnavailableError
from jax_te.layers import LayerNorm, LayerNormMLP, Linear
from jax_te.models import StackInput, StackOptions
from jax_te.ops import dense, explain_backend, quantize_kernel, use_backend
from jax_te.ops.backend import _backend_on
from jax_te.ops.te import kernels
from jax_te.quantize import init_gemm_state
from jax_te.recipe import DelayedScaling, autocast, recipe_from_name
from jax_te.sharding import make_mesh
from jax_te.training import (
    PipelinedLoss,
    abstract_train_state,
    create_train_state,
    inspect_precision,
    make_eval_step,
    make_train_step,
)
from tests.support.numerics import assert_bitwise, draw, with_vjp
from tests.support.states import merging
from tests.support.toy import assert_same
from tests.training.test_kernels import TX, Net, batch, loss_fn, run

pytestmark = pytest.mark.te


@dataclass(frozen=True)
class OwnScaling(DelayedScaling):
    """A recipe class of a user's own."""


def test_a_subclass_of_a_recipe_runs_as_its_base():
    recipe, own = DelayedScaling(), OwnScaling()
    x, w, g = draw("x", (64, 96), jnp.bfloat16), draw("w", (96, 128), jnp.bfloat16), draw("g", (64, 128), jnp.bfloat16)
    assert explain_backend("dense", recipe=own, backend="te").backend == "te"

    def run(recipe):
        def call(x, w, state):
            return dense(x, w, recipe=recipe, state=state, backend="te")

        return with_vjp(call, (x, w, init_gemm_state(recipe)), g)

    for mine, expected in zip(jax.tree.leaves(run(own)), jax.tree.leaves(run(recipe)), strict=True):
        assert_bitwise(mine, expected)


@pytest.mark.parametrize("portable", [False, True], ids=["cached", "stored"])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_te_says_which_stored_kernels_it_takes(name, portable, monkeypatch):
    """As on a GPU whose hardware has every recipe: TE's GEMM takes blocks that it has quantized itself."""
    monkeypatch.setattr(kernels, "recipe_supports", lambda recipe: (True, "made up"))
    recipe = recipe_from_name(name)
    x, w = draw("x", (64, 96), jnp.bfloat16), draw("w", (96, 128), jnp.bfloat16)
    state = init_gemm_state(recipe)

    def run(x, w):
        used = quantize_kernel(w, recipe=recipe, state=state, portable=portable, backend="te")
        return dense(x, used, recipe=recipe, state=state, backend="te")

    _backend_on.cache_clear()
    try:
        if portable and name in ("mxfp8", "nvfp4"):
            with pytest.raises(BackendUnavailableError, match="its kernel is stored quantized in the blocks"):
                jax.eval_shape(run, x, w)
        else:
            assert jax.eval_shape(run, x, w).shape == (64, 128)
    finally:
        _backend_on.cache_clear()


@pytest.mark.parametrize("name", ["none", "delayed", "current", "block"])
def test_microbatches_and_fp8_parameters(name):
    recipe = recipe_from_name(name)
    with use_backend("te"):
        _, one = run(recipe)
        _, two = run(recipe, microbatches=2)
        np.testing.assert_allclose(one, two, rtol=0.02)  # current scaling: a scale for each microbatch
        if recipe is not None:
            _, held = run(recipe, microbatches=2, fp8_param=True)
            assert held == two


def test_what_is_done_on_whole_tensors_is_refused_on_a_mesh():
    """What `jax_te.cli.run_checks.check_te_on_mesh` refuses at the start, the step that does it would refuse."""
    with use_backend("te"), jax.set_mesh(make_mesh(ParallelConfig(data=2))):
        for options in ({"microbatches": 2}, {"fp8_param": True}):
            run(recipe_from_name("current"), steps=1, **options)
            with pytest.raises(BackendUnavailableError, match="its kernel was quantized"):
                run(recipe_from_name("block"), steps=1, **options)
        with autocast(recipe_from_name("current")):
            model = Linear(32, 16, rngs=nnx.Rngs(0))
            with pytest.raises(BackendUnavailableError, match="its quantized tensors are observed"):
                inspect_precision(model, lambda model, x, key: jnp.sum(model(x)), jnp.ones((4, 16, 32)))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_kernel_quantized_ahead_gives_the_same_bits(name, portable):
    recipe = recipe_from_name(name)
    x, w, g = draw("x", (64, 96), jnp.bfloat16), draw("w", (96, 128), jnp.bfloat16), draw("g", (64, 128), jnp.bfloat16)

    def call(ahead):
        def fn(x, w, state):
            used, gradient = w, None
            if ahead:
                used = quantize_kernel(w, recipe=recipe, state=state, portable=portable, backend="te")
                gradient = w
            return dense(x, used, recipe=recipe, state=state, backend="te", grad_sink=gradient)

        y, vjp = jax.vjp(jax.jit(lambda *args: fn(*merging(args))), x, w, init_gemm_state(recipe))
        return y, vjp(g)

    for one, other in zip(jax.tree.leaves(call(False)), jax.tree.leaves(call(True)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["delayed", pytest.param("block", marks=pytest.mark.slow)])
def test_a_run_goes_on_under_the_other_backend_from_the_same_bits(name, tmp_path):
    recipe = recipe_from_name(name)
    with autocast(recipe), TrainCheckpointer(tmp_path) as checkpointer:
        # What is to be filled knows no backend: a kernel in one's own layout would be another type of leaf.
        wanted = abstract_train_state(Net, TX, fp8_param=True)
        with use_backend("te"):
            state, losses = run(recipe, steps=2, fp8_param=True)
        for step, (saver, reader) in enumerate([("te", "xla"), ("xla", "te")], 1):
            with use_backend(saver):
                checkpointer.save(state, None, step)
            with use_backend(reader):
                restored, _, _ = checkpointer.restore(wanted)
                assert_same(restored, state)
                state, metrics = make_train_step(loss_fn, TX)(restored, batch())
            assert float(metrics["loss"]) < losses[-1]


@pytest.mark.parametrize("name", ["delayed", pytest.param("block", marks=pytest.mark.slow)])
def test_masters_become_the_same_stored_kernels_under_both_backends(name, tmp_path):
    states = {}
    with autocast(recipe_from_name(name)), TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(create_train_state(Net, TX, key=jax.random.key(0)), None, 1)
        for backend in ("te", "xla"):
            with use_backend(backend):
                wanted = abstract_train_state(Net, TX, fp8_param=True)
                states[backend], _, _ = checkpointer.restore(wanted, allow={"requantize"})
    assert_same(states["te"], states["xla"])


class Block(nnx.Module):
    """A layer of `run_layers` without attention, whose kernels need a GPU."""

    def __init__(self, rngs: nnx.Rngs):
        self.mlp = LayerNormMLP(32, 64, rngs=rngs)

    def __call__(self, x, dropout_key=None):
        return x + self.mlp(x)


class Stack(nnx.Module):
    """Layers, and a norm behind them, whose rows are split over the batch's axes."""

    def __init__(self, rngs: nnx.Rngs, parts: int = 1):
        self.layers, self.parts = nnx.List([Block(rngs) for _ in range(2)]), parts
        self.norm = LayerNorm(32, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.embed_inputs(x).output(self.layers))

    def embed_inputs(self, x):
        return StackInput(x, options=StackOptions(batch_parts=self.parts))


def losses(mesh: ParallelConfig | None, name: str, microbatches: int, parts: int = 1) -> list[float]:
    place = contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(mesh))
    with place, autocast(recipe_from_name(name)), use_backend("te"):
        state = create_train_state(lambda rngs: Stack(rngs, parts), TX, key=jax.random.key(0))
        loss_fn = PipelinedLoss(
            lambda model, x, key: model.embed_inputs(x), lambda model, y, x, key: jnp.mean((model.norm(y) - x) ** 2)
        )
        step, found = make_train_step(loss_fn, TX, microbatches=microbatches), []
        for i in range(2):
            state, metrics = step(state, jax.random.normal(jax.random.key(i), (8, 16, 32)))
            found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize(("name", "microbatches"), [("none", 2), ("none", 8), ("delayed", 8)])
def test_stages_of_a_pipeline(name, microbatches):
    """Each stage's devices run TE's primitives, inside of two nested regions. Eight microbatches have one example each,
    which cannot be split over the pipeline axis.
    """
    # fp32 sums in another order, and where the recipe quantizes, a value that rounds the other way now and then.
    mesh = ParallelConfig(pipeline=2, tensor=2)
    np.testing.assert_allclose(losses(mesh, name, microbatches), losses(None, name, microbatches), rtol=1e-4)


@pytest.mark.parametrize("mesh", [ParallelConfig(data=2, tensor=2), ParallelConfig(pipeline=2, tensor=2)], ids=str)
@pytest.mark.parametrize("name", ["none", "delayed"])
def test_a_batch_in_parts(name, mesh):
    """On each device, or in each stage, the parts of a microbatch of four take turns; tolerance as above."""
    np.testing.assert_allclose(losses(mesh, name, 2, parts=2), losses(None, name, 2), rtol=1e-4)


@pytest.mark.parametrize("examples", [1, 2])
def test_evaluation_outside_of_a_pipeline(examples):
    """Its stages split the examples, or all of them compute the one."""
    x = jax.random.normal(jax.random.key(0), (examples, 16, 32))

    def loss(mesh: ParallelConfig | None) -> float:
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(mesh)), use_backend("te"):
            state = create_train_state(Stack, TX, key=jax.random.key(0))
            return float(make_eval_step(lambda model, x, key: jnp.mean((model(x) - x) ** 2))(state, x))

    np.testing.assert_allclose(loss(ParallelConfig(pipeline=2)), loss(None), rtol=1e-6)
