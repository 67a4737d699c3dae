"""Decisions about the layers and parameters of models that `quantize_model` gets, of NNX or Linen, and their report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from jax_te._text import aligned
from jax_te._validation import brief
from jax_te.layers.flax.contractions import Seen
from jax_te.layers.flax.drop_in import FlaxLinear, size_reason
from jax_te.layers.flax.model_gemms import ModelGemms, joined
from jax_te.layers.model_kernels import natural_order
from jax_te.recipe import ModuleRecipe, Recipe, current_recipe, first_rule, own_recipe


@dataclass(frozen=True)
class DropInLayer:
    """Effect of `quantize_model` on one layer.

    Args:
        path: path of the layer, or of a parameter that a rule reaches in a module of the user's own.
        kind: name of the class of the layer or module.
        rule: the pattern that decided about it; None: no rule fits it.
        why: reason why it stays in high precision; None: a recipe quantizes it.
        own_recipe: whether it goes on with a recipe of its own, from an earlier call or its user, as no rule fits it.
            False without a rule: it follows the ambient recipe.
        besides: what stays in high precision although a recipe quantizes it; None: nothing does.
    """

    path: str
    kind: str
    rule: str | None = None
    why: str | None = None
    own_recipe: bool = False
    besides: str | None = None

    @property
    def precision(self) -> str:
        """What quantizes it, or why nothing does, for people."""
        if self.why is not None:
            return f"high: {self.why}"
        if self.rule is not None:
            recipe = f"by the rule {self.rule!r}"
        else:
            recipe = "its own recipe" if self.own_recipe else "the ambient recipe"
        return recipe if self.besides is None else f"{recipe}; {self.besides}"


@dataclass(frozen=True)
class DropInReport:
    """Result of `quantize_model`; as text, a table.

    Args:
        layers: all modules with a kernel, and kernels that a rule matches, in the order of their paths.
        unused_rules: patterns that applied to no layer.
    """

    layers: tuple[DropInLayer, ...]
    unused_rules: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[str, ...]:
        """Paths of the layers that a recipe quantizes in the traced call."""
        return tuple(layer.path for layer in self.layers if layer.why is None)

    @property
    def left(self) -> dict[str, str]:
        """Path of each layer that stays in high precision -> reason."""
        return {layer.path: layer.why for layer in self.layers if layer.why is not None}

    @property
    def unused_text(self) -> str:
        """Sentence that names the unused rules; an empty pattern is shown in quotes."""
        return f"rules that fit no layer: {', '.join(pattern or repr(pattern) for pattern in self.unused_rules)}"

    def __str__(self) -> str:
        rows = [("layer", "class", "precision")]
        for layer in self.layers:
            rows.append((layer.path, layer.kind, layer.precision))
        lines = aligned(rows)
        if self.unused_rules:
            lines.append(self.unused_text)
        return "\n".join(lines)


OwnRecipe = Recipe | ModuleRecipe | None
"""Recipe that a rule or an earlier call gives a layer; None: it follows the ambient one."""


class Present(NamedTuple):
    """Recipe under which a layer or a parameter can be quantized already, with which it goes on if no rule fits it.

    Args:
        recipe: its own recipe, if any.
        high_precision: whether `keep_in_high_precision` keeps it from ambient recipes.
    """

    recipe: OwnRecipe
    high_precision: bool = False


Rules = Mapping[str, Recipe | ModuleRecipe | Literal["ambient"] | None]


def check_rules(rules: Rules | None) -> Rules:
    """Return ``rules``, or none, after a check of their values.

    Raises:
        TypeError: for a rule that is not a recipe, no ``"ambient"`` and not None.
    """
    for pattern, value in (rules or {}).items():
        if not (value is None or value == "ambient" or isinstance(value, Recipe | ModuleRecipe)):
            raise TypeError(f'rule {pattern!r} must be a recipe, a ModuleRecipe, "ambient" or None, got {brief(value)}')
    return rules or {}


OTHER_LIBRARIES = (
    "modules of other libraries have no place for quantizer state: call jax_te.ops.dense(x, kernel, recipe=...) for "
    "their GEMMs, with a recipe without state, such as Float8CurrentScaling"
)
"""Remedy for models that are not of Flax."""


def check_inputs(model: Any, args: Any, kwargs: Any) -> None:
    """Refuse a call of `quantize_model` without the arguments of a call of ``model``.

    Raises:
        TypeError: showing the form of the call.
    """
    if not args and not kwargs:
        raise TypeError(
            f"quantize_model traces a call to see the GEMMs of {type(model).__name__}: give it the call's arguments, "
            "quantize_model(model, x), as arrays or jax.ShapeDtypeStruct"
        )


@contextlib.contextmanager
def shapes_pointed_out(args: Any, kwargs: Any) -> Iterator[None]:
    """Add to an error of a traced call which of its arguments are shapes, which people give in the place of arrays.

    They are no error by themselves: a model may take one.
    """
    try:
        yield
    except Exception as error:
        for value in (*args, *kwargs.values()):
            if isinstance(value, tuple | list) and value and all(type(size) is int for size in value):
                error.add_note(
                    f"quantize_model traced this call with {value!r} as it is; for an array of that shape give it "
                    f"jax.ShapeDtypeStruct({tuple(value)}, dtype)"
                )
        raise


def decide_layer(
    path: str,
    kind: str,
    rules: Rules,
    layer: FlaxLinear,
    gemms: ModelGemms,
    present: Present | None = None,
    called: bool = True,
) -> tuple[DropInLayer, OwnRecipe]:
    """Return the decision about a call of a layer, and the recipe of its own that it has then, if any.

    Args:
        path: path of the layer.
        kind: name of its class.
        rules: rules of `quantize_model`.
        layer: description of the layer.
        gemms: GEMMs of the model.
        present: recipe of an earlier call. None: no recipe can quantize it yet.
        called: whether the traced call calls it. If not, the decision is that about other calls.
    """
    pattern = first_rule(rules, path)
    own = _recipe_then(rules, pattern, present)
    why = layer.why or size_reason(layer.summed, layer.features, training_recipe(own))
    if pattern is None:
        # A layer that is the whole model was requested by the user, and so was one that an earlier call quantized.
        if why is None and present is None and path != "" and called and f"{path}.kernel" in gemms.heads:
            why = "it is a head: no other GEMM takes its result; a rule quantizes it"
    elif rules[pattern] is None:
        # The user's request takes precedence over obstacles.
        why = f"the rule {pattern!r}"
    return _entry(path, kind, pattern, why, own), own


def as_its_recipe_says(entry: DropInLayer, own: OwnRecipe, present: Present | None = None) -> DropInLayer:
    """Return the report entry of a layer that can be quantized, which says what its own recipe keeps in high precision.

    Args:
        entry: its entry.
        own: its own recipe, if any.
        present: see `decide_layer`.

    >>> as_its_recipe_says(DropInLayer("up", "Linear", "up"), ModuleRecipe(training=None)).precision
    "high: the rule 'up' has no recipe"
    """
    if entry.why is not None:
        return entry
    mine = None if own is None else own_recipe(own)
    if present is not None and present.high_precision and (mine is None or not _overrides(mine, quantized=False)):
        return replace(entry, why=KEPT_HIGH)
    if mine is None or not mine.overrides(quantized=True, training=True) or mine.training is not None:
        return entry
    whose = "its own recipe" if entry.rule is None else f"the rule {entry.rule!r}"
    if mine.overrides(quantized=True, training=False) and mine.evaluation in (None, "training"):
        return replace(entry, why=f"{whose} has no recipe")
    return replace(entry, besides="in evaluation alone, high in training")


def _overrides(recipe: ModuleRecipe, *, quantized: bool) -> bool:
    """Return whether a layer's own recipe takes effect in training or in evaluation."""
    return any(recipe.overrides(quantized=quantized, training=training) for training in (True, False))


KEPT_HIGH = "it is kept in high precision"


def not_called(entry: DropInLayer, why: str = "not called in this call") -> DropInLayer:
    """Return the report entry of a layer or parameter that recipes quantize in other calls than the traced one.

    >>> not_called(DropInLayer("up", "Linear")).precision
    'high: not called in this call; in other calls the ambient recipe'
    """
    return replace(entry, why=f"{why}; in other calls {entry.precision}")


def rule_of_parameter(rules: Rules, path: str) -> str | None:
    """Return the first pattern that fits the path of a parameter or of its module, or None.

    >>> rule_of_parameter({"attention.*": None}, "layers.0.attention.q.w") is None
    True
    >>> rule_of_parameter({"layers.*.q": None}, "layers.0.attention.q.w")
    'layers.*.q'
    """
    module = path.rpartition(".")[0]
    return next((one for one in rules if first_rule([one], path) == one or first_rule([one], module) == one), None)


def decide_parameter(
    path: str, kind: str, rules: Rules, seen: Seen, gemms: ModelGemms, present: Present | None = None
) -> tuple[DropInLayer, OwnRecipe] | None:
    """Return the decision about a parameter of a user-defined module, and its own recipe, if any.

    None: no contraction in the module's ``__call__`` uses it, and none did in an earlier call; or no rule matches it.

    Args:
        path: path of the parameter.
        kind: name of the module's class.
        rules: rules of `quantize_model`.
        seen: use of the parameter in the module's ``__call__``.
        gemms: GEMMs of the model.
        present: recipe of an earlier call. None: no recipe can quantize it yet.

    Raises:
        ValueError: for a rule that fits a parameter whose contractions no recipe can quantize.
    """
    pattern = rule_of_parameter(rules, path)
    own = _recipe_then(rules, pattern, present)
    if pattern is not None and rules[pattern] is None:
        return (DropInLayer(path, kind, pattern, f"the rule {pattern!r}"), None) if seen.contractions else None
    if pattern is None and present is None:
        return None
    why = seen.why
    if why is not None:
        raise ValueError(
            f"the rule {pattern!r} fits {path} ({kind}), and no recipe can quantize a contraction of it: {why}. Put "
            f"{{{path!r}: None}} before it in rules, or let the module compute sums over axes that one input and the "
            "parameter share, without a precision"
        )
    if not seen.contractions:
        entry = _entry(path, kind, pattern, None, own)
        return None if present is None else (not_called(entry, "in no contraction of its __call__ in this call"), own)
    besides = None
    if path in gemms.out_of_reach and seen.others:
        besides = f"another GEMM takes it and stays high: it also goes to {', '.join(sorted(seen.others))}"
    elif path in gemms.out_of_reach:
        besides = "a GEMM outside of its __call__ takes it and stays high"
    return replace(_entry(path, kind, pattern, _size_reason(seen, own), own), besides=besides), own


def _size_reason(seen: Seen, own: OwnRecipe) -> str | None:
    """Return the reason in its sizes why no recipe can quantize one of a parameter's contractions, or None."""
    recipe = training_recipe(own)
    sizes = (size_reason(one.summed, one.features, recipe) for one in seen.contractions)
    return next(filter(None, sizes), None)


def _entry(path: str, kind: str, pattern: str | None, why: str | None, own: OwnRecipe) -> DropInLayer:
    """Return the report entry of a layer that has the recipe ``own`` after a call."""
    return DropInLayer(path, kind, pattern, why, own_recipe=pattern is None and why is None and own is not None)


def _recipe_then(rules: Rules, pattern: str | None, present: Present | None) -> OwnRecipe:
    """Return the own recipe that a layer has after a call: a rule's, else the one that it has already.

    Args:
        rules: rules of `quantize_model`.
        pattern: the rule that fits the layer, which may say ``"ambient"``. None: none does.
        present: see `decide_layer`.
    """
    if pattern is None:
        return None if present is None else present.recipe
    value = rules[pattern]
    return None if isinstance(value, str) else value


def training_recipe(own: OwnRecipe) -> Recipe | None:
    """Return the recipe that a layer, with or without its own recipe, trains under in this context."""
    ambient = current_recipe()
    return ambient if own is None else own_recipe(own).resolve(ambient, training=True)


def other_module(path: str, kind: str, parameters: Mapping[str, Seen], gemms: ModelGemms) -> DropInLayer:
    """Return the report entry of a module with kernels that is not one of Flax's linear layers.

    Args:
        path: path of the module.
        kind: name of its class.
        parameters: names of its parameters that could be kernels and are not quantized, and what its ``__call__`` does
            with them.
        gemms: GEMMs of the model.
    """
    why, names = "it is none of Flax's linear layers", dict[str, list[str]]()
    for name, seen in parameters.items():
        if joined(path, name) in gemms.taken:
            names.setdefault(_what_a_rule_does(seen), []).append(name)
    for what, taken in names.items():
        why += f"; its GEMMs take {', '.join(taken)}{what}"
    return DropInLayer(path, kind, why=why)


def _what_a_rule_does(seen: Seen) -> str:
    """Return the end of a sentence on GEMMs with a parameter: whether a rule reaches them, and if not why."""
    why = seen.why or _size_reason(seen, None)
    if why is not None:
        return f", which no recipe can quantize: {why}"
    if seen.contractions:
        return "; a rule reaches those in its __call__"
    if seen.others:
        operations = ", ".join(sorted(seen.others))
        return f", but no contraction in its __call__ does so directly: it goes to {operations} there"
    return ", but not in a __call__ of its own, which is where rules reach them"


def report_of(layers: list[DropInLayer], rules: Rules) -> DropInReport:
    """Return the report of ``layers``, in the order of their paths."""
    ordered = tuple(sorted(layers, key=lambda layer: natural_order(layer.path)))
    used = {layer.rule for layer in ordered}
    return DropInReport(ordered, tuple(pattern for pattern in rules if pattern not in used))
