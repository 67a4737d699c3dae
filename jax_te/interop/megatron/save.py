"""Models as checkpoints of Megatron-LM: a file for each tensor rank, or one checkpoint for any number of ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np

from jax_te._validation import checked, float_dtype
from jax_te._whole_files import whole_or_nothing
from jax_te.interop.megatron.expert_states import expert_states
from jax_te.interop.megatron.flags import MEGATRON
from jax_te.interop.megatron.folder import ARGS, RANK_FILE, TRACKER, split_axis
from jax_te.interop.megatron.write_distributed import ExpertStates, state_bytes, write_distributed
from jax_te.interop.tables import (
    Entry,
    Form,
    OnProgress,
    Sizes,
    architecture_of,
    check_no_run,
    converted,
    is_state,
    placed_arrays,
)
from jax_te.interop.torch import StoredTensor, write_torch_file
from jax_te.megatron import state_dict
from jax_te.models import GPTModel
from jax_te.typing import DTypeLike, Words

_KIND = "Megatron-LM"
# Megatron-LM's name of weights without a training state; it then begins with iteration 0.
_RELEASE = "release"


@checked
def save_megatron(
    model: Annotated[GPTModel, Words("a GPTModel or MegatronGPTModel", error=ValueError)],
    path: str | Path,
    *,
    format: Literal["torch", "torch_dist"] = "torch",
    tensor_parallel: int = 1,
    dtype: DTypeLike | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Write a model as a checkpoint of Megatron-LM, without torch.

    The folder is one for ``--load`` with this ``--ckpt-format``, without an optimizer:
    ``release/mp_rank_XX/model_optim_rng.pt``, or for ``torch_dist`` a folder of torch.distributed, which any number of
    ranks and stages loads. Megatron-LM's arguments must be those of the model; the entry ``jax_te_args`` has them.
    Tensors are written one by one, and the folder gets its name when it is complete; a call that raises leaves nothing
    of it. Inside of the recipe of a model under delayed scaling the scales and amax histories of experts are written as
    their ``_extra_state``.

    Args:
        model: a `GPTModel` or `MegatronGPTModel`.
        path: the folder, in which ``release/`` must not hold files; or a file ``*.pt``, for one rank, which is
            replaced.
        format: Megatron-LM's name of the format.
        tensor_parallel: number of files to split the model over, in the format ``torch``.
        dtype: dtype of the parameters. None: their own. A router's bias of experts stays fp32, as Megatron-Core has it.
        on_progress: function called after each tensor with the number of tensors done and the number of all.

    Raises:
        ValueError: for a model with options that Megatron-LM's arguments cannot represent; for sizes that do not
            divide; for a ``release/`` that holds files; for a folder with checkpoints of jax_te; on several processes.

    Source: ``save_checkpoint`` of Megatron-LM.

    >>> save_megatron(model, "converted", tensor_parallel=2)  # doctest: +SKIP
    """
    path = Path(path)
    dtype = None if dtype is None else float_dtype("dtype", dtype)
    if jax.process_count() > 1:
        raise ValueError("save_megatron writes from one process; save with TrainCheckpointer, and convert that")
    _check_target(path, format, tensor_parallel)
    _, form = architecture_of(model, {_KIND: MEGATRON})
    tensors = _tensors(model, form, dtype)
    _check_divides(form, tensor_parallel)
    ranks = _rank_tensors(tensors, form, tensor_parallel, on_progress)
    states = list(expert_states(model))
    arguments = dict(MEGATRON.config_fields(form)) | {"tensor_model_parallel_size": tensor_parallel}
    common = {"checkpoint_version": 3.0, "iteration": 0, ARGS: arguments}
    if format == "torch_dist":
        _write_folder(path, lambda folder: write_distributed(folder, ranks[0], common, states, form))
    elif path.suffix == ".pt":
        write_torch_file(path, common | {"model": ranks[0] | _extra_states(states)})
    else:
        _write_folder(path, lambda folder: _write_ranks(folder, ranks, common, states))


def _check_target(path: Path, format: str, tensor_parallel: int) -> None:
    """Raise ValueError for a path that is not one of this format and number of ranks, or that holds something else."""
    single, distributed = path.suffix == ".pt", format == "torch_dist"
    if tensor_parallel < 1 or (tensor_parallel > 1 and (single or distributed)):
        raise ValueError(
            f"tensor_parallel must be >= 1, and 1 for a single file and for torch_dist, which is for any number of "
            f"ranks, got {tensor_parallel}"
        )
    if single and distributed:
        raise ValueError(f"torch_dist needs a folder, got {path}")
    if not single and _holds_files(path / _RELEASE):
        raise ValueError(
            f"{path / _RELEASE} holds files already, and a checkpoint of another format or number of ranks would be "
            "mixed with them; remove it, or give another folder"
        )
    if not single:
        check_no_run(path)
        _check_tracker(path / TRACKER)


def _check_divides(form: Form, tensor_parallel: int) -> None:
    groups = form.config.num_query_groups
    if groups is not None and groups % tensor_parallel:
        raise ValueError(f"tensor_parallel {tensor_parallel} does not divide {groups} groups")


def _rank_tensors(
    tensors: Mapping[str, StoredTensor], form: Form, tensor_parallel: int, on_progress: OnProgress | None
) -> list[dict[str, StoredTensor]]:
    """Return the tensors of each rank."""
    gated = form.sizes()["a"] == 2
    count = _counter(on_progress, len(tensors) * tensor_parallel)
    return [
        {name: count(_rank_part(name, tensor, rank, tensor_parallel, gated)) for name, tensor in tensors.items()}
        for rank in range(tensor_parallel)
    ]


def _extra_states(states: ExpertStates) -> dict[str, np.ndarray]:
    """Return the FP8 states of experts by their names in a rank's file."""
    return {
        f"decoder.layers.{number}.mlp.experts.{name}._extra_state": state_bytes(state) for number, name, state in states
    }


def _check_tracker(tracker: Path) -> None:
    """Raise ValueError for a folder whose tracker names an iteration: the next run there would begin anew."""
    named = tracker.read_text().strip() if tracker.exists() else _RELEASE
    if named != _RELEASE:
        raise ValueError(
            f"{tracker} names iteration {named} of a training run, which would no longer resume from it; give another "
            "folder"
        )


def _holds_files(folder: Path) -> bool:
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def _counter(on_progress: OnProgress | None, total: int) -> Callable[[StoredTensor], StoredTensor]:
    """Return a function that has each tensor report to ``on_progress`` when it is read, that is, written."""
    done = itertools.count(1)

    def read(tensor: StoredTensor) -> np.ndarray:
        array = np.asarray(tensor)
        if on_progress is not None:
            on_progress(next(done), total)
        return array

    return lambda tensor: StoredTensor.of(tensor.shape, tensor.dtype, functools.partial(read, tensor), tensor.what)


def _write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Write ``release/`` and the file that names it.

    Args:
        path: the checkpoint's folder.
        write: function that writes into a folder.
    """
    with whole_or_nothing(path) as new:
        write(new.part_folder(_RELEASE))
        new.part(TRACKER).write_text(_RELEASE)


def _write_ranks(
    folder: Path, ranks: Sequence[Mapping[str, Any]], common: Mapping[str, Any], states: ExpertStates
) -> None:
    """Write the format ``torch``: a file for each rank."""
    for rank, tensors in enumerate(ranks):
        file = folder / f"mp_rank_{rank:02d}" / RANK_FILE
        write_torch_file(file, {**common, "model": {**tensors, **_extra_states(states)}})


def _tensors(model: GPTModel, form: Form, dtype: DTypeLike | None) -> dict[str, StoredTensor]:
    """Return the model's tensors in Megatron's names and layouts; each is made when it is written."""
    table, sizes = MEGATRON.table(form), form.sizes()
    names = [name for pieces in table.values() for name in Entry.of(pieces, sizes["e"]).names]
    # Megatron-Core keeps a router's bias of experts in fp32 beside parameters of any dtype.
    states = {name for path, pieces in table.items() if is_state(path) for name in pieces}
    if getattr(model, "megatron_names", False):
        named = state_dict(model)
        missing = [name for name in names if name not in named]
        if missing:
            raise ValueError(
                f"the model has no {', '.join(missing[:8])}; for kernels that are stored quantized take "
                "the model of the masters, jax_te.training.exact_model(state)"
            )
        sources = {
            name: (array.shape, array.dtype, functools.partial(np.asarray, array)) for name, array in named.items()
        }
    else:
        entries, arrays = placed_arrays(model, _KIND, table, sizes)
        sources = {}
        for path, entry in entries.items():
            for number, part in enumerate(entry.parts()):
                ((name, shape),) = part.their_shapes(sizes).items()
                at = None if entry.experts is None else number
                sources[name] = (
                    shape,
                    arrays[path].dtype,
                    functools.partial(_tensor_of_entry, part, arrays[path], at, sizes),
                )
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        shape, own, read = sources[name]
        stored = np.dtype(own if dtype is None or name in states else dtype)
        tensors[name] = StoredTensor.of(tuple(shape), stored, functools.partial(_cast, read, stored, name), name)
    return tensors


def _tensor_of_entry(entry: Entry, array: jax.Array, expert: int | None, sizes: Sizes) -> np.ndarray:
    ((_, tensor),) = entry.write(np.asarray(array if expert is None else array[expert]), sizes)
    return tensor


def _cast(read: Callable[[], np.ndarray], dtype: np.dtype[Any], name: str) -> np.ndarray:
    return converted(read(), dtype, name)


def _rank_part(name: str, tensor: StoredTensor, rank: int, ranks: int, gated: bool) -> StoredTensor:
    """Return the part of one tensor rank."""
    split = split_axis(name, gated)
    if split is None or ranks == 1:
        return tensor
    axis, blocks = split
    size, rest = divmod(tensor.shape[axis], ranks * blocks)
    if rest:
        raise ValueError(f"tensor_parallel {ranks} does not divide {name}, {list(tensor.shape)}")
    shape = tuple(size * blocks if at == axis else dim for at, dim in enumerate(tensor.shape))
    return StoredTensor.of(shape, tensor.dtype, functools.partial(_part, tensor, axis, blocks, rank, size), name)


def _part(tensor: StoredTensor, axis: int, blocks: int, rank: int, size: int) -> np.ndarray:
    # A rank has its parts of gate and factor.
    by_block = np.split(np.asarray(tensor), blocks, axis)
    return np.concatenate([np.take(block, range(rank * size, (rank + 1) * size), axis) for block in by_block], axis)
