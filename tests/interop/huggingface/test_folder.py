"""Folders in the form of Hugging Face, without its library: what is read, how much of it, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_te._processes import Meetings
from jax_te.cli.main import main
from jax_te.config import TransformerConfig
from jax_te.errors import CheckpointMismatchError
from jax_te.interop.huggingface import ARCHITECTURES, load_huggingface, save_huggingface
from jax_te.interop.huggingface import save as save_module
from jax_te.interop.huggingface.architectures.registry import read_form
from jax_te.interop.huggingface.config_json import ConfigJson
from jax_te.interop.huggingface.safetensors import TensorFile, write_file
from jax_te.interop.tables import Entry
from jax_te.layers import LinearScaling, LoRA
from jax_te.models import BertModel, Execution, GPTModel, RotaryPositions
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, autocast
from jax_te.sharding import shardings_of
from tests.support.meshes import use_mesh
from tests.support.numerics import assert_bitwise, assert_close, quick_jit, without_type_checker
from tests.support.runs import saved_step

LLAMA: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
    "normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False,
}  # fmt: skip


def llama(rotary: RotaryPositions | str = "rope", **changes: Any) -> GPTModel:
    config = TransformerConfig(**LLAMA | changes)
    return GPTModel(
        config,
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type=rotary,
        share_embeddings_and_output_weights=False,
        rngs=nnx.Rngs(0),
    )


def params_of(model: Any) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_huggingface(llama(), path, max_shard_size=20_000)
    return path


def copied(folder: Path, to: Path) -> Path:
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# --- what is written is read


@pytest.mark.costly
def test_a_model_is_what_was_written(folder: Path) -> None:
    model, back = llama(), load_huggingface(folder)
    jax.tree.map(assert_bitwise, params_of(back), params_of(model))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    for name in files:
        tensors = TensorFile(folder / name).tensors
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 20_000
        assert not any(tensor.flags.writeable for tensor in tensors.values())


def test_a_save_reports_each_parameter_up_to_the_last(tmp_path: Path) -> None:
    model, seen = llama(), list[tuple[int, int]]()
    save_huggingface(model, tmp_path, on_progress=lambda *done: seen.append(done))
    count = len(jax.tree.leaves(params_of(model)))
    assert seen == [(done, count) for done in range(1, count + 1)]


def test_a_second_save_takes_the_place_of_the_first(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path)
    (tmp_path / "model-card.safetensors").touch()  # not ours
    model = jax.tree.map(lambda x: x + 1.0, load_huggingface(tmp_path))
    save_huggingface(model, tmp_path)  # into the folder that it was read from
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model-card.safetensors",
        "model.safetensors",
    ]
    jax.tree.map(assert_bitwise, params_of(load_huggingface(tmp_path)), params_of(model))
    save_huggingface(model, tmp_path, max_shard_size=20_000)
    assert not (tmp_path / "model.safetensors").exists()
    jax.tree.map(assert_bitwise, params_of(load_huggingface(tmp_path)), params_of(model))


@pytest.mark.costly("write_text", slow=("unlink",))
@pytest.mark.parametrize("method", ["replace", "unlink", "write_text"])
def test_an_interrupted_save_leaves_no_tensors_under_the_configuration_of_others(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file was exchanged last: the folder holds the old model, or the new one, or none."""
    old = llama(RotaryPositions(base=5e5))
    new = jax.tree.map(lambda x: x + 1.0, llama(RotaryPositions(base=1e4)))
    real, found = getattr(Path, method), list[str]()
    for stop in range(20):
        path = tmp_path / str(stop)
        save_huggingface(old, path, max_shard_size=20_000)
        calls = iter(range(stop))

        def interrupted(self: Path, *args: Any, calls: Any = calls, **options: Any) -> Any:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return real(self, *args, **options)

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(Path, method, interrupted)
            save_huggingface(new, path)
        try:
            loaded = load_huggingface(path)
        except ValueError:
            found.append("none")
            continue
        saved = {5e5: ("old", old), 1e4: ("new", new)}[loaded.rotary.base]
        jax.tree.map(assert_bitwise, params_of(loaded), params_of(saved[1]))
        found.append(saved[0])
        if saved[0] == "new":
            break
    assert found[-1] == "new"


@pytest.mark.wide("explicit")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_on_a_mesh_each_device_gets_its_part(folder: Path, tmp_path: Path, mode: str) -> None:
    model = llama()
    tokens = jnp.arange(32, dtype=jnp.int32).reshape(4, 8)
    run = quick_jit(lambda model, tokens: model(tokens))
    expected = run(model, tokens)
    with use_mesh(mode):
        sharded = load_huggingface(folder, config={"sequence_parallel": True, "tensor_model_parallel_size": 2})
        state = nnx.state(sharded, nnx.Param)
        places = shardings_of(state, jax.sharding.get_mesh())
        leaves = jax.tree.leaves(state)
        assert [leaf.sharding for leaf in leaves] == places
        assert any(leaf.addressable_shards[0].data.size == leaf.size // 4 for leaf in leaves)
        assert_close(run(sharded, tokens), expected, 2.0**-18)
        save_huggingface(sharded, tmp_path)
    jax.tree.map(assert_bitwise, params_of(load_huggingface(tmp_path)), params_of(model))


def test_a_part_is_read_alone() -> None:
    """Any part of a fused kernel is the same part of the whole, of three tensors or of three parts of one."""
    sizes = {"g": 3, "r": 2, "d": 4, "h": 5}
    entry = Entry.of({"q": "(g r d) h -> h r (g d)", "k": "(g d) h -> h 1 (g d)", "v": "(g d) h -> h 1 (g d)"})
    fused = Entry.of({"qkv": "(g r d) h -> h r (g d) | (g d) h -> h 1 (g d) | (g d) h -> h 1 (g d)"})
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape) for name, shape in entry.their_shapes(sizes).items()}
    whole = entry.read(tensors, sizes, (slice(None),) * 3, np.dtype("float64"))
    q = tensors["q"].reshape(3, 2, 4, 5)
    for g in range(3):
        for r in range(2):
            np.testing.assert_array_equal(whole[:, r, 4 * g : 4 * g + 4], q[g, r].T)
    np.testing.assert_array_equal(whole[:, 2], tensors["k"].T)
    np.testing.assert_array_equal(whole[:, 3], tensors["v"].T)
    for name, array in entry.write(whole, sizes):
        np.testing.assert_array_equal(array, tensors[name])
    one = {"qkv": np.concatenate([*tensors.values()])}
    assert fused.their_shapes(sizes) == {"qkv": one["qkv"].shape}
    ((name, array),) = fused.write(whole, sizes)
    np.testing.assert_array_equal(array, one[name])
    for _ in range(50):
        index = tuple(slice(*sorted(rng.integers(0, size + 1, 2))) for size in whole.shape)
        np.testing.assert_array_equal(entry.read(tensors, sizes, index, np.dtype("float64")), whole[index])
        np.testing.assert_array_equal(fused.read(one, sizes, index, np.dtype("float64")), whole[index])


@pytest.mark.slow
def test_memory_stays_below_two_files(tmp_path: Path) -> None:
    model = llama(hidden_size=64, ffn_hidden_size=512, num_layers=4)
    limit = 300_000
    save_huggingface(model, tmp_path, max_shard_size=limit)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 5
    del model

    def peak(work: Any) -> int:
        tracemalloc.start()
        try:
            kept = work()
            now, most = tracemalloc.get_traced_memory()
            del kept
            return most - now  # what is kept is the model: JAX takes NumPy's memory for a CPU device's
        finally:
            tracemalloc.stop()

    load_huggingface(tmp_path)  # what is kept of the first use, such as compiled programs, is not meant
    assert peak(lambda: load_huggingface(tmp_path)) < 2 * limit
    model = load_huggingface(tmp_path)
    assert peak(lambda: save_huggingface(model, tmp_path / "again", max_shard_size=limit)) < 2 * limit


@pytest.mark.slow
def test_quantizer_states_are_new_and_compute_dtype_is_followed(folder: Path) -> None:
    with autocast(DelayedScaling(amax_history_len=3)):
        model = load_huggingface(folder, config={"compute_dtype": "bfloat16"}, execution=Execution(scan_layers=True))
        states = jax.tree.leaves(nnx.state(model, QuantizerState))
        assert states
        assert {float(jnp.max(jnp.abs(leaf.astype(jnp.float32)))) for leaf in states} <= {0.0, 1.0}
        logits = model(jnp.zeros((1, 16), jnp.int32))
    assert logits.dtype == jnp.bfloat16
    assert model.execution.scan_layers is True


def test_dtypes_are_cast_only_if_asked_for(folder: Path, tmp_path: Path) -> None:
    model = load_huggingface(folder, dtype=jnp.bfloat16)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(llama()))
    jax.tree.map(assert_bitwise, params_of(model), expected)
    model.final_norm.scale.set_value(jnp.ones(32, jnp.float32))
    save_huggingface(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float32"
    with pytest.raises(ValueError, match=r"bfloat16, float32; say with dtype= \(--dtype on the command line\) which"):
        load_huggingface(tmp_path)
    assert load_huggingface(tmp_path, dtype="float16").config.params_dtype == jnp.float16
    save_huggingface(model, tmp_path, dtype="bfloat16")
    assert load_huggingface(tmp_path).config.params_dtype == jnp.bfloat16


def test_the_dtype_that_is_written_is_that_of_the_tensors(folder: Path, tmp_path: Path) -> None:
    """transformers follows `dtype`, which newer folders have, before `torch_dtype`."""
    base = tmp_path / "base"
    base.mkdir()
    copied(folder, base)
    change(base, dtype="bfloat16", torch_dtype="bfloat16")
    save_huggingface(llama(), tmp_path / "tuned", like=base)
    values = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert values.get("dtype", values["torch_dtype"]) == values["torch_dtype"] == "float32"


def test_the_deviation_of_first_weights_is_read_and_written(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path)
    change(tmp_path, initializer_range=0.3)
    model = load_huggingface(tmp_path)
    assert model.config.init_method_std == 0.3
    save_huggingface(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["initializer_range"] == 0.3


def test_an_adapter_beside_a_model_is_not_ignored(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds a model and an adapter \(adapter_config.json\)"):
        load_huggingface(tmp_path)


def test_fields_and_files_that_the_model_does_not_have_are_kept(folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    copied(folder, base)
    change(base, eos_token_id=[3, 4], rope_theta=7.0, summary_type="first", router_aux_loss_coef=0.02)
    companions = ("tokenizer.json", "tokenization_own.py", "tiktoken.model", "tokenizer.model.v3")
    for name in companions:
        (base / name).write_text("{}")
    (base / "pytorch_model.bin").write_text("weights")
    save_huggingface(llama(), tmp_path / "tuned", like=base)
    values = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert (values["eos_token_id"], values["rope_theta"], values["bos_token_id"]) == ([3, 4], 10000.0, None)
    assert (values["summary_type"], values["router_aux_loss_coef"]) == ("first", 0.02)
    assert [(tmp_path / "tuned" / name).read_text() for name in companions] == ["{}"] * 4
    assert not (tmp_path / "tuned" / "pytorch_model.bin").exists()


def test_files_of_an_older_model_do_not_stay_beside_a_new_one(folder: Path, tmp_path: Path) -> None:
    base, target = tmp_path / "base", tmp_path / "target"
    for path in (base, target):
        path.mkdir()
        copied(folder, path)
    (base / "tokenizer.json").write_text("new")
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "generation_config.json"):
        (target / name).write_text("old")
    (target / "notes.txt").write_text("mine")
    # A shard of the older model under a name of its own, as its index says.
    index = target / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of", "part-00001-of"))
    (first,) = target.glob("model-00001-of-*")
    first.rename(target / first.name.replace("model", "part"))
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(ValueError, match=r"holds a model with tokenizer\.json, vocab\.json, .* give like='"):
        save_huggingface(llama(), target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    save_huggingface(llama(), target, like=base)
    assert {path.name for path in target.iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "notes.txt"),
    }
    assert (target / "tokenizer.json").read_text() == "new"
    save_huggingface(llama(), target, like=target)  # the folder's own stay
    assert (target / "tokenizer.json").read_text() == "new"


def test_a_tokenizer_may_be_saved_before_its_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    save_huggingface(llama(), tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    load_huggingface(tmp_path)


@pytest.mark.parametrize("text", ['{"my": "own project config"}', '{"version": 1, "hidden_size": 32}', "{", ""])
def test_a_configuration_of_something_else_is_not_replaced(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json has no model_type and no architectures, .* another folder"):
        save_huggingface(llama(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == text


def test_a_configuration_of_a_model_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # transformers' save_pretrained of it alone
    save_huggingface(llama(), tmp_path)
    load_huggingface(tmp_path)


@pytest.mark.parametrize("of", [".", "checkpoints", "checkpoints/4"])
def test_the_folder_of_a_run_is_refused(of: str, tmp_path: Path) -> None:
    saved_step(tmp_path, 4)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"holds checkpoints of a run of jax_te.* give another folder"):
        save_huggingface(llama(), tmp_path / of)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "tf_model.h5"])
def test_tensors_that_a_save_does_not_replace_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(ValueError, match=f"in files that are not replaced .{name}"):
        save_huggingface(llama(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_architecture_is_that_of_the_folder_that_a_model_came_from(tmp_path: Path) -> None:
    def written(model: GPTModel, **options: Any) -> str:
        save_huggingface(model, tmp_path / "again", **options)
        name: str
        (name,) = json.loads((tmp_path / "again" / "config.json").read_text())["architectures"]
        return name

    base = tmp_path / "base"
    save_huggingface(llama(), base, architecture="MistralForCausalLM")
    model = load_huggingface(base)
    assert written(model, like=base) == "MistralForCausalLM"
    assert written(model) == "LlamaForCausalLM"  # the first that can represent it
    assert written(llama(add_bias_linear=True), like=base) == "LlamaForCausalLM"  # Mistral has no biases
    assert written(model, like=base, architecture="LlamaForCausalLM") == "LlamaForCausalLM"


# --- what cannot be written


@pytest.mark.costly(
    "changes2-activation='srelu'",
    "changes0-softmax_type='off-by-one'",
    "changes4-normalization='LayerNorm'",
    "changes3-layernorm_zero_centered_gamma=True",
)
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
        ({"window_size": (4, 0), "window_attn_skip_freq": (0, 1)}, "window_size"),
        ({"activation": "srelu"}, "activation='srelu'"),
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma=True"),
        ({"normalization": "LayerNorm"}, "normalization='LayerNorm'"),
    ],
)
def test_a_model_that_no_architecture_says_is_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    model = nnx.eval_shape(lambda: llama(**changes))
    with pytest.raises(ValueError, match=f"LlamaForCausalLM: [^;]*{match}".replace("(", r"\(")):
        save_huggingface(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_refusal_says_what_no_architecture_has_and_which_are_nearest(tmp_path: Path) -> None:
    model = nnx.eval_shape(lambda: llama(activation="srelu", add_qkv_bias=True))
    with pytest.raises(ValueError, match="no supported architecture can represent") as caught:
        save_huggingface(model, tmp_path / "none")
    everywhere, nearest = str(caught.value).split("unsupported options")
    assert re.search(r"of \d+ architectures none has activation='srelu'; $", everywhere)
    assert "add_qkv_bias" not in everywhere  # Qwen 2 has these biases
    named = [name for name in ARCHITECTURES if f"{name}: activation='srelu'" in nearest]
    assert named == ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"]
    assert ": Qwen2ForCausalLM: activation='srelu'; LlamaForCausalLM: " in nearest  # by the number of options
    with pytest.raises(ValueError, match=r"^Gemma2ForCausalLM cannot represent .*block_output_layernorm=False"):
        save_huggingface(model, tmp_path / "none", architecture="Gemma2ForCausalLM")


def test_llamas_form_with_windows_in_all_layers_is_mistrals(tmp_path: Path) -> None:
    save_huggingface(llama(window_size=(4, 0)), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["architectures"], values["sliding_window"]) == (["MistralForCausalLM"], 5)
    assert load_huggingface(tmp_path).config.window_size == (4, 0)
    kinds = ["full_attention"] + ["sliding_attention"] * (values["num_hidden_layers"] - 1)
    for changes, match in (({"sliding_window": 0}, "sliding_window is 0"), ({"layer_types": kinds}, "layer_types is")):
        (tmp_path / "config.json").write_text(json.dumps(values | changes))
        with pytest.raises(ValueError, match=match):
            load_huggingface(tmp_path)


def test_what_has_no_place_is_refused(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(ValueError, match="unknown architecture 'Llama'; known: GPT2LMHeadModel, LlamaForCausalLM"):
        save_huggingface(model, tmp_path, architecture="Llama")
    with pytest.raises(ValueError, match="GPT2LMHeadModel: activation='swiglu'"):
        save_huggingface(model, tmp_path, architecture="GPT2LMHeadModel")
    with pytest.raises(ValueError, match=r"model must be a model of jax_te\.models, got Linear"):
        save_huggingface(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tmp_path)
    model.layers[0].self_attention.proj = LoRA(model.layers[0].self_attention.proj, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="merge adapters"):
        save_huggingface(model, tmp_path)


def test_llamas_form_that_rotates_a_part_of_each_head_is_phi_3s(tmp_path: Path) -> None:
    """With queries, keys and values in one tensor, and gate and up in one: rows of theirs, components of ours."""
    model = llama(RotaryPositions(percent=0.5))
    save_huggingface(model, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["architectures"], values["partial_rotary_factor"]) == (["Phi3ForCausalLM"], 0.5)
    back = load_huggingface(tmp_path)
    assert back.rotary.percent == 0.5
    jax.tree.map(assert_bitwise, params_of(back), params_of(model))
    fused = TensorFile(tmp_path / "model.safetensors").tensors["model.layers.1.self_attn.qkv_proj.weight"]
    kernel = np.asarray(model.layers[1].self_attention.qkv.kernel[...]).reshape(32, 4, 2, 8)  # h, r + 2, g, d
    np.testing.assert_array_equal(fused[:32].reshape(2, 2, 8, 32), kernel[:, :2].transpose(2, 1, 3, 0))
    np.testing.assert_array_equal(fused[32:].reshape(2, 2, 8, 32), kernel[:, 2:].transpose(1, 2, 3, 0))
    for scaling, match in (
        ({"rope_type": "longrope"}, "longrope"),
        ({"rope_type": "linear", "factor": 2.0}, "longrope"),
    ):
        change(tmp_path, rope_scaling=scaling)
        with pytest.raises(ValueError, match=match):
            load_huggingface(tmp_path)


NEOX: dict[str, Any] = {
    "normalization": "LayerNorm", "activation": "gelu_exact", "add_bias_linear": True, "num_query_groups": 4,
    "parallel_attention_mlp": True,
}  # fmt: skip


@pytest.mark.slow
def test_blocks_that_both_read_the_layers_input_are_gpt_neoxs(tmp_path: Path) -> None:
    model = llama(RotaryPositions(percent=0.25), **NEOX)
    save_huggingface(model, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["architectures"], values["rotary_pct"]) == (["GPTNeoXForCausalLM"], 0.25)
    assert values["use_parallel_residual"] is True
    back = load_huggingface(tmp_path)
    jax.tree.map(assert_bitwise, params_of(back), params_of(model))
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    assert_bitwise(*(quick_jit(lambda model, tokens: model(tokens))(each, tokens) for each in (back, model)))
    fused = TensorFile(tmp_path / "model.safetensors").tensors["gpt_neox.layers.1.attention.query_key_value.weight"]
    kernel = np.asarray(model.layers[1].self_attention.qkv.kernel[...]).reshape(32, 3, 4, 8)  # h, 3, n, d
    np.testing.assert_array_equal(fused.reshape(4, 3, 8, 32), kernel.transpose(2, 1, 3, 0))
    with pytest.raises(ValueError, match=r"GPTNeoXForCausalLM: [^;]*num_query_groups=2"):
        save_huggingface(nnx.eval_shape(lambda: llama(**NEOX | {"num_query_groups": 2})), tmp_path / "none")
    change(tmp_path, hidden_act="gelu_fast")  # of GPT-NeoX-20B
    assert load_huggingface(tmp_path).config.activation == "gelu"
    change(tmp_path, attention_bias=False)
    with pytest.raises(ValueError, match="attention_bias is False"):
        load_huggingface(tmp_path)


def test_blocks_with_norms_behind_alone_are_olmo_2s(tmp_path: Path) -> None:
    norms = {"qk_layernorm": True, "qk_layernorm_across_heads": True}
    norms |= {"block_input_layernorm": False, "block_output_layernorm": True}
    model = llama(**norms)
    save_huggingface(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Olmo2ForCausalLM"]
    names = TensorFile(tmp_path / "model.safetensors").tensors.keys()
    assert not any("input_layernorm" in name for name in names)
    assert {name.removeprefix("model.layers.0.") for name in names if "layers.0." in name and "norm" in name} == {
        "post_attention_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }
    back = load_huggingface(tmp_path)
    jax.tree.map(assert_bitwise, params_of(back), params_of(model))
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    assert_bitwise(*(quick_jit(lambda model, tokens: model(tokens))(each, tokens) for each in (back, model)))
    change(tmp_path, attention_bias=True)
    with pytest.raises(ValueError, match="attention_bias is True"):
        load_huggingface(tmp_path)


def test_an_encoder_whose_positions_begin_behind_padding_is_robertas(tmp_path: Path) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, activation="gelu_exact"
    )
    model = BertModel(config, vocab_size=64, max_sequence_length=16, first_position=2, rngs=nnx.Rngs(0))
    save_huggingface(model, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["RobertaForMaskedLM"]
    assert (values["pad_token_id"], values["max_position_embeddings"]) == (1, 18)
    back = load_huggingface(tmp_path)
    assert (back.first_position, back.max_sequence_length) == (2, 16)
    jax.tree.map(assert_bitwise, params_of(back), params_of(model))
    wrong = {"pad_token_id": None, "max_position_embeddings": 2, "hidden_act": "relu"}
    for name, value in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps(values | {name: value}))
        with pytest.raises(ValueError, match=f"{name} is"):
            load_huggingface(tmp_path)


@pytest.mark.costly("scaling1")
@pytest.mark.parametrize("scaling", [None, LinearScaling(factor=2.0)])
def test_rotary_options_survive(scaling: Any, tmp_path: Path) -> None:
    rotary = RotaryPositions(base=500.0, scaling=scaling)
    save_huggingface(llama(rotary), tmp_path)
    assert load_huggingface(tmp_path).rotary == rotary


def test_partial_rotary_positions_are_refused(folder: Path, tmp_path: Path) -> None:
    """transformers' classes of most architectures turn whole heads, whatever ``partial_rotary_factor`` says."""
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: [^;]*percent=0\.5"):
        save_huggingface(llama(RotaryPositions(percent=0.5)), tmp_path / "none", architecture="LlamaForCausalLM")
    assert not (tmp_path / "none").exists()
    copied(folder, tmp_path)
    change(tmp_path, partial_rotary_factor=1.0)
    assert load_huggingface(tmp_path).rotary == load_huggingface(folder).rotary
    for place in ({}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        change(tmp_path, partial_rotary_factor=0.5, **place)
        with pytest.raises(ValueError, match=r"partial_rotary_factor is 0\.5; only 1\.0"):
            load_huggingface(tmp_path)


# --- what is refused


GEMMA3 = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"model_type": "mamba"}, "architectures.*known: GPT2LMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "known: GPT2LMHeadModel"),
        ({"architectures": ["GPT2LMHeadModel"]}, "model_type is 'llama'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "shape": 3}}, "shape=3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "no field low_freq_factor"),
        ({"hidden_act": "xielu"}, "hidden_act is 'xielu'; known activations"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_bias": True}, "attention_bias=True"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; only None"),
        (GEMMA3 | {"hidden_act": "silu"}, "hidden_act is 'silu'; only 'gelu_pytorch_tanh'"),
        (GEMMA3 | {"_sliding_window_pattern": 3}, "_sliding_window_pattern is 3; only 6"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (GEMMA3 | {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1.0"),
        (GEMMA3 | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "layer_types"),
        (GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "rope_type is 'linear'"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta=10000.0"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_size": "32"}, "hidden_size must be of type int, got '32'"),
        ({"hidden_size": True}, "hidden_size must be of type int, got True"),
        ({"num_hidden_layers": 10**12}, "number of layers is 1000000000000; there are 21 tensors"),
        ({"rms_norm_eps": float("nan")}, "layernorm_epsilon"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_are_followed_or_refused_by_name(
    values: dict[str, Any], match: str, folder: Path, tmp_path: Path
) -> None:
    copied(folder, tmp_path)
    change(tmp_path, **values)
    with pytest.raises(ValueError, match=match):
        load_huggingface(tmp_path)


def test_a_field_that_a_caller_knows_may_be_ignored(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path)
    change(tmp_path, my_note="x")
    with pytest.raises(ValueError, match="my_note='x'; name those that do not in ignore_fields"):
        load_huggingface(tmp_path)
    load_huggingface(tmp_path, ignore_fields=["my_note"])
    with pytest.raises(ValueError, match="leave hidden_size, params_dtype out of"):
        load_huggingface(tmp_path, ignore_fields=["my_note"], config={"hidden_size": 8, "params_dtype": "float32"})


def test_a_misspelt_field_is_told_from_one_that_the_folder_decides(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"has no field 'compute_dtyp' .*compute_dtype.* Correct the name"):
        load_huggingface(folder, config={"compute_dtyp": "bfloat16"})
    # An argument of the model, and a field of another configuration.
    with pytest.raises(ValueError, match=r"config.json .* leave rotary_base, vocab_size out of config"):
        load_huggingface(folder, config={"vocab_size": 8, "rotary_base": 1e4})


def test_a_field_that_the_model_is_built_by_cannot_be_ignored(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"hidden_size, rope_theta cannot be ignored"):
        load_huggingface(folder, ignore_fields=["rope_theta", "hidden_size", "my_note"])


# Fields that published folders have beside those of transformers' classes, by what has them.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2": (
        "LlamaForCausalLM",
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    ),
    "the first Llama": ("LlamaForCausalLM", {"max_sequence_length": 2048, "quantization_config": None}),
    "distilgpt2": ("GPT2LMHeadModel", {"_num_labels": 1, "n_ctx": 1024}),
    "gpt2-medium": ("GPT2LMHeadModel", {"n_special": 0, "predict_special_tokens": True, "is_decoder": False}),
    "multilingual BERT": (
        "BertForMaskedLM",
        {"directionality": "bidi", "pooler_type": "first_token_transform", "pooler_fc_size": 768}
        | {"pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128},
    ),
    "Phi-3": (
        "Phi3ForCausalLM",
        {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "attention_bias": False, "rope_scaling": None}
        | {"original_max_position_embeddings": 4096, "embd_pdrop": 0.0},
    ),
    "Pythia": ("GPTNeoXForCausalLM", {"rotary_pct": 0.25, "rotary_emb_base": 10000, "classifier_dropout": 0.1}),
    "GPT-NeoX-20B": ("GPTNeoXForCausalLM", {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}),
    "RoBERTa": ("RobertaForMaskedLM", {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}),
    "mT5": ("MT5ForConditionalGeneration", {"tokenizer_class": "T5Tokenizer"}),
    "legal BERT": ("BertForMaskedLM", {"eos_token_ids": 0, "pruned_heads": {}, "use_bfloat16": False}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_harmless_fields_of_published_folders_pass(name: str) -> None:
    architecture, values = PUBLISHED[name]
    kind = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    plain, form = (read_form(kind | more, "config.json", range(50))[1] for more in ({}, values))
    assert form == plain


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("LlamaForCausalLM", {"rope_interleaved": True}),
        ("LlamaForCausalLM", {"max_sequence_length": 4096}),
        ("LlamaForCausalLM", {"directionality": "bidi"}),
        ("GPT2LMHeadModel", {"n_special": 2}),
        ("Phi3ForCausalLM", {"attention_bias": True}),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}),
        ("Phi3ForCausalLM", {"lm_head_bias": True}),
        ("BertForMaskedLM", {"directionality": "left"}),
        ("BertForMaskedLM", {"pooler_type": "mean"}),
        ("BertForMaskedLM", {"pruned_heads": {"0": [1]}}),
    ],
)
def test_the_same_fields_are_refused_where_they_would_count(architecture: str, values: dict[str, Any]) -> None:
    kind = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    with pytest.raises(ValueError, match=next(iter(values))):
        read_form(kind | values, "config.json", range(50))


def test_the_page_of_families_says_what_is_read_and_what_is_refused() -> None:
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| (exact|mapped|refused) \| (.*)\|", page, re.MULTILINE)
    assert len(rows) == page.count("\n| ") - 1  # all but the head of the table
    classes = {state: [name for name, each, _ in rows if each == state] for state in ("exact", "mapped", "refused")}
    why = {name: "out of scope" if "out of scope" in note else "" for name, _, note in rows}
    assert sorted(classes["exact"]) == sorted(ARCHITECTURES)
    assert {*classes["mapped"]} <= ARCHITECTURES.keys()
    for name in classes["refused"]:
        with pytest.raises(ValueError, match=name) as error:
            read_form({"architectures": [name], "model_type": "another"}, "config.json", range(50))
        assert ("out of scope" in str(error.value)) == bool(why[name])


OUT_OF_SCOPE = {
    "gated delta net is": "Qwen3NextForCausalLM KimiLinearForCausalLM Qwen3_5MoeForCausalLM qwen3_next",
    "state spaces are": """
        Mamba2ForCausalLM FalconMambaForCausalLM JambaForCausalLM BambaForCausalLM Zamba2ForCausalLM FalconH1ForCausalLM
        NemotronHForCausalLM GraniteMoeHybridForCausalLM mamba""",
    r"sparse attention \(DSA\) is": "DeepseekV32ForCausalLM GlmMoeDsaForCausalLM deepseek_v32",
    "vision tower is": """
        Gemma3ForConditionalGeneration Llama4ForConditionalGeneration MllamaForConditionalGeneration qwen2_5_vl
        Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration LlavaNextForConditionalGeneration
        InternVLForConditionalGeneration Mistral3ForConditionalGeneration PaliGemmaForConditionalGeneration""",
}


@pytest.mark.parametrize("part", OUT_OF_SCOPE)
def test_what_is_out_of_scope_is_refused_by_name(part: str) -> None:
    for name in OUT_OF_SCOPE[part].split():
        kind = {"model_type": name} if name.islower() else {"architectures": [name], "model_type": "another"}
        with pytest.raises(ValueError, match=rf"its {part} out of scope; model_type is"):
            read_form(kind, "config.json", range(50))


def test_two_dropout_rates_of_gpt2_are_a_warning() -> None:
    """Nothing but training with dropout depends on them."""
    kind = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    with pytest.warns(UserWarning, match=r"embd_pdrop is 0\.0, resid_pdrop 0\.2") as warned:
        _, form = read_form(kind | {"embd_pdrop": 0.0, "resid_pdrop": 0.2}, "config.json", range(50))
    assert form.config.hidden_dropout == 0.2
    assert [warning.filename for warning in warned] == [__file__]  # the caller's line


def test_all_tensors_that_do_not_fit_are_in_one_error(folder: Path, tmp_path: Path) -> None:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= TensorFile(path).tensors
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 32), np.float32)
    tensors["model.layers.7.extra"] = np.zeros((), np.int64)
    plan = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    write_file(tmp_path / "model.safetensors", plan, tensors.items())
    with pytest.raises(CheckpointMismatchError) as error:
        load_huggingface(tmp_path)
    assert str(error.value).splitlines()[1:] == [
        "model.norm.weight is missing",
        "model.layers.7.extra is unexpected",
        "model.layers.1.mlp.up_proj.weight is [3, 32] and must be [48, 32]",
    ]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../model.safetensors",
            "/etc/passwd",
            "a/b.safetensors",
            "a\\b.safetensors",
            ".safetensors/",
            "..",
            "",
            7,
            None,
        ),
        *("a\0.safetensors", "config.json", "a.safetensors\n", "x" * 5000 + ".safetensors"),
    ],
    ids=range(13),
)
def test_no_index_names_a_file_outside_of_its_folder(name: Any, folder: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    copied(folder, inside)
    for path in folder.glob("*.safetensors"):
        (tmp_path / "model.safetensors").write_bytes(path.read_bytes())
    path = inside / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"which is not a name of a \.safetensors file"):
        load_huggingface(inside)


def test_files_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is not there; .*hf download.*; nothing is downloaded"):
        load_huggingface(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*index\.json; .*nothing is downloaded"):
        load_huggingface(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes((folder / "model.safetensors.index.json").read_bytes())
    with pytest.raises(ValueError, match="is not a file"):
        load_huggingface(tmp_path)
    copied(folder, tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match="is not a file"):
        load_huggingface(tmp_path)


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


WHOLE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "0 bytes cannot hold"),
        (b"\x10", "1 bytes cannot hold"),
        (b"\xff" * 8, "cannot hold a header of 18446744073709551615"),
        (struct.pack("<Q", 9) + b"{}", "2 bytes|10 bytes"),
        (struct.pack("<Q", 2) + b"[]", "must be a JSON object"),
        (struct.pack("<Q", 2) + b"\xff{", "is not JSON"),
        (struct.pack("<Q", 40_000) + b"[" * 40_000, "is not JSON"),
        (struct.pack("<Q", 14) + b'{"a":1,"a":{}}', "twice"),
        (header(a=1) + b"12345678", "has dtype"),
        (header(a=WHOLE | {"dtype": "F9"}) + b"12345678", "'F9'; known: F16"),
        (header(a=WHOLE | {"dtype": []}) + b"12345678", "has dtype"),
        (header(a=WHOLE | {"shape": [-2]}) + b"12345678", "has shape"),
        (header(a=WHOLE | {"shape": [2.0]}) + b"12345678", "has shape"),
        (header(a=WHOLE | {"shape": [1] * 99}) + b"12345678", "has shape"),
        (header(a=WHOLE | {"shape": [3]}) + b"12345678", r"F32\[3\], is at \[0, 8\]"),
        (header(a=WHOLE | {"data_offsets": [0, 2**70]}) + b"12345678", "is at"),
        (header(a=WHOLE | {"data_offsets": [8, 0]}) + b"12345678", "is at"),
        (header(a=WHOLE | {"data_offsets": "08"}) + b"12345678", "is at 08"),
        (header(a=WHOLE, b=WHOLE) + b"12345678", "the tensor before it ends at 8"),
        (header(a=WHOLE) + b"1234567", "of 7 bytes"),
        (header(a=WHOLE) + b"123456789", "take 8 bytes, and it has 9"),
        (header(a=WHOLE | {"data_offsets": [1, 9]}) + b"123456789", "ends at 0"),
    ],
    ids=range(22),
)
def test_a_damaged_file_is_named(content: bytes, match: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=match) as error:
        TensorFile(path)
    assert "model.safetensors" in str(error.value)


def test_every_dtype_is_read_as_it_was_written(tmp_path: Path) -> None:
    tensors = {
        "a": np.array([1.5, -2.0], ml_dtypes.bfloat16),
        "b": np.array([[1.5], [448.0]], ml_dtypes.float8_e4m3fn),
        "odd": np.array([True]),
        "c": np.arange(3, dtype=np.int64),  # begins at an odd byte
        "d": np.zeros((0, 4), np.float16),
        "e": np.float32(3.0).reshape(()),
    }
    plan = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    write_file(tmp_path / "x.safetensors", plan, tensors.items())
    found = TensorFile(tmp_path / "x.safetensors").tensors
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor, strict=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["F32", "../x", 10**18, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
FUZZ = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


def refused(folder: Path) -> str:
    """The error with which a folder is refused, if it is; another kind of error goes through."""
    message = ""
    try:
        load_huggingface(folder)
    except ValueError as error:
        message = str(error)
    assert len(message) < 5000
    return message


@FUZZ
@given(data=st.data())
def test_any_bytes_are_read_or_refused(data: Any, folder: Path, tmp_path: Path) -> None:
    """A piece of any file of the folder is replaced: of the header, of the index, of ``config.json``."""
    copied(folder, tmp_path)
    path = data.draw(st.sampled_from(sorted(tmp_path.iterdir())))
    content = path.read_bytes()
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, min(len(content), 900))] * 2)))
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=30)) + content[end:])
    refused(tmp_path)


@pytest.mark.costly
@FUZZ
@given(data=st.data())
def test_any_values_are_read_or_refused(data: Any, folder: Path, tmp_path: Path) -> None:
    """Any value in the place of a field, of an entry of the index, of an entry of a header."""
    copied(folder, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    rope = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "architectures", "model_type"}
    keys = st.sampled_from(sorted(values.keys() | rope))
    change(tmp_path, **data.draw(st.dictionaries(keys, JSON | st.dictionaries(keys, JSON), max_size=2)))
    refused(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= data.draw(st.dictionaries(st.sampled_from(sorted(index["weight_map"])), JSON, max_size=2))
    path.write_text(json.dumps(data.draw(st.just(index) | st.dictionaries(st.just("weight_map"), JSON))))
    refused(tmp_path)
    entries = data.draw(
        st.dictionaries(
            st.text(max_size=3), JSON | st.fixed_dictionaries({key: JSON | st.just(WHOLE[key]) for key in WHOLE})
        )
    )
    (tmp_path / "model.safetensors").write_bytes(header(**entries) + data.draw(st.binary(max_size=16)))
    assert refused(tmp_path)


@pytest.mark.costly
@FUZZ
@given(data=st.data())
def test_any_fields_of_any_architecture_give_a_form_or_are_refused(data: Any) -> None:
    architecture = ARCHITECTURES[data.draw(st.sampled_from(sorted(ARCHITECTURES)))]
    keys = st.sampled_from(sorted({*architecture.fields, *OTHER_FIELDS}))
    values = data.draw(st.dictionaries(keys, JSON | st.dictionaries(keys, JSON, max_size=2), max_size=4))
    given = ConfigJson(values, "config.json", [f"tensor {i}" for i in range(50)])
    with contextlib.suppress(ValueError):
        form = architecture.form(given)
        assert architecture.table(form)
        assert form.sizes()["h"] > 0
        given.finish()


OTHER_FIELDS = [
    *("hidden_act", "hidden_activation", "activation_function", "feed_forward_proj", "is_gated_act", "dense_act_fn"),
    *("rope_scaling", "rope_parameters", "rope_theta", "rope_type", "rope_local_base_freq", "full_attention"),
    *("layer_types", "sliding_attention", "sliding_window", "sliding_window_size", "sliding_window_pattern"),
    *("use_sliding_window", "max_window_layers", "query_pre_attn_scalar", "attn_logit_softcapping", "embd_pdrop"),
    *("final_logit_softcapping", "relative_attention_num_buckets", "scale_decoder_outputs"),
    *("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "num_local_experts", "clip_qkv", "swiglu_limit"),
    *("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group", "topk_method", "routed_scaling_factor"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "num_nextn_predict_layers", "use_qk_norm"),
]


# --- values that are not finite, and values that a dtype does not have


def test_values_that_are_not_finite_stay_and_none_become_so(tmp_path: Path) -> None:
    model = llama()
    scale = model.final_norm.scale
    scale.set_value(scale.get_value().at[:3].set(jnp.array([jnp.inf, -jnp.inf, jnp.nan])))
    save_huggingface(model, tmp_path / "fp32")
    for dtype in (None, jnp.float16, jnp.bfloat16):
        found = load_huggingface(tmp_path / "fp32", dtype=dtype).final_norm.scale.get_value()[:3]
        np.testing.assert_array_equal(np.float32(found), [np.inf, -np.inf, np.nan])
    scale.set_value(scale.get_value().at[3].set(1e5))
    match = r"model\.norm\.weight has 1 values beyond the largest of float16, 65504\.0"
    with pytest.raises(ValueError, match=match):
        save_huggingface(model, tmp_path / "fp16", dtype=jnp.float16)
    assert not (tmp_path / "fp16").exists()
    save_huggingface(model, tmp_path / "fp32")
    with pytest.raises(ValueError, match=match):
        load_huggingface(tmp_path / "fp32", dtype=jnp.float16)
    load_huggingface(tmp_path / "fp32", dtype=jnp.bfloat16)


# --- the class of a folder


def test_a_folder_without_a_class_is_that_of_its_type(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path)
    change(tmp_path, architectures=None)
    jax.tree.map(assert_bitwise, params_of(load_huggingface(tmp_path)), params_of(load_huggingface(folder)))
    assert main(["convert", str(tmp_path), str(tmp_path / "megatron")]) == 0
    save_huggingface(load_huggingface(folder), tmp_path / "again", like=tmp_path)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    values = {"model_type": "kimi_k2", "num_attention_heads": 4, "num_key_value_heads": 4}
    assert read_form(values, "config.json", range(1000))[0] is ARCHITECTURES["DeepseekV3ForCausalLM"]


def test_a_type_of_several_classes_needs_the_class(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'and BertModel; add .* "architectures": \["BertForMaskedLM"\]'):
        read_form({"model_type": "bert"}, "config.json", range(50))
    with pytest.raises(ValueError, match="out of scope; model_type is 'mamba'; known: GPT2LMHeadModel"):
        read_form({"model_type": "mamba"}, "config.json", range(50))


@pytest.mark.parametrize("wrong", [{"max_shard_size": 0}, {"dtype": jnp.int32}], ids=str)
def test_a_refused_save_counts_as_a_call_that_all_processes_make(wrong, tmp_path, monkeypatch) -> None:
    """Else the next save of this process would have another number than the others', and never meet them."""
    entered: list[str] = []

    class Counted(Meetings):
        def __enter__(self):
            entered.append("save_huggingface")
            return super().__enter__()

    monkeypatch.setattr(save_module, "Meetings", Counted)
    with without_type_checker(), pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        save_huggingface(llama(), tmp_path, **wrong)
    assert entered == ["save_huggingface"]


def test_a_tied_head_that_is_stored_as_well_may_hold_nan(tmp_path) -> None:
    config = TransformerConfig(**LLAMA | {"num_layers": 1})
    model = GPTModel(config, vocab_size=64, max_sequence_length=32, position_embedding_type="rope", rngs=nnx.Rngs(0))
    embedding = model.embedding.embedding
    embedding.set_value(embedding.get_value().at[3, 5].set(jnp.nan))
    save_huggingface(model, tmp_path)
    tensors = dict(TensorFile(tmp_path / "model.safetensors").tensors)
    tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    plan = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    write_file(tmp_path / "model.safetensors", plan, tensors.items())
    found = load_huggingface(tmp_path).embedding.embedding[...]
    np.testing.assert_array_equal(found, embedding.get_value())
