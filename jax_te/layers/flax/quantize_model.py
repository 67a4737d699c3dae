"""Quantization of models built from Flax's layers and user-defined modules, with a report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
from flax import nnx

from jax_te._validation import checked, warn_caller
from jax_te.layers.flax.contractions import Seen
from jax_te.layers.flax.decisions import (
    KEPT_HIGH,
    OTHER_LIBRARIES,
    DropInLayer,
    DropInReport,
    Present,
    Rules,
    as_its_recipe_says,
    check_inputs,
    check_rules,
    decide_layer,
    decide_parameter,
    not_called,
    other_module,
    report_of,
    rule_of_parameter,
    shapes_pointed_out,
)
from jax_te.layers.flax.drop_in import DotGeneral, FlaxLinear, ParameterGemm, flax_linear
from jax_te.layers.flax.drop_in_mesh import kernel_names
from jax_te.layers.flax.model_gemms import ModelGemms, as_inputs, gemms_of_model, joined
from jax_te.layers.flax.own_modules import gemm_attribute, gemms_of, original_class, own_kernels, reach, watching
from jax_te.layers.prepare import prepare
from jax_te.layers.quantizable import QuantizableModule
from jax_te.recipe import ModuleRecipe, Recipe, autocast, current_recipe, first_rule
from jax_te.typing import Words

_Model = TypeVar("_Model", bound=nnx.Module)


def _set_own(module: QuantizableModule, value: Recipe | ModuleRecipe | Literal["ambient"] | None) -> None:
    """Give a layer of jax_te, or a drop-in, what a rule says."""
    if value is None:
        value = ModuleRecipe(training=None)
    module.module_recipe = None if isinstance(value, str) else value
    module.kernel_recipes = ()


@checked
def quantize_model(
    model: Annotated[
        nnx.Module,
        Words(
            "a model of Flax NNX",
            remedy=f"for a model of Flax Linen call jax_te.linen.quantize_model; {OTHER_LIBRARIES}",
        ),
    ],
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
    the model computes what it computed before. Layers that have a `DotGeneral` already, a head as well, keep it and
    its own recipe if no rule fits them; they, and layers of this package, go on with the quantizer state that they
    have, unless the recipe needs another. A refused call leaves the model as it was.

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
        ``__call__`` of their own, the head; print it. Layers that this call does not call are among the others: they
        are quantized in calls that do.

    Raises:
        TypeError: for a rule that is not a recipe, a model that is not an NNX module or has no ``__call__``, or a call
            without arguments.
        ValueError: if the call reaches no layer; the report of what was seen is in the message. For a rule that fits a
            parameter of a module of your own that no recipe can quantize: its contraction has a ``precision``, or two
            parameters, or it is taken as one kernel and as several; or the module has an attribute
            ``<parameter>_gemm`` of its own.

    >>> model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 16, rngs=nnx.Rngs(0)))
    >>> print(quantize_model(model, jax.numpy.ones((16, 32))))
    layer     class   precision
    layers.0  Linear  the ambient recipe
    layers.1  Linear  high: it is a head: no other GEMM takes its result; a rule quantizes it
    """
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
        raise ValueError(f"no recipe quantizes a layer of {type(model).__name__} in this call:\n{report}")
    if report.unused_rules:  # before the model changes: a warning may be an error
        warn_caller(f"{report.unused_text}\n{report}")
    # A copy is changed first, of shapes alone: a recipe that refuses a layer leaves the model as it was.
    graphdef, state = nnx.split(model)
    jax.eval_shape(lambda state: _change(nnx.merge(graphdef, state), rules, gemms, seen), state)
    _change(model, rules, gemms, seen)
    return report


def _change(model: nnx.Module, rules: Rules, gemms: ModelGemms, seen: Mapping[str, Seen]) -> None:
    """Change the layers of a model as the rules say, and give them quantizer state."""
    for decision in [_decide(parts, module, rules, gemms, seen) for parts, module in nnx.iter_modules(model)]:
        for change in decision.changes:
            change()
    # Stacked layers have a state each. Layers that were quantized before go on with theirs.
    prepare(model, current_recipe(), keep=True)


def _call(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


@checked
def dequantize_model(model: _Model) -> _Model:
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
    """A module's entries in the report, and the functions that change the module; none: it stays as it is."""

    entries: Sequence[DropInLayer] = ()
    changes: Sequence[Callable[[], None]] = ()


def _decide(
    parts: tuple[Any, ...], module: nnx.Module, rules: Rules, gemms: ModelGemms, seen: Mapping[str, Seen]
) -> _Decision:
    """Return the decision about a module of a model.

    Args:
        parts: path of the module.
        module: the module; it is not changed.
        rules: rules of `quantize_model`.
        gemms: GEMMs of the model.
        seen: path of each parameter of a user-defined module -> its uses.
    """
    path, layer = ".".join(map(str, parts)), flax_linear(module)
    if layer is not None:
        return _decide_flax(path, module, layer, rules, gemms)
    if isinstance(module, QuantizableModule):
        shown = ".".join(map(str, module.layer_path(parts)))
        return _Decision() if module.of_flax else _decide_ours(path, shown, module, rules, gemms)
    adapted = getattr(module, "base", None)
    if not own_kernels(module) or (isinstance(adapted, QuantizableModule) and adapted.adapted):
        return _Decision()  # the entry of an adapted layer is its base's
    if _is_of_jax_te(module):
        # Routers, gates and a head without fp8_output_proj: what recipes are to reach here are quantizable modules.
        kind = type(module).__name__
        return _Decision([DropInLayer(path, kind, why=f"a recipe reaches no kernel of jax_te's {kind}")])
    return _decide_own(path, module, rules, gemms, seen)


def _decide_flax(path: str, module: Any, layer: FlaxLinear, rules: Rules, gemms: ModelGemms) -> _Decision:
    """Return the decision about a layer of Flax, which goes on with a drop-in that it has if no rule says otherwise."""
    op = getattr(module, layer.op.attribute)
    present = _present(op) if isinstance(op, DotGeneral) else None
    kernel = joined(path, "kernel")
    # What becomes of other Variables than parameters is not followed.
    called = kernel in gemms.in_reach or not isinstance(module.kernel, nnx.Param)
    entry, own = decide_layer(path, type(module).__name__, rules, layer, gemms, present, called)
    if entry.why is not None:
        return _Decision([entry], [functools.partial(_set_op, module, layer, None)])
    # A layer that this call does not call, a later one may.
    if not called:
        outside = ", and a GEMM outside of it takes its kernel" if kernel in gemms.taken else ""
        entry = not_called(entry, f"not called in this call{outside}")
    elif kernel in gemms.out_of_reach:
        entry = replace(entry, besides="a GEMM outside of the layer takes its kernel and stays high")
    # What its own recipe keeps high has a drop-in nevertheless, for the recipe that it may get, or has in evaluation.
    entry = as_its_recipe_says(entry, own, present)
    if present is None or op.groups != layer.groups:
        new = layer.op(own, groups=layer.groups)
        return _Decision([entry], [functools.partial(_set_op, module, layer, new)])
    # The drop-in goes on with its state, unless the recipe needs another.
    changes = [functools.partial(_set_op, module, layer, op)]
    if entry.rule is not None:
        changes.append(functools.partial(_set_own, op, own or "ambient"))
    return _Decision([entry], changes)


def _present(op: DotGeneral) -> Present:
    """Return the recipe that a drop-in has."""
    return Present(op.own_recipe(next(iter(op.kernels))), op.high_precision)


def _decide_ours(path: str, shown: str, module: QuantizableModule, rules: Rules, gemms: ModelGemms) -> _Decision:
    """Return the decision about a layer of jax_te, which follows recipes without `quantize_model`.

    Args:
        path: path of the layer.
        shown: its path in rules and reports.
        module, rules, gemms: see `_decide`.
    """
    pattern = first_rule(rules, shown)
    entry = _entry_of_ours(shown, module) if pattern is None else _entry_by_rule(shown, module, pattern, rules)
    kernels = [joined(path, kernel) for kernel in module.kernels if isinstance(getattr(module, kernel), nnx.Param)]
    if entry.why is None and kernels and gemms.used.isdisjoint(kernels):
        entry = not_called(entry)
    return _Decision([entry], [] if pattern is None else [functools.partial(_set_own, module, rules[pattern])])


def _entry_by_rule(path: str, module: QuantizableModule, pattern: str, rules: Rules) -> DropInLayer:
    """Return the report entry of a layer of jax_te that a rule fits."""
    value, kind = rules[pattern], type(module).__name__
    if value is None:
        return DropInLayer(path, kind, pattern, f"the rule {pattern!r}")
    own = None if isinstance(value, str) else value
    return as_its_recipe_says(DropInLayer(path, kind, pattern), own, Present(own, module.high_precision))


def _entry_of_ours(path: str, module: QuantizableModule) -> DropInLayer:
    """Return the report entry of a layer of jax_te that no rule fits: what its kernels do under an ambient recipe."""
    own = [module.own_recipe(kernel) for kernel in module.kernels]
    in_force = [one for one in own if one is not None and one.overrides(quantized=True, training=True)]
    follow_ambient = len(in_force) < len(own)
    if any(one.training is not None for one in in_force):
        return DropInLayer(path, type(module).__name__, own_recipe=True)
    why = None
    if in_force and not follow_ambient:
        why = "its own recipe"
    elif module.high_precision:
        why = KEPT_HIGH
    return DropInLayer(path, type(module).__name__, why=why)


def _decide_own(path: str, module: nnx.Module, rules: Rules, gemms: ModelGemms, seen: Mapping[str, Seen]) -> _Decision:
    """Return the decision about a user-defined module: an entry for each parameter that a rule reaches, and one for
    the others."""
    kind, present = original_class(type(module)).__name__, gemms_of(module)
    entries, ops, others = list[DropInLayer](), dict[str, ParameterGemm](), dict[str, Seen]()
    changes = list[Callable[[], None]]()
    for name, parameter in own_kernels(module).items():
        own_path = joined(path, name)
        what, before = seen.get(own_path, Seen()), _present(present[name]) if name in present else None
        decided = decide_parameter(own_path, kind, rules, what, gemms, before)
        if decided is None:
            others[name] = what
            continue
        entry, own = decided
        entries.append(as_its_recipe_says(entry, own, before))
        if entry.why is not None and what.contractions:
            continue
        if name in present and (not what.contractions or present[name].groups == what.groups):
            ops[name] = present[name]
            if entry.rule is not None:
                changes.append(functools.partial(_set_own, present[name], own or "ambient"))
        else:
            stack = parameter.get_value().shape[: parameter.ndim - what.contractions[0].kernel.rank]
            ops[name] = ParameterGemm(name, stack, own, what.groups)
    if others:
        entries.append(other_module(path, kind, others, gemms))
    changes.append(functools.partial(reach, module, ops))
    return _Decision(entries, changes)


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
    """Return the GEMMs of a call, and the uses of parameters in user-defined modules.

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
            elif layer is None and not (isinstance(module, QuantizableModule) or _is_of_jax_te(module)):
                reach(module, _watched_gemms(parts, module, rules))
        method(copy, *given, **named)

    with autocast(None), watching() as seen, shapes_pointed_out(args, kwargs):
        jaxpr = jax.make_jaxpr(call)(state, arrays).jaxpr
    variables, parameters = iter(jaxpr.invars), {}
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    for path, value in leaves:
        for _, variable in zip(jax.tree.leaves(value), variables, strict=False):  # the inputs follow
            if isinstance(value, nnx.Param):
                parameters[variable] = ".".join(str(part.key) for part in path)  # type: ignore[attr-defined]
    # A state has each Variable once, also where several modules share it.
    paths, names = dict[int, list[str]](), dict[str, list[str]]()
    for parts, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param):
                paths.setdefault(id(value), []).append(joined(".".join(map(str, parts)), name))
    names = {name: same for same in paths.values() for name in same}
    return gemms_of_model(jaxpr, parameters).under(lambda name: names.get(name, [name])), seen


def _is_of_jax_te(module: nnx.Module) -> bool:
    return original_class(type(module)).__module__.startswith("jax_te.")


def _watched_gemms(parts: tuple[Any, ...], module: nnx.Module, rules: Rules) -> dict[str, ParameterGemm]:
    """Return recorders for the parameters of a module."""
    gemms, present = {}, gemms_of(module)
    for name in own_kernels(module) if callable(module) else ():
        path = ".".join(map(str, (*parts, name)))
        # `reach` refuses an attribute of the name that a GEMM gets; without a rule there is nothing to refuse.
        free = name in present or not hasattr(module, gemm_attribute(name))
        if free or rule_of_parameter(rules, path) is not None:
            gemms[name] = ParameterGemm(name)
            gemms[name].module_name = path
    return gemms
