"""Writers whose call is refused in the middle, by a value: nothing of it stays, and what was there before does."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te._whole_files import whole_or_nothing
from jax_te.config import TransformerConfig
from jax_te.interop.huggingface import save_huggingface, save_peft
from jax_te.interop.megatron import save_megatron
from jax_te.interop.torch import StoredTensor, write_torch_distributed, write_torch_file
from jax_te.layers import LoRA
from jax_te.models import GPTModel

Write = Callable[[Path, bool], None]
"""Writes to a path; with True, it is refused when a part is written."""


def gpt() -> GPTModel:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_query_groups=2,
        ffn_hidden_size=32,
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
    )
    return GPTModel(
        config,
        vocab_size=32,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        rngs=nnx.Rngs(0),
    )


def of_model(save: Callable[..., None], **options: Any) -> Write:
    def write(path: Path, refused: bool) -> None:
        model = gpt()
        if refused:
            model.final_norm.scale[...] = model.final_norm.scale[...].at[3].set(1e30)
        save(model, path, dtype=jnp.float16, **options)

    return write


def full_disk() -> np.ndarray:
    raise OSError(errno.ENOSPC, "No space left on device")


def of_tensors(save: Callable[..., None]) -> Write:
    def write(path: Path, refused: bool) -> None:
        whole = StoredTensor.of((2,), np.dtype("float32"), lambda: np.ones(2, np.float32), "a")
        broken = StoredTensor.of((2,), np.dtype("float32"), full_disk, "b")
        save(path, {"a": whole, "b": broken if refused else whole})

    return write


WRITERS: dict[str, tuple[str, Write]] = {
    "huggingface": ("out", of_model(save_huggingface)),
    "huggingface, shards": ("out", of_model(save_huggingface, max_shard_size=2000)),
    "megatron, 2 ranks": ("out", of_model(save_megatron, tensor_parallel=2)),
    "megatron, torch_dist": ("out", of_model(save_megatron, format="torch_dist")),
    "megatron, a file": ("out/model.pt", of_model(save_megatron)),
    "torch": ("out/file.pt", of_tensors(write_torch_file)),
    "torch.distributed": ("out", of_tensors(write_torch_distributed)),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_call_that_is_refused_while_it_writes_leaves_nothing(writer: str, tmp_path: Path) -> None:
    name, write = WRITERS[writer]
    path = tmp_path / "new" / name
    with pytest.raises((ValueError, OSError), match=r"beyond the largest of float16|No space left"):
        write(path, True)
    assert not list(tmp_path.iterdir())  # nor a folder, which `jax-te convert` would refuse
    write(path, False)
    before = contents(tmp_path)
    assert before
    if not writer.startswith("megatron") or path.suffix:  # which writes no second checkpoint into a folder
        with pytest.raises((ValueError, OSError)):
            write(path, True)
        assert contents(tmp_path) == before


def test_an_adapter_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt()
    proj = model.layers[0].self_attention.proj
    model.layers[0].self_attention.proj = LoRA(proj, 2, rngs=nnx.Rngs(0))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", lambda *_, **__: full_disk())  # the configuration, after the tensors
        with pytest.raises(OSError, match="No space left"):
            save_peft(model, tmp_path / "new" / "out")
    assert not list(tmp_path.iterdir())
    save_peft(model, tmp_path / "new" / "out")


def test_a_tokenizer_that_cannot_be_copied_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like, out = tmp_path / "like", tmp_path / "out"
    save_huggingface(gpt(), like)
    (like / "tokenizer.json").write_bytes(b"{}")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", lambda *_: full_disk())
        with pytest.raises(OSError, match="No space left"):
            save_huggingface(gpt(), out, like=like)
    assert not out.exists()
    save_huggingface(gpt(), out, like=like)
    assert (out / "tokenizer.json").read_bytes() == b"{}"


def test_writers_of_one_folder_leave_each_others_files(tmp_path: Path) -> None:
    """Also if one removes the folder that it made just before another writes there."""
    folder = tmp_path / "new" / "out"
    with contextlib.suppress(ValueError), whole_or_nothing(folder) as first:
        first.part("a").write_bytes(b"a")
        with whole_or_nothing(folder) as second:
            second.part("b").write_bytes(b"b")
        raise ValueError("refused")
    assert contents(tmp_path) == {"new/out/b": b"b"}
    other = tmp_path / "other"
    with whole_or_nothing(other) as second:
        with contextlib.suppress(ValueError), whole_or_nothing(other) as first:
            first.part("a")
            raise ValueError("refused")
        second.part("b").write_bytes(b"b")
    assert contents(other) == {"b": b"b"}


def test_remains_of_a_killed_call_are_no_part_of_the_next(tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(b"much more than the next call writes")
    (tmp_path / "b.part").mkdir()
    with whole_or_nothing(tmp_path) as new:
        with new.part("a").open("r+b") as file:
            file.write(b"a")
        new.part("b").write_bytes(b"b")
    assert contents(tmp_path) == {"a": b"a", "b": b"b"}
