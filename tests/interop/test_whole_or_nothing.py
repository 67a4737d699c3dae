"""Writers whose call is refused in the middle, by a value: nothing of it stays, and what was there before does."""

from __future__ import annotations

import contextlib
import errno
import os
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


@pytest.mark.costly("huggingface", slow=("huggingface, shards",))
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


def failing(method: Callable[..., Any], name: str, error: BaseException) -> Callable[..., Any]:
    """Return a method of paths that fails for one name."""

    def call(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise error
        return method(path, *args, **options)

    return call


IO_ERROR = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("method", "name", "error", "left", "told"),
    [
        ("replace", "a.part", IO_ERROR, {"a.part": b"new", "b.part": b"new"}, "rename a.part, b.part to"),
        ("replace", "b.part", IO_ERROR, {"a": b"new", "b.part": b"new"}, "rename b.part to"),
        (
            "unlink",
            "c",
            IO_ERROR,
            {"b": b"old", "c": b"old", "a.part": b"new", "b.part": b"new"},
            "remove c, then rename a.part, b.part to",
        ),
        ("replace", "b.part", KeyboardInterrupt(), {"a": b"new", "b.part": b"new"}, "rename b.part to"),
    ],
    ids=["first rename", "second rename", "removal", "Ctrl-C"],
)
def test_an_exchange_that_fails_keeps_what_is_complete(
    method: str,
    name: str,
    error: BaseException,
    left: dict[str, bytes],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for old in ("a", "b", "c"):
        (tmp_path / old).write_bytes(b"old")
    with monkeypatch.context() as patched:

        def exchange() -> None:
            with whole_or_nothing(tmp_path) as new:
                new.part("a").write_bytes(b"new")
                new.part("b").write_bytes(b"new")
                new.replaces(tmp_path / old for old in ("a", "c", "b"))
                patched.setattr(Path, method, failing(getattr(Path, method), name, error))

        with pytest.raises(type(error)) as raised:
            exchange()
    assert told in " ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert contents(tmp_path) == left


@pytest.mark.parametrize("save", ["model", "adapter"])
def test_a_model_is_not_lost_if_its_files_cannot_be_renamed(
    save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = gpt()
    if save == "adapter":
        proj = model.layers[0].self_attention.proj
        model.layers[0].self_attention.proj = LoRA(proj, 2, rngs=nnx.Rngs(0))
        model.layers[0].self_attention.proj.lora_b[...] += 1.0
    write = {"model": save_huggingface, "adapter": save_peft}[save]
    write(model, tmp_path)
    before = contents(tmp_path)
    tensors = next(name for name in before if name.endswith(".safetensors"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", failing(Path.replace, f"{tensors}.part", IO_ERROR))
        with pytest.raises(OSError, match=rf"rename {tensors}\.part, .*config\.json\.part to the names without"):
            write(model, tmp_path)
    left = contents(tmp_path)
    assert {name: left[f"{name}.part"] for name in before} == before
    write(model, tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_the_exchange(when: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def exchange() -> None:
        with whole_or_nothing(tmp_path) as new:
            new.part("a").write_bytes(b"new")
            if when == "before":
                (tmp_path / "b").mkdir()
            new.part("b").write_bytes(b"new")
            (tmp_path / "b").mkdir()

    with pytest.raises(IsADirectoryError, match="remove it"):
        exchange()
    assert contents(tmp_path) == {"a": b"old"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_part_that_cannot_be_removed_leaves_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, contextlib.suppress(ValueError), whole_or_nothing(tmp_path) as new:
        new.part("a")
        new.part("b")
        patched.setattr(Path, "unlink", failing(Path.unlink, "a.part", IO_ERROR))
        raise ValueError("refused")
    assert [*contents(tmp_path)] == ["a.part"]


def test_a_distributed_checkpoint_leaves_the_parts_of_another_writer(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp.part").write_bytes(b"of another program")
    (tmp_path / "__0_1.distcp.part").write_bytes(b"of another program")
    for _ in range(2):
        write_torch_distributed(tmp_path, {"a": np.ones(2, np.float32)})
    files = sorted(contents(tmp_path))
    assert [name for name in files if name.endswith(".part")] == ["__0_0.distcp.part", "__0_1.distcp.part"]
    assert len(files) == 4


def test_older_files_go_when_what_replaces_them_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.bin").write_bytes(b"old")
    there, fsync = [], os.fsync

    def flush(descriptor: int) -> None:
        there.append((tmp_path / "old.bin").exists())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    with whole_or_nothing(tmp_path) as new:
        new.part("new.bin").write_bytes(b"new")
        folder = new.part_folder("folder")
        folder.mkdir()
        (folder / "a").write_bytes(b"a")
        new.replaces([tmp_path / "old.bin"])
    assert there == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new.bin"]
