"""Models with experts in checkpoints of Megatron-LM: both formats, both forms of experts, expert ranks."""

from __future__ import annotations

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.errors import CheckpointMismatchError
from jax_te.interop.megatron import load_megatron, read_megatron, save_megatron
from jax_te.interop.torch import read_torch_file, write_torch_file
from jax_te.models import GPTModel, MegatronGPTModel, RotaryPositions
from jax_te.quantize import QuantizerState

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "num_moe_experts": 4}
SIZES |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
GATED = {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False, "moe_ffn_hidden_size": 12}
FORMS: dict[str, dict[str, Any]] = {
    "biases": {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0, "activation": "qgeglu"},
    "bias of experts, shared experts": GATED
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2}
    | {"moe_router_group_topk": 1, "moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True},
    "bias of quantiles": GATED | {"moe_router_load_balancing_type": "quantile_balancing"},
    "latent, dense first": GATED | {"moe_latent_size": 8, "moe_layer_freq": [0, 1], "moe_aux_loss_coeff": 0.01},
}
TOKENS = jax.random.randint(jax.random.key(1), (2, 8), 0, 32)


def build(form: str) -> GPTModel:
    model = GPTModel(
        TransformerConfig(**SIZES | FORMS[form]),
        vocab_size=32,
        max_sequence_length=16,
        position_embedding_type=RotaryPositions(),
        share_embeddings_and_output_weights=False,
        rngs=nnx.Rngs(0),
    )
    for layer in model.layers:
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if getattr(router, "expert_bias", None) is not None:
            router.expert_bias[...] = jnp.array([0.3, -0.2, 0.1, 0.0])
        if getattr(router, "quantile_bias", None) is not None:
            router.quantile_bias[...] = jnp.array([0.3, -0.2, 0.1, -0.2, 0.0])
    return model


def stored(model: nnx.Module) -> dict[Any, Any]:
    """Parameters and biases of experts, those of quantile balancing, too."""

    def chosen(path: Any, variable: Any) -> bool:
        return isinstance(variable, nnx.Param) or path[-1] in ("expert_bias", "quantile_bias")

    return {path: np.asarray(variable[...]) for path, variable in nnx.to_flat_state(nnx.state(model, chosen))}


def assert_same(found: nnx.Module, expected: nnx.Module) -> None:
    one, two = stored(found), stored(expected)
    assert one.keys() == two.keys()
    for path, array in one.items():
        np.testing.assert_array_equal(array, two[path], err_msg=str(path))


@pytest.mark.costly("latent, dense first", slow=("biases", "bias of experts, shared experts"))
@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_written_and_read(form: str, tmp_path: Any) -> None:
    model = build(form)
    save_megatron(model, tmp_path / "two", tensor_parallel=2)
    again = load_megatron(tmp_path / "two")
    assert_same(again, model)
    assert again.config == model.config
    save_megatron(model, tmp_path / "dist", format="torch_dist")
    assert_same(load_megatron(tmp_path / "dist"), model)


@pytest.mark.costly
def test_what_megatrons_sinkhorn_does_not_read_is_left_out(tmp_path: Any) -> None:
    """A config would refuse it; Megatron computes the same with any value."""
    model = build("biases")
    save_megatron(model, tmp_path)
    flags = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_pre_softmax": True}
    config = load_megatron(tmp_path, args=flags | {"moe_router_score_function": "sigmoid"}).config
    assert config.moe_router_load_balancing_type == "sinkhorn"
    assert (config.moe_router_pre_softmax, config.moe_router_score_function) == (False, "softmax")


@pytest.mark.costly("sinkhorn")
@pytest.mark.parametrize("balancing", ["sinkhorn", "quantile_balancing"])
def test_an_expert_bias_that_megatron_does_not_read_is_left_out(balancing: str, tmp_path: Any) -> None:
    """Its router has the tensor, and goes on counting for it, but chooses without."""
    model = build("bias of quantiles")
    save_megatron(model, tmp_path / "one.pt")
    state = read_torch_file(tmp_path / "one.pt")
    for number in range(2):
        router = f"decoder.layers.{number}.mlp.router"
        state["model"][f"{router}.expert_bias"] = np.ones(4, np.float32)
        if balancing == "sinkhorn":
            del state["model"][f"{router}.qb_beta"]
    given = {"moe_router_load_balancing_type": balancing, "moe_router_score_function": "sigmoid"}
    state["jax_te_args"] |= given | {"moe_router_enable_expert_bias": True}
    write_torch_file(tmp_path / "one.pt", state)
    found = load_megatron(tmp_path / "one.pt")
    assert not found.config.moe_router_enable_expert_bias
    assert {path[-1] for path in stored(found)}.isdisjoint({"expert_bias"})
    if balancing == "quantile_balancing":
        assert_same(found, model)
    with pytest.raises(CheckpointMismatchError, match=r"router\.expert_bias is unexpected"):
        load_megatron(tmp_path / "one.pt", args={"moe_router_enable_expert_bias": False})


@pytest.mark.costly("torch")
@pytest.mark.parametrize("format", ["torch", "torch_dist"])
def test_a_bias_of_experts_stays_fp32_in_a_checkpoint_of_another_dtype(format: Any, tmp_path: Any) -> None:
    model = build("bias of experts, shared experts")
    save_megatron(model, tmp_path, format=format, dtype=jnp.bfloat16)
    dtypes = {name: np.dtype(tensor.dtype) for name, tensor in read_megatron(tmp_path).tensors.items()}
    wide = {name for name, dtype in dtypes.items() if dtype == np.float32}
    assert wide == {f"decoder.layers.{i}.mlp.router.expert_bias" for i in range(2)}
    again = load_megatron(tmp_path)
    assert again.config.params_dtype == jnp.bfloat16
    for found, layer in zip(again.layers, model.layers, strict=True):
        np.testing.assert_array_equal(found.mlp.router.expert_bias[...], layer.mlp.router.expert_bias[...])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bias of experts, shared experts", "bias of quantiles"])
def test_names_and_layouts_are_those_of_a_megatron_model(form: str, tmp_path: Any) -> None:
    """The same weights in Megatron's modules give the same output."""
    model = build(form)
    save_megatron(model, tmp_path)
    named = MegatronGPTModel(model.config, None, 32, 16, position_embedding_type="rope", rngs=nnx.Rngs(1))
    tensors = read_megatron(tmp_path).tensors
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in tensors
    assert named.load_state_dict(tensors, strict=False).unexpected_keys == []
    model.eval()
    named.eval()
    logits = model(TOKENS)
    found = named(TOKENS, jnp.arange(8), None)
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)  # fp32, other orders of sums
    save_megatron(named, tmp_path / "again")
    assert_same(load_megatron(tmp_path / "again"), model)


def rank_of(state: dict[str, Any], rank: int, ranks: int, *, sequential: bool) -> dict[str, Any]:
    """The state dict of one expert-parallel rank: its own experts, numbered from 0, and everything else."""
    found, each = {}, 4 // ranks
    for name, tensor in state.items():
        layer, inside, rest = name.partition(".mlp.experts.")
        if not inside:
            found[name] = tensor
            continue
        number = int(rest[-1])
        if number // each == rank:
            own = rest[:-1]
            place = f"local_experts.{number % each}.{own}" if sequential else f"{own}{number % each}"
            found[f"{layer}{inside}{place}"] = tensor
    return found


@pytest.mark.costly("False")
@pytest.mark.parametrize("sequential", [False, True])
def test_expert_ranks_are_merged(sequential: bool, tmp_path: Any) -> None:
    model = build("bias of experts, shared experts")
    save_megatron(model, tmp_path / "one")
    state = read_torch_file(tmp_path / "one" / "release" / "mp_rank_00" / "model_optim_rng.pt")
    arguments = {**state["jax_te_args"], "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    shutil.copyfile(tmp_path / "one" / "latest_checkpointed_iteration.txt", tmp_path / "tracker")
    for rank in range(2):
        folder = tmp_path / "two" / "release" / f"mp_rank_00_{rank:03d}"
        folder.mkdir(parents=True)
        part = rank_of(state["model"], rank, 2, sequential=sequential)
        write_torch_file(folder / "model_optim_rng.pt", {**state, "jax_te_args": arguments, "model": part})
    shutil.copyfile(tmp_path / "tracker", tmp_path / "two" / "latest_checkpointed_iteration.txt")
    assert_same(load_megatron(tmp_path / "two"), model)
    shutil.rmtree(tmp_path / "two" / "release" / "mp_rank_00_001")
    with pytest.raises(ValueError, match="missing"):
        load_megatron(tmp_path / "two")


def test_the_state_of_a_router_is_not_a_parameter() -> None:
    model = build("bias of experts, shared experts")
    bias = dict(nnx.to_flat_state(nnx.state(model, QuantizerState)))
    assert any(path[-1] == "expert_bias" for path in bias)


@pytest.mark.costly(
    "change0-None", slow=("change2-expert_model_paralel_size' \\\\(most alike: expert_model_parallel_size",)
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"expert_tensor_parallel_size": 2}, "experts of 2 tensor ranks beside 1"),
        (
            {"expert_model_parallel_size": 3, "expert_model_paralel_size": 2},
            r"expert_model_paralel_size' \(most alike: expert_model_parallel_size",
        ),
    ],
)
def test_given_arguments_tell_expert_ranks_from_stages(change: Any, message: Any, tmp_path: Any) -> None:
    """Files without arguments: of names with two numbers the second may be either."""
    model = build("bias of experts, shared experts")
    save_megatron(model, tmp_path / "one.pt")
    state = read_torch_file(tmp_path / "one.pt")
    args = state.pop("jax_te_args") | {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 1} | change
    for rank in range(2):
        (tmp_path / f"mp_rank_00_{rank:03d}").mkdir()
        part = state | {"model": rank_of(state["model"], rank, 2, sequential=False)}
        write_torch_file(tmp_path / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt", part)
    if message is None:
        assert_same(load_megatron(tmp_path, args=args), model)
    else:
        with pytest.raises(ValueError, match=message):
            load_megatron(tmp_path, args=args)


def write_ranks(folder: Any, state: dict[str, Any], change: Any = lambda rank, part: None) -> Any:
    """A checkpoint of two expert ranks; ``change`` is called with each one's tensors."""
    arguments = {**state["jax_te_args"], "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    for rank in range(2):
        place = folder / f"mp_rank_00_{rank:03d}"
        place.mkdir(parents=True)
        part = rank_of(state["model"], rank, 2, sequential=False)
        change(rank, part)
        write_torch_file(place / "model_optim_rng.pt", {**state, "jax_te_args": arguments, "model": part})
    return folder


@pytest.mark.costly
def test_expert_ranks_that_do_not_agree_are_refused(tmp_path: Any) -> None:
    """Files of different steps, with an expert too many or too few, or with one under both names."""
    save_megatron(build("bias of experts, shared experts"), tmp_path / "one.pt")
    state = read_torch_file(tmp_path / "one.pt")
    mlp = "decoder.layers.1.mlp"
    bias, kernel = f"{mlp}.router.expert_bias", f"{mlp}.experts.linear_fc1.weight"

    def of_another_step(rank: int, part: dict[str, Any]) -> None:
        part[bias] = part[bias] + rank

    def without_one(rank: int, part: dict[str, Any]) -> None:
        for name in [name for name in part if rank and ".experts.linear" in name and name.endswith("1")]:
            del part[name]

    def with_a_gap(rank: int, part: dict[str, Any]) -> None:
        part[f"{kernel}2"] = part.pop(f"{kernel}1")

    def twice(rank: int, part: dict[str, Any]) -> None:
        part[f"{mlp}.experts.local_experts.0.linear_fc1.weight"] = part[f"{kernel}0"] + 1

    def other_layers(rank: int, part: dict[str, Any]) -> None:
        if rank:
            del part["decoder.final_layernorm.weight"]

    for number, (change, match) in enumerate(
        [
            (of_another_step, f"{bias} must be the same on all expert ranks, and differs on ranks 0 and 1"),
            (without_one, "linear_fc1.weight1 on rank 0 alone"),
            (with_a_gap, "weightN are not numbered from 0 to 1"),
            (twice, "experts twice, grouped and one by one: .*local_experts.0.linear_fc1.weight"),
            (other_layers, "final_layernorm.weight on rank 0 alone"),
        ]
    ):
        with pytest.raises(CheckpointMismatchError, match=match):
            read_megatron(write_ranks(tmp_path / str(number), state, change))
