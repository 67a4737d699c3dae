"""Folders with FP8 tensors and a scale for each block of 128 x 128, DeepSeek's form: dequantized, kept, refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jax_te.cli.main import main
from jax_te.errors import CheckpointMismatchError
from jax_te.interop.huggingface import load_huggingface, save, save_huggingface
from jax_te.interop.huggingface.block_scaled import held_kernels
from jax_te.interop.huggingface.safetensors import TensorFile, write_file
from jax_te.interop.tables.host_arrays import on_host
from jax_te.quantize import BlockQuantizer, QuantizedKernel
from jax_te.recipe import Float8BlockScaling, Float8CurrentScaling, autocast
from jax_te.training import create_train_state
from tests.interop.huggingface.test_folder import FUZZ, JSON, change, llama
from tests.support.meshes import use_mesh
from tests.support.numerics import assert_bitwise, assert_close, quick_jit, relative_l2

CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
EXACT = Float8BlockScaling(use_f32_scales=True)
TOKENS = jnp.arange(32, dtype=jnp.int32).reshape(4, 8)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return dict(TensorFile(folder / "model.safetensors").tensors)


def write(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    plan = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    write_file(folder / "model.safetensors", plan, tensors.items())
    return folder


def blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // 128) for size in shape)


def make(folder: Path, *, powers: bool = False, scale_dtype: Any = np.float32, **sizes: Any) -> Path:
    """A Llama whose projections are in FP8, each block with random values and a random scale."""
    options = {"num_layers": 1, "hidden_size": 208, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 128}
    save_huggingface(llama(**options | {"ffn_hidden_size": 256} | sizes), folder, dtype="bfloat16")
    return in_fp8(folder, powers=powers, scale_dtype=scale_dtype)


def in_fp8(folder: Path, *, powers: bool = False, scale_dtype: Any = np.float32) -> Path:
    """A folder with its projections in FP8, each block with random values and a random scale."""
    rng, tensors = np.random.default_rng(0), {}
    for name, tensor in tensors_of(folder).items():
        if "_proj" in name:
            exponents = rng.integers(-12, -9, blocks(tensor.shape))
            scale = np.exp2(exponents if powers else exponents + rng.random(exponents.shape))
            tensors[name] = rng.normal(scale=30.0, size=tensor.shape).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.astype(scale_dtype)
        else:
            tensors[name] = tensor.copy()
    change(folder, quantization_config=CONFIG)
    return write(folder, tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("fp8"))


def copied(folder: Path, to: Path) -> Path:
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def product(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The values of a tensor, each times the scale of its block, fp32."""
    data, scale = tensors[name], np.float32(tensors[f"{name}_scale_inv"])
    rows, columns = np.indices(data.shape)
    return np.float32(data) * scale[rows // 128, columns // 128]


def kernels(folder: Path) -> dict[str, np.ndarray]:
    """Our kernels of the first layer, by the formula."""
    tensors, at = tensors_of(folder), "model.layers.0."
    w = {name: product(tensors, name) for name in tensors if f"{name}_scale_inv" in tensors}
    q, k, v = (w[f"{at}self_attn.{each}_proj.weight"].T for each in "qkv")
    # Of two groups with two heads each; ours has the first heads of both groups in front.
    first, second = (q.reshape(-1, 2, 2, 128)[:, :, i].reshape(-1, 256) for i in range(2))
    gate, up = (w[f"{at}mlp.{each}_proj.weight"].T for each in ("gate", "up"))
    return {
        "qkv": np.stack([first, second, k, v], 1),
        "proj": w[f"{at}self_attn.o_proj.weight"].T,
        "wi_kernel": np.stack([gate, up], 1),
        "wo_kernel": w[f"{at}mlp.down_proj.weight"].T,
    }


def ours(model: Any) -> dict[str, Any]:
    layer = model.layers[0]
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    variables = {"qkv": attention.qkv.kernel, "proj": attention.proj.kernel}
    variables |= {"wi_kernel": mlp.wi_kernel, "wo_kernel": mlp.wo_kernel}
    return {name: variable.get_value() for name, variable in variables.items()}


@pytest.mark.costly("explicit", slow=["no mesh"])
@pytest.mark.parametrize("mode", ["no mesh", "explicit"])
def test_dequantized_values_are_the_products_rounded_once(mode: str, folder: Path) -> None:
    with use_mesh(mode):
        for dtype in (None, jnp.float32):
            model = load_huggingface(folder, block_scaled="dequantize", dtype=dtype)
            stored = jnp.bfloat16 if dtype is None else dtype  # that of the other tensors
            for name, array in ours(model).items():
                assert_bitwise(array, jnp.asarray(kernels(folder)[name]).astype(stored), what=name)


@pytest.mark.slow
def test_kept_kernels_are_the_files_bytes_and_run(folder: Path, tmp_path: Path) -> None:
    plain = load_huggingface(folder, block_scaled="dequantize", dtype=jnp.float32)
    with autocast(EXACT):
        model = load_huggingface(folder, block_scaled="keep", dtype=jnp.float32)
        for name, kernel in ours(model).items():
            assert isinstance(kernel, QuantizedKernel)
            assert kernel.operand.rowwise.data.dtype == jnp.float8_e4m3fn
            assert_bitwise(kernel.dequantize(), kernels(folder)[name], what=name)
        run = quick_jit(lambda model: model(TOKENS))
        # What differs are inputs in FP8: three bits of mantissa in each of a layer's four GEMMs.
        assert relative_l2(run(model), run(plain)) < 4 * 2.0**-4
        with use_mesh("explicit"):
            sharded = load_huggingface(folder, block_scaled="keep", dtype=jnp.float32)
            data = ours(sharded)["wi_kernel"].operand.rowwise.data
            assert data.addressable_shards[0].data.size == data.size // 4
            assert_close(run(sharded), run(model), 2.0**-18)
        whole = jax.tree.map(jnp.asarray, jax.device_get(ours(sharded)["qkv"]))
        assert_bitwise(whole.dequantize(), kernels(folder)["qkv"])
        with pytest.raises(ValueError, match="stored quantized"):
            save_huggingface(model, tmp_path)


@pytest.mark.slow
def test_what_a_recipe_does_not_keep_exactly_is_refused(folder: Path, tmp_path: Path) -> None:
    recipes = (None, Float8CurrentScaling(), Float8BlockScaling())
    for recipe, why in zip(recipes, ("stores it as None", "stores it as", "not powers of two"), strict=True):
        with autocast(recipe), pytest.raises(ValueError, match=rf"cannot keep layers/0/.*{why}.*use_f32_scales=True"):
            load_huggingface(folder, block_scaled="keep")
    with autocast(Float8BlockScaling()):  # whose scales are powers of two, as these are
        load_huggingface(make(tmp_path, powers=True, scale_dtype=ml_dtypes.bfloat16), block_scaled="keep")
    # A block of the file lies across two heads of size 64, which are not neighbours in our kernel.
    make(tmp_path, kv_channels=64)
    with autocast(EXACT), pytest.raises(ValueError, match=r"qkv/kernel \[208, 4, 128\]: its blocks .*'dequantize'"):
        load_huggingface(tmp_path, block_scaled="keep")
    tensors = tensors_of(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    plain = {each: tensor for each, tensor in tensors.items() if each != f"{name}_scale_inv"}
    write(tmp_path, {each: tensor.copy() for each, tensor in (plain | {name: product(tensors, name)}).items()})
    with autocast(EXACT), pytest.raises(ValueError, match="wi_kernel: its tensors are not all in FP8"):
        load_huggingface(tmp_path, block_scaled="keep", dtype=jnp.float32)
    with autocast(EXACT):
        load_huggingface(tmp_path, block_scaled="dequantize", dtype=jnp.float32)


@pytest.mark.costly(slow=("no mesh",))
@pytest.mark.parametrize("mode", ["no mesh", "explicit"])
def test_kept_kernels_are_written_as_they_were_read(
    mode: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr(
        save, "on_host", lambda array, *args, **how: fetched.append(array) or on_host(array, *args, **how)
    )
    with autocast(EXACT), use_mesh(mode):
        model = load_huggingface(folder, block_scaled="keep")
        save_huggingface(model, tmp_path, block_scaled="keep")
        values = [id(kernel.form.rowwise.data) for kernel in held_kernels(model).values()]
    # Values are fetched once, when they are written, and not before for the sake of their scales.
    assert sorted(id(array) for array in fetched if array.dtype == jnp.float8_e4m3fn) == sorted(values)
    written, read = tensors_of(tmp_path), tensors_of(folder)
    assert written.keys() == read.keys()
    for name, tensor in read.items():
        assert_bitwise(written[name], tensor, what=name)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["torch_dtype"] == "bfloat16"
    assert said["quantization_config"] == CONFIG | {"modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    save_huggingface(load_huggingface(folder, block_scaled="dequantize"), tmp_path)  # takes the place of it
    load_huggingface(tmp_path)


@pytest.mark.slow
def test_kernels_that_a_run_stores_quantized_are_written(tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "num_query_groups": 1}
    sizes |= {"ffn_hidden_size": 256, "kv_channels": 128}

    def state(recipe: Any, **changes: Any) -> Any:
        with autocast(recipe):
            return create_train_state(llama(**sizes | changes), optax.sgd(0.1), key=jax.random.key(0), fp8_param=True)

    trained = state(Float8BlockScaling()).model
    save_huggingface(trained, tmp_path, block_scaled="keep", dtype="bfloat16")
    with autocast(Float8BlockScaling()):
        back = load_huggingface(tmp_path, block_scaled="keep", dtype="float32")
    for name, kernel in ours(trained).items():
        read = ours(back)[name]
        assert_bitwise(read.form.rowwise.data, kernel.form.rowwise.data, what=name)
        assert_bitwise(read.form.rowwise.scale_inv, kernel.form.rowwise.scale_inv, what=name)
    halves = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 64}
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refused = {
        # A block of ours lies across heads that are not neighbours in the file.
        r"qkv/kernel \[128, 4, 128\]: its blocks .* with its masters": state(EXACT, **halves).model,
        "the model has none": llama(),
    }
    for why, model in refused.items():
        with pytest.raises(ValueError, match=f"block_scaled='keep' .*{why}"):
            save_huggingface(model, tmp_path, block_scaled="keep")
    with pytest.raises(ValueError, match="must be 'keep' or None, got 'dequantize'"):
        save_huggingface(trained, tmp_path, block_scaled="dequantize")
    kernel = trained.layers[0].self_attention.proj.kernel
    value = kernel.get_value()
    kernel.set_value(jax.tree.map(lambda leaf: leaf + leaf, value))
    with pytest.raises(TypeError, match="arithmetic on a kernel that is stored quantized"):
        save_huggingface(trained, tmp_path, block_scaled="keep")
    other = replace(value, quantizer=BlockQuantizer(dtype=jnp.float8_e4m3fn))
    kernel.set_value(other)
    with pytest.raises(ValueError, match=r"proj/kernel is stored as BlockQuantizer.*two_dimensional=False"):
        save_huggingface(trained, tmp_path, block_scaled="keep")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.costly
def test_a_head_in_fp8_is_dequantized_but_not_kept(folder: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.copy() for name, tensor in tensors_of(folder).items()}
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(ml_dtypes.float8_e4m3fn)
    tensors["lm_head.weight_scale_inv"] = np.full(blocks(tensors["lm_head.weight"].shape), 0.5, np.float32)
    write(copied(folder, tmp_path), tensors)
    model = load_huggingface(tmp_path, block_scaled="dequantize")
    assert_bitwise(model.output_kernel[...], (tensors["lm_head.weight"].astype(ml_dtypes.bfloat16) / 2).T)
    with autocast(EXACT), pytest.raises(ValueError, match="output_kernel is another parameter"):
        load_huggingface(tmp_path, block_scaled="keep")


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"quant_method": None}, "quant_method is None"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size is \[64, 128\]; only \[128, 128\]"),
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"store": "int8"}, "store='int8'"),
    ],
)
def test_other_forms_are_refused_by_name(values: dict[str, Any], match: str, folder: Path, tmp_path: Path) -> None:
    change(copied(folder, tmp_path), quantization_config=CONFIG | values)
    with pytest.raises(ValueError, match=match):
        load_huggingface(tmp_path, block_scaled="dequantize")


def test_commands_dequantize_on_request(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["convert", str(folder), str(tmp_path / "new"), "--to", "huggingface"]
    assert main(argv) == 2
    assert "jax-te convert and eval: --dequantize" in capsys.readouterr().err
    assert main(["train", "--init-from", str(folder), "--output", str(tmp_path / "run")]) == 2
    assert "jax-te convert FOLDER NEW --to huggingface --dequantize" in capsys.readouterr().err
    assert main([*argv, "--dequantize"]) == 0
    found, expected = load_huggingface(tmp_path / "new"), load_huggingface(folder, block_scaled="dequantize")
    jax.tree.map(assert_bitwise, nnx.to_pure_dict(nnx.state(found)), nnx.to_pure_dict(nnx.state(expected)))


def test_the_choice_is_the_callers(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"quantization_config: .*block_scaled='dequantize'.*'keep'.*got None"):
        load_huggingface(folder)
    save_huggingface(llama(), tmp_path)
    with pytest.raises(ValueError, match="block_scaled='keep' is for a folder with a quantization_config"):
        load_huggingface(tmp_path, block_scaled="keep")


def test_all_scales_that_do_not_fit_are_in_one_error(folder: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.copy() for name, tensor in tensors_of(folder).items()}
    at = "model.layers.0.mlp"
    del tensors[f"{at}.gate_proj.weight_scale_inv"]
    tensors["model.norm.weight_scale_inv"] = np.ones((1, 1), np.float32)
    tensors[f"{at}.up_proj.weight_scale_inv"] = np.ones((2, 3), np.float32)
    tensors[f"{at}.down_proj.weight_scale_inv"] = np.full((2, 2), np.nan, np.float32)
    for each, value in (("q", np.zeros((4, 2), np.float32)), ("k", np.ones((2, 2), np.float64))):
        tensors[f"model.layers.0.self_attn.{each}_proj.weight_scale_inv"] = value
    write(copied(folder, tmp_path), tensors)
    with pytest.raises(CheckpointMismatchError) as error:
        load_huggingface(tmp_path, block_scaled="dequantize")
    assert str(error.value).splitlines()[1:] == [
        f"{at}.gate_proj.weight has no scale_inv",
        "model.norm.weight has no tensor in E4M3",
        f"{at}.down_proj.weight_scale_inv has scales that are not positive numbers",
        f"{at}.up_proj.weight_scale_inv is [2, 3] and must be [2, 2], for [256, 208] values, of two axes",
        "model.layers.0.self_attn.k_proj.weight_scale_inv is float64 and must be float32 or bfloat16",
        "model.layers.0.self_attn.q_proj.weight_scale_inv has scales that are not positive numbers",
    ]


@FUZZ
@given(data=st.data())
def test_any_scales_and_fields_are_read_or_refused(data: Any, folder: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.copy() for name, tensor in tensors_of(folder).items()}
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = data.draw(st.sampled_from([np.float32, np.int8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]))
    value = data.draw(st.sampled_from([0.0, 1.0, -1.0, np.inf, np.nan]) if dtype != np.int8 else st.just(1))
    tensors[name] = np.full(shape, value).astype(dtype)
    if data.draw(st.booleans()):
        del tensors[data.draw(st.sampled_from(sorted(tensors)))]
    write(copied(folder, tmp_path), tensors)
    keys = st.sampled_from([*CONFIG, "scale_fmt"])
    change(tmp_path, quantization_config=CONFIG | data.draw(st.dictionaries(keys, JSON, max_size=1)))
    with contextlib.suppress(ValueError), autocast(EXACT):
        load_huggingface(tmp_path, block_scaled=data.draw(st.sampled_from(["keep", "dequantize"])))
