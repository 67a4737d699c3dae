"""Linen modules built from NNX modules."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.errors import ScopeParamNotFoundError

from jax_te._validation import check_bool, checked
from jax_te.errors import QuantizerStateError
from jax_te.linen.counting import rules_of_states
from jax_te.linen.loss_scale import set_ambient_factor
from jax_te.linen.state_gradients import enter_states, leave_states
from jax_te.linen.used_again import check_used_once
from jax_te.linen.variables import STATE, build_abstract, collections_of, with_variables
from jax_te.linen.weight_normalization import changed_by, running_normalizations
from jax_te.quantize import USES, is_amax_state
from jax_te.recipe import current_recipe
from jax_te.typing import Array


class LinenModule(nn.Module):
    """Base class of Linen modules that run an NNX module.

    A class for your own NNX module, built of the layers of this package, takes one line; ``init=False`` tells type
    checkers that its constructor is the NNX module's, without ``rngs``::

        class Block(LinenModule, nnx_class=NNXBlock, init=False): ...

    Arguments of the constructor are fields of the Linen module; an argument that is an NNX module there is a
    `LinenModule` here. The call has the NNX module's arguments, and ``deterministic``: True evaluates, as
    ``module.eval()`` does in NNX. ``dropout_key`` may be left out: it is then drawn from the stream ``dropout`` in
    ``rngs``.

    Variables have the names that they have in the NNX module, in the collections that Flax gives their types:
    parameters are in ``params``, quantizer state is in ``_overwrite_with_gradient``. ``init`` puts arrays that have
    logical axes into ``nn.LogicallyPartitioned``; ``apply`` takes them boxed and unboxed. The module needs a scope for
    itself, and raises ValueError in one that ``nn.share_scope`` has given to another, too.

    Raises:
        TypeError: when the class is created, for an NNX module with ``*args`` or ``**kwargs``; at ``init``, for one
            that holds random state.
        flax.errors.FlaxError, ValueError: when called, for missing or surplus variables and for other shapes.
        QuantizerStateError: when called under a recipe with state, if the variables have none.

    >>> from jax_te import layers
    >>> class Norm(LinenModule, nnx_class=layers.RMSNorm, init=False):
    ...     pass
    >>> Norm(4).init(jax.random.key(0), jnp.ones((2, 4)))["params"]["scale"].names
    ('norm',)
    """

    nnx_class: ClassVar[Any]

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any): ...

    def __init_subclass__(cls, nnx_class: type[nnx.Module] | None = None, init: bool = True, **kwargs: Any):
        del init  # read by type checkers, which take Linen modules for dataclasses
        if nnx_class is None:
            super().__init_subclass__(**kwargs)
            return
        parameters = _arguments(nnx_class)
        cls.nnx_class = nnx_class
        # Flax makes a dataclass of the annotations in super().__init_subclass__: they must be there before.
        cls.__annotations__ = {**inspect.get_annotations(cls), **_fields(cls, parameters)}
        cls.__doc__ = _doc(nnx_class, cls.__doc__)
        cls.__call__ = _call_of(nnx_class)
        super().__init_subclass__(**kwargs)
        cls.__init__ = _constructor(cls.__init__, parameters)

    @checked
    @nn.nowrap
    def nnx_module(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return a new NNX module with these arguments.

        Args:
            rngs: the module's random keys.

        >>> from jax_te.linen import Linear
        >>> type(Linear(16, 32).nnx_module(nnx.Rngs(0)))
        <class 'jax_te.layers.linear.Linear'>
        """
        names = inspect.signature(self.nnx_class.__init__).parameters
        given = {name: getattr(self, name) for name in _arguments(self.nnx_class)}
        given = {n: v.nnx_module(rngs) if isinstance(v, LinenModule) else v for n, v in given.items()}
        return self.nnx_class(**given, **({"rngs": rngs} if "rngs" in names else {}))

    @nn.nowrap
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = inspect.signature(self.nnx_class.__call__)
        deterministic = False
        if "deterministic" not in signature.parameters:
            deterministic = kwargs.pop("deterministic", False)
        check_bool(deterministic=deterministic)
        module = self.bound_module()
        if deterministic:
            module.eval()
        set_ambient_factor(module)
        rules = rules_of_states.value
        if rules is None and not self.is_initializing():
            check_used_once(module, self._where())
        entered = enter_states(module, self.get_variable(STATE, USES), merged=rules is not None)
        # NNX modules are changed in place, Linen variables are not: compare, and store what differs.
        before = collections_of(module, boxed=False)
        bound = signature.bind(module, *args, **kwargs)
        takes_key = "dropout_key" in signature.parameters and bound.arguments.get("dropout_key") is None
        # In ``init`` Flax draws it from the stream ``params`` if there is no other, as for `nn.Dropout`.
        if takes_key and not deterministic and (self.has_rng("dropout") or self.is_initializing()):
            kwargs = {**kwargs, "dropout_key": _typed(self.make_rng("dropout"))}
        if rules is not None and self.scope is not None:
            rules.add(self.scope.path, module)
        try:
            result = module(*args, **kwargs)  # type: ignore[operator]
        except QuantizerStateError as error:
            raise QuantizerStateError(
                f'{self._where()}: {error}\nIn Linen the state is the collection "{STATE}". To have it, call init '
                "inside `with autocast(recipe):`, or jax_te.linen.prepare_quantization(model, variables, recipe, "
                f'*inputs); and list "{STATE}" {_IN_TRANSFORMS}'
            ) from error
        self._keep(before, collections_of(module, boxed=False))
        return leave_states(result, entered)

    @nn.nowrap
    def bound_module(self) -> nnx.Module:
        """Return the NNX module with this module's variables, which ``init`` creates."""
        # Flax's capture_intermediates stores outputs in this collection, which are not variables of the module.
        held = {name: tree for name, tree in self.variables.items() if name != "intermediates"}
        if self.is_initializing() and not jax.tree.leaves(held):
            module = self.nnx_module(nnx.Rngs(_typed(self.make_rng("params"))))
            self._keep({}, collections_of(module, boxed=True))
            return module
        try:
            # Traced for its structure at each call: parameters are not drawn again.
            return with_variables(build_abstract(self.nnx_module), held, self._where())
        except ScopeParamNotFoundError as error:
            if not self.is_initializing():
                raise
            raise ValueError(
                f"{self._where()} has variables of another module already, where {type(self).__name__} was to make "
                "its own; a layer of jax_te.linen needs a scope for itself: leave it out of nn.share_scope"
            ) from error

    @nn.nowrap
    def _keep(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Store the variables that a call changed."""
        self._check_not_normalized(after.get(STATE, {}))
        for collection, tree in after.items():
            for name, value in tree.items():
                old = before.get(collection, {}).get(name)
                if _same(old, value):  # without this, apply would ask for every collection to be mutable
                    continue
                if collection == STATE and not self.is_mutable_collection(STATE):
                    raise QuantizerStateError(
                        f"{_recipe_name()} needs quantizer state, and {self._where()} cannot make it here: list "
                        f'"{STATE}" in mutable=, and {_IN_TRANSFORMS}'
                    )
                self.put_variable(collection, name, value)
                if collection == STATE and not self.has_variable(STATE, USES):
                    self.put_variable(STATE, USES, jnp.ones((), jnp.float32))

    @nn.nowrap
    def _check_not_normalized(self, states: dict[str, Any]) -> None:
        """Raise QuantizerStateError where a wrapper that runs this module would normalize one of its states."""
        normalizations = running_normalizations()
        if not normalizations:
            return
        for keys, state in jax.tree_util.tree_leaves_with_path(states):
            path = [str(key.key) for key in keys]
            wrapper = changed_by(normalizations, self, path, state.ndim)
            if wrapper is not None:
                of_recipe = is_amax_state(_parent(states, path))
                other = ", or a recipe without state, such as Float8CurrentScaling" if of_recipe else ""
                raise QuantizerStateError(
                    f"{self._where()} has the state {'/'.join(path)}, which nn.{wrapper} would normalize as if it were "
                    f"a weight: take the layer out of nn.{wrapper}{other}"
                )

    @nn.nowrap
    def _where(self) -> str:
        return "/" if self.scope is None else self.scope.path_text

    def __repr__(self) -> str:
        """Return the constructor call, without arguments that have their default."""
        shown = []
        for entry in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name, entry.default)
            if entry.name != "parent" and (value is not entry.default and value != entry.default):
                shown.append(f"{entry.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


_IN_TRANSFORMS = (
    f'in variable_axes of nn.scan and nn.vmap, such as variable_axes={{"params": 0, "{STATE}": 0}}, or, where "params" '
    "is in variable_broadcast, as for nn.RNN, there"
)


def _arguments(nnx_class: type[nnx.Module]) -> dict[str, inspect.Parameter]:
    """Return the parameters of the constructor without ``rngs``."""
    first, *parameters = inspect.signature(nnx_class.__init__).parameters.values()
    for value in (first, *parameters):
        if value.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise TypeError(f"{nnx_class.__name__} takes {value}; a Linen module's arguments must have names")
    return {value.name: value for value in parameters if value.name != "rngs"}


def _fields(cls: type, parameters: dict[str, inspect.Parameter]) -> dict[str, Any]:
    """Make each parameter a dataclass field of ``cls``, and return the fields' annotations."""
    for name, value in parameters.items():
        default: Any = dataclasses.MISSING if value.default is inspect.Parameter.empty else value.default
        setattr(cls, name, dataclasses.field(default=default, kw_only=value.kind is inspect.Parameter.KEYWORD_ONLY))
    return {name: Any if value.annotation is value.empty else value.annotation for name, value in parameters.items()}


def _constructor(generated: Any, parameters: dict[str, inspect.Parameter]) -> Any:
    """Return the generated constructor with the NNX module's signature, then ``name`` and ``parent`` by keyword."""
    # Flax puts parent and name among the positional arguments, where the NNX module's own are expected.
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(name, kind, default=None) for name in ("name", "parent")]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([first, *parameters.values(), *own])

    def __init__(*args: Any, **kwargs: Any) -> None:
        generated(**signature.bind(*args, **kwargs).arguments)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


def _call_of(nnx_class: Any) -> Any:
    """Return a ``__call__`` with the docstring and signature of the NNX module's, and ``deterministic``."""

    @nn.compact
    @functools.wraps(nnx_class.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    signature = inspect.signature(nnx_class.__call__)
    if "deterministic" not in signature.parameters:
        deterministic = inspect.Parameter(
            "deterministic", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool"
        )
        *before, last = signature.parameters.values()
        several = [*before, deterministic, last] if last.kind is last.VAR_KEYWORD else [*before, last, deterministic]
        __call__.__signature__ = signature.replace(parameters=several)  # type: ignore[attr-defined]
        del __call__.__wrapped__  # whose source has other defaults than this signature, and the pages read both
    return __call__


def _doc(nnx_class: type[nnx.Module], own: str | None) -> str:
    """Return the NNX module's docstring without ``rngs`` and attributes, a sentence on Linen, the class's docstring."""
    text = inspect.cleandoc(nnx_class.__doc__ or "").split(">>>")[0].rstrip() + "\n"
    text = re.sub(r"(?m)^Attributes:\n(?:(?:    .*)?\n)+", "", text)
    text = re.sub(r"(?m)^    rngs: .*\n(?:     +.*\n)*", "", text)
    text = re.sub(r"(?m)^(    .*), rngs:", r"\1:", text).strip()
    linen = (
        f"This is the Linen form of `{nnx_class.__module__}.{nnx_class.__name__}`, whose call says what ``init`` and\n"
        "``apply`` take. For variables, recipes and dropout see `jax_te.linen`."
    )
    return "\n\n".join(part for part in (text, linen, inspect.cleandoc(own or "")) if part)


def _parent(tree: Any, path: Sequence[str]) -> Any:
    """Return the node of nested dicts that holds the leaf at ``path``."""
    for name in path[:-1]:
        tree = tree[name]
    return tree


def _recipe_name() -> str:
    recipe = current_recipe()
    return "the layer's own recipe" if recipe is None else f"recipe {recipe.name!r}"


def _same(old: Any, new: Any) -> bool:
    """Return whether two trees have the same arrays."""
    olds, news = jax.tree.leaves(old), jax.tree.leaves(new)
    # By identity: values are traced, and an array that no code replaced is the same object.
    return len(olds) == len(news) and all(a is b for a, b in zip(olds, news, strict=True))


def _typed(key: Array) -> Array:
    """Return a typed key; Flax hands on the untyped ones of ``jax.random.PRNGKey`` as users give them."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
