"""Quantized GEMMs for the linear layers of Flax Linen, one by one or in a whole model."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_te import layers
from jax_te._validation import checked, warn_caller
from jax_te.layers import DropInLayer, DropInReport
from jax_te.layers.flax import (
    OTHER_LIBRARIES,
    FlaxLinear,
    ModelGemms,
    OwnRecipe,
    Rules,
    Seen,
    as_inputs,
    as_its_recipe_says,
    check_inputs,
    check_rules,
    could_be_kernel,
    decide_layer,
    decide_parameter,
    einsum_linear,
    gemms_of_model,
    noting,
    other_module,
    precision_reason,
    read_einsum,
    reduced,
    report_of,
    rule_of_parameter,
    shapes_pointed_out,
    training_recipe,
)
from jax_te.linen.module import LinenModule
from jax_te.linen.own_modules import (
    GemmOptions,
    OwnParameter,
    Running,
    call_apart,
    joined,
    kernel_axes,
    own_kernels,
    parameter_gemms,
    quantized_call,
    unboxed,
)
from jax_te.linen.state_gradients import with_gradient
from jax_te.linen.variables import STATE
from jax_te.linen.weight_normalization import changed_by, running_normalizations
from jax_te.recipe import ModuleRecipe, autocast
from jax_te.typing import Array, Words

_FLAX_LINEAR = (nn.Dense, nn.DenseGeneral, nn.Einsum)

_STATE_NDIM = {"scale": 0, "amax_history": 1}
"""Arrays of an operand's state under delayed scaling, and their numbers of axes: one more for several kernels."""

_Model = TypeVar("_Model", bound=nn.Module)

# A user context takes part in the jit cache key: what was traced without these choices is traced again with them.
_choices_in_force = jax.make_user_context(None)


class DotGeneral(LinenModule, nnx_class=layers.DotGeneral, init=False):
    """
    In Linen it is the ``dot_general_cls`` of ``nn.Dense``, ``nn.DenseGeneral`` and attention modules, with
    ``functools.partial(DotGeneral, recipe)`` for a recipe of their own.

    >>> from jax_te.recipe import DelayedScaling, autocast
    >>> layer, x = nn.Dense(16, dot_general_cls=DotGeneral), jnp.ones((16, 32))
    >>> with autocast(DelayedScaling()):
    ...     variables = layer.init(jax.random.key(0), x)
    >>> list(variables["_overwrite_with_gradient"]["DotGeneral_0"]["quantizers"])
    ['grad', 'kernel', 'x']
    """


class EinsumOp(LinenModule, nnx_class=layers.EinsumOp, init=False):
    """
    In Linen it is for modules of your own: ``nn.Einsum`` takes no such argument, and gets it from `quantize_model`.

    >>> x, kernel = jnp.ones((2, 8, 32)), jnp.ones((32, 2, 16))
    >>> EinsumOp().apply({}, "btd,dnh->btnh", x, kernel).shape
    (2, 8, 2, 16)
    """


@checked
def quantize_model(
    model: Annotated[
        _Model,
        Words(
            "a model of Flax Linen",
            remedy=f"for a model of Flax NNX call jax_te.layers.quantize_model; {OTHER_LIBRARIES}",
        ),
    ],
    *args: Any,
    rules: Rules | None = None,
    **kwargs: Any,
) -> _Model:
    """Return a model written in plain Flax Linen, in which recipes quantize the linear layers.

    Every ``nn.Dense``, ``nn.DenseGeneral`` (with it the projections of Flax's attention modules) and ``nn.Einsum`` that
    is a GEMM computes by a `DotGeneral` or `EinsumOp`, in all methods of the model and in what ``nn.remat``,
    ``nn.scan``, ``nn.vmap`` and ``nn.jit`` run. Nothing else changes: parameters have their names, boxes and dtypes, so
    that checkpoints and optimizer states still fit, and where no recipe is in force the model computes what it computed
    before. The state of a recipe is in the collection ``_overwrite_with_gradient``, which ``init`` makes under
    the recipe, and `prepare_quantization` for parameters that exist; list it in ``variable_axes`` of ``nn.scan`` and
    ``nn.vmap``. Heads stay in high precision unless a rule fits them, see `jax_te.layers.quantize_model`.

    As a part of another model, which may be quantized too, it decides about its own layers as it does alone. A layer
    that is called past the model's methods, ``model.bind(variables).layer(x)`` or ``self.model.layer(x)`` in a model
    that is not quantized, computes in high precision; in a function that ``model.apply`` gets as its ``method`` it is
    quantized.

    As there, a module of your own is reached where a rule fits its scope, or a parameter in it (``"mlp"``,
    ``"mlp.linear"``); each parameter's state is in the scope ``<parameter>_gemm``. A recipe then traces the module's
    ``__call__`` apart: interceptors and ``capture_intermediates`` see it twice.

    Args:
        model: Linen model; it is not changed. The result is an instance of a subclass of its class, with the same
            fields.
        args, kwargs: arguments of ``model.init`` after its ``rngs``, arrays or their shapes (``jax.ShapeDtypeStruct``).
            The call is traced, not run.
        rules: glob pattern of paths (``"block_*.mlp.up"``: the names of the parameters' scopes, joined by dots) -> a
            recipe, a `ModuleRecipe`, ``"ambient"``, or None for high precision, as in `jax_te.layers.quantize_model`.

    Raises:
        TypeError: for a rule that is not a recipe, a model that is not a module of Linen, no arguments of a call, or
            ``rngs``.
        ValueError: for a model that is bound to variables; for a `ModuleRecipe` of another recipe in evaluation than in
            training; if no layer is reached: what was seen is in the message; for a rule that fits a parameter of a
            module of your own whose contractions no recipe can quantize.

    >>> x = jnp.ones((16, 32))
    >>> model = quantize_model(nn.Sequential([nn.Dense(64), nn.Dense(16)]), x)
    >>> print(quantization_report(model, x))
    layer     class  precision
    layers_0  Dense  the ambient recipe
    layers_1  Dense  high: it is a head: no other GEMM takes its result; a rule quantizes it
    """
    check_inputs(model, args, kwargs)
    if "rngs" in kwargs:
        raise TypeError("quantize_model has keys of its own for what a model draws; leave out rngs")
    if model.scope is not None:
        raise ValueError(f"quantize_model takes a model that is not bound to variables, got one at {model.path}")
    plain, rules = dequantize_model(model), check_rules(rules)
    _check_one_mode(rules)
    choice = _look(plain, rules, args, kwargs)
    report = _report(plain, choice, args, kwargs, quantize=False)
    if report.unused_rules:
        warn_caller(report.unused_text)
    return _as_class(plain, _quantized_class(type(plain), choice))


def _check_one_mode(rules: Any) -> None:
    """Raise ValueError for a rule by which evaluation differs from training: a layer of Flax is not told of either."""

    def differs(own: ModuleRecipe) -> bool:
        flags = (own.override_quantized_in_evaluation, own.override_nonquantized_in_evaluation)
        return flags != (None, None) or not (own.evaluation == "training" or own.evaluation == own.training)

    for pattern, own in rules.items():
        if isinstance(own, ModuleRecipe) and differs(own):
            raise ValueError(
                f"the rule {pattern!r} has another recipe in evaluation than in training, and a Linen model does not "
                "tell its layers which of them a call is; quantize the model for each, with rules of its own: "
                "parameters and states are the same"
            )


@checked
def dequantize_model(model: _Model) -> _Model:
    """Return the model from which `quantize_model` made ``model``, or ``model``.

    >>> type(dequantize_model(quantize_model(nn.Dense(16), jnp.ones((16, 32))))) is nn.Dense
    True
    """
    return _as_class(model, _original(type(model)))


def quantization_report(model: Any, *args: Any, **kwargs: Any) -> DropInReport:
    """Return the layers of a model that recipes quantize, and the reasons why others stay in high precision.

    Call it under the recipe to be used. It warns of rules that fit no layer.

    Args:
        model: result of `quantize_model`. It is traced, not run.
        args, kwargs: arguments of ``model.init`` after its ``rngs``.

    Raises:
        ValueError: for a model that `quantize_model` did not make; if no layer is reached.

    >>> x = jnp.ones((16, 32))
    >>> model = quantize_model(nn.Sequential([nn.Dense(64), nn.Dense(16)]), x, rules={"layers_1": None})
    >>> quantization_report(model, x).left
    {'layers_1': "the rule 'layers_1'"}
    """
    choice = getattr(type(model), "quantization_choice", None)
    if choice is None:
        raise ValueError(f"{type(model).__name__} is not quantized; call jax_te.linen.quantize_model first")
    report = _report(model, choice, args, kwargs, quantize=True)
    if report.unused_rules:
        warn_caller(report.unused_text)
    return report


class _Choice(NamedTuple):
    """Rules for the layers of a model: hashable, since it is part of the jit cache key.

    Args:
        rules: patterns and the recipes they assign, in order.
        gemms: GEMMs of the model.
        own: parameters of modules of the user's own.
        normalized: paths of parameters, in any of whose calls a wrapper of Flax would normalize states of a recipe, and
            the wrapper's class.
    """

    rules: tuple[tuple[str, Any], ...]
    gemms: ModelGemms
    own: tuple[OwnParameter, ...] = ()
    normalized: tuple[tuple[str, str], ...] = ()


def _report(model: Any, choice: _Choice, args: Any, kwargs: Any, *, quantize: bool) -> DropInReport:
    """Return the report of a traced ``model.init``.

    Args:
        quantize: whether the layers are quantized in it, so that one without its state raises.

    Raises:
        ValueError: if no layer is reached.
    """
    found = dict[str, DropInLayer | None]()
    kernels = dict[str, set[str]]()  # of each scope, as its modules see them: a scan's have an axis more outside of it
    choices = dict[str, tuple[_Choice, str]]()  # for each scope: that of the model that decides, and its path in it
    arrays, fill = as_inputs((args, kwargs))

    def init(key: Any, arrays: Any) -> Any:
        given, named = fill(arrays)
        return model.init(key, *given, **named)

    def note_kernels(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = run(*args, **kwargs)
        scope, decides = context.module.scope, _deciding(context.module)
        if scope is not None and decides is not None:
            path = ".".join(scope.path)
            kernels.setdefault(path, set()).update(own_kernels(context.module))
            choices.setdefault(path, (decides[0].choice, decides[1]))
        return result

    with _apart(choice, found=found, quantize=quantize), nn.intercept_methods(note_kernels):
        variables = jax.eval_shape(init, jax.random.key(0), arrays)
    entries = [layer for layer in found.values() if layer is not None]
    others: dict[str, dict[str, Seen]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(unboxed(variables.get("params", {}))):
        *parts, name = (str(part.key) for part in path)
        owner = ".".join(parts)
        ours = any(f"{owner}.".startswith(f"{known}.") for known, layer in found.items() if layer is None)
        of_flax = found.get(owner) is not None and name == "kernel"
        if ours or of_flax or not could_be_kernel(name, leaf) or name not in kernels.get(owner, {name}):
            continue
        decides, place = choices.get(owner, (choice, owner))
        own = {one.path: one for one in decides.own}
        one = own.get(joined(place, name), OwnParameter(place, name, "-"))
        decided = decide_parameter(one.path, one.kind, dict(decides.rules), one.seen, decides.gemms)
        if decided is None:
            others.setdefault(owner, {})[name] = one.seen
        else:
            entry = _unless_normalized(decides, decided[0], one.path, decided[1])
            entry = as_its_recipe_says(entry, decided[1])
            entries.append(dataclasses.replace(entry, path=joined(owner, name)))
    for owner, names in others.items():
        decides, place = choices.get(owner, (choice, owner))
        # Linen's variables do not tell the classes of the modules that made them.
        entry = other_module(place, "-", names, decides.gemms)
        entries.append(dataclasses.replace(entry, path=owner))
    report = report_of(entries, dict(choice.rules))
    if not report.quantized:
        raise ValueError(f"no recipe can quantize a layer of {type(model).__name__}:\n{report}")
    return report


def _look(model: Any, rules: Rules, args: Any, kwargs: Any) -> _Choice:
    """Return the rules with what a call shows: GEMMs, what modules of the user's own do with their parameters, and
    wrappers that normalize weights.

    It is the same under every recipe, and without one can be read.
    """
    arrays, fill = as_inputs((args, kwargs))
    seen, own = dict[str, Seen](), dict[str, OwnParameter]()

    def init(key: Any, arrays: Any) -> Any:
        given, named = fill(arrays)
        return model.init(key, *given, **named)

    def apply(variables: Any, key: Any, arrays: Any) -> None:
        given, named = fill(arrays)
        # Flax draws from "params" what other keys would be for.
        model.apply(variables, *given, rngs={"params": key}, **{**named, "mutable": True})

    def watch(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        decides = _deciding(module)
        if decides is None or decides[0] is not looking:  # a quantized model inside decides about its own layers
            return run(*args, **kwargs)
        scope = decides[1]
        layer = _linear(module, *args, **kwargs) if context.method_name == "__call__" else None
        if isinstance(module, _FLAX_LINEAR):
            of_flax.add(joined(scope, "kernel"))
        if layer is not None:
            op = "EinsumOp_0" if isinstance(module, nn.Einsum) else "DotGeneral_0"
            note_wrapper(module, op, joined(scope, "kernel"), layer.groups is not None)
        names = [] if _is_linear_or_ours(module) or context.method_name != "__call__" else own_kernels(module)
        if not names or scope in running:
            return run(*args, **kwargs)
        own.update({joined(scope, name): OwnParameter(scope, name, type(module).__name__) for name in names})
        with running.inside(scope):
            result = call_apart(module, names, noting(seen, functools.partial(joined, scope)), args, kwargs)
        for name in names:
            path = joined(scope, name)
            note_wrapper(module, f"{name}_gemm", path, seen.get(path, Seen()).groups is not None)
        return result

    def note_wrapper(module: Any, op: str, parameter: str, grouped: bool) -> None:
        """Note the wrapper that would normalize the states of an op in a module's scope."""
        normalizations = running_normalizations()
        for role, (state, ndim) in itertools.product(("x", "kernel", "grad"), _STATE_NDIM.items()):
            wrapper = changed_by(normalizations, module, (op, "quantizers", role, state), ndim + grouped)
            if wrapper is not None:
                normalized.setdefault(parameter, wrapper)

    running, of_flax, normalized = Running(), set[str](), dict[str, str]()
    with autocast(None), shapes_pointed_out(args, kwargs):
        key = jax.random.key(0)
        with _apart(_Choice((), ModelGemms()), quantize=False) as looking:
            variables = jax.eval_shape(init, key, arrays)
            with nn.intercept_methods(watch):
                jaxpr = jax.make_jaxpr(apply)(variables, key, arrays).jaxpr
    parameters = {}
    for variable, (path, _) in zip(jaxpr.invars, jax.tree_util.tree_leaves_with_path(variables), strict=False):
        # A box's own part of the path is that of an attribute.
        collection, *names = (str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey))
        if collection == "params":
            parameters[variable] = ".".join(names)
    # A layer of Flax that shares its scope with a module of the user's (``nn.share_scope``) sees to its own kernel.
    own = {path: one for path, one in own.items() if path not in of_flax}
    found = tuple(one._replace(seen=seen.get(path, Seen())) for path, one in own.items())
    return _Choice(tuple(rules.items()), gemms_of_model(jaxpr, parameters), found, tuple(normalized.items()))


def _is_linear_or_ours(module: Any) -> bool:
    return isinstance(module, (*_FLAX_LINEAR, LinenModule)) or _is_ours(module)


# Cached, so that models that are equal stay equal, and functions that were jitted with one serve the other.
@functools.cache
def _quantized_class(cls: type[nn.Module], choice: _Choice) -> Any:
    """Return a subclass of ``cls`` all of whose methods run under `_quantizing`."""

    def quantizing(name: str, method: Any) -> Any:
        # updated=(): Flax's marks of compact methods are those of the method itself, which runs inside.
        @nn.nowrap
        @functools.wraps(method, updated=())
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _quantizing(choice, self):
                return getattr(super(made, self), name)(*args, **kwargs)

        return run

    own = [base for base in cls.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    names = {name for base in own for name, value in vars(base).items() if inspect.isfunction(value)}
    public = {name for name in names if not name.startswith("_")} - {"setup", *vars(nn.Module)} | {"__call__"}
    methods = {name: quantizing(name, getattr(cls, name)) for name in (*public, "apply", "init_with_output")}

    @nn.nowrap
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return reduced(super(made, self).__reduce_ex__(protocol), _new, cls, choice)

    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "quantization_choice": choice, **methods}
    namespace["__reduce_ex__"] = __reduce_ex__
    made: Any = type(cls.__name__, (cls,), namespace)
    return made


def _new(cls: type[nn.Module], choice: _Choice, *args: Any) -> Any:
    made = _quantized_class(cls, choice)
    return made.__new__(made, *args)


def _original(cls: Any) -> Any:
    """Return the class of which `_quantized_class` made ``cls``, or ``cls``."""
    return cls.__bases__[0] if hasattr(cls, "quantization_choice") else cls


def _as_class(model: nn.Module, cls: type[nn.Module]) -> Any:
    names = [field.name for field in dataclasses.fields(model) if field.init and field.name != "parent"]  # type: ignore[arg-type]
    return cls(**{name: getattr(model, name) for name in names})


class _Root(NamedTuple):
    """A quantized model that runs.

    Args:
        choice: rules for its layers.
        module: the model. None, or unbound: the call binds it, at the root of its variables.
        running: scopes of modules whose contractions are being looked for, as they stand in all variables.
        found: dict in which decisions are recorded by path, or None.
        quantize: whether its layers are quantized.
    """

    choice: _Choice
    module: nn.Module | None
    running: Running
    found: dict[str, DropInLayer | None] | None = None
    quantize: bool = True

    @property
    def path(self) -> tuple[str, ...]:
        """Path of the model. It is read where it is needed: ``nn.share_scope`` in the model's setup changes it."""
        return () if self.module is None or self.module.scope is None else self.module.path

    def place_of(self, module: nn.Module) -> str | None:
        """Return the path of a bound module in the model, as rules have it; None: its scope is not in the model."""
        path, own = module.path, self.path
        return ".".join(path[len(own) :]) if path[: len(own)] == own else None


# Quantized models that run, the outermost first. None: no interceptor is there yet.
_roots = contextvars.ContextVar[tuple[_Root, ...] | None]("_roots", default=None)


def _deciding(module: nn.Module) -> tuple[_Root, str] | None:
    """Return the innermost running model in whose scope a module is, and the module's path in it."""
    if module.scope is None:
        return None
    places = ((root, root.place_of(module)) for root in reversed(_roots.get() or ()))
    return next(((root, place) for root, place in places if place is not None), None)


@contextlib.contextmanager
def _quantizing(choice: _Choice, model: nn.Module) -> Iterator[None]:
    """Quantize the linear layers of ``model`` that run inside by ``choice``."""
    outer = _roots.get() or ()
    # What is recorded about a model holds for those inside of it.
    root = (
        outer[-1]._replace(choice=choice, module=model, running=Running()) if outer else _Root(choice, model, Running())
    )
    if outer and (outer[-1].choice, outer[-1].path) == (choice, root.path):  # in a method that another one called
        yield
    else:
        with _choices_in_force((_choices_in_force.value, choice)), _running((*outer, root)):
            yield


@contextlib.contextmanager
def _apart(choice: _Choice, found: dict[str, DropInLayer | None] | None = None, *, quantize: bool) -> Iterator[_Root]:
    """Let a model run inside apart from all that run already; see `_Root`."""
    root = _Root(choice, None, Running(), found, quantize)
    # A key of its own: what was traced before is traced again.
    with _choices_in_force(object()), _running((root,)):
        yield root


@contextlib.contextmanager
def _running(roots: tuple[_Root, ...]) -> Iterator[None]:
    """Let ``roots`` decide about the layers that run inside."""
    first = _roots.get() is None
    token = _roots.set(roots)
    try:
        with nn.intercept_methods(_intercept) if first else contextlib.nullcontext():
            yield
    finally:
        _roots.reset(token)


def _intercept(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Return the result of a method of a module, quantized as the innermost running model that holds it decides."""
    module, is_call = context.module, context.method_name == "__call__"
    decides, roots = _deciding(module), _roots.get()
    if decides is None:
        if roots and is_call and module.scope is not None:
            _check_not_lent(roots[-1], module, args, kwargs)
        return run(*args, **kwargs)
    root, place = decides
    path = ".".join(module.path)
    decision = _decide(root.choice, place, module, args, kwargs) if is_call else None
    # The layers of this package see to their own quantization, as do layers that were given a DotGeneral.
    if root.found is not None and (decision is not None or isinstance(module, LinenModule) or _is_ours(module)):
        entry = None if decision is None else dataclasses.replace(decision.entry, path=path)
        root.found.setdefault(path, entry)
    if not root.quantize or not is_call:
        return run(*args, **kwargs)
    if decision is not None:
        return _call_flax(module, decision, run, args, kwargs)
    if path in root.running:
        return run(*args, **kwargs)
    options = _gemms_in_force(root.choice, place)
    if not options:
        return _with_own_states_kept(root.choice, place, module, run(*args, **kwargs))
    with root.running.inside(path):
        return _call_own(module, options, run, args, kwargs)


def _check_not_lent(root: _Root, module: Any, args: Any, kwargs: Any) -> None:
    """Check that a module whose scope is outside of the quantized model that runs it is none that can be quantized:
    `quantize_model` has decided about one inside.

    Raises:
        ValueError: for one that can be.
    """
    layer = _linear(module, *args, **kwargs)
    rules = dict(root.choice.rules)
    alike = [one.path for one in root.choice.own if one.kind == type(module).__name__]
    patterns = [rule_of_parameter(rules, path) for path in alike]
    is_own = any(pattern is not None and rules[pattern] is not None for pattern in patterns)
    if is_own or (layer is not None and layer.why is None):
        raise ValueError(
            f"{type(module).__name__} at {'.'.join(module.path)!r} runs in the quantized model at "
            f"{'.'.join(root.path)!r}, and its scope is outside of it, so that no rule of the model holds for it; call "
            "quantize_model for a model that holds both, or for this module as well"
        )


class _Decision(NamedTuple):
    """Decision about a call of one of Flax's linear layers: its entry in the report, and its own recipe, or None."""

    layer: FlaxLinear
    entry: DropInLayer
    recipe: OwnRecipe


def _decide(choice: _Choice, path: str, module: Any, args: Any, kwargs: Any) -> _Decision | None:
    """Return the decision about a call of the module at a path of the model; None if it is none of Flax's linear
    layers."""
    layer = _linear(module, *args, **kwargs)
    if layer is None:
        return None
    entry, own = decide_layer(path, type(module).__name__, dict(choice.rules), layer, choice.gemms)
    entry = as_its_recipe_says(_unless_normalized(choice, entry, joined(path, "kernel"), own), own)
    return _Decision(layer, entry, own)


def _unless_normalized(choice: _Choice, entry: DropInLayer, parameter: str, own: OwnRecipe) -> DropInLayer:
    """Return the report's entry; if a wrapper would normalize the recipe's states of a parameter, with that reason."""
    recipe, wrapper = training_recipe(own), dict(choice.normalized).get(parameter)
    if entry.why is not None or wrapper is None or recipe is None or not recipe.has_state:
        return entry
    return dataclasses.replace(entry, why=f"nn.{wrapper} would normalize the recipe's state as if it were weights")


def _call_flax(module: Any, decision: _Decision, run: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a call of one of Flax's linear layers, quantized if the decision says so."""
    if decision.entry.why is not None:
        return run(*args, **kwargs)
    if isinstance(module, nn.Einsum):
        return _einsum(module, decision.recipe, *args, **kwargs)
    with _with_dot_general(module, decision):
        return run(*args, **kwargs)


@contextlib.contextmanager
def _with_dot_general(module: Any, decision: _Decision) -> Iterator[None]:
    """Give a layer of Flax a `DotGeneral` for the time of a call: the module is the user's."""
    groups = decision.layer.groups
    object.__setattr__(module, "dot_general_cls", lambda: DotGeneral(decision.recipe, kernel_axes(module), groups))
    try:
        yield
    finally:
        object.__setattr__(module, "dot_general_cls", None)


def _call_own(module: Any, options: dict[str, GemmOptions], run: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a call of a user-defined module, the contractions of its parameters quantized."""
    if not module.is_initializing():
        return quantized_call(module, options, args, kwargs)
    out = run(*args, **kwargs)  # makes the parameters
    for gemm in parameter_gemms(module, options).values():
        gemm.bound_module()  # and this their state
    return out


def _gemms_in_force(choice: _Choice, scope: str) -> dict[str, GemmOptions]:
    """Return those parameters in a scope that a recipe quantizes here -> the options of their GEMMs."""
    found, rules = {}, dict(choice.rules)
    for one in choice.own:
        decided = decide_parameter(one.path, one.kind, rules, one.seen, choice.gemms) if one.scope == scope else None
        if decided is None or training_recipe(decided[1]) is None:
            continue
        if _unless_normalized(choice, decided[0], one.path, decided[1]).why is None:
            found[one.name] = GemmOptions(decided[1], one.seen.groups)
    return found


def _with_own_states_kept(choice: _Choice, path: str, module: Any, result: Any) -> Any:
    """Return the result of a call outside of recipes of the module at a path of the model; its derivative keeps the
    states of the module's parameters."""
    scopes = [f"{one.name}_gemm" for one in choice.own if one.scope == path]
    states = module.scope.variables().get(STATE, {}) if scopes else {}
    kept = {scope: states[scope] for scope in scopes if scope in states}
    return with_gradient(result, kept, kept)


def _linear(module: Any, inputs: Any = None, einsum_str: Any = None, *_: Any, **__: Any) -> FlaxLinear | None:
    """Return the description of one of Flax's linear layers, called with these arguments; None for another module."""
    own = next((base for base in _FLAX_LINEAR if isinstance(module, base)), None)
    if own is None or _is_ours(module):
        return None
    why = precision_reason(module.precision)
    if isinstance(module, nn.Einsum):
        equation = nn.merge_param("einsum_str", module.einsum_str, einsum_str)
        x, names, out, reason = read_einsum(equation, inputs.ndim)
        layer = einsum_linear(x, names, out, module.shape, why or reason)
    elif isinstance(module, nn.Dense):
        layer = FlaxLinear(inputs.shape[-1:], (module.features,), why)
    else:
        axes, batch, features = (
            value if isinstance(value, Sequence) else (value,)
            for value in (module.axis, module.batch_dims, module.features)
        )
        groups = prod(inputs.shape[axis] for axis in batch) if batch else None
        layer = FlaxLinear([inputs.shape[axis] for axis in axes], features, why, groups=groups)
    if _original(type(module)).__call__ is not own.__call__:
        return layer._replace(why=f"its class overrides the __call__ of nn.{own.__name__}")
    for name in ("dot_general", "dot_general_cls"):
        if getattr(module, name, None) is not None:
            return layer._replace(why=f"it has a {name} of its own")
    return layer


def _is_ours(module: Any) -> bool:
    """Return whether a layer of Flax has a quantized GEMM already."""
    given = getattr(module, "dot_general_cls", None)
    return getattr(given, "func", given) is DotGeneral


def _einsum(module: Any, recipe: Any, inputs: Any, einsum_str: str | None = None) -> Array:
    """Return ``nn.Einsum``'s result, from inside of a call of ``module``."""
    equation = nn.merge_param("einsum_str", module.einsum_str, einsum_str)
    x, names, out, _ = read_einsum(equation, inputs.ndim)
    sizes = dict(zip(names, module.shape, strict=True))
    kernel, bias = module.param("kernel", module.kernel_init, module.shape, module.param_dtype), None
    if module.use_bias:
        shape = [sizes[name] for name in out if name in sizes]
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    inputs, kernel, bias = module.promote_dtype(inputs, kernel, bias, dtype=module.dtype)
    options = {"precision": module.precision, "preferred_element_type": module.preferred_element_type}
    groups = einsum_linear(x, names, out, module.shape, None).groups
    y = EinsumOp(recipe, kernel_axes(module), groups)(equation, inputs, kernel, **options)
    return y if bias is None else y + jnp.reshape(bias, [sizes.get(name, 1) for name in out])
