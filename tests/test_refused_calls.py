"""Calls with one wrong argument: each ends in a clear error, or has a stated meaning; refused, it changes nothing."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.bad_values import VALUES, allows, calls_of
from tests.support.numerics import without_type_checker
from tests.support.public import public_callables
from tests.support.valid_calls import IDS, KERNEL, KEY, X

NAN, INF = float("nan"), float("inf")
ARRAYS: list[Any] = [
    jnp.float32(1), jnp.int32(1), X, X[0], X[0, 0], X[..., None], X[:, :0], X[..., :15], X.astype(jnp.int32),
    X.astype(jnp.complex64), X.astype(bool), X.astype(jnp.float16), np.asarray(X), np.ones(2, np.float64), IDS,
    IDS.astype(jnp.float32), KERNEL, KEY, jnp.ones((2, 4, 2, 8), jnp.int8), jnp.array([0, 3, 2, 4]), np.array(["no"]),
    np.array([object()]), np.str_("no"), np.bool_(True), np.int32(-1), np.int64(3), np.float32(0.5), np.float32("nan"),
]  # fmt: skip
WRONG: list[Any] = [
    *ARRAYS, "no", "", b"1", None, True, False, 0, 1, -1, 2**70, 1.5, -0.5, NAN, INF, 1j, (), [], {}, ["no"],
    {"no": 1}, {1}, (1, 2), object(), object, len, slice(1), Path("not/there"), "not/there", "float8_e4m3fn", "int8",
    jnp.int4, jnp.float8_e5m2,
]  # fmt: skip

# Public functions and methods whose arguments `checked` does not look at, and why.
UNCHECKED = {
    "any pytree, whose leaves the function itself looks at": [
        "layers.lora_labels", "megatron.float16_to_fp32", "quantize.as_float32", "quantize.merge_quantizers",
        "quantize.with_max_gradients", "training.LossScale.unscale", "training.global_batch",
        "training.muon_dimension_numbers", "training.weight_decay_mask",
    ],
    "anything, which the function itself looks at": [
        "linen.quantization_report", "megatron.mark_keep_in_fp32", "metrics.peak_flops",
    ],
    "arguments of a function or module that it calls": [
        "megatron.Float16Module.set_input_tensor", "megatron.GraphableMegatronModule.__call__",
        "megatron.GraphableMegatronModule.forward", "megatron.TransformerLayer.__call__",
        "models.MegatronGPTModel.__call__",
    ],
    "without effect": ["models.MegatronGPTModel.set_input_tensor", "megatron.Recipe.supports"],
    "interfaces, whose implementations are others'": [
        "metrics.MetricsWriter", "metrics.Progress", "megatron.Matcher", "quantize.Quantizer",
    ],
    "steps of a layer's own call, which subclasses override": [
        "layers.QuantizableModule", "layers.TrainingMode", "layers.DotGeneral.stack_shape",
        "layers.LayerNormLinear.operand", "layers.LayerNormMLP.axes_of", "layers.Linear.axes_of",
        "layers.Linear.operand", "layers.Linear.output_axes",
    ],
    "JAX's own protocol": ["megatron.RNGStatesTracker.tree_unflatten", "training.DynamicLossScale.tree_unflatten"],
}  # fmt: skip
EXEMPT = [name for names in UNCHECKED.values() for name in names]


def hints_of(function: Any) -> dict[str, Any]:
    """Annotations of a function's named arguments."""
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    return {
        name: hint for name, hint in hints.items() if name in parameters and parameters[name].kind.name[:3] != "VAR"
    }


def is_exempt(name: str) -> bool:
    return name in EXEMPT or name.rsplit(".", 1)[0] in EXEMPT


CHECKED = {
    name: function
    for name, function in public_callables().items()
    # Linen's modules make their NNX modules, whose calls check.
    if not is_exempt(name)
    and not name.startswith("linen.")
    and {*inspect.signature(function).parameters} - {"self", "cls"}
}


@pytest.mark.parametrize("name", CHECKED)
def test_no_body_runs_before_a_refusal(name: str) -> None:
    """One argument is given, and it is wrong: the refusal comes before Python misses the others."""
    function, refused = CHECKED[name], 0
    parameters = inspect.signature(function).parameters
    with without_type_checker():
        for argument, hint in hints_of(function).items():
            for value in [value for value in VALUES if not allows(hint, value)][:3]:
                by_place = parameters[argument].kind is inspect.Parameter.POSITIONAL_ONLY
                before = [None] * list(parameters).index(argument) if by_place else []
                given = {} if by_place else {argument: value}
                with (
                    calls_of(function) as entered,
                    pytest.raises((ValueError, TypeError), match=rf"\b{argument}\b") as caught,
                ):
                    function(*before, *([value] if by_place else []), **given)
                assert "missing" not in str(caught.value), (argument, value)
                assert entered == [], (argument, value)
                refused += 1
    assert refused
