"""The calls of cuDNN's FP8 attention as they are lowered for NVIDIA GPUs; tests/gpu run them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_te
from jax_te.errors import BackendUnavailableError
from jax_te.ops import ContextParallel, attention_spec, cudnn_fp8, dot_product_attention
from jax_te.ops.attention import dot_product
from jax_te.ops.attention.fp8_types import Fp8Operands
from jax_te.ops.attention.spec import AttentionArrays
from jax_te.ops.xla import attention_fp8 as xla_kernels
from jax_te.quantize import QuantizedTensor, attention_precision_of, init_attention_state
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Format
from tests.support.context import context_mesh
from tests.support.meshes import use_mesh
from tests.support.numerics import draw, relative_l2
from tests.support.states import merging

Q, K = (2, 256, 4, 128), (2, 384, 2, 128)
AXES = ("batch", "sequence", "heads", None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose cuDNN as on a Hopper GPU."""
    real = dot_product.choose_fp8

    def chosen(*args: Any, **options: Any) -> Any:
        choice = real(*args, **options)
        return choice if choice.unquantized else type(choice)(choice.op, "xla", "test", {"attention": "cudnn"})

    monkeypatch.setattr(dot_product, "choose_fp8", chosen)


def lowered(recipe: Any, mask_type: str, qkv: Any = None, **options: Any) -> list[tuple[str, dict[str, Any], str]]:
    """Target, description and types of each call of cuDNN in forward and backward."""
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (Q, K))
    qkv = (q, k, k) if qkv is None else qkv
    state = jax.eval_shape(lambda: init_attention_state(recipe))

    def attend(qkv: Any, state: Any) -> Any:
        return dot_product_attention(qkv, recipe=recipe, state=state, mask_type=mask_type, **options)

    def both(qkv: Any, state: Any) -> Any:
        out, vjp = jax.vjp(lambda qkv, state: attend(qkv, merging(state)), qkv, state)
        return out, vjp(out)

    text = jax.jit(both).trace(qkv, state).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for line in text.splitlines():
        if target := re.search(r"@(__cudnn\$\w+)", line):
            config = re.search(r'backend_config = "((?:[^"\\]|\\.)*)"', line)
            assert config is not None
            written = config[1].replace("\\22", '"')
            found.append((target[1], json.loads(written)["cudnn_fmha_backend_config"], line.split(" : ")[-1]))
    return found


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
@pytest.mark.parametrize(("mask_type", "mask"), [("causal", "CAUSAL"), ("no_mask", "NO_MASK")])
def test_calls(mask_type, mask, fp8_format):
    """All tensors are E4M3: XLA builds no graph of cuDNN with E5M2 gradients."""
    forward, backward = lowered(DelayedScaling(fp8_dpa=True, fp8_format=fp8_format), mask_type)
    scalar, q, kv = "tensor<1x1x1x1xf32>", "tensor<2x256x4x128x{}>", "tensor<2x384x2x128x{}>"
    by_head_q, by_head_kv, log_sum = "tensor<2x4x256x128x{}>", "tensor<2x2x384x128x{}>", "tensor<2x4x256xf32>"
    e4m3 = "f8E4M3FN"
    given = [q.format(e4m3), kv.format(e4m3), kv.format(e4m3)]
    results = [by_head_q.format(e4m3), scalar, scalar, log_sum, "tensor<0xui8>"]
    assert forward[0] == "__cudnn$fmhaSoftmaxF8"
    assert forward[2] == f"({', '.join(given + [scalar] * 6)}) -> ({', '.join(results)})"
    given += [q.format(e4m3), q.format(e4m3), log_sum]
    results = [by_head_q.format(e4m3), by_head_kv.format(e4m3), by_head_kv.format(e4m3)]
    assert backward[0] == "__cudnn$fmhaSoftmaxBackwardF8"
    assert (
        backward[2]
        == f"({', '.join(given + [scalar] * 12)}) -> ({', '.join([*results, *[scalar] * 4])}, tensor<0xui8>)"
    )
    for _, config, _ in (forward, backward):
        assert config["mask_type"] == mask
        assert config["fmha_scale"] == 128**-0.5
        assert config["intermediate_tensor_shape"]["dimensions"] == ["2", "4", "256", "384"]
    assert {name for name in backward[1] if name.endswith("numbers")} == {
        f"bmm{i}_grad_gemm{j}_dot_dimension_numbers" for i in (1, 2) for j in (1, 2)
    }


def test_scales_are_given_in_the_order_of_xlas_graph(monkeypatch):
    """They are all of one type: only a GPU would tell them apart."""
    names = ("q", "k", "v", "s", "o", "do", "dp", "dq", "dk", "dv")
    scales = {name: jnp.float32(2.0**power) for power, name in enumerate(names)}
    given = []

    def record(target: str, results: Any, *_: Any) -> Any:
        return lambda *arrays: given.append(arrays) or [jnp.zeros(x.shape, x.dtype) for x in results]

    monkeypatch.setattr(cudnn_fp8, "_call", record)
    q, k = (jnp.zeros(shape, jnp.float8_e4m3fn) for shape in (Q, K))
    spec = attention_spec(tuple(x.astype(jnp.bfloat16) for x in (q, k, k)), "causal")
    precision = attention_precision_of(DelayedScaling(fp8_dpa=True))

    def tensor(name: str, data: Any) -> QuantizedTensor:
        return QuantizedTensor(data=data, scale_inv=1.0 / scales[name], dtype=jnp.bfloat16)

    operands = Fp8Operands(tensor("q", q), tensor("k", k), tensor("v", k))
    cudnn_fp8.fp8_attention_forward(operands, spec, AttentionArrays(), precision, scales)
    out, do, log_sum = tensor("o", q), tensor("do", q), jnp.zeros((2, 4, 256))
    cudnn_fp8.fp8_attention_backward(operands, out, log_sum, do, spec, AttentionArrays(), precision, scales)
    forward, backward = ([float(x[0, 0, 0, 0]) for x in arrays if x.size == 1] for arrays in given)
    inverse = {name: 1.0 / float(scale) for name, scale in scales.items()}
    assert forward == [inverse[name] for name in ("q", "k", "v", "s")] + [float(scales[name]) for name in ("s", "o")]
    assert backward == [inverse[name] for name in ("q", "k", "v", "s", "o", "do", "dp")] + [
        float(scales[name]) for name in ("s", "dp", "dq", "dk", "dv")
    ]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "calls"),
    [
        pytest.param(1, 20, 20, [(8, 8), (8, 8), (4, 4)], id="heads"),
        pytest.param(2, 8, 8, [(4, 4), (4, 4)], id="two sequences"),
        pytest.param(1, 32, 2, [(16, 1), (16, 1)], id="more heads of a group"),
    ],
)
def test_backward_of_long_sequences_has_a_call_for_some_heads_each(batch, heads, groups, calls):
    q, k = (jax.ShapeDtypeStruct((batch, 65_536, n, 128), jnp.bfloat16) for n in (heads, groups))
    forward, *backward = lowered(DelayedScaling(fp8_dpa=True), "causal", (q, k, k))
    assert forward[0] == "__cudnn$fmhaSoftmaxF8"
    assert f"tensor<{batch}x65536x{heads}x128xf8E4M3FN>" in forward[2]
    found = [re.findall(r"tensor<\d+x65536x(\d+)x128xf8E4M3FN>", types)[:2] for _, _, types in backward]
    assert found == [[str(n), str(g)] for n, g in calls]
    assert [config["intermediate_tensor_shape"]["dimensions"][1] for _, config, _ in backward] == [
        str(n) for n, _ in calls
    ]


def test_gradients_of_some_heads_each_are_those_of_all(monkeypatch):
    """With plain JAX in the kernel's place, which needs a GPU; 12 heads in 3 groups, by two groups and one."""

    def plain(*args: Any) -> Any:
        *tensors, spec, precision, scales = args
        return xla_kernels.fp8_attention_backward(*tensors, spec, AttentionArrays(), precision, scales)

    monkeypatch.setattr(cudnn_fp8, "_backward_of_heads", plain)
    monkeypatch.setattr(cudnn_fp8, "_LONG", 128)
    precision = attention_precision_of(DelayedScaling(fp8_dpa=True))
    q, k, v, do = (draw(name, (1, 128, n, 128)) for name, n in (("q", 12), ("k", 3), ("v", 3), ("do", 12)))
    spec = attention_spec(tuple(x.astype(jnp.bfloat16) for x in (q, k, v)), "causal")
    one = jnp.float32(1.0)
    operands = Fp8Operands(*(precision.quantize(x, one) for x in (q, k, v)))
    scales: Any = dict.fromkeys(("s", "o", "dp", "dq", "dk", "dv"), one)
    out, log_sum, _ = xla_kernels.fp8_attention_forward(operands, spec, AttentionArrays(), precision, scales)
    given = (operands, out, log_sum, precision.quantize(do, one), spec, AttentionArrays(), precision, scales)
    whole, parts = (module.fp8_attention_backward(*given) for module in (xla_kernels, cudnn_fp8))
    for name in ("dq", "dk", "dv"):
        a, b = (getattr(gradients, name) for gradients in (whole, parts))
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # One product of all heads and one of some may add in another order: codes at a tie round to either side.
        assert relative_l2(b.dequantize(), a.dequantize()) <= 2.0**-8
    for name, largest in whole.amaxes.items():
        assert float(parts.amaxes[name]) == pytest.approx(float(largest), rel=2.0**-20)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_each_device_of_a_mesh_calls_it(mode):
    """With its own examples and heads: two of eight, and one of four."""
    with use_mesh(mode):
        q = jnp.zeros((8, 128, 4, 128), jnp.bfloat16)
        calls = lowered(Float8CurrentScaling(fp8_dpa=True), "causal", (q, q, q), out_axes=AXES)
    assert [name for name, _, _ in calls] == ["__cudnn$fmhaSoftmaxF8", "__cudnn$fmhaSoftmaxBackwardF8"]
    assert all("tensor<2x128x2x128xf8E4M3FN>" in types for _, _, types in calls)


@pytest.mark.costly("a2a", "p2p")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("way", "calls"),
    [
        # Whole sequences of half of the heads.
        pytest.param(ContextParallel(cp_comm_type="a2a"), [("CAUSAL", "1x512x2", "1x512x2")], id="a2a"),
        # A device's own keys, and those of an earlier one.
        pytest.param(
            ContextParallel(cp_comm_type="p2p"),
            [("CAUSAL", "1x256x4", "1x256x4"), ("NO_MASK", "1x256x4", "1x256x4")],
            id="p2p",
        ),
        # All queries to the early keys of an earlier device, the late queries to all keys of a later one.
        pytest.param(
            ContextParallel(cp_comm_type="p2p", cp_load_balanced=True),
            [("CAUSAL", "1x256x4", "1x256x4"), ("NO_MASK", "1x256x4", "1x128x4"), ("NO_MASK", "1x128x4", "1x256x4")],
            id="zigzag",
        ),
    ],
)
def test_blocks_of_a_split_sequence(way, calls):
    """Each block is a call by itself, of codes; no call has queries without a key."""
    with jax.set_mesh(context_mesh(context=2)):
        q = jnp.zeros((1, 512, 4, 128), jnp.bfloat16)
        found = lowered(DelayedScaling(fp8_dpa=True), "causal", (q, q, q), out_axes=AXES, context_parallel=way)
    for target in ("__cudnn$fmhaSoftmaxF8", "__cudnn$fmhaSoftmaxBackwardF8"):
        of_target = {
            (config["mask_type"], *re.findall(r"tensor<(\d+x\d+x\d+)x128xf8E4M3FN>", types)[:2])
            for name, config, types in found
            if name == target
        }
        assert of_target == set(calls)


@pytest.mark.parametrize(
    ("kind", "mask_type", "words"),
    [
        pytest.param("all_gather", "causal", "a causal mask of some queries and all keys", id="all_gather"),
        pytest.param("all_gather", "no_mask", "'all_gather' gives each device 64 queries", id="few queries"),
        pytest.param("p2p", "causal", "one block has 64 queries", id="p2p"),
    ],
)
def test_blocks_that_the_kernels_lack(monkeypatch, kind, mask_type, words):
    recipe = DelayedScaling(fp8_dpa=True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn_fp8, "unavailable", lambda: None)
    with jax.set_mesh(context_mesh(context=2)):
        q, state = jnp.zeros((1, 128, 4, 128), jnp.bfloat16), init_attention_state(recipe)
        options = {"out_axes": AXES, "context_parallel": ContextParallel(cp_comm_type=kind), "mask_type": mask_type}
        with pytest.raises(BackendUnavailableError, match=words):
            dot_product_attention((q, q, q), recipe=recipe, state=state, backend="te", **options)


@pytest.mark.costly
def test_no_other_file_calls_cudnn():
    """XLA's calls are not a public interface: one file knows their form, and the versions that have it."""
    root = Path(jax_te.__file__).parent
    names = {
        path.name
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "__cudnn$" in node.value
    }
    assert names == {"cudnn_fp8.py"}


def test_versions(monkeypatch):
    assert cudnn_fp8.cudnn_lacks(91900) is None
    assert "9.10.0" in cudnn_fp8.cudnn_lacks(91000)
    assert "9.2.0 is older than 9.2.1" in cudnn_fp8.cudnn_lacks(90200)
    assert cudnn_fp8.unavailable() == "no GPU"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 99, 0))
    assert "known of jax 0.10, 0.11 and 0.12, this is" in cudnn_fp8.unavailable()
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert "compute capability 9 (Hopper)" in cudnn_fp8.unavailable()


def test_what_a_gpu_without_the_kernels_runs(monkeypatch):
    """ "auto" takes the compute dtype and says why; "xla" computes the steps in plain JAX."""
    recipe = Float8CurrentScaling(fp8_dpa=True)
    q = jnp.zeros((1, 128, 2, 128), jnp.bfloat16)
    spec = attention_spec((q, q, q), "causal")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 99, 0))
    choice = jax_te.ops.explain_backend("dot_product_attention", recipe=recipe, attention=spec)
    assert "known of jax" in choice.unquantized
    choice = jax_te.ops.explain_backend("dot_product_attention", recipe=recipe, attention=spec, backend="xla")
    assert (choice.parts["attention"], choice.unquantized) == ("xla", None)
    monkeypatch.setattr(cudnn_fp8, "unavailable", lambda: None)
    choice = jax_te.ops.explain_backend("dot_product_attention", recipe=recipe, attention=spec)
    assert (choice.parts["attention"], choice.unquantized) == ("cudnn", None)
