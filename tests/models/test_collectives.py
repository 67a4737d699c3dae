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
from jax_te.models import Execution, GPTModel
from jax_te.sharding import make_mesh
from tests.support.meshes import shard, shardings

B, S, H, F, V = 8, 24, 32, 64, 128  # no other size is 24: what has it is an activation, or a table of positions
HEADS = 8
COLLECTIVE = re.compile(r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
ARRAY = re.compile(r"\w+\[[\d,]*\]")
MERGES = jax.__version_info__ < (0, 11)
"""Whether the CPU compiler drops the barrier in front of backward's collectives, and takes forward's of the same array
in their place.
"""
FORMS = {
    "gpt2": {},
    "llama": {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False},
}


def build(form: str, loss_chunks: int = 1, fields: dict[str, Any] | None = None) -> GPTModel:
    """A one-layer model whose configuration has ``fields``."""
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": H, "num_attention_heads": HEADS, "ffn_hidden_size": F}
    options: dict[str, Any] = {"vocab_size": V, "max_sequence_length": S, **FORMS[form]}
    options["execution"] = Execution(loss_chunks=loss_chunks)
    return GPTModel(TransformerConfig(**sizes, **fields or {}), rngs=nnx.Rngs(0), **options)


def collectives(
    form: str, loss_chunks: int = 1, fields: dict[str, Any] | None = None, **sizes: int
) -> Counter[tuple[str, str]]:
    """Kind and shape of every array that a collective gives in the loss and gradient of `build`'s model on an Auto
    mesh; it is given a key for dropout.
    """
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))):
        model = shard(build(form, loss_chunks, fields))
        graphdef, state = nnx.split(model)
        tokens = jnp.zeros((B, S), jnp.int32)
        key = jax.random.key(0)
        gradient = jax.grad(lambda state: nnx.merge(graphdef, state).loss(tokens, tokens, dropout_key=key))
        text = jax.jit(gradient, out_shardings=shardings(model)).lower(state).compile().as_text()
    # The compiler may have made one collective of several.
    return Counter((kind, array) for result, kind in COLLECTIVE.findall(text) for array in ARRAY.findall(result))


def float32(*shape: int) -> str:
    return f"f32[{','.join(map(str, shape))}]"


@pytest.mark.slow
@pytest.mark.wide("gpt2")
@pytest.mark.parametrize("form", FORMS)
def test_tensor_parallelism_sums_activations_where_megatron_does(form: str) -> None:
    """Forward: embedding, attention, MLP. Backward: attention, MLP, head. And maximum and sum of the cross-entropy."""
    assert collectives(form, tensor=4) == {
        ("all-reduce", f"f32[{B},{S},{H}]"): 6,
        ("all-reduce", f"f32[{B},{S}]"): 2,
    }


@pytest.mark.costly
@pytest.mark.wide("gpt2")
@pytest.mark.parametrize("form", FORMS)
def test_sequence_parallelism_gathers_and_scatters_in_place_of_sums(form: str) -> None:
    """Gathered in forward: what attention, MLP and head read; in backward: the gradients of what attention, MLP and
    embedding gave. Scattered: what attention and MLP gave, and the gradients of what attention, MLP and head read. The
    embedding is summed whole, and split after that. The MLP's two in each direction are of rows, along the first axis.
    """
    found = collectives(form, fields={"sequence_parallel": True, "tensor_model_parallel_size": 4}, tensor=4)
    expected = {
        ("all-gather", float32(B, S, H)): 4,
        ("all-gather", float32(B * S, H)): 2,
        ("reduce-scatter", float32(B, S // 4, H)): 3,
        ("reduce-scatter", float32(B * S // 4, H)): 2,
        ("all-reduce", float32(B, S, H)): 1,
        ("all-reduce", float32(B, S)): 2,  # maximum and sum of the cross-entropy
        ("all-reduce", float32(H)): 8,  # gradients of scale and bias of three norms, and of two biases after sums
    }
    positions = {("all-gather", float32(S, H)): 1}
    assert found == expected | (positions if form == "gpt2" else {})


@pytest.mark.slow
@pytest.mark.wide("gpt2")
@pytest.mark.parametrize("form", FORMS)
def test_fsdp_gathers_parameters_and_leaves_activations_alone(form: str) -> None:
    """Kernels are gathered in each direction, their gradients scattered over the fsdp ranks and then summed over the
    data ranks. Embeddings are gathered in forward; their gradients are summed whole.
    """
    found = collectives(form, data=2, fsdp=2, tensor=2)
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce", "reduce-scatter"}
    local = float32(B // 4, S, H)
    with_tokens = {key: n for key, n in found.items() if re.search(rf"\[{B // 4},{S}[,\]]|\[{B},{S}[,\]]", key[1])}
    assert with_tokens == {("all-reduce", local): 6, ("all-reduce", float32(B // 4, S)): 2}

    # A tensor rank's query/key/value, projection, the MLP's two, and head.
    kernels = [(H, 3, H // 2), (H // 2, H), (H, 1, F // 2), (F // 2, H), (H, V // 2)]
    parts = [(H // 2, 3, H // 2), (H // 4, H), (H // 2, 1, F // 2), (F // 4, H), (H // 2, V // 2)]
    embeddings = [(V // 2, H), *([(S, H)] if form == "gpt2" else [])]
    gathers = Counter({float32(*shape): 1 if MERGES else 2 for shape in kernels})
    assert of_kind(found, "all-gather") == gathers + Counter(float32(*shape) for shape in embeddings)
    assert of_kind(found, "reduce-scatter") == Counter(float32(*shape) for shape in parts)
    sums = of_kind(found, "all-reduce")
    assert all(sums[float32(*shape)] == 1 for shape in (*parts, *embeddings))


def of_kind(found: Counter[tuple[str, str]], kind: str) -> Counter[str]:
    return Counter({shape: count for (other, shape), count in found.items() if other == kind})


@pytest.mark.costly
def test_a_loss_in_parts_is_vocabulary_parallel_too() -> None:
    """No rank ever has the head's kernel, the embedding or the logits of more than its part of the vocabulary."""
    assert collectives("llama", loss_chunks=2, tensor=4) == {
        ("all-reduce", f"f32[{B},{S},{H}]"): 5,
        ("all-reduce", f"f32[{B},{S // 2},{H}]"): 1,  # the head's, once for each part
        ("all-reduce", f"f32[{B},{S // 2}]"): 2,
    }


@pytest.mark.slow
@pytest.mark.wide("1-fields2")
@pytest.mark.parametrize(
    ("loss_chunks", "fields"), [(1, {}), (2, {}), (1, {"cp_load_balanced": True, "hidden_dropout": 0.1})]
)
def test_context_parallelism_communicates_in_attention_alone(loss_chunks: int, fields: dict[str, Any]) -> None:
    """And once for the gradient of each parameter: hidden states and logits stay where they are, in zig-zag order and
    with dropout. Around the ring of four, in forward, keys with values go three times; in backward once alone, twice
    beside the gradients of those before them, which go twice alone.
    """
    found = collectives("llama", loss_chunks, fields, context=4)
    keys = (B, S // 4, HEADS, H // HEADS)
    assert of_kind(found, "collective-permute") == {float32(2, *keys): 5 if MERGES else 6, float32(4, *keys): 2}
    parameters = jax.tree.leaves(nnx.eval_shape(lambda: nnx.state(build("llama"), nnx.Param)))
    reduced = Counter(float32(*parameter.shape) for parameter in parameters)
    if "cp_load_balanced" in fields:
        reduced[float32()] += 1  # how many tokens count: the labels in zig-zag order are sharded, too
    assert of_kind(found, "all-reduce") == reduced
    assert {kind for kind, _ in found} == {"collective-permute", "all-reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_gather", "a2a"])
def test_other_ways_of_context_parallelism_do_too(kind: str) -> None:
    """Gathered: keys and values in each direction, whose gradients are scattered. Exchanged: queries, keys and values
    before, the output after, and their gradients; each is of four pieces in the program.
    """
    found = collectives("llama", fields={"cp_comm_type": kind}, context=4)
    moves = {key: count for key, count in found.items() if key[0] != "all-reduce"}
    if kind == "all_gather":
        whole, part = float32(B, S, HEADS, H // HEADS), float32(B, S // 4, HEADS, H // HEADS)
        assert moves == {("all-gather", whole): 2 if MERGES else 4, ("reduce-scatter", part): 2}
    else:
        assert moves == {("all-to-all", float32(B, S // 4, HEADS // 4, H // HEADS)): 4 * 8}
    parameters = jax.tree.leaves(nnx.eval_shape(lambda: nnx.state(build("llama"), nnx.Param)))
    assert of_kind(found, "all-reduce") == Counter(float32(*parameter.shape) for parameter in parameters)
