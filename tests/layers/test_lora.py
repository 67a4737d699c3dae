"""Low-rank adapters: the formula, what is trained and what is not, every recipe, merging."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te import te_pytorch
from jax_te.config import TransformerConfig
from jax_te.layers import (
    GroupedLinear,
    GroupedLoRA,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    LoRA,
    TransformerLayer,
    lora_labels,
    quantizable_modules,
    quantize_model,
    quantize_parameters,
    without_adapter,
)
from jax_te.megatron import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TEGroupedLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from jax_te.models.language_model import OutputHead
from jax_te.recipe import Float8CurrentScaling, autocast, recipe_from_name
from jax_te.sharding import constrain
from jax_te.training import create_train_state, make_train_step
from tests.support import reference
from tests.support.meshes import shard
from tests.support.numerics import (
    NO_DROPOUT,
    TOLERANCE,
    assert_bitwise,
    assert_close,
    compiled_text,
    draw,
    quick_jit,
    relative_l2,
    value_and_vjp,
    without_type_checker,
)
from tests.support.reference import Form, parameters, randomize, value_and_vjp64

B, S, H, F, R, ALPHA = 4, 8, 32, 64, 3, 5.0


def column(**options: Any) -> LayerNormLinear:
    return LayerNormLinear(H, F, parallel_mode="column", rngs=nnx.Rngs(0), **options)


def row(**options: Any) -> Linear:
    return Linear(H, F, parallel_mode="row", rngs=nnx.Rngs(0), **options)


def adapted(base: Any, **options: Any) -> LoRA:
    return randomize(LoRA(base, R, alpha=ALPHA, rngs=nnx.Rngs(1), **options))


def _megatron(dtype: Any, **options: Any) -> dict[str, Any]:
    """Keywords of Megatron's layers."""
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, params_dtype=dtype)
    given = {"config": config, "init_method": config.init_method, "bias": True, "skip_bias_add": False}
    return given | options | {"rngs": nnx.Rngs(0)}


def _plain(dtype: Any) -> dict[str, Any]:
    return {"params_dtype": dtype, "rngs": nnx.Rngs(0)}


COLUMN = {"gather_output": False, "is_expert": False}
ROW = {"input_is_parallel": True, "is_expert": False}
EXPERTS = {"is_expert": True}
BASES: dict[type, Callable[[Any], Any]] = {
    Linear: lambda dtype: Linear(16, 16, **_plain(dtype)),
    LayerNormLinear: lambda dtype: LayerNormLinear(16, 16, **_plain(dtype)),
    LayerNormMLP: lambda dtype: LayerNormMLP(16, 16, **_plain(dtype)),
    GroupedLinear: lambda dtype: GroupedLinear(2, 16, 16, **_plain(dtype)),
    te_pytorch.Linear: lambda dtype: te_pytorch.Linear(16, 16, **_plain(dtype)),
    te_pytorch.LayerNormLinear: lambda dtype: te_pytorch.LayerNormLinear(16, 16, **_plain(dtype)),
    te_pytorch.LayerNormMLP: lambda dtype: te_pytorch.LayerNormMLP(16, 16, **_plain(dtype)),
    te_pytorch.GroupedLinear: lambda dtype: te_pytorch.GroupedLinear(2, 16, 16, **_plain(dtype)),
    OutputHead: lambda dtype: OutputHead(_megatron(dtype)["config"], 16, own_kernel=True, rngs=nnx.Rngs(0)),
    TELinear: lambda dtype: TELinear(
        16, 16, parallel_mode="duplicated", skip_weight_param_allocation=False, **_megatron(dtype)
    ),
    TEColumnParallelLinear: lambda dtype: TEColumnParallelLinear(16, 16, **_megatron(dtype, **COLUMN)),
    TERowParallelLinear: lambda dtype: TERowParallelLinear(16, 16, **_megatron(dtype, **ROW)),
    TELayerNormColumnParallelLinear: lambda dtype: TELayerNormColumnParallelLinear(
        16, 16, **_megatron(dtype, **COLUMN)
    ),
    TEGroupedLinear: lambda dtype: TEGroupedLinear(2, 16, 16, parallel_mode="column", **_megatron(dtype, **EXPERTS)),
    TEColumnParallelGroupedLinear: lambda dtype: TEColumnParallelGroupedLinear(
        2, 16, 16, **_megatron(dtype, **EXPERTS)
    ),
    TERowParallelGroupedLinear: lambda dtype: TERowParallelGroupedLinear(2, 16, 16, **_megatron(dtype, **EXPERTS)),
}
"""A layer of each class that may be a base, with parameters of a dtype."""


def test_the_table_of_bases_has_every_class() -> None:
    def derived(kind: type) -> set[type]:
        return {kind}.union(*map(derived, kind.__subclasses__()))

    found = derived(Linear) | derived(LayerNormMLP) | derived(GroupedLinear)
    # A class that a function makes is none of the package's: `sensitivity` has made some, if it has run.
    public = {kind for kind in found if kind.__module__.startswith("jax_te.") and "<locals>" not in kind.__qualname__}
    assert public == set(BASES)


@pytest.mark.costly(
    "jax_te.layers.linear.Linear",
    "jax_te.layers.layernorm_mlp.LayerNormMLP",
    slow=(
        "jax_te.layers.moe.grouped_linear.GroupedLinear",
        "jax_te.megatron.layernorm_linear.TELayerNormColumnParallelLinear",
        "jax_te.megatron.grouped_linear.TEColumnParallelGroupedLinear",
        "jax_te.te_pytorch.linear.LayerNormMLP",
        "jax_te.megatron.grouped_linear.TEGroupedLinear",
        "jax_te.megatron.grouped_linear.TERowParallelGroupedLinear",
        "jax_te.layers.layernorm_linear.LayerNormLinear",
        "jax_te.te_pytorch.linear.GroupedLinear",
    ),
)
@pytest.mark.parametrize("kind", BASES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_the_dtypes_of_results_are_those_of_the_base(kind: type) -> None:
    """Megatron's layers cast an fp32 input to the dtype of a kernel in half precision, which the adapter reads."""
    grouped = issubclass(kind, GroupedLinear)
    sizes = (jnp.array([3, 5]),) if grouped else ()
    for params_dtype, dtype in itertools.product((jnp.float32, jnp.bfloat16), repeat=2):
        base, x = BASES[kind](params_dtype), jax.ShapeDtypeStruct((8, 16), dtype)
        want = jax.eval_shape(lambda x, base=base: base(x, *sizes), x)
        adapter = (GroupedLoRA if grouped else LoRA)(base, 2, rngs=nnx.Rngs(1))
        assert jax.eval_shape(lambda x, adapter=adapter: adapter(x, *sizes), x) == want, (params_dtype, dtype)


def test_an_adapter_of_a_class_of_its_own_stands_in_for_its_base() -> None:
    class Doubled(nnx.Module):
        def __init__(self, base: Linear) -> None:
            self.base = base

    layer = row()
    assert without_adapter(Doubled(layer)) is layer
    assert without_adapter(layer) is layer


def formula(p: dict[str, Any], x: Any) -> Any:
    """Whichever base it is."""
    base = p["base"]
    z = reference.norm(jnp, x, base["scale"], base["ln_bias"], Form()) if "scale" in base else x
    update = (z @ p["lora_a"]).reshape(*x.shape[:-1], R) @ p["lora_b"]
    return z @ base["kernel"] + base["bias"] + ALPHA / R * update


@pytest.mark.costly("auto-row-True", slow=["explicit-column-False"])
@pytest.mark.wide
@pytest.mark.parametrize(("build", "sequence_parallel"), [(column, False), (column, True), (row, True)])
def test_follows_the_formula_on_every_mesh(build: Any, sequence_parallel: bool, mesh_mode: str) -> None:
    layer = adapted(build(sequence_parallel=sequence_parallel), freeze_base=False)
    x, g = draw("x", (B, S, H)), draw("g", (B, S, F))
    y, (d_layer, dx) = value_and_vjp(
        lambda layer, x: layer(x), (shard(layer), x), constrain(g, layer.base.output_axes(x)), quick=True
    )
    expected, (dp, expected_dx) = value_and_vjp64(formula, (parameters(layer), x), g)
    assert_close(y, expected, 2 * TOLERANCE["float32"], what="y")
    assert_close(dx, expected_dx, 2 * TOLERANCE["float32"], what="dx")
    for (path, actual), wanted in zip(
        jax.tree_util.tree_leaves_with_path(parameters(d_layer)), jax.tree.leaves(dp), strict=True
    ):
        assert_close(actual, wanted, 2 * TOLERANCE["float32"], what=jax.tree_util.keystr(path))


def test_several_output_axes() -> None:
    base = randomize(Linear(H, (3, F), rngs=nnx.Rngs(0)))
    x = draw("x", (B, H))
    plain, layer = base(x), adapted(base)
    a, b = (np.float64(value) for value in (layer.lora_a[...], layer.lora_b[...]))
    update = ALPHA / R * np.tensordot(np.float64(x) @ a, b, 1)
    assert_close(layer(x), np.float64(base(x)) + update, TOLERANCE["float32"])
    assert layer(x).shape == plain.shape


@pytest.mark.costly("column")
@pytest.mark.parametrize("build", [column, row])
def test_a_frozen_base_gets_no_gradient_and_costs_no_gemm_for_it(build: Any) -> None:
    x, g = draw("x", (B, S, H)), draw("g", (B, S, F))
    gradient = jax.grad(lambda layer, x: jnp.sum(layer(x) * g), (0, 1))
    frozen, trained = (adapted(build(), freeze_base=freeze) for freeze in (True, False))
    (d_frozen, dx), (d_trained, expected_dx) = (jax.jit(gradient)(layer, x) for layer in (frozen, trained))
    assert_close(dx, expected_dx, TOLERANCE["float32"])
    assert not any(leaf.any() for leaf in jax.tree.leaves(parameters(d_frozen)["base"]))
    assert all(leaf.any() for leaf in jax.tree.leaves(parameters(d_trained)["base"]))
    for name in ("lora_a", "lora_b"):
        assert_close(parameters(d_frozen)[name], parameters(d_trained)[name], TOLERANCE["float32"])
    gemms = [compiled_text(gradient, layer, x).count(" dot(") for layer in (frozen, trained)]
    assert gemms[0] == gemms[1] - 1 > 0


@pytest.mark.costly
@pytest.mark.wide("delayed")
@pytest.mark.parametrize("name", ["none", "delayed", "current", "block", "mxfp8", "nvfp4"])
def test_trains_the_adapter_alone_under_every_recipe(name: str) -> None:
    """Two microbatches, in bf16, so that kernels are kept and their gradients have a place of their own."""
    recipe = None if name == "none" else recipe_from_name(name)
    batch = draw("x", (64, H), jnp.bfloat16)
    target = batch.astype(jnp.float32) @ draw("u", (H, R), scale=H**-0.5) @ draw("v", (R, F), scale=R**-0.5)

    def build(rngs: nnx.Rngs) -> LoRA:
        base = LayerNormLinear(H, F, params_dtype=jnp.bfloat16, rngs=rngs)
        return LoRA(base, R, params_dtype=jnp.bfloat16, rngs=rngs)

    def loss(model: LoRA, batch: Any, key: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)

    tx = optax.multi_transform({"lora": optax.adamw(5e-2), "frozen": optax.set_to_zero()}, lora_labels)
    with autocast(recipe):
        state = create_train_state(build, tx, key=jax.random.key(0))
        before = parameters(jax.tree.map(jnp.copy, state.model))
        seen = jax.tree.map(jnp.copy, state.quantizers)
        assert_bitwise(*quick_jit(lambda model: (model(batch), model.base(batch)))(state.model), what="the start")
        step, losses = make_train_step(loss, tx, microbatches=2), []
        for _ in range(6):
            state, metrics = step(state, (batch, target))
            losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0], losses
    after = parameters(state.model)
    jax.tree.map(assert_bitwise, after["base"], before["base"])
    assert all((after[key] != before[key]).any() for key in ("lora_a", "lora_b"))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) == 4, "two moments for each of the adapter's arrays, none for the base"
    changed = [
        bool((a != b).any()) for a, b in zip(jax.tree.leaves(state.quantizers), jax.tree.leaves(seen), strict=True)
    ]
    assert changed == [True] * (6 if name == "delayed" else 0)


def test_under_fp8_the_adapter_reads_the_norms_output() -> None:
    x, layer = draw("x", (B, S, H), scale=3.0, shift=1.0), adapted(column())
    with autocast(Float8CurrentScaling()):
        update = np.float64(layer(x)) - np.float64(layer.base(x))
    p = jax.tree.map(np.float64, parameters(layer))
    z = reference.norm(np, np.float64(x), p["base"]["scale"], p["base"]["ln_bias"], Form())
    assert_close(update, ALPHA / R * z @ p["lora_a"] @ p["lora_b"], 4 * TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [column, row])
def test_merged_is_unmerged_to_rounding(build: Any, dtype: str) -> None:
    x, layer = draw("x", (B, S, H)), adapted(build(params_dtype=dtype))
    before, kernel = np.asarray(layer(x)), np.float64(layer.base.kernel[...])
    a, b = np.float64(layer.lora_a[...]), np.float64(layer.lora_b[...])
    merged = layer.merge()
    assert merged is layer.base
    assert not merged.frozen
    assert merged.kernel.get_value().dtype == dtype
    assert_close(merged.kernel.get_value(), kernel + ALPHA / R * a @ b, TOLERANCE[dtype])
    assert_close(merged(x), before, 2 * TOLERANCE[dtype])
    assert_bitwise(layer(x), merged(x))


@pytest.mark.costly("16-16", slow=("16-3",))
@pytest.mark.parametrize(("hidden", "count"), [(16, 16), (16, 3), (8, R)])
def test_layers_that_vmap_stacked_are_merged_each_for_itself(hidden: int, count: int) -> None:
    """Also where the number of layers is a size of the kernel, or the rank."""

    def build(rngs: nnx.Rngs) -> LoRA:
        layer = LoRA(Linear(hidden, 24, bias=False, rngs=rngs), R, alpha=ALPHA, rngs=rngs)
        layer.lora_b[...] = jax.random.normal(rngs.params(), layer.lora_b.shape)
        return layer

    stack = nnx.split_rngs(splits=count)(nnx.vmap(build))(nnx.Rngs(0))
    kernel, a, b = (np.float64(each[...]) for each in (stack.base.kernel, stack.lora_a, stack.lora_b))
    assert_close(stack.merge().kernel[...], kernel + ALPHA / R * a @ b, TOLERANCE["float32"])


def test_what_cannot_be_merged_says_why() -> None:
    bare = Linear(H, F, False, skip_weight_param_allocation=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"has no kernel of its own, .* go on calling LoRA"):
        adapted(bare).merge()
    with autocast(Float8CurrentScaling()):
        held = LoRA(quantize_parameters(row()), R, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="holds its kernel quantized"):
        held.merge()


def test_returns_and_takes_what_its_base_does() -> None:
    x, weight, bias = draw("x", (B, H)), draw("w", (H, F)), draw("b", (F,))
    layer = adapted(column(return_layernorm_output=True, return_bias=True))
    result, plain = layer(x), layer.base(x)
    assert len(result) == 3
    assert relative_l2(result[0], plain[0]) > 0.1
    assert_bitwise(result[1], plain[1])
    assert_bitwise(result[2], plain[2])
    bare = adapted(Linear(H, F, skip_weight_param_allocation=True, rngs=nnx.Rngs(0)))
    own = adapted(Linear(H, F, rngs=nnx.Rngs(0)))
    own.base.kernel[...], own.base.bias[...] = weight, bias
    assert_bitwise(bare(x, weight, bias), own(x))


def test_lora_params_are_a_filter() -> None:
    layer = adapted(row())
    assert set(nnx.to_pure_dict(nnx.state(layer, nnx.LoRAParam))) == {"lora_a", "lora_b"}
    gradient = nnx.grad(lambda layer: jnp.sum(layer(draw("x", (B, H)))), argnums=nnx.DiffState(0, nnx.LoRAParam))(layer)
    assert set(nnx.to_pure_dict(gradient)) == {"lora_a", "lora_b"}


def test_takes_the_place_of_a_projection() -> None:
    x, block = draw("x", (2, S, H)), TransformerLayer(H, F, 4, **NO_DROPOUT, rngs=nnx.Rngs(0))
    before = block(x)
    attention = block.self_attention
    attention.qkv, attention.proj = (LoRA(part, R, rngs=nnx.Rngs(1)) for part in (attention.qkv, attention.proj))
    with without_type_checker():
        assert_bitwise(block(x), before)
    attention.qkv, attention.proj = attention.qkv.merge(), attention.proj.merge()
    assert_bitwise(block(x), before)


def mlp(**options: Any) -> LayerNormMLP:
    return LayerNormMLP(H, F, activation="swiglu", rngs=nnx.Rngs(0), **options)


def mlp_formula(p: dict[str, Any], x: Any) -> Any:
    """Both adapters merged into the kernels."""
    base = {
        **p["base"],
        "wi_kernel": p["base"]["wi_kernel"] + ALPHA / R * jnp.tensordot(p["wi_lora_a"], p["wi_lora_b"], 1),
        "wo_kernel": p["base"]["wo_kernel"] + ALPHA / R * p["wo_lora_a"] @ p["wo_lora_b"],
    }
    form = Form(activation="swiglu")
    return reference.mlp_block(jnp, base, reference.norm(jnp, x, base["scale"], base["ln_bias"], form), form)


@pytest.mark.costly("explicit", slow=["auto"])
def test_an_mlps_two_kernels_follow_the_formula_on_every_mesh(mesh_mode: str) -> None:
    layer = adapted(mlp(sequence_parallel=mesh_mode == "explicit"), freeze_base=False)
    x, g = draw("x", (B, S, H)), draw("g", (B, S, H))
    out_axes = ("batch", "sequence_parallel" if mesh_mode == "explicit" else "sequence", "hidden")
    y, (d_layer, dx) = value_and_vjp(lambda layer, x: layer(x), (shard(layer), x), constrain(g, out_axes), quick=True)
    expected, (dp, expected_dx) = value_and_vjp64(mlp_formula, (parameters(layer), x), g)
    assert_close(y, expected, 4 * TOLERANCE["float32"], what="y")
    assert_close(dx, expected_dx, 4 * TOLERANCE["float32"], what="dx")
    for name in ("wi_lora_a", "wi_lora_b", "wo_lora_a", "wo_lora_b"):
        assert_close(parameters(d_layer)[name], dp[name], 4 * TOLERANCE["float32"], what=name)


def test_a_frozen_mlp_trains_its_adapters_alone_and_is_merged() -> None:
    x, layer = draw("x", (B, S, H)), adapted(mlp(return_bias=True))
    gradient = jax.jit(jax.grad(lambda layer, x: jnp.sum(layer(x)[0] ** 2)))(layer, x)
    gradient = parameters(gradient)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient.pop("base")))
    assert len(gradient) == 4
    assert all(leaf.any() for leaf in jax.tree.leaves(gradient))
    before = layer(x)
    merged = layer.merge()
    assert merged is layer.base
    assert not merged.frozen
    assert_close(merged(x)[0], before[0], 4 * TOLERANCE["float32"])
    with pytest.raises(ValueError, match="a LayerNormMLP takes no weight; give is_first_microbatch by name"):
        layer(x, x)


@pytest.mark.costly
def test_reaches_every_gemm_of_a_transformer_layer_under_fp8() -> None:
    """What the zero-initialized adapters leave alone; and the states of the base's quantizers."""
    x = draw("x", (2, S, H))
    with autocast(recipe_from_name("current")):
        block = TransformerLayer(H, F, 4, **NO_DROPOUT, rngs=nnx.Rngs(0))
        before = quick_jit(lambda layer, x: layer(x))(block, x)
        for part, name in ((block.self_attention, "qkv"), (block.self_attention, "proj"), (block, "layernorm_mlp")):
            setattr(part, name, LoRA(getattr(part, name), R, rngs=nnx.Rngs(1)))
        with without_type_checker():
            after = quick_jit(lambda layer, x: layer(x))(block, x)
    # The feed-forward block's norm and activation are rounded once more than in the fused operation.
    assert relative_l2(after, before) < 1e-2
    labels = nnx.to_pure_dict(lora_labels(nnx.state(block, nnx.Param)))
    assert sum(label == "lora" for label in jax.tree.leaves(labels)) == 8


def separate_formula(p: dict[str, Any], x: Any) -> Any:
    """An adapter for the first two components of the kernel and one for the third, merged into it."""
    base, parts = p["base"], zip(jnp.split(p["lora_a"], 2, axis=1), jnp.split(p["lora_b"], [2], axis=1), strict=True)
    update = jnp.concatenate([jnp.tensordot(a, b, 1) for a, b in parts], axis=1)
    z = reference.norm(jnp, x, base["scale"], base["ln_bias"], Form())
    return jnp.tensordot(z, base["kernel"] + ALPHA / R * update, 1) + base["bias"]


@pytest.mark.costly("explicit", slow=["auto"])
def test_separate_adapters_of_components_follow_the_formula_on_every_mesh(mesh_mode: str) -> None:
    base = LayerNormLinear(
        H, (3, F), parallel_mode="column", kernel_axes=("fsdp", "components", "heads"), rngs=nnx.Rngs(0)
    )
    layer = adapted(base, components=(2, 1), freeze_base=False)
    assert (layer.lora_a.shape, layer.lora_b.shape) == ((H, 2 * R), (R, 3, F))
    x, g = draw("x", (B, S, H)), draw("g", (B, S, 3, F))
    g = constrain(g, ("batch", "sequence", "components", "heads"))
    y, (d_layer, dx) = value_and_vjp(lambda layer, x: layer(x), (shard(layer), x), g, quick=True)
    expected, (dp, expected_dx) = value_and_vjp64(separate_formula, (parameters(layer), x), g)
    assert_close(y, expected, 4 * TOLERANCE["float32"], what="y")
    assert_close(dx, expected_dx, 4 * TOLERANCE["float32"], what="dx")
    for name in ("lora_a", "lora_b"):
        assert_close(parameters(d_layer)[name], dp[name], 4 * TOLERANCE["float32"], what=name)
    assert_close(layer.merge()(x), expected, 4 * TOLERANCE["float32"], what="merged")


def test_gate_and_up_may_have_adapters_of_their_own() -> None:
    layer, x = adapted(mlp(), components=(1, 1)), draw("x", (B, S, H))
    p = parameters(layer)
    a, b = p["wi_lora_a"], p["wi_lora_b"]
    assert (a.shape, b.shape, p["wo_lora_a"].shape) == ((H, 2 * R), (R, 2, F), (F, R))
    update = jnp.stack([a[:, :R] @ b[:, 0], a[:, R:] @ b[:, 1]], axis=1)
    # One adapter of rank h for both, whose product is the same.
    p = {**p, "wi_lora_a": jnp.eye(H), "wi_lora_b": update}
    expected, _ = value_and_vjp64(mlp_formula, (p, x), draw("g", x.shape))
    assert_close(layer(x), expected, 4 * TOLERANCE["float32"])
    assert_close(layer.merge()(x), expected, 4 * TOLERANCE["float32"])


def test_errors() -> None:
    for base, components in ((row(), (1, 1)), (mlp(), (1, 2)), (mlp(), (2, 0))):
        with pytest.raises(ValueError, match="components"):
            LoRA(base, R, components=components, rngs=nnx.Rngs(0))
        assert not base.frozen
    block = TransformerLayer(H, F, 4, **NO_DROPOUT, rngs=nnx.Rngs(0))
    with (
        without_type_checker(),
        pytest.raises(
            TypeError,
            match=r"base must be a Linear, .*, got TransformerLayer; wrap .* layer\.self_attention\.qkv; flax",
        ),
    ):
        LoRA(block, R, rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank must be an integer >= 1, got 0"):
        LoRA(row(), 0, rngs=nnx.Rngs(0))


def test_rules_hold_for_an_adapted_layer_as_for_the_layer():
    """By its path without the adapter's part, in reports and in rules; and after merging."""
    model = nnx.List([TransformerLayer(32, 64, 4, rngs=nnx.Rngs(number)) for number in range(2)])
    paths = [path for path, _ in quantizable_modules(model)]
    attention = model[0].self_attention
    attention.qkv = LoRA(attention.qkv, 2, rngs=nnx.Rngs(2))
    assert [path for path, _ in quantizable_modules(model)] == paths

    def call(model, x):
        for layer in model:
            x = layer(x, dropout_key=jax.random.key(0))
        return x

    report = quantize_model(model, jnp.ones((2, 16, 32)), rules={"*.qkv": None}, method=call)
    assert set(report.left) == {"0.self_attention.qkv", "1.self_attention.qkv"}
    assert attention.qkv.base.high_precision or attention.qkv.base.own_recipe("kernel").training is None
    attention.qkv = attention.qkv.merge()
    assert [path for path, _ in quantizable_modules(model)] == paths
