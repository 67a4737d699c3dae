"""Conversion of saved arrays to another layout or dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_te.checkpoint.tree import PARAMETERS, Name
from jax_te.errors import Record
from jax_te.quantize import BLOCK, MX_BLOCK, QuantizedTensor
from jax_te.typing import Array

ALLOWED = {
    "cast": "values rounded to another dtype",
    "dequantize": "values of quantized kernels, which have no masters, times their scales",
    "missing": "arrays that the checkpoint lacks, left as they are in the given state",
    "quantizers": "delayed scaling begun anew (scales 1, histories 0), left out, or its histories cut or filled with 0",
    "requantize": "kernels quantized by the recipe here",
    "unexpected": "arrays that the state lacks, left out",
}
"""Conversions that `TrainCheckpointer.restore` makes only on request, since they lose or add something."""

MASTERS, QUANTIZERS = "masters", "quantizers"
_COUNTERPARTS = {PARAMETERS: MASTERS, MASTERS: PARAMETERS}
DATA, SCALES, TENSOR_SCALES = (("form", "rowwise", name) for name in ("data", "scale_inv", "tensor_scale_inv"))
"""Names of a stored quantized kernel's arrays, after the kernel's own name."""

SIDES = (1, 16, MX_BLOCK, BLOCK)
"""Sides of the blocks that have one scale."""

PROJECTIONS = {"query": None, "key": -2, "value": -1}
"""Separate projections of attention, and their components of the fused one; None: all but the last two."""

NORMS = {"scale": "scale", "ln_bias": "bias"}
"""Names of a norm's parameters in a fused layer and in a separate layer."""

# Parts of names that the rules of `Conversions` put in each other's place.
_ONE_PART = dict.fromkeys((*PROJECTIONS, "layernorm"), "qkv") | NORMS

Axes = tuple[Any, ...]
"""Mesh axes of each dimension."""


_Rules = tuple[Callable[..., Iterator["ArraySource"]], ...]
"""Rules of `Conversions`: each yields arrays with the values of a name by one conversion, given the rules left."""


def _same_axes(axes: Axes) -> tuple[Axes, ...]:
    return (axes,)


@dataclass(frozen=True, kw_only=True)
class ArraySource:
    """An array as it is read, or made of others.

    Args:
        shape, dtype: shape and dtype of the array.
        parts: arrays that it is made of.
        make: function of the parts' arrays; None: it is read under the name ``source``.
        axes_of_parts: function that returns how each part is sharded, so that a device makes its shard from what it
            holds.
        sliced: whether it is a slice of a single part.
        note: description of the conversion, for the log.
        needs: names of `ALLOWED`.
    """

    shape: tuple[int, ...]
    dtype: Any
    parts: tuple[ArraySource, ...] = ()
    make: Callable[..., Array] | None = None
    axes_of_parts: Callable[[Axes], tuple[Axes, ...]] = _same_axes
    sliced: bool = False
    source: str = ""
    note: str = ""
    needs: frozenset[str] = frozenset()

    def reads(self, axes: Axes) -> dict[str, tuple[ArraySource, Axes]]:
        """Return the arrays to read by name, with their mesh axes if this array has ``axes``."""
        if self.make is None:
            return {self.source: (self, axes)}
        below = zip(self.parts, self.axes_of_parts(axes), strict=True)
        return {name: found for part, axes in below for name, found in part.reads(axes).items()}

    def value(self, arrays: dict[str, Array]) -> Array:
        """Return the array, made from the arrays read."""
        if self.make is None:
            return arrays[self.source]
        return self.make(*(part.value(arrays) for part in self.parts))

    def used(self) -> Counter[str]:
        """Return the number of read elements that this array uses."""
        if self.make is None:
            return Counter({self.source: prod(self.shape)})
        found = sum((part.used() for part in self.parts), Counter[str]())
        return Counter(dict.fromkeys(found, prod(self.shape))) if self.sliced else found

    def all_needs(self) -> frozenset[str]:
        """Return the names that must be allowed for it and its parts."""
        return self.needs.union(*(part.all_needs() for part in self.parts))

    def notes(self) -> list[str]:
        """Return the conversions of its parts, and then its own."""
        return [note for part in self.parts[:1] for note in part.notes()] + [self.note] * bool(self.note)


class Conversions:
    """Arrays of other names, shapes and dtypes that can be made from a checkpoint's arrays.

    Args:
        saved: record of each array of the checkpoint.
        wanted: record of each array of the state.
    """

    def __init__(self, saved: dict[str, Record], wanted: dict[str, Record]):
        self._saved, self._wanted = saved, wanted
        self._forms = _forms(saved)

    def find(self, name: Name, record: Record) -> ArraySource | None:
        """Return the conversion with the least loss that makes the array of a name, or None."""
        dtype, shape = record
        # Lazily: most names are the first layout, as saved, and need no rule.
        of_shape = (made for made in self._layouts(name) if made.shape == shape)
        alike = next(of_shape, None)
        identical = next((made for made in chain([alike], of_shape) if made is not None and made.dtype == dtype), None)
        if identical is not None:
            return identical
        if name[0] == QUANTIZERS:
            return self._quantizer(name, record)
        if not _is_float(dtype):
            return None
        return (
            self._from_counterpart(name, record)
            or self._rounded(alike or self._counterpart(name, shape), name, dtype)
            or (self._dequantized(name, record) if name[0] == PARAMETERS else None)
        )

    def _counterpart(self, name: Name, shape: tuple[int, ...]) -> ArraySource | None:
        """Return a parameter's master, or a master's parameter."""
        first, *rest = name
        return self._of_shape((_COUNTERPARTS[first], *rest), shape) if first in _COUNTERPARTS else None

    def _keeps_exact(self, name: Name) -> bool:
        """Return whether the state also has the exact values of a parameter, in masters."""
        return name[0] == PARAMETERS and "/".join((MASTERS, *name[1:])) in self._wanted

    def _from_counterpart(self, name: Name, record: Record) -> ArraySource | None:
        """Return a parameter from its master, or a master from a parameter of its dtype."""
        (dtype, shape), first = record, name[0]
        other = self._counterpart(name, shape)
        if other is None or (other.dtype != dtype and first != PARAMETERS):
            return None
        lossless = other.dtype == dtype or self._keeps_exact(name)
        return _cast(other, dtype, f"{first} taken from {_COUNTERPARTS[first]}", () if lossless else ("cast",))

    def _rounded(self, found: ArraySource | None, name: Name, dtype: str) -> ArraySource | None:
        """Return an array of another floating-point dtype, cast."""
        if found is None or not _is_float(found.dtype):
            return None
        lossless = self._keeps_exact(name) and found.dtype == "float32"
        return _cast(found, dtype, f"{found.dtype} cast to {dtype}", () if lossless else ("cast",))

    def has(self, name: Name) -> bool:
        """Return whether the checkpoint has the array of a name, in any layout and of any shape."""
        return next(self._layouts(name), None) is not None

    def exact(self, name: Name, shape: tuple[int, ...]) -> ArraySource | None:
        """Return the most exact available values of a parameter."""
        found = self._of_shape((MASTERS, *name[1:]), shape) or self._of_shape(name, shape)
        return None if found is None or not _is_float(found.dtype) else found

    def left_over(self, made: dict[Name, ArraySource]) -> list[str]:
        """Return the names of the checkpoint's arrays that ``made`` does not contain, in part or whole."""
        groups: dict[str, Counter[str]] = {}
        for name, each in made.items():
            # Parameters and masters may both be made from the same array: each must contain all of it.
            groups.setdefault(name[0], Counter()).update(each.used())
        sizes = {name: prod(shape) for name, (_, shape) in self._saved.items()}
        held = {name for group in groups.values() for name, count in group.items() if count >= sizes[name]}
        # Masters in the parameters' own dtype are copies of them, which a distributed optimizer splits.
        for name in list(held):
            master = MASTERS + name.removeprefix(PARAMETERS)
            if name.startswith(f"{PARAMETERS}/") and self._saved.get(master) == self._saved[name]:
                held.add(master)
        return [name for name in self._saved if name not in held and not _is_derived(name, held)]

    def _of_shape(self, name: Name, shape: tuple[int, ...]) -> ArraySource | None:
        return next((made for made in self._layouts(name) if made.shape == shape), None)

    def _layouts(self, name: Name, rules: _Rules | None = None) -> Iterator[ArraySource]:
        """Yield arrays with the values of a name, as saved or in another layout; each rule applies once at most.

        Args:
            name: name of the array.
            rules: rules that may still apply. None: all.
        """
        text, is_own = "/".join(name), rules is None
        rules = (self._lora, self._qkv, self._stack) if rules is None else rules
        if _plain(name) not in self._forms:
            return
        # The saved array first: most names need no rule. One that the state has itself is no other one's: a module that
        # is new beside one called "base" is missing.
        if text in self._saved and (is_own or text not in self._wanted):
            dtype, shape = self._saved[text]
            yield ArraySource(shape=shape, dtype=dtype, source=text)
        for rule in rules:
            yield from rule(name, tuple(other for other in rules if other != rule))

    def _lora(self, name: Name, rules: _Rules) -> Iterator[ArraySource]:
        """Convert between a layer and the ``base`` of an adapted layer, see `jax_te.layers.LoRA`."""
        for place in range(1, len(name)):
            if name[place] == "base":
                other = (*name[:place], *name[place + 1 :])
            elif self._may_have("base", name, place):
                other = (*name[:place], "base", *name[place:])
            else:
                continue
            for found in self._layouts(other, rules):
                yield replace(found, note=found.note or "an adapted layer's base")

    def _qkv(self, name: Name, rules: _Rules) -> Iterator[ArraySource]:
        """Convert between projections of `MultiheadAttention` in one kernel ``[…, r + 2, g·d]`` and in three."""
        if len(name) < 2:
            return
        *path, layer, last = name
        norms = {("qkv", fused): ("layernorm", own) for fused, own in NORMS.items()}
        norms |= {new: old for old, new in norms.items()}
        if (layer, last) in norms:
            yield from self._layouts((*path, *norms[layer, last]), rules)
        if last not in ("kernel", "bias"):
            return
        if layer == "qkv":
            q, k, v = (next(self._layouts((*path, each, last), rules), None) for each in PROJECTIONS)
            if q and k and v and len(q.shape) >= 2 and (*q.shape[:-2], *q.shape[-1:]) == k.shape == v.shape:
                shape = (*q.shape[:-2], q.shape[-2] + 2, q.shape[-1])
                yield ArraySource(
                    shape=shape,
                    dtype=q.dtype,
                    parts=(q, k, v),
                    make=_fuse,
                    axes_of_parts=_fused_axes,
                    note="query, key and value fused",
                )
        if layer in PROJECTIONS:
            for fused in self._layouts((*path, "qkv", last), rules):
                if len(fused.shape) >= 2 and fused.shape[-2] > 2:
                    yield _projection(fused, PROJECTIONS[layer])

    def _stack(self, name: Name, rules: _Rules) -> Iterator[ArraySource]:
        """Convert between layers stacked by `nnx.vmap` along a leading axis and layers with numbered names."""
        for place in range(1, len(name)):
            if name[place].isdecimal():
                for stack in self._layouts((*name[:place], *name[place + 1 :]), rules):
                    if stack.shape and int(name[place]) < stack.shape[0]:
                        yield _layer(stack, int(name[place]))
            layers = []
            if not self._may_have("layer", name, place):
                continue
            # All layers of the checkpoint: a stack of fewer has another shape, and is refused.
            while found := next(self._layouts((*name[:place], str(len(layers)), *name[place:]), rules), None):
                layers.append(found)
            if len({(layer.shape, layer.dtype) for layer in layers}) == 1:
                yield _stack_of(layers)

    def _may_have(self, kind: str, name: Name, place: int) -> bool:
        """Return whether some form of a name in the checkpoint has another part in that place.

        Args:
            kind: "base" or "layer", see `_forms`.
            name: name of the array.
            place: number of the parts in front of the other part.
        """
        return (kind, len(_plain(name[:place]))) in self._forms.get(_plain(name), ())

    def _quantizer(self, name: Name, record: Record) -> ArraySource:
        dtype, shape = record
        needs, history = frozenset({QUANTIZERS}), name[-1] == "amax_history"
        for made in self._layouts(name) if history else ():
            if made.shape[:-1] == shape[:-1]:
                resize = partial(_of_length, length=shape[-1])
                return ArraySource(
                    shape=shape,
                    dtype=dtype,
                    parts=(made,),
                    make=resize,
                    note="amax histories cut or filled with 0",
                    needs=needs,
                )
        # Scales begin with 1; histories, and biases and counts of routers, with 0.
        begin = partial(jnp.ones if name[-1] == "scale" else jnp.zeros, shape, dtype)
        return ArraySource(
            shape=shape,
            dtype=dtype,
            make=begin,
            axes_of_parts=lambda _: (),
            note="quantizers begun anew",
            needs=needs,
        )

    def _dequantized(self, name: Name, record: Record) -> ArraySource | None:
        dtype, shape = record
        data, scales, tensor = (next(self._layouts((*name, *each)), None) for each in (DATA, SCALES, TENSOR_SCALES))
        if data is None or scales is None or data.shape != shape:
            return None
        parts = (data, scales, tensor) if tensor else (data, scales)
        # A scale may cover more than one device's values.
        axes = partial(_first_axes, ranks=[len(part.shape) for part in parts[1:]])
        return ArraySource(
            shape=shape,
            dtype=dtype,
            parts=parts,
            make=partial(_dequantize, dtype),
            axes_of_parts=axes,
            note="kernels dequantized",
            needs=frozenset({"dequantize"}),
        )


def _plain(name: Name) -> Name:
    """Return what a name has in common with all that the rules of `Conversions` make of it.

    >>> _plain(("layers", "3", "query", "base", "kernel")) == _plain(("layers", "qkv", "kernel"))
    True
    """
    return tuple(_ONE_PART.get(part, part) for part in name if part != "base" and not part.isdecimal())


def _forms(saved: Iterable[str]) -> dict[Name, set[tuple[str, int]]]:
    """Return where names that have the same plain form, see `_plain`, have parts that it lacks.

    Without it the rules would try such a part in each place of each name.

    Args:
        saved: names of the checkpoint's arrays.

    >>> _forms(["layers/3/qkv/base/kernel"]) == {("layers", "qkv", "kernel"): {("layer", 1), ("base", 2)}}
    True
    """
    forms: dict[Name, set[tuple[str, int]]] = {}
    for text in saved:
        name = tuple(text.split("/"))
        places = forms.setdefault(_plain(name), set())
        for at, part in enumerate(name):
            if part == "base" or part.isdecimal():
                places.add(("base" if part == "base" else "layer", len(_plain(name[:at]))))
    return forms


def _is_float(dtype: str) -> bool:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def _is_derived(name: str, held: set[str]) -> bool:
    """Return whether ``held`` has the master, or the quantized values, of a parameter or of a quantized one's array."""
    first, *rest = name.split("/")
    paths = ["/".join(rest[:size]) for size in range(1, len(rest) + 1)]
    return first == PARAMETERS and any(
        f"{MASTERS}/{path}" in held or "/".join((PARAMETERS, path, *DATA)) in held for path in paths
    )


def _cast(made: ArraySource, dtype: str, note: str, needs: tuple[str, ...]) -> ArraySource:
    return ArraySource(
        shape=made.shape,
        dtype=dtype,
        parts=(made,),
        make=lambda a: a.astype(dtype),
        note=note,
        needs=frozenset(needs),
    )


def _layer(stack: ArraySource, number: int) -> ArraySource:
    take = partial(lax.index_in_dim, index=number, keepdims=False)
    return ArraySource(
        shape=stack.shape[1:],
        dtype=stack.dtype,
        parts=(stack,),
        make=take,
        axes_of_parts=lambda axes: ((None, *axes),),
        sliced=True,
        note="layers taken from a stack",
    )


def _stack_of(layers: list[ArraySource]) -> ArraySource:
    count = len(layers)
    return ArraySource(
        shape=(count, *layers[0].shape),
        dtype=layers[0].dtype,
        parts=tuple(layers),
        make=lambda *arrays: jnp.stack(arrays),
        axes_of_parts=lambda axes: (axes[1:],) * count,
        note="layers stacked",
    )


def _projection(fused: ArraySource, place: int | None) -> ArraySource:
    *lead, count, last = fused.shape
    note = "query, key and value separated"
    if place is None:
        shape, take = (*lead, count - 2, last), partial(lax.slice_in_dim, start_index=0, limit_index=-2, axis=-2)
        return ArraySource(shape=shape, dtype=fused.dtype, parts=(fused,), make=take, sliced=True, note=note)
    take = partial(lax.index_in_dim, index=place, axis=-2, keepdims=False)
    return ArraySource(
        shape=(*lead, last),
        dtype=fused.dtype,
        parts=(fused,),
        make=take,
        axes_of_parts=lambda axes: ((*axes[:-1], None, axes[-1]),),
        sliced=True,
        note=note,
    )


def _fuse(q: Array, k: Array, v: Array) -> Array:
    return jnp.concatenate([q, k[..., None, :], v[..., None, :]], axis=-2)


def _fused_axes(axes: Axes) -> tuple[Axes, ...]:
    one = (*axes[:-2], axes[-1])
    return axes, one, one


def _first_axes(axes: Axes, ranks: list[int]) -> tuple[Axes, ...]:
    return axes, *((None,) * rank for rank in ranks)


def _of_length(history: Array, length: int) -> Array:
    """Return an amax history with another number of entries, newest first."""
    more = max(0, length - history.shape[-1])
    return jnp.pad(history[..., :length], [(0, 0)] * (history.ndim - 1) + [(0, more)])


def _dequantize(dtype: str, data: Array, scales: Array, tensor: Array | None = None) -> Array:
    """Return data times scales, in fp32, rounded once. The size of the blocks follows from the shapes."""
    block = _block_of(data.shape, scales.shape)
    if scales.ndim > (0 if block is None else 2):  # of layers in a stack, of experts, or of experts in a stack
        kernels = zip(data, scales, [None] * len(data) if tensor is None else tensor, strict=True)
        return jnp.stack([_dequantize(dtype, *kernel) for kernel in kernels])
    tensors: Any = {"data": data, "scale_inv": scales, "tensor_scale_inv": tensor}
    return QuantizedTensor(**tensors, dtype=jnp.dtype(dtype), block=block).dequantize()


def _block_of(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the sides of the blocks of each kernel, or None if it has one scale.

    Args:
        shape: shape of the data: axes of kernels, followed by a kernel's own.
        scales: shape of the scales: the same axes of kernels, followed by the numbers of blocks, or nothing.
    """
    kernels = len(scales) - 2
    if kernels < 0 or scales[:kernels] != shape[:kernels]:
        return None
    sizes = (shape[kernels], prod(shape[kernels + 1 :]))
    rows, columns = (
        [side for side in SIDES if -(-size // side) == count]
        for size, count in zip(sizes, scales[kernels:], strict=True)
    )
    # No two block sizes give the same number of blocks, unless it is 1: then the larger works as well. Two axes of
    # kernels are not mistaken for numbers of blocks: a row of a block has fewer values than a kernel.
    return (max(rows), max(columns)) if rows and columns else None
