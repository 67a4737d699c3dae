"""The state of a training run, and its creation on a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_te._device import default_device
from jax_te._processes import check_same, checksum
from jax_te._validation import checked
from jax_te.layers import prepare_quantization, quantizable_kernels
from jax_te.quantize import QuantizedKernel, QuantizerState, quantizer_for
from jax_te.recipe import Recipe, autocast
from jax_te.sharding import (
    auto_region,
    constrain,
    current_mesh,
    leaves_with_axes,
    log_whole_parameters,
    shardings_of,
)
from jax_te.training.loss_scale import ConstantLossScale, LossScale
from jax_te.training.masters import full_precision, make_masters, round_params, store_quantized
from jax_te.training.registration import register_dataclass
from jax_te.training.state_arrays import FieldsMadeWhenRead
from jax_te.training.transformation import Transformation, as_transformation, init_opt_state
from jax_te.typing import Array, Key, PyTree

if TYPE_CHECKING:
    _Array: TypeAlias = Array
    _State: TypeAlias = nnx.State
    _Scaler: TypeAlias = LossScale
else:  # jax.tree fills the fields with shapes, shardings and placeholders as well, which run-time checks would refuse
    _Array = _State = _Scaler = Any


@register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState(FieldsMadeWhenRead):
    """The state of a training run: a pytree that `create_train_state` builds.

    Args:
        step: i32 ``[]``, steps taken, skipped ones included.
        params: ``nnx.State``, the model's parameters in their own dtypes.
        masters: ``nnx.State``, fp32 copies of half-precision and quantized parameters, under the same names; may be
            empty.
        quantizers: ``nnx.State``, the state outside of gradients: of delayed scaling, and of routers of experts; empty
            without either.
        rest: ``nnx.State``, all other state of the model, e.g. the counters of an ``nnx.Rngs``; empty for the models of
            this package.
        opt_state: optimizer state of the masters and of the parameters that have none.
        scaler: a `LossScale`.
        rng: typed key ``[]``; constant, since steps fold in their number.
        skipped_steps: i32 ``[]``, steps whose loss or gradients were not finite.
        graphdef: graph definition of the model, static.
    """

    step: _Array
    params: _State
    masters: _State
    quantizers: _State
    rest: _State
    opt_state: PyTree
    scaler: _Scaler
    rng: _Array
    skipped_steps: _Array
    graphdef: nnx.GraphDef[Any] = field(metadata={"static": True})

    @property
    def model(self) -> Any:  # of the class that the state was created with
        """The model with the current values. It shares their buffers, which the next train step deletes."""
        return nnx.merge(self.graphdef, self.params, self.quantizers, self.rest, copy=True)


class SplitModel(NamedTuple):
    """The parts of a model, as `split_model` gives them; ``nnx.merge(*parts)`` is the inverse.

    Args:
        graphdef: graph definition, static.
        params: parameters.
        quantizers: the state outside of gradients, see `TrainState`.
        rest: all other state.
    """

    graphdef: nnx.GraphDef[Any]
    params: nnx.State
    quantizers: nnx.State
    rest: nnx.State


@checked
def split_model(model: nnx.Module) -> SplitModel:
    """Return ``(graphdef, params, quantizers, rest)`` of a model: parameters, quantizer states, other state.

    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> graphdef, params, quantizers, rest = split_model(model)
    >>> len(jax.tree.leaves(params)), len(jax.tree.leaves(quantizers))
    (2, 0)
    """
    return SplitModel(*nnx.split(model, nnx.Param, QuantizerState, ...))


@checked
def create_train_state(
    model_or_fn: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
    tx: Transformation,
    *,
    key: Key,
    scaler: LossScale | None = None,
    mesh: Mesh | None = None,
    fp8_param: bool = False,
    distributed_optimizer: bool = False,
) -> TrainState:
    """Return the state of a run at step 0.

    With a mesh, one compiled function creates parameters, masters and optimizer state in the sharding of each Param's
    ``logical_axes``, or of Flax's own names (``nnx.with_partitioning``) by Flax's rules: no device ever holds a whole
    sharded parameter that a function built. Everything else is replicated; matrices that no rule splits are logged once
    if the mesh could split them. Values do not depend on the mesh. With a recipe that has state, call it inside of the
    recipe's context.

    Without a mesh the state gets copies of arrays that the function closes over, since the step deletes its state's
    buffers. These are found by the addresses of all arrays that are alive when the call begins, in less than 0.1 ms for
    each: arrays that another thread makes during the call are not among them, so none may give the function such ones.

    Args:
        model_or_fn: a function of ``nnx.Rngs`` that builds the model, or a model, whose arrays are copied. Without a
            mesh, arrays that the function closes over are copied, too.
        tx: any optax transformation, or ``optax.MultiSteps``. It sees fp32 masters in place of half-precision
            parameters, and no quantizer state.
        key: ``jax.random.key``: one half seeds the model (of a function), the other becomes ``rng``.
        scaler: None for `ConstantLossScale` of 1.
        mesh: None for the mesh set by ``jax.set_mesh``, if any.
        fp8_param: whether to store all kernels quantized, see `quantize_parameters`, with fp32 masters, as do
            ``fp8_param`` and ``fp4_param`` of a model's configuration; False: else only kernels of layers whose own
            `ModuleRecipe` says so. Create the state, and call the step, under the recipe. Kernels are quantized from
            their fp32 values: fp32 parameters give the same bits as without ``fp8_param``, bf16 ones leave out a
            rounding.
        distributed_optimizer: whether to split masters and optimizer state of parameters with ``logical_axes`` over the
            mesh's data axis, too, whose devices hold the same parameters (ZeRO-1 and 2): they reduce-scatter gradients,
            and all-gather the new parameters once a step, in the parameters' dtype. fp32 kernels get masters for that.
            Without a data axis nothing is split.

    Source of ``distributed_optimizer``: Rajbhandari et al. 2020; ``--use-distributed-optimizer`` of Megatron-LM.

    Raises:
        TypeError: for a key that is not typed, or anything but a model or a function.
        ValueError: for a dimension that does not divide over its mesh axes; for ``fp8_param``, here or in the model's
            configuration, without a recipe that quantizes a kernel; for ``optax.lookahead``, which takes pairs of
            parameters; for another key or model in one of the mesh's processes than in process 0.

    >>> import optax
    >>> state = create_train_state(lambda rngs: nnx.Linear(2, 3, rngs=rngs), optax.sgd(0.1), key=jax.random.key(0))
    >>> state.params["kernel"].shape, int(state.step)
    ((2, 3), 0)
    """
    _check_key(key)
    mesh = _mesh(mesh)
    build, variables = _builder(model_or_fn, tx, scaler, mesh, fp8_param, distributed_optimizer)
    if mesh is None:
        # Not as one program: XLA would compile the draws of each layer separately, which takes as long as their train
        # step.
        before = set[int]().union(*map(_buffers, jax.live_arrays()))
        return _without_shared_buffers(build(key, variables), before)
    _check_same_everywhere(model_or_fn, key, mesh)
    with _use(mesh):
        # Shapes first: the shardings, which jit needs before it runs, come from the Variables' logical axes.
        abstract = jax.eval_shape(build, key, variables)
        shardings = _logged_shardings(abstract, mesh)
        # Inside auto_region an Explicit mesh compiles the same program as an Auto one, which gives the same bits.
        axes = [axes for _, _, axes in leaves_with_axes(abstract)]
        init = auto_region(lambda *args: jax.tree.leaves(build(*args)), axes)
        leaves = jax.jit(init, out_shardings=shardings)(key, variables)
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _check_same_everywhere(model_or_fn: nnx.Module | Callable[[nnx.Rngs], nnx.Module], key: Key, mesh: Mesh) -> None:
    """Raise ValueError if processes of the mesh would begin with different values, which no step makes equal again."""
    if jax.process_count() == 1:  # reads no array
        return

    def own(leaf: Array) -> np.ndarray | None:
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        # What is made inside of jax.set_mesh is on all its devices, and each process has its own copy of it.
        whole = not isinstance(data, jax.Array) or data.is_fully_replicated
        return np.asarray(data.addressable_data(0) if isinstance(data, jax.Array) else data) if whole else None

    def sum_of(leaves: Iterable[Any]) -> int:
        return checksum(array for array in map(own, leaves) if array is not None)

    model = jax.tree.leaves(nnx.state(model_or_fn)) if isinstance(model_or_fn, nnx.Module) else []
    values = {"key of create_train_state": sum_of([key]), "model of create_train_state": sum_of(model)}
    check_same(values, mesh.devices.flat)


def _without_shared_buffers(state: TrainState, taken: set[int]) -> TrainState:
    """Return a state whose arrays a step may donate: with copies of arrays in ``taken``, and of repeated arrays."""
    # Arrays that a model's function closes over can only be found among all arrays of the process, by their addresses:
    # less than 0.1 ms for each array that is alive.

    def own(leaf: Any) -> Array:
        array, buffers = jnp.asarray(leaf), _buffers(leaf)
        shared = not taken.isdisjoint(buffers)
        taken.update(buffers)
        return jnp.copy(array) if shared else array

    return jax.tree.map(own, state)


def _buffers(leaf: Any) -> set[int]:
    """Return the addresses of an array's parts in device memory; none for arrays without addresses."""
    # An array that a checkpointer's thread has finished with may be deleted concurrently.
    with contextlib.suppress(RuntimeError):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            return {shard.data.unsafe_buffer_pointer() for shard in data.addressable_shards}
    return set()


def constrain_as_created(tree: PyTree) -> PyTree:
    """Return ``tree`` with every leaf in the sharding that it was created with; without a mesh the tree itself."""
    # Otherwise the compiler chooses, a step could not take over (donate) its state's buffers, and the next step, with
    # other shardings, would be compiled again.
    mesh = current_mesh()
    if mesh is None:
        return tree
    leaves, known = [], set(mesh.axis_names)
    for _, leaf, axes in leaves_with_axes(tree):
        # Flax's own names, outside of the rules that assigned mesh axes: the compiler propagates Flax's placement.
        unknown = isinstance(axes, PartitionSpec) and not known.issuperset(jax.tree.leaves(tuple(axes)))
        leaves.append(leaf if unknown else constrain(leaf, axes))
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


@checked
def change_recipe(state: TrainState, recipe: Recipe | None) -> TrainState:
    """Return the state for continuing under another recipe, e.g. FP8 after a start in bf16, or the reverse.

    Quantizer states are fresh (empty histories), and kernels that are stored quantized are quantized again from their
    masters; everything else stays. Call the train step under the new recipe from then on.

    Args:
        state: state of a run; its buffers are shared with the result.
        recipe: None for no quantization.

    Raises:
        ValueError: if nothing in the model can be quantized, or for kernels stored quantized that no recipe quantizes,
            neither this one nor their layer's own.

    >>> import optax
    >>> from jax_te.layers import Linear
    >>> from jax_te.recipe import DelayedScaling
    >>> state = create_train_state(lambda rngs: Linear(16, 16, rngs=rngs), optax.sgd(0.1), key=jax.random.key(0))
    >>> len(jax.tree.leaves(change_recipe(state, DelayedScaling()).quantizers))
    6
    """
    model = nnx.merge(state.graphdef, state.params, state.quantizers, state.rest, copy=True)
    prepare_quantization(model, recipe)
    exact = dict(nnx.to_flat_state(state.masters))
    with autocast(recipe):
        stored = [kernel for kernel in quantizable_kernels(model) if _is_quantized(*kernel[1:])]
        without = [path for path, module, kernel in stored if quantizer_for(module.recipe_of(kernel), "kernel") is None]
        if without:
            names = ", ".join("/".join(map(str, path)) for path in without)
            raise ValueError(
                f"kernels are stored quantized (fp8_param), and recipe {recipe} does not quantize {names}: there must "
                "be a recipe that does, this one or the layer's own. To go on without, restore a checkpoint into a "
                "state without fp8_param"
            )
        for path, module, kernel in stored:
            variable, master = getattr(module, kernel), exact[path].get_value()
            # The form that the parameter's own dtype has under the recipe, with codes of the master, as a step makes
            # them: of the rounded value some would differ, which the next step would take for the user's changes.
            variable.set_value(master.astype(variable.get_value().dtype))
            variable.set_value(module.requantized(kernel, master, module.stored_form(kernel)))
    graphdef, params, quantizers, rest = split_model(model)
    # A kernel was quantized where its master is, which replicas may split.
    params = constrain_as_created(params)
    return replace(state, graphdef=graphdef, params=params, quantizers=quantizers, rest=rest)


def _is_quantized(module: Any, kernel: str) -> bool:
    return isinstance(getattr(module, kernel).get_value(), QuantizedKernel)


@checked
def abstract_train_state(
    model_or_fn: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
    tx: Transformation,
    *,
    key: Key | None = None,
    scaler: LossScale | None = None,
    mesh: Mesh | None = None,
    fp8_param: bool = False,
    distributed_optimizer: bool = False,
) -> TrainState:
    """Return `create_train_state`'s result as ``jax.ShapeDtypeStruct`` with shardings, for restoring into.

    Nothing is allocated.

    Args:
        model_or_fn, tx, scaler, mesh, fp8_param, distributed_optimizer: see `create_train_state`.
        key: random key, of which only the kind matters. None: the default kind.

    Raises:
        TypeError, ValueError: see `create_train_state`.

    >>> import optax
    >>> state = abstract_train_state(lambda rngs: nnx.Linear(2, 3, rngs=rngs), optax.sgd(0.1))
    >>> state.params["kernel"].shape
    (2, 3)
    """
    # No operation runs, so that the mesh in use may be one without devices.
    key = jax.eval_shape(lambda: jax.random.key(0)) if key is None else key
    _check_key(key)
    mesh = _mesh(mesh)
    build, variables = _builder(model_or_fn, tx, scaler, mesh, fp8_param, distributed_optimizer)
    with _use(mesh):
        abstract = jax.eval_shape(build, key, variables)
        leaves, treedef = jax.tree.flatten(abstract)
        # Without a mesh every array is on the default device and has its sharding.
        alone = SingleDeviceSharding(default_device())
        shardings = [alone] * len(leaves) if mesh is None else _logged_shardings(abstract, mesh)
    described = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(treedef, described)


def _builder(
    model_or_fn: Any,
    tx: Transformation,
    scaler: LossScale | None,
    mesh: Mesh | None,
    fp8_param: bool,
    distributed: bool,
) -> tuple[Callable[[Array, PyTree], TrainState], PyTree]:
    """Return a function ``build(key, variables) -> TrainState`` to trace, and its variables."""
    is_model = isinstance(model_or_fn, nnx.Module)
    if not is_model and not callable(model_or_fn):
        raise TypeError(f"expected a model or a function of nnx.Rngs that builds one, got {type(model_or_fn).__name__}")
    scaler = ConstantLossScale() if scaler is None else scaler
    graphdef, *states = split_model(model_or_fn) if is_model else (None,)
    if is_model and mesh is not None:
        states = jax.device_put(states, jax.tree.unflatten(jax.tree.structure(states), shardings_of(states, mesh)))

    def build(key: Array, variables: PyTree) -> TrainState:
        init_key, rng = jax.random.split(key)
        if is_model:
            definition: Any = graphdef
            # Copies, because a train step donates the state's buffers, and the model must survive that.
            params, quantizers, rest = jax.tree.map(jnp.copy, variables)
        else:
            model: Any = model_or_fn(nnx.Rngs(init_key))
            definition, params, quantizers, rest = split_model(model)
            params = round_params(params)
        exact = params
        model = nnx.merge(definition, params, quantizers, rest, copy=True)
        store_quantized(model, fp8_param)
        definition, params, quantizers, rest = split_model(model)
        # Masters of the values before quantization, which discards them.
        masters = make_masters(exact, params, distributed=distributed)
        opt_state = init_opt_state(as_transformation(tx), full_precision(params, masters))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            masters=masters,
            quantizers=quantizers,
            rest=rest,
            opt_state=opt_state,
            scaler=scaler,
            rng=rng,
            skipped_steps=jnp.zeros((), jnp.int32),
            graphdef=definition,
        )

    return build, states


def _logged_shardings(abstract: TrainState, mesh: Mesh) -> list[NamedSharding]:
    """Return the shardings of a state's leaves; matrices that no rule splits are logged."""
    log_whole_parameters(abstract.params, mesh)
    return shardings_of(abstract, mesh)


def _mesh(mesh: Mesh | None) -> Mesh | None:
    mesh = mesh or jax.sharding.get_mesh()
    return None if mesh is None or mesh.empty else mesh


def _use(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _check_key(key: Any) -> None:
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0):
        raise TypeError(f"key must be one typed key such as jax.random.key(0), got {key!r}")
