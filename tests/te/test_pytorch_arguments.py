"""Arguments of jax_te.te_pytorch against the source of transformer_engine.pytorch, which is read and not imported."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from jax_te import layers, te_pytorch

pytestmark = pytest.mark.te

FILES = {
    "TransformerLayer": "transformer.py",
    "MultiheadAttention": "attention/multi_head_attention.py",
    "DotProductAttention": "attention/dot_product_attention/dot_product_attention.py",
    "Linear": "module/linear.py",
    "LayerNorm": "module/layernorm.py",
    "RMSNorm": "module/rmsnorm.py",
    "LayerNormLinear": "module/layernorm_linear.py",
    "LayerNormMLP": "module/layernorm_mlp.py",
    "GroupedLinear": "module/grouped_linear.py",
    "Fp8Padding": "module/fp8_padding.py",
    "Fp8Unpadding": "module/fp8_unpadding.py",
}
# Defaults that differ, and why.
DIFFERENT = {
    "set_parallel_mode": "kernels have logical axes, which shard nothing without a mesh",
    "fuse_qkv_params": "one GEMM, whose input is quantized once",
    "params_dtype": "None is torch's default, which is fp32",
    "sequence_parallel": "None of a norm is False",
    "activation_params": "None is no parameters",
    "ub_overlap_ag": "refused if True",
    "ub_overlap_rs": "refused if True",
    "return_max_logit": "a bool",
}
METHODS = {"__init__": "__init__", "__call__": "forward"}
CASES = [(name, method) for name in FILES for method in METHODS if (name, method) not in {
    ("LayerNorm", "__call__"), ("RMSNorm", "__call__"),  # there, those of another class
}]  # fmt: skip


def theirs(name: str, method: str) -> dict[str, Any]:
    """Argument -> default, in order; without a default, `inspect.Parameter.empty`."""
    specification = importlib.util.find_spec("transformer_engine")
    assert specification
    assert specification.origin
    tree = ast.parse((Path(specification.origin).parent / "pytorch" / FILES[name]).read_text())
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (function,) = (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == METHODS[method])
    names = [argument.arg for argument in function.args.args[1:]]
    defaults: list[Any] = [ast.literal_eval(each) for each in function.args.defaults]
    return dict(zip(names, [inspect.Parameter.empty] * (len(names) - len(defaults)) + defaults, strict=True))


def ours(name: str, method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Default by name of what may be given by position, in order, and of the keywords, with those of the base."""
    own, base = (
        inspect.signature(getattr(getattr(module, name), method)).parameters for module in (te_pytorch, layers)
    )
    by_position = {p.name: p.default for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}
    passed_on = base if any(p.kind is p.VAR_KEYWORD for p in own.values()) else {}
    keywords = {p.name: p.default for p in {**passed_on, **own}.values() if p.kind is p.KEYWORD_ONLY}
    return by_position, keywords


@pytest.mark.parametrize(("name", "method"), CASES)
def test_positions_are_transformer_engines(name: str, method: str) -> None:
    found, expected = list(ours(name, method)[0]), list(theirs(name, method))
    assert found == expected[: len(found)]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_what_is_not_taken_is_refused_by_name(name: str, method: str) -> None:
    function, base = (getattr(getattr(module, name), method) for module in (te_pytorch, layers))
    taken = {*inspect.signature(function).parameters, *inspect.signature(base).parameters}
    for argument in theirs(name, method).keys() - taken:
        with pytest.raises(TypeError, match=f"{name} got {argument}=None, an argument of transformer_engine.pytorch"):
            function(None, **{argument: None})


@pytest.mark.parametrize(("name", "method"), CASES)
def test_defaults_are_transformer_engines(name: str, method: str) -> None:
    by_position, keywords = ours(name, method)
    there = theirs(name, method)
    common = (by_position | keywords).keys() & there.keys() - DIFFERENT.keys()
    # Queries must be given: there is no qkv_layer, which could take their place.
    common -= {"query_layer"}
    assert {each: (by_position | keywords)[each] for each in common} == {each: there[each] for each in common}
