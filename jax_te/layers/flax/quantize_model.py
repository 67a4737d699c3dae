"""Quantization of models built from Flax's layers and user-defined modules, with a report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from flax import nnx

from jax_te._validation import checked, warn_caller
from jax_te.layers.flax.contractions import Seen
from jax_te.layers.flax.decisions import (
    DropInLayer,
    DropInReport,
    Rules,
    check_flax,
    check_inputs,
    check_rules,
    decide_layer,
    decide_parameter,
    other_module,
    report_of,
    rule_of_parameter,
    training_recipe,
)
from jax_te.layers.flax.drop_in import DotGeneral, FlaxLinear, ParameterGemm, flax_linear
from jax_te.layers.flax.drop_in_mesh import kernel_names
from jax_te.layers.flax.model_gemms import ModelGemms, as_inputs, gemms_of_model
from jax_te.layers.flax.own_modules import gemms_of, original_class, own_kernels, reach, watching
from jax_te.layers.prepare import prepare
from jax_te.layers.quantizable import QuantizableModule
from jax_te.recipe import ModuleRecipe, Recipe, autocast, current_recipe, first_rule, own_recipe


def _set_own(module: QuantizableModule, value: Recipe | ModuleRecipe | Literal["ambient"] | None) -> None:
    """Give a layer of jax_te what a rule says."""
    if value is None:
        value = ModuleRecipe(training=None)
    module.module_recipe = None if isinstance(value, str) else own_recipe(value)
    module.kernel_recipes = ()


@checked
def quantize_model(
    model: nnx.Module,
    *args: Any,
    rules: Rules | None = None,
    method: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> DropInReport:
    """Let recipes quantize the linear layers of a model written in plain Flax NNX, and return a report.

    Every ``nnx.Linear``, ``nnx.LinearGeneral`` (with it the projections of ``nnx.MultiHeadAttention``) and
    ``nnx.Einsum`` that is a GEMM gets a `DotGeneral` or `EinsumOp`. Axes of a kernel that stay one for one with the
    input's, as those of experts in ``"ecd,edf->ecf"``, are of kernels that are quantized each by itself. Nothing else
    changes: parameters are the same Variables under the same names, with their metadata and dtypes, so that checkpoints
    and optimizer states still fit, and the layers promote dtypes and add biases as before. Where no recipe is in force,
    the model computes what it computed before. Layers that have a `DotGeneral` already keep it if no rule fits them;
    they, and layers of this package, go on with the quantizer state that they have, unless the recipe needs another.

    The layers of `jax_te.layers` and `jax_te.megatron`, such as those of `jax_te.models`, follow recipes as they are. A
    rule that fits one gives it its recipe, in place of one of its own.

    A user-defined module is quantized if a rule matches it or one of its parameters (``"block.qkv"``,
    ``"block.qkv.w"``). Each ``x @ w``, ``jnp.einsum``, ``jnp.dot`` or ``lax.dot_general`` of an input with that
    parameter in its ``__call__`` is then quantized, also in functions under ``jax.jit`` and ``jax.checkpoint``,
    also behind casts, reshapes and transpositions. The module gets a subclass as its class, which traces the
    ``__call__`` under a recipe, and holds the quantizer state as ``<parameter>_gemm``.

    A head, that is a layer whose result no other GEMM with a parameter takes, stays in high precision unless a rule
    fits it: logits and classifiers, and the last layer of a model without these. A model of one layer has no head.

    Call it under the recipe, or `prepare_quantization` afterwards, if the recipe has state.

    Args:
        model: changed in place.
        args, kwargs: arguments of a call of ``model``, arrays or their shapes (``jax.ShapeDtypeStruct``). The call is
            traced, not run.
        rules: glob pattern of paths (``"layers.*.mlp.up"``, see `jax_te.megatron.GlobMatcher`) -> the recipe of the
            layers and modules that it fits, whatever the ambient one is; a `ModuleRecipe`, which says when it is in
            force; ``"ambient"`` for the ambient recipe; or None for high precision. The first pattern that fits a layer
            counts. Layers of Flax that none fits follow the ambient recipe.
            `jax_te.megatron.apply_quantization_config` applies a quantization file afterwards.
        method: function that is called with the model and the arguments, for a model that is used otherwise than by
            ``__call__``.

    Returns:
        The layers that recipes quantize, and the reasons why others stay in high precision: a size that is not a
        multiple of the recipe's ``alignment`` (16 without a recipe), a rule, a ``precision``, a ``dot_general`` or a
        ``__call__`` of their own, the head; print it.

    Raises:
        TypeError: for a rule that is not a recipe, a model that is not an NNX module or has no ``__call__``, or a call
            without arguments.
        ValueError: if no layer is reached; the report of what was seen is in the message. For a rule that fits a
            parameter of a module of your own that no recipe can quantize: its contraction has a ``precision``, or two
            parameters, or it is taken as one kernel and as several.

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
    rules = check_rules(rules)
    gemms, seen = _look(model, method or _call, rules, args, kwargs)
    decisions = [_decide(parts, module, rules, gemms, seen) for parts, module in nnx.iter_modules(model)]
    report = report_of([entry for decision in decisions for entry in decision.entries], rules)
    if not report.quantized:
        raise ValueError(f"no recipe can quantize a layer of {type(model).__name__}:\n{report}")
    if report.unused_rules:  # before the model changes: a warning may be an error
        warn_caller(f"rules that fit no layer: {', '.join(report.unused_rules)}\n{report}")
    for decision in decisions:
        if decision.change is not None:
            decision.change()
    # Stacked layers have a state each. Layers that were quantized before go on with theirs.
    prepare(model, current_recipe(), keep=True)
    return report


def _call(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


@checked
def dequantize_model(model: nnx.Module) -> nnx.Module:
    """Return ``model`` after undoing `quantize_model`: its layers compute as Flax made them, quantizer state is gone.

    Layers of jax_te follow the ambient recipe again, whatever rules gave them.

    >>> model = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    >>> report = quantize_model(model, jax.numpy.ones((16, 32)))
    >>> dequantize_model(model).dot_general is jax.lax.dot_general
    True
    """
    for _, module in nnx.iter_modules(model):
        layer = flax_linear(module)
        if layer is not None:
            _set_op(module, layer, None)
        elif isinstance(module, QuantizableModule):
            if not module.of_flax:
                _set_own(module, "ambient")
        elif gemms_of(module):
            reach(module, {})
    return model


class _Decision(NamedTuple):
    """A module's entries in the report, and the function that changes the module; None: it stays as it is."""

    entries: Sequence[DropInLayer] = ()
    change: Callable[[], None] | None = None


def _decide(
    parts: tuple[Any, ...], module: nnx.Module, rules: Rules, gemms: ModelGemms, seen: Mapping[str, Seen]
) -> _Decision:
    """Return the decision about a module of a model.

    Args:
        parts: path of the module.
        module: the module; it is not changed.
        rules: rules of `quantize_model`.
        gemms: GEMMs of the model.
        seen: path of each parameter that a rule reaches in a user-defined module -> its uses.
    """
    path, layer = ".".join(map(str, parts)), flax_linear(module)
    if layer is not None:
        return _decide_flax(path, module, layer, rules, gemms)
    if isinstance(module, QuantizableModule):
        return _Decision() if module.of_flax else _decide_ours(path, module, rules)
    if not own_kernels(module):
        return _Decision()
    if original_class(type(module)).__module__.startswith("jax_te."):
        # Routers, gates and a head without fp8_output_proj: what recipes are to reach here are quantizable modules.
        kind = type(module).__name__
        return _Decision([DropInLayer(path, kind, why=f"a recipe reaches no kernel of jax_te's {kind}")])
    return _decide_own(path, module, rules, gemms, seen)


def _decide_flax(path: str, module: nnx.Module, layer: FlaxLinear, rules: Rules, gemms: ModelGemms) -> _Decision:
    """Return the decision about a layer of Flax, which goes on with a drop-in that it has if no rule says otherwise."""
    entry, own = decide_layer(path, type(module).__name__, rules, layer, gemms)
    if entry.why is not None:
        return _Decision([entry], functools.partial(_set_op, module, layer, None))
    present = getattr(module, layer.op.attribute)
    if isinstance(present, DotGeneral) and own in (None, present.recipe):
        op = present
    else:
        op = layer.op(own, groups=layer.groups)
    return _Decision([entry], functools.partial(_set_op, module, layer, op))


def _decide_ours(path: str, module: QuantizableModule, rules: Rules) -> _Decision:
    """Return the decision about a layer of jax_te, which follows recipes without `quantize_model`."""
    pattern, why = first_rule(rules, path), None
    value = "ambient" if pattern is None else rules[pattern]
    if value is None:
        why = f"the rule {pattern!r}"
    elif value == "ambient" and module.high_precision:
        why = "it is kept in high precision"
    elif pattern is None and module.module_recipe is not None and training_recipe(module.module_recipe) is None:
        why = "its own recipe"
    entry = DropInLayer(path, type(module).__name__, pattern, why)
    return _Decision([entry], None if pattern is None else functools.partial(_set_own, module, value))


def _decide_own(path: str, module: nnx.Module, rules: Rules, gemms: ModelGemms, seen: Mapping[str, Seen]) -> _Decision:
    """Return the decision about a user-defined module: an entry for each parameter that a rule reaches, and one for
    the others."""
    kind, present = original_class(type(module)).__name__, gemms_of(module)
    entries, ops, others = list[DropInLayer](), dict[str, ParameterGemm](), dict[str, Seen]()
    for name, parameter in own_kernels(module).items():
        own_path = f"{path}.{name}" if path else name
        what = seen.get(own_path, Seen())
        decided = decide_parameter(own_path, kind, rules, what, name in present)
        if decided is None:
            others[name] = what
            continue
        entry, own = decided
        entries.append(entry)
        if entry.why is None and name in present and own in (None, present[name].recipe):
            ops[name] = present[name]
        elif entry.why is None:
            stack = parameter.get_value().shape[: parameter.ndim - what.contractions[0].kernel.rank]
            ops[name] = ParameterGemm(name, stack, own, what.groups)
    if others:
        entries.append(other_module(path, kind, others, rules, gemms))
    return _Decision(entries, functools.partial(reach, module, ops))


def _set_op(module: Any, layer: FlaxLinear, op: DotGeneral | None) -> None:
    """Set a Flax layer's drop-in; None: restore the previous function."""
    if op is not None:
        if op.kernel_axes is None:
            op.kernel_axes = kernel_names(module.kernel, module.kernel.ndim - len(layer.stack))
        # Flax's constructor made the attribute static; a module with state is data.
        setattr(module, layer.op.attribute, nnx.data(op))
    elif isinstance(getattr(module, layer.op.attribute), DotGeneral):
        setattr(module, layer.op.attribute, nnx.static(layer.default))


def _look(
    model: nnx.Module, method: Callable[..., Any], rules: Rules, args: Any, kwargs: Any
) -> tuple[ModelGemms, dict[str, Seen]]:
    """Return the GEMMs of a call, and the uses of parameters that a rule matches in user-defined modules.

    They are the same under every recipe, and are read from a call without one.
    """
    graphdef, state = nnx.split(model)
    arrays, fill = as_inputs((args, kwargs))

    def call(state: Any, arrays: list[Any]) -> None:
        given, named = fill(arrays)
        copy = nnx.merge(graphdef, state)
        for parts, module in nnx.iter_modules(copy):
            layer = flax_linear(module)
            if layer is not None and layer.why is None:
                # Some models run on an Explicit mesh only with drop-ins, which specify the output sharding.
                setattr(module, layer.op.attribute, nnx.static(layer.as_placed))
            elif layer is None and not isinstance(module, QuantizableModule):
                reach(module, _watched_gemms(parts, module, rules))
        method(copy, *given, **named)

    with autocast(None), watching() as seen:
        jaxpr = jax.make_jaxpr(call)(state, arrays).jaxpr
    variables, parameters = iter(jaxpr.invars), {}
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    for path, value in leaves:
        for _, variable in zip(jax.tree.leaves(value), variables, strict=False):  # the inputs follow
            if isinstance(value, nnx.Param):
                parameters[variable] = ".".join(str(part.key) for part in path)  # type: ignore[attr-defined]
    return gemms_of_model(jaxpr, parameters), seen


def _watched_gemms(parts: tuple[Any, ...], module: nnx.Module, rules: Rules) -> dict[str, ParameterGemm]:
    """Return recorders for the parameters of a module that a rule matches or that are quantized already."""
    gemms, present = {}, gemms_of(module)
    for name in own_kernels(module) if callable(module) else ():
        path = ".".join(map(str, (*parts, name)))
        if name in present or rule_of_parameter(rules, path) is not None:
            gemms[name] = ParameterGemm(name)
            gemms[name].module_name = path
    return gemms
