"""Quantization of models that are built of Flax's own layers, and a report of what it reaches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx

from jax_te.config.internal import checked
from jax_te.layers.drop_in import DotGeneral, FlaxLinear, flax_linear, size_reason
from jax_te.layers.drop_in_mesh import kernel_names
from jax_te.layers.model_gemms import ModelGemms, as_inputs, gemms_of_model
from jax_te.layers.prepare import prepare_quantization
from jax_te.layers.quantizable import QuantizableModule, natural_order
from jax_te.recipe import ModuleRecipe, Recipe, autocast, current_recipe
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


Rules = Mapping[str, Recipe | ModuleRecipe | Literal["ambient"] | None]


def check_rules(rules: Rules | None) -> Rules:
    """Return ``rules``, or none, after a check of their values.

    Raises:
        TypeError: for a rule that is no recipe, no ``"ambient"`` and not None.
    """
    for pattern, value in (rules or {}).items():
        if not (value is None or value == "ambient"):
            try:
                own_recipe(value)
            except TypeError as error:
                raise TypeError(f'{error}, "ambient" or None for the rule {pattern!r}') from None
    return rules or {}


def check_flax(model: Any, kind: type) -> None:
    """Refuse a model that is no module of ``kind``, ``nnx.Module`` or ``nn.Module``.

    Raises:
        TypeError: with the way for this model.
    """
    if isinstance(model, kind):
        return
    bases = [f"{base.__module__}.{base.__qualname__}" for base in type(model).__mro__]
    if any(name.startswith("flax.linen.") for name in bases):
        way = "call jax_te.linen.quantize_model for a model of Flax Linen"
    elif any(name.startswith("flax.nnx.") for name in bases):
        way = "call jax_te.layers.quantize_model for a model of Flax NNX"
    else:
        of = "a module of Equinox" if any(name.startswith("equinox.") for name in bases) else "it"
        way = (
            f"{of} has no place for quantizer state; call jax_te.ops.dense(x, kernel, recipe=...) for its GEMMs, with "
            "a recipe without state, such as Float8CurrentScaling"
        )
    raise TypeError(f"quantize_model takes a model of Flax, got {bases[0]}: {way}")


def check_inputs(model: Any, args: Any, kwargs: Any) -> None:
    """Refuse a call of `quantize_model` without the arguments of a call of ``model``.

    Raises:
        TypeError: with the form of the call.
    """
    if not args and not kwargs:
        raise TypeError(
            f"quantize_model traces a call to see the GEMMs of {type(model).__name__}: give it the call's arguments, "
            "quantize_model(model, x), as arrays or jax.ShapeDtypeStruct"
        )


def decide(path: str, kind: str, rules: Rules, layer: FlaxLinear, gemms: ModelGemms) -> tuple[DropInLayer, Any]:
    """Return what happens to a layer, and its own recipe, if a rule gives it one."""
    pattern = first_rule(rules, path)
    value = None if pattern is None else rules[pattern]
    own = None if value == "ambient" else value
    ambient = current_recipe()
    recipe = ambient if own is None else own_recipe(own).resolve(ambient, training=True)
    why = layer.why or size_reason(layer.summed, layer.features, recipe)
    if pattern is None:
        # A layer that is the whole model is what the user asked for.
        if why is None and path != "" and f"{path}.kernel" in gemms.heads:
            why = "it is a head: no other GEMM takes its result; a rule quantizes it"
    elif value is None:
        # What the user asked for comes before what would have been in the way.
        why = f"the rule {pattern!r}"
    return DropInLayer(path, kind, pattern, why), own


def other_module(path: str, kind: str, parameters: Iterable[str], gemms: ModelGemms) -> DropInLayer:
    """Return the entry of a module with kernels that is none of Flax's linear layers.

    Args:
        path: of the module.
        kind: name of its class.
        parameters: names of its parameters that could be kernels.
        gemms: of the model.
    """
    taken = [name for name in parameters if (f"{path}.{name}" if path else name) in gemms.taken]
    why = "it is none of Flax's linear layers"
    return DropInLayer(path, kind, why=f"{why}; its GEMMs take {', '.join(taken)}" if taken else why)


def report_of(layers: list[DropInLayer], rules: Rules) -> DropInReport:
    """Return the report of ``layers``, in the order of their paths."""
    ordered = tuple(sorted(layers, key=lambda layer: natural_order(layer.path)))
    used = {layer.rule for layer in ordered}
    return DropInReport(ordered, tuple(pattern for pattern in rules if pattern not in used))


@checked
def quantize_model(
    model: nnx.Module,
    *args: Any,
    rules: Rules | None = None,
    method: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> DropInReport:
    """Let recipes quantize the linear layers of a model that is written in plain Flax NNX; return what it reaches.

    Every ``nnx.Linear``, ``nnx.LinearGeneral`` (with it the projections of ``nnx.MultiHeadAttention``) and
    ``nnx.Einsum`` that is one GEMM gets a `DotGeneral` or `EinsumOp`. Nothing else changes: parameters are the same
    Variables under the same names, with their metadata and dtypes, so that checkpoints and optimizer states still fit,
    and the layers promote dtypes and add biases as before. Where no recipe is in force, the model computes what it
    computed before. Layers that have a `DotGeneral` already keep it if no rule fits them, with fresh state.

    A head, that is a layer whose result no other GEMM with a parameter takes, stays in high precision unless a rule
    fits it: logits and classifiers, and the last layer of a model without these. A model that is one layer has no head.

    Call it under the recipe, or `prepare_quantization` afterwards, if the recipe has state.

    Args:
        model: changed in place.
        args, kwargs: arguments of a call of ``model``, arrays or their shapes (``jax.ShapeDtypeStruct``). The call is
            traced, not run.
        rules: glob pattern of paths (``"layers.*.mlp.up"``, see `jax_te.megatron.GlobMatcher`) -> the recipe of the
            layers that it fits, whatever the ambient one is; a `ModuleRecipe`, which says when it is in force;
            ``"ambient"`` for the ambient recipe; or None for high precision. The first pattern that fits a layer
            counts. Layers that none fits follow the ambient recipe.
            `jax_te.megatron.apply_quantization_config` applies a quantization file afterwards.
        method: function that is called with the model and the arguments, for a model that is used otherwise than by
            ``__call__``.

    Returns:
        Which layers recipes quantize, and why others stay in high precision: a size that is no multiple of the recipe's
        ``alignment`` (16 without a recipe), a rule, batch axes, a ``precision``, a ``dot_general`` or a ``__call__`` of
        their own, the head; print it.

    Raises:
        TypeError: for a rule that is no recipe, a model that is no NNX module or has no ``__call__``, or a call without
            arguments.
        ValueError: if no layer is reached; the report of what was seen is in the message.

    >>> model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 16, rngs=nnx.Rngs(0)))
    >>> print(quantize_model(model, jax.numpy.ones((16, 32))))
    layer     class   precision
    layers.0  Linear  the ambient recipe
    layers.1  Linear  high: it is a head: no other GEMM takes its result; a rule quantizes it
    """
    check_flax(model, nnx.Module)
    check_inputs(model, args, kwargs)
    if method is None and not callable(model):
        raise TypeError(
            f"{type(model).__name__} has no __call__: give quantize_model the function that takes the model and the "
            "arguments, method=..."
        )
    rules, layers, chosen = check_rules(rules), [], []
    gemms = _gemms(model, method or type(model).__call__, args, kwargs)  # type: ignore[operator]
    for parts, module in nnx.iter_modules(model):
        path, kind, layer = ".".join(map(str, parts)), type(module).__name__, flax_linear(module)
        if layer is not None:
            entry, own = decide(path, kind, rules, layer, gemms)
            layers.append(entry)
            present = getattr(module, layer.op.attribute)
            given = present if isinstance(present, DotGeneral) and own is None else layer.op(own)
            chosen.append((module, layer, given if entry.why is None else None))
        elif not isinstance(module, QuantizableModule) and (names := _kernels(module)):
            layers.append(other_module(path, kind, names, gemms))
    report = report_of(layers, rules)
    if not report.quantized:
        raise ValueError(f"no recipe can quantize a layer of {type(model).__name__}:\n{report}")
    for module, layer, op in chosen:
        _set_op(module, layer, op)
    prepare_quantization(model, current_recipe())  # stacked layers have a state each
    if report.unused_rules:
        warnings.warn(f"rules that fit no layer: {', '.join(report.unused_rules)}\n{report}", stacklevel=2)
    return report


@checked
def dequantize_model(model: nnx.Module) -> nnx.Module:
    """Return ``model`` after undoing `quantize_model`: its layers compute as Flax made them, quantizer state is gone.

    >>> model = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    >>> report = quantize_model(model, jax.numpy.ones((16, 32)))
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


def _kernels(module: nnx.Module) -> list[str]:
    """Return a module's parameters that could be kernels: of two or more axes, and no stacks of norms'."""
    values = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    return [name for name, value in values.items() if value.ndim > 1 and name not in ("scale", "bias")]


def _gemms(model: nnx.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> ModelGemms:
    """Return the GEMMs of a call, which are the same under every recipe, and without one can be read."""
    graphdef, state = nnx.split(model)
    arrays, fill = as_inputs((args, kwargs))

    def call(state: Any, arrays: list[Any]) -> None:
        given, named = fill(arrays)
        copy = nnx.merge(graphdef, state)
        for _, module in nnx.iter_modules(copy):
            layer = flax_linear(module)
            if layer is not None and layer.why is None:
                # Some models run on an Explicit mesh only with drop-ins, which say where a result lies.
                setattr(module, layer.op.attribute, nnx.static(layer.as_placed))
        method(copy, *given, **named)

    with autocast(None):
        jaxpr = jax.make_jaxpr(call)(state, arrays).jaxpr
    variables, parameters = iter(jaxpr.invars), {}
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    for path, value in leaves:
        for _, variable in zip(jax.tree.leaves(value), variables, strict=False):  # the inputs follow
            if isinstance(value, nnx.Param):
                parameters[variable] = ".".join(str(part.key) for part in path)  # type: ignore[attr-defined]
    return gemms_of_model(jaxpr, parameters)
