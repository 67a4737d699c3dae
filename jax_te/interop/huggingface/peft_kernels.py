"""Kernels of a model that PEFT's adapters may be for, and the matrices of an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jax_te.interop.tables import Architecture, Entry, Form, Pattern, Sizes


class Matrices(NamedTuple):
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
class AdaptableKernel:
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


def adaptable_kernels(architecture: Architecture, form: Form) -> list[AdaptableKernel]:
    """Return the kernels that adapters may be for, those of one layer in a row."""
    kernels = []
    for path, pieces in architecture.table(form).items():
        owner, _, name = path.rpartition("/")
        if owner and name.endswith("kernel") and not any("{e}" in tensor for tensor in pieces):
            kernels.append(AdaptableKernel(owner, name, Entry.of(pieces)))
    return sorted(kernels, key=lambda kernel: kernel.owner)
