"""Update of parameters: an optimizer with fp32 masters and a loss scale, with the interface of Flax's optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te._validation import check_leaves, checked
from jax_te.quantize import QuantizedKernel, QuantizerState, write_back
from jax_te.sharding import current_mesh, log_whole_parameters
from jax_te.training.loss_scale import ConstantLossScale, LossScale
from jax_te.training.masters import (
    adopt_changed_params,
    apply_update,
    full_precision,
    make_masters,
    round_params,
    select,
    store_quantized,
)
from jax_te.training.outcome import outcome_of
from jax_te.training.state import constrain_as_created
from jax_te.training.transformation import (
    Transformation,
    allow_promotion,
    apply_transformation,
    as_transformation,
    init_opt_state,
)
from jax_te.training.used_scale import used_scales
from jax_te.typing import Array, PyTree


@checked
class Optimizer(nnx.Optimizer):
    """``flax.nnx.Optimizer`` with fp32 masters, loss scaling and skipped steps.

    - ``tx`` updates fp32 masters, of which half-precision and quantized parameters are the rounded copies, and the
      other parameters directly.
    - A parameter that was changed outside of the updates (loaded, pruned, merged) is taken over, element by element:
      where it is not its master's rounding, the update begins at the parameter. Elsewhere masters keep their bits.
    - If the norm of the gradients is not finite, only ``step``, ``skipped_steps`` and the scaler change. It is not if
      an element is not, or if the sum of the squares overflows fp32. `value_and_grad` makes all gradients nan where its
      loss is not finite. All gradients that `update` is given count, those of other parameters than ``wrt``, too.

    Its gradients come from `value_and_grad`, which sets the model's next quantizer state. `make_train_step` does the
    same for a `TrainState`, and has microbatches.

    Args:
        model: model whose parameters are updated.
        tx: any optax transformation, or ``optax.MultiSteps``. It sees fp32 masters in place of half-precision
            parameters.
        wrt: filter of the Variables to update. `QuantizerState`, whose "gradient" is its next value or a count, is not
            among them.
        scaler: loss scale, which `value_and_grad` must be given, too, ``scaler=optimizer.scaler`` in each step; None
            for `ConstantLossScale` of 1.
        fp8_param: whether to store all kernels of the model quantized, see `create_train_state`. Create the optimizer,
            and update, under the recipe.

    Attributes:
        step: uint32 ``[]``, updates taken, skipped ones included.
        skipped_steps: int32 ``[]``, updates whose gradients were not finite.
        opt_state: state of ``tx``.
        masters: fp32 copies of half-precision and quantized parameters, under the same names.

    Raises:
        ValueError: for a ``wrt`` with quantizer or counting states; for kernels that are stored quantized already,
            whose exact values are gone; for ``fp8_param`` without a recipe, see `create_train_state`; for
            ``optax.lookahead``, whose parameters are pairs.

    Source: ``flax.nnx.Optimizer``; ``Float16OptimizerWithFloat16Params`` of Megatron-Core.

    >>> import optax
    >>> from jax_te.layers import Linear
    >>> from jax_te.training import value_and_grad
    >>> model = Linear(16, 16, params_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> optimizer = Optimizer(model, optax.adam(1e-3))
    >>> @nnx.jit
    ... def train_step(model, optimizer, x):
    ...     loss, grads = value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> losses = [float(train_step(model, optimizer, jnp.ones((16, 16), jnp.bfloat16))) for _ in range(3)]
    >>> losses[2] < losses[0], optimizer.masters["kernel"].dtype
    (True, dtype('float32'))
    """

    def __init__(
        self,
        model: nnx.Module,
        tx: Transformation,
        *,
        wrt: Any = nnx.Param,
        scaler: LossScale | None = None,
        fp8_param: bool = False,
    ):
        before = [(variable, variable.get_value()) for _, variable in nnx.iter_graph(model) if _is_variable(variable)]
        try:
            self._create(model, tx, wrt, fp8_param, scaler)
        except BaseException:
            # Kernels may be stored quantized by now, of which the exact values would be gone.
            for variable, value in before:
                variable.set_value(value)
            raise

    def _create(self, model: nnx.Module, tx: Any, wrt: Any, fp8_param: bool, scaler: LossScale | None) -> None:
        """Store kernels of the model as they are asked for, and make masters and the transformation's state."""
        _check_no_quantizers(model, wrt)
        # Copies of the Variables: those of the model are about to change.
        copies = jax.tree.map(lambda leaf: leaf, nnx.state(model, wrt))
        exact = round_params(copies)
        if exact is not copies:
            nnx.update(model, exact)
        for path, variable in nnx.to_flat_state(exact):
            if isinstance(variable.get_value(), QuantizedKernel):
                raise ValueError(
                    f"{'/'.join(map(str, path))} is stored quantized: its exact value, which the optimizer needs, is "
                    "gone. Create the optimizer before quantize_parameters, with fp8_param=True"
                )
        mesh = current_mesh()
        if mesh is not None:
            log_whole_parameters(exact, mesh)
        store_quantized(model, fp8_param)
        stored = nnx.state(model, wrt)
        masters = make_masters(exact, stored)
        tx, full = as_transformation(tx), full_precision(stored, masters)
        jax.eval_shape(lambda full: init_opt_state(tx, full), full)  # which refuses unsupported cases
        with allow_promotion():
            super().__init__(full, tx, wrt=wrt)
        self.masters = nnx.data(jax.tree.map(_as_opt_state, masters, is_leaf=_is_variable))
        self.skipped_steps = nnx.OptState(jnp.zeros((), jnp.int32))
        self._scaler = nnx.data(jax.tree.map(nnx.OptState, ConstantLossScale() if scaler is None else scaler))

    @property
    def scaler(self) -> LossScale:
        """The loss scale to differentiate with next."""
        return nnx.as_pure(self._scaler)

    def update(self, model: nnx.Module, grads: PyTree, /, **kwargs: Any) -> PyTree:
        """Update the model's parameters, the masters, the optimizer state and the scaler.

        Args:
            model: model given at creation, with its present values; parameters that were changed since are taken over.
                A skipped update leaves them, and their masters, as they are.
            grads: unscaled gradients, from `value_and_grad` of the same model, or in its shape. For quantizer states,
                which `nnx.value_and_grad` differentiates on request, the "gradient" is the next state.
            kwargs: further arguments of ``tx``, e.g. ``value=loss``, without which a loss that is not finite must show
                in the gradients; functions such as ``value_fn`` are called with an ``nnx.State`` of fp32 parameters,
                which ``nnx.merge`` takes.

        Returns:
            The updates of the parameters, fp32; zeros for a skipped step.

        Raises:
            ValueError: if ``tx`` returns updates or a state of other shapes than it received; if the optimizer has a
                scaler, and the gradients are Variables that were computed without one, or, as far as can be known,
                under another than the present one; for next quantizer states of some of the model's layers alone.
                Nothing has changed then.
        """
        check_leaves("grads", grads)
        variables = any(map(_is_variable, jax.tree.leaves(grads, is_leaf=_is_variable)))
        given = nnx.state(grads, self.wrt) if variables else grads  # a filter finds no bare arrays
        self._check_scaled(given)
        params = nnx.state(model, self.wrt)
        full = full_precision(params, adopt_changed_params(params, self.masters))
        wanted = self._fp32_gradients(full, given)
        finite, tx = self._is_finite(wanted, grads if variables else None, kwargs), as_transformation(self.tx)
        opt_state = self._present_opt_state(tx, full)
        kwargs = {name: _in_variables(full, value) for name, value in kwargs.items()}
        new, new_opt_state, updates = apply_transformation(tx, wanted, opt_state, full, **kwargs)
        quantizers = _next_quantizers(model, grads, finite) if variables else nnx.State({})
        with_next_scales = nnx.merge(*nnx.split(model))  # which the train step, too, quantizes kernels with
        nnx.update(with_next_scales, quantizers)
        stored, masters = apply_update(finite, new, params, self.masters, with_next_scales)
        stored, scaler = constrain_as_created(stored), self.scaler.update(finite)
        updates = nnx.as_pure(select(finite, updates, jax.tree.map(jnp.zeros_like, updates)))
        counters = (self.step + 1, self.skipped_steps + (~finite).astype(jnp.int32))
        writes = [
            *_writes(self.masters, masters),
            *_writes(self.opt_state, select(finite, new_opt_state, opt_state)),
            *_writes(self._scaler, scaler),
            *_writes((self.step, self.skipped_steps), counters),
        ]
        # All results exist by now: what raises above leaves model and optimizer as they were.
        nnx.update(model, stored, quantizers)
        for variable, value in writes:
            variable.set_value(value)
        return updates

    def _check_scaled(self, given: PyTree) -> None:
        """Raise ValueError for gradients that were not computed with the optimizer's loss scale."""
        scaler, used = self.scaler, used_scales(given)
        if scaler == ConstantLossScale():
            return
        if None in used:
            raise ValueError(
                f"the optimizer has a loss scale, {type(scaler).__name__}, and these gradients were computed "
                "without: value_and_grad(loss_fn, scaler=optimizer.scaler)(model). Gradients that were scaled by "
                "hand are given as bare arrays, nnx.as_pure(optimizer.scaler.unscale(grads))"
            )
        if any(scale.is_known_to_differ_from(scaler.scale) for scale in used if scale is not None):
            raise ValueError(
                "these gradients were computed with another loss scale than the optimizer's present one, which each "
                "update replaces. Take the present one in each step, "
                "value_and_grad(loss_fn, scaler=optimizer.scaler)(model), or give a function, "
                "scaler=lambda: optimizer.scaler, which each call calls"
            )

    def _fp32_gradients(self, full: nnx.State, given: PyTree) -> PyTree:
        """Return the gradients in the Variables and the dtypes of ``full``, the parameters' exact values."""
        # Variables, as at creation: functions that select parameters read their names and axes in both places.
        grads = _in_variables(full, given)
        if jax.tree.structure(nnx.as_pure(grads)) != jax.tree.structure(nnx.as_pure(full)):
            raise ValueError(_other_structure(full, given))
        return jax.tree.map(lambda grad, value: grad.astype(value.dtype), grads, full)

    def _is_finite(self, wanted: PyTree, grads: PyTree, kwargs: dict[str, Any]) -> Array:
        """Return whether an update counts, bool ``[]``, see `jax_te.training.outcome`.

        Args:
            wanted: gradients of the parameters that are updated.
            grads: all gradients, as given, if they are Variables; else None.
            kwargs: further arguments of the update.
        """
        loss = kwargs.get("value")
        told = isinstance(loss, float | np.generic | np.ndarray | jax.Array) and jnp.shape(loss) == ()
        loss = jnp.asarray(loss if told else 0.0, jnp.float32)
        _, quantizers, others = nnx.state(grads, self.wrt, QuantizerState, ...)
        # What `value_and_grad` has looked at, so that the two agree, whichever part of it is updated.
        others = [grad for grad in jax.tree.leaves(others) if jnp.issubdtype(grad.dtype, jnp.floating)]
        return outcome_of(loss, (wanted, [grad.astype(jnp.float32) for grad in others]), quantizers).finite

    def _present_opt_state(self, tx: Any, full: nnx.State) -> PyTree:
        """Return the optimizer state in the structure that ``tx`` gave it, which NNX has replaced by Variables."""
        structure = jax.tree.structure(jax.eval_shape(lambda full: init_opt_state(tx, full), full))
        return jax.tree.unflatten(structure, jax.tree.leaves(self.opt_state))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _check_no_quantizers(model: nnx.Module, wrt: Any) -> None:
    """Raise ValueError for a filter that selects quantizer or counting states, which an optimizer would corrupt."""
    names = _paths(nnx.state(nnx.state(model, wrt), QuantizerState))
    if names:
        raise ValueError(
            f"wrt selects states outside of gradients, {_listed(names)}: the gradient of a QuantizerState is its next "
            "value, or a count, and update writes it back without the optimizer. Leave them out, as wrt=nnx.Param, the "
            "default, does, or nnx.All(wrt, nnx.Not(QuantizerState))"
        )


def _other_structure(full: nnx.State, given: PyTree) -> str:
    """Return the message for gradients of another structure than the parameters."""
    have, wanted = _paths(given), _paths(full)
    problems = {"lack": wanted - have, "have besides": have - wanted}
    found = "; they " + " and ".join(f"{kind} {_listed(names)}" for kind, names in problems.items() if names)
    if have == wanted:
        found = f" in an nnx.State, and are in {type(given).__name__}"
    return (
        f"grads must have the structure of the parameters that the optimizer's wrt selects from the model{found}. Give "
        "what value_and_grad returns for the whole model, with argnums=nnx.DiffState(0, wrt) for another wrt than "
        "nnx.Param"
    )


def _paths(tree: PyTree) -> set[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.as_pure(tree))
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}


def _listed(names: set[str]) -> str:
    """Return names in order, the first of many."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(sorted(names)[:_NAMED]) + more


_NAMED = 8
"""Number of paths in a message."""


def _as_opt_state(variable: nnx.Variable) -> nnx.OptVariable:
    return nnx.OptVariable(variable.get_value(), **variable.get_metadata())


def _next_quantizers(model: nnx.Module, grads: PyTree, finite: Array) -> nnx.State:
    """Return the next quantizer states, which come as gradients, or nothing; a skipped step keeps the old ones.

    Raises:
        ValueError: for the next states of other layers than the model's.
    """
    before, states = nnx.state(model, QuantizerState), nnx.state(grads, QuantizerState)
    if not jax.tree.leaves(states):
        return nnx.State({})
    have, given = dict(nnx.to_flat_state(before)), dict(nnx.to_flat_state(states))
    for problem, paths in (("lack", have.keys() - given.keys()), ("have", given.keys() - have.keys())):
        if paths:
            names = {"/".join(map(str, path)) for path in paths}
            raise ValueError(
                f"grads {problem} the next quantizer states {_listed(names)}, and must have those of all of the "
                "model's layers that have a state, or none: differentiate by nnx.Any(nnx.Param, QuantizerState) of the "
                "whole model"
            )
    return select(finite, write_back(before, states), before)


def _in_variables(full: nnx.State, tree: PyTree) -> PyTree:
    """Return a tree with an array for each parameter, such as gradients, in the parameters' Variables; other trees are
    returned unchanged."""
    pure, wanted = nnx.as_pure(tree), jax.tree.structure(full)
    same = isinstance(tree, nnx.State) and jax.tree.structure(pure) == jax.tree.structure(nnx.as_pure(full))
    return jax.tree.unflatten(wanted, jax.tree.leaves(pure)) if same else pure


def _writes(variables: PyTree, values: PyTree) -> list[tuple[nnx.Variable, Any]]:
    """Return each Variable with its next value, in the Variable's sharding. It may hold several arrays, or none."""
    leaves, writes = iter(jax.tree.leaves(values)), []
    for variable in jax.tree.leaves(variables, is_leaf=_is_variable):
        structure = jax.tree.structure(variable)
        new = jax.tree.unflatten(structure, [next(leaves) for _ in range(structure.num_leaves)])
        writes.append((variable, constrain_as_created(new).get_value()))
    return writes
