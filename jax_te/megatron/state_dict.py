"""A module's arrays in a flat dict, and back."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jax_te._validation import checked
from jax_te.errors import CheckpointMismatchError, Record, differences
from jax_te.layers import StepState, drop_cached_kernels
from jax_te.megatron.layout import Layout, name_and_layout
from jax_te.quantize import counting_of
from jax_te.typing import Array


class IncompatibleKeys(NamedTuple):
    """Names that `load_state_dict` left out with ``strict=False``.

    Args:
        missing_keys: names in the module, but not in the dict; their arrays are unchanged.
        unexpected_keys: names in the dict, but not in the module.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@checked
def state_dict(module: nnx.Module, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
    """Return the arrays of all Variables of a module by dotted name: parameters, quantizer state, RNG state, others.

    A Variable that holds several arrays, such as delayed scaling's state or a parameter stored quantized, has one entry
    for each; with ``keep_vars`` only one. Cached kernels, and counts of a single step, are left out.

    In a `MegatronModule`, and in the layers of `jax_te.megatron` alone, linear layers, norms and embeddings of this
    package have Megatron-Core's names and layouts: ``weight [out, in]``, ``layer_norm_weight``, a `SelfAttention`'s
    queries, keys and values group by group. So a checkpoint of Megatron-Core loads into a module whose attributes have
    Megatron's names. Everything else has attribute names and unchanged arrays.

    Args:
        module: any NNX module.
        prefix: prefix of every name, with its dot: ``"model."``.
        keep_vars: whether to return the Variables themselves, not their arrays. Their arrays have this package's
            layout.

    Source: ``torch.nn.Module.state_dict``.

    >>> {name: array.shape for name, array in state_dict(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "fc1.").items()}
    {'fc1.bias': (3,), 'fc1.kernel': (2, 3)}
    """
    if keep_vars:
        return {prefix + name: variable for name, variable, _ in variables_of(module)}
    return _arrays(variables_of(module), prefix)


@checked
def load_state_dict(
    module: nnx.Module, arrays: dict[str, Any], strict: bool = True, *, prefix: str = ""
) -> IncompatibleKeys:
    """Load the arrays of a `state_dict` into a module, with the shardings of the module's own arrays.

    The arrays are copied, so a jitted step that donates the module's arrays does not delete them. If anything does not
    fit, nothing is changed, and nothing is ever cast. Cached kernels are dropped.

    Args:
        module: changed in place.
        arrays: JAX or NumPy arrays by dotted name, or tensors of files (`jax_te.interop.megatron.read_megatron`).
        strict: whether names must match exactly. False: skip names that only one of the two has.
        prefix: prefix of the names in ``arrays``, before the module's names.

    Returns:
        The names that were skipped.

    Raises:
        CheckpointMismatchError: if shapes, dtypes or (with ``strict``) names differ, with all kinds of differences.

    Source: ``torch.nn.Module.load_state_dict``, which casts silently if dtypes differ.

    >>> one, two = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (1, 2))
    >>> load_state_dict(two, state_dict(one))
    IncompatibleKeys(missing_keys=[], unexpected_keys=[])
    >>> bool((one.kernel[...] == two.kernel[...]).all())
    True
    """
    return load_variables(module, variables_of(module), arrays, strict, prefix)


def load_variables(
    module: nnx.Module,
    found: list[tuple[str, nnx.Variable, Layout | None]],
    arrays: dict[str, Any],
    strict: bool = True,
    prefix: str = "",
) -> IncompatibleKeys:
    """Load arrays into Variables of a module like `load_state_dict`.

    Args:
        module: module that has the Variables.
        found: name in ``arrays`` without ``prefix``, Variable and layout of each, as `variables_of` gives them.
        arrays, strict, prefix: see `load_state_dict`.

    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> load_variables(layer, [("b", layer.bias, None)], {"b": np.ones(3, np.float32)})
    IncompatibleKeys(missing_keys=[], unexpected_keys=[])
    """
    # All differences are collected before anything is written, so that an error leaves the module as it was.
    here = {name: _record(array) for name, array in _arrays(found, prefix, abstract=True).items()}
    there = {name: _record(array) for name, array in arrays.items()}
    missing = [name for name in here if name not in there]
    unexpected = [name for name in there if name not in here]
    wrong = [name for name, record in here.items() if name in there and there[name] != record]
    if strict:
        wrong += missing + unexpected
    if wrong:
        raise CheckpointMismatchError(
            f"the state dict does not fit {type(module).__name__}: {differences(there, here, wrong)}. Cast and rename "
            "its arrays, or give strict=False to skip names that one of the two lacks"
        )
    for key, variable, layout in found:
        _fill(prefix + key, variable, layout, arrays)
    # They were made from the old values.
    drop_cached_kernels(module)
    return IncompatibleKeys(missing, unexpected)


class StateDicts:
    """Torch's methods ``state_dict`` and ``load_state_dict``, also a base for your own NNX modules.

    Inside of such a module arrays have Megatron's names and layouts, see `state_dict`.
    """

    megatron_names = True

    @checked
    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return arrays by dotted name, see `jax_te.megatron.state_dict`.

        Args:
            destination: a dict to which the arrays are added, and which is returned.
            prefix: prefix of every name, with its dot.
            keep_vars: whether to return the Variables, not their arrays.
        """
        destination = {} if destination is None else destination
        # In place, as torch's: callers collect several modules in one dict and may ignore the result.
        destination.update(state_dict(cast(nnx.Module, self), prefix, keep_vars))
        return destination

    @checked
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Load the arrays of a `state_dict` into this module, see `jax_te.megatron.load_state_dict`.

        Raises:
            CheckpointMismatchError: listing differences in names, shapes and dtypes.
        """
        return load_state_dict(cast(nnx.Module, self), state_dict, strict)


def _arrays(
    found: list[tuple[str, nnx.Variable, Layout | None]], prefix: str, abstract: bool = False
) -> dict[str, Any]:
    entries = [arrays_of(prefix + key, variable, layout, abstract=abstract) for key, variable, layout in found]
    return {name: array for entry in entries for name, array in entry.items()}


def variables_of(module: nnx.Module) -> list[tuple[str, nnx.Variable, Layout | None]]:
    """Return name, Variable and, if it differs, Megatron's layout of each entry of a `state_dict`.

    >>> [name for name, *_ in variables_of(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))]
    ['bias', 'kernel']
    """
    # iter_graph gives the Variables themselves, into which load_state_dict writes, and a shared one once.
    nodes = list(nnx.iter_graph(module))
    owners = {path: node for path, node in nodes if not isinstance(node, nnx.Variable)}
    found = []
    for path, node in nodes:
        rule = counting_of(node)
        of_one_step = isinstance(node, StepState) or (rule is not None and not rule.persistent)
        if isinstance(node, nnx.Variable) and not of_one_step:
            around = [owners.get(path[:length]) for length in range(len(path))]
            named = any(getattr(module, "megatron_names", False) for module in around)
            name, layout = name_and_layout(path, node, owners, in_megatron_names=named)
            found.append((name, node, layout))
    return found


def arrays_of(
    key: str, variable: nnx.Variable, layout: Layout | None = None, *, abstract: bool = False
) -> dict[str, Any]:
    """Return the arrays of one Variable by name; ``key`` is the name of the Variable.

    Args:
        layout: layout of the array, if it differs from the Variable's own.
        abstract: whether to return shapes and dtypes alone where there is a layout, which then computes nothing.

    >>> list(arrays_of("state", nnx.Variable({"x": jnp.ones(1), "y": jnp.ones(1)})))
    ['state.x', 'state.y']
    """
    value: Any = variable.get_value()
    if layout is not None:
        return layout.to_named(key, jax.ShapeDtypeStruct(value.shape, value.dtype) if abstract else value)
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return {_leaf_name(key, path): leaf for path, leaf in leaves}


def _leaf_name(key: str, path: tuple[Any, ...]) -> str:
    return f"{key}.{jax.tree_util.keystr(path, simple=True, separator='.')}" if path else key


def _fill(key: str, variable: nnx.Variable, layout: Layout | None, arrays: dict[str, Any]) -> None:
    if layout is not None:
        own = variable.get_value()
        mine = {name: _read(arrays[name]) for name in layout.names(key) if name in arrays}
        if mine:
            variable.set_value(_placed(layout.from_named(key, mine, own), own))
        return

    def pick(path: tuple[Any, ...], own: Any) -> Any:
        name = _leaf_name(key, path)
        return _placed(_read(arrays[name]), own) if name in arrays else own

    variable.set_value(jax.tree_util.tree_map_with_path(pick, variable.get_value()))


def _read(array: Any) -> Any:
    # Tensors of files come into memory here, one at a time.
    return array if isinstance(array, jax.Array) else np.asarray(array)


def _placed(array: Any, own: Any) -> Array:
    concrete = isinstance(own, jax.Array) and not isinstance(own, Tracer)
    # Inside of a trace, or for an abstract module, there is no sharding to copy to.
    if isinstance(array, Tracer) or not concrete:
        return jnp.asarray(array)
    # A copy also if the sharding is the same already: donation of an alias would delete the caller's array.
    return jax.device_put(array, own.sharding, may_alias=False)


def _record(value: Any) -> Record | str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return str(value.dtype), tuple(value.shape)
    return f"not an array ({type(value).__name__})"
