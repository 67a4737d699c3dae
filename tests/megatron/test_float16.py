"""Half-precision conversion and the wrapper: which arrays are cast, on which stages, and the numbers that come out."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import LayerNormMLP, Linear
from jax_te.megatron import (
    Float16Module,
    IncompatibleKeys,
    MegatronModule,
    conversion_helper,
    convert_module_to_dtype_except_fp32_marked,
    float16_to_fp32,
    fp32_to_float16,
    load_state_dict,
    mark_keep_in_fp32,
    state_dict,
)
from jax_te.models import GPTModel
from jax_te.recipe import DelayedScaling, autocast
from tests.support.numerics import assert_bitwise, assert_close, draw, relative_l2, without_type_checker


@dataclass(frozen=True)
class Config:
    fp16: bool = False
    bf16: bool = False


BF16, FP16 = Config(bf16=True), Config(fp16=True)
HALVES = [(BF16, jnp.bfloat16), (FP16, jnp.float16)]
Pair = namedtuple("Pair", "a b")


def to_bf16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


class Echo(nnx.Module):
    """Gives back its arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def dtypes(module: nnx.Module) -> dict[str, str]:
    return {name: array.dtype.name for name, array in state_dict(module).items()}


def test_conversion_helper_keeps_the_structure():
    value = (1, [2, (3,)], Pair(4, [5]), {"a": 6}, None)
    seen = []
    result = conversion_helper(value, lambda x: seen.append(x) or x)
    assert result == value
    assert isinstance(result[2], Pair)
    assert seen == [1, 2, 3, 4, 5, {"a": 6}, None], "a dict goes whole"
    assert conversion_helper(3, lambda x: x + 1) == 4


def test_only_fp32_is_narrowed():
    f32, rest = jnp.ones(2), (jnp.ones(2, jnp.float16), jnp.arange(2), jnp.ones(2, bool), None, 1.5, {"a": jnp.ones(2)})
    out, same = fp32_to_float16([f32, rest], to_bf16)
    assert out.dtype == jnp.bfloat16
    assert all(a is b for a, b in zip(same, rest, strict=True))
    assert fp32_to_float16(np.ones(2, np.float32), lambda x: x.astype(np.float16)).dtype == np.float16
    double = np.ones(2)
    assert fp32_to_float16(double, to_bf16) is double


def test_only_halves_are_widened():
    halves = [jnp.ones(2, jnp.float16), (jnp.ones(2, jnp.bfloat16), np.ones(2, np.float16))]
    wide = float16_to_fp32(halves)
    assert [x.dtype.name for x in jax.tree.leaves(wide)] == ["float32"] * 3
    rest = (jnp.ones(2), jnp.arange(2), jnp.ones(2, bool), None, jnp.ones(2, jnp.float8_e4m3fn), {"a": halves[0]})
    assert all(a is b for a, b in zip(float16_to_fp32(rest), rest, strict=True))


class Mixed(nnx.Module):
    """A Variable of every kind."""

    def __init__(self) -> None:
        with autocast(DelayedScaling(amax_history_len=2)):
            self.linear = Linear(16, 16, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.quantized = nnx.Variable(jnp.ones(2, jnp.float8_e4m3fn))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def test_which_variables_are_cast():
    module = Mixed()
    before = dtypes(module)
    mark_keep_in_fp32(module.norm)
    mark_keep_in_fp32(module.linear.bias)
    convert_module_to_dtype_except_fp32_marked(module, jnp.bfloat16)
    assert dtypes(module) == before | {"linear.kernel": "bfloat16"}
    module.norm.mean.set_metadata("keep_in_fp32", False)
    convert_module_to_dtype_except_fp32_marked(module, jnp.float16)
    assert dtypes(module) == before | {"linear.kernel": "float16", "norm.mean": "float16"}
    assert_bitwise(
        module.linear.kernel[...], Linear(16, 16, rngs=nnx.Rngs(0)).kernel[...].astype(jnp.bfloat16).astype(jnp.float16)
    )
    with (
        without_type_checker(),
        pytest.raises(ValueError, match=r"dtype.* float32, bfloat16, float16.* int8"),
    ):
        convert_module_to_dtype_except_fp32_marked(module, jnp.int8)


def test_abstract_modules_are_cast_too():
    model = nnx.eval_shape(lambda: Float16Module(BF16, Linear(16, 16, rngs=nnx.Rngs(0))))
    assert dtypes(model.module) == {"kernel": "bfloat16", "bias": "bfloat16"}
    abstract = nnx.eval_shape(lambda: Linear(16, 16, rngs=nnx.Rngs(0)))
    convert_module_to_dtype_except_fp32_marked(abstract, jnp.float16)
    assert isinstance(abstract.kernel.get_value(), jax.ShapeDtypeStruct)
    assert dtypes(abstract) == {"kernel": "float16", "bias": "float16"}


def test_marks():
    layer = Linear(16, 16, rngs=nnx.Rngs(0))
    assert mark_keep_in_fp32(layer.bias) is layer.bias
    assert mark_keep_in_fp32(layer) is layer
    assert all(v.get_metadata("keep_in_fp32") for v in (layer.kernel, layer.bias))
    assert nnx.merge(*nnx.split(layer)).kernel.get_metadata("keep_in_fp32")
    with (
        without_type_checker(),
        pytest.raises(TypeError, match="must be a Variable or a Module, got Array"),
    ):
        mark_keep_in_fp32(jnp.ones(2))  # type: ignore[type-var]


def mlp() -> LayerNormMLP:
    return LayerNormMLP(32, 64, init_method=jax.nn.initializers.normal(0.2), rngs=nnx.Rngs(0))


def mark_norm(layer: LayerNormMLP) -> LayerNormMLP:
    mark_keep_in_fp32(layer.scale)
    assert layer.ln_bias is not None
    mark_keep_in_fp32(layer.ln_bias)
    return layer


def by_hand_fp32(x: jax.Array, g: jax.Array) -> Any:
    def loss(layer: LayerNormMLP, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = layer(x)
        assert isinstance(y, jax.Array)
        return jnp.sum(y * g), y

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(mlp(), x)


@pytest.mark.costly("config0-bfloat16")
@pytest.mark.parametrize(("config", "dtype"), HALVES)
def test_numbers_in_a_jitted_gradient(config: Config, dtype: Any):
    """Bitwise the layer in half precision with casts written by hand; near fp32's, but not equal."""
    x, g = draw("x", (8, 32)), draw("g", (8, 32))
    model = Float16Module(config, mark_norm(mlp()))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def wrapped(params: Any, x: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = nnx.merge(graphdef, params, rest)(x)
            return jnp.sum(y * g), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    @jax.jit
    def by_hand(arrays: dict[str, jax.Array], x: jax.Array) -> Any:
        def loss(arrays: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
            layer = mlp()
            for name, array in arrays.items():
                getattr(layer, name).set_value(array)
            y: Any = layer(x.astype(dtype))
            y = y.astype(jnp.float32)
            return jnp.sum(y * g), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(arrays, x)

    norm = ("scale", "ln_bias")
    arrays = {name: a if name in norm else a.astype(dtype) for name, a in state_dict(mlp()).items()}
    (d_params, dx), y = wrapped(params, x)
    (d_arrays, dx_hand), y_hand = by_hand(arrays, x)
    assert_bitwise(y, y_hand)
    assert_bitwise(dx, dx_hand)
    assert y.dtype == dx.dtype == jnp.float32
    gradients = {path[-1]: variable.get_value() for path, variable in nnx.to_flat_state(d_params)}
    assert gradients.keys() == d_arrays.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == (jnp.float32 if name in norm else dtype)
        assert_bitwise(gradient, d_arrays[name], what=name)
    (_, dx_exact), y_exact = by_hand_fp32(x, g)
    for half, exact in ((y, y_exact), (dx, dx_exact)):
        # Some roundings to 8 or 11 bits on the way
        assert 1e-5 < relative_l2(half, exact) < (2.0**-6 if dtype == jnp.bfloat16 else 2.0**-9)


@pytest.mark.parametrize(("config", "dtype"), HALVES)
def test_inputs_and_outputs(config: Config, dtype: Any):
    ids, mask = jnp.arange(2), jnp.ones(2)
    args, kwargs = Float16Module(config, Echo())(mask, [mask, ids], mask=mask, fp32_output=False)
    assert [x.dtype for x in jax.tree.leaves(args)] == [dtype, dtype, jnp.int32]
    assert kwargs["mask"] is mask, "keyword arguments are passed as they are"
    args, _ = Float16Module(config, Echo())(mask, [mask, ids])
    assert [x.dtype for x in jax.tree.leaves(args)] == [jnp.float32, jnp.float32, jnp.int32]


STAGES = [
    # pre_process, post_process, vp_size, vp_stage -> casts inputs, casts outputs
    ((True, True, None, None), (True, True)),
    ((True, True, 1, 0), (True, True)),
    ((True, True, 0, None), (True, True)),
    ((True, False, None, None), (True, False)),
    ((False, True, None, 0), (False, True)),
    ((False, False, None, None), (False, False)),
    ((True, True, 3, 0), (True, False)),
    ((True, True, 3, 1), (False, False)),
    ((True, True, 3, 2), (False, True)),
    ((False, True, 2, 1), (False, True)),
    ((False, True, 2, 0), (False, False)),
    ((True, False, 2, 1), (False, False)),
]


@pytest.mark.parametrize("fp32_output", [True, False])
@pytest.mark.parametrize(("stage", "casts"), STAGES)
def test_pipeline_stages(stage: tuple[Any, ...], casts: tuple[bool, bool], fp32_output: bool):
    pre, post, vp_size, vp_stage = stage
    arguments: dict[str, Any] = {"pre_process": pre, "post_process": post, "vp_size": vp_size, "vp_stage": vp_stage}
    model = Float16Module(BF16, Linear(16, 16, rngs=nnx.Rngs(0)), **arguments)
    out = model(jnp.ones((2, 16)), fp32_output=fp32_output)
    # The layer computes in its input's dtype, and its parameters are rounded in any case.
    narrow = casts[0] and not (casts[1] and fp32_output)
    assert out.dtype == (jnp.bfloat16 if narrow else jnp.float32)
    (echo,), _ = Float16Module(BF16, Echo(), **arguments)(jnp.ones(2, jnp.float16), fp32_output=fp32_output)
    assert echo.dtype == (jnp.float32 if casts[1] and fp32_output else jnp.float16)


@pytest.mark.parametrize(("vp_size", "vp_stage"), [(None, 1), (1, 1), (0, 2), (None, -1)])
def test_a_virtual_stage_without_a_virtual_pipeline(vp_size: int | None, vp_stage: int):
    with pytest.raises(AssertionError, match=f"vp_stage {vp_stage} .*vp_size {vp_size}"):
        Float16Module(BF16, Echo(), vp_size=vp_size, vp_stage=vp_stage)


@pytest.mark.parametrize("vp_stage", [None, 2, -1])
def test_a_virtual_pipeline_needs_a_stage(vp_stage: int | None):
    with pytest.raises(ValueError, match=f"vp_stage.* 1 .*vp_size 2.* {vp_stage}"):
        Float16Module(BF16, Echo(), vp_size=2, vp_stage=vp_stage)


@pytest.mark.parametrize(
    ("config", "got"),
    [(Config(), "fp16=False, bf16=False"), (Config(True, True), "fp16=True, bf16=True"), (object(), "fp16=False")],
)
def test_exactly_one_of_fp16_and_bf16(config: Any, got: str):
    layer = Linear(16, 16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=f"fp16.* bf16.* {got}"):
        Float16Module(config, layer)
    assert layer.kernel.dtype == jnp.float32


def test_fp32_output_is_a_bool():
    with without_type_checker(), pytest.raises(TypeError, match=r"fp32_output.* 1"):
        Float16Module(BF16, Echo())(jnp.ones(2), fp32_output=1)  # type: ignore[arg-type]


def test_state_dicts_are_the_wrapped_modules():
    inner = Linear(16, 16, rngs=nnx.Rngs(0))
    model = Float16Module(BF16, inner)
    assert model.state_dict().keys() == {"kernel", "bias"}
    assert model.state_dict()["kernel"] is inner.kernel.get_value()
    assert model.state_dict_for_save_checkpoint("a.", keep_vars=True)["a.kernel"] is inner.kernel
    other = Float16Module(BF16, Linear(16, 16, rngs=nnx.Rngs(7)))
    assert other.load_state_dict(model.state_dict()) == IncompatibleKeys([], [])
    assert_bitwise(other.module.kernel[...], inner.kernel[...])
    # As torch's, and nowhere else: an fp32 checkpoint is cast. Integers are not, nor other shapes.
    wide = state_dict(Linear(16, 16, rngs=nnx.Rngs(3)))
    other.load_state_dict({name: np.asarray(array) for name, array in wide.items()})
    assert_bitwise(other.module.kernel[...], wide["kernel"].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"bias is int32\[16\] there, bfloat16\[16\] here"):
        other.load_state_dict(wide | {"bias": jnp.zeros(16, jnp.int32)})
    with pytest.raises(ValueError, match=r"bias is bfloat16\[8\]"):
        other.load_state_dict(wide | {"bias": jnp.zeros(8)})
    with pytest.raises(ValueError, match=r"kernel is float32\[16, 16\] there, bfloat16\[16, 16\] here"):
        load_state_dict(other.module, wide)


def test_a_wrapped_megatron_module_is_asked():
    class Inner(MegatronModule):
        loaded = None

        def __init__(self) -> None:
            super().__init__(None)
            self.weight = nnx.Param(jnp.ones(2))

        def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
            return {prefix + "mine": keep_vars}

        def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> IncompatibleKeys:
            Inner.loaded = (state_dict, strict)
            return IncompatibleKeys(["x"], [])

        def set_input_tensor(self, input_tensor: Any) -> Any:
            return "set", input_tensor

    model = Float16Module(BF16, Inner())
    assert model.state_dict_for_save_checkpoint("p.", keep_vars=True) == {"p.mine": True}
    assert model.load_state_dict({"a": 1}, strict=False) == IncompatibleKeys(["x"], [])
    assert Inner.loaded == ({"a": 1}, False)
    filled: dict[str, Any] = {}
    assert model.state_dict(filled, "p.") is filled
    assert filled.keys() == {"p.weight"}
    assert model.set_input_tensor(3) == ("set", 3)
    with pytest.raises(TypeError, match=r"Echo.* set_input_tensor"):
        Float16Module(BF16, Echo()).set_input_tensor(3)


@pytest.mark.slow
def test_a_gpt_computes_in_half_precision():
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2)
    plain, wrapped = (GPTModel(config, vocab_size=64, max_sequence_length=8, rngs=nnx.Rngs(0)) for _ in range(2))
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    model = Float16Module(BF16, wrapped)
    assert set(dtypes(model).values()) == {"bfloat16"}
    call = jax.jit(lambda model, tokens, **kw: model(tokens, **kw), static_argnames="fp32_output")
    half, wide = call(model, tokens, fp32_output=False), call(model, tokens)
    assert (half.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    assert_bitwise(wide, half.astype(jnp.float32))
    exact = jax.jit(plain)(tokens)
    assert_close(wide, exact, 0.02)
    assert relative_l2(wide, exact) > 1e-4
    graphdef, state = nnx.split(model)
    assert_bitwise(nnx.merge(graphdef, state)(tokens, fp32_output=False), model(tokens, fp32_output=False))


def test_first_microbatch_reaches_through_the_wrapper():
    @dataclass(frozen=True)
    class Fp8Config(Config):
        fp8: str | None = "hybrid"

    model = Float16Module(Fp8Config(bf16=True), Linear(16, 16, rngs=nnx.Rngs(0)))
    model.set_is_first_microbatch()
    assert model.module.is_first_microbatch is True


def test_the_virtual_stage_is_the_modules_own_unless_it_is_given():
    module = Echo()
    module.vp_stage = 1
    with pytest.raises(AssertionError, match=r"vp_stage 1 .*vp_size None"):
        Float16Module(BF16, module)
    model = Float16Module(BF16, module, vp_size=2)
    assert (model.vp_stage, model.casts_inputs, model.casts_outputs) == (1, False, True)
    assert Float16Module(BF16, module, vp_size=2, vp_stage=0).casts_inputs


class Own(nnx.Module):
    """A module of a user's, with an attribute of the name that the models have."""

    def __init__(self, model: nnx.Module):
        self.model = model
        self.compute_dtype = "what the user means"


def test_compute_dtype_is_set_in_models_and_in_nothing_of_a_users():
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2)
    own = Own(GPTModel(config, vocab_size=64, max_sequence_length=8, rngs=nnx.Rngs(0)))
    Float16Module(BF16, own)
    assert own.compute_dtype == "what the user means"
    assert own.model.compute_dtype == jnp.bfloat16


def test_a_module_that_keeps_its_own_compute_dtype_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class OwnDtype(nnx.Module):
        def __init__(self) -> None:
            self.compute_dtype = jnp.dtype("float32")

    module = Float16Module(
        TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, bf16=True), OwnDtype()
    )
    assert module.module.compute_dtype == jnp.float32
    assert "OwnDtype keeps its compute_dtype float32" in caplog.text
