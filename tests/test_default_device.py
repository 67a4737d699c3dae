"""``jax.default_device``, as on a machine with a GPU, of which it chooses the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jax_te.cli import doctor
from jax_te.cli.memory import check_fits, score_bytes
from jax_te.cli.resolve import new_config
from jax_te.cli.run_facts import step_work
from jax_te.recipe import Float8CurrentScaling

CPU = jax.devices()[0]
GPU = SimpleNamespace(
    platform="gpu",
    device_kind="NVIDIA H100",
    compute_capability="9.0",
    client=SimpleNamespace(platform_version="CUDA"),
    memory_stats=lambda: {"bytes_limit": 2**10},
)


def fits(needed: int) -> bool:
    try:
        check_fits(needed, 1, "lower a size")
    except ValueError:
        return False
    return True


ASKED: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "a run's dtype": (lambda: new_config({"preset": "tiny"}).params_dtype, "bfloat16", "float32"),
    "memory of scores": (lambda: score_bytes(1, 2, 4), 0, 64),
    "memory that there is": (lambda: fits(2**11), False, True),
    "a run's peak": (lambda: step_work(new_config({"preset": "tiny"})).peak is None, False, True),
    "a recipe's hardware": (lambda: bool(Float8CurrentScaling().supports()), True, False),
    "jax-te doctor": (lambda: doctor.devices()["platform"].partition(",")[0], "gpu", "cpu"),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_default_device_decides_and_not_the_first_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, on_gpu, on_cpu = ASKED[name]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        patch.setattr(jax, "devices", lambda *_: [GPU])
        patch.setattr(jax, "local_devices", lambda *_, **__: [GPU])
        found = ask()
        with jax.default_device(CPU):
            chosen = ask()
    assert (found, chosen) == (on_gpu, on_cpu)
