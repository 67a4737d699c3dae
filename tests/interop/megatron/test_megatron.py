"""Checkpoints of Megatron-LM: what is written is read, ranks and stages merged by Megatron's formulas, faults named."""

import contextlib
import logging
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.errors import CheckpointMismatchError
from jax_te.interop.megatron import load_megatron, read_megatron, save_megatron
from jax_te.interop.torch import read_torch_file, write_torch_file
from jax_te.layers import YarnScaling
from jax_te.models import GPTModel, MegatronGPTModel, Multipliers, RotaryPositions
from tests.support.distributed_folder import write_distributed
from tests.support.numerics import without_type_checker
from tests.support.runs import saved_step

SIZES = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False, "num_query_groups": 2}
FORMS = {
    "gpt2": ({}, "learned_absolute", True),
    "llama": (LLAMA, RotaryPositions(base=5e5, percent=0.5), False),
    "qk norms, exact gelu": (
        {"qk_layernorm": True, "activation": "gelu_exact", "layernorm_zero_centered_gamma": True, "kv_channels": 8}
        | {"add_bias_linear": False, "add_qkv_bias": True},
        "rope",
        False,
    ),
    "windows": ({"activation": "srelu", "window_size": (4, 0), "window_attn_skip_freq": (1, 0)}, "none", True),
}


def build(form, **sizes):
    changes, positions, tied = FORMS[form]
    return GPTModel(
        TransformerConfig(**SIZES | changes | sizes),
        vocab_size=32,
        max_sequence_length=16,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=tied,
        rngs=nnx.Rngs(0),
    )


def llama(**others):
    """The same weights under Megatron's names."""
    config = TransformerConfig(**SIZES | LLAMA)
    return MegatronGPTModel(
        config, None, 32, 16, position_embedding_type="rope", rotary_base=5e5, rotary_percent=0.5, rngs=nnx.Rngs(0)
    )


def assert_same(found, expected):
    one, two = (dict(nnx.to_flat_state(nnx.state(model, nnx.Param))) for model in (found, expected))
    assert one.keys() == two.keys()
    for path, variable in one.items():
        np.testing.assert_array_equal(variable[...], two[path][...], err_msg=str(path))


@pytest.mark.costly("llama")
@pytest.mark.wide("llama", "windows")
@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_written_and_read(form, tmp_path):
    model = build(form, num_layers=2)
    save_megatron(model, tmp_path / "two", tensor_parallel=2)
    again = load_megatron(tmp_path / "two")
    assert_same(again, model)
    save_megatron(model, tmp_path / "dist", format="torch_dist")
    assert_same(load_megatron(tmp_path / "dist"), model)
    assert (again.config, again.rotary) == (model.config, model.rotary)
    save_megatron(model, tmp_path / "one.pt", dtype=jnp.bfloat16)
    assert load_megatron(tmp_path / "one.pt").config.params_dtype == jnp.bfloat16


def test_the_folder_of_a_training_run_is_refused(tmp_path):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("1000")
    with pytest.raises(ValueError, match="names iteration 1000 of a training run"):
        save_megatron(build("llama", num_layers=1), tmp_path)
    assert [*tmp_path.iterdir()] == [tracker]
    assert tracker.read_text() == "1000"


@pytest.mark.parametrize("of", [".", "checkpoints", "checkpoints/4"])
@pytest.mark.parametrize("format", ["torch", "torch_dist"])
def test_the_folder_of_a_run_of_jax_te_is_refused(format, of, tmp_path):
    saved_step(tmp_path, 4)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"holds checkpoints of a run of jax_te.* give another folder"):
        save_megatron(build("llama", num_layers=1), tmp_path / of, format=format)
    assert sorted(tmp_path.rglob("*")) == before


WRITTEN = {"torch, 1 rank": {}, "torch, 2 ranks": {"tensor_parallel": 2}, "torch_dist": {"format": "torch_dist"}}


@pytest.mark.costly(
    "torch_dist-torch_dist",
    "torch, 2 ranks-torch_dist",
    "torch, 2 ranks-torch, 2 ranks",
    "torch_dist-torch, 1 rank",
    slow=(
        "torch, 1 rank-torch, 2 ranks",
        "torch, 1 rank-torch_dist",
        "torch, 2 ranks-torch, 1 rank",
        "torch_dist-torch, 2 ranks",
    ),
)
@pytest.mark.parametrize("second", WRITTEN)
@pytest.mark.parametrize("first", WRITTEN)
def test_a_folder_holds_one_checkpoint(first, second, tmp_path):
    """A second one, of any format and ranks, neither replaces the first in part nor is left out on loading."""
    one = build("llama", num_layers=1)
    save_megatron(one, tmp_path, **WRITTEN[first])
    two = build("llama", num_layers=1)
    two.output_kernel[...] += 1.0
    with pytest.raises(ValueError, match=r"release holds files already.*remove it, or give another folder"):
        save_megatron(two, tmp_path, **WRITTEN[second])
    assert_same(load_megatron(tmp_path), one)
    shutil.rmtree(tmp_path / "release")
    save_megatron(two, tmp_path, **WRITTEN[second])
    assert_same(load_megatron(tmp_path), two)


@pytest.mark.parametrize("format", ["torch", "torch_dist"])
def test_an_interrupted_write_leaves_nothing_that_is_read_or_in_the_way(format, tmp_path):
    model = build("llama", num_layers=1)

    def interrupt(done, _):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_megatron(model, tmp_path, format=format, on_progress=interrupt)
    with pytest.raises(ValueError, match="holds no checkpoint of Megatron-LM"):
        load_megatron(tmp_path)
    save_megatron(model, tmp_path, format=format)
    assert_same(load_megatron(tmp_path), model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_checkpointed_iteration.txt", "release"]


def test_folders_of_two_checkpoints_are_refused(tmp_path):
    model = build("llama", num_layers=1)
    save_megatron(model, tmp_path / "dist", format="torch_dist")
    save_megatron(model, tmp_path / "ranks")
    rank = tmp_path / "ranks" / "release" / "mp_rank_00"
    shutil.copytree(rank, tmp_path / "dist" / "release" / "mp_rank_00")
    shutil.copytree(rank, rank.with_name("mp_rank_00_000"))
    with pytest.raises(ValueError, match=r"two checkpoints: \.metadata of the format torch_dist, and mp_rank_00 of"):
        read_megatron(tmp_path / "dist")
    with pytest.raises(ValueError, match="two checkpoints: mp_rank_00 and mp_rank_00_000 are of the same"):
        read_megatron(tmp_path / "ranks")


def changed_rank(folder, rank, **change):
    """Changes what the file of a rank says beside its tensors."""
    path = folder / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
    state = read_torch_file(path)
    args = state["jax_te_args"] | change.pop("args", {})
    write_torch_file(path, state | {"jax_te_args": args} | change)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"iteration": 500}, "iteration is 0 in {0} and 500 in {1}"),
        ({"args": {"norm_epsilon": 1e-3}}, "the argument norm_epsilon is 1e-05 in {0} and 0.001 in {1}"),
        ({"args": {"rotary_base": 1e4}}, "the argument rotary_base is 500000.0 in {0} and 10000.0 in {1}"),
        ({"args": {"seed": 7}}, "the argument seed is absent in {0} and 7 in {1}"),
        ({"jax_te_args": None}, "and [0-9]+ more"),
    ],
)
def test_tensor_ranks_of_two_checkpoints_are_refused(change, differs, tmp_path):
    """Whose tensors fit each other."""
    save_megatron(build("llama", num_layers=1), tmp_path, tensor_parallel=2)
    changed_rank(tmp_path, 1, **change)
    files = [re.escape(str(tmp_path / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")) for rank in (0, 1)]
    for read in (read_megatron, load_megatron):
        with pytest.raises(CheckpointMismatchError, match="files of two checkpoints: .*" + differs.format(*files)):
            read(tmp_path)


def test_ranks_of_one_checkpoint_have_numbers_paths_and_logs_of_their_own(tmp_path):
    model = build("llama", num_layers=1)
    save_megatron(model, tmp_path, tensor_parallel=2)
    for rank in range(2):
        own = {"rank": rank, "local_rank": rank % 8, "eval_iters": [rank or None], "wandb_project": "ab"[rank]}
        changed_rank(tmp_path, rank, args=own | {"data_cache_path": f"/node{rank}", "adam_eps": float("nan")})
    assert_same(load_megatron(tmp_path), model)


def test_an_argument_that_is_given_need_not_be_that_of_all_files(tmp_path):
    save_megatron(build("llama", num_layers=1), tmp_path, tensor_parallel=2)
    changed_rank(tmp_path, 1, args={"rotary_base": 1e4})
    assert load_megatron(tmp_path, args={"rotary_base": 2e4}).rotary.base == 2e4


def test_arguments_that_are_given_and_not_read_are_named(tmp_path, caplog):
    save_megatron(build("llama", num_layers=1), tmp_path)
    assert load_megatron(tmp_path, args={"layernorm_epsilon": 1e-2}).config.layernorm_epsilon == 1e-2
    assert "in args= have no effect" not in caplog.text
    load_megatron(tmp_path, args={"rope_type": "yarn"})
    assert "in args= have no effect, alone or beside the others: rope_type" in caplog.text


def test_every_file_of_a_checkpoint_has_a_version_that_is_read(tmp_path):
    """In older ones queries, keys and values have another order."""
    save_megatron(build("llama", num_layers=1), tmp_path, tensor_parallel=2)
    changed_rank(tmp_path, 1, checkpoint_version=1.0)
    with pytest.raises(ValueError, match=r"mp_rank_01.* has version 1.0, in which"):
        read_megatron(tmp_path)


def test_stages_of_two_checkpoints_are_refused(tmp_path):
    stages = [{"decoder.layers.0.norm": np.full(2, stage)} for stage in range(2)]
    write_stages(tmp_path, *stages)
    for stage, iteration in enumerate((1000, 2000)):
        path = tmp_path / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt"
        write_torch_file(path, read_torch_file(path) | {"iteration": iteration})
    with pytest.raises(CheckpointMismatchError, match=r"iteration is 1000 in .*_000/.* and 2000 in .*_001/"):
        read_megatron(tmp_path)


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "expert"])
@pytest.mark.parametrize("stated", [1, 3])
def test_ranks_are_as_many_as_the_arguments_say(kind, stated, tmp_path):
    """The last ones may be missing, or left there by a save of more ranks."""
    name = f"{kind}_model_parallel_size"
    args = {"swiglu": False, "expert_model_parallel_size": 2 if kind == "expert" else 1, name: stated}
    for rank in range(2):
        number = {"tensor": f"{rank:02d}", "pipeline": f"00_{rank:03d}", "expert": f"00_000_{rank:03d}"}[kind]
        path = tmp_path / f"mp_rank_{number}" / "model_optim_rng.pt"
        path.parent.mkdir()
        write_torch_file(path, {"model": {"decoder.layers.0.layernorm.weight": np.ones(2)}, "jax_te_args": args})
    with pytest.raises(CheckpointMismatchError, match=f"2 {kind} ranks, and its arguments say {name} {stated}"):
        read_megatron(tmp_path)


def test_given_arguments_may_be_those_of_ranks_that_were_merged(tmp_path):
    model = build("llama", num_layers=1)
    save_megatron(model, tmp_path, tensor_parallel=2)
    found = read_megatron(tmp_path)
    write_torch_file(tmp_path / "alone.pt", {name: np.asarray(each) for name, each in found.tensors.items()})
    assert_same(load_megatron(tmp_path / "alone.pt", args=found.args), model)


@pytest.mark.costly
def test_names_and_layouts_are_those_of_a_megatron_model(tmp_path):
    """Whose state dict has its own description of the layouts."""
    model, named = build("llama"), llama()
    save_megatron(model, tmp_path / "a.pt")
    save_megatron(named, tmp_path / "b.pt")
    a, b = (read_torch_file(tmp_path / name)["model"] for name in ("a.pt", "b.pt"))
    expected = named.state_dict()
    assert a.keys() == b.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(a[name], array, err_msg=name)
        np.testing.assert_array_equal(b[name], array, err_msg=name)
    other = MegatronGPTModel(named.config, None, 32, 16, position_embedding_type="rope", rngs=nnx.Rngs(7))
    other.load_state_dict(read_megatron(tmp_path / "a.pt").tensors)
    assert_same(other, named)


def rank_of(name, array, rank):
    """What one of two tensor ranks of Megatron holds."""
    array = np.asarray(array)
    if "linear_fc1.weight" in name:
        return np.concatenate([np.split(half, 2)[rank] for half in np.split(array, 2)])
    if "linear_qkv.weight" in name or "word_embeddings" in name or "output_layer" in name:
        return np.split(array, 2)[rank]
    return np.split(array, 2, 1)[rank] if "proj.weight" in name or "fc2.weight" in name else array


def write_ranks(folder, weights, *, virtual=False, **more):
    """Two tensor ranks and two stages, each of two layers in one part or in two; norms and states as some versions."""
    args = {"swiglu": True, "iteration": "ignored"}
    for rank in range(2):
        for stage in range(2):
            parts = [[stage], [2 + stage]] if virtual else [[2 * stage, 2 * stage + 1]]
            models = []
            for at, layers in enumerate(parts):
                first, last = stage == at == 0, stage == 1 and at == len(parts) - 1
                model = {"decoder.layers.0.mlp.linear_fc1._extra_state": None}
                for name, array in weights.items():
                    ours = name.startswith("embedding") if first else False
                    ours |= last and name.startswith(("decoder.final", "output"))
                    pieces = name.split(".")
                    if pieces[1] == "layers" and int(pieces[2]) in layers:
                        pieces[2], ours = str(layers.index(int(pieces[2]))), True
                    if ours:
                        model[".".join(pieces)] = rank_of(name, array, rank)
                models.append(model)
            state = {f"model{i}": model for i, model in enumerate(models)} if virtual else {"model": models[0]}
            path = folder / "iter_0000012" / f"mp_rank_{rank:02d}_{stage:03d}" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            common = {"iteration": 12, "checkpoint_version": 3.0, "jax_te_args": args, "optimizer": {"step": 1}}
            write_torch_file(path, state | common | more)
    (folder / "latest_checkpointed_iteration.txt").write_text("12")


@pytest.mark.wide("False")
@pytest.mark.parametrize("virtual", [False, True])
def test_ranks_and_stages_are_merged(virtual, tmp_path, caplog):
    weights = llama().state_dict()
    write_ranks(tmp_path, weights, virtual=virtual)
    with caplog.at_level(logging.INFO, "jax_te"):
        found = read_megatron(tmp_path)
    assert "1 _extra_state" in caplog.text
    assert (found.iteration, found.args["swiglu"]) == (12, True)
    assert found.tensors.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(np.asarray(found.tensors[name]), array, err_msg=name)
    less = read_megatron(tmp_path, iteration=12, vocab_size=30).tensors
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        np.testing.assert_array_equal(np.asarray(less[name]), weights[name][:30])
    given = {"args": {"padded_vocab_size": 32, "max_position_embeddings": 16, "num_query_groups": 2, "swiglu": True}}
    given["args"] |= {"group_query_attention": True, "position_embedding_type": "rope", "rotary_base": 500000}
    given["args"] |= {**SIZES, "normalization": "RMSNorm", "add_bias_linear": False, "rotary_percent": 0.5}
    given["args"] |= {"untie_embeddings_and_output_weights": True}
    with jax.set_mesh(jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])):
        model = load_megatron(tmp_path, **given)
    assert_same(model, build("llama"))
    with pytest.raises(ValueError, match=r"mlp\.router\.weight is missing"):
        load_megatron(tmp_path, args=given["args"] | {"num_experts": 8})
    with pytest.raises(CheckpointMismatchError, match=r"(?s)not those of its arguments.*q_layernorm.weight is missing"):
        load_megatron(tmp_path, args=given["args"] | {"qk_layernorm": True})


def write_stages(folder, *stages):
    """One tensor rank; a stage's model, or the models of its virtual stages."""
    for number, models in enumerate(stages):
        path = folder / f"mp_rank_00_{number:03d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        parts = {"model": models} if isinstance(models, dict) else {f"model{i}": each for i, each in enumerate(models)}
        write_torch_file(path, parts | {"checkpoint_version": 3.0, "jax_te_args": {"swiglu": False}})


def layers_of(weights, stack, *numbers):
    """Tensors of these layers, which a stage counts from 0."""
    return {
        name.replace(f"{stack}.layers.{number}.", f"{stack}.layers.{own}."): array
        for own, number in enumerate(numbers)
        for name, array in weights.items()
        if name.startswith(f"{stack}.layers.{number}.")
    }


@pytest.mark.costly("False")
@pytest.mark.parametrize("virtual", [False, True])
def test_layers_that_predict_further_tokens_are_numbered_by_their_depth(virtual, tmp_path):
    """Whatever the layers of the stages before; the last stage has its own copy of the embedding."""
    sizes = {"num_layers": 4 if virtual else 2, "hidden_size": 16, "num_attention_heads": 2, "mtp_num_layers": 2}
    model = MegatronGPTModel(TransformerConfig(**sizes), None, 32, 16, rngs=nnx.Rngs(0))
    weights = {name: np.asarray(value) for name, value in model.state_dict().items() if "extra" not in name}
    embedding = {name: array for name, array in weights.items() if name.startswith("embedding")}
    last = {name: array for name, array in weights.items() if not name.startswith(("embedding", "decoder.layers"))}
    last |= {"embedding.word_embeddings.weight": weights["embedding.word_embeddings.weight"]}
    assert any(name.startswith("mtp.layers.1.") for name in last)
    layers = [layers_of(weights, "decoder", number) for number in range(sizes["num_layers"])]
    ends = (embedding | layers[0], layers[-1] | last)
    write_stages(tmp_path, *(([ends[0], layers[2]], [layers[1], ends[1]]) if virtual else ends))
    found = read_megatron(tmp_path).tensors
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(np.asarray(found[name]), array, err_msg=name)
    model.load_state_dict(found)


def test_each_stack_of_layers_is_numbered_by_itself_or_refused(tmp_path):
    """T5's and BERT's encoder like the decoder; others only where one stage has all layers."""
    norms = "decoder.layers.0.norm", "encoder.layers.0.norm"
    write_stages(tmp_path / "both", *({name: np.full(2, stage) for name in norms} for stage in range(2)))
    found = {name: int(np.asarray(value)[0]) for name, value in read_megatron(tmp_path / "both").tensors.items()}
    assert found == {name.replace("0", str(stage)): stage for name in norms for stage in range(2)}
    first = {"decoder.layers.0.norm": np.ones(2)}
    second = first | {"vision.decoder.layers.0.norm": np.ones(2)}
    write_stages(tmp_path / "one", second)
    assert read_megatron(tmp_path / "one").tensors.keys() == second.keys()
    write_stages(tmp_path / "unknown", first, second)
    with pytest.raises(ValueError, match=r"layers of 'vision.decoder', whose numbers in the model are not known"):
        read_megatron(tmp_path / "unknown")
    write_stages(tmp_path / "other", first | {"embedding.weight": np.ones(2)}, {"embedding.weight": np.zeros(2)})
    with pytest.raises(CheckpointMismatchError, match=r"embedding.weight must be the same on all pipeline stages"):
        read_megatron(tmp_path / "other")


def test_faults_of_a_folder_are_named(tmp_path):
    weights = llama().state_dict()
    write_ranks(tmp_path, weights)
    folder = tmp_path / "iter_0000012"
    with pytest.raises(ValueError, match=r"iter_0000013 is not there"):
        read_megatron(tmp_path, iteration=13)
    with pytest.raises(ValueError, match=r"vocab_size must be in \[1, 32\]"):
        read_megatron(tmp_path, vocab_size=33)
    second = folder / "mp_rank_01_000" / "model_optim_rng.pt"
    state = read_torch_file(second)
    faults = {
        "must be the same on all tensor ranks": {"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": 2.0},
        "which do not fit": {"decoder.layers.0.mlp.linear_fc2.weight": np.ones((16, 7), np.float32)},
        "not on all tensor ranks": {"decoder.layers.0.other": 1.0},
    }
    for message, change in faults.items():
        model = state["model"] | {
            name: value * np.ones(16, np.float32) if value in (1.0, 2.0) else value
            for name, value in change.items()
            if np.ndim(value) == 0
        }
        model |= {name: value for name, value in change.items() if np.ndim(value)}
        write_torch_file(second, state | {"model": model})
        with pytest.raises(ValueError, match=message):
            read_megatron(tmp_path)
    write_torch_file(second, state)
    for rank in range(2):
        file = folder / f"mp_rank_{rank:02d}_000" / "model_optim_rng.pt"
        model = read_torch_file(file)
        write_torch_file(file, model | {"model0": model["model"], "model1": {}, "model": None})
    with pytest.raises(CheckpointMismatchError, match="several numbers of virtual stages"):
        read_megatron(tmp_path)
    second.unlink()
    with pytest.raises(ValueError, match="not all of its ranks"):
        read_megatron(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../12")
    with pytest.raises(ValueError, match="neither an iteration nor release"):
        read_megatron(tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": {"language_model": {}}}, "no state dict 'model' of Megatron-Core"),
        ({"model": {"a.weight": "text"}}, r"no tensors that can be read: a.weight \('text'\)"),
        ({"model": {}, "checkpoint_version": 1.0}, "have another order"),
        ([1], "holds no state dict"),
    ],
)
def test_files_of_other_forms_are_refused(state, message, tmp_path):
    write_torch_file(tmp_path / "a.pt", state)
    with pytest.raises(ValueError, match=message):
        read_megatron(tmp_path / "a.pt")


def test_a_file_of_one_rank_may_be_a_state_dict_alone_with_norms_apart(tmp_path):
    norm = np.arange(3, dtype=np.float32)
    names = {"module.decoder.layers.0.input_layernorm.weight": norm, "decoder.layers.0.pre_mlp_layernorm.bias": norm}
    write_torch_file(tmp_path / "a.pt", names)
    assert list(read_megatron(tmp_path / "a.pt").tensors) == [
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_bias",
    ]


@pytest.mark.costly
def test_models_that_megatron_cannot_say_are_refused(tmp_path):
    model = build("llama")
    model.multipliers = Multipliers(embedding=4.0)
    with pytest.raises(ValueError, match=r"^Megatron-LM cannot represent this model: .*multipliers"):
        save_megatron(model, tmp_path)
    model.multipliers = Multipliers()
    model.rotary = RotaryPositions(scaling=YarnScaling(factor=2.0, original_max_position_embeddings=8))
    with pytest.raises(ValueError, match="position_embedding_type"):
        save_megatron(model, tmp_path)
    with pytest.raises(ValueError, match="does not divide 2 groups"):
        save_megatron(build("llama"), tmp_path, tensor_parallel=4)
    for name, options in (("a.pt", {"tensor_parallel": 2}), ("a", {"tensor_parallel": 2, "format": "torch_dist"})):
        with pytest.raises(ValueError, match="tensor_parallel must be >= 1, and 1 for a single file"):
            save_megatron(build("llama"), tmp_path / name, **options)
    with pytest.raises(ValueError, match="torch_dist needs a folder"):
        save_megatron(build("llama"), tmp_path / "a.pt", format="torch_dist")
    with (
        without_type_checker(),
        pytest.raises(ValueError, match=r"format must be one of .*, got 'zarr'"),
    ):
        save_megatron(build("llama"), tmp_path / "a", format="zarr")
    assert not list(tmp_path.iterdir())


@pytest.mark.costly("singleton-True", slow=("stacked-True",))
@pytest.mark.parametrize(("form", "common_file"), [("stacked", True), ("singleton", True), ("stacked", False)])
def test_torch_dist_is_read(form, common_file, tmp_path):
    """Layers stacked on an axis in front, in two rows and two columns of chunks; or each alone, its gate apart."""
    weights = {name: np.asarray(array) for name, array in llama().state_dict().items()}
    entries = {"optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": np.ones((4, 2), np.float32)}
    for name, array in weights.items():
        part = name.split(".", 3)
        if part[1] != "layers":
            entries[name] = array
        elif form == "stacked":
            stacked = [weights[f"decoder.layers.{i}.{part[3]}"] for i in range(4)]
            entries[f"decoder.layers.{part[3]}"] = np.stack(stacked)
        elif name.endswith("linear_fc1.weight"):
            entries[f"{name}_w"], entries[f"{name}_v"] = np.split(array, 2)
        else:
            entries[name] = array
    folder = tmp_path / "iter_0000012"
    others = {"decoder.layers.mlp.linear_fc1._extra_state/shard_0_4": [], "rng_state/shard_0.0_1.1": []}
    common = {"iteration": 12, "jax_te_args": {"swiglu": True}, "checkpoint_version": 3.0}
    if common_file:
        write_distributed(folder, entries, others)
        write_torch_file(folder / "common.pt", common)
    else:  # Megatron-Core 0.19
        write_distributed(folder, entries, others | {"common_state/shard_0_1": [common]})
    found = read_megatron(folder)
    assert (found.iteration, found.args, found.tensors.keys()) == (12, {"swiglu": True}, weights.keys())
    for name, array in weights.items():
        np.testing.assert_array_equal(np.asarray(found.tensors[name]), array, err_msg=name)


ODD = [None, "", "x", "1", b"1", -1, 0, 1, 7, 2**31, 2**70, 0.5, float("nan"), [], [1], {}, (None,), True, np.ones(2)]


@pytest.mark.slow
def test_any_arguments_of_a_checkpoint_are_followed_or_refused(tmp_path):
    save_megatron(build("llama"), tmp_path / "one.pt")
    args = read_megatron(tmp_path / "one.pt").args
    for i, name in enumerate(sorted(args)):
        for value in ODD[i % 8 :: 8]:
            with without_type_checker(), contextlib.suppress(ValueError, CheckpointMismatchError):
                load_megatron(tmp_path / "one.pt", args=args | {name: value})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"rotery_base": 5000.0}, r"'rotery_base' \(most alike: rotary_base"),
        ({"nonsense": 3}, "'nonsense'.*Correct them, or leave them out"),
        ({"moe_mlp_glu_interleave_size": 4}, "moe_mlp_glu_interleave_size is 4"),
        ({"use_grouped_gemm_for_dense_mlp": True}, "use_grouped_gemm_for_dense_mlp is True"),
        ({"activation_func_clamp_value": 7.0, "bias_swiglu_fusion": True}, "bias_swiglu_fusion is True; .* ignores"),
    ],
)
def test_arguments_that_are_misspelt_or_would_change_the_model_are_refused(args, message, tmp_path):
    save_megatron(build("llama", num_layers=1), tmp_path / "one.pt")
    with pytest.raises(ValueError, match=message):
        load_megatron(tmp_path / "one.pt", args=args)


@pytest.mark.costly("flags3-gelu_exact")
@pytest.mark.parametrize(
    ("flags", "activation"),
    [
        ({}, "gelu"),
        ({"add_bias_linear": False}, "gelu_exact"),
        ({"add_bias_linear": False, "use_te_activation_func": True}, "gelu"),
        ({"bias_gelu_fusion": False}, "gelu_exact"),
        ({"bias_gelu_fusion": False, "use_transformer_engine_op_fuser": True}, "gelu"),
        ({"lr": 0.1, "train_iters": 10}, "gelu"),  # of training: known, and without effect
    ],
)
def test_flags_choose_the_form_of_gelu(flags, activation, tmp_path):
    """Megatron-LM does not fuse biases that a model does not have."""
    bias = flags.get("add_bias_linear", True)
    save_megatron(build("gpt2", num_layers=1, add_bias_linear=bias), tmp_path / "one.pt")
    stored = read_torch_file(tmp_path / "one.pt")
    names = ("bias_gelu_fusion", "use_te_activation_func")
    stored["jax_te_args"] = {name: value for name, value in stored["jax_te_args"].items() if name not in names}
    write_torch_file(tmp_path / "one.pt", stored)
    assert load_megatron(tmp_path / "one.pt", args=flags).config.activation == activation


def test_one_argument_corrects_what_a_file_says_and_nothing_else(tmp_path):
    """Whether layers are gated is known from all arguments together: two ranks hold gate and factor in parts."""
    model = build("llama", num_layers=1)
    save_megatron(model, tmp_path, tensor_parallel=2)
    assert_same(load_megatron(tmp_path, args={"attention_dropout": 0.0}), model)
    with pytest.raises(ValueError, match=r"the checkpoint's arguments .*; leave hidden_size out of config"):
        load_megatron(tmp_path, config={"hidden_size": 8})
    with pytest.raises(TypeError, match=r"has no field 'compute_dtyp' .* Correct the name"):
        load_megatron(tmp_path, config={"compute_dtyp": "bfloat16"})
