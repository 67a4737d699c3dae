"""A program: train steps of Megatron-Core's GPT, taken when the process that started it says so.

It is run as a file and imports nothing of jax_te. Requests are lines of JSON on stdin, each with an answer on stdout:
the first answer comes unasked and says what cannot be imported, the first request is a model, each later one a number
of steps. It ends with stdin. `jax_te.bench.megatron` is the other side.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
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
        model: ``config``, arguments of Megatron-Core's ``TransformerConfig``; ``vocabulary``, ``batch``, ``sequence``.
    """
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformer_engine.pytorch.optimizers import FusedAdam

    start_ranks()
    bf16 = torch.bfloat16
    config = TransformerConfig(bf16=True, params_dtype=bf16, pipeline_dtype=bf16, **model["config"])
    sequence, vocabulary = model["sequence"], model["vocabulary"]
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=vocabulary,
        max_sequence_length=sequence,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )
    gpt = Float16Module(config, gpt.cuda())
    # The hyper-parameters of optax.adamw, which jax_te's step has.
    optimizer = FusedAdam(gpt.parameters(), lr=1e-4, weight_decay=1e-4, master_weights=True)
    tokens = torch.randint(0, vocabulary, (model["batch"], sequence + 1), device="cuda")
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(sequence, device="cuda").expand(model["batch"], sequence).contiguous()

    def step() -> None:
        # No mask: the layers' own is causal.
        gpt(inputs, positions, None, labels=labels).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def start_ranks() -> None:
    """Make this process the only rank of every group that Megatron-Core wants."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
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
