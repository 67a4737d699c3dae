"""The update of parameters: an optimizer with fp32 masters and a loss scale, in the interface of Flax's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_te.config.internal import checked
from jax_te.quantize import QuantizedKernel, QuantizerState, write_back
from jax_te.sharding import auto_region, current_mesh
from jax_te.sharding.internal import log_whole_parameters
from jax_te.training.gradients import all_finite, as_created
from jax_te.training.loss_scale import ConstantLossScale, LossScale
from jax_te.training.masters import full_precision, masters_of, rounded, select, store_quantized, updated
from jax_te.typing import Array, PyTree


@checked
class Optimizer(nnx.Optimizer):
    """``flax.nnx.Optimizer`` with fp32 masters, loss scaling and skipped steps.

    - ``tx`` updates fp32 masters, of which half-precision and quantized parameters are the rounded copies, and the
      other parameters directly.
    - If a gradient is not finite, only ``step``, ``skipped_steps`` and the scaler change.

    Its gradients are those of `value_and_grad`, which gives the model its next quantizer state. `make_train_step` does
    the same for a `TrainState`, and has microbatches.

    Args:
        model: whose parameters it updates.
        tx: any optax transformation. It sees fp32 masters in place of half-precision parameters.
        wrt: filter of the Variables to update.
        scaler: of the loss; None for `ConstantLossScale` of 1.
        fp8_param: store all kernels of the model quantized, see `create_train_state`. Create the optimizer, and update,
            under the recipe.

    Attributes:
        step: uint32 ``[]``, updates taken, skipped ones included.
        skipped_steps: int32 ``[]``, updates whose gradients were not finite.
        opt_state: of ``tx``.
        masters: fp32 copies of half-precision and quantized parameters, under the same names.

    Raises:
        ValueError: for kernels that are stored quantized already, whose exact values are gone; for ``fp8_param``
            without a recipe, as `create_train_state`.

    Source: ``flax.nnx.Optimizer``; ``Float16OptimizerWithFloat16Params`` of Megatron-Core.

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
        tx: optax.GradientTransformation,
        *,
        wrt: Any = nnx.Param,
        scaler: LossScale | None = None,
        fp8_param: bool = False,
    ):
        # Copies of the Variables: those of the model are about to change.
        copies = jax.tree.map(lambda leaf: leaf, nnx.state(model, wrt))
        exact = rounded(copies)
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
        masters = masters_of(exact, stored)
        # optax relies on implicit promotion; a caller may have set "strict".
        with jax.numpy_dtype_promotion("standard"):
            super().__init__(full_precision(stored, masters), tx, wrt=wrt)
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
            model: as given at creation, with the values of now.
            grads: from `value_and_grad` of the same model, or any gradients in its shape; unscaled. Those of quantizer
                states, which `nnx.value_and_grad` gives beside the others if it is asked for, are their next values.
            kwargs: what ``tx`` asks for besides, e.g. ``value=loss``.

        Returns:
            The updates of the parameters, fp32; zeros for a skipped step.
        """
        params = nnx.state(model, self.wrt)
        full = nnx.as_pure(full_precision(params, self.masters))
        wanted = nnx.as_pure(nnx.state(grads, self.wrt))
        wanted = jax.tree.map(lambda grad, value: grad.astype(value.dtype), wanted, full)
        finite, opt_state = all_finite(wanted), nnx.as_pure(self.opt_state)
        tx = optax.with_extra_args_support(self.tx)
        new, new_opt_state, updates = transformed(tx, wanted, opt_state, full, **nnx.as_pure(kwargs))
        new, stored = updated(finite, new, full, params, model)
        nnx.update(model, as_created(stored))
        states = nnx.state(grads, QuantizerState)
        if jax.tree.leaves(states):
            before = nnx.state(model, QuantizerState)
            nnx.update(model, select(finite, write_back(before, states), before))
        values = dict(nnx.to_flat_state(new))
        _write(self.masters, [values[path] for path, _ in nnx.to_flat_state(self.masters)])
        _write(self.opt_state, new_opt_state, finite)
        _write(self._scaler, self.scaler.update(finite))
        _write((self.step, self.skipped_steps), (self.step + 1, self.skipped_steps + (~finite).astype(jnp.int32)))
        return select(finite, updates, jax.tree.map(jnp.zeros_like, updates))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _as_opt_state(variable: nnx.Variable) -> nnx.OptVariable:
    return nnx.OptVariable(variable.get_value(), **variable.get_metadata())


def _write(variables: PyTree, values: PyTree, finite: Array | None = None) -> None:
    """Set Variables to values, if these are ``finite``, in the sharding of each Variable."""
    found = jax.tree.leaves(variables, is_leaf=_is_variable)
    for variable, value in zip(found, jax.tree.leaves(values), strict=True):
        value = value if finite is None else jnp.where(finite, value, variable.get_value())
        variable.set_value(as_created(variable.replace(value)).get_value())


def transformed(
    tx: optax.GradientTransformationExtraArgs, grads: PyTree, opt_state: PyTree, params: PyTree, **kwargs: Any
) -> tuple[PyTree, PyTree, PyTree]:
    """Return parameters and optimizer state after an update, and the updates."""

    def run(grads: PyTree, opt_state: PyTree, params: PyTree, kwargs: dict[str, Any]) -> list[Array]:
        # optax relies on implicit promotion; a caller may have set "strict".
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, opt_state, params, **kwargs)
            return jax.tree.leaves((optax.apply_updates(params, updates), opt_state, updates))

    # In a region, because on Explicit axes products and selections, such as Muon's, ask for the sharding of a result.
    leaves, treedef = jax.tree.flatten((params, opt_state, grads))
    found = auto_region(run, [jax.typeof(leaf).sharding.spec for leaf in leaves])(grads, opt_state, params, kwargs)
    return jax.tree.unflatten(treedef, found)
