"""State dicts of te.pytorch's modules, laid out by hand."""

import jax
import numpy as np
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.errors import CheckpointMismatchError
from jax_te.interop.torch import load_te_state_dict
from jax_te.layers import LayerNormLinear, LayerNormMLP, Linear, RMSNorm, TransformerLayer
from jax_te.megatron import MLP as MegatronMLP
from tests.support.numerics import NO_DROPOUT

H, F, N, G, D = 32, 48, 4, 2, 8


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def layer(**more):
    return TransformerLayer(H, F, N, num_gqa_groups=G, activation="swiglu", rngs=nnx.Rngs(0), **(NO_DROPOUT | more))


def te_arrays(fused, where="self_attention", name="qkv"):
    """Of one attention: queries in the order of heads, or each group with its queries, key and value."""
    query, key, value = random(N * D, H), random(G * D, H), random(G * D, H) + 1
    names = {f"{where}.layernorm_{name}.layer_norm_weight": random(H), f"{where}.layernorm_{name}._extra_state": None}
    names |= {f"{where}.layernorm_{name}.layer_norm_bias": random(H) + 1}
    names |= {f"{where}.proj.weight": random(H, N * D), f"{where}.proj.bias": random(H)}
    biases = [array[:, 0] for array in (query, key, value)]
    if fused:
        groups = [
            np.concatenate([query.reshape(G, -1, H)[i], key.reshape(G, -1, H)[i], value.reshape(G, -1, H)[i]])
            for i in range(G)
        ]
        return names | {
            f"{where}.layernorm_{name}.{kind}": whole
            for kind, whole in (("weight", np.concatenate(groups)), ("bias", np.concatenate(groups)[:, 0]))
        }, (query, key, value)
    for part, weight, bias in zip(("query", "key", "value"), (query, key, value), biases, strict=True):
        names |= {f"{where}.layernorm_{name}.{part}_weight": weight, f"{where}.layernorm_{name}.{part}_bias": bias}
    return names, (query, key, value)


MLP = {"layernorm_mlp.layer_norm_weight": random(H), "layernorm_mlp.layer_norm_bias": random(H)}
MLP |= {"layernorm_mlp.fc1_weight": random(2 * F, H), "layernorm_mlp.fc1_bias": random(2 * F)}
MLP |= {"layernorm_mlp.fc2_weight": random(H, F), "layernorm_mlp.fc2_bias": random(H)}


@pytest.mark.costly("False")
@pytest.mark.parametrize("fused", [False, True])
def test_a_transformer_layer(fused):
    arrays, (query, key, value) = te_arrays(fused)
    found = layer()
    load_te_state_dict(found, {f"block.{name}": array for name, array in (arrays | MLP).items()}, prefix="block.")
    kernel = np.asarray(found.self_attention.qkv.kernel[...])  # [h, r + 2, g d]
    heads = kernel.reshape(H, -1, G, D)
    for head in range(N):
        np.testing.assert_array_equal(heads[:, head % 2, head // 2], query[head * D : (head + 1) * D].T)
    np.testing.assert_array_equal(kernel[:, 2], key.T)
    np.testing.assert_array_equal(kernel[:, 3], value.T)
    np.testing.assert_array_equal(found.self_attention.qkv.bias[...], kernel[0])
    np.testing.assert_array_equal(found.layernorm_mlp.wi_kernel[:, 1], MLP["layernorm_mlp.fc1_weight"][F:].T)
    np.testing.assert_array_equal(found.layernorm_mlp.wi_bias[0], MLP["layernorm_mlp.fc1_bias"][:F])
    np.testing.assert_array_equal(found.layernorm_mlp.wo_kernel[...], MLP["layernorm_mlp.fc2_weight"].T)
    np.testing.assert_array_equal(found.self_attention.proj.kernel[...], arrays["self_attention.proj.weight"].T)


@pytest.mark.parametrize("fused", [False, True])
def test_an_attention_of_separate_projections(fused):
    arrays, parts = te_arrays(fused)
    found = layer(fuse_qkv_params=False)
    load_te_state_dict(found, arrays | MLP)
    attention = found.self_attention
    np.testing.assert_array_equal(
        attention.layernorm.scale[...], arrays["self_attention.layernorm_qkv.layer_norm_weight"]
    )
    np.testing.assert_array_equal(attention.layernorm.bias[...], arrays["self_attention.layernorm_qkv.layer_norm_bias"])
    query, key, value = parts
    # Of each group all first queries, then all second ones, as in the fused kernel.
    heads = query.reshape(G, N // G, D, H).transpose(1, 0, 2, 3).reshape(N // G, G * D, H)
    np.testing.assert_array_equal(attention.query.kernel[...], heads.transpose(2, 0, 1))
    np.testing.assert_array_equal(attention.query.bias[...], heads[..., 0])
    for projection, whole in ((attention.key, key), (attention.value, value)):
        np.testing.assert_array_equal(projection.kernel[...], whole.T)
        np.testing.assert_array_equal(projection.bias[...], whole[:, 0])
    with pytest.raises(CheckpointMismatchError, match="missing"):
        load_te_state_dict(found, MLP)


def test_single_layers():
    norm = RMSNorm(H, rngs=nnx.Rngs(0))
    load_te_state_dict(norm, {"weight": random(H)})
    np.testing.assert_array_equal(norm.scale[...], random(H))
    linear = LayerNormLinear(H, F, rngs=nnx.Rngs(0))
    arrays = {"layer_norm_weight": random(H), "layer_norm_bias": random(H) + 1, "weight": random(F, H)}
    load_te_state_dict(linear, arrays | {"bias": random(F)})
    np.testing.assert_array_equal(linear.ln_bias[...], random(H) + 1)
    np.testing.assert_array_equal(linear.kernel[...], random(F, H).T)


def test_what_does_not_fit_changes_nothing():
    arrays = te_arrays(False)[0] | MLP
    found = layer()
    before = np.asarray(found.layernorm_mlp.scale[...])
    for change, message in (
        ({"other": random(2)}, "unexpected .*other"),
        ({"layernorm_mlp.fc1_weight": random(F, H)}, "fc1|wi_kernel"),
        ({"layernorm_mlp.fc2_bias": random(H).astype(np.float16)}, "float16"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            load_te_state_dict(found, arrays | change)
    with pytest.raises(CheckpointMismatchError, match=r"missing \['layernorm_mlp.fc2_bias'\]"):
        load_te_state_dict(found, {name: array for name, array in arrays.items() if name != "layernorm_mlp.fc2_bias"})
    np.testing.assert_array_equal(found.layernorm_mlp.scale[...], before)


def parameters(module):
    return [np.asarray(each) for each in jax.tree.leaves(nnx.state(module, nnx.Param))]


def turned(arrays, name):
    return arrays | {name: np.ascontiguousarray(arrays[name].T)}


FC = {"layer_norm_weight": random(H), "layer_norm_bias": random(H), "fc2_bias": random(H)}
ATTENTION = "self_attention.layernorm_qkv."
TURNED = r"is \[{}, {}\] and must be \[{}, {}\] \(\[in, out\] kernels of te.jax: transpose\)"


@pytest.mark.parametrize(
    ("make", "arrays", "message"),
    [
        (
            lambda r: Linear(8, 16, bias=False, rngs=r),
            {"weight": random(8, 16)},
            "weight " + TURNED.format(8, 16, 16, 8),
        ),
        (lambda r: Linear(8, 16, bias=False, rngs=r), {"weight": random(4, 32)}, r"\[4, 32\] and must be \[16, 8\]$"),
        (
            lambda r: Linear(8, (2, 8), rngs=r),
            {"weight": random(16, 8), "bias": random(2, 8)},
            r"bias is \[2, 8\] .*\[16\]",
        ),
        (
            lambda r: LayerNormMLP(H, F, rngs=r),
            FC | {"fc1_weight": random(H, F), "fc2_weight": random(F, H), "fc1_bias": random(F)},
            f"fc1_weight {TURNED.format(H, F, F, H)}; fc2_weight {TURNED.format(F, H, H, F)}",
        ),
        (
            lambda r: LayerNormMLP(H, F, activation="swiglu", rngs=r),
            FC | {"fc1_weight": random(H, 2, F), "fc2_weight": random(H, F), "fc1_bias": random(2 * F)},
            r"fc1_weight is \[32, 2, 48\] and must be \[96, 32\] \(.*transpose",
        ),
        (lambda r: RMSNorm(H, rngs=r), {"weight": random(H, 1)}, r"weight is \[32, 1\] and must be \[32\]"),
        (lambda r: layer(), turned(te_arrays(True)[0] | MLP, ATTENTION + "weight"), TURNED.format(32, 64, 64, 32)),
        (lambda r: layer(), turned(te_arrays(False)[0] | MLP, ATTENTION + "key_weight"), TURNED.format(32, 16, 16, 32)),
        (
            lambda r: layer(fuse_qkv_params=False),
            turned(te_arrays(True)[0] | MLP, ATTENTION + "weight"),
            TURNED.format(32, 64, 64, 32),
        ),
        (
            lambda r: layer(),
            {name: array for name, array in (te_arrays(False)[0] | MLP).items() if not name.endswith("value_bias")},
            r"missing \['self_attention.layernorm_qkv.value_bias'\]",
        ),
    ],
)
def test_shapes_of_as_many_elements_are_refused(make, arrays, message):
    found = make(nnx.Rngs(0))
    before = parameters(found)
    with pytest.raises(CheckpointMismatchError, match=message):
        load_te_state_dict(found, arrays)
    for now, was in zip(parameters(found), before, strict=True):
        np.testing.assert_array_equal(now, was)


def test_a_module_with_megatrons_names():
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=N, ffn_hidden_size=F)
    found = MegatronMLP(config, rngs=nnx.Rngs(0))
    arrays = {"linear_fc1.layer_norm_weight": random(H), "linear_fc1.layer_norm_bias": random(H)}
    arrays |= {"linear_fc1.weight": random(F, H), "linear_fc1.bias": random(F)}
    load_te_state_dict(found, arrays | {"linear_fc2.weight": random(H, F), "linear_fc2.bias": random(H)})
    np.testing.assert_array_equal(found.linear_fc1.kernel[:, 0], random(F, H).T)
