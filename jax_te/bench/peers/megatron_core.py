"""A program: steps of Megatron-Core's GPT or of its expert layer, taken when the process that started it says so.

It is run as a file and imports nothing of jax_te, one process for each GPU, with torchrun's environment variables.
Requests are lines of JSON on stdin, each with an answer on stdout: the first answer comes unasked and says what cannot
be imported, the first request is a model or an expert layer, each later one a number of steps. It ends with stdin.
`jax_te.bench.megatron` is the other side.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

NEEDED = ("torch", "transformer_engine.pytorch", "megatron.core")
WARM_UP = 4
"""Steps before the first that counts: in them torch compiles its fused functions and allocates all it will use."""


def find_missing() -> dict[str, str]:
    """Return the packages of `NEEDED` that cannot be used here, with the reasons."""
    reasons = {}
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except Exception as error:  # a missing CUDA library shows as OSError, ImportError or RuntimeError
            reasons[name] = summarize(error)
    if "torch" not in reasons:
        import torch

        if not torch.cuda.is_available():
            reasons["torch"] = "it finds no GPU"
    return reasons


def summarize(error: Exception) -> str:
    """Return an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def build_step(request: dict[str, Any]) -> Callable[[], None]:
    """Return a function that takes a step of what the first request describes."""
    os.environ["MASTER_PORT"] = str(request["port"])
    return build_layer_step(request) if "tokens" in request else build_train_step(request)


def build_layer_step(layer: dict[str, Any]) -> Callable[[], None]:
    """Return a function that takes a step: forward and backward of an expert layer on random tokens.

    Args:
        layer: ``config``, arguments of Megatron-Core's ``TransformerConfig``; ``activation``, a name that
            `find_activation` knows; ``tokens``, their number.
    """
    import torch
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    start_ranks(1, 1)
    bf16 = torch.bfloat16
    fields = {"bf16": True, "params_dtype": bf16, "activation_func": find_activation(layer["activation"])}
    fields["num_layers"] = 1
    config = TransformerConfig(**fields, hidden_dropout=0.0, attention_dropout=0.0, **layer["config"])
    build = get_moe_module_spec(use_te=True, num_experts=config.num_moe_experts, moe_grouped_gemm=True)
    experts = build(config=config, layer_number=1).cuda().to(bf16)
    quantizing = [module for module in experts.modules() if hasattr(module, "is_first_microbatch")]
    shape = (layer["tokens"], 1, config.hidden_size)
    x = torch.randn(shape, device="cuda", dtype=bf16, requires_grad=True)
    dy = torch.randn(shape, device="cuda", dtype=bf16)

    def step() -> None:
        for module in quantizing:  # else its layers would quantize their kernels in the first step alone
            module.is_first_microbatch = True
        with get_fp8_context(config):
            y, _ = experts(x)
        y.backward(dy)
        experts.zero_grad(set_to_none=True)
        x.grad = None

    return step


def find_activation(name: str) -> Callable[..., Any]:
    """Return the activation with a name in ``torch.nn.functional``, or Megatron-Core's own ``quick_gelu``."""
    if name == "quick_gelu":
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        return quick_gelu
    import torch

    return getattr(torch.nn.functional, name)


def build_train_step(model: dict[str, Any]) -> Callable[[], None]:
    """Return a function that takes a train step: forward, backward, AdamW on fp32 masters of bf16 parameters.

    Args:
        model: ``config``, arguments of Megatron-Core's ``TransformerConfig``, or of its ``MLATransformerConfig``;
            ``activation``, a name that `find_activation` knows; ``form``, arguments of its ``GPTModel``; ``batch`` and
            ``sequence``, of what one rank runs at a time; ``microbatches``; ``distributed_optimizer``;
            ``fp32_gradients``, whether buffers add up and reduce them in fp32; ``rows``, token IDs of the whole batch,
            or None for random ones.
    """
    import torch
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    stages = model["config"]["pipeline_model_parallel_size"]
    first, last = start_ranks(model["config"]["tensor_model_parallel_size"], stages)
    together = torch.distributed.get_world_size() > 1 or model["microbatches"] > 1
    bf16, activation = torch.bfloat16, find_activation(model["activation"])
    fields = {"bf16": True, "params_dtype": bf16, "pipeline_dtype": bf16, "activation_func": activation}
    fields |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    # What a stage has sent it frees, as in Megatron-LM's own training.
    fields["deallocate_pipeline_outputs"] = True
    # GEMMs that add to the gradients' buffers: the head's needs a kernel of APEX.
    fields["gradient_accumulation_fusion"] = together and find_spec("fused_weight_gradient_mlp_cuda") is not None
    if (window := model["config"].get("window_size")) is not None:
        fields["window_size"] = tuple(window)  # JSON has lists alone
    kind = MLATransformerConfig if model["config"].get("multi_latent_attention") else TransformerConfig
    config = kind(**(model["config"] | fields))
    if config.num_moe_experts is None and kind is TransformerConfig:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model["config"]["qk_layernorm"])
    else:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    form = {"max_sequence_length": model["sequence"], "pre_process": first, "post_process": last, **model["form"]}
    if config.mtp_num_layers is not None:
        depths = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True)
        form["mtp_block_spec"] = depths
    gpt = GPTModel(config=config, transformer_layer_spec=spec, **form)
    gpt = Float16Module(config, gpt.cuda())
    gpt, update = update_together(config, gpt, model) if together else update_alone(gpt)
    forward = make_forward(model)

    def step() -> None:
        # Else its layers would quantize their kernels in the first step alone.
        gpt.set_is_first_microbatch()
        # Its 1F1B where there are stages, else a loop over microbatches of which the last reduces gradients.
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=gpt,
            num_microbatches=model["microbatches"],
            seq_length=model["sequence"],
            micro_batch_size=model["batch"],
        )
        update()

    return step


def make_forward(model: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that gives `get_forward_backward_func` the output of a stage for one microbatch."""
    import torch

    batch, sequence = model["batch"], model["sequence"]
    # Ranks that share a model need the same tokens; to the others, and to other microbatches, it does not matter.
    if model["rows"] is None:
        generator = torch.Generator("cuda").manual_seed(1)
        shape = (batch, sequence + 1)
        tokens = torch.randint(0, model["form"]["vocab_size"], shape, device="cuda", generator=generator)
    else:
        tokens = torch.tensor(model["rows"][:batch], device="cuda")
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(sequence, device="cuda").expand(batch, sequence).contiguous()

    def forward(_: Any, stage: Any) -> tuple[Any, Callable[[Any], tuple[Any, dict[str, Any]]]]:
        """Return what this stage sends to the next, or the last stage's losses, and how those become one."""
        output = stage(inputs, positions, None, labels=labels)  # no mask: the layers' own is causal
        return output, lambda losses: (losses.float().mean(), {})

    return forward


def update_alone(gpt: Any) -> tuple[Any, Callable[[], None]]:
    """Return a model of one rank that takes whole batches, and a function that ends a step."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    # The hyper-parameters of optax.adamw, which jax_te's step has.
    optimizer = FusedAdam(gpt.parameters(), lr=1e-4, weight_decay=1e-4, master_weights=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return gpt, update


def update_together(config: Any, gpt: Any, model: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    """Return a model of several ranks, or of several microbatches, and how it is updated: results as `update_alone`.

    Megatron-Core adds its gradients up in buffers.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    # Only replicas have something to overlap.
    of_one_model = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
    replicas = of_one_model < torch.distributed.get_world_size()
    distributed = model["distributed_optimizer"]
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=replicas,
        overlap_param_gather=replicas and distributed,
        grad_reduce_in_fp32=model["fp32_gradients"],
    )
    gpt = DistributedDataParallel(config, reduction, gpt)
    config.no_sync_func = gpt.no_sync
    adam = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        weight_decay=1e-4,
        adam_beta2=0.999,
        clip_grad=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=distributed,
        overlap_param_gather=replicas and distributed,
    )
    optimizer = get_megatron_optimizer(adam, [gpt])

    def update() -> None:
        finalize_model_grads([gpt], None)
        optimizer.step()
        gpt.zero_grad_buffer()
        optimizer.zero_grad()

    return gpt, update


def start_ranks(tensor: int, stages: int) -> tuple[bool, bool]:
    """Make this process a rank of the groups that Megatron-Core wants, of which ``tensor`` ranks share each kernel.

    Returns:
        Whether it runs the first of ``stages``, and whether it runs the last.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor, stages)
    model_parallel_cuda_manual_seed(1)
    return parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()


def time_steps(step: Callable[[], None], count: int) -> dict[str, float]:
    """Return the mean seconds of a step over this many, the peak of torch's memory so far, and what the GPU has free.

    Memory is in bytes. Free is what no process has taken, torch's own cache counted as taken.
    """
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / count
    free, _ = torch.cuda.mem_get_info()
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated(), "free_bytes": free}


def main() -> int:
    """Return the exit status, 0, when stdin ends, or 1 once an error has been the answer."""
    # Megatron-Core and what it imports print to stdout, too: to them it is stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Else a compiler that torch has forked would keep the pipe open, and the parent not see that this one has ended.
    os.register_at_fork(after_in_child=out.close)

    def answer(fields: dict[str, Any]) -> None:
        print(json.dumps(fields), file=out, flush=True)

    missing = find_missing()
    if missing:
        answer({"missing": missing})
        return 0
    import torch

    answer({"missing": {}, "device": torch.cuda.get_device_name(0)})
    model = sys.stdin.readline()
    if not model:
        return 0
    try:
        step = build_step(json.loads(model))
        answer(time_steps(step, WARM_UP))
        for line in sys.stdin:
            answer(time_steps(step, json.loads(line)))
    except Exception as error:
        traceback.print_exc()
        answer({"error": summarize(error)})
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # NCCL and CUDA may hang when they are unloaded
