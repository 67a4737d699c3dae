"""Quantization of models that are built of Flax's own layers, and a report of what it reaches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jax_te.layers.drop_in import DotGeneral, FlaxLinear, flax_linear, size_reason
from jax_te.layers.drop_in_mesh import kernel_names
from jax_te.layers.prepare import prepare_quantization
from jax_te.layers.quantizable import QuantizableModule, natural_order
from jax_te.recipe import ModuleRecipe, Recipe, current_recipe
from jax_te.recipe.internal import first_rule, own_recipe


@dataclass(frozen=True)
class DropInLayer:
    """What `quantize_model` did to one layer.

    Args:
        path: of the layer.
        kind: name of its class.
        rule: the pattern that gave it its recipe; None: it follows the ambient recipe.
        why: why it stays in high precision; None: a recipe quantizes it.
    """

    path: str
    kind: str
    rule: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class DropInReport:
    """Result of `quantize_model`; as text, a table.

    Args:
        layers: every module with a kernel, in the order of their paths.
        unused_rules: patterns that decided about no layer.
    """

    layers: tuple[DropInLayer, ...]
    unused_rules: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[str, ...]:
        """Paths of the layers that a recipe quantizes."""
        return tuple(layer.path for layer in self.layers if layer.why is None)

    @property
    def left(self) -> dict[str, str]:
        """Path of each layer that stays in high precision -> why."""
        return {layer.path: layer.why for layer in self.layers if layer.why is not None}

    def __str__(self) -> str:
        rows = [("layer", "class", "precision")]
        for layer in self.layers:
            by = "the ambient recipe" if layer.rule is None else f"by the rule {layer.rule!r}"
            rows.append((layer.path, layer.kind, by if layer.why is None else f"high: {layer.why}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if self.unused_rules:
            lines.append(f"rules that fit no layer: {', '.join(self.unused_rules)}")
        return "\n".join(lines)


Rules = Mapping[str, Recipe | ModuleRecipe | None]


def decide(path: str, kind: str, rules: Rules, layer: FlaxLinear) -> tuple[DropInLayer, Any]:
    """Return what happens to a layer, and its own recipe, if a rule gives it one."""
    pattern = first_rule(rules, path)
    own = None if pattern is None else rules[pattern]
    ambient = current_recipe()
    recipe = ambient if own is None else own_recipe(own).resolve(ambient, training=True)
    why = layer.why or size_reason(layer.summed, layer.features, recipe)
    # What the user asked for comes before what would have been in the way.
    return DropInLayer(path, kind, pattern, why if pattern is None or own is not None else f"the rule {pattern!r}"), own


def report_of(layers: list[DropInLayer], rules: Rules) -> DropInReport:
    """Return the report of ``layers``, in the order of their paths."""
    ordered = tuple(sorted(layers, key=lambda layer: natural_order(layer.path)))
    used = {layer.rule for layer in ordered}
    return DropInReport(ordered, tuple(pattern for pattern in rules if pattern not in used))


def quantize_model(model: nnx.Module, rules: Rules | None = None) -> DropInReport:
    """Let recipes quantize the linear layers of a model that is written in plain Flax NNX; return what it reaches.

    Every ``nnx.Linear``, ``nnx.LinearGeneral`` (with it the projections of ``nnx.MultiHeadAttention``) and
    ``nnx.Einsum`` that is one GEMM gets a `DotGeneral` or `EinsumOp`. Nothing else changes: parameters are the same
    Variables under the same names, with their metadata and dtypes, so that checkpoints and optimizer states still fit,
    and the layers promote dtypes and add biases as before. Where no recipe is in force, the model computes what it
    computed before. Layers that have a `DotGeneral` already keep it if no rule fits them, with fresh state.

    Call it under the recipe, or `prepare_quantization` afterwards, if the recipe has state.

    Args:
        model: changed in place.
        rules: glob pattern of paths (``"layers.*.mlp.up"``, see `jax_te.megatron.GlobMatcher`) -> the recipe of the
            layers that it fits, whatever the ambient one is; a `ModuleRecipe`, which says when it is in force; or None
            for high precision. The first pattern that fits a layer counts. Layers that none fits follow the ambient
            recipe. `jax_te.megatron.apply_quantization_config` applies a quantization file afterwards.

    Returns:
        Which layers recipes quantize, and why others stay in high precision: a size that is no multiple of the recipe's
        ``alignment`` (16 without a recipe), a rule, batch axes, a ``precision``, a ``dot_general`` or a ``__call__`` of
        their own; print it.

    Raises:
        TypeError: for a rule that is no recipe.
        ValueError: if no layer is reached.

    >>> model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 10, rngs=nnx.Rngs(0)))
    >>> print(quantize_model(model))
    layer     class   precision
    layers.0  Linear  the ambient recipe
    layers.1  Linear  high: its output size 10 is no multiple of 16
    """
    rules, layers, chosen = rules or {}, [], []
    for parts, module in nnx.iter_modules(model):
        path, kind, layer = ".".join(map(str, parts)), type(module).__name__, flax_linear(module)
        if layer is not None:
            entry, own = decide(path, kind, rules, layer)
            layers.append(entry)
            present = getattr(module, layer.op.attribute)
            given = present if isinstance(present, DotGeneral) and own is None else layer.op(own)
            chosen.append((module, layer, given if entry.why is None else None))
        elif not isinstance(module, QuantizableModule) and _has_kernel(module):
            layers.append(DropInLayer(path, kind, why="it is none of Flax's linear layers"))
    report = report_of(layers, rules)
    if not report.quantized:
        raise ValueError(f"no recipe can quantize a layer of {type(model).__name__}:\n{report}")
    for module, layer, op in chosen:
        _set_op(module, layer, op)
    prepare_quantization(model, current_recipe())  # stacked layers have a state each
    if report.unused_rules:
        warnings.warn(f"rules that fit no layer: {', '.join(report.unused_rules)}\n{report}", stacklevel=2)
    return report


def dequantize_model(model: nnx.Module) -> nnx.Module:
    """Return ``model`` after undoing `quantize_model`: its layers compute as Flax made them, quantizer state is gone.

    >>> model = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    >>> report = quantize_model(model)
    >>> dequantize_model(model).dot_general is jax.lax.dot_general
    True
    """
    for _, module in nnx.iter_modules(model):
        layer = flax_linear(module)
        if layer is not None:
            _set_op(module, layer, None)
    return model


def _set_op(module: Any, layer: FlaxLinear, op: DotGeneral | None) -> None:
    """Give a layer of Flax what quantizes it; None: what it had before."""
    if op is not None:
        if op.kernel_axes is None:
            op.kernel_axes = kernel_names(module.kernel, module.kernel.ndim - len(layer.stack))
        # Flax's constructor made the attribute static; a module with state is data.
        setattr(module, layer.op.attribute, nnx.data(op))
    elif isinstance(getattr(module, layer.op.attribute), DotGeneral):
        setattr(module, layer.op.attribute, nnx.static(layer.default))


def _has_kernel(module: nnx.Module) -> bool:
    """Whether a module has a parameter that could be a kernel: of two or more axes, and not a stack of norms'."""
    values = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    return any(value.ndim > 1 for name, value in values.items() if name not in ("scale", "bias"))
