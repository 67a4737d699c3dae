"""Models as tables see them: the architecture that can represent one, and its parameters by the table's rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx

from jax_te.interop.tables.form import Architecture, Form
from jax_te.interop.tables.patterns import Entry, Sizes, Table, stored_in
from jax_te.quantize import QuantizedKernel
from jax_te.sharding import leaves_with_axes


def placed_arrays(
    model: Any, name: str, table: Table, sizes: Sizes, held: Mapping[str, QuantizedKernel] = MappingProxyType({})
) -> tuple[dict[str, Entry], dict[str, jax.Array]]:
    """Return the entries of a table and the model's parameters, both by the parameters' paths; with the values of
    ``held``.

    Raises:
        ValueError: for parameters that differ from the table's.
    """
    entries = {path: Entry.of(pieces, sizes["e"]) for path, pieces in table.items()}
    leaves = leaves_with_axes(nnx.state(model, stored_in(entries)))
    arrays = {path: leaf for path, leaf, _ in leaves if not any(path.startswith(f"{kernel}/") for kernel in held)}
    arrays |= {path: kernel.form.rowwise.data for path, kernel in held.items()}
    wrong = sorted(arrays.keys() ^ entries.keys())
    wrong += [path for path in arrays.keys() & entries.keys() if arrays[path].shape != entries[path].shape(sizes)]
    if wrong:
        raise ValueError(
            f"{name} has no place for the model's {', '.join(wrong[:8])}; merge adapters, and for kernels that are "
            "stored quantized take the model of the masters, jax_te.training.exact_model(state)"
        )
    return entries, arrays


def architecture_of(model: Any, known: Mapping[str, Architecture]) -> tuple[str, Form]:
    """Return the name of the first architecture that can represent the model, and the model's form.

    Raises:
        ValueError: if there is none.
    """
    lost: dict[str, list[str]] = {}  # options that an architecture does not have
    refused: dict[str, str] = {}  # what an architecture's writer or reader says of an option
    for name, architecture in known.items():
        if not isinstance(model, architecture.model):
            continue
        form = Form(model.config, architecture.options(model))
        try:
            lost[name] = _lost(architecture, form)
        except ValueError as error:
            refused[name] = str(error)
            continue
        if not lost[name]:
            return name, form
    nothing = f"{next(iter(known))} cannot" if len(known) == 1 else "no supported architecture can"
    raise ValueError(f"{nothing} represent this model: {_why_not(model, lost, refused)}")


_NEAREST = 3
"""The most architectures that a message describes: all of them would hide those that matter."""


def _why_not(model: Any, lost: Mapping[str, list[str]], refused: Mapping[str, str]) -> str:
    """Return what of a model no architecture has, and what the nearest ones lack.

    Args:
        model: the model.
        lost: options that an architecture does not have, at least one, by its name.
        refused: error that an architecture's writer or reader raised, by its name.
    """
    if not lost and not refused:
        return f"it is a {type(model).__name__}"
    common = [option for option in next(iter(lost.values()), []) if all(option in each for each in lost.values())]
    # Of those that raised an error it is unknown.
    everywhere = f"of {len(lost)} architectures none has {', '.join(common)}; " if common and len(lost) > 1 else ""
    nearest = sorted(lost.items(), key=lambda item: len(item[1]))
    reasons = [f"{name}: {', '.join(options)}" for name, options in nearest[:_NEAREST]]
    alike: dict[str, list[str]] = {}
    for name, error in refused.items():
        alike.setdefault(error, []).append(name)
    reasons += [f"{', '.join(names)}: {error}" for error, names in [*alike.items()][:_NEAREST]]
    count = len(lost) + len(refused)
    which = f", of the nearest of {count}" if count > _NEAREST else ""
    return f"{everywhere}unsupported options{which}: {'; '.join(reasons)}"


def _lost(architecture: Architecture, form: Form) -> list[str]:
    """Return the options that change when written and read again."""
    written = architecture.config_fields(form)
    count = form.config.num_moe_experts or 0
    tensors = [name for row in architecture.table(form).values() for name in Entry.of(row, count).names]
    fields = architecture.fields_class(written, architecture.described_by, tensors)
    read = architecture.form(fields).options()
    return [f"{name}={value!r}" for name, value in form.options().items() if read.get(name) != value]
