"""Under a recipe the compiled train step holds f8 values at every linear of every transformer layer."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jax_te.cli.build import contexts, model_builder, optimizer
from jax_te.cli.objective import loss_of
from jax_te.cli.presets import PRESETS
from jax_te.cli.run_config import RunConfig
from jax_te.training import create_train_state, make_train_step

LAYERS = 2
# Operands of the layers' linears (input and kernel), and output gradients, by scope. Their sizes differ.
FORWARD = {"MultiheadAttention/LayerNormLinear": 2, "MultiheadAttention/Linear": 2, "LayerNormMLP": 4}
BACKWARD = {"MultiheadAttention/LayerNormLinear": 1, "MultiheadAttention/Linear": 1, "LayerNormMLP": 2}
GEMMS = 3 * 4
"""Forward, input gradient, kernel gradient; of query/key/value, projection, and the two of the MLP."""


@functools.cache
def lowered(**changes):
    values = PRESETS["tiny"].values | {"preset": "tiny", "decay_steps": 9, "warmup_steps": 1, "min_learning_rate": 0.0}
    sizes = {"num_layers": LAYERS, "hidden_size": 32, "num_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 80}
    config = RunConfig(**(values | sizes | {"batch_size": 2, "seq_len": 24} | changes))
    batch = {name: jnp.zeros((2, 24), jnp.int32) for name in ("tokens", "labels")}
    with contexts(config):
        tx = optimizer(config)
        state = create_train_state(model_builder(config), tx, key=jax.random.key(0))
        return make_train_step(loss_of(config), tx, microbatches=config.microbatches).lower(state, batch)


def f8_values(hlo):
    """(layer, scope, dtype) -> shapes, as sets of sizes, of the f8 values that compiled HLO computes there."""
    found = collections.defaultdict(set)
    for dtype, shape, name in re.findall(r"= (f8\w+)\[([\d,]*)\].*op_name=\"([^\"]*)\"", hlo):
        layer = re.search(r"layer_(\d+)", name)
        scope = next((scope for scope in FORWARD if scope in name), None)
        if layer and scope:
            found[int(layer[1]), scope, dtype].add(tuple(sorted(map(int, shape.split(",")))))
    return found


@pytest.mark.slow
@pytest.mark.wide("delayed")
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_every_linear_has_f8_operands_in_compiled_hlo(recipe):
    found = f8_values(lowered(recipe=recipe).compile().as_text())
    for layer in range(LAYERS):
        for scope in FORWARD:
            assert len(found[layer, scope, "f8e4m3fn"]) == FORWARD[scope], (layer, scope, found)
            assert len(found[layer, scope, "f8e5m2"]) == BACKWARD[scope], (layer, scope, found)


def calls_of_functions(module):
    """How often the functions of a module are called in a call of it, by name."""
    bodies = dict(re.findall(r"func\.func \w+ @(\S+?)\(.*?\n(.*?)\n  }", module, re.DOTALL))
    calls = collections.Counter({"main": 1})
    waiting = ["main"]
    while waiting:  # counts each call of each call of a function, of which there are few
        for name in re.findall(r"call @(\S+?)\(", bodies[waiting.pop()]):
            calls[name] += 1
            waiting.append(name)
    return bodies, calls


@pytest.mark.wide("delayed")
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_every_gemm_of_a_linear_multiplies_f8_by_f8(recipe):
    bodies, calls = calls_of_functions(lowered(recipe=recipe).as_text())
    f8 = collections.Counter()
    for name, body in bodies.items():
        for line in body.splitlines():
            if "stablehlo.dot_general" in line:
                pair = tuple(re.findall(r"tensor<[\dx]*(\w+)>", line.split(" : ")[1].split("->")[0]))
                f8[pair] += calls[name] * any(operand.startswith("f8") for operand in pair)
    f8 = +f8
    assert all(operand.startswith("f8") for pair in f8 for operand in pair)
    assert f8.total() == GEMMS * LAYERS
    assert sum(count for pair, count in f8.items() if "f8E5M2" in pair) == 2 * GEMMS // 3 * LAYERS


@pytest.mark.costly
def test_the_e4m3_format_has_no_e5m2():
    text = lowered(recipe="current", fp8_format="e4m3").as_text()
    assert "f8E4M3FN" in text
    assert "f8E5M2" not in text


@pytest.mark.costly
def test_without_a_recipe_there_is_no_f8():
    assert "f8E" not in lowered().as_text()
