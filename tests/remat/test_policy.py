"""Recomputation of any function: what is kept, that nothing else changes, and what cannot be asked for."""

from __future__ import annotations

import functools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.sharding import PartitionSpec as P

from jax_te._validation import log_once
from jax_te.remat import POLICIES, RecomputePolicy, recompute_policy, remat
from jax_te.sharding import constrain
from tests.support.meshes import use_mesh
from tests.support.numerics import assert_bitwise, assert_close, draw, quick_jit, with_vjp, without_type_checker

W, X = draw("w", (8, 8), scale=0.3), draw("x", (4, 8, 8))


def block(w: jax.Array, x: jax.Array) -> jax.Array:
    """Projections and functions of their results, with the names that this package gives to their like."""
    pre = checkpoint_name(x @ w, "gemm")
    z = checkpoint_name(checkpoint_name(jnp.sin(pre), "activation").astype(jnp.float16), "quantized")
    return jnp.sin(checkpoint_name(z.astype(jnp.float32) @ w, "context"))


def kept(capsys: Any, policy: Any) -> tuple[list[str], int]:
    """Names of the arrays kept beside the arguments, and how many others are."""
    print_saved_residuals(lambda w, x: remat(block, w, x, policy=policy).sum(), W, X)
    lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    names = [match[1] for line in lines if (match := re.search(r"named '(\w+)'", line))]
    return sorted(names), len(lines) - len(names)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ("full", []),
        ("save_gemms", ["context", "gemm"]),
        ("save_quantized", ["context", "gemm", "quantized"]),
        (RecomputePolicy(save=("gemm",)), ["gemm"]),
        (RecomputePolicy(save_all_but=("gemm",)), ["context", "quantized"]),
        (RecomputePolicy(save_all_but=()), ["context", "gemm", "quantized"]),
    ],
    ids=str,
)
def test_only_what_a_policy_names_is_kept(policy: Any, names: list[str], capsys: Any) -> None:
    """``activation`` is read by nothing in backward: its quantized form is."""
    assert kept(capsys, policy) == (names, 0)


def test_saving_all_but_some_names_the_jax_way_saves_them_unnamed(capsys: Any) -> None:
    """Why `RecomputePolicy` has no such field: what a name was given to is kept, or what backward makes of it."""
    policy = jax.checkpoint_policies.save_anything_except_these_names("gemm", "context", "quantized")
    print_saved_residuals(lambda w, x: jax.checkpoint(block, policy=policy)(w, x).sum(), W, X)
    assert len([line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]) == 3


@pytest.mark.parametrize("save", [(), ("quantized",)])
def test_what_is_offloaded_is_kept_in_the_hosts_memory(save: tuple[str, ...], capsys: Any) -> None:
    policy = RecomputePolicy(offload=("gemm",), save=save)
    print_saved_residuals(lambda w, x: remat(block, w, x, policy=policy).sum(), W, X)
    lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    assert sorted("<host>" in line for line in lines) == [False] * len(save) + [True]


def test_a_name_that_is_nearly_one_of_the_packages_is_warned_of(caplog: Any) -> None:
    log_once.cache_clear()
    RecomputePolicy(save=("gemm", "mine"), offload=("context",))
    assert caplog.messages == []
    RecomputePolicy(save=("gemms",))
    RecomputePolicy(save_all_but=("quantised",))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert ["'gemms'" in caplog.messages[0], "most alike: quantized" in caplog.messages[1]] == [True, True]


@pytest.mark.parametrize("policy", POLICIES)
def test_results_and_gradients_are_those_without_it(policy: str) -> None:
    g = draw("g", (4, 8, 8))
    plain = quick_jit(functools.partial(with_vjp, block))((W, X), g)
    again = quick_jit(functools.partial(with_vjp, functools.partial(remat, block, policy=policy)))((W, X), g)
    jax.tree.map(assert_bitwise, again, plain)


def test_arguments_of_every_kind() -> None:
    """Pytrees, modules, strings, None, keywords; the module may be the function itself."""

    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.full((), 3.0))

        def __call__(self, x: Any, kind: str, *, more: Any = None, power: int = 1) -> Any:
            assert kind == "plain"
            return self.scale[...] * x["x"] ** power + (0.0 if more is None else more)

    def run(module: Any, x: Any) -> Any:
        direct = remat(module, {"x": x}, "plain", power=2)
        inner = remat(lambda module, x: module(x, "plain", more=np.ones(())), module, {"x": x})
        return direct + inner

    (value, gradients) = jax.value_and_grad(run, argnums=(0, 1))(Scaled(), jnp.full((), 2.0))
    assert value == 3 * 4 + 3 * 2 + 1
    assert gradients[0].scale[...] == 4 + 2
    assert gradients[1] == 3 * 2 * 2 + 3


def test_memory_of_a_compiled_gradient() -> None:
    """Eight blocks in a loop: a gradient needs room for what is kept of each. (Outside of loops some versions of XLA
    for CPUs take what forward computed in place of computing it again.)
    """

    def peak(policy: str) -> int:
        def loss(w: Any, x: Any) -> Any:
            def body(x: Any, _: None) -> tuple[Any, None]:
                return remat(block, w, x, policy=policy), None

            return jax.lax.scan(body, x, length=8)[0].sum()

        shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((1024, 64), jnp.float32)
        return jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    full, gemms, none = map(peak, ("full", "save_gemms", "none"))
    array = 1024 * 64 * 4
    assert full + 8 * 1.8 * array < gemms < none  # two arrays more of each block, less what need not be made again
    assert full < 0.6 * none


# --- kept split over the tensor ranks


def split(w: jax.Array, x: jax.Array) -> jax.Array:
    return remat(block_of_x, x, w, distribute_saved_activations=True)


def block_of_x(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.sin(x @ w) @ w)


def test_the_input_is_kept_in_parts_and_gathered_in_backward_alone() -> None:
    with use_mesh("auto"):
        w, x = jax.device_put(W, P()), jax.device_put(X, P(("data", "fsdp")))
        forward = jax.jit(split).lower(w, x).compile().as_text()
        gradient = jax.jit(jax.grad(lambda w, x: split(w, x).sum())).lower(w, x).compile().as_text()
        saved = jax.tree.leaves(jax.jit(lambda w, x: jax.vjp(split, w, x)[1])(w, x))
    assert "all-gather" not in forward
    assert len(re.findall(r" all-gather(?:-start)?\(", gradient)) == 1
    parts = {leaf.shape: leaf.addressable_shards[0].data.shape for leaf in saved}
    assert parts == {X.shape: (1, 4, 8), W.shape: W.shape}  # the batch over 4 ranks, the sequence over 2


def test_gradients_of_a_kept_part_on_every_mesh(mesh_mode: str) -> None:
    def run(function: Any, w: jax.Array, x: jax.Array, g: jax.Array) -> Any:
        x, g = (constrain(a, ("batch", "sequence", "hidden")) for a in (x, g))
        return with_vjp(function, (w, x), g)

    g = draw("g", X.shape)
    found, expected = (quick_jit(functools.partial(run, f))(W, X, g) for f in (split, lambda w, x: block_of_x(x, w)))
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(a, e, 2.0**-20, what=mesh_mode)


def test_a_function_may_close_over_what_is_differentiated() -> None:
    def loss(w: jax.Array, x: jax.Array) -> Any:
        return remat(lambda x: block_of_x(x, w), x, distribute_saved_activations=True).sum()

    plain = jax.grad(lambda w, x: block_of_x(x, w).sum(), argnums=(0, 1))(W, X)
    found = jax.grad(loss, argnums=(0, 1))(W, X)
    for a, e in zip(found, plain, strict=True):
        assert_close(a, e, 2.0**-20)


# --- errors


def test_what_a_policy_cannot_be() -> None:
    with pytest.raises(ValueError, match="unknown recompute policy 'all'; allowed: none, full, save_gemms"):
        recompute_policy("all")
    for other in ({"save": ("a",)}, {"offload": ("a",)}):
        with pytest.raises(ValueError, match="save_all_but goes without save and offload"):
            RecomputePolicy(save_all_but=("b",), **other)
    with pytest.raises(ValueError, match="a cannot be both saved and offloaded"):
        RecomputePolicy(save=("a", "b"), offload=("a",))
    with without_type_checker():
        with pytest.raises(TypeError, match="save must be a tuple of names, got 'gemm'"):
            RecomputePolicy(save="gemm")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="policy must be a RecomputePolicy or text or None, got 1"):
            recompute_policy(1)  # type: ignore[arg-type]


def test_offloading_without_host_memory_says_so() -> None:
    class Device:
        device_kind = "toaster"

        def addressable_memories(self) -> list[Any]:
            return [mock.Mock(kind="device")]

    with (
        mock.patch("jax.local_devices", return_value=[Device()]),
        pytest.raises(ValueError, match="toaster has device"),
    ):
        remat(block, W, X, policy="offload_gemms")


def test_what_cannot_be_distributed_says_so() -> None:
    run = functools.partial(remat, block_of_x, distribute_saved_activations=True)
    with pytest.raises(ValueError, match="the policy is 'save_gemms'"):
        run(X, W, policy="save_gemms")
    with pytest.raises(ValueError, match="first array argument"):
        remat(lambda: 1, distribute_saved_activations=True)
    with pytest.raises(ValueError, match=r"\[b, s, ...\]; got shape \(8,\)"):
        run(X[0, 0], W)
    with use_mesh("auto"):
        with pytest.raises(ValueError, match=r"sequence length 7 of \(4, 7, 8\) does not divide over mesh axes"):
            run(X[:, :7], W)
        inside = jax.shard_map(run, in_specs=(P(), P()), out_specs=P())
        with pytest.raises(ValueError, match="inside shard_map over the tensor axis"):
            inside(X, W)
