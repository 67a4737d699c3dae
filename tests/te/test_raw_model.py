"""The GPT of te.jax's own layers that ``jax-te bench model`` measures beside ours."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from transformer_engine.jax.cpp_extensions.attention import FusedAttnHelper
from transformer_engine_jax import NVTE_Fused_Attn_Backend

from jax_te.bench.peers.te_jax import raw_context
from jax_te.bench.peers.te_jax_gpt import RawGPT, raw_train_step
from jax_te.cli.main import main
from jax_te.cli.presets import PRESETS, Preset
from jax_te.recipe import DelayedScaling

pytestmark = [
    pytest.mark.te,
    pytest.mark.usefixtures("one_device_answers"),
    pytest.mark.filterwarnings("ignore:TransformerEngine logical axes:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using unfused JAX softmax:UserWarning"),
]

SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 128, "vocabulary": 64, "length": 32}


@pytest.fixture(autouse=True)
def attention_without_kernels(monkeypatch):
    """Which kernel attention would take is asked of CUDA, even where none may be taken."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    none = NVTE_Fused_Attn_Backend.NVTE_No_Backend
    monkeypatch.setattr(FusedAttnHelper, "get_fused_attn_backend", lambda _: (none, "no GPU"))


@pytest.fixture(autouse=True)
def promotion():
    """te.jax's layers rely on implicit promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("recipe", [None, DelayedScaling(amax_history_len=4)], ids=["none", "delayed"])
def test_the_step_learns_a_batch_by_heart(recipe):
    tokens = jax.random.randint(jax.random.key(1), (4, 33), 0, 64)
    losses = []
    with raw_context(recipe):
        create, step = raw_train_step(RawGPT(**SIZES), optax.adamw(3e-3), key=jax.random.key(0))
        state = create()
        compiled = step.lower(jax.eval_shape(create), tokens).compile()
    masters, _, scaling = state
    assert {leaf.dtype for leaf in jax.tree.leaves(masters)} == {jnp.dtype("float32")}
    assert len(jax.tree.leaves(scaling)) == (0 if recipe is None else 2 * 4 * 6)  # histories and scales of 3 operands
    for _ in range(30):
        state, loss = compiled(state, tokens)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(64), rel=0.1)
    assert losses[-1] < 0.5 * losses[0]
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(state[2]))


def test_the_row(monkeypatch, capsys):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 128}
    values = PRESETS["gpt-125m"].values | sizes | {"seq_len": 32, "batch_size": 4}
    monkeypatch.setitem(PRESETS, "gpt-125m", Preset(summary="for this test", values=values))
    options = ["--num-layers", "1", "--peer", "te", "--rounds", "2", "--calls", "1", "--backend", "xla"]
    assert main(["bench", "model", "--preset", "gpt-125m", *options, "--recipes", "block"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["name"] for row in rows] == ["none, te.jax", "block, unrolled, recompute none"]
    assert all(row["ms"] > 0.0 and row["peak_gib"] > 0.0 for row in rows), rows
    assert rows[0]["speed_ratio"] == rows[0]["memory_ratio"] == 1.0


def test_another_form_than_gpt2s_has_no_peer(capsys):
    assert main(["bench", "model", "--preset", "tiny", "--peer", "te"]) == 2
    assert "--peer te is a GPT in GPT-2's form, and the model is not" in capsys.readouterr().err
