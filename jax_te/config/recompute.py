"""Recomputation of activations, with Megatron's field names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from jax_te._validation import check_annotations, check_positive
from jax_te.typing import Words

DENSE_RECOMPUTE_MODULES = ("core_attn", "layernorm", "activation", "mlp")
RECOMPUTE_MODULES = (*DENSE_RECOMPUTE_MODULES, "moe", "moe_act", "shared_experts")
"""Parts of a transformer layer that selective recomputation may name."""

_OTHER_MODULES = ("mla_up_proj", "gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc")
"""Megatron's other names, for latent attention, Mamba and hyper-connections."""

_MODULES = Words(f"a list of some of {', '.join(RECOMPUTE_MODULES)}, or None", error=ValueError)

RECOMPUTE_POLICIES = ("none", "full", "save_gemms", "save_quantized", "offload_gemms")
"""Names of the policies in `jax_te.remat.POLICIES`."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Selection of activations that backward recomputes; `TransformerConfig` has these fields, too.

    Args:
        recompute_granularity: ``"full"``: whole layers; ``"selective"``: the modules named below; None: nothing.
        recompute_method: method of full recomputation. ``"uniform"``: of every ``recompute_num_layers`` consecutive
            layers (fewer in the last group) only the first one's input is kept; ``"block"``: ``recompute_num_layers``
            layers at the start of the stack keep only their inputs, the others keep everything.
        recompute_num_layers: number of layers for full recomputation, see ``recompute_method``.
        recompute_modules: modules to recompute selectively, among `RECOMPUTE_MODULES`: ``"core_attn"``, scores and
            softmax; ``"layernorm"``, outputs of the norms in front of linear layers; ``"activation"``, the activation
            function's output; ``"mlp"``, the feed-forward block with its norm; ``"moe"``, the whole of a layer of
            experts; ``"moe_act"``, its activation; ``"shared_experts"``, the experts that all tokens pass. None: the
            attention core. Lists become tuples.
        distribute_saved_activations: whether full recomputation shards the saved inputs over the tensor axis, and
            all-gathers them in backward.

    Raises:
        ValueError: for an unknown name; for a field without effect: a method or number of layers without full
            recomputation, modules without selective; for full recomputation without a method or number of layers;
            for an unknown module, or none.
        TypeError: for a flag that is not bool.

    Source: ``megatron.core.transformer.TransformerConfig``; Chen et al. 2016 (full); Korthikanti et al. 2022
    (selective).

    >>> RecomputeConfig(recompute_granularity="selective").recompute_modules
    ('core_attn',)
    """

    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: Annotated[Sequence[str] | None, _MODULES] = None
    distribute_saved_activations: bool = False

    def __post_init__(self) -> None:
        check_annotations(self, RecomputeConfig)
        # Megatron's default, in every granularity, so that an explicit value cannot be distinguished from it.
        given = self.recompute_modules
        modules = ("core_attn",) if given is None else tuple(given)
        if not modules or set(modules) - set(RECOMPUTE_MODULES):
            others = sorted(set(modules) & set(_OTHER_MODULES))
            absent = f"; {', '.join(others)}: parts that no layer of this package has" if others else ""
            raise ValueError(f"recompute_modules must be {_MODULES.words}, got {given!r}{absent}")
        object.__setattr__(self, "recompute_modules", modules)
        if self.recompute_granularity != "selective" and modules != ("core_attn",):
            raise ValueError(
                f"recompute_modules={list(modules)} has no effect without recompute_granularity='selective'"
            )
        if self.recompute_granularity == "full":
            self._check_full()
        else:
            self._check_not_full()

    def _check_full(self) -> None:
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"recompute_granularity='full' needs {name}; recompute_method='uniform' with "
                    "recompute_num_layers=1 keeps each layer's input"
                )
        check_positive(recompute_num_layers=self.recompute_num_layers)  # type: ignore[arg-type]  # it is not None

    def _check_not_full(self) -> None:
        granularity = self.recompute_granularity
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for recompute_granularity='full', which is {granularity!r}"
                )
        if self.distribute_saved_activations:
            raise ValueError(
                "distribute_saved_activations=True splits the inputs that recompute_granularity='full' keeps, and it "
                f"is {granularity!r}"
            )
