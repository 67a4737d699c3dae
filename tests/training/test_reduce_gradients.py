"""When devices of a mesh add up the gradients of kernels: once a step, or in each microbatch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_te.config import ParallelConfig, PipelineConfig
from jax_te.layers import LayerNormMLP, Linear
from jax_te.models import StackInput, run_layers
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, autocast
from jax_te.sharding import ShardingRules, make_mesh, use_rules
from jax_te.training import PipelinedLoss, WeightedMean, create_train_state, make_train_step
from jax_te.training.masters import full_precision

# Of gradients of 1024 tokens, which are added up in another order: a few roundings to fp32.
TOLERANCE = 2.0**-20
LEARNING_RATE = 2.0**14
"""So large that an update has the bits of its gradient, and not of the parameter alone."""

LOSS_SCALE = 2.0**8
"""Factor of a loss, which puts the gradients into FP8's range: the first scale of delayed scaling is 1."""

KERNELS = 2 * (2 * 32 * 64 + 32 * 32)
"""Elements of the kernels of both layers."""


class Layer(nnx.Module):
    def __init__(self, rngs, dtype):
        self.mlp = LayerNormMLP(32, 64, params_dtype=dtype, rngs=rngs)
        self.out = Linear(32, 32, params_dtype=dtype, rngs=rngs)

    def __call__(self, x, dropout_key):
        return x + self.out(self.mlp(x))


class Stack(nnx.Module):
    def __init__(self, rngs, dtype=jnp.bfloat16):
        self.layers = nnx.List([Layer(rngs, dtype) for _ in range(2)])

    def __call__(self, x):
        return run_layers(self.layers, x, [None, None])


class Scanned(nnx.Module):
    """Kernels stacked over layers, which a loop takes slices of."""

    def __init__(self, rngs, dtype=jnp.bfloat16):
        keys = jax.random.split(rngs.params(), 2)
        self.layers = nnx.vmap(lambda key: Layer(nnx.Rngs(key), dtype))(keys)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x, None), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class OfStacks(nnx.Module):
    """Each layer of the stack holds stacked kernels itself, of as many layers as the mesh has replicas."""

    def __init__(self, rngs):
        self.layers = nnx.List([Inner(rngs) for _ in range(2)])

    def __call__(self, x):
        return run_layers(self.layers, x, [None, None])


class Inner(Scanned):
    def __call__(self, x, dropout_key):
        return super().__call__(x)


class Pooled(nnx.Module):
    """A layer whose input no context axis splits: its devices compute the same."""

    def __init__(self, rngs):
        self.out = Linear(32, 32, params_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.mean(x, axis=1))


class Placed(nnx.Module):
    """A kernel that Flax's own names put on mesh axes, and one that no name puts anywhere."""

    def __init__(self, rngs):
        self.mlp = LayerNormMLP(32, 64, params_dtype=jnp.bfloat16, rngs=rngs)
        self.mlp.wi_kernel = nnx.Param(self.mlp.wi_kernel[...])
        self.out = Linear(32, 32, params_dtype=jnp.bfloat16, rngs=rngs)
        self.out.kernel = nnx.Param(self.out.kernel[...], out_sharding=("fsdp", "tensor"), eager_sharding=False)

    def __call__(self, x):
        return self.out(self.mlp(x))


def loss_fn(model, batch, key):
    return LOSS_SCALE * jnp.mean(jnp.square(model(batch).astype(jnp.float32)))


def batch(size=16, tokens=32):
    return jax.random.normal(jax.random.key(3), (size, tokens, 32)).astype(jnp.bfloat16)


def collectives(jaxpr, looped=False):
    """Yield for every sum over mesh axes: whether it is in a loop, its axes, the shape and dtype of its operand."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("psum", "psum_invariant", "reduce_scatter"):
            axes = equation.params["axes"] if "axes" in equation.params else equation.params["axis_name"]
            for operand in equation.invars:
                yield looped, axes, operand.aval.shape, operand.aval.dtype
        for inner in jax.tree.leaves(dict(equation.params), is_leaf=lambda v: isinstance(v, Jaxpr | ClosedJaxpr)):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield from collectives(getattr(inner, "jaxpr", inner), looped or equation.primitive.name == "scan")


def gradients(mesh, *, model=Stack, loss=loss_fn, data=None, axis_type="auto", recipe=None, microbatches=2, **options):
    """Return the gradients of one step, as plain gradient descent shows them."""
    of_state = {name: options.pop(name) for name in ("distributed_optimizer", "fp8_param") if name in options}
    data = batch() if data is None else data
    with jax.set_mesh(make_mesh(ParallelConfig.parse(mesh), axis_type=axis_type)), autocast(recipe):
        tx = optax.sgd(LEARNING_RATE)
        state = create_train_state(model, tx, key=jax.random.key(0), **of_state)
        before = {path: np.asarray(v) for path, v in flat(full_precision(state.params, state.masters)).items()}
        state, metrics = make_train_step(loss, tx, microbatches=microbatches, **options)(state, data)
        assert not metrics["skipped"]
        after = flat(full_precision(state.params, state.masters))
        return {path: (old - np.asarray(after[path])) / LEARNING_RATE for path, old in before.items()}


def flat(state):
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}


def penalized(model, batch, key):
    """A loss that reads a kernel outside of its layer, too."""
    return loss_fn(model, batch, key) + 0.1 * jnp.sum(jnp.square(model.layers[0].out.kernel[...].astype(jnp.float32)))


def under_other_rules(model, batch, key):
    """A loss whose own rules split the batch over one axis of the two that the step's do."""
    with use_rules(ShardingRules(batch=("fsdp",))):
        return loss_fn(model, batch, key)


def inside_shard_map(model, batch, key):
    """A loss that runs the model on the shards of an axis."""
    graphdef, state = nnx.split(model)

    def run(state, batch):
        return jax.lax.pmean(loss_fn(nnx.merge(graphdef, state), batch, key), "data")

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    return jax.shard_map(run, axis_names={"data"}, check_vma=False, **specs)(state, batch)


def weighted(model, batch, key):
    return weighted_squares(model, model(batch), batch, key)


def weighted_squares(model, y, batch, key):
    squares = jnp.square(y.astype(jnp.float32))
    return WeightedMean(jnp.sum(squares), jnp.where(batch[0, 0, 0] > 0, 3.0, 1.0) * squares.size)


IN_PARTS = PipelinedLoss(
    lambda model, batch, key: StackInput(batch),
    lambda model, y, batch, key: LOSS_SCALE * jnp.mean(jnp.square(y.astype(jnp.float32))),
)
WEIGHTED = PipelinedLoss(lambda model, batch, key: StackInput(batch), weighted_squares)


CASES = {
    "data": ("data=2", {}),
    "weighted microbatches": ("data=2", {"microbatches": 4, "loss": weighted}),
    "kernel read by the loss": ("data=2,tensor=2", {"loss": penalized}),
    "fp32 kernels": ("data=4", {"model": lambda rngs: Stack(rngs, jnp.float32)}),
    "quantized kernels": ("data=2,fsdp=2", {"recipe": Float8CurrentScaling(), "fp8_param": True}),
    "delayed": ("data=2,tensor=2", {"recipe": DelayedScaling()}),
    "stacked": ("data=2,fsdp=2", {"model": Scanned, "distributed_optimizer": True, "recipe": DelayedScaling()}),
    "explicit": ("data=2,fsdp=2,tensor=2", {"axis_type": "explicit", "distributed_optimizer": True}),
    "explicit, stacked": ("data=2,tensor=2", {"axis_type": "explicit", "model": Scanned, "loss": loss_fn}),
    "context": ("data=2,context=2", {}),
    "no sequence": ("data=2,context=2", {"model": Pooled}),
    "axes of Flax": ("data=2,fsdp=2,tensor=2", {"model": Placed}),
    "by the compiler": ("data=2", {"recipe": MXFP8BlockScaling(), "data": batch(16, 20)}),
    "by the compiler, explicit": (
        "data=2,tensor=2",
        {"recipe": MXFP8BlockScaling(), "data": batch(16, 20), "axis_type": "explicit", "model": Scanned},
    ),
    "fsdp alone": ("fsdp=4", {}),
    "rules of the loss": ("data=2,fsdp=2", {"loss": under_other_rules}),
    # fp32: XLA for CPUs fails on the sum of a bf16 gradient over the axis of a shard_map (jaxlib 0.12.0.1).
    "shard_map of the loss": ("data=2", {"loss": inside_shard_map, "model": lambda rngs: Stack(rngs, jnp.float32)}),
    "pipeline": (
        "pipeline=2,data=2,tensor=2",
        {"recipe": DelayedScaling(), "distributed_optimizer": True, "loss": IN_PARTS},
    ),
    "stages of stacks": ("pipeline=2,data=2", {"model": OfStacks, "loss": IN_PARTS}),
    "zero bubble of stacks": (
        "pipeline=2,data=2",
        {"model": OfStacks, "pipeline": PipelineConfig(schedule="zero_bubble"), "loss": IN_PARTS},
    ),
    "gpipe, weighted": ("pipeline=2,data=2", {"pipeline": PipelineConfig(schedule="gpipe"), "loss": WEIGHTED}),
    "zero bubble, blocks": (
        "pipeline=2,data=2",
        {"pipeline": PipelineConfig(schedule="zero_bubble"), "recipe": MXFP8BlockScaling(), "loss": IN_PARTS},
    ),
    "zero bubble": (
        "pipeline=2,data=2",
        {
            "pipeline": PipelineConfig(schedule="zero_bubble"),
            "fp8_param": True,
            "recipe": Float8CurrentScaling(),
            "loss": IN_PARTS,
        },
    ),
}


@pytest.mark.costly(
    "rules of the loss",
    slow=(
        "stages of stacks",
        "by the compiler, explicit",
        "stacked",
        "pipeline",
        "zero bubble",
        "by the compiler",
        "zero bubble of stacks",
        "quantized kernels",
        "gpipe, weighted",
        "kernel read by the loss",
        "fp32 kernels",
        "data",
        "explicit, stacked",
        "shard_map of the loss",
        "fsdp alone",
        "axes of Flax",
        "zero bubble, blocks",
        "delayed",
        "context",
        "explicit",
        "weighted microbatches",
    ),
)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_same(case):
    mesh, options = CASES[case]
    once, each = (gradients(mesh, **options, reduce_gradients=when) for when in ("step", "microbatch"))
    for path, grad in each.items():
        assert np.any(grad)
        np.testing.assert_allclose(once[path], grad, rtol=0, atol=TOLERANCE * np.abs(grad).max(), err_msg=str(path))


@pytest.mark.costly(
    "distributed-None",
    slow=("whole-1f1b", "whole-zero_bubble", "distributed-zero_bubble", "whole-None", "distributed-1f1b"),
)
@pytest.mark.parametrize("schedule", [None, "1f1b", "zero_bubble"])
@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "distributed"])
def test_devices_add_up_kernels_once(schedule, distributed):
    mesh = "data=2" if schedule is None else "pipeline=2,data=2"
    options = {} if schedule is None else {"pipeline": PipelineConfig(schedule=schedule)}
    with jax.set_mesh(make_mesh(ParallelConfig.parse(mesh))):
        state = create_train_state(Stack, optax.sgd(1.0), key=jax.random.key(0), distributed_optimizer=distributed)

        def sums(**more):
            """Elements of kernels that devices add up, in the loop over microbatches and outside of it."""
            step = make_train_step(IN_PARTS, optax.sgd(1.0), microbatches=2, **more, **options)
            found = list(collectives(step.trace(state, batch()).jaxpr.jaxpr))
            of_kernels = [
                (looped, math.prod(shape), dtype) for looped, _, shape, dtype in found if math.prod(shape) >= 32 * 32
            ]
            return [sum(size for loop, size, dtype in of_kernels if loop == looped) for looped in (True, False)]

        # A stage has half of the layers.
        expected = KERNELS if schedule is None else KERNELS // 2
        assert sums(reduce_gradients="step") == [0, expected]
        assert sums() == [expected, 0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "data=2,fsdp=2"])
def test_the_sum_over_devices_is_in_wgrad_dtype(mesh):
    """And that over microbatches in fp32: the program as it is lowered."""
    with jax.set_mesh(make_mesh(ParallelConfig.parse(mesh))):
        state = create_train_state(Stack, optax.sgd(1.0), key=jax.random.key(0), distributed_optimizer=True)
        step = make_train_step(
            loss_fn, optax.sgd(1.0), microbatches=2, wgrad_dtype=jnp.bfloat16, reduce_gradients="step"
        )
        found = [
            found for found in collectives(step.trace(state, batch()).jaxpr.jaxpr) if math.prod(found[2]) >= 32 * 32
        ]
    assert {dtype for *_, dtype in found} == {jnp.dtype(jnp.bfloat16)}
    exact, low = (gradients(mesh, wgrad_dtype=dtype, reduce_gradients="step") for dtype in (jnp.float32, jnp.bfloat16))
    for path, grad in exact.items():
        # The summands are rounded once, and their sum once more.
        np.testing.assert_allclose(low[path], grad, rtol=0, atol=2.0**-7 * np.abs(grad).max())


def test_only_names_of_the_two_ways_are_taken():
    with pytest.raises(ValueError, match="microbatch"):
        make_train_step(loss_fn, optax.sgd(1.0), reduce_gradients="never")
