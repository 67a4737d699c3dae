"""Attention on meshes with a context axis, beside the same on one device."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_te.ops import ContextParallel, dot_product_attention, reorder_to_zigzag, undo_zigzag
from jax_te.sharding import named_sharding
from tests.support.numerics import TOLERANCE, assert_close, draw, quick_jit

AXES = ("batch", "sequence", "heads", None)
B, S, N, D = 2, 16, 8, 4
LEARNED = ("bias", "softmax_offset")


def context_mesh(mode: str = "auto", *, data: int = 1, context: int = 2, tensor: int = 1) -> Mesh:
    """Return a mesh with the axes of `jax_te.sharding.make_mesh`."""
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[mode]
    sizes = (data, 1, context, tensor)
    devices = jax.devices()[: data * context * tensor]
    return jax.make_mesh(sizes, ("data", "fsdp", "context", "tensor"), axis_types=(kind,) * 4, devices=devices)


def way(kind: str, context: int, *, zigzag: bool = False) -> ContextParallel:
    """Return a kind of exchange; the hierarchical one exchanges heads in pairs."""
    sizes = (2, context // 2) if kind == "a2a+p2p" else None
    return ContextParallel(cp_comm_type=kind, hierarchical_context_parallel_sizes=sizes, cp_load_balanced=zigzag)


def operands(groups: int = N, *, skv: int = S, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    shapes = {"q": (B, S, N, D), "k": (B, skv, groups, D), "v": (B, skv, groups, D)}
    return tuple(draw(name, shape, dtype) for name, shape in shapes.items())


def attend(qkv: Any, g: Any, arguments: dict[str, Any], **others: Any) -> tuple[Any, Any, Any, Any]:
    """Return the output, max logits or None, gradients of queries, keys and values, and of learned arrays."""
    learned = {name: value for name, value in arguments.items() if name in LEARNED}
    rest = {name: value for name, value in arguments.items() if name not in LEARNED}

    def run(qkv: Any, learned: Any) -> Any:
        out = dot_product_attention(qkv, **rest, **learned, **others)
        return out if isinstance(out, tuple) else (out, None)

    def both(qkv: Any, learned: Any, g: Any) -> Any:
        out, vjp, logits = jax.vjp(run, qkv, learned, has_aux=True)
        return out, logits, *vjp(g)

    return quick_jit(both)(qkv, learned, g)


def host(x: Any) -> jax.Array:
    """Return a copy on one device."""
    return jnp.asarray(np.asarray(x))


def barriers_hold() -> bool:
    """Whether XLA keeps apart what is computed again in backward; on CPU, older ones do not."""
    text = jax.jit(lambda x: jnp.sin(x) * jnp.sin(jax.lax.optimization_barrier(x))).lower(1.0).compile().as_text()
    return len(re.findall(r" sine\(", text)) == 2


def compare(
    mesh: Mesh, context_parallel: ContextParallel, arguments: dict[str, Any], qkv: Any = None, **others: Any
) -> None:
    """Assert that a call on ``mesh``, in its order of the sequence, gives one device's numbers in natural order."""
    qkv = operands(4) if qkv is None else qkv
    g, ranks = draw("g", (B, S, qkv[0].shape[-2], D)), mesh.shape["context"]
    zigzag = context_parallel.cp_load_balanced

    def there(x: Any, *axes: int) -> Any:
        for axis in axes if zigzag else ():
            x = reorder_to_zigzag(x, ranks, axis) if x.shape[axis] > 1 else x
        return x

    def back(x: Any, *axes: int) -> Any:
        x = host(x)
        for axis in axes if zigzag else ():
            x = undo_zigzag(x, ranks, axis) if x.shape[axis] > 1 else x
        return x

    expected = attend(qkv, g, arguments)
    split = {name: there(x, 2, 3) if name in ("bias", "mask") and x.ndim == 4 else x for name, x in arguments.items()}
    with jax.set_mesh(mesh):
        axes = AXES if len(qkv) == 3 else (*AXES[:2], "components", *AXES[2:])
        placed = tuple(jax.device_put(there(x, 1), named_sharding(axes, mesh)) for x in qkv)
        g = jax.device_put(there(g, 1), named_sharding(AXES, mesh))
        out, logits, d_qkv, learned = attend(
            placed, g, split, out_axes=AXES, context_parallel=context_parallel, **others
        )
        assert out.sharding.is_equivalent_to(named_sharding(AXES, mesh), 4)
    tolerance = 2 * TOLERANCE["float32"]
    assert_close(back(out, 1), expected[0], tolerance, what="out")
    for name, got, wanted in zip("qkv", d_qkv, expected[2], strict=False):
        assert_close(back(got, 1), wanted, 2 * tolerance, what=f"d{name}")
    for name, wanted in expected[3].items():
        axes = (2, 3) if wanted.ndim == 4 else ()
        assert_close(back(learned[name], *axes), wanted, 4 * tolerance, what=f"d{name}")
    assert (logits is None) == (expected[1] is None)
    if logits is not None:
        assert_close(host(logits), expected[1], tolerance, what="max logits")
