"""Captured graphs, with Megatron's field names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jax_te._validation import check_annotations, log_hints, log_once, warn_caller

_WHOLE_LAYER = ((), ("full",), ("attn", "mlp"))


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """Selection of calls that run as captured graphs; `TransformerConfig` has these fields, too.

    A captured graph is here an executable that XLA compiled ahead of time, see
    `jax_te.megatron.GraphableMegatronModule`. They concern calls outside of ``jax.jit``: a jitted function is one graph
    with all that it calls.

    Args:
        cuda_graph_impl: ``"none"``; ``"local"``: a module captures each new call; ``"transformer_engine"``: in training
            a module runs the calls that it was made to capture; ``"full_iteration"``: the whole step is one program,
            which `jax_te.training.make_train_step` under ``jax.jit`` is in any case, so modules capture nothing.
        cuda_graph_modules: modules to capture: ``"full"``, an empty list or ``["attn", "mlp"]``, the whole layer. It
            becomes ``()``. Parts of a layer are refused: Megatron captures parts where others cannot be captured, such
            as experts, whose sizes change from step to step; here sizes are static, and XLA makes CUDA graphs of the
            kernels inside of a program.
        cuda_graph_scope: the deprecated name of ``cuda_graph_modules``; its ``"full_iteration"`` is now a
            ``cuda_graph_impl``. It becomes None.
        enable_cuda_graph, external_cuda_graph: the deprecated names of ``cuda_graph_impl="local"`` and
            ``"transformer_engine"``. They become False.
        cuda_graph_warmup_steps, cuda_graph_use_single_mempool, cuda_graph_retain_backward_graph: options without
            effect; XLA allocates memory and needs no warm-up.

    Raises:
        ValueError: for an unknown name, for parts of a layer, and for two equivalent fields with different names.
        TypeError: for a flag that is not bool.

    Source: ``megatron.core.transformer.TransformerConfig``.

    >>> CudaGraphConfig(cuda_graph_impl="local", cuda_graph_modules=["attn", "mlp"]).cuda_graph_modules
    ()
    """

    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    cuda_graph_modules: Any = "full"
    cuda_graph_scope: Any = None
    enable_cuda_graph: bool = False
    external_cuda_graph: bool = False
    cuda_graph_warmup_steps: int = 3
    cuda_graph_use_single_mempool: bool = True
    cuda_graph_retain_backward_graph: bool = False

    def __post_init__(self) -> None:
        check_annotations(self, CudaGraphConfig)
        log_hints(
            cuda_graph_retain_backward_graph=self.cuda_graph_retain_backward_graph,
            cuda_graph_use_single_mempool=not self.cuda_graph_use_single_mempool,
            cuda_graph_warmup_steps=self.cuda_graph_warmup_steps != 3,
        )
        fill = object.__setattr__  # the dataclass is frozen
        for old, impl in (("enable_cuda_graph", "local"), ("external_cuda_graph", "transformer_engine")):
            if getattr(self, old):
                if self.cuda_graph_impl != "none":
                    raise ValueError(
                        f"{old}=True and cuda_graph_impl={self.cuda_graph_impl!r} are both given; leave {old} out"
                    )
                _deprecated(f"{old}=True", f"cuda_graph_impl={impl!r}")
                fill(self, "cuda_graph_impl", impl)
                # Moved to the new field, so that dataclasses.replace does not set both.
                fill(self, old, False)
        chosen, modules = "cuda_graph_modules", _names(self.cuda_graph_modules)
        if self.cuda_graph_scope is not None:
            if modules not in ((), ("full",)):
                raise ValueError("cuda_graph_scope and cuda_graph_modules are both given; leave cuda_graph_scope out")
            _deprecated("cuda_graph_scope", "cuda_graph_modules")
            chosen, modules = "cuda_graph_scope", _names(self.cuda_graph_scope)
            fill(self, "cuda_graph_scope", None)
        if modules == ("full_iteration",) and self.cuda_graph_impl in ("none", "local", "full_iteration"):
            _deprecated("cuda_graph_modules='full_iteration'", "cuda_graph_impl='full_iteration'")
            fill(self, "cuda_graph_impl", "full_iteration")
            modules = ()
        if tuple(sorted(modules)) not in _WHOLE_LAYER:
            raise ValueError(
                f"cuda_graph_modules must be 'full', [] or ['attn', 'mlp'], which all are the whole layer, got "
                f"{list(modules)}. A captured layer is one XLA program, fused over the borders of its parts, "
                "and XLA makes CUDA graphs of kernels (XLA_FLAGS=--xla_gpu_enable_command_buffer=... says of which). "
                "Leave it at 'full'; to capture a module of your own apart, derive it from GraphableMegatronModule"
            )
        fill(self, "cuda_graph_modules", ())
        if self.cuda_graph_impl == "none" and (chosen == "cuda_graph_scope" or modules not in ((), ("full",))):
            log_once(
                f"{chosen}={list(modules)} has no effect: it is for cuda_graph_impl, which is 'none'; set it to "
                "'local' or 'transformer_engine'"
            )


def _names(modules: Any) -> tuple[str, ...]:
    """Return names as a tuple: Megatron takes None, a name, names with commas between, its enum, and lists of these."""
    parts = modules.split(",") if isinstance(modules, str) else modules
    parts = () if parts in (None, "", [""]) else parts
    return tuple(getattr(part, "name", part) for part in (parts if isinstance(parts, (list, tuple)) else [parts]))


def _deprecated(old: str, new: str) -> None:
    warn_caller(f"{old} is deprecated, as in Megatron-Core; write {new}", DeprecationWarning)
