"""Traces of some steps of a run, and the time that its kernels take, by kind."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from jax_te._processes import is_first
from jax_te._validation import checked
from jax_te.metrics.files import KERNEL_TIMES_FILE

# The first that fits counts: names of XLA's fusions hold several words, and those of CUDA kernels their namespaces.
_KINDS = {
    "communication": r"nccl|nvshmem|all[-_]?(reduce|gather)|all[-_]to[-_]all|reduce[-_]scatter|collective|ppermute",
    "GEMM": r"nvjet|gemm|cublas|cutlass|xmma|matmul|(^|_)dot\b|(^|_)dot[._]|^ynn|^convolution",
    "attention": r"fmha|flash|attn|attention|cudnn|sdpa",
    "norm": r"normalization|layer_?norm|rms_?norm|(^|_)ln_(fwd|bwd)",
    "quantize, transpose": r"quant|cast_|_cast|amax|transpose|hadamard|^(wrapped_|loop_)?convert(_fusion)?[._\d]*$",
    "activation": r"gelu|silu|swiglu|relu|activation|(^|_|::)d?act_",
    "copy": r"memcpy|memset|^copy|_copy",
}
OTHER = "XLA fusions, other"
# Loops and calls of XLA on a CPU, whose time is that of what runs in them.
_CONTAINER = re.compile(r"(while|call|conditional)([._]\d+)*$")
# Names of XLA's operations; the other events of its CPU threads are those of the runtime.
_OPERATION = re.compile(r"[a-z][\w.-]*$")


@checked
def kernel_kind(name: str) -> str:
    """Return the kind of a kernel, or of an operation of XLA, by its name.

    >>> kernel_kind("nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNN"), kernel_kind("ncclDevKernel_AllGather_RING_LL")
    ('GEMM', 'communication')
    >>> kernel_kind("loop_add_fusion_12")
    'XLA fusions, other'
    """
    return next((kind for kind, words in _KINDS.items() if re.search(words, name, re.IGNORECASE)), OTHER)


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """One kernel of a step.

    Args:
        name: name of the kernel.
        kind: see `kernel_kind`.
        ms: milliseconds in a step, on one device.
        calls: number of calls in a step, on one device.
    """

    name: str
    kind: str
    ms: float
    calls: float


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Times of kernels, from the trace of some steps. ``str()`` is a table of kinds, and of the longest kernels.

    Args:
        device: device that ran them, ``"GPU"`` or ``"CPU"``.
        kernels: the longest first. Of several GPUs the mean; of a CPU the sum over its threads, of all its devices.
        span_ms: milliseconds of a step from the first kernel's start to the last one's end.

    >>> kernel = KernelTime(name="nvjet", kind="GEMM", ms=3.0, calls=2.0)
    >>> KernelTimes(device="GPU", kernels=(kernel,), span_ms=4.0).kinds
    {'GEMM': 3.0}
    """

    device: str
    kernels: tuple[KernelTime, ...]
    span_ms: float

    @property
    def kinds(self) -> dict[str, float]:
        """Milliseconds of a step by kind, the longest first."""
        sums: dict[str, float] = {}
        for kernel in self.kernels:
            sums[kernel.kind] = sums.get(kernel.kind, 0.0) + kernel.ms
        return dict(sorted(sums.items(), key=lambda entry: -entry[1]))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        total = sum(self.kinds.values())
        width = max(map(len, (*self.kinds, "all kernels")))
        yield f"{'kind of kernel':<{width}}  {'ms a step':>10}  {'share':>6}"
        for kind, ms in self.kinds.items():
            yield f"{kind:<{width}}  {ms:>10.3f}  {ms / total:>6.1%}"
        yield f"{'all kernels':<{width}}  {total:>10.3f}"
        yield f"{'span':<{width}}  {self.span_ms:>10.3f}"
        yield ""
        for kernel in self.kernels[:10]:
            yield f"{kernel.ms:>10.3f} ms  x{kernel.calls:<6g} {kernel.kind}: {kernel.name[:80]}"


@checked
def kernel_times(folder: str | os.PathLike[str], *, steps: int = 1) -> KernelTimes:
    """Return the times of the kernels in a trace.

    Args:
        folder: folder that ``jax.profiler.trace`` or `StepTrace` wrote; the newest trace in it counts.
        steps: number of traced steps: times are per step.

    Raises:
        ValueError: for a folder without a trace, and a trace without kernels.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with jax.profiler.trace(folder):
    ...         _ = jax.jit(lambda x: x @ x)(jnp.ones((64, 64))).block_until_ready()
    ...     kernel_times(folder).kinds["GEMM"] > 0
    True
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"{folder} holds no trace (*.xplane.pb); write one with jax.profiler.trace or StepTrace")
    # Other hosts' files of the same trace lie beside it, and their devices do the same.
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    gpus = [plane for plane in planes if "gpu:" in plane.name.lower()]
    found: dict[str, list[float]] = {}
    begin, end = float("inf"), 0.0
    for plane in gpus or [plane for plane in planes if "host:cpu" in plane.name.lower()]:
        # The other lines of a GPU repeat its streams in XLA's words; those of a CPU are Python's threads.
        for line in plane.lines:
            if not (re.search("stream", line.name, re.IGNORECASE) if gpus else line.name.startswith("tf_XLA")):
                continue
            for event in line.events:
                if not gpus and (_CONTAINER.match(event.name) or not _OPERATION.match(event.name)):
                    continue
                found.setdefault(event.name, []).append(event.duration_ns)
                begin, end = min(begin, event.start_ns), max(end, event.start_ns + event.duration_ns)
    if not found:
        raise ValueError(f"{files[-1]} holds no kernels: no computation ended while it was traced")
    share = steps * max(len(gpus), 1)
    kernels = [
        KernelTime(name=name, kind=kernel_kind(name), ms=sum(times) / share / 1e6, calls=len(times) / share)
        for name, times in found.items()
    ]
    return KernelTimes(
        device="GPU" if gpus else "CPU",
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.ms)),
        span_ms=(end - begin) / steps / 1e6,
    )


@checked
class StepTrace:
    """Traces some steps of a loop, for TensorBoard and Perfetto, and sums up the times of their kernels.

    Call `before` and `after` at every step; they start and stop the trace. The device's work must be done by then
    (``jax.block_until_ready``). ``kernel_times.json`` in the folder has what `after` returns.

    Args:
        folder: folder of the trace; made if missing.
        first: the first step that is traced. The first step of a process compiles, which hides the others.
        last: the last one.

    Raises:
        ValueError: if the last is before the first.

    >>> StepTrace("run/profile", 5, 3)
    Traceback (most recent call last):
    ValueError: steps 5 to 3 are none; the last step to trace must not be before the first
    """

    def __init__(self, folder: str | os.PathLike[str], first: int, last: int):
        if last < first:
            raise ValueError(f"steps {first} to {last} are none; the last step to trace must not be before the first")
        self.folder, self.first, self.last = Path(folder), first, last
        self._begun: int | None = None

    def before(self, step: int) -> None:
        """Begin the trace if it begins with this step."""
        if step == self.first and is_first():
            jax.profiler.start_trace(str(self.folder))
            self._begun = step

    def after(self, step: int) -> KernelTimes | None:
        """Return the times of the kernels, and write them to the folder, if the trace ends with this step."""
        if self._begun is None or step != self.last:
            return None
        self.close()
        times = kernel_times(self.folder, steps=self.last - self.first + 1)
        kinds = {"kinds": times.kinds, **asdict(times)}
        (self.folder / KERNEL_TIMES_FILE).write_text(json.dumps(kinds, indent=1) + "\n", encoding="utf-8")
        return times

    def close(self) -> None:
        """End a trace that has begun; without effect otherwise."""
        if self._begun is not None:
            self._begun = None
            jax.profiler.stop_trace()
