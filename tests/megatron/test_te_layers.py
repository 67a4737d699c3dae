"""TENorm, TELinear and its column- and row-parallel forms, TELayerNormColumnParallelLinear: what they compute."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import ModelParallelConfig, NormalInit, ParallelConfig, TransformerConfig
from jax_te.layers import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm, TensorParallel, norm_spec
from jax_te.megatron import (
    MegatronModule,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
    _get_extra_te_kwargs,
    condition_init_method,
    load_state_dict,
    set_save_original_input,
    state_dict,
)
from jax_te.recipe import Float8CurrentScaling, autocast, recipe_from_name
from jax_te.sharding import constrain, make_mesh, named_sharding
from tests.support.meshes import shard
from tests.support.numerics import assert_bitwise, assert_close, compiled_text, draw, value_and_vjp, with_vjp
from tests.support.reference import ROUNDOFF, Form, norm, parameters, randomize, value_and_vjp64

H, F = 32, 64
CONFIG = TransformerConfig(num_layers=2, hidden_size=H, num_attention_heads=4, init_method_std=0.1)
TOLERANCE = 4 * ROUNDOFF["float32"] * F**0.5  # up to four sums of F products in a row
AXES = ("batch", "sequence", "hidden")
COLUMN, ROW, LN = TEColumnParallelLinear, TERowParallelLinear, TELayerNormColumnParallelLinear


def te(kind: Any, k: int = H, n: int = F, *, config: Any = CONFIG, seed: int = 0, **options: Any) -> Any:
    """A layer of one of the classes, with what its other arguments usually are."""
    given: dict[str, Any] = {
        "bias": True,
        "rngs": nnx.Rngs(seed),
        "skip_bias_add": False,
        "init_method": NormalInit(0.1),
    }
    given |= {
        TELinear: {"parallel_mode": "duplicated", "skip_weight_param_allocation": False},
        COLUMN: {"gather_output": False, "is_expert": False},
        LN: {"gather_output": False, "is_expert": False},
        ROW: {"input_is_parallel": True, "is_expert": False},
    }[kind]
    return kind(k, n, config=config, **{**given, **options})


def plain(kind: Any, k: int = H, n: int = F, *, return_bias: bool = False, bias: bool = True) -> Any:
    """The layer of `jax_te.layers` that stands behind it."""
    options: dict[str, Any] = {"return_bias": return_bias, "init_method": NormalInit(0.1), "rngs": nnx.Rngs(0)}
    mode = {TELinear: None, COLUMN: "column", ROW: "row", LN: "column"}[kind]
    return (LayerNormLinear if kind is LN else Linear)(k, n, bias=bias, parallel_mode=mode, **options)


def arrays_of(module: nnx.Module) -> dict[str, Any]:
    """A module's arrays under the names that both vocabularies share, not those of Megatron's state dicts."""
    return {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(nnx.state(module))}


@pytest.mark.costly("TELayerNormColumnParallelLinear-block", slow=("TEColumnParallelLinear-delayed",))
@pytest.mark.wide
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block"])
@pytest.mark.parametrize("kind", [TELinear, COLUMN, ROW, LN])
def test_a_class_is_its_layer_bitwise(kind: Any, recipe: str):
    """The same weights from the same seed; the same output, gradients and next quantizer state."""
    with autocast(recipe_from_name(recipe)):
        ours, theirs = te(kind), plain(kind)
        assert arrays_of(ours).keys() == arrays_of(theirs).keys()
        for name, array in arrays_of(theirs).items():
            assert_bitwise(arrays_of(ours)[name], array, what=name)
        x, g = draw("x", (2, 8, H)), draw("g", (2, 8, F))
        both = jax.jit(
            lambda ours, theirs: (
                with_vjp(lambda m, x: m(x)[0], (ours, x), g),
                with_vjp(lambda m, x: m(x), (theirs, x), g),
            )
        )
        (y, (d_ours, dx)), (y_theirs, (d_theirs, dx_theirs)) = both(randomize(ours), randomize(theirs))
    assert_bitwise(y, y_theirs)
    assert_bitwise(dx, dx_theirs)
    gradients = arrays_of(d_ours)
    assert ("quantizers.x.scale" in gradients) == (recipe == "delayed")
    for name, gradient in arrays_of(d_theirs).items():
        assert_bitwise(gradients[name], gradient, what=name)


@pytest.mark.parametrize("kind", [TELinear, COLUMN, ROW, LN])
def test_what_a_call_returns(kind: Any):
    """The second element is the bias where there is one and its addition is skipped, in the activations' dtype."""
    x = draw("x", (2, 8, H), jnp.bfloat16)
    for bias in (True, False):
        for skip in (True, False):
            layer = randomize(te(kind, bias=bias, skip_bias_add=skip))
            y, returned = layer(x)
            expected = randomize(plain(kind, bias=bias, return_bias=skip and bias))(x)
            assert (layer.use_bias, layer.te_return_bias) == (bias, skip and bias)
            if skip and bias:
                assert_bitwise(returned, layer.bias[...].astype(jnp.bfloat16))
                expected = expected[0]
            else:
                assert returned is None
            assert_bitwise(y, expected)


@pytest.mark.costly("explicit-False", slow=("auto-True",))
@pytest.mark.wide
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_then_row_is_the_two_formulas(sequence_parallel: bool, mesh_mode: str):
    """In fp64, forward and all gradients; the row bias is added once, after the sum over the tensor ranks."""
    first: Any = LN if sequence_parallel else COLUMN
    norms = {"layernorm_epsilon": 1e-3, "layernorm_zero_centered_gamma": True}
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    config = TransformerConfig(num_layers=2, hidden_size=H, num_attention_heads=4, **norms, **parallel)
    group = "tensor" if sequence_parallel else None
    column, row = te(first, H, F, config=config, tp_group=group), te(ROW, F, H, config=config)
    model = shard(randomize(nnx.List([column, row])))

    def run(model: Any, x: jax.Array) -> jax.Array:
        column, row = model
        y = row(column(x)[0])[0]
        if mesh_mode == "explicit":
            assert jax.typeof(y).sharding.spec[1] == ("tensor" if sequence_parallel else None)
        return constrain(y, AXES)

    form = Form(epsilon=1e-3, zero_centered=True)

    def formula(p: Any, x: Any) -> Any:
        column, row = p[0], p[1]
        if first is LN:
            x = norm(jnp, x, column["scale"], column["ln_bias"], form)
        return (x @ column["kernel"] + column["bias"]) @ row["kernel"] + row["bias"]

    x, g = constrain(draw("x", (4, 8, H)), AXES), constrain(draw("g", (4, 8, H)), AXES)
    y, (d_model, dx) = value_and_vjp(run, (model, x), g)
    y64, (dp, dx64) = value_and_vjp64(formula, (parameters(model), x), g)
    assert_close(y, y64, TOLERANCE, what="output")
    assert_close(dx, dx64, TOLERANCE, what="x")
    for layer, gradients in dp.items():
        for name, gradient in gradients.items():
            assert_close(parameters(d_model)[layer][name], gradient, TOLERANCE, what=f"{layer} {name}")


def test_weights_depend_on_the_seed_alone():
    """One kernel for every mode, whatever the configured tensor parallel size is."""
    kernel = te(TELinear).kernel[...]
    wide = ModelParallelConfig(tensor_model_parallel_size=4, use_cpu_initialization=True)
    for other in (te(COLUMN), te(ROW, config=wide), te(TELinear, parallel_mode="row")):
        assert_bitwise(other.kernel[...], kernel)
    assert (te(COLUMN, seed=1).kernel[...] != kernel).any()


@pytest.mark.parametrize("kind", [COLUMN, ROW])
def test_an_experts_kernel_has_a_stream_of_its_own(kind: Any):
    """Of the name that Megatron's has, or one that follows from ``params``; the formula is the layer's."""
    expert, other, x = te(kind, is_expert=True), te(kind), draw("x", (6, H))
    assert expert.is_expert
    assert (expert.kernel[...] != other.kernel[...]).any()
    named = te(kind, is_expert=True, rngs=nnx.Rngs(0, **{"expert-parallel-rng": 1}))
    again = te(kind, is_expert=True, rngs=nnx.Rngs(5, **{"expert-parallel-rng": 1}))
    assert_bitwise(named.kernel[...], again.kernel[...])
    assert (named.kernel[...] != expert.kernel[...]).any()
    load_state_dict(other, state_dict(expert))
    assert_bitwise(expert(x)[0], other(x)[0])


@pytest.mark.costly("shape1")
@pytest.mark.parametrize("shape", [(32, H), (2, 16, H)])
def test_an_expert_does_not_communicate_over_the_tensor_axis(shape: tuple[int, ...]):
    """Under sequence parallelism the axis shards the tokens, which stay where they are; so it is for any other pair."""
    sizes = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 4, "tensor_model_parallel_size": 2}
    config, x = TransformerConfig(**sizes, sequence_parallel=True), draw("x", shape)
    column, row = te(COLUMN, config=config, is_expert=True), te(ROW, F, H, config=config, is_expert=True)

    def pair(column: Any, row: Any, x: jax.Array) -> jax.Array:
        return row(jax.nn.gelu(column(x)[0]))[0]

    expected = pair(column, row, x)
    axes = ("tokens", None) if len(shape) == 2 else ("batch", "sequence_parallel", None)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, tensor=2))):
        x = jax.device_put(x, named_sharding(axes, jax.sharding.get_mesh()))
        text = compiled_text(pair, shard(column), shard(row), x)
        y = jax.jit(pair)(shard(column), shard(row), x)
        assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
        assert column.tp_size == 1
    assert not re.findall(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    assert_close(y, expected, TOLERANCE)


def test_saving_the_input():
    for kind in (TELinear, COLUMN, ROW):
        layer = te(kind)
        set_save_original_input(layer)
        assert layer.save_original_input
    with pytest.raises(ValueError, match=r"TELayerNormColumnParallelLinear.* save_original_input"):
        set_save_original_input(te(LN))


def test_no_initialization_is_zeros():
    config = ModelParallelConfig(perform_initialization=False, params_dtype=jnp.bfloat16)
    layer = te(COLUMN, config=config)
    assert not layer.kernel[...].any()
    assert layer.kernel.dtype == layer.bias.dtype == jnp.bfloat16
    init = NormalInit(1.0)
    assert condition_init_method(CONFIG, init) is init
    assert _get_extra_te_kwargs(config) == {"params_dtype": jnp.dtype("bfloat16")}


@pytest.mark.parametrize("kind", [TELinear, COLUMN, ROW, LN])
def test_a_configuration_reaches_the_layer_behind(kind: Any):
    config = dataclasses.replace(
        CONFIG,
        gradient_accumulation_fusion=True,
        layernorm_epsilon=1e-3,
        layernorm_zero_centered_gamma=True,
        normalization="RMSNorm",
        params_dtype=jnp.bfloat16,
        sequence_parallel=True,
        tensor_model_parallel_size=2,
    )
    split = kind is not TELinear
    group = {"tp_group": "tensor"} if split else {}
    axes = {"kernel_axes": ("fsdp", "heads")} if split else {}
    layer = nnx.eval_shape(lambda: te(kind, config=config, skip_bias_add=True, **group, **axes))
    assert layer.tensor_parallel == TensorParallel(
        group="tensor" if split else None, size=2 if split else 1, sequence_parallel=split, split=split
    )
    assert layer.kernel_axes == axes.get("kernel_axes", ("fsdp", None))
    assert layer.fuse_wgrad_accumulation
    assert layer.return_bias
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param))} == {jnp.dtype(jnp.bfloat16)}
    if kind is LN:
        assert layer.norm == norm_spec("RMSNorm", 1e-3, True)


@pytest.mark.parametrize(("name", "kind"), [("LayerNorm", LayerNorm), ("RMSNorm", RMSNorm)])
def test_norm_is_one_of_two_layers(name: Any, kind: Any):
    sizes = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 2, "normalization": name}
    config = TransformerConfig(**sizes, layernorm_zero_centered_gamma=True, params_dtype="bfloat16")
    made = TENorm(config, 16, eps=1e-2)
    assert isinstance(made, kind)
    assert made.returns_residual is False
    assert made.scale.dtype == jnp.bfloat16
    assert not made.scale[...].any()
    same = kind(16, 1e-2, zero_centered_gamma=True, params_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = draw("x", (4, 16), jnp.bfloat16)
    assert_bitwise(randomize(made)(x), randomize(same)(x))
    assert TENorm(config, 16).norm.epsilon == 1e-5


def test_a_residual_stream_in_fp32_is_cast_by_the_fused_layer():
    """Its norm is in bf16, so is the output; the stream's gradient is in fp32. Parameters in fp32 do not widen it."""
    layer = te(
        LN, config=TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, params_dtype="bfloat16")
    )
    x = draw("x", (2, 8, H))
    y, (dx,) = with_vjp(lambda x: layer(x)[0], (x,), draw("g", (2, 8, F), jnp.bfloat16))
    assert (y.dtype, dx.dtype) == (jnp.bfloat16, jnp.float32)
    assert_bitwise(y, layer(x.astype(jnp.bfloat16))[0])
    assert te(LN)(x.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", [TELinear, COLUMN, ROW, LN, "norm"])
def test_layers_in_half_precision_agree_on_an_input_in_fp32(kind: Any):
    """All cast it to their dtype; layers in fp32 compute in the dtype of their input."""
    half = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, params_dtype="bfloat16")
    for config, dtype in ((half, jnp.bfloat16), (CONFIG, jnp.float32)):
        layer = TENorm(config, H) if kind == "norm" else te(kind, config=config)
        for given in (jnp.float32, jnp.bfloat16):
            result = layer(draw("x", (2, 8, H), given))
            y = result if kind == "norm" else result[0]
            assert y.dtype == (jnp.bfloat16 if given == jnp.bfloat16 else dtype)


def test_a_norm_returns_its_residual_if_both_options_are_on():
    sizes = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 2, "normalization": "RMSNorm"}
    fused = TransformerConfig(**sizes, fused_residual_rmsnorm=True, params_dtype="bfloat16")
    norm, x = TENorm(fused, H, has_residual=True), draw("x", (2, H))
    assert norm.returns_residual
    y, residual = norm(x)
    assert residual is x
    assert_bitwise(y, TENorm(fused, H)(x))
    assert TENorm(TransformerConfig(**sizes), H, has_residual=True)(x).shape == x.shape
    with pytest.raises(ValueError, match="fused_residual_rmsnorm"):
        TENorm(dataclasses.replace(fused, normalization="LayerNorm"), H, has_residual=True)


@pytest.mark.parametrize("kind", [TELinear, COLUMN, ROW, LN, "norm"])
def test_every_layer_has_torchs_methods_for_its_arrays(kind: Any):
    one, two = (TENorm(CONFIG, H) if kind == "norm" else te(kind, seed=seed) for seed in (1, 2))
    randomize(one)
    arrays: dict[str, Any] = {}
    assert one.state_dict(arrays, prefix="a.") is arrays
    assert all(name.startswith("a.") for name in arrays)
    assert two.load_state_dict({name.removeprefix("a."): array for name, array in arrays.items()}) == ([], [])
    x = draw("x", (2, 8, H))
    for y, expected in zip(jax.tree.leaves(two(x)), jax.tree.leaves(one(x)), strict=True):
        assert_bitwise(y, expected)
    with pytest.raises(ValueError, match=r"\d missing: "):
        two.load_state_dict({})


@pytest.mark.costly("explicit", slow=("auto",))
def test_repr_shows_a_ranks_part(mesh_mode: str):
    size = 1 if mesh_mode == "no mesh" else 2
    config = ModelParallelConfig()
    assert repr(te(COLUMN, config=config)) == (
        f"TEColumnParallelLinear(in_features=32, out_features={64 // size}, bias=True, TP={size})"
    )
    assert repr(te(ROW, bias=False, config=config)) == (
        f"TERowParallelLinear(in_features={32 // size}, out_features=64, bias=False, TP={size})"
    )
    assert repr(te(LN)) == (
        f"TELayerNormColumnParallelLinear(in_features=32, out_features={64 // size}, bias=True, TP={size})"
    )
    assert repr(te(TELinear)) == "TELinear(in_features=32, out_features=64, bias=True, TP=1)"


class Block(MegatronModule):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.fc1 = te(COLUMN, config=config)


def test_kernels_are_kept_between_microbatches_unless_disabled():
    """`set_is_first_microbatch` arms the layer; a call then keeps its quantized kernel."""
    sizes = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 2, "fp8": "hybrid", "fp8_recipe": "tensorwise"}
    x = draw("x", (16, H))
    with autocast(Float8CurrentScaling()):
        block, without = (
            Block(TransformerConfig(**sizes)),
            Block(TransformerConfig(**sizes, disable_parameter_transpose_cache=True)),
        )
        assert block.fc1.is_first_microbatch is None
        for model in (block, without):
            model.set_is_first_microbatch()
            model.fc1(x)
        assert (block.fc1.is_first_microbatch, without.fc1.is_first_microbatch) == (False, None)
        assert without.fc1.kernel_cache is None
        first = block.fc1(x)[0]
        block.fc1.kernel.set_value(jnp.zeros((H, F)))
        assert_bitwise(block.fc1(x)[0], first)
        assert_bitwise(block.fc1(x, is_first_microbatch=False)[0], first)
        # Armed again, as on the first microbatch of the next step.
        block.set_is_first_microbatch()
        assert_bitwise(block.fc1(x)[0], jnp.zeros_like(first))


class Gated(MegatronModule):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.mlp = LayerNormMLP(H, F, rngs=nnx.Rngs(0))


@pytest.mark.costly
def test_a_layer_of_two_kernels_is_armed_for_both_of_a_call():
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, fp8="hybrid")
    model, x = Gated(config), draw("x", (16, H))
    model.set_is_first_microbatch()
    model.mlp(x)  # in high precision: nothing to keep, so it stays armed
    assert model.mlp.is_first_microbatch is True
    with autocast(Float8CurrentScaling()):
        first = model.mlp(x)
        assert model.mlp.is_first_microbatch is False
        for kernel in (model.mlp.wi_kernel, model.mlp.wo_kernel):
            kernel.set_value(jnp.zeros_like(kernel[...]))
        assert_bitwise(model.mlp(x), first)
        # nnx.jit gives back what a call changes.
        model.set_is_first_microbatch()
        assert_bitwise(nnx.jit(lambda model, x: model.mlp(x))(model, x), jnp.zeros_like(first))
        assert model.mlp.is_first_microbatch is False


def test_backward_dw_has_nothing_to_do_or_says_who_does():
    assert te(COLUMN).backward_dw() is None
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, delay_wgrad_compute=True)
    for kind in (TELinear, COLUMN, ROW, LN):
        with pytest.raises(RuntimeError, match="backward_dw"):
            te(kind, config=config).backward_dw()


def test_the_all_reduce_is_named_by_the_configuration_and_by_set_symmetric_ar():
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, symmetric_ar_type="one_shot")
    assert te(TELinear, config=config).symmetric_ar_type is None
    assert te(TELinear, symmetric_ar_type="two_shot").symmetric_ar_type == "two_shot"
    assert te(ROW, config=config).symmetric_ar_type == te(LN, config=config).symmetric_ar_type == "one_shot"
    block = Block(config)
    block.set_symmetric_ar("multimem_all_reduce")
    assert block.fc1.symmetric_ar_type == "multimem_all_reduce"
