"""Normalization followed by a two-layer perceptron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te._validation import check_positive, checked, log_hints
from jax_te.config import ActivationLike, ActivationParams, LimitedFunction, normal_init
from jax_te.layers.norm import Normalization, check_returned_norm, norm_parameters, norm_spec
from jax_te.layers.parallel_arguments import TensorParallel, TensorParallelModule, sequence_axes
from jax_te.layers.parameters import constant, parameter
from jax_te.layers.quantizable import frozen_weights
from jax_te.layers.results import layer_output
from jax_te.ops import Activation, LinearOptions, LinearWeights, MlpOptions, dense, layernorm, layernorm_mlp
from jax_te.ops import activation as apply_activation
from jax_te.recipe import Recipe
from jax_te.remat import run_recomputed
from jax_te.sharding import leading_axes, row_axis
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes, TensorGroup

Adapter: TypeAlias = Callable[[Array, LogicalAxes], Array]
_Norm: TypeAlias = tuple[Array, Array | None]

_KEPT = {"mlp": (), "layernorm": ("ffn1", "gemm", "activation"), "activation": ("ffn1", "gemm", "norm")}
"""Arrays that stay saved when a module is recomputed selectively: the first GEMM's output, so that no GEMM runs again,
and the other module's output."""


@checked
class LayerNormMLP(TensorParallelModule):
    """``y = act(norm(x) @ wi_kernel + wi_bias) @ wo_kernel + wo_bias`` as one operation.

    The first projection is column-parallel and the second row-parallel: ``f`` is split over the mesh's tensor axis. A
    gated activation (``swiglu`` and others) has two components (``n_act = 2``): the function of the first times the
    second.

    Args:
        hidden_size: ``h``.
        ffn_hidden_size: ``f``.
        eps: constant added to the variance or mean square.
        bias: whether to learn biases in both projections.
        activation: a key of `jax_te.config.ACTIVATIONS`, an elementwise function, or a tuple with one for each
            component, see `jax_te.ops.activation`.
        activation_params: parameters of ``"clamped_swiglu"``. None: ``ActivationParams()``.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: whether to store the norm's scale as an offset from 1.
        input_layernorm: whether there is a norm in front; without one the operations run one by one.
        init_method: initializer of ``wi_kernel``. None: N(0, 0.023²).
        output_layer_init_method: initializer of ``wo_kernel``. None: N(0, 0.023²).
        return_layernorm_output: whether to return the norm's output, too; then the norm is not fused with quantization.
        set_parallel_mode: whether to split the projections as described above, which TE does only on request; here the
            mesh decides whether there is something to split. False: every tensor device holds them whole and computes
            the same.
        sequence_parallel: input, output and the norm's output ``[b, s, h]`` are sharded over the tensor axis along
            ``s``, as in `Linear`.
        tp_group, tp_size, fuse_wgrad_accumulation: see `Linear`.
        return_bias: whether to return ``wo_bias`` with the output instead of adding it.
        seq_length, micro_batch_size: sizes that TE warms its kernels up with; without effect, since ``jax.jit``
            compiles for the shapes of each call.
        params_dtype: dtype of ``scale [h]``, ``ln_bias [h]``, ``wi_kernel [h, n_act, f]``, ``wi_bias [n_act, f]``,
            ``wo_kernel [f, h]``, ``wo_bias [h]``.
        rngs: random streams, of which ``params`` draws the kernels.

    Raises:
        TypeError: for another ``tp_group`` than None and ``"tensor"``.
        ValueError: for a size that is not positive, an unknown activation, normalization or dtype, an activation that
            is not elementwise, parameters of one that has none, ``sequence_parallel`` without ``set_parallel_mode``;
            when called, see `Linear`.
        QuantizerStateError: when called under a recipe with state, if the layer was built without it.

    Source: ``transformer_engine.pytorch.LayerNormMLP``; Shazeer 2020, "GLU variants improve Transformer".

    >>> LayerNormMLP(16, 32, activation="swiglu", rngs=nnx.Rngs(0))(jnp.ones((2, 4, 16))).shape
    (2, 4, 16)
    """

    kernels: ClassVar[dict[str, str]] = {"wi_kernel": "quantizers_1", "wo_kernel": "quantizers_2"}

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        activation: ActivationLike = "gelu",
        activation_params: ActivationParams | None = None,
        normalization: Normalization = "LayerNorm",
        zero_centered_gamma: bool = False,
        input_layernorm: bool = True,
        init_method: Initializer | None = None,
        output_layer_init_method: Initializer | None = None,
        return_layernorm_output: bool = False,
        set_parallel_mode: bool = True,
        sequence_parallel: bool = False,
        tp_group: TensorGroup = None,
        tp_size: int = 1,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        params_dtype: DTypeLike = jnp.float32,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        rngs: nnx.Rngs,
    ):
        check_positive(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        warm_up = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
        check_positive(**{name: size for name, size in warm_up.items() if size is not None})
        log_hints(fuse_wgrad_accumulation=fuse_wgrad_accumulation, **warm_up)
        function = Activation(activation, activation_params)
        check_elementwise(function)
        n_act = len(function.parts())
        self.tensor_parallel = TensorParallel(
            group=tp_group, size=tp_size, sequence_parallel=sequence_parallel, split=set_parallel_mode
        )
        h, f = hidden_size, ffn_hidden_size
        check_returned_norm(input_layernorm, return_layernorm_output)
        self.norm = norm_spec(normalization, eps, zero_centered_gamma)
        self.scale, self.ln_bias = norm_parameters(self.norm, h, params_dtype) if input_layernorm else (None, None)
        wi_init = normal_init() if init_method is None else init_method
        wo_init = normal_init() if output_layer_init_method is None else output_layer_init_method
        ffn = "ffn" if set_parallel_mode else None
        # The component axis is not sharded: a device needs gate and up of a feature, which it multiplies.
        self.wi_axes: LogicalAxes = ("fsdp", "components", ffn)
        self.wo_axes: LogicalAxes = (row_axis(ffn), None)
        self.wi_kernel = parameter(wi_init, rngs, (h, n_act, f), params_dtype, self.wi_axes)
        self.wi_bias = constant(0.0, (n_act, f), params_dtype, self.wi_axes[1:]) if bias else None
        self.wo_kernel = parameter(wo_init, rngs, (f, h), params_dtype, self.wo_axes)
        # Replicated, since it is added once, after the sum over tensor devices.
        self.wo_bias = constant(0.0, (h,), params_dtype, ("norm",)) if bias else None
        self._init_quantization()
        self.activation, self.activation_params = activation, activation_params
        self.return_layernorm_output = return_layernorm_output
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.frozen = False

    def axes_of(self, kernel: str) -> LogicalAxes:
        """Return the logical axes of ``wi_kernel`` or ``wo_kernel``, whatever Variable holds it."""
        return self.wi_axes if kernel == "wi_kernel" else self.wo_axes

    def __call__(
        self, x: Array, is_first_microbatch: bool | None = None, *, adapters: tuple[Adapter, Adapter] | None = None
    ) -> Array | tuple[Array | None, ...]:
        """Apply the layer.

        Args:
            x: ``[..., h]``; its dtype is the dtype of computation and of the outputs.
            is_first_microbatch: see `Linear`.
            adapters: ``f(z, out_axes)`` for each kernel, added to its product with ``z``: `LoRA`'s two. With them the
                norm and the activation are not fused with quantization.

        Returns:
            ``y [..., h]``, or a tuple of it and the requested results, in this order: ``wo_bias`` in the dtype of
            ``x``, the norm's output.
        """
        axes = (*sequence_axes(x, self.tensor_parallel.sequence_parallel), "hidden")
        x = self.tensor_parallel.enter(x, axes)
        with jax.named_scope("LayerNormMLP"):
            norm, wi, wo = self._arrays(is_first_microbatch)
            options = self._options(x, axes)
            # The fused op may write only the quantized norm's output, whose values are needed here, and has a single
            # recipe.
            apart = self.return_layernorm_output or adapters or self.kernel_recipes

            def run(x: Array) -> tuple[Array, Array | None]:
                if norm is None or apart:
                    return self._unfused(x, norm, wi, wo, options, adapters)
                return layernorm_mlp(x, *norm, wi, wo, options=options, recipe=self.recipe), None

            y, normed = run_recomputed(run, x, kept=_KEPT)
            extra: dict[str, Any] = {}
            if self.return_bias:
                extra["bias"] = None if self.wo_bias is None else self.wo_bias.get_value().astype(x.dtype)
            if self.return_layernorm_output:
                extra["layernorm_output"] = normed
            return layer_output(y, **extra)

    def _arrays(self, is_first_microbatch: bool | None) -> tuple[_Norm | None, LinearWeights, LinearWeights]:
        """Return the arrays of a call: the norm's, if there is one, and those of the two projections."""
        ln_bias, wi_bias, wo_bias = (
            None if bias is None else bias.get_value() for bias in (self.ln_bias, self.wi_bias, self.wo_bias)
        )
        norm: _Norm | None = None if self.scale is None else (self.scale.get_value(), ln_bias)
        wi = self.linear_weights("wi_kernel", wi_bias, is_first_microbatch)
        wo = self.linear_weights("wo_kernel", None if self.return_bias else wo_bias, is_first_microbatch)
        if not self.frozen:
            return norm, wi, wo
        return jax.lax.stop_gradient(norm), frozen_weights(wi), frozen_weights(wo)

    def _options(self, x: Array, axes: LogicalAxes) -> MlpOptions:
        """Return the op's static options; between the projections the sequence is whole."""
        lead, name = leading_axes(x), self.module_name
        names = (None, None) if name is None else (f"{name}.wi_kernel", f"{name}.wo_kernel")
        return MlpOptions(
            norm=self.norm,
            activation=Activation(self.activation, self.activation_params),
            wi=LinearOptions(
                x_axes=axes,
                kernel_axes=self.wi_axes,
                out_axes=(*lead, *self.wi_axes[1:]),
                name=names[0],
                evaluation=self.deterministic,
            ),
            wo=LinearOptions(
                x_axes=(*lead, self.wi_axes[-1]),
                kernel_axes=self.wo_axes,
                out_axes=axes,
                name=names[1],
                evaluation=self.deterministic,
            ),
        )

    def _unfused(
        self,
        x: Array,
        norm: _Norm | None,
        wi: LinearWeights,
        wo: LinearWeights,
        options: MlpOptions,
        adapters: tuple[Adapter, Adapter] | None,
    ) -> tuple[Array, Array]:
        """Return the output in four operations, and the norm's output; without a norm in three, and the input."""
        normed = x if norm is None else layernorm(x, *norm, norm=self.norm, out_axes=options.wo.out_axes)  # type: ignore[arg-type]
        a = _dense(normed, wi, self.recipe_of("wi_kernel"), options.wi)
        if adapters is not None:
            a = a + adapters[0](normed, options.wi.out_axes)  # type: ignore[arg-type]
        z = apply_activation(a, self.activation, params=self.activation_params, out_axes=options.wo.x_axes)  # type: ignore[arg-type]
        y = _dense(z, wo, self.recipe_of("wo_kernel"), options.wo)
        if adapters is not None:
            y = y + adapters[1](z, options.wo.out_axes)  # type: ignore[arg-type]
        return y, normed


def _dense(x: Array, linear: LinearWeights, recipe: Recipe | None, options: LinearOptions) -> Array:
    kernel, bias, state, grad_sink = linear
    return dense(x, kernel, bias, recipe=recipe, state=state, grad_sink=grad_sink, options=options)


def check_elementwise(activation: Activation) -> None:
    """Raise ValueError for an activation with a function that is not elementwise, after calling a user's function."""
    inner = [part.function if isinstance(part, LimitedFunction) else part for part in activation.parts()]
    for function in (part for part in inner if not isinstance(part, str)):
        # A softmax would silently give other values on a mesh, where a device has only a part of the features.
        with jax.ensure_compile_time_eval():
            x = jnp.asarray([-1.5, -0.5, 0.25, 2.0], jnp.float32)
            whole, each = function(x), [function(x[i : i + 1]) for i in range(4)]
            same = [jnp.shape(y) for y in (whole, *each)] == [(4,), *4 * [(1,)]]
            close = same and np.allclose(whole, np.concatenate(each), rtol=1e-4, atol=1e-4, equal_nan=True)
        if not close:
            raise ValueError(
                f"the activation function {function!r} is not elementwise: f([a, b]) is not [f(a), f(b)]. Devices "
                "call it with parts of an array; give a function of each element, or a tuple of them if it is gated"
            )
