"""``jax-te convert``: a model from one kind of checkpoint into another."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jax_te._validation import read_text
from jax_te.checkpoint import TrainCheckpointer
from jax_te.cli.build import abstract_model_state, contexts, warnings_as_lines
from jax_te.cli.checkpoint_kind import Kind, checkpoint_folder, kind_of
from jax_te.cli.command_options import (
    FROM_FOLDER,
    FROM_MEGATRON,
    FROM_RUN,
    FROM_STEPS,
    TO_FOLDER,
    TO_MEGATRON,
    TO_MODEL,
    UPCYCLED,
    ConvertOptions,
)
from jax_te.cli.model_config import field_names, merge_adapters
from jax_te.cli.option_table import check_effects
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_files import CONFIG_FILE, read_config
from jax_te.data import TOKENIZER_FILE
from jax_te.interop.huggingface import (
    CONFIG,
    companions,
    load_huggingface,
    named_classes,
    save_huggingface,
    save_peft,
)
from jax_te.interop.megatron import load_megatron, save_megatron
from jax_te.interop.tables import OnProgress
from jax_te.metrics import counting
from jax_te.models import upcycle
from jax_te.training import exact_model


def run(options: ConvertOptions) -> int:
    """Return the exit status, 0, once the model is written.

    Raises:
        ValueError: if FROM is not a checkpoint, TO exists, an option belongs to another kind of checkpoint, or the
            target format cannot represent the model.
    """
    source, target = Path(options.source), Path(options.target)
    kind = kind_of(source)
    if kind == "peft":
        raise ValueError(
            f"{source} holds adapters of PEFT, and the model that they are for is elsewhere; add them to it with "
            "load_huggingface and load_peft, and write it with save_huggingface or save_megatron. `jax-te inspect "
            "checkpoint` lists them"
        )
    target_format = options.to or _default_format(kind, target)
    if target.exists():
        raise ValueError(f"{target} exists; give another name, or delete it")
    _check(options, kind, target_format)
    config = read_config(_run_of(source)) if kind == "jax-te" else None
    if target_format == "peft" and (config is None or config.lora_rank is None):
        raise ValueError("--to peft writes the adapters of a run of jax-te train --lora-rank, and FROM is not one")
    if options.dtype is None and config is not None and target_format != "peft":
        # Readers want one dtype, and the masters of kernels that are stored quantized are fp32 in a run of any.
        options = dataclasses.replace(options, dtype=config.params_dtype)
    with counting("read") as on_progress:
        model = _read(options, source, kind, config, on_progress)
    if options.upcycle is not None:
        model = upcycle(
            model,
            num_moe_experts=options.upcycle,
            moe_router_topk=options.upcycle_topk or 2,
            rngs=nnx.Rngs(0),
        )
    if target_format == "peft":
        _write_peft(options, model, config)
    elif target_format == "megatron":
        _write_megatron(options, model)
    else:
        _write_huggingface(options, model, kind, config)
    print(f"{target}: {_FORMAT_NAMES[target_format]}")
    return 0


_FORMAT_NAMES = {"megatron": "Megatron-LM", "huggingface": "Hugging Face", "peft": "PEFT"}


def _default_format(kind: str, target: Path) -> str:
    """Return the format without ``--to``: Megatron-LM's for its file's name, and from a Hugging Face model."""
    # To another format than FROM's: the same one is written only on request.
    return "megatron" if kind == "huggingface" or target.suffix == ".pt" else "huggingface"


def _check(options: ConvertOptions, kind: Kind, target_format: str) -> None:
    """Raise ValueError for options that have no effect from one kind of checkpoint to a format."""
    met = {
        FROM_RUN: kind == "jax-te",
        FROM_FOLDER: kind == "huggingface",
        FROM_MEGATRON: kind in ("megatron", "torch"),
        FROM_STEPS: kind in ("megatron", "jax-te"),
        TO_MEGATRON: target_format == "megatron",
        TO_FOLDER: target_format != "megatron",
        TO_MODEL: target_format != "peft",
        UPCYCLED: options.upcycle is not None,
    }
    check_effects(options, met)
    if kind == "jax-te":
        checkpoint_folder(Path(options.source), options.step)


def _write_peft(options: ConvertOptions, model: Any, config: RunConfig | None) -> None:
    architecture = options.architecture or _architecture(config)
    base = None if config is None else config.init_from
    save_peft(model, Path(options.target), architecture=architecture, base=base, dtype=options.dtype)


def _write_megatron(options: ConvertOptions, model: Any) -> None:
    with counting("written") as on_progress:
        save_megatron(
            model,
            Path(options.target),
            format=options.megatron_format or "torch",
            tensor_parallel=options.tensor_parallel,
            dtype=options.dtype,
            on_progress=on_progress,
        )


def _write_huggingface(options: ConvertOptions, model: Any, kind: str, config: RunConfig | None) -> None:
    source = Path(options.source)
    with counting("written") as on_progress, contextlib.ExitStack() as stack:
        # The tokenizer, and the fields about tokens that a model does not contain.
        like = source if kind == "huggingface" else None
        if config is not None:
            like = stack.enter_context(_beside_run(_run_of(source), config))
        save_huggingface(
            model,
            Path(options.target),
            architecture=options.architecture or _architecture(config),
            like=like,
            dtype=options.dtype,
            on_progress=on_progress,
        )


def _read(options: ConvertOptions, source: Path, kind: str, config: RunConfig | None, on_progress: OnProgress) -> Any:
    if kind == "huggingface":
        return load_huggingface(
            source,
            dtype=options.dtype,
            ignore_fields=field_names(options.ignore_fields),
            block_scaled="dequantize" if options.dequantize else None,
            on_progress=on_progress,
        )
    if kind == "jax-te":
        if config is None:
            raise ValueError(f"{_run_of(source)} has no {CONFIG_FILE}, which says what the model is")
        return _model_of_run(options, source, config)
    return load_megatron(
        source,
        iteration=options.step,
        args={} if options.megatron_args is None else _megatron_args(options.megatron_args),
        dtype=options.dtype,
        vocab_size=options.vocab_size,
        on_progress=on_progress,
    )


def _megatron_args(file: str) -> dict[str, Any]:
    """Return the arguments in the file of ``--megatron-args``."""
    try:
        values = json.loads(read_text(Path(file)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--megatron-args {file} is not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--megatron-args {file} must hold a JSON object, and holds a {type(values).__name__}")
    return values


def _run_of(source: Path) -> Path:
    """Return the folder of a checkpoint's run."""
    return next(
        (parent for parent in checkpoint_folder(source).parents[:2] if (parent / CONFIG_FILE).is_file()), source
    )


def _model_of_run(options: ConvertOptions, source: Path, config: RunConfig) -> Any:
    """Return the model of a run, with the masters of kernels that are stored quantized; adapters are merged, except for
    ``--to peft``."""
    folder = checkpoint_folder(source, options.step)
    # One device and any available backend, wherever it was trained.
    config = config.on_one_device(options.factory_modules)
    with contexts(config), TrainCheckpointer(folder.parent) as checkpointer, warnings_as_lines():
        wanted = abstract_model_state(config, masters=True)
        state, _, _ = checkpointer.restore(wanted, step=int(folder.name), allow={"unexpected"})
        # A given dtype is rounded to from the masters, not from their rounding to the run's dtype.
        model = exact_model(state, all_masters=options.dtype is not None)
        if config.lora_rank is not None and options.to != "peft":
            merge_adapters(model)
        return jax.block_until_ready(model)


def _architecture(config: RunConfig | None) -> str | None:
    """Return the architecture with which a run began, None for another model: the first one that fits."""
    if config is None or config.model_config is None:
        return None
    (name,) = named_classes(json.loads(config.model_config))
    return name


@contextlib.contextmanager
def _beside_run(run: Path, config: RunConfig) -> Iterator[Path]:
    """Yield a folder with the ``config.json`` of ``--init-from``, for its tokens, and the run's tokenizer.

    With that folder's other files of its tokenizer and of generation, as long as it is where it was. The tokenizer of a
    run on bytes is one of them.
    """
    # Another tokenizer has other token IDs.
    known = config.init_from is not None and _has_its_tokenizer(config, Path(config.init_from))
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / CONFIG).write_text(str(config.model_config) if known else "{}")
        if known and config.init_from is not None:
            for path in companions(Path(config.init_from)):
                shutil.copyfile(path, Path(name) / path.name)
        # The folder of a run on bytes may have a tokenizer of a start before it, which saved nothing.
        if config.tokenizer_sha256 is None:
            (Path(name) / TOKENIZER_FILE).write_text(_tokenizer_of_bytes(), encoding="utf-8")
        elif (run / TOKENIZER_FILE).is_file():
            shutil.copyfile(run / TOKENIZER_FILE, Path(name) / TOKENIZER_FILE)
        yield Path(name)


def _tokenizer_of_bytes() -> str:
    """Return a ``tokenizer.json`` whose tokens are the bytes of UTF-8: a byte-level BPE without merges."""
    # The characters that stand for bytes in such a file: those that can be seen for themselves, the rest from 256 on.
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = [chr(byte) if byte in seen else "" for byte in range(256)]
    for number, byte in enumerate(byte for byte in range(256) if byte not in seen):
        characters[byte] = chr(256 + number)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(characters)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model})


def _has_its_tokenizer(config: RunConfig, folder: Path) -> bool:
    """Return whether a run's tokenizer is that of a model's folder, by whichever path it was given."""
    its = folder / TOKENIZER_FILE
    if config.tokenizer_sha256 is None:  # a run on bytes
        return False
    if its.is_file():
        return hashlib.sha256(its.read_bytes()).hexdigest() == config.tokenizer_sha256
    # The folder may be gone since.
    return config.tokenizer is not None and Path(config.tokenizer) in (folder, its)
