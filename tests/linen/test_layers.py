"""Every layer as a Linen module: the arguments, the numbers and the parameters of its NNX form."""

import inspect
import pickle
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import errors, nnx
from flax.core import freeze

import jax_te.linen as te
from jax_te import layers
from jax_te.config import LatentAttentionOptions, RouterOptions, TransformerConfig
from jax_te.models import GPTModel
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling, autocast
from tests.support.numerics import NO_DROPOUT, assert_bitwise, draw, without_type_checker
from tests.support.states import merging

RECIPE = DelayedScaling(amax_history_len=2)
STATE = "_overwrite_with_gradient"
X = draw("x", (2, 8, 32))
Q = draw("q", (2, 8, 4, 8))
ROWS, SIZES = draw("rows", (16, 32)), jnp.array([5, 11])
IDS = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)

LATENT = LatentAttentionOptions(q_lora_rank=16, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=16, v_head_dim=16)

# Arguments, keyword arguments, inputs.
CASES = {
    "DotProductAttention": ((4, 8), {"softmax_type": "learnable"}, (Q, Q, Q)),
    "Embedding": ((32, 16), {"params_dtype": jnp.bfloat16}, (IDS,)),
    "GroupedLinear": ((2, 32, 64), {}, (ROWS, SIZES)),
    "GroupedLoRA": ((te.GroupedLinear(2, 32, 64), 4), {"alpha": 2.0}, (ROWS, SIZES)),
    "LayerNorm": ((32,), {"zero_centered_gamma": True}, (X,)),
    "LayerNormLinear": ((32, (3, 16)), {"parallel_mode": "column"}, (X,)),
    "LayerNormMLP": ((32, 64), {"activation": "swiglu", "bias": False}, (X,)),
    "Linear": ((32, 64, False), {"parallel_mode": "row"}, (X,)),
    "LoRA": ((te.Linear(32, 64), 4), {"alpha": 2.0}, (X,)),
    "MoE": ((32, 64, RouterOptions(num_experts=4, aux_loss_coeff=0.1)), {"bias": False}, (X,)),
    "MultiheadAttention": ((32, 4), {"num_gqa_groups": 2, "qk_norm_type": "RMSNorm", "attention_dropout": 0.0}, (X,)),
    "MultiLatentAttention": ((32, 4, LATENT), {"attention_dropout": 0.0}, (X,)),
    "RMSNorm": ((32, 1e-3), {}, (X,)),
    "RelativePositionBias": ((4,), {"bidirectional": False}, (4, 8)),
    "Router": ((32, RouterOptions(num_experts=4)), {"bias": True}, (X,)),
    "SharedExperts": ((32, 64), {"gate": True}, (X,)),
    "TransformerLayer": ((32, 64, 4), {"normalization": "RMSNorm", **NO_DROPOUT}, (X,)),
}


def nnx_layer(name):
    args, options, _ = CASES[name]
    bases = {te.Linear: (layers.Linear, 32, 64), te.GroupedLinear: (layers.GroupedLinear, 2, 32, 64)}
    args = [of[0](*of[1:], rngs=nnx.Rngs(1)) if (of := bases.get(type(arg))) else arg for arg in args]
    layer = getattr(layers, name)(*args, **options, rngs=nnx.Rngs(0))
    for path, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param)):  # zeros and ones would hide a mix-up
        variable.set_value(draw(str(path), variable.shape, variable.dtype, scale=0.3))
    return layer


def linen_layer(name):
    args, options, _ = CASES[name]
    return getattr(te, name)(*args, **options)


def pullback(fn, inputs):
    """``fn(variables)`` and the gradient of the variables for an output gradient."""

    @jax.jit
    def run(variables):
        # Of several results the first, as of a router.
        y, vjp = jax.vjp(lambda variables: jax.tree.leaves(fn(variables, *inputs))[0], variables)
        return y, vjp(draw("g", y.shape, y.dtype))[0]

    return run


def test_every_layer_has_a_linen_form_with_the_same_arguments():
    found = {
        name
        for name in layers.__all__
        if inspect.isclass(getattr(layers, name)) and issubclass(getattr(layers, name), nnx.Module)
    } - {"QuantizableModule", "DotGeneral", "EinsumOp"}  # the last two are arguments of Flax's layers
    assert found == set(CASES), "add new layers to jax_te/linen/layers.py, to its __init__ and to CASES"
    for name in found:
        assert name in te.__all__
        theirs = dict(inspect.signature(getattr(layers, name).__init__).parameters)
        ours = dict(inspect.signature(getattr(te, name).__init__).parameters)
        assert [ours.pop(extra).kind for extra in ("name", "parent")] == [inspect.Parameter.KEYWORD_ONLY] * 2
        del theirs["rngs"]
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ]
        call = inspect.signature(getattr(te, name).__call__)
        theirs = inspect.signature(getattr(layers, name).__call__)
        assert list(call.parameters) == [*theirs.parameters, "deterministic"]


@pytest.mark.costly(
    "Linear",
    "LoRA",
    "Router",
    slow=(
        "MoE",
        "TransformerLayer",
        "GroupedLoRA",
        "MultiLatentAttention",
        "LayerNormLinear",
        "LayerNormMLP",
        "SharedExperts",
        "GroupedLinear",
        "MultiheadAttention",
    ),
)
@pytest.mark.parametrize("name", CASES)
def test_numbers_gradients_and_next_states_are_those_of_nnx_bit_by_bit(name):
    inputs = CASES[name][2]
    with autocast(RECIPE):
        layer = nnx_layer(name)
        variables = nn.unbox(te.from_nnx(layer))
        graphdef, state = nnx.split(layer)
        expected, grad = pullback(lambda state, *args: nnx.merge(graphdef, merging(state))(*args), inputs)(state)
        actual, grads = pullback(linen_layer(name).apply, inputs)(variables)
    assert_bitwise(actual, expected)
    expected_grads = nn.unbox(te.from_nnx(nnx.merge(graphdef, grad)))
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    jax.tree.map(assert_bitwise, grads, expected_grads)
    kernels = [m for _, m in nnx.iter_modules(layer) if isinstance(m, layers.QuantizableModule | layers.Router)]
    assert (STATE in grads) == bool(kernels)


@pytest.mark.costly("None", slow=("recipe3", "recipe1"))
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), Float8BlockScaling(), NVFP4BlockScaling()])
def test_recipes_without_state(recipe):
    layer, x = nnx_layer("LayerNormMLP"), draw("x", (4, 8, 32))
    exact = jax.jit(lambda layer, x: layer(x))(layer, x)
    with autocast(recipe):
        assert set(jax.eval_shape(linen_layer("LayerNormMLP").init, jax.random.key(0), x)) == {"params"}
        actual = jax.jit(linen_layer("LayerNormMLP").apply)(te.from_nnx(layer), x)
        assert_bitwise(actual, jax.jit(lambda layer, x: layer(x))(layer, x))
    assert (recipe is None) == (actual == exact).all()


@pytest.mark.costly("LayerNormMLP", "LoRA", slow=("TransformerLayer",))
@pytest.mark.wide("Embedding", "LayerNormMLP", "LoRA", "RelativePositionBias", "TransformerLayer")
@pytest.mark.parametrize("name", CASES)
def test_init_makes_what_the_nnx_layer_holds_and_the_way_there_and_back_keeps_it(name):
    inputs, layer = CASES[name][2], linen_layer(name)
    with autocast(RECIPE):
        variables = jax.jit(lambda: layer.init(jax.random.key(0), *inputs))()
        like = te.from_nnx(nnx_layer(name))
        module = te.to_nnx(layer, variables)
    assert jax.tree.structure(variables) == jax.tree.structure(like)  # names, boxes and their logical axes
    assert jax.tree.map(lambda a: (a.shape, a.dtype), variables) == jax.tree.map(lambda a: (a.shape, a.dtype), like)
    assert type(module) is getattr(layers, name)
    for source in (module, lambda rngs: nnx_layer(name)):
        back = te.from_nnx(te.to_nnx(source, nn.unbox(variables)))
        assert jax.tree.structure(back) == jax.tree.structure(variables)
        jax.tree.map(assert_bitwise, back, variables)
    for kernel in jax.tree.leaves(nnx.state(module, nnx.Param)):  # drawn, and kernels each with a key of its own
        assert jnp.isfinite(kernel.astype(jnp.float32)).all()


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        with autocast(None):
            x = te.Linear(32, 32)(x)
        return te.LoRA(te.Linear(32, 32), 4, name="adapted")(nn.Dense(32)(te.LayerNormMLP(32, 64)(x)))


class SetUp(nn.Module):
    def setup(self):
        self.first = te.Linear(32, 32)
        self.blocks = [te.LayerNormMLP(32, 64) for _ in range(2)]

    def __call__(self, x):
        return self.blocks[1](self.blocks[0](self.first(self.first(x))))


@pytest.mark.costly
def test_layers_inside_of_linen_models():
    with autocast(RECIPE):
        y, variables = Compact().init_with_output(jax.random.key(0), X)
        assert_bitwise(Compact().apply(freeze(variables), X), y)
        params = variables["params"]
        assert sorted(params) == ["Dense_0", "LayerNormMLP_0", "Linear_0", "adapted"]
        assert sorted(variables[STATE]) == ["LayerNormMLP_0", "adapted"]  # Linear_0 is in high precision
        y, variables = SetUp().init_with_output(jax.random.key(0), X)
        assert_bitwise(SetUp().apply(variables, X), y)  # the layer that is called twice draws its kernel once
        assert sorted(variables["params"]) == sorted(variables[STATE]) == ["blocks_0", "blocks_1", "first"]
        one, two = (variables["params"][f"blocks_{i}"]["wi_kernel"].value for i in range(2))
        assert not (one == two).any()


class GPT(te.LinenModule, nnx_class=GPTModel, init=False):
    """GPT for Linen."""


@pytest.mark.costly
def test_an_nnx_model_becomes_a_linen_module():
    model = GPT(
        TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4), vocab_size=32, max_sequence_length=8
    )
    assert GPT.__doc__.startswith(GPTModel.__doc__.strip().splitlines()[0])
    assert GPT.__doc__.endswith("GPT for Linen.")
    with autocast(Float8CurrentScaling()):
        variables = jax.jit(model.init)(jax.random.key(0), IDS)
        assert variables["params"]["layers"]["0"]["layernorm_mlp"]["wi_kernel"].names == ("fsdp", "components", "ffn")
        actual = jax.jit(model.apply)(variables, IDS)
        assert_bitwise(actual, jax.jit(lambda model, ids: model(ids))(te.to_nnx(model, variables), IDS))


def test_repr_docstring_and_pickle():
    layer = te.Linear(16, out_features=(2, 8), params_dtype=jnp.bfloat16, name="q")
    text = "Linear(in_features=16, out_features=(2, 8), params_dtype=<class 'jax.numpy.bfloat16'>, name='q')"
    assert repr(layer) == text
    assert pickle.loads(pickle.dumps(layer)) == layer
    assert layer.bias is True
    assert layer.clone(bias=False).bias is False
    for name in CASES:
        text = getattr(te, name).__doc__
        assert text.startswith(inspect.cleandoc(getattr(layers, name).__doc__).splitlines()[0])
        assert f"`{getattr(layers, name).__module__}.{name}`" in text
        assert "\n    rngs:" not in text
        assert "Attributes:" not in text
        assert all(f"\n    {line}" not in text for line in ("frozen:", "module_recipe"))


@pytest.mark.parametrize(
    ("params", "error", "match"),
    [
        ({}, errors.ScopeParamNotFoundError, '"bias" in scope "/"'),
        ({"kernel": jnp.ones((16, 32))}, errors.ScopeParamNotFoundError, '"bias" in scope "/"'),
        ({"kernel": jnp.ones((32, 16)), "bias": jnp.ones(32)}, errors.ScopeParamShapeError, r"\(16, 32\).*\(32, 16\)"),
        ({"kernel": jnp.ones((16, 32)), "bias": jnp.ones(32), "scale": jnp.ones(16)}, ValueError, "params/scale"),
    ],
)
def test_variables_that_do_not_fit(params, error, match):
    with pytest.raises(error, match=match):
        te.Linear(16, 32).apply({"params": params}, jnp.ones((2, 16)))
    with pytest.raises(error, match=match):
        te.to_nnx(te.Linear(16, 32), {"params": params})


def test_wrong_arguments():
    with pytest.raises(TypeError, match="too many positional"):
        te.Linear(16, 32, True, None)  # Flax's own constructor would take the fourth for `parent`
    with pytest.raises(TypeError, match="out_features"):
        te.Linear(16)
    with pytest.raises(ValueError, match="parallel_mode must be"):
        te.Linear(16, 32, parallel_mode="diagonal").init(jax.random.key(0), X)
    with pytest.raises(errors.CallCompactUnboundModuleError):
        te.Linear(16, 32)(X)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        te.Linear(16, 32).init(jax.random.key(0))
    with (
        without_type_checker(),
        pytest.raises(TypeError, match="source must be a LinenModule or a Module"),
    ):
        te.to_nnx(3, {})


class Random(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


class LinenRandom(te.LinenModule, nnx_class=Random, init=False):
    """An NNX module that draws keys of its own."""


def test_nnx_modules_that_cannot_be_linen_modules():
    with pytest.raises(TypeError, match=r"random state \(dropout"):
        LinenRandom().init(jax.random.key(0), X)

    class Any(nnx.Module):
        def __init__(self, *sizes: int):
            self.sizes = sizes

    with pytest.raises(TypeError, match=r"\*sizes.*must have names"):
        type("LinenAny", (te.LinenModule,), {}, nnx_class=Any)


@pytest.mark.costly
def test_jax_te_does_not_import_it():
    code = "import sys, jax_te.layers; sys.exit('jax_te.linen' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
