"""Low-rank adaptation of experts' linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.layers.lora import LoRA
from jax_te.layers.moe.grouped_linear import GroupedLinear
from jax_te.layers.results import map_output
from jax_te.ops import LinearOptions, RowGroups, grouped_dense
from jax_te.typing import Array, DTypeLike, Initializer, Words

_BASE = Words("a GroupedLinear of jax_te", "LoRA is for a Linear, LayerNormLinear or LayerNormMLP")


@checked
class GroupedLoRA(LoRA):
    """`LoRA` of a `GroupedLinear`: each expert has an adapter of its own, ``lora_a [e, k, r]``, ``lora_b [e, r, *n]``.

    It is called like its base, and takes the base's place in a model::

        moe.experts.linear_fc1 = GroupedLoRA(moe.experts.linear_fc1, 8, rngs=rngs)

    Args:
        base: the layer of experts; taken over, not copied.
        rank, alpha, freeze_base, params_dtype: see `LoRA`.
        init_method: initializer of one expert's ``lora_a``, with its shape ``(k, r)``. None: N(0, 1 / k).
        rngs: random streams, of which ``params`` draws ``lora_a``.

    Raises:
        TypeError: for another base.
        ValueError: for a rank that is not positive; see also the base.

    Source: Hu et al. 2021, "LoRA: low-rank adaptation of large language models".

    >>> layer = GroupedLoRA(GroupedLinear(2, 16, 32, rngs=nnx.Rngs(0)), 4, rngs=nnx.Rngs(1))
    >>> layer(jnp.ones((5, 16)), [4, 1]).shape, layer.lora_a.shape, layer.lora_b.shape
    ((5, 32), (2, 16, 4), (2, 4, 32))
    """

    def __init__(
        self,
        base: Annotated[GroupedLinear, _BASE],
        rank: int,
        *,
        alpha: float | None = None,
        freeze_base: bool = True,
        init_method: Initializer | None = None,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self._adapt(base, rank, alpha, freeze_base, init_method, params_dtype, rngs)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Array,
        group_sizes: Array | Sequence[int] | RowGroups,
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """Return the base's result for the same arguments, with the adapters' products added.

        Args:
            x, group_sizes, is_first_microbatch: arguments of `GroupedLinear`.
        """
        with jax.named_scope("GroupedLoRA"):
            result = self.base(x, group_sizes, is_first_microbatch=is_first_microbatch)
            groups = self.base.row_groups(x, group_sizes)
            return map_output(lambda y: y + self._product(self.base.operand(x), groups), result)

    def _product(self, x: Array, groups: RowGroups) -> Array:
        expert, inner, *outer = self.base.axes_of("kernel")
        down = LinearOptions(kernel_axes=(expert, inner, None), out_axes=(None, None))
        up = LinearOptions(kernel_axes=(expert, None, *outer), out_axes=(None, *self.base.feature_axes))
        # No recipe in either call, as in LoRA.
        a, b = (getattr(self, name).get_value() for name in ("lora_a", "lora_b"))
        return (
            grouped_dense(grouped_dense(x, a, groups=groups, options=down), b, groups=groups, options=up) * self.scale
        )
