"""What tensor parallelism and FSDP communicate is what Megatron communicates, and nothing else."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.models import GPTModel
from jax_te.parallel import make_mesh
from tests.meshes import shard, shardings

B, S, H, V = 8, 24, 32, 128  # no other size is 24: what has it is an activation
COLLECTIVE = re.compile(r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
FORMS = {
    "gpt2": {},
    "llama": {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False},
}


def collectives(
    form: str, loss_chunks: int = 1, fields: dict[str, Any] | None = None, **sizes: int
) -> Counter[tuple[str, str]]:
    """Kind and shape of every collective in the loss and gradient of a one-layer model on an Auto mesh, whose
    configuration has ``fields``; it is given a key for dropout.
    """
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=8, ffn_hidden_size=64, **fields or {})
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))):
        options: Any = {"vocab_size": V, "max_sequence_length": S, "loss_chunks": loss_chunks, **FORMS[form]}
        model = shard(GPTModel(config, rngs=nnx.Rngs(0), **options))
        graphdef, state = nnx.split(model)
        tokens = jnp.zeros((B, S), jnp.int32)
        key = jax.random.key(0)
        gradient = jax.grad(lambda state: nnx.merge(graphdef, state).loss(tokens, tokens, dropout_key=key))
        text = jax.jit(gradient, out_shardings=shardings(model)).lower(state).compile().as_text()
    return Counter((kind, re.sub(r"\{[^}]*\}", "", shape)) for shape, kind in COLLECTIVE.findall(text))


@pytest.mark.parametrize("form", FORMS)
def test_tensor_parallelism_sums_activations_where_megatron_does(form: str) -> None:
    """Forward: embedding, attention, MLP. Backward: attention, MLP, head. And maximum and sum of the cross-entropy."""
    assert collectives(form, tensor=4) == {
        ("all-reduce", f"f32[{B},{S},{H}]"): 6,
        ("all-reduce", f"f32[{B},{S}]"): 2,
    }


@pytest.mark.parametrize("form", FORMS)
def test_fsdp_gathers_parameters_and_leaves_activations_alone(form: str) -> None:
    found = collectives(form, data=2, fsdp=2, tensor=2)
    assert {kind for kind, _ in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
    local = f"f32[{B // 4},{S},{H}]"
    assert found["all-reduce", local] == 6
    with_tokens = {(kind, shape) for kind, shape in found if re.search(rf"\[{B // 4},{S}[,\]]|\[{B},{S}[,\]]", shape)}
    assert with_tokens == {("all-reduce", local), ("all-reduce", f"f32[{B // 4},{S}]")}


def test_a_loss_in_parts_is_vocabulary_parallel_too() -> None:
    """No rank ever has the head's kernel, the embedding or the logits of more than its part of the vocabulary."""
    assert collectives("llama", loss_chunks=2, tensor=4) == {
        ("all-reduce", f"f32[{B},{S},{H}]"): 5,
        ("all-reduce", f"f32[{B},{S // 2},{H}]"): 1,  # the head's, once for each part
        ("all-reduce", f"f32[{B},{S // 2}]"): 2,
    }


@pytest.mark.parametrize(
    ("loss_chunks", "fields"), [(1, {}), (2, {}), (1, {"cp_load_balanced": True, "hidden_dropout": 0.1})]
)
def test_context_parallelism_communicates_in_attention_alone(loss_chunks: int, fields: dict[str, Any]) -> None:
    """And once for the gradients: hidden states and logits stay where they are, in zig-zag order and with dropout."""
    found = collectives("llama", loss_chunks, fields, context=4)
    moved = [shape for kind, shape in found if kind != "all-reduce" and re.search(rf"\d,(1,)?({H}|{V})\]", shape)]
    assert not moved
    assert not [shape for kind, shape in found if kind == "all-reduce" and re.search(rf"f32\[{B},\d+,\d+\]", shape)]
