"""On every mesh TE's attention is one device's: lowered for a GPU without one, its custom calls stand alone, and TE is
not asked how it would split them.
"""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_te.config import ParallelConfig
from jax_te.ops import BackendChoice, ContextParallel, dot_product_attention, segments_from_cu_seqlens
from jax_te.ops.attention.context_parallel import checks
from jax_te.sharding import make_mesh, named_sharding

pytestmark = pytest.mark.te

AXES = ("batch", "sequence", "heads", None)
B, S, N, G, D = 2, 1024, 8, 4, 64


@pytest.fixture
def a_gpu_with_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.jax.cpp_extensions.attention as tex
    import transformer_engine_jax as library

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def get_fused_attn_backend(self, params: Any) -> Any:
            del params
            return library.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""

        def get_fused_attn_fwd_workspace_sizes(self, *sizes: Any) -> Any:
            del sizes
            return (128,), library.DType.kByte

        get_fused_attn_bwd_workspace_sizes = get_fused_attn_fwd_workspace_sizes

    def choose(op: str, *, unsharded: Any, **options: Any) -> BackendChoice:
        del options
        assert unsharded is None
        return BackendChoice(op, "te", "asked for")

    monkeypatch.setattr(tex, "transformer_engine_jax", Library())
    monkeypatch.setattr(tex, "get_all_device_compute_capability", lambda: [90])
    monkeypatch.setattr(checks, "explain_backend", choose)


def custom_calls(mode: Any, sizes: dict[str, int], context_parallel: ContextParallel, **arguments: Any) -> Counter[str]:
    """Of forward and backward."""
    mesh = make_mesh(ParallelConfig(**sizes), axis_type=mode)
    packed = arguments.pop("packed", False)
    with jax.set_mesh(mesh):

        def array(shape: tuple[int, ...], axes: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=named_sharding(axes, mesh))

        qkv: Any = tuple(array((B, S, heads, D), AXES) for heads in (N, G, G))
        if packed:
            qkv = (array((B, S, 3, N, D), (*AXES[:2], None, *AXES[2:])),)

        def both(qkv: Any, g: Any) -> Any:
            def run(*qkv: Any) -> Any:
                return dot_product_attention(qkv, out_axes=AXES, context_parallel=context_parallel, **arguments)

            out, vjp = jax.vjp(run, *qkv)
            return out, vjp(g)

        traced = jax.jit(both).trace(qkv, array((B, S, N, D), AXES))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return Counter(re.findall(r"custom_call @(te_fused_attn_\w+|\w*[Pp]artitioning)", text))


def times(count: int) -> dict[str, int]:
    return {"te_fused_attn_forward_ffi": count, "te_fused_attn_backward_ffi": count}


@pytest.mark.usefixtures("a_gpu_with_every_kernel")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_examples_and_heads(mode: str) -> None:
    for packed in (False, True):
        assert custom_calls(mode, {"data": 2, "tensor": 2}, ContextParallel(), packed=packed) == times(1)


WAYS = {  # of 4 ranks in zig-zag order: kernels of each direction
    "p2p": 1 + 2 * 3,  # its own keys; then those of a rank before it or behind it
    "all_gather": 2 * 4,  # an early and a late chunk, in the program of each rank
    "a2a": 1,
    "a2a+p2p": 1 + 2,
}


@pytest.mark.usefixtures("a_gpu_with_every_kernel")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("kind", list(WAYS))
def test_every_way(kind: str, mode: str) -> None:
    sizes = (2, 2) if kind == "a2a+p2p" else None
    context_parallel = ContextParallel(
        cp_comm_type=kind, hierarchical_context_parallel_sizes=sizes, cp_load_balanced=True
    )
    assert custom_calls(mode, {"context": 4}, context_parallel) == times(WAYS[kind])


PACKED = segments_from_cu_seqlens(jnp.array([[0, 300, 700, S], [0, 600, 900, 900]], jnp.int32))
OPTIONS: dict[str, dict[str, Any]] = {
    "packed": {"mask_type": "padding_causal", "segments": PACKED},
    "lengths": {"mask_type": "padding", "kv_lengths": jnp.array([S, 700], jnp.int32)},
    "learnable": {"softmax_type": "learnable", "softmax_offset": jnp.ones(N)},
    "window": {"window": (200, 0)},
}


@pytest.mark.usefixtures("a_gpu_with_every_kernel")
@pytest.mark.parametrize("option", list(OPTIONS))
@pytest.mark.parametrize("kind", ["all_gather", "a2a"])
def test_options(kind: str, option: str) -> None:
    context_parallel = ContextParallel(cp_comm_type=kind, cp_load_balanced=True)
    calls = custom_calls("auto", {"context": 2, "tensor": 2}, context_parallel, **OPTIONS[option])
    # Where only the devices know the lengths, one program serves all ranks.
    programs = 2 if option in ("learnable", "window") else 1
    assert calls == times({"all_gather": 2 * programs, "a2a": 1}[kind])
