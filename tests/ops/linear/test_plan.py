"""What is communicated for which logical axes, and why a call cannot run on each device by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_te.config import ParallelConfig
from jax_te.ops import LinearOptions, quantize_kernel
from jax_te.ops.linear.plan import Plan, linear_plan, row_plan
from jax_te.quantize import init_gemm_state, observe_quantization, precision_of
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from jax_te.sharding import make_mesh

COLUMN = {"kernel_axes": ("fsdp", "ffn"), "out_axes": ("batch", "sequence", "ffn")}
ROW = {"kernel_axes": ("ffn_fsdp", None), "out_axes": ("batch", "sequence", "hidden")}
SPLIT = ("batch", "sequence_parallel", "hidden")
X, KERNEL = (8, 32, 64), (64, 64)
CURRENT, BLOCK = Float8CurrentScaling(), Float8BlockScaling()


def plan(*, x_shape: Any = X, kernel: Any = None, recipe: Any = None, state: Any = None, **axes: Any) -> Plan:
    kernel = jnp.zeros(KERNEL) if kernel is None else kernel
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))):
        return linear_plan(x_shape, kernel, LinearOptions(**axes), precision_of(recipe), state)


def test_without_a_mesh_there_is_nothing_to_plan() -> None:
    assert linear_plan(X, jnp.zeros(KERNEL), LinearOptions(**COLUMN)) == Plan()


def test_on_a_mesh_of_one_device_the_compiler_is_told() -> None:
    with jax.set_mesh(make_mesh(ParallelConfig())):
        found = linear_plan(X, jnp.zeros(KERNEL), LinearOptions(**COLUMN))
    assert (found.mesh, found.reason, found.constrained) == (None, None, True)


def test_column_parallel() -> None:
    found = plan(**COLUMN)
    assert (found.contracting_axes, found.x_all_gather, found.out_reduce_scatter) == ((), (), ())
    assert (found.row_axes, found.feature_axes) == (("data", "fsdp"), ("tensor",))
    assert found.kernel_all_gather == (("fsdp",), ())
    assert plan(**COLUMN, x_axes=SPLIT).x_all_gather == ((), ("tensor",))


def test_row_parallel() -> None:
    found = plan(**ROW)
    assert (found.contracting_axes, found.out_reduce_scatter) == (("tensor",), ())
    assert found.kernel_all_gather == (("fsdp",), ())
    assert plan(**(ROW | {"kernel_axes": ("ffn", "fsdp")})).kernel_all_gather == ((), ("fsdp",))
    split = plan(**(ROW | {"out_axes": SPLIT}), x_axes=("batch", "sequence", "ffn"))
    assert split.out_reduce_scatter == ((), ("tensor",))


def test_rows() -> None:
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))):
        assert row_plan(X, SPLIT, SPLIT, whole=1).x_row_axes == ("data", "fsdp", "tensor")
        refused = ((X, None, "out_axes"), (X, (None, None, "ffn"), "rows"), ((6, 32, 64), SPLIT, "divide"))
        for shape, axes, word in refused:
            assert word in (row_plan(shape, axes, axes, whole=1).reason or "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (COLUMN | {"out_axes": None}, "does not name the logical axes"),
        (COLUMN | {"x_shape": (6, 32, 64)}, r"the input (6, 32, 64) does not divide"),
        (COLUMN | {"kernel": jnp.zeros((64, 63))}, r"the kernel (64, 63) does not divide"),
        (COLUMN | {"kernel_axes": ("fsdp", None)}, "are split in ways that do not go together"),
        (COLUMN | {"x_axes": ("batch", "sequence", "ffn")}, "are split in ways that do not go together"),
        (COLUMN | {"recipe": NVFP4BlockScaling()}, "has scales of the whole tensor in addition to those of its blocks"),
        (COLUMN | {"recipe": Float8BlockScaling()}, "tokens in a row of one device, 32, is not a multiple of the 128"),
        (COLUMN | {"recipe": MXFP8BlockScaling(), "x_shape": (8, 16, 64)}, "16, is not a multiple of the 32 values"),
        (
            COLUMN | {"recipe": CURRENT, "kernel": quantize_kernel(jnp.zeros(KERNEL), recipe=CURRENT)},
            "its kernel was quantized as a whole",
        ),
        (
            COLUMN | {"recipe": BLOCK, "kernel": quantize_kernel(jnp.zeros(KERNEL), recipe=BLOCK)},
            "its kernel was quantized as a whole",
        ),
        (
            COLUMN | {"recipe": BLOCK, "kernel": quantize_kernel(jnp.zeros(KERNEL), recipe=BLOCK, portable=True)},
            "its kernel was quantized in blocks as a whole",
        ),
    ],
)  # fmt: skip
def test_what_the_devices_cannot_do_by_themselves(arguments: dict[str, Any], reason: str) -> None:
    found = plan(**arguments)
    assert found.mesh is None
    assert found.constrained
    assert reason in (found.reason or "")


def test_states_and_observers() -> None:
    state = init_gemm_state(DelayedScaling())
    assert plan(**COLUMN, recipe=DelayedScaling(), state=state).mesh is not None
    parts = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
    found = plan(**COLUMN, recipe=DelayedScaling(), state=parts)
    assert "tp_only_amax_red" in (found.reason or "")
    with observe_quantization():
        assert "observed" in (plan(**COLUMN, recipe=CURRENT).reason or "")


def test_blocks_that_lie_on_one_device() -> None:
    big = {"x_shape": (8, 128, 256), "kernel": jnp.zeros((256, 256))}
    assert plan(**COLUMN, **big, recipe=Float8BlockScaling()).mesh is not None
