"""Tensor and sequence parallelism as options of layers: the same values on every mesh, split as asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jax_te.config import ParallelConfig
from jax_te.layers import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm, make_norm, parameter_axes
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, autocast
from jax_te.sharding import constrain, logical_to_spec, make_mesh
from tests.support.meshes import shard
from tests.support.numerics import (
    TOLERANCE,
    assert_close,
    assert_same_rounding,
    draw,
    value_and_vjp,
    without_type_checker,
)
from tests.support.reference import Form, mlp_block, norm, parameters, randomize, value_and_vjp64

B, S, H, F = 4, 8, 32, 64
SPLIT, WHOLE = ("batch", "sequence_parallel", "hidden"), ("batch", "sequence", "hidden")
FORM = Form(rms=True, activation="swiglu")


class Block(nnx.Module):
    """Norm, column-parallel and row-parallel layer with a residual connection, then a feed-forward block with one."""

    def __init__(self, sequence_parallel: bool):
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "rngs": nnx.Rngs(0)}
        self.norm = LayerNorm(H, **options)
        self.column = LayerNormLinear(
            H, F, parallel_mode="column", return_layernorm_output=True, return_bias=True, **options
        )
        self.row = Linear(F, H, parallel_mode="Row", **options)
        self.mlp = LayerNormMLP(H, F, activation="swiglu", normalization="RMSNorm", **options)
        self.stream = SPLIT if sequence_parallel else WHOLE

    def __call__(self, x: jax.Array) -> jax.Array:
        x = constrain(x, self.stream)
        y, bias, normed = self.column(self.norm(x))
        x = normed + self.row(y + constrain(bias[None, None], (None, None, "ffn")))
        return x + self.mlp(x)


def formula(p: dict[str, Any], x: Any) -> Any:
    plain = Form()
    x = norm(jnp, x, p["norm"]["scale"], p["norm"]["bias"], plain)
    column, row = p["column"], p["row"]
    normed = norm(jnp, x, column["scale"], column["ln_bias"], plain)
    x = normed + (normed @ column["kernel"] + column["bias"]) @ row["kernel"] + row["bias"]
    return x + mlp_block(jnp, p["mlp"], norm(jnp, x, p["mlp"]["scale"], None, FORM), FORM)


@pytest.mark.costly
@pytest.mark.wide("explicit")
def test_sequence_parallelism_changes_no_value(mesh_mode: str) -> None:
    x, g = draw("x", (B, S, H)), draw("g", (B, S, H))
    block = shard(randomize(Block(True)))
    y, (d_block, dx) = value_and_vjp(lambda block, x: block(x), (block, x), constrain(g, SPLIT))
    expected, (dp, expected_dx) = value_and_vjp64(formula, (parameters(block), x), g)
    assert_close(y, expected, 4 * TOLERANCE["float32"], what="y")
    assert_close(dx, expected_dx, 4 * TOLERANCE["float32"], what="dx")
    for (path, actual), wanted in zip(
        jax.tree_util.tree_leaves_with_path(parameters(d_block)), jax.tree.leaves(dp), strict=True
    ):
        assert_close(actual, wanted, 4 * TOLERANCE["float32"], what=jax.tree_util.keystr(path))


@pytest.mark.costly("auto")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_what_lies_between_the_layers_is_split_along_the_sequence(mode: Any) -> None:
    x = draw("x", (B, S, H))
    mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2), axis_type=mode)
    with jax.set_mesh(mesh):
        block = shard(randomize(Block(True)))

        @jax.jit
        def run(block: Block, x: jax.Array) -> Any:
            x = block.norm(constrain(x, SPLIT))
            y, _, normed = block.column(x)
            return {"norm": x, "normed": normed, "row": block.row(y), "mlp": block.mlp(x)}, y

        between, inside = run(block, x)
        split, whole = (logical_to_spec(axes, mesh) for axes in (SPLIT, ("batch", "sequence", "ffn")))
        for name, value in between.items():
            assert value.sharding.is_equivalent_to(jax.NamedSharding(mesh, split), 3), f"{name}: {value.sharding.spec}"
        assert inside.sharding.is_equivalent_to(jax.NamedSharding(mesh, whole), 3), inside.sharding.spec


@pytest.mark.slow
@pytest.mark.wide("delayed")
@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(amax_history_len=2), Float8CurrentScaling(amax_scope="whole"), Float8BlockScaling()],
    ids=lambda r: r.name,
)
def test_sequence_parallelism_under_recipes(recipe: Any) -> None:
    """Scales come from the whole tensor, however it is split."""
    s = 32  # with 128 tokens each of the four batch ranks has 32, which every recipe can take
    x, g = draw("x", (B, s, H)), draw("g", (B, s, H))

    def run(mesh: Any) -> Any:
        with autocast(recipe), jax.set_mesh(mesh):
            layer = randomize(LayerNormMLP(H, F, sequence_parallel=True, rngs=nnx.Rngs(0)))
            return value_and_vjp(lambda layer, x: layer(x), (shard(layer), x), constrain(g, SPLIT), quick=True)

    y, (d_layer, dx) = run(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2)))
    expected, (d_expected, expected_dx) = run(make_mesh(ParallelConfig()))
    assert_same_rounding(y, expected, 4 * TOLERANCE["float32"], what="y")
    assert_same_rounding(dx, expected_dx, 4 * TOLERANCE["float32"], what="dx")
    for name, value in parameters(d_expected).items():
        tolerance = 1e-3 if value.ndim < 2 or "bias" in name else 4 * TOLERANCE["float32"]
        assert_same_rounding(parameters(d_layer)[name], value, tolerance, what=name)


@pytest.mark.wide("explicit")
def test_without_parallel_mode_the_kernels_are_whole(mesh_mode: str) -> None:
    layer = randomize(LayerNormMLP(H, F, set_parallel_mode=False, rngs=nnx.Rngs(0)))
    axes = nnx.to_pure_dict(parameter_axes(layer))
    assert (axes["wi_kernel"], axes["wi_bias"], axes["wo_kernel"]) == (
        ("fsdp", "components", None),
        ("components", None),
        ("fsdp", None),
    )
    x = draw("x", (B, S, H))
    p = parameters(layer)
    y = jax.jit(lambda layer, x: layer(x))(shard(layer), x)
    if mesh_mode != "no mesh":
        assert layer.wi_kernel[...].sharding.spec == jax.P("fsdp", None, None)
    expected, _ = value_and_vjp64(
        lambda p, x: mlp_block(jnp, p, norm(jnp, x, p["scale"], p["ln_bias"], Form()), Form()), (p, x), x
    )
    assert_close(y, expected, 4 * TOLERANCE["float32"])


KINDS = [
    lambda **options: Linear(H, F, parallel_mode="column", **options),
    lambda **options: LayerNormLinear(H, F, parallel_mode="column", **options),
    lambda **options: LayerNormMLP(H, F, **options),
]


@pytest.mark.costly("Linear", slow=("LayerNormMLP",))
@pytest.mark.parametrize("build", KINDS, ids=["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_group_and_size_are_the_meshs(build: Any) -> None:
    x = draw("x", (B, S, H))
    layer = build(tp_group="tensor", tp_size=2, rngs=nnx.Rngs(0))
    alone = jax.jit(lambda layer, x: layer(x))(layer, x)  # without a mesh one device computes the whole layer
    with jax.set_mesh(make_mesh(ParallelConfig(data=4, tensor=2))):
        jax.eval_shape(layer, x)
        assert_close(jax.jit(lambda layer, x: layer(x))(layer, x), alone, TOLERANCE["float32"])
        # So it does in a shard_map that has the tensor axis.
        everywhere = PartitionSpec()
        own = jax.shard_map(lambda x: layer(x), in_specs=everywhere, out_specs=everywhere, check_vma=False)
        assert jax.eval_shape(own, x) == jax.eval_shape(layer, x)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, tensor=4))):
        with pytest.raises(ValueError, match=r"built with tp_size=2, and the mesh in use has 4 tensor ranks"):
            jax.eval_shape(layer, x)
        jax.eval_shape(build(rngs=nnx.Rngs(0)), x)
    late = build(tp_size=2, rngs=nnx.Rngs(0))
    late.set_tensor_parallel_group("tensor")
    assert late.tensor_parallel == layer.tensor_parallel
    with without_type_checker():
        for group in ("data", 3, object()):
            with pytest.raises(TypeError, match=r"tp_group must be None or the mesh axis 'tensor', .*jax\.set_mesh"):
                build(tp_group=group, rngs=nnx.Rngs(0))
            with pytest.raises(TypeError, match="tp_group must be None or the mesh axis 'tensor'"):
                late.set_tensor_parallel_group(group)
        with pytest.raises(ValueError, match="tp_size must be an integer >= 1, got 0"):
            build(tp_size=0, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Linear(H, F, sequence_parallel=True, rngs=nnx.Rngs(0)),
        lambda: LayerNormLinear(H, F, sequence_parallel=True, rngs=nnx.Rngs(0)),
        lambda: LayerNormMLP(H, F, sequence_parallel=True, set_parallel_mode=False, rngs=nnx.Rngs(0)),
    ],
)
def test_sequence_parallelism_is_for_layers_that_are_split(build: Any) -> None:
    with pytest.raises(ValueError, match=r"sequence_parallel=True is for a layer whose kernel is sharded .*set"):
        build()


@pytest.mark.parametrize(
    "layer",
    [
        *(build(sequence_parallel=True, rngs=nnx.Rngs(0)) for build in KINDS),
        Linear(H, F, parallel_mode="row", sequence_parallel=True, rngs=nnx.Rngs(0)),
        RMSNorm(H, sequence_parallel=True, rngs=nnx.Rngs(0)),
        make_norm("LayerNorm", H, sequence_parallel=True, rngs=nnx.Rngs(0)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_sequence_that_cannot_be_split_is_named(layer: Any) -> None:
    with pytest.raises(ValueError, match=r"splits the second axis of \[b, s, ..., h\], got shape \(8, 32\)"):
        jax.eval_shape(layer, draw("x", (8, H)))
    with (
        jax.set_mesh(make_mesh(ParallelConfig(context=2, tensor=2))),
        pytest.raises(
            ValueError, match=r"sequence length 6 .* does not divide over mesh axes context\*tensor = 4; pad it"
        ),
    ):
        jax.eval_shape(layer, draw("x", (B, 6, H)))
