"""What tensor parallelism and FSDP communicate is what Megatron communicates, and nothing else."""

from __future__ import annotations

import re
from collections import Counter

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


def collectives(form: str, **sizes: int) -> Counter[tuple[str, str]]:
    """Kind and shape of every collective in the loss and gradient of a one-layer model on an Auto mesh."""
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=8, ffn_hidden_size=64)
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))):
        model = shard(GPTModel(config, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0), **FORMS[form]))
        graphdef, state = nnx.split(model)
        tokens = jnp.zeros((B, S), jnp.int32)
        gradient = jax.grad(lambda state: nnx.merge(graphdef, state).loss(tokens, tokens))
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
