"""Adapters from folders in PEFT's format."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jax_te._validation import checked
from jax_te.errors import mismatch
from jax_te.interop.huggingface.folder import ADAPTER_CONFIG, ADAPTER_TENSORS, open_adapters
from jax_te.interop.huggingface.peft_config import PeftConfig, read_config
from jax_te.interop.huggingface.peft_kernels import AdaptableKernel, Matrices, adaptable_kernels
from jax_te.interop.huggingface.save import known_architectures
from jax_te.interop.tables import Architecture, KnownModel, Sizes, architecture_of
from jax_te.layers import LayerNormMLP, Linear, LoRA, Router

# Longer names are of no layer, and expressions of the configuration might take long for them.
_NAME = re.compile(r"base_model\.model\.(.{1,120})\.lora_([AB])\.weight")
_DTYPES = [np.dtype(name) for name in (ml_dtypes.bfloat16, np.float16, np.float32)]


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
    they are sharded as the kernels are. Adapted layers are frozen, and so is every router that would change the bias by
    which it balances its load, since `save_peft` has no place for it; set its ``frozen = False`` to train it again.

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
    fields, tensors = open_adapters(folder)
    config = read_config(fields, str(folder / ADAPTER_CONFIG), ignore_fields)
    matrices = _matrices(tensors, folder)
    _check_config_matches(config, matrices, folder)
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
            base.frozen, base.adapted = frozen, False
        raise
    # All that can be refused has been: from here on the model changes.
    for plan, adapter in zip(plans, adapters, strict=True):
        parent, _, attribute = plan.owner.rpartition("/")
        setattr(_at(model, parent), attribute, adapter)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Router) and module.has_moving_bias:
            module.frozen = True  # the bias moves by no gradient, so no choice of parameters keeps it


def _check_config_matches(config: PeftConfig, matrices: Mapping[str, Matrices], folder: Path) -> None:
    """Raise CheckpointMismatchError for adapters that PEFT leaves out or refuses by the configuration."""
    lines = []
    for module, pair in matrices.items():
        if not config.has(module):
            lines.append(f"{module} is none of the layers that target_modules and its other fields choose")
        elif pair.rank != config.rank_of(module):
            lines.append(f"{module} has rank {pair.rank}, and r and rank_pattern say {config.rank_of(module)}")
    _raise_if_any(lines, f"the adapters of {folder} are not those of its {ADAPTER_CONFIG}:")


def _matrices(tensors: Mapping[str, np.ndarray], folder: Path) -> dict[str, Matrices]:
    """Return the adapters of a file by their layers' names."""
    pairs: dict[str, dict[str, np.ndarray]] = {}
    lines = []
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or tensor.ndim != 2:
            lines.append(f"{name} {list(tensor.shape)} is no matrix of LoRA for a linear layer")
        elif tensor.dtype not in _DTYPES:
            lines.append(f"{name} is {tensor.dtype}; {', '.join(map(str, _DTYPES))} are read")
        else:
            pairs.setdefault(match[1], {})[match[2]] = tensor
    for module, pair in pairs.items():
        if len(pair) < 2:
            lines.append(f"{module} has lora_{next(iter(pair))} alone")
        elif pair["A"].shape[0] != pair["B"].shape[1] or pair["A"].shape[0] == 0:
            lines.append(f"{module} has lora_A {list(pair['A'].shape)} and lora_B {list(pair['B'].shape)}")
    if not tensors:
        lines.append("there are none")
    _raise_if_any(lines, f"the tensors of {folder / ADAPTER_TENSORS} are not adapters:")
    return {module: Matrices(pair["A"], pair["B"]) for module, pair in pairs.items()}


def _fitting(
    model: Any, known: Mapping[str, Architecture], matrices: Mapping[str, Matrices], folder: Path
) -> tuple[list[AdaptableKernel], Sizes]:
    """Return the kernels of the first architecture that can represent the model and has all layers; and its sizes."""
    first, _ = architecture_of(model, known)
    problems: dict[str, list[str]] = {}
    for name, candidate in known.items():
        try:
            _, form = architecture_of(model, {name: candidate})
        except ValueError:
            continue
        kernels, sizes = adaptable_kernels(candidate, form), form.sizes()
        problems[name] = _problems(kernels, sizes, matrices, name)
        if not problems[name]:
            return kernels, sizes
    _raise_if_any(problems[first], f"the adapters of {folder} are not those of this model:")
    raise AssertionError  # the first architecture has problems, or would have been taken


def _problems(
    kernels: list[AdaptableKernel], sizes: Sizes, matrices: Mapping[str, Matrices], architecture: str
) -> list[str]:
    """Return a line for each adapter that is for no layer or has another shape."""
    owners = {module: kernel for kernel in kernels for module in kernel.modules}
    lines = []
    for module, pair in matrices.items():
        if module not in owners:
            lines.append(f"{module} is no linear layer of {architecture} that can be adapted")
            continue
        shapes = owners[module].shapes(pair.rank, sizes)[module]
        if (pair.a.shape, pair.b.shape) != shapes:
            given, wanted = ([list(shape) for shape in two] for two in ((pair.a.shape, pair.b.shape), shapes))
            lines.append(f"{module} has lora_A and lora_B of {given}, and must have {wanted}")
    return lines


def _raise_if_any(lines: list[str], what: str) -> None:
    if lines:
        raise mismatch(what, lines)


@dataclass(frozen=True)
class _AdapterPlan:
    """A `LoRA` that will take the place of a layer.

    Args:
        owner: path of the layer.
        kernels: kernels of the layer.
        rank: rank of the first of them that has adapters; others have their own.
        scale: factor of all.
    """

    owner: str
    kernels: list[AdaptableKernel]
    rank: int
    scale: float

    def adapter(self, model: nnx.Module, matrices: Mapping[str, Matrices], sizes: Sizes) -> LoRA:
        """Return the adapter around the layer, which it freezes."""
        base = _at(model, self.owner)
        own = [pair for kernel in self.kernels for pair in _pairs_of(kernel, matrices)]
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
            if _pairs_of(kernel, matrices):
                prefix = kernel.name.removesuffix("kernel")
                a, b = _read(kernel, matrices, sizes)
                _set(getattr(adapter, f"{prefix}lora_a"), a)
                _set(getattr(adapter, f"{prefix}lora_b"), b)
        return adapter


def _plan(
    model: Any, owner: str, kernels: list[AdaptableKernel], matrices: Mapping[str, Matrices], config: PeftConfig
) -> _AdapterPlan | None:
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
    dtypes = {module: sorted({str(pair.a.dtype), str(pair.b.dtype)}) for module, pair in own.items()}
    if len({name for names in dtypes.values() for name in names}) > 1:
        raise ValueError(f"adapters of one layer, {owner}, have dtypes {dtypes}; they must be equal")
    scales = {module: config.scale(module, pair.rank) for module, pair in own.items()}
    if len({*scales.values()}) > 1:
        raise ValueError(
            f"adapters of one layer, {owner}, have scales (lora_alpha over rank) {scales}; they must be equal"
        )
    return _AdapterPlan(owner, kernels, next(iter(own.values())).rank, next(iter(scales.values())))


def _pairs_of(kernel: AdaptableKernel, matrices: Mapping[str, Matrices]) -> list[Matrices]:
    return [matrices[module] for module in kernel.modules if module in matrices]


def _read(kernel: AdaptableKernel, matrices: Mapping[str, Matrices], sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return ``lora_a`` and ``lora_b`` of a kernel, zero for layers without adapters."""
    given = _pairs_of(kernel, matrices)[0]
    zeros = {
        module: Matrices(np.zeros(a, given.a.dtype), np.zeros(b, given.b.dtype))
        for module, (a, b) in kernel.shapes(given.rank, sizes).items()
    }
    pairs = {module: matrices.get(module, zero) for module, zero in zeros.items()}
    a = np.concatenate([pair.a.T for pair in pairs.values()], axis=1)
    entry, sizes = kernel.lora_b(), {**sizes, "rank": given.rank}
    whole = (slice(None),) * len(entry.shape(sizes))
    return a, entry.read({module: pair.b for module, pair in pairs.items()}, sizes, whole, given.b.dtype)


def _set(variable: nnx.Variable[Any], array: np.ndarray) -> None:
    """Give a parameter new values, with its sharding."""
    if jax.sharding.get_mesh().empty:
        variable.set_value(jnp.asarray(array))
    else:
        place = variable.get_value().sharding
        variable.set_value(jax.make_array_from_callback(array.shape, place, lambda index: array[index]))


def _at(model: Any, path: str) -> Any:
    for name in path.split("/") if path else ():  # the model itself, around the dense layer of BERT's head
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model
