"""Megatron-Core as a contestant: it runs in a separate process, and waits there while others are measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jax_te._device import default_device, default_platform
from jax_te.bench.contestants import Contestant
from jax_te.bench.settings import GIB, Sizes
from jax_te.config import ActivationParams, LatentAttentionOptions, RouterOptions, TransformerConfig
from jax_te.recipe import DelayedScaling, Format, Recipe

MEGATRON_RECIPES = {"delayed": "delayed", "current": "tensorwise", "block": "blockwise"}
"""Megatron-Core's names of recipes; others are compared with its bf16 step."""

_ACTIVATIONS: dict[Any, str] = {"gelu": "gelu", "swiglu": "silu", "qgeglu": "quick_gelu"}
"""Megatron-Core's names of activations, gated ones without their gate."""

_NOT_DESCRIBED = ("block_output_layernorm", "block_input_layernorm", "parallel_attention_mlp", "logit_softcap")
_NOT_DESCRIBED += ("qk_layernorm_across_heads", "layernorm_zero_centered_gamma")
_NOT_DESCRIBED += ("moe_latent_size", "moe_shared_expert_gate", "moe_apply_probs_on_input")
"""Fields of a `TransformerConfig` that change a layer, and that Megatron-Core is not told."""

PATIENCE_S = 20.0
"""Seconds in which processes end by themselves."""
ANSWER_S = 1800.0
"""Seconds in which processes answer: imports take minutes, and so do kernels that are compiled for a first step."""
_PROGRAM = Path(__file__).parent / "peers" / "megatron_core.py"


class MegatronProcess:
    """A running `jax_te.bench.peers.megatron_core`, with which torch's libraries stay out of this process.

    Args:
        rank, ranks: index of this process, and number of processes, of one model.
    """

    def __init__(self, rank: int, ranks: int):
        self.rank = rank
        # -P: without it the program's folder would come first on the path of all that Megatron-Core imports.
        command = [sys.executable, "-P", str(_PROGRAM)]
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        env["MASTER_ADDR"] = "127.0.0.1"
        if ranks > 1:
            env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron-Core's condition for communication beside GEMMs
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, request: Any) -> None:
        """Send a request, whose answer `receive` returns."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its earlier output is still to be read
            print(json.dumps(request), file=self.process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        """Return an answer, for which `receive_all` waits. The first comes without a request: ``missing`` packages,
        with the reasons.

        Raises:
            RuntimeError: with its message, if the process failed.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise RuntimeError(f"Megatron-Core's process ended with status {status}; its output is on stderr")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"Megatron-Core: {answer['error']}")
        return answer


def receive_all(processes: Sequence[MegatronProcess]) -> list[dict[str, Any]]:
    """Return an answer of each process, as they come.

    Raises:
        RuntimeError: for the first process that failed: the others may wait for it forever; for processes that have not
            answered after `ANSWER_S`.
    """
    answers, deadline = [], time.monotonic() + ANSWER_S
    with selectors.DefaultSelector() as waiting:
        for process in processes:
            assert process.process.stdout is not None
            waiting.register(process.process.stdout, selectors.EVENT_READ, process)
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(sorted(str(key.data.rank) for key in waiting.get_map().values()))
                raise RuntimeError(
                    f"Megatron-Core: no answer in {ANSWER_S:.0f} s from rank {silent} of {len(processes)}; its output "
                    "is on stderr"
                )
            for key, _ in ready:
                waiting.unregister(key.fileobj)
                answers.append(key.data.receive())
    return answers


def close_all(processes: Sequence[MegatronProcess]) -> None:
    """End processes, which frees their memory."""
    for each in processes:
        assert each.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a request that it has not read
            each.process.stdin.close()  # with which it ends
    deadline = time.monotonic() + PATIENCE_S
    for each in processes:
        try:
            each.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # a step that hangs does not see the end of stdin
            each.process.kill()
            each.process.wait()
        assert each.process.stdout is not None
        each.process.stdout.close()


def check_megatron() -> None:
    """Raise ValueError, with the remedy, if Megatron-Core cannot be measured here."""
    process = MegatronProcess(0, 1)
    try:
        (found,) = receive_all([process])
    except RuntimeError as error:  # a library may end the process when it is loaded, or hang
        raise ValueError(f"--peer megatron: {error}") from None
    finally:
        close_all([process])
    if found["missing"]:
        raise ValueError(f"--peer megatron needs packages that cannot be used here: {_reasons(found)}")
    device = default_device().device_kind
    if device != found["device"]:
        raise ValueError(f"--peer megatron: torch runs on {found['device']}, JAX on {device}; let both use one device")
    # Parsed as jaxlib does.
    shared = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("0", "false", "False")
    if default_platform() == "gpu" and not shared:
        raise ValueError(
            "--peer megatron: torch needs part of the GPU's memory, most of which JAX takes when it starts; set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment"
        )


def _reasons(first: dict[str, Any]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in first["missing"].items())


@dataclass
class Megatron(Contestant):
    """Megatron-Core's GPT or expert layer.

    Args:
        name: name of the row.
        request: description of its model: `megatron_model` or `megatron_experts`.
        ranks: number of processes that run it, one for each GPU.
    """

    request: dict[str, Any] = field(kw_only=True)
    ranks: int = field(default=1, kw_only=True)
    _processes: list[MegatronProcess] = field(default_factory=list)
    _peak_bytes: int = 0
    _free_bytes: int | None = None

    def launch(self) -> None:
        """Start its processes, whose imports take longer than anything else they do before their first step."""
        self._processes = [MegatronProcess(rank, self.ranks) for rank in range(self.ranks)]

    def _begin(self) -> None:
        for first in receive_all(self._processes):
            if first["missing"]:
                raise RuntimeError(f"Megatron-Core: a rank cannot use packages: {_reasons(first)}")
        with socket.socket() as probe:  # only now: other programs may take a free port meanwhile
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ask(self.request | {"port": port})

    def _steps(self, arrays: Any, calls: int) -> float:
        return self._ask(calls)

    def _ask(self, request: Any) -> float:
        """Return the mean seconds of a step of the slowest rank."""
        for process in self._processes:
            process.send(request)
        answers = receive_all(self._processes)
        self._peak_bytes = max(answer["peak_bytes"] for answer in answers)
        self._free_bytes = min(answer["free_bytes"] for answer in answers)
        return max(answer["seconds"] for answer in answers)

    @property
    def memory(self) -> dict[str, float]:
        """GiB that torch had allocated at most on a GPU; unknown if it failed, since it may have needed more."""
        return {} if self.error is not None else {"peak_gib": round(self._peak_bytes / GIB, 4)}

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the driver has left on the fullest of its GPUs; None if it failed."""
        return None if self.error is not None else self._free_bytes

    def close(self) -> None:
        """End its processes."""
        close_all(self._processes)
        self._processes = []


def megatron_model(
    sizes: Sizes, recipe: Recipe | None, *, fp32_gradients: bool = False, tokens: np.ndarray | None = None
) -> dict[str, Any]:
    """Return the description of a GPT and its train step for `jax_te.bench.peers.megatron_core`.

    Args:
        sizes: sizes of the model, the batch and the mesh, whose axes ``data`` and ``fsdp`` are both Megatron-Core's
            data parallelism. Stages of its ``pipeline`` axis run Megatron-Core's 1F1B, each with one chunk of layers.
        recipe: recipe's name in `MEGATRON_RECIPES`, or None for bf16.
        fp32_gradients: whether several ranks, and microbatches, accumulate gradients in fp32; else in bf16.
        tokens: batch of every step, integers ``[b, s + 1]``. None: random tokens.

    Raises:
        ValueError: for a model that Megatron-Core does not have, see `check_same_form`.

    Source: ``megatron.core.transformer.TransformerConfig``.

    >>> from jax_te.config import TransformerConfig
    >>> config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2)
    >>> sizes = Sizes(config=config, vocabulary=64, batch=2, sequence=8)
    >>> megatron_model(sizes, DelayedScaling())["config"]["fp8_recipe"]
    'delayed'
    """
    config, axes = sizes.config, {} if sizes.mesh is None else dict(sizes.mesh.shape)
    check_same_form(config)
    activation, rope = _ACTIVATIONS[config.activation], sizes.positions == "rope"
    fields: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.kv_channels,
        "ffn_hidden_size": config.ffn_hidden_size,
        "normalization": config.normalization,
        "qk_layernorm": config.qk_layernorm,
        "gated_linear_unit": config.gated_linear_unit,
        "activation_func_clamp_value": config.activation_func_clamp_value,
        "glu_linear_offset": config.glu_linear_offset,
        "add_bias_linear": config.add_bias_linear,
        "add_qkv_bias": config.add_qkv_bias,
        "softmax_type": config.softmax_type,
        "window_size": config.window_size,
        "window_attn_skip_freq": config.window_attn_skip_freq,
        "mtp_num_layers": config.mtp_num_layers,
        "mtp_loss_scaling_factor": config.mtp_loss_scaling_factor,
        "mtp_use_repeated_layer": config.mtp_use_repeated_layer,
        "tensor_model_parallel_size": axes.get("tensor", 1),
        "pipeline_model_parallel_size": axes.get("pipeline", 1),
        "sequence_parallel": config.sequence_parallel,
        # All of its fusions except sums of gradients, which the program itself decides.
        "bias_activation_fusion": True,
        "bias_dropout_fusion": config.num_moe_experts is None or not config.add_bias_linear,  # else it refuses to run
        "cross_entropy_loss_fusion": True,
        "apply_rope_fusion": rope,
        "attention_softmax_in_fp32": False,
        **_recipe_fields(recipe),
    }
    if config.num_moe_experts is not None:
        fields |= _experts_fields(config.router_options(), config.moe_ffn_hidden_size)
        fields["moe_layer_freq"] = config.moe_layer_freq
        fields["moe_shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size
    if config.latent_attention is not None:
        fields |= _latent_fields(config.latent_attention)
    return {
        "config": fields,
        "activation": activation,
        "form": {
            "vocab_size": sizes.vocabulary,
            "position_embedding_type": sizes.positions,
            "share_embeddings_and_output_weights": sizes.tied,
        },
        "batch": sizes.batch // sizes.microbatches // (axes.get("data", 1) * axes.get("fsdp", 1)),
        "sequence": sizes.sequence,
        "microbatches": sizes.microbatches,
        # Without replicas it costs nothing, and with fsdp's shards of parameters it is the closest equivalent.
        "distributed_optimizer": sizes.distributed_optimizer or axes.get("data", 1) == 1,
        "fp32_gradients": fp32_gradients,
        "rows": None if tokens is None else tokens.tolist(),
    }


def check_same_form(config: TransformerConfig) -> None:
    """Raise ValueError for layers that `megatron_model` cannot describe to Megatron-Core."""
    if config.activation not in _ACTIVATIONS:
        raise ValueError(
            f"--peer megatron is for the activations {', '.join(_ACTIVATIONS)}, and the model's is {config.activation}"
        )
    default = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    found = [name for name in _NOT_DESCRIBED if getattr(config, name) != getattr(default, name)]
    if found:
        raise ValueError(f"--peer megatron has no layers with {', '.join(found)}; leave the peer out")


def megatron_experts(
    *,
    tokens: int,
    hidden_size: int,
    ffn_hidden_size: int,
    router: RouterOptions,
    recipe: Recipe | None,
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu",
    bias: bool = False,
) -> dict[str, Any]:
    """Return the description of an expert layer, forward and backward, for `jax_te.bench.peers.megatron_core`.

    It is dropless, with all that Megatron-Core fuses.

    Args:
        tokens: number of tokens.
        hidden_size, ffn_hidden_size: sizes of the hidden states, and of an expert's activation.
        router: number of experts, experts of a token, and the loss that balances them.
        recipe: recipe's name in `MEGATRON_RECIPES`, or None for bf16.
        activation: activation of the experts, with jax_te's default parameters.
        bias: whether router and experts have biases.

    Source: ``megatron.core.transformer.moe.moe_layer.MoELayer``.

    >>> router = RouterOptions(num_experts=8, aux_loss_coeff=1e-2)
    >>> layer = megatron_experts(tokens=64, hidden_size=32, ffn_hidden_size=16, router=router, recipe=None)
    >>> layer["config"]["num_moe_experts"]
    8
    """
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_attention_heads": 1,  # of a layer that is not built
        "ffn_hidden_size": ffn_hidden_size,
        "add_bias_linear": bias,
        "gated_linear_unit": True,
        **_experts_fields(router, ffn_hidden_size),
        "bias_activation_fusion": True,
        "gradient_accumulation_fusion": False,
        **_recipe_fields(recipe),
    }
    name = "silu"
    if activation == "clamped_swiglu":
        params, name = ActivationParams(), "quick_gelu"
        fields |= {"activation_func_clamp_value": params.limit, "glu_linear_offset": params.linear_offset}
    return {"config": fields, "activation": name, "tokens": tokens}


def _latent_fields(latent: LatentAttentionOptions) -> dict[str, Any]:
    """Return the fields of Megatron-Core's configuration of multi-latent attention.

    Its angles are YaRN's with Megatron-Core's defaults: with others it rotates by slower kernels.
    """
    sizes = dataclasses.asdict(latent)
    normalized = sizes.pop("latent_layernorm")
    return {"multi_latent_attention": True, "rope_type": "yarn", "qk_layernorm": normalized, **sizes}


def _experts_fields(router: RouterOptions, ffn_hidden_size: int | None) -> dict[str, Any]:
    """Return the fields of Megatron-Core's configuration of dropless experts, with all that it fuses."""
    return {
        "moe_ffn_hidden_size": ffn_hidden_size,
        "num_moe_experts": router.num_experts,
        "moe_router_topk": router.topk,
        "moe_router_score_function": router.score_function,
        "moe_router_pre_softmax": router.pre_softmax,
        "moe_router_topk_scaling_factor": router.topk_scaling_factor,
        "moe_router_num_groups": router.num_groups,
        "moe_router_group_topk": router.group_topk,
        "moe_router_load_balancing_type": router.load_balancing_type,
        "moe_aux_loss_coeff": router.aux_loss_coeff,
        "moe_z_loss_coeff": router.z_loss_coeff,
        "moe_router_enable_expert_bias": router.enable_expert_bias,
        "moe_expert_capacity_factor": router.expert_capacity_factor,
        "moe_router_dtype": router.dtype,
        "moe_router_force_biased": router.force_biased,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
    }


def _recipe_fields(recipe: Recipe | None) -> dict[str, Any]:
    """Return the fields of Megatron-Core's configuration that choose a recipe."""
    if recipe is None:
        return {}
    fields: dict[str, Any] = {
        "fp8": "hybrid" if recipe.fp8_format is Format.HYBRID else "e4m3",
        "fp8_recipe": MEGATRON_RECIPES[recipe.name],
    }
    if isinstance(recipe, DelayedScaling):
        names = ("margin", "amax_history_len", "amax_compute_algo")
        fields |= {f"fp8_{name}": getattr(recipe, name) for name in names}
    return fields
