"""What is communicated for which logical axes, and why a call cannot run on each device by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_te.config import ParallelConfig
from jax_te.ops import quantize_kernel
from jax_te.ops.linear.plan import GemmRanks, gemm_ranks, norm_ranks
from jax_te.quantize import init_gemm_state, observe_quantization
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from jax_te.sharding import make_mesh

COLUMN = {"kernel_axes": ("fsdp", "ffn"), "out_axes": ("batch", "sequence", "ffn")}
ROW = {"kernel_axes": ("ffn_fsdp", None), "out_axes": ("batch", "sequence", "hidden")}
SPLIT = ("batch", "sequence_parallel", "hidden")
X, KERNEL = (8, 32, 64), (64, 64)
CURRENT = Float8CurrentScaling()


def plan(**arguments: Any) -> Any:
    options = {"x_axes": None, "recipe": None} | arguments
    kernel = options.pop("kernel", jnp.zeros(KERNEL))
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))):
        return gemm_ranks(options.pop("x_shape", X), kernel, **options)


def test_without_a_mesh_there_is_nothing_to_plan() -> None:
    assert gemm_ranks(X, jnp.zeros(KERNEL), x_axes=None, recipe=None, **COLUMN) is None


def test_column_parallel() -> None:
    ranks = plan(**COLUMN)
    assert (ranks.inner, ranks.x_gather, ranks.out_scatter) == ((), ((), ()), ((), ()))
    assert ranks.features == (("tensor",),)
    assert ranks.kernel_gather == (("fsdp",), ())
    split = plan(**COLUMN, x_axes=SPLIT)
    assert split.x_gather == ((), ("tensor",))


def test_row_parallel() -> None:
    ranks = plan(**ROW)
    assert (ranks.inner, ranks.out_scatter) == (("tensor",), ((), ()))
    assert ranks.kernel_gather == (("fsdp",), ())
    assert plan(**(ROW | {"kernel_axes": ("ffn", "fsdp")})).kernel_gather == ((), ("fsdp",))
    assert plan(**(ROW | {"out_axes": SPLIT}), x_axes=("batch", "sequence", "ffn")).out_scatter == ((), ("tensor",))
    assert isinstance(norm_ranks(plan(**COLUMN)), GemmRanks)
    assert "the norm's input is split along its features" in norm_ranks(ranks)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (COLUMN | {"out_axes": None}, "does not name the logical axes"),
        (COLUMN | {"x_shape": (6, 32, 64)}, r"the input (6, 32, 64) does not divide"),
        (COLUMN | {"kernel": jnp.zeros((64, 63))}, r"the kernel (64, 63) does not divide"),
        (COLUMN | {"kernel_axes": ("fsdp", None)}, "are split in ways that do not go together"),
        (COLUMN | {"x_axes": ("batch", "sequence", "ffn")}, "are split in ways that do not go together"),
        (COLUMN | {"recipe": NVFP4BlockScaling()}, "has scales of the whole tensor beside those of its blocks"),
        (COLUMN | {"recipe": Float8BlockScaling()}, "tokens in a row of one device, 32, is no multiple of the 128"),
        (COLUMN | {"recipe": MXFP8BlockScaling(), "x_shape": (8, 16, 64)}, "16, is no multiple of the 32 values"),
        (
            COLUMN | {"recipe": CURRENT, "kernel": quantize_kernel(jnp.zeros(KERNEL), recipe=CURRENT)},
            "its kernel was quantized as a whole",
        ),
    ],
)  # fmt: skip
def test_what_the_devices_cannot_do_by_themselves(arguments: dict[str, Any], reason: str) -> None:
    assert reason in plan(**arguments)


def test_states_and_observers() -> None:
    state = init_gemm_state(DelayedScaling())
    assert isinstance(plan(**COLUMN, recipe=DelayedScaling(), state=state), GemmRanks)
    parts = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
    assert "each part of the batch has scales of its own" in plan(**COLUMN, recipe=DelayedScaling(), state=parts)
    with observe_quantization():
        assert "are observed, which is done on whole arrays" in plan(**COLUMN, recipe=CURRENT)


def test_blocks_that_lie_on_one_device() -> None:
    big = {"x_shape": (8, 128, 256), "kernel": jnp.zeros((256, 256))}
    assert isinstance(plan(**COLUMN, **big, recipe=Float8BlockScaling()), GemmRanks)
