"""``torch_dist`` checkpoints with experts: Megatron-Core's own model loads ours, and its file is loaded here."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_REASON = "compares with Megatron-Core: pip install -e '.[parity]'"
torch = pytest.importorskip("torch", reason=_REASON)
pytest.importorskip("megatron.core", reason=_REASON)

from jax_te.interop.megatron import load_megatron, save_megatron  # noqa: E402
from jax_te.interop.torch import read_torch_file  # noqa: E402
from tests.interop.megatron.test_experts import TOKENS, assert_same, build  # noqa: E402

COMMON: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "num_moe_experts": 4,
    "moe_ffn_hidden_size": 12, "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True, "bias_activation_fusion": False,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "bias of experts, shared experts": COMMON
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2}
    | {"moe_router_group_topk": 1, "moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True}
    | {"moe_router_load_balancing_type": "none"},
    "bias of quantiles": COMMON | {"moe_router_load_balancing_type": "quantile_balancing"},
}

TRACKER = "latest_checkpointed_iteration.txt"
LOCAL_NORM = "decoder.layers.mlp.linear_fc1.layer_norm_weight"


def megatron(name: str) -> Any:
    """A module of Megatron-Core. Imports of it warn of all that is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.{name}")


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, and Megatron's groups of it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    # Its attention draws a dropout mask, here of rate 0, from the state of a GPU.
    tracker = type(megatron("tensor_parallel").get_cuda_rng_tracker())
    monkeypatch.setattr(tracker, "fork", lambda self, name=None: contextlib.nullcontext())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    state = megatron("parallel_state")
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles some functions, which takes long
        state.initialize_model_parallel()
        yield
    state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def their_model(form: str) -> Any:
    """Megatron's model of a form, of its local specification, with random weights."""
    specs = megatron("models.gpt.gpt_layer_specs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = megatron("transformer.transformer_config").TransformerConfig(
            **FIELDS[form], activation_func=torch.nn.functional.silu
        )
        return (
            megatron("models.gpt")
            .GPTModel(
                config,
                specs.get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm"),
                vocab_size=32,
                max_sequence_length=16,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
            )
            .eval()
        )


@pytest.mark.filterwarnings("ignore")  # Megatron's own: of what is not installed, and of its arguments to come
@pytest.mark.parametrize("form", FIELDS)
def test_megatrons_model_loads_ours_and_is_loaded(form: str, one_process: None, tmp_path: Path) -> None:
    model, checkpoints = build(form), megatron("dist_checkpointing")
    save_megatron(model, tmp_path / "ours", format="torch_dist")
    theirs, folder = their_model(form), tmp_path / "ours" / "release"
    described = theirs.sharded_state_dict()
    for tensor in described.values():
        # The local specification names the norm before experts as if it were fused; ours is Transformer Engine's name.
        if tensor.key == LOCAL_NORM:
            tensor.key = "decoder.layers.pre_mlp_layernorm.weight"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, missing, unexpected = checkpoints.load({"model": described}, str(folder), strict="return_all")
    assert unexpected == set()
    assert all(name.endswith("_extra_state") for name in missing)  # of Transformer Engine's modules
    theirs.load_state_dict(loaded["model"])
    tokens = torch.tensor(np.asarray(TOKENS), dtype=torch.int64)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = theirs(tokens, torch.arange(8)[None], mask)
    model.eval()
    np.testing.assert_allclose(model(TOKENS), logits.numpy(), rtol=1e-4, atol=1e-5)  # fp32, other orders of sums

    # And back: what Megatron itself writes, beside the flags of the model.
    back = tmp_path / "theirs" / "release"
    back.mkdir(parents=True)
    shutil.copyfile(
        folder.parent / "latest_checkpointed_iteration.txt", back.parent / "latest_checkpointed_iteration.txt"
    )
    flags = read_torch_file(folder / "common.pt")
    state = {name: flags[name] for name in flags if name != "model"} | {"model": theirs.sharded_state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.save(state, str(back))
    assert_same(load_megatron(tmp_path / "theirs"), model)
