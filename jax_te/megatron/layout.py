"""The layouts of Megatron-Core's checkpoints: names and shapes of single arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te.layers import (
    Embedding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    MultiheadAttention,
    RMSNorm,
    Router,
)
from jax_te.quantize import QuantizerState
from jax_te.sharding import auto_region, variable_axes
from jax_te.typing import LogicalAxes

# Layers whose arrays have other names in Megatron; a module with its own kernel declares it by ``megatron_layout``.
_LAYERS = (Linear, GroupedLinear, LayerNormLinear, LayerNorm, RMSNorm, Embedding)
_FUSED = {"kernel": "weight", "scale": "layer_norm_weight", "ln_bias": "layer_norm_bias"}
_NAMES = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "ln_bias": "bias",
    "gate_kernel": "gate_weight",
    "quantile_bias": "qb_beta",
}


Path = tuple[Any, ...]
"""Path of a module or a Variable in a model."""


@dataclass(frozen=True)
class Layout:
    """Megatron's layout of one array: ``[out, in]`` for a kernel, ``[out]`` for a bias.

    Args:
        shape: the array's own shape: a kernel's ``[in, *out]``, a bias's ``[*out]``.
        own_axes: logical axes of the array.
        is_kernel: whether its first axis is the input's.
        groups: key/value groups whose components Megatron stores group by group, where they are in the outer axes.
        experts: number of arrays of this form that are one here, ``[e, in, *out]``, and that Megatron numbers; None:
            the array is one.
    """

    shape: tuple[int, ...]
    own_axes: LogicalAxes
    is_kernel: bool
    groups: int = 1
    experts: int | None = None

    def to_named(self, name: str, array: Any) -> dict[str, Any]:
        """Return the arrays of Megatron's checkpoint by their names; ``array`` may be a shape and dtype.

        >>> layout = Layout((2, 4), (None, None), is_kernel=True, experts=3)
        >>> [(name, each.shape) for name, each in layout.to_named("weight", np.ones((3, 2, 4))).items()]
        [('weight0', (4, 2)), ('weight1', (4, 2)), ('weight2', (4, 2))]
        """
        names = self.names(name)
        if self.experts is None:
            parts = [array]
        elif isinstance(array, jax.ShapeDtypeStruct):
            parts = [jax.ShapeDtypeStruct(self.shape, array.dtype)] * self.experts
        else:
            parts = [array[i] for i in range(self.experts)]
        return dict(zip(names, map(self.to_megatron, parts), strict=True))

    def from_named(self, name: str, arrays: Mapping[str, Any], own: Any) -> Any:
        """Return the array in this package's layout from those of `names`, of experts that are missing ``own``'s."""
        if self.experts is None:
            return self.from_megatron(arrays[name])
        names = self.names(name)
        parts = [self.from_megatron(arrays[each]) if each in arrays else own[i] for i, each in enumerate(names)]
        return np.stack(parts) if all(isinstance(part, np.ndarray) for part in parts) else jnp.stack(parts)

    def names(self, name: str) -> list[str]:
        """Return the names that Megatron's checkpoint has for the array that would be ``name``."""
        return [name] if self.experts is None else [f"{name}{i}" for i in range(self.experts)]

    @property
    def axes(self) -> LogicalAxes:
        """Logical axes of Megatron's layout: of several output axes the last is sharded."""
        return (self.own_axes[-1], self.own_axes[0]) if self.is_kernel else (self.own_axes[-1],)

    def to_megatron(self, array: Any) -> Any:
        """Return an array of this package's layout in Megatron's; of a shape and dtype, shape and dtype."""

        def to(array: Any) -> Any:
            array = array.reshape(self._split).transpose(2, 1, 3, 0)
            return array.reshape((-1, self._split[0]) if self.is_kernel else -1)

        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.eval_shape(to, jax.ShapeDtypeStruct(array.shape, array.dtype))
        return auto_region(to, self.axes)(array)

    def from_megatron(self, array: Any) -> Any:
        """Return an array of Megatron's layout in this package's; NumPy arrays stay in host memory."""
        rows, components, groups, channels = self._split

        def to(array: Any) -> Any:
            return array.reshape(groups, components, channels, rows).transpose(3, 1, 0, 2).reshape(self.shape)

        return auto_region(to, self.own_axes)(array) if isinstance(array, jax.Array) else to(array)

    @property
    def _split(self) -> tuple[int, int, int, int]:
        """Sizes of inputs, components, groups and channels, in which the array's own order has them."""
        rows, *outer = self.shape if self.is_kernel else (1, *self.shape)
        return rows, math.prod(outer[:-1]), self.groups, outer[-1] // self.groups


class WithoutLast(Layout):
    """Megatron's layout of a vector whose last entry it does not have: the 0 behind the bias of quantile balancing.

    >>> WithoutLast((5,), (None,), is_kernel=False).to_named("qb_beta", np.arange(5))
    {'qb_beta': array([0, 1, 2, 3])}
    """

    def to_megatron(self, array: Any) -> Any:
        """Return an array without its last entry; of a shape and dtype, shape and dtype."""
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((array.shape[0] - 1,), array.dtype)
        return array[:-1]

    def from_megatron(self, array: Any) -> Any:
        """Return an array with a 0 behind it; NumPy arrays stay in host memory."""
        return jnp.pad(array, (0, 1)) if isinstance(array, jax.Array) else np.pad(array, (0, 1))


def name_and_layout(
    path: Path, variable: nnx.Variable, owners: Mapping[Path, Any], *, in_megatron_names: bool
) -> tuple[str, Layout | None]:
    """Return Megatron's name of a Variable, and its layout if that differs from the Variable's.

    Args:
        path: path of the Variable.
        variable: Variable of one array; others, such as quantizer state and kernels stored quantized, keep their names.
        owners: modules by their paths.
        in_megatron_names: whether a module around the Variable has Megatron's names.

    >>> layer = Linear(32, (2, 64), rngs=nnx.Rngs(0))
    >>> owners = {("linear_fc1",): layer}
    >>> name, layout = name_and_layout(("linear_fc1", "kernel"), layer.kernel, owners, in_megatron_names=True)
    >>> name, layout.to_megatron(layer.kernel[...]).shape
    ('linear_fc1.weight', (128, 32))
    """
    if not in_megatron_names:
        return _dotted(path), None
    owner, shown = owners[path[:-1]], _numbered(path, owners)
    if not (isinstance(owner, _LAYERS) or getattr(owner, "megatron_layout", False)):
        return _dotted(shown), None
    value = variable.get_value()
    if isinstance(owner, Router) and path[-1] == "quantile_bias":
        name = _dotted((*shown[:-1], _megatron_name(owner, "quantile_bias")))
        return name, WithoutLast(tuple(value.shape), (None,), is_kernel=False)
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct) or isinstance(variable, QuantizerState):
        return _dotted(shown), None
    return _dotted((*shown[:-1], _megatron_name(owner, str(path[-1])))), _layout_of(path, variable, owners)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _megatron_name(owner: Any, attribute: str) -> str:
    """Return Megatron's name of an array of a layer."""
    names = _FUSED if hasattr(owner, "scale") and hasattr(owner, "kernel") else _NAMES
    return names.get(attribute, attribute)


def _layout_of(path: Path, variable: nnx.Variable, owners: Mapping[Path, Any]) -> Layout | None:
    """Return Megatron's layout of a Variable of one array; None if that is the Variable's own."""
    owner, attribute, value = owners[path[:-1]], str(path[-1]), variable.get_value()
    experts = owner.num_gemms if isinstance(owner, GroupedLinear) else None
    rank = value.ndim - (experts is not None)
    is_kernel = attribute in ("kernel", "gate_kernel")
    is_reshaped_bias = attribute == "bias" and (rank > 1 or experts is not None)
    if not (is_kernel or is_reshaped_bias):
        return None
    # An attention's projections have their components on an axis in front of the groups'.
    has_components = rank > 1 + is_kernel
    groups = projection_groups(owners.get(path[:-2]), str(path[-2])) if has_components and len(path) > 1 else 1
    axes: Any = variable_axes(variable, value)  # logical ones: the layers are this package's
    return Layout(tuple(value.shape)[-rank:], axes[-rank:], is_kernel, groups, experts)


def projection_groups(attention: Any, name: str) -> int:
    """Return the number of key/value groups by which Megatron and Transformer Engine order a projection's outputs.

    Args:
        attention: module that contains the projection.
        name: name of the projection in it.

    Returns:
        1 for modules that are no attention, and for other layers of one.
    """
    if isinstance(attention, MultiheadAttention) and name in attention.grouped_projections:
        return attention.core_attention.num_gqa_groups
    return 1


def _numbered(path: Path, owners: Mapping[Path, Any]) -> Path:
    """Return a path in which the layers of a pipeline's stage have their numbers in the whole model."""
    firsts = [getattr(owners.get(path[: max(n - 1, 0)]), "first_layer", 0) for n in range(len(path))]
    return tuple([part + first if isinstance(part, int) else part for part, first in zip(path, firsts, strict=True)])
