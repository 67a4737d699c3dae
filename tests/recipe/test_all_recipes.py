"""What every recipe is: fields, refusals, equality, names, and the devices it says it runs on."""

import dataclasses
import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jax_te._validation import log_once
from jax_te.errors import QuantizerStateError
from jax_te.layers import Fp8Padding
from jax_te.ops import dense
from jax_te.quantize import (
    BlockQuantizer,
    MXQuantizer,
    NVFP4Quantizer,
    TensorQuantizer,
    init_gemm_state,
    precision_of,
    quantizer_for,
)
from jax_te.recipe import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    ModuleRecipe,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    autocast,
    recipe_from_name,
)
from tests.support.numerics import without_type_checker

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FAST, PRECISE = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)
BLOCKS = (Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
NAMED = (DelayedScaling, Float8CurrentScaling, *BLOCKS)


def no_quantizers(role):
    return None


def mixed(role):
    return {"x": BlockQuantizer(dtype=E4M3), "kernel": MXQuantizer(dtype=E4M3)}.get(role)


CUSTOM = {"qfactory": mixed}


def make(kind, **fields):
    return kind(**(CUSTOM | fields if kind is CustomRecipe else fields))


@pytest.mark.parametrize(
    ("kind", "name", "alignment", "has_state", "fp8_format"),
    [
        (DelayedScaling, "delayed", 16, True, Format.HYBRID),
        (Float8CurrentScaling, "current", 16, False, Format.HYBRID),
        (Float8BlockScaling, "block", 16, False, Format.E4M3),
        (MXFP8BlockScaling, "mxfp8", 32, False, Format.E4M3),
        (NVFP4BlockScaling, "nvfp4", 32, False, Format.E4M3),
        (CustomRecipe, "custom", 16, False, Format.HYBRID),
    ],
)
def test_what_a_recipe_is(kind, name, alignment, has_state, fp8_format):
    recipe = make(kind)
    assert (recipe.name, recipe.alignment, recipe.has_state) == (name, alignment, has_state)
    assert recipe.fp8_format is fp8_format
    assert recipe.override_linear_precision == (False, False, False)
    assert {(init_gemm_state(recipe) is not None), recipe.has_state} == {has_state}
    assert RECIPES.get(name, CustomRecipe) is kind
    if kind is not CustomRecipe:
        assert recipe_from_name(name) == recipe
    precise = kind in BLOCKS
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert getattr(recipe, f"fp8_gemm_{gemm}").use_split_accumulator in ((True,) if precise else (True, False))


@pytest.mark.parametrize("kind", [*NAMED, CustomRecipe])
def test_every_field_takes_part_in_equality_and_hash(kind):
    recipe = make(kind)
    others = {
        "fp8_format": Format.HYBRID if recipe.fp8_format is Format.E4M3 else Format.E4M3,
        "override_linear_precision": (False, False, True),
        "fp8_gemm_fprop": PRECISE if recipe.fp8_gemm_fprop == FAST else FAST,
        "fp8_gemm_dgrad": PRECISE if recipe.fp8_gemm_dgrad == FAST else FAST,
        "fp8_gemm_wgrad": PRECISE if recipe.fp8_gemm_wgrad == FAST else FAST,
        "margin": 1,
        "amax_history_len": 2,
        "amax_compute_algo": "most_recent",
        "tp_only_amax_red": True,
        "use_power_2_scales": True,
        "amax_scope": "whole",
        "use_f32_scales": True,
        "disable_rht": True,
        "disable_stochastic_rounding": True,
        "disable_2d_quantization": True,
        "qfactory": no_quantizers,
        "fp8_dpa": True,
        "fp8_mha": True,
        "fp8_dpa_fwd": False,
        "fp8_dpa_bwd": False,
    }
    # What a recipe admits one value of only cannot differ.
    fixed = {"fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"} if kind in BLOCKS else set()
    fixed |= {"fp8_format", "fp4_format"} if kind is NVFP4BlockScaling else set()
    fixed |= {"fp8_format"} if kind is CustomRecipe else set()
    fixed |= {"fp8_dpa", "fp8_mha"} if kind in (*BLOCKS, CustomRecipe) else set()
    for field in dataclasses.fields(kind):
        if field.name not in fixed:
            # Passes of FP8 attention are those of a recipe that has FP8 attention.
            one = make(kind, fp8_dpa=True) if field.name in ("fp8_dpa_fwd", "fp8_dpa_bwd") else recipe
            other = dataclasses.replace(one, **{field.name: others[field.name]})
            assert other != one, field.name
            assert {one: 1, other: 2}[other] == 2
            assert other == dataclasses.replace(one, **{field.name: others[field.name]})
            assert hash(other) == hash(dataclasses.replace(one, **{field.name: others[field.name]}))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe != next(make(other) for other in NAMED if other is not kind)
    with pytest.raises(AttributeError):
        recipe.fp8_format = Format.E4M3


@pytest.mark.parametrize("kind", [*NAMED, CustomRecipe])
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"override_linear_precision": (True, False)}, ValueError, r"three bools.*got \(True, False\)"),
        ({"override_linear_precision": [False, False, True]}, ValueError, r"three bools.*got \[False, False, True\]"),
        ({"override_linear_precision": (0, 0, 1)}, ValueError, r"e\.g\. \(False, False, True\); got \(0, 0, 1\)"),
        ({"fp8_gemm_fprop": True}, TypeError, "fp8_gemm_fprop must be a MMParams, got True"),
        ({"fp8_gemm_dgrad": None}, TypeError, "fp8_gemm_dgrad must be a MMParams, got None"),
        ({"fp8_gemm_wgrad": "fast"}, TypeError, "fp8_gemm_wgrad must be a MMParams, got 'fast'"),
        ({"fp8_format": "E4M3"}, TypeError, "must be a jax_te.recipe.Format, got 'E4M3'"),
        ({"fp8_format": Format.E5M2}, ValueError, "cannot train: FP8 GEMMs do not multiply E5M2 by E5M2"),
        ({"fp8_format": Format.E2M1}, ValueError, "is an FP4 format; use NVFP4BlockScaling"),
        ({"fp8_interval": 1}, TypeError, "fp8_interval"),
        ({"fp8_dpa": 1}, TypeError, "fp8_dpa must be"),
    ],
)
def test_refused_by_every_recipe(kind, fields, error, message):
    with without_type_checker(), pytest.raises(error, match=message):
        make(kind, **fields)


@pytest.mark.parametrize("kind", [*BLOCKS, CustomRecipe])
@pytest.mark.parametrize("field", ["fp8_dpa", "fp8_mha"])
def test_recipes_without_fp8_attention_refuse_it(kind, field):
    with pytest.raises(ValueError, match=f"{field}=True: {kind.__name__} has .*; leave it out"):
        make(kind, **{field: True})
    assert make(kind, **{field: False}) == make(kind)


def test_fp8_mha_is_fp8_dpa_and_says_so(caplog):
    log_once.cache_clear()
    with caplog.at_level("INFO", "jax_te"):
        recipes = [DelayedScaling(fp8_mha=True), Float8CurrentScaling(fp8_mha=True)]
    assert all(recipe.quantizes_attention for recipe in recipes)
    assert [record.message for record in caplog.records if "fp8_mha" in record.message] == [
        "fp8_mha=True is taken as fp8_dpa=True: the casts around attention stay, see docs/parity.md"
    ]
    assert not any(make(kind).quantizes_attention for kind in (*NAMED, CustomRecipe))


def test_current_scaling_has_state_of_attention_alone():
    assert Float8CurrentScaling(fp8_dpa=True).has_state
    assert not Float8CurrentScaling(fp8_dpa=True, fp8_dpa_bwd=False).has_state


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_block_recipes_always_accumulate_precisely(kind, gemm):
    with pytest.raises(ValueError, match=rf"{kind.__name__} .* so fp8_gemm_{gemm} cannot be .*=False\); leave it out"):
        kind(**{f"fp8_gemm_{gemm}": FAST})
    assert kind(**{f"fp8_gemm_{gemm}": PRECISE}) == kind()


@pytest.mark.parametrize(
    ("kind", "fields", "error", "message"),
    [
        (
            NVFP4BlockScaling,
            {"fp4_format": Format.E4M3},
            ValueError,
            r"fp4_format must be Format.E2M1, got <Format.E4M3",
        ),
        (
            NVFP4BlockScaling,
            {"fp8_format": Format.HYBRID},
            ValueError,
            "block scales, must be Format.E4M3, got Format.HYB",
        ),
        (DelayedScaling, {"tp_only_amax_red": 1}, TypeError, "tp_only_amax_red must be True or False, got 1"),
        (CustomRecipe, {}, TypeError, "qfactory"),
        (
            CustomRecipe,
            {"qfactory": "block"},
            TypeError,
            "qfactory must be a function, got 'block'",
        ),
    ],
)
def test_refused_by_one(kind, fields, error, message):
    with without_type_checker(), pytest.raises(error, match=message):
        kind(**fields)


def test_a_factory_that_cannot_be_a_cache_key():
    @dataclasses.dataclass  # defines equality, so instances have no hash
    class Factory:
        def __call__(self, role):
            return None

    with pytest.raises(TypeError, match=r"is not hashable, as a jit cache key must be; use a plain function"):
        CustomRecipe(qfactory=Factory())


def test_mm_params():
    assert MMParams() == PRECISE
    assert len({MMParams(), PRECISE, FAST}) == 2
    with pytest.raises(AttributeError):
        FAST.use_split_accumulator = True


def test_e2m1():
    assert Format.E2M1.fwd_dtype == Format.E2M1.bwd_dtype == jnp.float4_e2m1fn


# ---------------------------------------------------------------- devices


def gpu(capability):
    return SimpleNamespace(platform="gpu", compute_capability=capability)


@pytest.mark.parametrize(
    ("kind", "least", "end", "needs"),
    [
        (DelayedScaling, 8.9, 99, "FP8 needs compute capability 8.9"),
        (Float8CurrentScaling, 8.9, 99, "FP8 needs compute capability 8.9"),
        (Float8BlockScaling, 9.0, 10.0, "for compute capability 9.x"),
        (MXFP8BlockScaling, 10.0, 99, "MXFP8 needs compute capability 10.0"),
        (NVFP4BlockScaling, 10.0, 99, "NVFP4 needs compute capability 10.0"),
        (CustomRecipe, 99, 99, "depends on the quantizers"),
    ],
)
@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0"])
def test_supports_on_gpus(kind, least, end, needs, capability):
    support = make(kind).supports(gpu(capability))
    assert bool(support) == (least <= float(capability) < end)
    assert f"{float(capability):g}" in support.reason
    if not support:
        assert needs in support.reason


@pytest.mark.parametrize("kind", [*NAMED, CustomRecipe])
def test_supports_elsewhere(kind):
    recipe = make(kind)
    for device in (None, jax.devices("cpu")[0], SimpleNamespace(platform="tpu")):
        support = recipe.supports(device)
        assert not support
        assert support.reason == (
            f"{'cpu' if device is None else device.platform} has no {recipe.name} GEMM; "
            "the same numbers are computed in high precision"
        )


# ---------------------------------------------------------------- which quantizers


@pytest.mark.parametrize(
    ("recipe", "x", "kernel", "grad"),
    [
        (None, None, None, None),
        (DelayedScaling(), *(TensorQuantizer(dtype=d, scaling="given") for d in (E4M3, E4M3, E5M2))),
        (Float8CurrentScaling(), *(TensorQuantizer(dtype=d) for d in (E4M3, E4M3, E5M2))),
        (
            Float8CurrentScaling(use_power_2_scales=True, fp8_format=Format.E4M3),
            *(TensorQuantizer(dtype=E4M3, power_of_two=True) for _ in range(3)),
        ),
        (
            Float8BlockScaling(),
            BlockQuantizer(dtype=E4M3),
            BlockQuantizer(dtype=E4M3, two_dimensional=True),
            BlockQuantizer(dtype=E4M3),
        ),
        (
            Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID),
            BlockQuantizer(dtype=E4M3, power_of_two=False),
            BlockQuantizer(dtype=E4M3, two_dimensional=True, power_of_two=False),
            BlockQuantizer(dtype=E5M2, power_of_two=False),
        ),
        (MXFP8BlockScaling(fp8_format=Format.HYBRID), *(MXQuantizer(dtype=d) for d in (E4M3, E4M3, E5M2))),
        (
            NVFP4BlockScaling(),
            NVFP4Quantizer(hadamard=True),
            NVFP4Quantizer(two_dimensional=True),
            NVFP4Quantizer(hadamard=True, stochastic_rounding=True),
        ),
        (
            NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
            *(NVFP4Quantizer() for _ in range(3)),
        ),
        (CustomRecipe(qfactory=mixed), BlockQuantizer(dtype=E4M3), MXQuantizer(dtype=E4M3), None),
    ],
    ids=lambda value: getattr(value, "name", "") if isinstance(value, Recipe) else "",
)
def test_the_quantizer_of_each_role(recipe, x, kernel, grad):
    assert [quantizer_for(recipe, role) for role in ("x", "kernel", "grad")] == [x, kernel, grad]


def test_a_factory_that_gives_something_else():
    with pytest.raises(TypeError, match=r"qfactory gave 'fp8' for role 'x'; it must give one of jax_te.quantize's"):
        quantizer_for(CustomRecipe(qfactory=lambda role: "fp8"), "x")
    delayed = CustomRecipe(qfactory=lambda role: TensorQuantizer(dtype=E4M3, scaling="given"))
    with pytest.raises(ValueError, match="scaling='given' for role 'grad', whose scale needs state; use the Delayed"):
        quantizer_for(delayed, "grad")
    with pytest.raises(TypeError, match="no quantizers for recipe"):
        quantizer_for(Recipe(), "x")


class By48(TensorQuantizer):
    """A quantizer of a user's own, for hardware that reads 48 values at once."""

    alignment = 48
    shard_multiple = 48


def test_sizes_are_multiples_of_each_quantizers_alignment():
    recipe = CustomRecipe(qfactory={"x": By48(dtype=E4M3), "kernel": MXQuantizer(dtype=E4M3)}.get)
    precision = precision_of(recipe)
    assert (precision.alignment, precision.shard_multiple) == (96, 96)
    with pytest.raises(ValueError, match="input size 48 must be a multiple of 96"):
        dense(jnp.ones((96, 48)), jnp.ones((48, 96)), recipe=recipe)
    with autocast(recipe):
        padded, sizes = Fp8Padding(1)(jnp.ones((50, 16)), [50])
    assert (padded.shape[0], sizes) == (96, [96])


def test_state_that_is_missing():
    with pytest.raises(QuantizerStateError, match=r"recipe .delayed. needs quantizer state.* prepare_quantization"):
        dense(jnp.ones((16, 16)), jnp.ones((16, 16)), recipe=DelayedScaling())
    for kind in NAMED[1:]:
        assert precision_of(kind()).scale(None, "x") is None


def test_a_recipes_text_has_what_was_chosen_and_makes_it_again():
    """Also that of a class of your own, and inside of a `ModuleRecipe`."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(Float8CurrentScaling):
        note: str = ""

    assert repr(DelayedScaling()) == "DelayedScaling()"
    names = {kind.__name__: kind for kind in (DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, MMParams, Own)}
    for recipe in (
        DelayedScaling(margin=1, fp8_gemm_wgrad=PRECISE),
        MXFP8BlockScaling(),
        NVFP4BlockScaling(disable_rht=True),
        Own(note="mine", override_linear_precision=(False, False, True)),
    ):
        assert eval(repr(recipe), {}, names) == recipe
        assert "fp8_dpa" not in repr(recipe)
        assert repr(recipe) in repr(ModuleRecipe(training=recipe))
    assert "qfactory=<function" in repr(CustomRecipe(qfactory=lambda role: None))


def test_a_factory_with_transformer_engines_names_of_roles_is_refused():
    """It gives None for each of the names here, and nothing would be quantized."""

    def factory(role):
        return TensorQuantizer(dtype=jnp.float8_e4m3fn) if role == "linear_weight" else None

    with pytest.raises(ValueError, match="linear_input"):
        dense(jnp.ones((16, 16)), jnp.ones((16, 16)), recipe=CustomRecipe(qfactory=factory))
