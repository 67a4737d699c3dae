"""Traces, and times by kind of kernel."""

import json
from types import SimpleNamespace as Plain

import jax
import jax.numpy as jnp
import pytest

from jax_te.metrics import StepTrace, kernel_kind, kernel_times


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNN", "GEMM"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>", "GEMM"),
        ("gemm_fusion_dot_12", "GEMM"),
        ("dot.3", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("all-gather-start.1", "communication"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<...>", "norm"),
        ("void transformer_engine::detail::cast_transpose_fused_kernel<...>", "quantize, transpose"),
        ("loop_transpose_fusion_97", "quantize, transpose"),
        ("wrapped_convert.4", "quantize, transpose"),
        ("void transformer_engine::gated_act_kernel<...dswiglu...>", "activation"),
        ("MemcpyD2D", "copy"),
        ("wrapped_copy.1", "copy"),
        ("loop_subtract_fusion_3", "XLA fusions, other"),
        ("loop_add_convert_fusion", "XLA fusions, other"),
    ],
)
def test_kinds(name, kind):
    assert kernel_kind(name) == kind


def event(name, start, duration):
    return Plain(name=name, start_ns=start, duration_ns=duration)


def test_times_of_gpus_are_those_of_their_streams_a_step(tmp_path, monkeypatch):
    """The mean over the devices; other lines say the same again in XLA's words."""
    stream = Plain(name="Stream #13(Compute)", events=[event("nvjet_a", 0, 4e6), event("nvjet_a", 5e6, 4e6)])
    second = Plain(name="Stream #14(Memcpy)", events=[event("MemcpyD2D", 9e6, 1e6)])
    again = Plain(name="XLA Ops", events=[event("dot.1", 0, 8e6)])
    planes = [Plain(name=f"/device:GPU:{i}", lines=[stream, second, again]) for i in range(2)]
    planes.append(Plain(name="/host:CPU", lines=[Plain(name="tf_XLAEigen/1", events=[event("dot.1", 0, 8e6)])]))
    monkeypatch.setattr(jax.profiler, "ProfileData", Plain(from_file=lambda path: Plain(planes=planes)))
    (tmp_path / "host.xplane.pb").touch()
    times = kernel_times(tmp_path, steps=2)
    assert (times.device, times.span_ms) == ("GPU", 5.0)
    assert times.kinds == {"GEMM": 4.0, "copy": 0.5}
    kernels = [(kernel.name, kernel.ms, kernel.calls) for kernel in times.kernels]
    assert kernels == [("nvjet_a", 4.0, 1.0), ("MemcpyD2D", 0.5, 0.5)]
    lines = str(times).splitlines()
    assert lines[1].split() == ["GEMM", "4.000", "88.9%"]
    assert lines[3].split() == ["all", "kernels", "4.500"]


def test_a_trace_of_some_steps(tmp_path):
    @jax.jit
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ x), x)

    x = step(jnp.eye(64))
    trace, found = StepTrace(tmp_path / "profile", 2, 3), {}
    for number in range(1, 6):
        jax.block_until_ready(x)
        trace.before(number)
        x = jax.block_until_ready(step(x))
        found[number] = trace.after(number)
    times = found.pop(3)
    assert set(found.values()) == {None}
    assert times.device == "CPU"
    assert times.kinds["GEMM"] > 0
    assert sum(times.kinds.values()) <= 2 * times.span_ms  # at most two threads, and no loop around what it holds
    assert not [kernel.name for kernel in times.kernels if kernel.name.startswith("while")]
    written = json.loads((tmp_path / "profile" / "kernel_times.json").read_text())
    assert written["kinds"] == times.kinds
    assert list((tmp_path / "profile").rglob("*.trace.json.gz"))  # which Perfetto opens


def test_what_is_no_trace(tmp_path):
    with pytest.raises(ValueError, match="steps 5 to 3 are none"):
        StepTrace(tmp_path, 5, 3)
    with pytest.raises(ValueError, match=r"holds no trace \(\*\.xplane\.pb\)"):
        kernel_times(tmp_path)
    trace = StepTrace(tmp_path, 1, 2)
    trace.before(1)
    trace.close()  # the loop ended early
    assert trace.after(2) is None
