"""Models from checkpoints of Megatron-LM, and back: tables of Megatron-Core's tensors and Megatron-LM's flags."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np

from jax_te._validation import checked, float_dtype
from jax_te.config import TransformerConfig
from jax_te.interop.megatron.expert_states import expert_states, load_expert_states, of_expert
from jax_te.interop.megatron.experts import expert_rows, read_experts, stacked_name, write_experts
from jax_te.interop.megatron.folder import ARGS, COMMON, RANK_FILE, TRACKER, read_checkpoint, split_axis
from jax_te.interop.tables import (
    REQUIRED,
    TIED,
    Architecture,
    Entry,
    Fields,
    Form,
    OnProgress,
    Options,
    Table,
    architecture_of,
    converted,
    is_state,
    layer_rows,
    load_tensors,
    model_options,
    on_host,
    placed_arrays,
    release_after_each,
    rows_of_layer,
)
from jax_te.interop.torch import (
    ExtraState,
    Piece,
    StoredTensor,
    write_extra_state,
    write_torch_distributed,
    write_torch_file,
)
from jax_te.layers import LinearScaling, Llama3Scaling
from jax_te.megatron import state_dict
from jax_te.models import Execution, GPTModel, RotaryPositions
from jax_te.typing import DTypeLike, Words

_EXECUTION = Execution()
_KIND = "Megatron-LM"
_States = Sequence[tuple[int, str, ExtraState]]
# Megatron-LM's name of weights without a training state; it then begins with iteration 0.
_RELEASE = "release"
# Unsupported flags that change a model's computation, with the value that is equivalent to their absence.
_EXPECTED: dict[str, Any] = {
    **dict.fromkeys(("mtp_num_layers", "experimental_attention_variant", "spec", "no_rope_freq")),
    **dict.fromkeys(("heterogeneous_layers_config_path", "hybrid_layer_pattern", "mrope_section", "softmax_scale")),
    **dict.fromkeys(("multi_latent_attention", "qk_l2_norm", "rotary_interleaved", "attention_output_gate"), False),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "enable_mhc_connections", "use_mup"), False),
    "softmax_type": "vanilla",
    # The rows of linear_fc1.weight would alternate between gate and factor.
    **dict.fromkeys(("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")),
    **dict.fromkeys(("use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"), False),
}
_DEFAULT_ACTIVATIONS = {True: "gelu", False: "gelu_exact"}
_MLP, _ATTENTION = "layers/{i}/layernorm_mlp", "layers/{i}/self_attention"
_QKV, _PROJ = "decoder.layers.{i}.self_attention.linear_qkv.", "decoder.layers.{i}.self_attention.linear_proj."
_MODULES = [f"self_attention.{name}" for name in ("linear_qkv", "linear_proj", "core_attention")]
_MODULES += [f"self_attention.{name}_layernorm" for name in ("q", "k")] + ["mlp.linear_fc1", "mlp.linear_fc2"]
_FC1, _FC2 = "decoder.layers.{i}.mlp.linear_fc1.", "decoder.layers.{i}.mlp.linear_fc2."
_LAYER: Table = {
    f"{_ATTENTION}/qkv/scale": {f"{_QKV}layer_norm_weight": "h -> h"},
    f"{_ATTENTION}/qkv/kernel": {f"{_QKV}weight": "(g c d) h -> h c (g d)"},
    f"{_ATTENTION}/proj/kernel": {f"{_PROJ}weight": "h q -> q h"},
    f"{_MLP}/scale": {f"{_FC1}layer_norm_weight": "h -> h"},
    f"{_MLP}/wi_kernel": {f"{_FC1}weight": "(a f) h -> h a f"},
    f"{_MLP}/wo_kernel": {f"{_FC2}weight": "h f -> f h"},
}
_QKV_BIAS: Table = {f"{_ATTENTION}/qkv/bias": {f"{_QKV}bias": "(g c d) -> c (g d)"}}
_BIASES: Table = {
    f"{_ATTENTION}/proj/bias": {f"{_PROJ}bias": "h -> h"},
    f"{_MLP}/wi_bias": {f"{_FC1}bias": "(a f) -> a f"},
    f"{_MLP}/wo_bias": {f"{_FC2}bias": "h -> h"},
}
_NORM_BIASES: Table = {
    f"{_ATTENTION}/qkv/ln_bias": {f"{_QKV}layer_norm_bias": "h -> h"},
    f"{_MLP}/ln_bias": {f"{_FC1}layer_norm_bias": "h -> h"},
}


def _table(form: Any) -> Table:
    config, layer = form.config, dict(_LAYER)
    # RMSNorm has no biases.
    centered = config.normalization == "LayerNorm"
    layer |= (_BIASES if config.add_bias_linear else {}) | (_NORM_BIASES if centered else {})
    layer |= _QKV_BIAS if config.add_bias_linear or config.add_qkv_bias else {}
    ends = {"scale": "weight", "bias": "bias"} if centered else {"scale": "weight"}
    for each in ("q", "k") if config.qk_layernorm else ():
        norm = f"decoder.layers.{{i}}.self_attention.{each}_layernorm"
        layer |= {f"{_ATTENTION}/{each}_norm/{ours}": {f"{norm}.{theirs}": "d -> d"} for ours, theirs in ends.items()}
    learned = form.others["position_embedding_type"] == "learned_absolute"
    positions = {"position_embedding/embedding": {"embedding.position_embeddings.weight": "s h -> s h"}}
    return {
        "embedding/embedding": {"embedding.word_embeddings.weight": "v h -> v h"},
        **(positions if learned else {}),
        **_layers(layer, config),
        **{f"final_norm/{ours}": {f"decoder.final_layernorm.{theirs}": "h -> h"} for ours, theirs in ends.items()},
        **({} if form.others[TIED] else {"output_kernel": {"output_layer.weight": "v h -> h v"}}),
    }


def _layers(dense: Table, config: TransformerConfig) -> Table:
    """Return the rows of all layers: those of ``dense``, or of experts in place of its feed-forward block."""
    if config.num_moe_experts is None:
        return layer_rows(dense, config.num_layers)
    mixture = {path: row for path, row in dense.items() if not path.startswith(_MLP)} | expert_rows(config)
    rows: Table = {}
    for number in range(config.num_layers):
        rows |= rows_of_layer(mixture if config.has_experts(number) else dense, number)
    return rows


def _read(given: Fields, options: Options) -> Options:
    experts = read_experts(given)
    limit, offset = given.take("activation_func_clamp_value", float, None), given.take("glu_linear_offset", float, 0.0)
    for name, value in _EXPECTED.items():
        given.expect(name, value)
    # Megatron-LM also has a number of groups without the flag, and then ignores it.
    grouped, groups = given.take("group_query_attention", bool, False), given.raw("num_query_groups")
    untied = given.take("untie_embeddings_and_output_weights", bool, False)
    activation = _activation(given, options, experts=bool(experts), limited=limit is not None)
    size, skip = given.raw("window_size"), given.raw("window_attn_skip_freq")
    kind = given.take("position_embedding_type", str, "learned_absolute")
    if given.take("use_rotary_position_embeddings", bool, False):  # the older flag
        kind = "rope"
    if kind not in ("rope", "learned_absolute", "none"):
        raise given.refused("position_embedding_type", kind, "rope, learned_absolute and none are supported")
    base, percent = given.take("rotary_base", float, 10000.0), given.take("rotary_percent", float, 1.0)
    factor, scaled = given.take("rope_scaling_factor", float, 8.0), given.take("use_rope_scaling", bool, False)
    stretch = given.take("rotary_seq_len_interpolation_factor", float, 0.0)
    scaling: Any = Llama3Scaling(factor=factor) if scaled else None
    if stretch:
        scaling = LinearScaling(factor=stretch)
    if scaled and stretch:
        raise given.refused("use_rope_scaling", True, "rotary_seq_len_interpolation_factor scales, too; give one")
    rotary = RotaryPositions(base=base, percent=percent, scaling=scaling)
    return {
        **options,
        **experts,
        "activation_func_clamp_value": limit,
        "glu_linear_offset": offset,
        "num_query_groups": groups if grouped else None,
        TIED: not untied,
        "activation": activation,
        "window_size": tuple(size) if isinstance(size, list) else size,
        "window_attn_skip_freq": tuple(skip) if isinstance(skip, list) else skip,
        "position_embedding_type": rotary if kind == "rope" else kind,
    }


def _activation(given: Fields, options: Options, *, experts: bool, limited: bool) -> str:
    """Return our name of the activation that flags choose.

    Args:
        given: flags.
        options: options of the model, of which whether linear layers have biases is read.
        experts: whether the model has experts.
        limited: whether ``activation_func_clamp_value`` is given.
    """
    chosen = [name for name in _ACTIVATIONS if given.take(name, bool, False)]
    if len(chosen) > 1:
        raise given.refused(chosen[0], True, f"{chosen[1]} is, too")
    kernels = {name: given.take(name, bool, False) for name in _KERNELS}
    # Megatron-LM does not fuse biases that a model does not have.
    fused = given.take("bias_gelu_fusion", bool, options["add_bias_linear"])
    fused_swiglu = given.take("bias_swiglu_fusion", bool, True)
    if chosen == ["swiglu"] and limited and fused_swiglu:
        raise given.refused(
            "bias_swiglu_fusion",
            True,
            "Megatron's kernel ignores activation_func_clamp_value; correct one of them in args",
        )
    if chosen:
        return _ACTIVATIONS[chosen[0]]
    if experts and kernels["use_transformer_engine_op_fuser"]:
        why = "Megatron then computes the tanh form of GELU in dense layers and the erf form in experts"
        raise given.refused("use_transformer_engine_op_fuser", True, why)
    # Megatron's kernels compute the tanh form, without them it is the exact one.
    return _DEFAULT_ACTIVATIONS[fused or any(kernels.values())]


_ACTIVATIONS = {"swiglu": "swiglu", "squared_relu": "srelu", "quick_geglu": "qgeglu"}
# Flags of kernels of Transformer Engine's, whose GELU is the tanh form.
_KERNELS = ("use_te_activation_func", "use_transformer_engine_op_fuser")


def _write(options: Options) -> Mapping[str, Any]:
    positions = options["position_embedding_type"]
    rotary = positions if isinstance(positions, RotaryPositions) else RotaryPositions()
    linear, llama = (isinstance(rotary.scaling, kind) for kind in (LinearScaling, Llama3Scaling))
    return {
        **write_experts(options),
        "activation_func_clamp_value": options["activation_func_clamp_value"],
        "glu_linear_offset": options["glu_linear_offset"],
        "group_query_attention": options["num_query_groups"] != options["num_attention_heads"],
        "num_query_groups": options["num_query_groups"],
        "untie_embeddings_and_output_weights": not options[TIED],
        "bias_gelu_fusion": options["activation"] == "gelu" and options["add_bias_linear"],
        # Without biases only Transformer Engine's kernel is the tanh form.
        "use_te_activation_func": options["activation"] == "gelu" and not options["add_bias_linear"],
        "bias_swiglu_fusion": options["activation"] == "swiglu" and options["activation_func_clamp_value"] is None,
        **{flag: options["activation"] == name for flag, name in _ACTIVATIONS.items()},
        "window_size": options["window_size"],
        "window_attn_skip_freq": options["window_attn_skip_freq"],
        "position_embedding_type": "rope" if positions is rotary else positions,
        "rotary_base": rotary.base,
        "rotary_percent": rotary.percent,
        "use_rope_scaling": llama,
        **({"rope_scaling_factor": rotary.scaling.factor} if isinstance(rotary.scaling, Llama3Scaling) else {}),
        **({"rotary_seq_len_interpolation_factor": rotary.scaling.factor} if linear else {}),  # type: ignore[union-attr]
    }


MEGATRON = Architecture(
    model_type="gpt",
    model=GPTModel,
    fields={
        "num_layers": ("num_layers", REQUIRED),
        "hidden_size": ("hidden_size", REQUIRED),
        "num_attention_heads": ("num_attention_heads", REQUIRED),
        "padded_vocab_size": ("vocab_size", REQUIRED),
        "max_position_embeddings": ("max_sequence_length", REQUIRED),
        "ffn_hidden_size": ("ffn_hidden_size", None),
        "kv_channels": ("kv_channels", None),
        "normalization": ("normalization", "LayerNorm"),
        "norm_epsilon": ("layernorm_epsilon", 1e-5),
        "apply_layernorm_1p": ("layernorm_zero_centered_gamma", False),
        "add_bias_linear": ("add_bias_linear", True),
        "add_qkv_bias": ("add_qkv_bias", False),
        "qk_layernorm": ("qk_layernorm", False),
        "attention_dropout": ("attention_dropout", 0.1),
        "hidden_dropout": ("hidden_dropout", 0.1),
    },
    read=_read,
    write=_write,
    table=_table,
    options=lambda model: model_options(model, model.rotary),
    base="",
    tied_names={"output_layer.weight": "embedding.word_embeddings.weight"},
    ignored="",
    described_by="arguments",
)


@checked
def load_megatron(
    path: str | Path,
    *,
    iteration: int | None = None,
    vocab_size: int | None = None,
    args: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = None,
    config: Mapping[str, Any] | None = None,
    execution: Execution = _EXECUTION,
    fp8_states: bool = True,
    on_progress: OnProgress | None = None,
) -> GPTModel:
    """Return the model of a checkpoint of Megatron-LM, with its weights, without torch.

    Args:
        path: path of the checkpoint, in format ``torch`` or ``torch_dist``; see `read_megatron`.
        iteration, vocab_size: see `read_megatron`.
        args: arguments of Megatron-LM by name, in addition to or instead of those in the checkpoint.
        fp8_states: whether experts get the scales and amax histories that the checkpoint has of them, under a recipe
            with state (`jax_te.recipe.autocast`). False: their states are new, as those of other layers are.
        dtype, config, execution, on_progress: see `jax_te.interop.huggingface.load_huggingface`.

    Returns:
        A `GPTModel`, sharded over the mesh of ``jax.set_mesh``.

    Raises:
        ValueError: see `read_megatron`; for unsupported arguments that change a model's computation; for names in
            ``args`` that are no arguments of Megatron-LM.
        CheckpointMismatchError: for missing, unexpected and wrongly shaped tensors; for FP8 states of experts that are
            of another recipe, or not there for all experts of a layer.

    Source: ``load_checkpoint`` of Megatron-LM with ``--use-checkpoint-args``.

    >>> model = load_megatron("checkpoints", dtype=jnp.bfloat16)  # doctest: +SKIP
    """
    found = read_checkpoint(path, iteration=iteration, vocab_size=vocab_size, args=args or {})
    given = dict(found.args)
    # The model has only the rows that are kept.
    if vocab_size is not None:
        given["padded_vocab_size"] = vocab_size
    if "norm_epsilon" not in given and "layernorm_epsilon" in given:  # its older name
        given["norm_epsilon"] = given["layernorm_epsilon"]
    fields = Fields(given, f"the arguments of {path}", found.tensors)
    common: Any = {"dtype": dtype, "config": config, "execution": execution}
    after = release_after_each(found.files, on_progress)
    model = load_tensors(MEGATRON, MEGATRON.form(fields), found.tensors, Path(path), after, **common)
    if fp8_states:
        load_expert_states(model, found.expert_states, str(path))
    return model


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
    Tensors are written one by one, and the folder gets its name when it is complete. Inside of the recipe of a model
    under delayed scaling the scales and amax histories of experts are written as their ``_extra_state``.

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
            divide; for a ``release/`` that holds files; on several processes.

    Source: ``save_checkpoint`` of Megatron-LM.

    >>> save_megatron(model, "converted", tensor_parallel=2)  # doctest: +SKIP
    """
    path = Path(path)
    dtype = None if dtype is None else float_dtype("dtype", dtype)
    if jax.process_count() > 1:
        raise ValueError("save_megatron writes from one process; save with TrainCheckpointer, and convert that")
    single, whole = path.suffix == ".pt", format == "torch_dist"
    if tensor_parallel < 1 or (tensor_parallel > 1 and (single or whole)):
        raise ValueError(
            f"tensor_parallel must be >= 1, and 1 for a single file and for torch_dist, which is for any number of "
            f"ranks, got {tensor_parallel}"
        )
    if single and whole:
        raise ValueError(f"torch_dist needs a folder, got {path}")
    if not single and _holds_files(path / _RELEASE):
        raise ValueError(
            f"{path / _RELEASE} holds files already, and a checkpoint of another format or number of ranks would be "
            "mixed with them; remove it, or give another folder"
        )
    if not single:
        _check_tracker(path / TRACKER)
    _, form = architecture_of(model, {_KIND: MEGATRON})
    tensors = _tensors(model, form, dtype)
    gated = form.sizes()["a"] == 2
    arguments = dict(MEGATRON.config_fields(form)) | {"tensor_model_parallel_size": tensor_parallel}
    if form.config.num_query_groups is not None and form.config.num_query_groups % tensor_parallel:
        raise ValueError(f"tensor_parallel {tensor_parallel} does not divide {form.config.num_query_groups} groups")
    common = {"checkpoint_version": 3.0, "iteration": 0, ARGS: arguments}
    count = _counter(on_progress, len(tensors) * tensor_parallel)
    ranks = [
        {name: count(_rank_part(name, tensor, rank, tensor_parallel, gated)) for name, tensor in tensors.items()}
        for rank in range(tensor_parallel)
    ]
    states = [(number, name, state) for number, name, state in expert_states(model)]
    if not whole:
        at = "decoder.layers.{}.mlp.experts.{}._extra_state"
        extra = {at.format(number, name): _bytes_of(state) for number, name, state in states}
        ranks = [tensors | extra for tensors in ranks]
    if single:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_torch_file(path, common | {"model": ranks[0]})
    else:
        _write_folder(path, ranks, common, states, whole=form if whole else None)


def _bytes_of(state: ExtraState) -> np.ndarray:
    return np.frombuffer(write_extra_state(state), np.uint8)


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


def _write_folder(
    path: Path,
    ranks: Sequence[Mapping[str, Any]],
    common: Mapping[str, Any],
    states: _States,
    *,
    whole: Form | None,
) -> None:
    """Write ``release/`` and the file that names it, the folder under another name until it is complete.

    Args:
        path: the checkpoint's folder.
        ranks: tensors of each rank.
        common: entries of all files besides the model.
        states: FP8 states of experts, for the format ``torch_dist``.
        whole: form of the model, for the format ``torch_dist``. None: the format ``torch``.
    """
    partial = path / f"{_RELEASE}.part"
    if partial.exists():  # of a call that was interrupted
        shutil.rmtree(partial)
    if whole is not None:
        _write_whole(partial, ranks[0], common, states, whole)
    else:
        for rank, tensors in enumerate(ranks):
            file = partial / f"mp_rank_{rank:02d}" / RANK_FILE
            file.parent.mkdir(parents=True)
            write_torch_file(file, {**common, "model": tensors})
    partial.replace(path / _RELEASE)
    (path / TRACKER).write_text(_RELEASE)


def _write_whole(
    folder: Path, tensors: Mapping[str, StoredTensor], common: Mapping[str, Any], states: _States, form: Form
) -> None:
    """Write the format ``torch_dist``: layers of one form, and experts, as one tensor with axes in front."""
    # Megatron-LM's own condition: layers that may differ have their numbers in the names.
    alike = form.config.num_moe_experts is None or form.config.moe_layer_freq == 1
    parts: dict[str, dict[tuple[int, ...], StoredTensor]] = {}
    for name, tensor in tensors.items():
        key, place = _whole_name(name, alike)
        parts.setdefault(key, {})[place] = tensor
    entries: dict[str, Any] = {key: _joined(key, each) for key, each in parts.items()}
    for number in range(form.config.num_layers):
        entries |= {name: [None] for name in _extra_states(form.config, number, alike)}
    for number, name, state in states:
        for expert in range(state.gemms):
            entries[_expert_entry(form.config, number, alike, expert, name)] = [_bytes_of(of_expert(state, expert))]
    entries["decoder.final_layernorm._extra_state/shard_0_1"] = [None]
    write_torch_distributed(folder, entries)
    write_torch_file(folder / COMMON, common)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def _whole_name(name: str, alike: bool) -> tuple[str, tuple[int, ...]]:
    """Return the name in ``torch_dist`` of the tensor that holds one, and the place there: layer and expert, if any.

    >>> _whole_name("decoder.layers.2.mlp.experts.linear_fc1.weight3", True)
    ('decoder.layers.mlp.experts.experts.linear_fc1.weight', (2, 3))
    """
    place: tuple[int, ...] = ()
    if (expert := stacked_name(name)) is not None:
        name, place = expert[0], (expert[1],)
    layer = re.fullmatch(r"(decoder\.layers\.)(\d+)\.(.*)", name)
    return (name, place) if layer is None or not alike else (layer[1] + layer[3], (int(layer[2]), *place))


def _joined(name: str, parts: Mapping[tuple[int, ...], StoredTensor]) -> StoredTensor:
    """Return tensors as one, in which each is at its place along the axes in front."""
    first = next(iter(parts.values()))
    axes = tuple(1 + max(numbers) for numbers in zip(*parts, strict=True))
    if not axes:
        return first
    pieces = [
        Piece((*place, *(0,) * one.ndim), (*(1,) * len(place), *one.shape), functools.partial(_at, one, len(place)))
        for place, one in parts.items()
    ]
    return StoredTensor((*axes, *first.shape), first.dtype, pieces, name)


def _extra_states(config: TransformerConfig, layer: int, alike: bool) -> list[str]:
    """Return the entries of a layer's ``_extra_state``, which Megatron-LM requires, empty without FP8."""
    mixture = config.num_moe_experts is not None and config.has_experts(layer)
    prefix = "decoder.layers" if alike else f"decoder.layers.{layer}"
    place, sizes = ((layer,), (config.num_layers,)) if alike else ((), ())
    modules = [name for name in _MODULES if not (mixture and name.startswith("mlp."))]
    modules += ["pre_mlp_layernorm"] if mixture else []
    if mixture and config.moe_shared_expert_intermediate_size is not None:
        modules += ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    states = [f"{prefix}.{module}._extra_state/{_shard(place or (0,), sizes or (1,))}" for module in modules]
    for expert in range(config.num_moe_experts or 0 if mixture else 0):
        states += [_expert_entry(config, layer, alike, expert, name) for name in ("linear_fc1", "linear_fc2")]
    return states


def _expert_entry(config: TransformerConfig, layer: int, alike: bool, expert: int, name: str) -> str:
    """Return the entry of the ``_extra_state`` of an expert's linear layer."""
    prefix = "decoder.layers" if alike else f"decoder.layers.{layer}"
    place, sizes = ((layer,), (config.num_layers,)) if alike else ((), ())
    shard = _shard((*place, expert), (*sizes, config.num_moe_experts or 0))
    return f"{prefix}.mlp.experts.experts.{name}._extra_state/{shard}"


def _shard(place: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """Return the name of one object among those of a key, as ``ShardedObject`` of Megatron-Core has it."""
    return f"shard_{'.'.join(map(str, place))}_{'.'.join(map(str, sizes))}"


def _at(tensor: StoredTensor, axes: int) -> np.ndarray:
    return np.asarray(tensor)[(None,) * axes]


def _tensors(model: Any, form: Any, dtype: DTypeLike | None) -> dict[str, StoredTensor]:
    """Return the model's tensors in Megatron's names and layouts; each is made when it is written."""
    table, sizes = MEGATRON.table(form), form.sizes()
    names = [name for pieces in table.values() for name in Entry.of(pieces, sizes["e"]).names]
    # Megatron-Core keeps a router's bias of experts in fp32 beside parameters of any dtype.
    states = {name for path, pieces in table.items() if is_state(path) for name in pieces}
    if getattr(model, "megatron_names", False):
        named = state_dict(model)
        missing = [name for name in names if name not in named]
        if missing:
            raise ValueError(f"the model has no {', '.join(missing[:8])}; take kernels from their masters")
        found = {
            name: (array.shape, array.dtype, functools.partial(np.asarray, array)) for name, array in named.items()
        }
    else:
        entries, arrays = placed_arrays(model, _KIND, table, sizes)
        found = {}
        for path, entry in entries.items():
            for number, part in enumerate(entry.parts()):
                ((name, shape),) = part.their_shapes(sizes).items()
                at = None if entry.experts is None else number
                found[name] = (shape, arrays[path].dtype, functools.partial(_written, part, arrays[path], at, sizes))
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        shape, own, read = found[name]
        stored = np.dtype(own if dtype is None or name in states else dtype)
        tensors[name] = StoredTensor.of(tuple(shape), stored, functools.partial(_cast, read, stored, name), name)
    return tensors


def _written(entry: Entry, array: jax.Array, expert: int | None, sizes: Any) -> np.ndarray:
    ((_, found),) = entry.write(on_host(array if expert is None else array[expert]), sizes)
    return found


def _cast(read: Any, dtype: np.dtype[Any], name: str) -> np.ndarray:
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
