"""Fields of a configuration that Megatron's linear layers read, in every model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_te._validation import check_annotations, check_choice, check_positive, float_dtype, log_hints
from jax_te.config.megatron_fields import accepts_megatron_fields
from jax_te.typing import DTypeLike

SYMMETRIC_AR_TYPES = (None, "two_shot", "one_shot", "multimem_all_reduce")
"""Kinds of all-reduce over symmetric memory, by Megatron's names."""


@accepts_megatron_fields
@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
    """Parallelism, initialization and dtypes, with Megatron-Core's names; `TransformerConfig` has these fields, too.

    Args:
        tensor_model_parallel_size: devices on the mesh's tensor axis. 1 leaves it to the mesh; any other size must be
            the mesh's where a layer is built or called under one.
        sequence_parallel: whether to shard activations over the tensor axis along the sequence between the
            tensor-parallel parts of a layer.
        context_parallel_size: devices on the mesh's context axis, in the same way.
        expert_model_parallel_size: devices among which the experts are split, by default those of the mesh's expert
            axis, in the same way. A `TransformerConfig` without experts refuses another size than 1.
        expert_tensor_parallel_size: None or ``tensor_model_parallel_size``: the tensor axis shards an expert's kernels,
            too. 1: it does not.
        perform_initialization: whether to initialize kernels. False: they start as zeros, for a model whose weights are
            loaded anyway.
        use_cpu_initialization: Megatron's way to weights that do not depend on the tensor-parallel size. Here they
            never do, so both values give the same. To draw them on the host, build the model under
            ``jax.default_device(jax.devices("cpu")[0])``.
        init_model_with_meta_device: option that must be False, see below.
        fp16, bf16: whether `jax_te.megatron.Float16Module` casts to fp16 or to bf16; not both.
        params_dtype: dtype that parameters are stored in.
        deterministic_mode: option that must be False, see below.
        gradient_accumulation_fusion: option without effect: XLA fuses the addition, and the train step always
            accumulates microbatches in fp32.
        delay_wgrad_compute: whether weight gradients are computed apart from input gradients: by
            `jax_te.training.deferred_vjp`, to which a layer's ``backward_dw`` then refers.
        tp_comm_overlap: option that must be False, see below.
        tp_comm_overlap_disable_qkv, tp_comm_overlap_disable_fc1: options without effect, as in Megatron where
            ``tp_comm_overlap`` is False.
        symmetric_ar_type: kind of all-reduce, one of `SYMMETRIC_AR_TYPES`. In Megatron it chooses a CUDA kernel; here
            NCCL chooses, so it has no effect.
        disable_parameter_transpose_cache: whether `MegatronModule.set_is_first_microbatch` leaves the layers alone, so
            that they keep no quantized kernels between microbatches.
        quant_recipe: a `jax_te.megatron.RecipeConfig`. A layer that is given its ``name`` takes its precision from it.

    Raises:
        ValueError: for a size that is not positive; sequence parallelism without tensor parallelism; both fp16 and
            bf16; an unknown dtype or kind of all-reduce; for options that JAX replaces: ``init_model_with_meta_device``
            (``nnx.eval_shape``), ``tp_comm_overlap`` (`jax_te.models.Execution`), ``deterministic_mode`` (XLA flags and
            an environment variable); for another ``expert_tensor_parallel_size``.
        TypeError: for a flag that is not bool, a ``quant_recipe`` that is not hashable.

    Source: ``megatron.core.ModelParallelConfig``, and the fields of ``TransformerConfig`` that ``TELinear`` reads.

    >>> ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True).params_dtype
    dtype('float32')
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    init_model_with_meta_device: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: DTypeLike = np.float32
    deterministic_mode: bool = False
    gradient_accumulation_fusion: bool = False
    delay_wgrad_compute: bool = False
    tp_comm_overlap: bool = False
    tp_comm_overlap_disable_qkv: bool = False
    tp_comm_overlap_disable_fc1: bool = False
    symmetric_ar_type: str | None = None
    disable_parameter_transpose_cache: bool = False
    quant_recipe: Any = None

    def __post_init__(self) -> None:
        check_annotations(self, ModelParallelConfig)
        self._check_sizes()
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both True; a model has one of them")
        # JAX does these in another way. They are refused instead of silently having no effect.
        if self.init_model_with_meta_device:
            raise ValueError(
                "init_model_with_meta_device=True: nnx.eval_shape(lambda: Model(...)) gives a module without arrays; "
                "jax_te.training.create_train_state creates sharded arrays from a function. Leave it False"
            )
        if self.deterministic_mode:
            raise ValueError(
                "deterministic_mode=True: a process is deterministic as a whole. Leave it False, and start it with "
                "XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=true and, for Transformer Engine's attention, "
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
            )
        if self.tp_comm_overlap:
            raise ValueError(
                "tp_comm_overlap=True: there are no user buffers. Leave it False, and give the model "
                "Execution(batch_parts=2) (jax-te train --batch-parts 2): XLA runs the collectives of one half of a "
                "batch beside the GEMMs of the other"
            )
        check_choice(SYMMETRIC_AR_TYPES, symmetric_ar_type=self.symmetric_ar_type)
        log_hints(
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            symmetric_ar_type=self.symmetric_ar_type,
            tp_comm_overlap_disable_fc1=self.tp_comm_overlap_disable_fc1,
            tp_comm_overlap_disable_qkv=self.tp_comm_overlap_disable_qkv,
            use_cpu_initialization=self.use_cpu_initialization,
        )
        # One spelling of a dtype, so that equal configurations are equal: np.float32 and "float32" are not.
        object.__setattr__(self, "params_dtype", float_dtype("params_dtype", self.params_dtype))
        # Configurations are static fields of modules, and so part of jit cache keys.
        try:
            hash(self.quant_recipe)
        except TypeError:
            raise TypeError(
                f"quant_recipe must be a jax_te.megatron.RecipeConfig, got {type(self.quant_recipe).__name__}; "
                "RecipeConfig.from_config_dict makes one of a mapping"
            ) from None

    def _check_sizes(self) -> None:
        tensor = self.tensor_model_parallel_size
        check_positive(
            tensor_model_parallel_size=tensor,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
        )
        if self.sequence_parallel and tensor == 1:
            raise ValueError(
                "sequence_parallel=True needs tensor parallelism: set tensor_model_parallel_size to the size of the "
                "mesh's tensor axis"
            )
        if self.expert_tensor_parallel_size not in (None, 1, tensor):
            raise ValueError(
                f"expert_tensor_parallel_size must be None, 1 or tensor_model_parallel_size={tensor}, got "
                f"{self.expert_tensor_parallel_size!r}: the tensor axis of the mesh shards an expert's kernels as a "
                "whole, or not at all"
            )
