"""Adapters in the format of PEFT: the matrices of LoRA for linear layers of a model of transformers."""

from __future__ import annotations

import itertools
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jax_te._validation import checked, float_dtype
from jax_te.errors import mismatch
from jax_te.interop.huggingface.architectures.registry import ARCHITECTURES
from jax_te.interop.huggingface.config_json import NO_NUMBERS
from jax_te.interop.huggingface.folder import ADAPTER_CONFIG, ADAPTER_TENSORS, check_no_model, json_file
from jax_te.interop.huggingface.safetensors import TensorFile, write_file
from jax_te.interop.huggingface.save import known_architectures
from jax_te.interop.tables import (
    REQUIRED,
    Architecture,
    Entry,
    Fields,
    KnownModel,
    Pattern,
    Sizes,
    architecture_of,
    converted,
    on_host,
    write_by_the_first,
)
from jax_te.layers import GroupedLoRA, LayerNormMLP, Linear, LoRA
from jax_te.models import GPTModel, T5Model
from jax_te.typing import DTypeLike

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_LITERAL = re.compile(r"[\w.]{1,300}")
_DTYPES = [np.dtype(name) for name in (ml_dtypes.bfloat16, np.float16, np.float32)]
# Of ``fan_in_fan_out``, which is of the layers that are adapted, the architecture says the same.
_NO_NUMBERS = """
auto_mapping base_model_name_or_path eva_config fan_in_fan_out inference_mode megatron_core peft_version
qalora_group_size revision runtime_config task_type
"""
_STACKS = ("layers", "h", "block")
_RANK, _ALPHA = 8, 8.0
"""PEFT's defaults of ``r`` and ``lora_alpha``."""


@checked
def load_peft(
    model: KnownModel,
    folder: str | Path,
    *,
    architecture: str | None = None,
    ignore_fields: Collection[str] = (),
) -> None:
    """Add the LoRA adapters of a folder that PEFT wrote to a model, in the place of the layers that they adapt.

    Each such layer becomes a `jax_te.layers.LoRA` around it. Where one kernel here has several of transformers' layers,
    such as queries, keys and values, each of these has an adapter of its own (``components``), as it has there; one
    that the folder has no adapter for is left as it is, also in training. Adapters have the tensors' dtype; on a mesh
    they are sharded as the kernels are.

    Args:
        model: a model of `jax_te.models`, such as one that `load_huggingface` gave; changed in place.
        folder: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        architecture: name of the architecture whose names the tensors have, one of `ARCHITECTURES`. None: the first
            that can represent the model and has all these names.
        ignore_fields: names of fields of ``adapter_config.json`` that are unknown here and that you know to change no
            number.

    Raises:
        ValueError: for a missing or damaged file; a field that changes numbers and is not supported, such as
            ``use_dora`` and ``modules_to_save``; a layer that has an adapter already; adapters of one kernel with
            different ranks or scales; a model that no architecture can represent. The model is then as before.
        CheckpointMismatchError: for tensors that are no adapters of the model's linear layers, or not those that
            ``r``, ``rank_pattern``, ``target_modules`` and related fields say.

    Source: ``PeftModel.from_pretrained`` of PEFT.

    >>> load_peft(model, "my-adapter")  # doctest: +SKIP
    """
    folder = Path(folder)
    config = _read_config(json_file(folder / ADAPTER_CONFIG), str(folder / ADAPTER_CONFIG), ignore_fields)
    matrices = _matrices(TensorFile(folder / ADAPTER_TENSORS).tensors, folder)
    _check_said(config, matrices, folder)
    kernels, sizes = _fitting(model, known_architectures(architecture), matrices, folder)
    plans = [
        plan
        for owner, group in itertools.groupby(kernels, lambda kernel: kernel.owner)
        if (plan := _plan(model, owner, list(group), matrices, config)) is not None
    ]
    trained = [(base, base.frozen) for plan in plans for base in [_at(model, plan.owner)]]
    try:
        adapters = [plan.adapter(model, matrices, sizes) for plan in plans]
    except BaseException:
        for base, frozen in trained:
            base.frozen = frozen
        raise
    # All that can be refused has been: from here on the model changes.
    for plan, adapter in zip(plans, adapters, strict=True):
        parent, _, attribute = plan.owner.rpartition("/")
        setattr(_at(model, parent), attribute, adapter)


@checked
def save_peft(
    model: KnownModel,
    folder: str | Path,
    *,
    architecture: str | None = None,
    base: str | None = None,
    dtype: DTypeLike | None = None,
) -> None:
    """Write the LoRA adapters of a model so that PEFT loads them for the model's form in transformers.

    Where one kernel here has several of transformers' layers, and one adapter, each of these gets the adapter's
    ``lora_A`` and its own part of ``lora_B``. An adapter of which both are zero is left out. The two files replace
    older ones when both are complete. With several processes all must call this, and the first one writes.

    Args:
        model: a model of `jax_te.models` with `jax_te.layers.LoRA` around some of its linear layers.
        folder: folder to write; made if missing.
        architecture: name of the architecture, one of `ARCHITECTURES`. None: the first that can represent all options
            of the model.
        base: name or path of the model that is adapted, for ``base_model_name_or_path``.
        dtype: dtype of the tensors. None: the adapters'.

    Raises:
        ValueError: for a model without adapters, or with nothing but zeros; for adapters of layers that the
            architecture does not have, of experts, and of parts of one of its layers; for a folder that holds a model.

    Source: ``PeftModel.save_pretrained`` of PEFT.

    >>> save_peft(model, "my-adapter", base="Llama-3.2-1B")  # doctest: +SKIP
    """
    folder = Path(folder)
    dtype = None if dtype is None else float_dtype("dtype", dtype)
    name, form = architecture_of(model, known_architectures(architecture))
    kernels = {f"{kernel.owner}/{kernel.name}": kernel for kernel in _kernels(ARCHITECTURES[name], form)}
    found: dict[str, _Matrices] = {}
    for owner, adapter in _adapters(model):
        for each in adapter.base.kernels:
            if (kernel := kernels.get(f"{owner}/{each}")) is None:
                raise ValueError(f"{name} has no place for the adapter of {owner}/{each}; merge it")
            found |= _written(kernel, adapter, form.sizes())
    if not found:
        raise ValueError("all adapters of the model are zero, and there is nothing to write")
    config = _config(model, found, [*kernels.values()], base)
    tensors = {
        (tensor := f"base_model.model.{module}.lora_{letter}.weight"): converted(array, dtype or array.dtype, tensor)
        for module, each in sorted(found.items())
        for letter, array in (("A", each.a), ("B", each.b))
    }

    def write(stream: Iterator[tuple[str, np.ndarray]]) -> None:
        check_no_model(folder)
        folder.mkdir(parents=True, exist_ok=True)
        parts = {each: folder / f"{each}.part" for each in (ADAPTER_TENSORS, ADAPTER_CONFIG)}
        plan = [(name, array.dtype, array.shape) for name, array in tensors.items()]
        write_file(parts[ADAPTER_TENSORS], plan, stream)
        parts[ADAPTER_CONFIG].write_text(json.dumps(config, indent=2) + "\n")
        # Not there while tensors are exchanged: an interrupted call leaves no tensors under the fields of others.
        (folder / ADAPTER_CONFIG).unlink(missing_ok=True)
        for each, part in parts.items():
            part.replace(folder / each)

    write_by_the_first(write, iter(tensors.items()), folder)


class _Matrices(NamedTuple):
    """The adapter of a layer of transformers: ``lora_A [r, k]``, ``lora_B [n, r]``; their product's factor, once known.

    The factor is None in a file, where the configuration says it.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float | None = None

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True)
class _Kernel:
    """A kernel of a linear layer: the layer's path, the kernel's name in it, and its tensors in transformers."""

    owner: str
    name: str
    entry: Entry

    @property
    def pieces(self) -> list[tuple[str, Pattern]]:
        """Transformers' layers, each with the pattern of its weight or of a part of that."""
        return [(name.removesuffix(".weight"), pattern) for name, pattern in self.entry.pieces]

    @property
    def modules(self) -> list[str]:
        """Names of transformers' layers."""
        return [*dict.fromkeys(name for name, _ in self.pieces)]

    @property
    def transposed(self) -> bool:
        """Whether transformers stores them as ``[k, n]``, as GPT-2's."""
        _, pattern = self.pieces[0]
        return pattern.theirs[0] == pattern.ours[0]

    def components(self, sizes: Sizes) -> tuple[int, ...] | None:
        """Return how many components of the kernel each layer has; None for one layer."""
        if len(self.modules) == 1:
            return None
        return tuple(Pattern.shape(pattern.ours, sizes)[-2] for _, pattern in self.pieces)

    def lora_b(self) -> Entry:
        """Return the entry of ``lora_b``: that of the kernel, with ranks in place of inputs."""

        def ranked(pattern: Pattern) -> Pattern:
            inner, *outer = pattern.ours
            (theirs,) = (axes for axes in pattern.theirs if axes != inner)
            return Pattern((theirs, ("rank",)), (("rank",), *outer))

        return Entry(tuple((module, ranked(pattern)) for module, pattern in self.pieces))

    def shapes(self, rank: int, sizes: Sizes) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the shapes of ``lora_A`` and ``lora_B`` of each layer."""
        _, pattern = self.pieces[0]
        inputs = Pattern.shape((pattern.ours[0],), sizes)
        return {
            module: ((rank, *inputs), shape)
            for module, shape in self.lora_b().their_shapes({**sizes, "rank": rank}).items()
        }


def _kernels(architecture: Architecture, form: Any) -> list[_Kernel]:
    """Return the kernels that adapters may be for, those of one layer in a row."""
    found = []
    for path, pieces in architecture.table(form).items():
        owner, _, name = path.rpartition("/")
        if owner and name.endswith("kernel") and not any("{e}" in each for each in pieces):
            found.append(_Kernel(owner, name, Entry.of(pieces)))
    return sorted(found, key=lambda kernel: kernel.owner)


@dataclass(frozen=True)
class _Config:
    """The fields of ``adapter_config.json`` that change numbers.

    Args:
        rank, ranks: rank of all adapters, and of those whose layers' names end with one of these.
        alpha, alphas: the same of the factor.
        rank_stabilized: whether the factor is divided by the rank's square root.
        targets: names of layers with adapters, or ends of these. None: an expression says them.
        excluded: the same of layers without.
        numbers: numbers of transformer layers with adapters. None: all.
    """

    rank: int
    ranks: Mapping[str, int]
    alpha: float
    alphas: Mapping[str, float]
    rank_stabilized: bool
    targets: list[str] | None
    excluded: list[str] | None
    numbers: list[int] | None

    def rank_of(self, module: str) -> int:
        """Return the rank of a layer's adapter."""
        return next((each for name, each in self.ranks.items() if _ends(module, name)), self.rank)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a layer's adapter."""
        alpha = next((each for name, each in self.alphas.items() if _ends(module, name)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def has(self, module: str) -> bool:
        """Return whether PEFT puts an adapter around a layer."""
        if any(_ends(module, name) for name in self.excluded or ()):
            return False
        if self.targets is None:
            return True
        number = next((int(part) for part in module.split(".")[1:-1] if part.isdecimal()), None)
        chosen = self.numbers is None or number in self.numbers
        return chosen and any(_ends(module, name) for name in self.targets)


def _ends(module: str, name: str) -> bool:
    return f".{module}".endswith(f".{name}")


def _read_config(values: Mapping[str, Any], what: str, ignore: Collection[str]) -> _Config:
    """Return the fields that change numbers; those that are null, false or empty count as absent."""
    stated = {name: value for name, value in values.items() if not _is_nothing(value)}
    given = Fields(stated, what, without_effect=NO_NUMBERS)
    kind = given.take("peft_type", str, REQUIRED)
    if kind != "LORA":
        raise given.refused("peft_type", kind, "only 'LORA' is supported")
    given.skip(*_NO_NUMBERS.split())
    given.expect("bias", "none")
    # Others change the kernels that adapters are for.
    given.expect("init_lora_weights", True, "gaussian", "eva", "orthogonal")
    rate = given.take("lora_dropout", float, 0.0)
    targets, numbers = _names(given, "target_modules"), given.raw("layers_to_transform")
    numbers = [numbers] if type(numbers) is int else numbers
    if numbers is not None and not (isinstance(numbers, list) and all(type(each) is int for each in numbers)):
        raise given.refused("layers_to_transform", numbers, "it must hold numbers of layers")
    pattern = given.raw("layers_pattern")
    if pattern not in (None, "", *_STACKS, *([name] for name in _STACKS)):
        raise given.refused("layers_pattern", pattern, f"the first numbers in names count layers, in {_STACKS}")
    config = _Config(
        rank=given.take("r", int, _RANK),
        ranks=_pattern(given, f"{what}: rank_pattern", "rank_pattern", int),
        alpha=given.take("lora_alpha", float, _ALPHA),
        alphas=_pattern(given, f"{what}: alpha_pattern", "alpha_pattern", float),
        rank_stabilized=given.take("use_rslora", bool, False),
        targets=targets,
        excluded=_names(given, "exclude_modules"),
        numbers=numbers,
    )
    given.finish(ignore)
    if rate > 0.0:
        warnings.warn(
            f"{what}: lora_dropout is {rate}, and adapters have no dropout here: they compute the same, and train "
            "without it",
            stacklevel=1,
        )
    return config


def _names(given: Fields, name: str) -> list[str] | None:
    """Return names of layers, None for an expression in their place, which is not evaluated, or none."""
    found = given.raw(name)
    if found is None or isinstance(found, str):
        return None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise given.refused(name, found, "it must hold names of layers")
    return found


def _pattern(given: Fields, what: str, name: str, kind: type) -> dict[str, Any]:
    """Return numbers by ends of layers' names."""
    found = given.take(name, dict, {})
    values = Fields(found, what)
    for each in found:
        if not _LITERAL.fullmatch(each):
            raise values.refused(each[:60], found[each], "only names of layers are supported, no other expressions")
    return {each: values.take(each, kind, REQUIRED) for each in found}


def _check_said(config: _Config, matrices: Mapping[str, _Matrices], folder: Path) -> None:
    """Raise CheckpointMismatchError for adapters that PEFT leaves out or refuses by the configuration."""
    lines = []
    for module, each in matrices.items():
        if not config.has(module):
            lines.append(f"{module} is none of the layers that target_modules and its other fields choose")
        elif each.rank != config.rank_of(module):
            lines.append(f"{module} has rank {each.rank}, and r and rank_pattern say {config.rank_of(module)}")
    _raise_if_any(lines, f"the adapters of {folder} are not those of its {ADAPTER_CONFIG}:")


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or value in ({}, [])


def _matrices(tensors: Mapping[str, np.ndarray], folder: Path) -> dict[str, _Matrices]:
    """Return the adapters of a file by their layers' names."""
    found: dict[str, dict[str, np.ndarray]] = {}
    lines = []
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or tensor.ndim != 2:
            lines.append(f"{name} {list(tensor.shape)} is no matrix of LoRA for a linear layer")
        elif tensor.dtype not in _DTYPES:
            lines.append(f"{name} is {tensor.dtype}; {', '.join(map(str, _DTYPES))} are read")
        else:
            found.setdefault(match[1], {})[match[2]] = tensor
    for module, each in found.items():
        if len(each) < 2:
            lines.append(f"{module} has lora_{next(iter(each))} alone")
        elif each["A"].shape[0] != each["B"].shape[1] or each["A"].shape[0] == 0:
            lines.append(f"{module} has lora_A {list(each['A'].shape)} and lora_B {list(each['B'].shape)}")
    if not tensors:
        lines.append("there are none")
    _raise_if_any(lines, f"the tensors of {folder / ADAPTER_TENSORS} are not adapters:")
    return {module: _Matrices(each["A"], each["B"]) for module, each in found.items()}


def _fitting(
    model: Any, known: Mapping[str, Architecture], matrices: Mapping[str, _Matrices], folder: Path
) -> tuple[list[_Kernel], Sizes]:
    """Return the kernels of the first architecture that can represent the model and has all layers; and its sizes."""
    first, _ = architecture_of(model, known)
    problems: dict[str, list[str]] = {}
    for name, each in known.items():
        try:
            _, form = architecture_of(model, {name: each})
        except ValueError:
            continue
        kernels, sizes = _kernels(each, form), form.sizes()
        problems[name] = _problems(kernels, sizes, matrices, name)
        if not problems[name]:
            return kernels, sizes
    _raise_if_any(problems[first], f"the adapters of {folder} are not those of this model:")
    raise AssertionError  # the first architecture has problems, or would have been taken


def _problems(kernels: list[_Kernel], sizes: Sizes, matrices: Mapping[str, _Matrices], architecture: str) -> list[str]:
    """Return a line for each adapter that is for no layer or has another shape."""
    owners = {module: kernel for kernel in kernels for module in kernel.modules}
    lines = []
    for module, each in matrices.items():
        if module not in owners:
            lines.append(f"{module} is no linear layer of {architecture} that can be adapted")
            continue
        shapes = owners[module].shapes(each.rank, sizes)[module]
        if (each.a.shape, each.b.shape) != shapes:
            given, wanted = ([list(shape) for shape in pair] for pair in ((each.a.shape, each.b.shape), shapes))
            lines.append(f"{module} has lora_A and lora_B of {given}, and must have {wanted}")
    return lines


def _raise_if_any(lines: list[str], what: str) -> None:
    if lines:
        raise mismatch(what, lines)


@dataclass(frozen=True)
class _Plan:
    """A `LoRA` that will take the place of a layer.

    Args:
        owner: path of the layer.
        kernels: kernels of the layer.
        rank: rank of the first of them that has adapters; others have their own.
        scale: factor of all.
    """

    owner: str
    kernels: list[_Kernel]
    rank: int
    scale: float

    def adapter(self, model: Any, matrices: Mapping[str, _Matrices], sizes: Sizes) -> LoRA:
        """Return the adapter around the layer, which it freezes."""
        base = _at(model, self.owner)
        own = [each for kernel in self.kernels for each in _of(kernel, matrices)]
        adapter = LoRA(
            base,
            self.rank,
            components=next(filter(None, (kernel.components(sizes) for kernel in self.kernels)), None),
            # Zero: a kernel without adapters has no gradient in either matrix.
            init_method=jax.nn.initializers.zeros,
            params_dtype=own[0].a.dtype,
            rngs=nnx.Rngs(0),
        )
        adapter.scale = self.scale
        for kernel in self.kernels:
            if _of(kernel, matrices):
                prefix = kernel.name.removesuffix("kernel")
                a, b = _read(kernel, matrices, sizes)
                _set(getattr(adapter, f"{prefix}lora_a"), a)
                _set(getattr(adapter, f"{prefix}lora_b"), b)
        return adapter


def _plan(
    model: Any, owner: str, kernels: list[_Kernel], matrices: Mapping[str, _Matrices], config: _Config
) -> _Plan | None:
    """Return how a layer is adapted, None for a layer without adapters."""
    own = {module: matrices[module] for kernel in kernels for module in kernel.modules if module in matrices}
    if not own:
        return None
    layer = _at(model, owner)
    if isinstance(layer, LoRA):
        raise ValueError(f"{owner} has an adapter already; merge it, or load the model again")
    if not isinstance(layer, Linear | LayerNormMLP):
        raise ValueError(f"{owner} is a {type(layer).__name__}, and adapters are for linear layers")
    for kernel in kernels:
        ranks = {module: own[module].rank for module in kernel.modules if module in own}
        if len({*ranks.values()}) > 1:
            raise ValueError(f"adapters of one kernel, {owner}/{kernel.name}, have ranks {ranks}; they must be equal")
    dtypes = {module: sorted({str(each.a.dtype), str(each.b.dtype)}) for module, each in own.items()}
    if len({name for names in dtypes.values() for name in names}) > 1:
        raise ValueError(f"adapters of one layer, {owner}, have dtypes {dtypes}; they must be equal")
    scales = {module: config.scale(module, each.rank) for module, each in own.items()}
    if len({*scales.values()}) > 1:
        raise ValueError(
            f"adapters of one layer, {owner}, have scales (lora_alpha over rank) {scales}; they must be equal"
        )
    return _Plan(owner, kernels, next(iter(own.values())).rank, next(iter(scales.values())))


def _of(kernel: _Kernel, matrices: Mapping[str, _Matrices]) -> list[_Matrices]:
    return [matrices[module] for module in kernel.modules if module in matrices]


def _read(kernel: _Kernel, matrices: Mapping[str, _Matrices], sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return ``lora_a`` and ``lora_b`` of a kernel, zero for layers without adapters."""
    given = _of(kernel, matrices)[0]
    zeros = {
        module: _Matrices(np.zeros(a, given.a.dtype), np.zeros(b, given.b.dtype))
        for module, (a, b) in kernel.shapes(given.rank, sizes).items()
    }
    each = {module: matrices.get(module, zero) for module, zero in zeros.items()}
    a = np.concatenate([one.a.T for one in each.values()], axis=1)
    entry, sizes = kernel.lora_b(), {**sizes, "rank": given.rank}
    whole = (slice(None),) * len(entry.shape(sizes))
    return a, entry.read({module: one.b for module, one in each.items()}, sizes, whole, given.b.dtype)


def _set(variable: Any, array: np.ndarray) -> None:
    """Give a parameter new values, with its sharding."""
    if jax.sharding.get_mesh().empty:
        variable.set_value(jnp.asarray(array))
    else:
        place = variable.get_value().sharding
        variable.set_value(jax.make_array_from_callback(array.shape, place, lambda index: array[index]))


def _at(model: Any, path: str) -> Any:
    for name in path.split("/"):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


def _adapters(model: Any) -> list[tuple[str, LoRA]]:
    """Return the adapters of a model with their paths."""
    found = [("/".join(map(str, path)), each) for path, each in nnx.iter_modules(model) if isinstance(each, LoRA)]
    for path, each in found:
        if isinstance(each, GroupedLoRA):
            raise ValueError(f"{path} adapts experts, which have no such adapters in PEFT; merge it")
    if not found:
        raise ValueError("the model has no adapters; put a LoRA around its linear layers, or save the model itself")
    return sorted(found, key=lambda pair: pair[0])


def _written(kernel: _Kernel, adapter: LoRA, sizes: Sizes) -> dict[str, _Matrices]:
    """Return the adapters of transformers' layers."""
    prefix = kernel.name.removesuffix("kernel")
    a, b = (on_host(getattr(adapter, f"{prefix}lora_{letter}").get_value()) for letter in "ab")
    modules, rank = kernel.modules, b.shape[0]
    parts = np.split(a, a.shape[1] // rank, axis=1)
    if len(parts) > 1 and (len(modules) == 1 or adapter.components != kernel.components(sizes)):
        raise ValueError(
            f"the adapter of {kernel.owner}/{kernel.name} has components={adapter.components}, and its layers in "
            f"transformers are {', '.join(modules)}; name the architecture whose layers these are, or merge it"
        )
    parts = parts if len(parts) > 1 else parts * len(modules)
    ours = dict(kernel.lora_b().write(b, {**sizes, "rank": rank}))
    each = {
        module: _Matrices(np.ascontiguousarray(part.T), np.ascontiguousarray(ours[module]), adapter.scale)
        for module, part in zip(modules, parts, strict=True)
    }
    return {module: one for module, one in each.items() if one.a.any() or one.b.any()}


def _config(model: Any, found: Mapping[str, _Matrices], kernels: list[_Kernel], base: str | None) -> dict[str, Any]:
    """Return the fields of ``adapter_config.json``."""
    ranks = {module: each.rank for module, each in found.items()}
    alphas = {module: _alpha(each.scale, each.rank) for module, each in found.items() if each.scale is not None}
    (rank, alpha), _ = Counter((ranks[module], alphas[module]) for module in found).most_common(1)[0]
    tasks = {GPTModel: "CAUSAL_LM", T5Model: "SEQ_2_SEQ_LM"}
    return {
        "peft_type": "LORA",
        "task_type": tasks.get(type(model)),
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {module: each for module, each in ranks.items() if each != rank},
        "alpha_pattern": {module: each for module, each in alphas.items() if each != alpha},
        "target_modules": sorted(found),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(kernel.transposed for kernel in kernels),
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _alpha(scale: float, rank: int) -> float | int:
    """Return the number that over the rank is the scale, a whole one if there is one."""
    near = round(scale * rank)
    return near if near / rank == scale else scale * rank
