"""A program: train steps of Megatron-Core's GPT, taken when the process that started it says so.

It is run as a file and imports nothing of jax_te, one process for each GPU, with torchrun's environment variables.
Requests are lines of JSON on stdin, each with an answer on stdout: the first answer comes unasked and says what cannot
be imported, the first request is a model, each later one a number of steps. It ends with stdin. `jax_te.bench.megatron`
is the other side.
"""

from __future__ import annotations

import contextlib
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


def build_step(model: dict[str, Any]) -> Callable[[], None]:
    """Return a function that takes a train step: forward, backward, AdamW on fp32 masters of bf16 parameters.

    Args:
        model: ``config``, arguments of Megatron-Core's ``TransformerConfig``; ``activation``, a name in
            ``torch.nn.functional``; ``form``, arguments of its ``GPTModel``; ``batch`` and ``sequence``, of what one
            rank runs at a time; ``microbatches``; ``distributed_optimizer``; ``fp32_gradients``, whether buffers add up
            and reduce them in fp32; ``port``, free, for the ranks to meet at.
    """
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    os.environ["MASTER_PORT"] = str(model["port"])
    start_ranks(model["config"]["tensor_model_parallel_size"])
    together = torch.distributed.get_world_size() > 1 or model["microbatches"] > 1
    bf16, activation = torch.bfloat16, getattr(torch.nn.functional, model["activation"])
    fields = {"bf16": True, "params_dtype": bf16, "pipeline_dtype": bf16, "activation_func": activation}
    # GEMMs that add to the gradients' buffers: the head's needs a kernel of APEX.
    fields["gradient_accumulation_fusion"] = together and find_spec("fused_weight_gradient_mlp_cuda") is not None
    config = TransformerConfig(**fields, **model["config"])
    batch, sequence, microbatches = model["batch"], model["sequence"], model["microbatches"]
    spec = get_gpt_layer_with_transformer_engine_spec()
    gpt = GPTModel(config=config, transformer_layer_spec=spec, max_sequence_length=sequence, **model["form"])
    gpt = Float16Module(config, gpt.cuda())
    gpt, unreduced, update = update_together(config, gpt, model) if together else update_alone(gpt)
    # Ranks that share a model's kernels need the same tokens; to the others it does not matter.
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = torch.randint(0, model["form"]["vocab_size"], (batch, sequence + 1), device="cuda", generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(sequence, device="cuda").expand(batch, sequence).contiguous()

    def step() -> None:
        # Else its layers would quantize their kernels in the first step alone.
        gpt.set_is_first_microbatch()
        for index in range(microbatches):
            with contextlib.nullcontext() if index == microbatches - 1 else unreduced():
                # No mask: the layers' own is causal.
                (gpt(inputs, positions, None, labels=labels).float().mean() / microbatches).backward()
        update()

    return step


def update_alone(gpt: Any) -> tuple[Any, Callable[[], Any], Callable[[], None]]:
    """Return a model of one rank that takes whole batches, and how it is updated.

    Returns:
        The model, a context in which a microbatch's gradients are not reduced, and a function that ends a step.
    """
    from transformer_engine.pytorch.optimizers import FusedAdam

    # The hyper-parameters of optax.adamw, which jax_te's step has.
    optimizer = FusedAdam(gpt.parameters(), lr=1e-4, weight_decay=1e-4, master_weights=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return gpt, contextlib.nullcontext, update


def update_together(config: Any, gpt: Any, model: dict[str, Any]) -> tuple[Any, Callable[[], Any], Callable[[], None]]:
    """Return a model of several ranks, or of several microbatches, and how it is updated: results as `update_alone`.

    Megatron-Core adds its gradients up in buffers.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    # Only replicas have something to overlap.
    replicas = config.tensor_model_parallel_size < torch.distributed.get_world_size()
    distributed = model["distributed_optimizer"]
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=replicas,
        overlap_param_gather=replicas and distributed,
        grad_reduce_in_fp32=model["fp32_gradients"],
    )
    gpt = DistributedDataParallel(config, reduction, gpt)
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

    return gpt, gpt.no_sync, update


def start_ranks(tensor: int) -> None:
    """Make this process a rank of the groups that Megatron-Core wants, of which ``tensor`` ranks share each kernel."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor, 1)
    model_parallel_cuda_manual_seed(1)


def time_steps(step: Callable[[], None], count: int) -> dict[str, float]:
    """Return the mean seconds of a step over this many, and the peak of torch's memory so far in bytes."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / count
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated()}


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
