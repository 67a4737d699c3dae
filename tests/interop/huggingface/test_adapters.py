"""Adapters in PEFT's format, without its package: what they compute, what is kept of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.errors import CheckpointMismatchError
from jax_te.interop.huggingface import load_huggingface, load_peft, save_huggingface, save_peft
from jax_te.interop.huggingface.peft_config import read_config
from jax_te.interop.huggingface.safetensors import TensorFile, write_file
from jax_te.layers import LoRA
from jax_te.models import GPTModel
from tests.support.meshes import use_mesh
from tests.support.numerics import assert_bitwise, assert_close, quick_jit
from tests.support.runs import saved_step

SIZES = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
SIZES = {f"self_attn.{name}": size for name, size in SIZES.items()}
SIZES |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
TOKENS = np.random.default_rng(1).integers(0, 64, (4, 8)).astype(np.int32)
RANK = 3
FIELDS: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "use_dora": False}


CONFIG = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
    normalization="RMSNorm", activation="swiglu", add_bias_linear=False,
)  # fmt: skip


def llama() -> GPTModel:
    return GPTModel(
        CONFIG,
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        rngs=nnx.Rngs(0),
    )


def adapters(names: list[str], rank: int = RANK, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The tensors of a file with adapters of these layers in both transformer layers."""
    rng, found = np.random.default_rng(0), {}
    for layer in range(2):
        for name in names:
            out, inner = SIZES[name]
            module = f"base_model.model.model.layers.{layer}.{name}"
            found[f"{module}.lora_A.weight"] = rng.normal(size=(rank, inner)).astype(dtype)
            found[f"{module}.lora_B.weight"] = rng.normal(size=(out, rank)).astype(dtype)
    return found


def write(folder: Path, tensors: dict[str, np.ndarray], **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    plan = [(name, array.dtype, array.shape) for name, array in tensors.items()]
    write_file(folder / "adapter_model.safetensors", plan, tensors.items())
    (folder / "adapter_config.json").write_text(json.dumps(FIELDS | fields))
    return folder


def merged(tmp_path: Path, tensors: dict[str, np.ndarray], scale: float) -> GPTModel:
    """The model of a folder whose weights have the adapters' products added."""
    path = tmp_path / "merged"
    save_huggingface(llama(), path)
    weights = dict(TensorFile(path / "model.safetensors").tensors)
    for name in [name for name in tensors if "lora_A" in name]:
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        weight = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
        weights[weight] = (weights[weight] + scale * (b.astype(np.float64) @ a)).astype(np.float32)
    plan = [(name, array.dtype, array.shape) for name, array in weights.items()]
    write_file(path / "changed", plan, weights.items())
    (path / "changed").replace(path / "model.safetensors")
    model: GPTModel = load_huggingface(path)
    return model


def logits(model: GPTModel) -> np.ndarray:
    return np.asarray(quick_jit(lambda model, tokens: model(tokens))(model, jnp.asarray(TOKENS)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "fields", "scale"),
    [
        ([*SIZES], {}, 2.0),
        (["self_attn.q_proj", "self_attn.v_proj"], {"use_rslora": True}, 6 / 3**0.5),
        (["mlp.down_proj"], {"lora_alpha": 1.5, "alpha_pattern": {"layers.0.mlp.down_proj": 1.5}}, 0.5),
        (["self_attn.k_proj", "mlp.up_proj"], {"lora_alpha": 9, "alpha_pattern": {"k_proj": 6, "up_proj": 6.0}}, 2.0),
    ],
    ids=["all", "q and v", "down", "k and up"],
)
def test_adapters_compute_what_merged_weights_do_and_are_kept(
    names: list[str], fields: dict[str, Any], scale: float, tmp_path: Path
) -> None:
    tensors = adapters(names)
    folder = write(tmp_path / "given", tensors, **fields)
    model = llama()
    load_peft(model, folder)
    # The products of rank 3 are rounded before they are added to the kernel's, and there behind it.
    assert_close(logits(model), logits(merged(tmp_path, tensors, scale)), 2.0**-16)

    save_peft(model, tmp_path / "saved", base="some/model")
    back = TensorFile(tmp_path / "saved" / "adapter_model.safetensors").tensors
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, strict=True)
    values = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (values["r"], values["base_model_name_or_path"], values["peft_type"]) == (RANK, "some/model", "LORA")
    np.testing.assert_allclose(values["lora_alpha"] / RANK, scale, rtol=2.0**-50)
    assert {*values["target_modules"]} == {f"model.layers.{layer}.{name}" for layer in range(2) for name in names}
    again = llama()
    load_peft(again, tmp_path / "saved")
    assert_bitwise(logits(again), logits(model))


@pytest.mark.costly
def test_an_adapter_that_is_not_there_is_not_trained(tmp_path: Path) -> None:
    model = llama()
    load_peft(model, write(tmp_path / "given", adapters(["self_attn.q_proj", "mlp.down_proj"])))
    gradient = quick_jit(jax.grad(lambda model, tokens: jnp.sum(model(tokens) ** 2)))(model, jnp.asarray(TOKENS))
    layer = gradient.layers[0]
    a, b = (np.asarray(getattr(layer.self_attention.qkv, name)[...]) for name in ("lora_a", "lora_b"))
    assert (a.shape, b.shape) == ((32, 3 * RANK), (RANK, 4, 16))  # of queries, keys and values; of their components
    assert a[:, :RANK].any()
    assert b[:, :2].any()
    assert not a[:, RANK:].any()
    assert not b[:, 2:].any()
    assert not np.asarray(layer.layernorm_mlp.wi_lora_a[...]).any()
    assert np.asarray(layer.layernorm_mlp.wo_lora_a[...]).any()
    assert not np.asarray(layer.self_attention.qkv.base.kernel[...]).any()  # frozen
    assert not isinstance(model.layers[0].self_attention.proj, LoRA)


@pytest.mark.slow
def test_one_adapter_of_a_fused_kernel_is_that_of_each_of_its_layers(tmp_path: Path) -> None:
    """As `jax-te train --lora-rank` trains them."""
    model, rngs = llama(), nnx.Rngs(7)
    normal = jax.nn.initializers.normal(0.2)
    for layer, rank in zip(model.layers, (2, 4), strict=True):
        layer.self_attention.qkv = LoRA(layer.self_attention.qkv, rank, alpha=6.0, rngs=rngs)
        layer.layernorm_mlp = LoRA(layer.layernorm_mlp, rank, alpha=6.0, params_dtype=jnp.bfloat16, rngs=rngs)
        for adapter, names in ((layer.self_attention.qkv, ("lora_b",)), (layer.layernorm_mlp, ("wi_lora_b",))):
            for name in names:
                b = getattr(adapter, name)
                b.set_value(normal(rngs.params(), b.shape, b.dtype))
    save_peft(model, tmp_path / "saved")
    tensors = TensorFile(tmp_path / "saved" / "adapter_model.safetensors").tensors
    values = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert len(tensors) == 2 * 2 * 6  # all but the output projection; that of down_proj has a lora_A and a zero lora_B
    assert not any("o_proj" in name for name in tensors)
    other = ({*values["rank_pattern"].values()} | {values["r"]}, {*values["alpha_pattern"].values()})
    assert other == ({2, 4}, set())  # alpha is 6 for both
    prefix = "base_model.model.model.layers.1."
    q, k = (tensors[f"{prefix}self_attn.{name}.lora_A.weight"] for name in ("q_proj", "k_proj"))
    np.testing.assert_array_equal(q, k)
    assert tensors[f"{prefix}mlp.gate_proj.lora_B.weight"].dtype == ml_dtypes.bfloat16
    again = llama()
    load_peft(again, tmp_path / "saved")
    assert again.layers[1].layernorm_mlp.wi_lora_a.dtype == jnp.bfloat16
    assert_close(logits(again), logits(model), 2.0**-16)
    save_peft(again, tmp_path / "again", dtype=jnp.float32)
    for name, tensor in TensorFile(tmp_path / "again" / "adapter_model.safetensors").tensors.items():
        np.testing.assert_array_equal(tensor, tensors[name].astype(np.float32), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_on_a_mesh(mode: str, tmp_path: Path) -> None:
    tensors = adapters([*SIZES])
    folder = write(tmp_path / "given", tensors)
    model = llama()
    load_peft(model, folder)
    expected = logits(model)
    save_huggingface(llama(), tmp_path / "base")
    with use_mesh(mode):
        sharded = load_huggingface(tmp_path / "base", config={"tensor_model_parallel_size": 2})
        load_peft(sharded, folder)
        b = sharded.layers[0].self_attention.qkv.lora_b.get_value()
        assert b.addressable_shards[0].data.size == b.size // 2  # over the heads
        assert_close(logits(sharded), expected, 2.0**-16)
        save_peft(sharded, tmp_path / "saved")
    for name, tensor in TensorFile(tmp_path / "saved" / "adapter_model.safetensors").tensors.items():
        np.testing.assert_array_equal(tensor, tensors[name])


@pytest.mark.costly
def test_names_and_shapes_are_those_of_another_architecture_that_fits(tmp_path: Path) -> None:
    """Phi-3's layers are fused as ours: one adapter for queries, keys and values."""
    rng = np.random.default_rng(0)
    module = "base_model.model.model.layers.1.self_attn.qkv_proj"
    tensors = {
        f"{module}.lora_A.weight": rng.normal(size=(RANK, 32)).astype(np.float32),
        f"{module}.lora_B.weight": rng.normal(size=(64, RANK)).astype(np.float32),
    }
    folder, model = write(tmp_path / "given", tensors), llama()
    load_peft(model, folder)
    assert model.layers[1].self_attention.qkv.components is None
    save_peft(model, tmp_path / "saved", architecture="Phi3ForCausalLM")
    back = TensorFile(tmp_path / "saved" / "adapter_model.safetensors").tensors
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, strict=True)
    with pytest.raises(CheckpointMismatchError, match="qkv_proj is no linear layer of LlamaForCausalLM"):
        load_peft(llama(), folder, architecture="LlamaForCausalLM")
    other = llama()
    load_peft(other, write(tmp_path / "other", adapters(["self_attn.q_proj"])))
    with pytest.raises(ValueError, match=r"components=\(2, 1, 1\), and its layers .*qkv_proj"):
        save_peft(other, tmp_path / "none", architecture="Phi3ForCausalLM")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ({"peft_type": None}, "no field peft_type"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias is 'all'; only 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"alpha_pattern": {"(a+)+$": 4}}, r"alpha_pattern is .*no repeated group"),
        ({"alpha_pattern": {"(a{2}){30}": 4}}, "no repeated group"),
        ({"rank_pattern": {".*.*.*.*.*": 4}}, "4 repetitions"),
        ({"target_modules": "(" * 3}, "target_modules is .*no regular expression of Python: "),
        ({"exclude_modules": "x" * 1001}, "exclude_modules is .*1000 characters"),
        ({"target_modules": r".*\.q_proj"}, "layers.0.self_attn.k_proj is none of the layers that target_modules"),
        ({"target_modules": "q_proj|k_proj"}, "layers.0.self_attn.k_proj is none of the layers"),  # of whole names
        ({"exclude_modules": r".*\.1\..*"}, "layers.1.self_attn.k_proj is none of the layers that target_modules"),
        ({"alpha_pattern": {"k_proj": 4}}, r"adapters of one layer, layers/0/self_attention/qkv, have scales"),
        ({"lora_alpha": "6"}, "lora_alpha must be of type float"),
        ({"some_field": 3}, "some_field=3"),
        ({"bias": "lora_only"}, "bias is 'lora_only'; only 'none'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices="),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is .*as experts have them"),
        # What PEFT leaves out of these tensors, and what it cannot load.
        ({"r": 4}, "has rank 3, and r and rank_pattern say 4"),
        ({"r": None}, "has rank 3, and r and rank_pattern say 8"),
        ({"rank_pattern": {"k_proj": 4}}, "layers.1.self_attn.k_proj has rank 3, and r and rank_pattern say 4"),
        ({"rank_pattern": {".*[qk]_proj": 4}}, "layers.1.self_attn.k_proj has rank 3, and r and rank_pattern say 4"),
        ({"rank_pattern": {"k.proj": 4}}, "layers.1.self_attn.k_proj has rank 3, and r and rank_pattern say 4"),
        ({"rank_pattern": {r"^model\.layers\.1\.self_attn\.k_proj": 4}}, "layers.1.self_attn.k_proj has rank 3"),
        ({"target_modules": ["q_proj"]}, "layers.0.self_attn.k_proj is none of the layers that target_modules"),
        ({"exclude_modules": ["k_proj"]}, "layers.0.self_attn.k_proj is none of the layers that target_modules"),
        ({"target_modules": ["q_proj", "k_proj"], "layers_to_transform": 1}, "layers.0.self_attn.q_proj is none of"),
        ({"target_modules": {"q_proj": 1}}, "it must hold names of layers"),
        ({"layers_to_transform": ["0"]}, "it must hold numbers of layers"),
        ({"layers_pattern": ["blocks"]}, "layers_pattern is .'blocks'."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_are_followed_or_refused_by_name(fields: dict[str, Any], match: str, tmp_path: Path) -> None:
    model = llama()
    before = nnx.graphdef(model)
    write(tmp_path, adapters(["self_attn.q_proj", "self_attn.k_proj"]), **fields)
    with pytest.raises(ValueError, match=match):
        load_peft(model, tmp_path)
    assert nnx.graphdef(model) == before


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({"target_modules": r"model\.layers\.\d+\.self_attn\.(q|k)_proj"}, {"0.q", "0.k", "1.q", "1.k"}),
        ({"target_modules": ["proj"]}, set()),  # no part of a name
        ({"target_modules": ["k_proj"], "layers_to_transform": [1]}, {"1.k"}),
        ({"target_modules": ["k_proj"], "layers_to_transform": 1, "layers_pattern": "h"}, set()),
        ({"target_modules": ["model.layers.0.self_attn.k_proj", "q_proj"], "layers_to_transform": 1}, {"0.k", "1.q"}),
        ({"target_modules": "all-linear", "exclude_modules": r".*\.0\..*"}, {"1.q", "1.k"}),
        ({"target_modules": r".*\.self_attn\.(?!q).*", "layers_to_transform": 0}, {"0.k", "1.k"}),
    ],
)  # fmt: skip
def test_layers_are_chosen_as_peft_does_it(fields: dict[str, Any], chosen: set[str]) -> None:
    """As ``check_target_module_exists`` of PEFT says it of these names."""
    config = read_config(FIELDS | fields, "adapter_config.json", ())
    names = [f"{layer}.{name}" for layer in "01" for name in "qk"]
    found = {name for name in names if config.has(f"model.layers.{name[0]}.self_attn.{name[2]}_proj")}
    assert found == chosen


def test_numbers_are_those_of_the_first_expression_that_fits() -> None:
    """As ``get_pattern_key`` of PEFT chooses it: of the end of a name, from a dot on."""
    patterns = {"mlp.down_proj": 2, "proj": 3, r"layers\.[1-9].*\.k_proj": 4, "k_proj|v_proj": 5, "^lm_head": 6}
    config = read_config(FIELDS | {"rank_pattern": patterns, "alpha_pattern": {"[qk]_proj": 12.0}}, "config", ())
    ranks = {"0.mlp.down_proj": 2, "0.self_attn.q_proj": RANK, "12.self_attn.k_proj": 4, "0.self_attn.k_proj": 5}
    assert {name: config.rank_of(f"model.layers.{name}") for name in ranks} == ranks
    assert [config.rank_of(name) for name in ("lm_head", "model.lm_head")] == [6, RANK]
    assert [config.scale(f"model.layers.0.self_attn.{name}_proj", 4) for name in "qkv"] == [3.0, 3.0, 1.5]


def test_an_adapter_whose_layer_is_trained_too_is_refused(tmp_path: Path) -> None:
    """Its folder has no place for the layer's weights, before and after the adapter is merged."""
    for frozen in (True, False):
        model = llama()
        adapter = LoRA(model.layers[1].self_attention.qkv, RANK, freeze_base=frozen, rngs=nnx.Rngs(0))
        model.layers[1].self_attention.qkv = adapter
        if frozen:
            save_peft(model, tmp_path / "kept")
            adapter.merge()
        with pytest.raises(ValueError, match="layers/1/self_attention/qkv adapts a layer that is trained, too"):
            save_peft(model, tmp_path / "lost")
        assert not (tmp_path / "lost").exists()
        adapter.base.frozen = True
        save_peft(model, tmp_path / f"frozen {frozen}")


def test_a_refused_adapter_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of whose layers only the last cannot be adapted."""
    model = llama()
    before = nnx.graphdef(model)
    good = adapters(["self_attn.q_proj", "mlp.up_proj"])
    last = "base_model.model.model.layers.1.mlp.up_proj"
    whole = {name: good[name].astype(np.int32) for name in good if name.startswith(last)}
    with pytest.raises(CheckpointMismatchError, match=r"layers.1.mlp.up_proj.lora_A.weight is int32; bfloat16"):
        load_peft(model, write(tmp_path, good | whole))
    mixed = {f"{last}.lora_B.weight": good[f"{last}.lora_B.weight"].astype(ml_dtypes.bfloat16)}
    with pytest.raises(ValueError, match="adapters of one layer, layers/1/layernorm_mlp, have dtypes"):
        load_peft(model, write(tmp_path, good | mixed))
    made, make = iter(range(3)), LoRA.__init__  # of four

    def make_all_but_the_last(*arguments: Any, **options: Any) -> None:
        make(*arguments, **options)
        if next(made, None) is None:
            raise MemoryError

    monkeypatch.setattr(LoRA, "__init__", make_all_but_the_last)
    with pytest.raises(MemoryError):
        load_peft(model, write(tmp_path, good))
    assert nnx.graphdef(model) == before


def test_fields_that_say_nothing_pass(tmp_path: Path) -> None:
    published = {
        "auto_mapping": None, "base_model_name_or_path": "some/model", "corda_config": None, "eva_config": None,
        "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True, "layers_to_transform": [0, 1],
        "loftq_config": {}, "lora_bias": False, "megatron_core": "megatron.core", "peft_version": "0.21.2",
        "qalora_group_size": 16, "rank_pattern": {}, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM",
        "init_lora_weights": True, "revision": None, "use_qalora": False,
    }  # fmt: skip
    write(tmp_path, adapters(["self_attn.q_proj"]), **published)
    load_peft(llama(), tmp_path)
    write(tmp_path, adapters(["self_attn.q_proj"]), **published, some_field=3)
    load_peft(llama(), tmp_path, ignore_fields=["some_field"])
    write(tmp_path, adapters(["self_attn.q_proj"]), lora_dropout=0.05)
    with pytest.warns(UserWarning, match=r"lora_dropout is 0\.05") as warned:
        load_peft(llama(), tmp_path)
    assert [warning.filename for warning in warned] == [__file__]  # the caller's line


@pytest.mark.costly
def test_tensors_that_are_no_adapters_are_listed(tmp_path: Path) -> None:
    good = adapters(["self_attn.q_proj", "mlp.up_proj"])
    prefix = "base_model.model."
    name = f"{prefix}model.layers.1.mlp.up_proj.lora_B.weight"
    zeros = np.zeros((RANK, 32), np.float32)

    def refused(tensors: dict[str, np.ndarray]) -> list[str]:
        model = llama()
        before = nnx.graphdef(model)
        with pytest.raises(CheckpointMismatchError) as error:
            load_peft(model, write(tmp_path, tensors))
        assert nnx.graphdef(model) == before
        return str(error.value).splitlines()[1:]

    assert refused({each: good[each] for each in good if each != name}) == [
        "model.layers.1.mlp.up_proj has lora_A alone"
    ]
    assert refused(good | {"base_model.model.lm_head.weight": zeros}) == [
        "base_model.model.lm_head.weight [3, 32] is no matrix of LoRA for a linear layer"
    ]
    assert refused(good | {name: zeros}) == ["model.layers.1.mlp.up_proj has lora_A [3, 32] and lora_B [3, 32]"]
    assert refused(good | {name: good[name][:40]}) == [
        "model.layers.1.mlp.up_proj has lora_A and lora_B of [[3, 32], [40, 3]], and must have [[3, 32], [48, 3]]"
    ]
    head = {f"{prefix}lm_head.lora_A.weight": zeros, f"{prefix}lm_head.lora_B.weight": np.zeros((64, 3), np.float32)}
    assert refused(good | head) == ["lm_head is no linear layer of LlamaForCausalLM that can be adapted"]
    assert refused({}) == ["there are none"]
    ranks = adapters(["self_attn.q_proj"]) | adapters(["self_attn.k_proj"], rank=6)
    with pytest.raises(ValueError, match="adapters of one kernel, layers/0/self_attention/qkv/kernel, have ranks"):
        load_peft(llama(), write(tmp_path, ranks, rank_pattern={"k_proj": 6}))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="is not a file"):
        load_peft(llama(), tmp_path)


def test_a_folder_holds_a_model_or_an_adapter(tmp_path: Path) -> None:
    model = llama()
    save_huggingface(model, tmp_path / "model")
    write(tmp_path / "adapter", adapters(["self_attn.q_proj"]))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    with pytest.raises(ValueError, match=r"adapter holds an adapter \(adapter_config.json, adapter_model"):
        save_huggingface(model, tmp_path / "adapter")
    load_peft(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"model holds a model \(config.json, model.safetensors\)"):
        save_peft(model, tmp_path / "model")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == files
    save_peft(model, tmp_path / "adapter")


def test_the_factor_of_an_adapter_is_kept_exactly(tmp_path: Path) -> None:
    """Also where the quotient times the rank is not the number that was divided: 1 / 49 * 49 < 1."""
    model = llama()
    model.layers[0].self_attention.proj = LoRA(model.layers[0].self_attention.proj, 49, alpha=1.0, rngs=nnx.Rngs(0))
    save_peft(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 1
    back = llama()
    load_peft(back, tmp_path)
    assert back.layers[0].self_attention.proj.scale == 1.0 / 49


def test_models_that_have_adapters_or_none(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(ValueError, match="has no adapters"):
        save_peft(model, tmp_path / "none")
    folder = write(tmp_path / "given", adapters(["self_attn.q_proj"]))
    load_peft(model, folder)
    with pytest.raises(ValueError, match="layers/0/self_attention/qkv has an adapter already"):
        load_peft(model, folder)
    with pytest.raises(ValueError, match="unknown architecture 'Llama'"):
        load_peft(model, folder, architecture="Llama")
    for layer in model.layers:
        for name in ("lora_a", "lora_b"):
            variable = getattr(layer.self_attention.qkv, name)
            variable.set_value(jnp.zeros_like(variable.get_value()))
    with pytest.raises(ValueError, match="all adapters of the model are zero"):
        save_peft(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    model = llama()
    load_peft(model, write(tmp_path / "given", adapters(["self_attn.q_proj"])))
    run, other = tmp_path / "run", tmp_path / "other"
    saved_step(run, 4)
    other.mkdir()
    (other / "adapter_config.json").write_text('{"config": {"reduction_factor": 16}}')  # of the library adapters
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="holds checkpoints of a run of jax_te"):
        save_peft(model, run)
    with pytest.raises(ValueError, match=r"adapter_config\.json has no peft_type, .* another folder"):
        save_peft(model, other)
    assert sorted(tmp_path.rglob("*")) == before
    assert "reduction_factor" in (other / "adapter_config.json").read_text()


@pytest.mark.parametrize("pattern", [None, "block"])
def test_the_first_number_in_a_name_is_that_of_its_layer(pattern: str | None) -> None:
    """A T5's blocks have numbers, and so have the layers in them."""
    values = {"peft_type": "LORA", "target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": pattern}
    config = read_config(values, "adapter_config.json", [])
    named = "encoder.block.{}.layer.{}.SelfAttention.q"
    assert [config.has(named.format(block, layer)) for block in (0, 1) for layer in (0, 1)] == [
        False,
        False,
        True,
        True,
    ]
