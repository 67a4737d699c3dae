"""Checkpoints of Megatron-LM as one flat dict: ranks merged, layers numbered, norms under their fused names."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jax_te._validation import brief, checked
from jax_te.errors import CheckpointMismatchError
from jax_te.interop.megatron.arguments import check_names, check_one_checkpoint
from jax_te.interop.megatron.expert_states import States, StoredState, states_of_all, states_of_rank
from jax_te.interop.megatron.experts import experts_of_rank, grouped, joined_experts, sequential_names, tensor_bits
from jax_te.interop.torch import METADATA, Mapped, Record, StoredTensor, Tensor, join_tensors, read_torch_distributed

TRACKER, RANK_FILE, COMMON = "latest_checkpointed_iteration.txt", "model_optim_rng.pt", "common.pt"
ARGS = "jax_te_args"
"""Entry of files written by jax_te for arguments that Megatron-LM keeps in a Namespace, which ``weights_only``
refuses."""

# Megatron-Core from 0.19 on has no file common.pt: one entry of the checkpoint is a list with its contents.
_COMMON_ENTRY = "common_state/shard_0_1"
_GATED = ("swiglu", "quick_geglu", "gated_linear_unit")
_LOG = logging.getLogger("jax_te")
_LAYER = re.compile(r"(\w+)\.layers\.(\d{1,6})\.(.*)")
_ANY_LAYER = re.compile(r"(.*?)\.?\blayers\.\d{1,6}\..*")
_STAGED: tuple[str, ...] = ("decoder", "encoder")
"""Stacks of layers that pipeline stages share, each of which counts its own layers from 0."""
_IN_ONE_STAGE: tuple[str, ...] = ("mtp",)
"""Stacks of layers that one stage has whole: the depths of multi-token prediction."""
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_NOT_OF_THE_MODEL = re.compile(
    r"(chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine|args|iteration)\b.*"
)
_COLUMN, _ROW = re.compile(r"linear_(qkv|fc1)\.(weight|bias)\d*$"), re.compile(r"linear_(proj|fc2)\.weight\d*$")
_VOCABULARY = re.compile(r"(^|\.)(word_embeddings|output_layer)\.weight$")
_WHOLE = re.compile(
    r"(linear_(proj|fc2)\.bias\d*|layer_norm_(weight|bias)|layernorm\.(weight|bias)|embeddings\.weight"
    r"|router\.(weight|bias|expert_bias|qb_beta)|shared_experts\.gate_weight|latent_proj\.weight)$"
)
# transformer_impl="local" has norms apart.
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class MegatronCheckpoint(NamedTuple):
    """Result of `read_megatron`.

    Args:
        tensors: the model's, by Megatron-Core's names, each whole: objects with ``shape`` and ``dtype`` that
            ``np.asarray`` reads over a memory map, comparing the checksum that the file has of each.
        args: Megatron-LM's arguments that are plain values; empty if there are none.
        iteration: iteration of the checkpoint, None if it is not recorded.
        files: open files, whose ``release()`` drops what has been read from memory.
        expert_states: FP8 states of experts, for `load_megatron`.
    """

    tensors: dict[str, Tensor]
    args: dict[str, Any]
    iteration: int | None
    files: list[Mapped]
    expert_states: Mapping[tuple[int, str], Mapping[int, StoredState]] = MappingProxyType({})


@checked
def read_megatron(
    path: str | Path, *, iteration: int | None = None, gated: bool | None = None, vocab_size: int | None = None
) -> MegatronCheckpoint:
    """Return the model of a checkpoint of Megatron-LM, without torch, for `MegatronGPTModel.load_state_dict`.

    Both formats are read: ``torch``, a file for each tensor and pipeline rank, which are merged; and ``torch_dist``, of
    any sharding. Separate norms (``transformer_impl="local"``) get the names of the fused ones, and experts those of
    ``TEGroupedMLP``. ``_extra_state`` and optimizer states are left out; the log of ``jax_te`` says so at level INFO.
    `load_megatron` reads the ``_extra_state`` of experts.

    Args:
        path: the folder that ``--save`` named, one of its ``iter_*`` or ``release`` folders, or one file of a single
            rank, which may be a state dict alone.
        iteration: the one to take. None: that of ``latest_checkpointed_iteration.txt``.
        gated: whether the first linear layer of an MLP has two components. None: as the arguments say.
        vocab_size: rows of the embedding and the head to keep of those that Megatron padded. None: all.

    Raises:
        ValueError: for a folder of another form, missing ranks, tensors that do not fit each other, and unknown formats
            and names.
        CheckpointMismatchError: for files of several checkpoints, that is, of several iterations or with different
            arguments; for other numbers of ranks than these say; for expert ranks that differ in other tensors
            than experts, such as the routers' bias; for missing experts, and those that are there twice.

    Source: ``load_checkpoint`` of Megatron-LM; ``megatron.core.dist_checkpointing``.

    >>> model.load_state_dict(read_megatron("checkpoints").tensors)  # doctest: +SKIP
    """
    return read_checkpoint(path, iteration=iteration, gated=gated, vocab_size=vocab_size)


def read_checkpoint(
    path: str | Path,
    *,
    iteration: int | None,
    vocab_size: int | None,
    gated: bool | None = None,
    args: Mapping[str, Any] = MappingProxyType({}),
) -> MegatronCheckpoint:
    """Return `read_megatron` of a checkpoint whose arguments ``args`` correct or complete."""
    path = _iteration_folder(Path(path), iteration)
    if (path / METADATA).is_file():
        other = sorted(folder.name for folder in path.iterdir() if _RANK.fullmatch(folder.name))
        if other:
            raise ValueError(
                f"{path} holds two checkpoints: {METADATA} of the format torch_dist, and {', '.join(other[:8])} of the "
                "format torch; remove the one that is not meant"
            )
        checkpoint = _distributed(path)
        check_names(args, checkpoint.args)
    else:
        checkpoint = _ranks(path, gated, args)
    # Experts have no norm of their own, so that the one in front of them is not fused.
    mixtures = {name.partition(".mlp.router.")[0] for name in checkpoint.tensors if ".mlp.router." in name}
    tensors = {_fused_norms(name, mixtures): tensor for name, tensor in checkpoint.tensors.items()}
    if vocab_size is not None:
        tensors = {name: _cut_vocabulary(name, tensor, vocab_size) for name, tensor in tensors.items()}
    return checkpoint._replace(tensors=tensors, args=checkpoint.args | dict(args))


def split_axis(name: str, gated: bool) -> tuple[int, int] | None:
    """Return the axis along which Megatron's tensor ranks shard a tensor, and the number of blocks; None: they do not.

    >>> split_axis("decoder.layers.0.mlp.linear_fc1.weight", True), split_axis("decoder.final_layernorm.weight", True)
    ((0, 2), None)

    Raises:
        ValueError: for an unknown name.
    """
    if _VOCABULARY.search(name) or _COLUMN.search(name):
        return 0, 2 if gated and "linear_fc1" in name else 1
    if _ROW.search(name):
        return 1, 1
    if _WHOLE.search(name):
        return None
    raise ValueError(f"it is not known how tensor ranks split {name[:200]!r}; models of GPT's layers are read")


def _iteration_folder(path: Path, iteration: int | None) -> Path:
    tracker = path / TRACKER
    if iteration is None and not tracker.is_file():
        return path
    if iteration is None:
        text = tracker.read_text(errors="replace")[:100].strip()
        if not re.fullmatch(r"release|\d{1,12}", text):
            raise ValueError(f"{tracker} says {text[:50]!r}, which is neither an iteration nor release")
        path = path / (text if text == "release" else f"iter_{int(text):07d}")
    else:
        path = path / f"iter_{iteration:07d}"
    if not path.is_dir():
        raise ValueError(f"{path} is not there; give another iteration")
    return path


def _distributed(path: Path) -> MegatronCheckpoint:
    stored = read_torch_distributed(path)
    common: Any = {}
    if (path / COMMON).is_file():
        common = Mapped(path / COMMON).load()
    elif _COMMON_ENTRY in stored.others:
        common = stored.others.pop(_COMMON_ENTRY)()
        common = common[0] if isinstance(common, list) and common else common
    tensors: dict[str, Any] = {}
    for name, tensor in stored.tensors.items():
        stacked = re.fullmatch(r"(.*\blayers\.)([^\d].*)", name)
        if stacked and tensor.shape and not _NOT_OF_THE_MODEL.fullmatch(name):
            # Layers of one form are one tensor with an axis of layers in front.
            for layer in range(tensor.shape[0]):
                whole = f"{stacked[1]}{layer}.{stacked[2]}"
                tensors[whole] = tensor.row(layer, f"{path}: {whole}")
        else:
            tensors[name] = tensor
    for name, tensor in list(tensors.items()):
        if tensor.shape and (names := sequential_names(name, tensor.shape[0])) is not None:
            del tensors[name]
            tensors |= {expert: tensor.row(number, f"{path}: {expert}") for number, expert in enumerate(names)}
    tensors = _model_tensors(dict.fromkeys(stored.others) | tensors, path)
    for name in [name for name in tensors if re.search(r"\.(weight|bias)_w$", name)]:
        # Gate and the other component in separate tensors, as with singleton_local_shards.
        other = name[:-1] + "v"
        if other not in tensors:
            raise ValueError(f"{path} has {name[:200]!r} without its other component")
        tensors[name[:-2]] = join_tensors([tensors.pop(name), tensors.pop(other)], 0, 1, f"{path}: {name[:-2]}")
    states = states_of_all(stored.others)
    return MegatronCheckpoint(
        grouped(tensors, str(path)), *_arguments_and_iteration(common, path), stored.files, states
    )


def _ranks(path: Path, gated: bool | None, corrected: Mapping[str, Any]) -> MegatronCheckpoint:
    """Return the model of one file per rank: merged over tensor and expert ranks, pipeline stages concatenated."""
    named = _rank_files(path)
    files = {numbers: Mapped(file) for numbers, file in named.items()}
    loaded = {numbers: file.load() for numbers, file in files.items()}
    facts = {str(named[numbers]): _arguments_and_iteration(state, named[numbers]) for numbers, state in loaded.items()}
    args, iteration = next(iter(facts.values()), ({}, None))
    # Before they decide anything: a misspelt name would have ranks taken for others, and the error be about these.
    check_names(corrected, args)
    check_one_checkpoint(facts, corrected, path)
    described = args | dict(corrected)
    states = _states_of_ranks(loaded, described, path)
    counts = _Counts(*(1 + max((rank[axis] for rank in states), default=-1) for axis in range(3)))
    if not states or len(states) != counts.tensor * counts.pipeline * counts.expert:
        raise ValueError(
            f"{path} holds no checkpoint of Megatron-LM, or not all of its ranks: found {sorted(named)[:20]}. There "
            f"must be mp_rank_XX[_YYY][_ZZZ]/{RANK_FILE} for all tensor, pipeline and expert ranks, or {METADATA} of "
            "the format torch_dist; zarr is not read"
        )
    _check_counts(counts, args, corrected, path)
    if gated is None and (args or any(flag in described for flag in _GATED)):
        gated = any(described.get(flag) for flag in _GATED)
    tensors, of_experts = _joined_stages(_checked_chunks(states, path), counts, gated, path)
    return MegatronCheckpoint(tensors, args, iteration, list(files.values()), of_experts)


class _Counts(NamedTuple):
    """Numbers of ranks."""

    tensor: int
    pipeline: int
    expert: int


Chunks = dict[tuple[int, int, int], list[Any]]
"""State dicts of the parts of the model that a rank has, by tensor, pipeline and expert rank."""


def _check_counts(counts: _Counts, args: dict[str, Any], corrected: Mapping[str, Any], path: Path) -> None:
    """Raise an error for ranks whose files are not all there or too many, and experts with tensor ranks of their own.

    Args:
        counts: numbers of ranks of which there are files.
        args: arguments in the files.
        corrected: the caller's, which correct and complete them.
        path: path of the checkpoint.
    """
    own_tensor_ranks = (args | dict(corrected)).get("expert_tensor_parallel_size")
    if counts.expert > 1 and own_tensor_ranks not in (None, counts.tensor):
        raise ValueError(
            f"{path} has experts of {own_tensor_ranks} tensor ranks beside {counts.tensor} of other layers; save it as "
            "torch_dist, which has no ranks"
        )
    for kind, count in counts._asdict().items():
        name = f"{kind}_model_parallel_size"
        stated = args.get(name)
        # The caller's may be those of a run whose ranks were merged since.
        if name not in corrected and type(stated) is int and stated != count:
            raise CheckpointMismatchError(
                f"{path} has {count} {kind} ranks, and its arguments say {name} {stated}: files of ranks are missing, "
                "or of another checkpoint"
            )


def _checked_chunks(states: Mapping[tuple[int, int, int], Any], path: Path) -> Chunks:
    """Return each rank's parts of the model: as many on all ranks."""
    chunks = {rank: _chunks(states[rank], path) for rank in sorted(states)}
    counts = {rank: len(parts) for rank, parts in chunks.items()}
    if any(count != counts[0, 0, 0] for count in counts.values()):
        raise CheckpointMismatchError(f"{path} has ranks with several numbers of virtual stages: {counts}")
    return chunks


def _joined_stages(chunks: Chunks, counts: _Counts, gated: bool | None, path: Path) -> tuple[dict[str, Tensor], States]:
    """Return the tensors of all stages, with their layers numbered, and the FP8 states of their experts."""
    tensors: dict[str, Tensor] = {}
    of_experts: States = {}
    # Of each stack, the number of layers in the stages before.
    first_layers = dict.fromkeys(_STAGED, 0)
    several = counts.pipeline * len(chunks[0, 0, 0]) > 1
    # Of virtual stages: all first chunks hold lower layers than all second ones.
    for number in range(len(chunks[0, 0, 0])):
        for stage in range(counts.pipeline):
            own = {(rank, expert): parts[number] for (rank, at, expert), parts in chunks.items() if at == stage}
            merged, states = _joined_chunk(own, counts, first_layers["decoder"], gated, path)
            if several:
                _check_stacks(merged, path)
            _add_stage(tensors, {_numbered_from(first_layers, name): tensor for name, tensor in merged.items()}, path)
            for key, state in states.items():
                of_experts.setdefault(key, {}).update(state)
            for stack in _STAGED:
                first_layers[stack] += _layer_count(stack, merged)
    return tensors, of_experts


def _check_stacks(names: Iterable[str], path: Path) -> None:
    """Raise ValueError for layers of which it is not known whether each stage counts its own from 0.

    Args:
        names: names of the tensors of one stage of several.
        path: path of the checkpoint.
    """
    known = (*_STAGED, *_IN_ONE_STAGE)
    starts = tuple(f"{stack}.layers." for stack in known)
    stacks = {at[1] for name in names if not name.startswith(starts) and (at := _ANY_LAYER.fullmatch(name))}
    if stacks:
        raise ValueError(
            f"{path} has pipeline stages with layers of {', '.join(map(repr, sorted(stacks)[:8]))}, whose numbers in "
            f"the model are not known; known are the layers of {', '.join(known)}. Save it with one stage, or as "
            "torch_dist, which has no stages"
        )


def _add_stage(tensors: dict[str, Tensor], stage: Mapping[str, Tensor], path: Path) -> None:
    """Add a stage's tensors to those of the stages before, of which some may be the same.

    The last stage has its own copy of the embedding if it embeds tokens for multi-token prediction.

    Raises:
        CheckpointMismatchError: for another tensor of the same name.
    """
    for name in tensors.keys() & stage.keys():
        if tensor_bits(tensors[name]) != tensor_bits(stage[name]):
            raise CheckpointMismatchError(
                f"{path}: {name[:200]} must be the same on all pipeline stages that have it, and differs"
            )
    tensors |= {name: tensor for name, tensor in stage.items() if name not in tensors}


def _joined_chunk(
    parts: Mapping[tuple[int, int], Any], counts: _Counts, first_layer: int, gated: bool | None, path: Path
) -> tuple[dict[str, Tensor], States]:
    """Return the tensors of one part of the model, merged over tensor and expert ranks, and its experts' FP8 states.

    Args:
        parts: state dicts by tensor and expert rank.
        counts: numbers of ranks.
        first_layer: number of the part's first layer.
        gated: whether the first linear layer of an MLP has two components.
        path: path of the checkpoint.
    """
    ranks = []
    states: States = {}
    for rank in range(counts.tensor):
        of_rank = [_model_tensors(parts[rank, expert], path) for expert in range(counts.expert)]
        for expert in range(counts.expert if rank == 0 else 0):  # all tensor ranks have the same amaxes
            count = experts_of_rank(of_rank[expert])
            numbers = {"first_layer": first_layer, "first_expert": expert * count, "experts": count}
            for key, state in states_of_rank(parts[rank, expert], **numbers).items():
                states.setdefault(key, {}).update(state)
        ranks.append(joined_experts([grouped(tensors, str(path)) for tensors in of_rank], str(path)))
    return {name: _merged(name, ranks, gated, path) for name in ranks[0]}, states


def _rank_files(path: Path) -> dict[tuple[int, ...], Path]:
    """Return the file of each rank by the numbers in its name, of a checkpoint's folder, a rank's, or one file."""
    if path.is_file():
        return {(0,): path}
    if (path / RANK_FILE).is_file():
        return {(0,): path / RANK_FILE}
    files: dict[tuple[int, ...], Path] = {}
    for folder in sorted(path.iterdir()) if path.is_dir() else []:
        rank = _RANK.fullmatch(folder.name)
        if rank and (folder / RANK_FILE).is_file():
            files[tuple(int(number) for number in rank.groups() if number is not None)] = folder / RANK_FILE
    return files


def _states_of_ranks(
    loaded: Mapping[tuple[int, ...], Any], described: Mapping[str, Any], path: Path
) -> dict[tuple[int, int, int], Any]:
    """Return the contents of the files by tensor, pipeline and expert rank; arguments are those of the checkpoint."""
    stages, experts = (described.get(f"{kind}_model_parallel_size") for kind in ("pipeline", "expert"))
    # Of two numbers the second is a pipeline rank, or an expert rank if there is one stage: names have no others.
    of_experts = isinstance(experts, int) and experts > 1 and stages in (None, 1)
    states: dict[tuple[int, int, int], Any] = {}
    first_of: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for numbers, state in loaded.items():
        tensor, *others = numbers
        first, *second = others or [0]
        last = second[0] if second else 0
        rank = (tensor, 0, first) if of_experts and not second else (tensor, first, last)
        if rank in states:
            raise ValueError(
                f"{path} holds two checkpoints: {_rank_name(first_of[rank])} and {_rank_name(numbers)} are of the same "
                "tensor, pipeline and expert rank; remove the ranks of the one that is not meant"
            )
        states[rank], first_of[rank] = state, numbers
    return states


def _rank_name(numbers: tuple[int, ...]) -> str:
    """Return the name of the folder of a rank."""
    tensor, *others = numbers
    return "_".join([f"mp_rank_{tensor:02d}", *(f"{number:03d}" for number in others)])


def _numbered_from(first_layers: Mapping[str, int], name: str) -> str:
    """Return a tensor's name with the number of its layer in the model, if it belongs to one.

    Args:
        first_layers: number of the stage's first layer, for each stack of which stages count their own layers.
        name: name of the tensor in the stage.

    >>> _numbered_from({"decoder": 4}, "decoder.layers.1.mlp.linear_fc1.weight")
    'decoder.layers.5.mlp.linear_fc1.weight'
    >>> _numbered_from({"decoder": 4}, "mtp.layers.0.eh_proj.weight")
    'mtp.layers.0.eh_proj.weight'
    """
    at = _LAYER.fullmatch(name)
    return f"{at[1]}.layers.{int(at[2]) + first_layers[at[1]]}.{at[3]}" if at and at[1] in first_layers else name


def _layer_count(stack: str, names: Iterable[str]) -> int:
    """Return the number of layers of a stack to which tensors of these names belong."""
    matches = filter(None, map(_LAYER.fullmatch, names))
    return max((int(at[2]) + 1 for at in matches if at[1] == stack), default=0)


def _chunks(state: Any, path: Path) -> list[Any]:
    """Return the state dicts of a rank's parts of the model: one, or one for each virtual stage."""
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds no state dict")
    if not all(isinstance(name, str) for name in state):
        raise ValueError(f"{path} holds no state dict: its keys are not all text, {brief([*state])}")
    if all(hasattr(value, "shape") or re.search(r"_extra_state\d*$", name) for name, value in state.items()):
        return [state]
    # Virtual stages.
    numbered = sorted((name for name in state if re.fullmatch(r"model\d{1,3}", name)), key=lambda name: int(name[5:]))
    chunks = [state[name] for name in numbered] or [state.get("model")]
    if not all(isinstance(chunk, dict) for chunk in chunks) or "language_model" in chunks[0]:
        raise ValueError(f"{path} has no state dict 'model' of Megatron-Core; convert older ones with Megatron-LM")
    return chunks


def _merged(name: str, ranks: list[dict[str, Any]], gated: bool | None, path: Path) -> Tensor:
    what = f"{path}: {name[:200]}"
    if any(name not in rank or rank.keys() != ranks[0].keys() for rank in ranks):
        raise ValueError(f"{what} is not on all tensor ranks")
    parts = [rank[name] for rank in ranks]
    if len(parts) == 1:
        return parts[0]
    if gated is None and "linear_fc1" in name:
        raise ValueError(f"{what}: the file says no arguments; say with gated= whether it has two components")
    split = split_axis(name, bool(gated))
    if split is not None:
        return join_tensors(parts, *split, what)
    if not all(tensor_bits(part) == tensor_bits(parts[0]) for part in parts):
        raise ValueError(f"{what} must be the same on all tensor ranks, and differs")
    return parts[0]


def _model_tensors(stored: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the parameters, without the prefix of a wrapper; log what is left out."""
    extra = [name for name in stored if re.search(r"_extra_state\d*(/|$)", name)]
    rest = [name for name in stored if _NOT_OF_THE_MODEL.fullmatch(name)]
    if extra or rest:
        _LOG.info("%s: %d _extra_state and %d entries of the optimizer and run left out", path, len(extra), len(rest))
        _LOG.debug("left out: %s", ", ".join([*extra, *rest]))
    left = {*extra, *rest}
    tensors = {name.removeprefix("module."): value for name, value in stored.items() if name not in left}
    wrong = [f"{name[:100]} ({value!r:.60})" for name, value in tensors.items() if not hasattr(value, "shape")]
    if wrong:
        raise ValueError(f"{path}: no tensors that can be read: {', '.join(wrong[:8])}; save them dequantized")
    return tensors


def _arguments_and_iteration(state: Any, path: Path) -> tuple[dict[str, Any], int | None]:
    """Return the arguments with plain values, and the iteration."""
    state = state if isinstance(state, dict) else {}
    version = state.get("checkpoint_version", 3.0)
    if not isinstance(version, int | float) or version < 2.0:
        raise ValueError(f"{path} has version {version!r}, in which queries, keys and values have another order")
    args, iteration = state.get("args", state.get(ARGS)), state.get("iteration")
    # Megatron-LM keeps its arguments in a Namespace, among them enums and functions, which are records here.
    args = args.state if isinstance(args, Record) else args
    kinds = (str, int, float, type(None), list, tuple)
    values = {name: value for name, value in args.items() if isinstance(value, kinds)} if isinstance(args, dict) else {}
    return values, iteration if type(iteration) is int else None


def _fused_norms(name: str, mixtures: Collection[str]) -> str:
    for alone, fused in _NORMS.items():
        layer, separator, rest = name.partition(f".{alone}")
        if separator and not (layer in mixtures and fused.startswith("mlp.")):
            name = f"{layer}.{fused}{rest}"
    # transformer_impl="local" says so in torch_dist of the norm in front of experts, too.
    layer, separator, rest = name.partition(".mlp.linear_fc1.layer_norm_")
    return f"{layer}.pre_mlp_layernorm.{rest}" if separator and layer in mixtures else name


def _cut_vocabulary(name: str, tensor: Tensor, size: int) -> Any:
    if not _VOCABULARY.search(name):
        return tensor
    if not 0 < size <= tensor.shape[0]:
        raise ValueError(f"vocab_size must be in [1, {tensor.shape[0]}], the rows of {name[:200]}, got {size}")
    return tensor.first_rows(size) if isinstance(tensor, StoredTensor) else tensor[:size]
