"""Collectives of programs: counted by mesh axis, as bytes by hand and in every form of XLA's text, and their time."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.models import GPTModel
from jax_te.sharding import (
    CollectiveCount,
    CommunicationReport,
    Network,
    communication_report,
    make_mesh,
    named_sharding,
)
from jax_te.sharding.communication import partitioned_text
from jax_te.training import abstract_train_state, make_train_step

B, S, H, F, V, N = 8, 16, 32, 64, 128, 4
KERNELS = (3 * H * H, H * H, H * F, F * H, H * V)  # query/key/value, projection, the MLP's two, head
PARAMETERS = sum(KERNELS) + V * H + 3 * H  # and embedding, three norms
SCALARS = 64
"""More bytes than the scalars of a step have: loss, norm of the gradient, whether parts of it are finite."""
SEQUENCE = {"sequence_parallel": True, "tensor_model_parallel_size": 2}
MESH = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))


def lowered(fields: dict[str, Any] | None = None, dtype: Any = jnp.float32, **sizes: int) -> Any:
    """The train step of a one-layer GPT without biases, on the mesh in use."""
    form: dict[str, Any] = {"add_bias_linear": False, "normalization": "RMSNorm", "params_dtype": dtype}
    shape = {"num_layers": 1, "hidden_size": H, "ffn_hidden_size": F, "num_attention_heads": N}
    config, tx = TransformerConfig(**shape, **form, **fields or {}), optax.sgd(0.1)

    def build(rngs: Any) -> GPTModel:
        options: dict[str, Any] = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
        return GPTModel(config, vocab_size=V, max_sequence_length=S, **options, rngs=rngs)

    step = make_train_step(lambda model, tokens, key: model.loss(tokens, tokens), tx)
    return step.lower(abstract_train_state(build, tx), jax.ShapeDtypeStruct((B, S), jnp.int32))


def counts(report: CommunicationReport) -> dict[tuple[str, str], tuple[int, int]]:
    return {("*".join(row.axes), row.kind): (row.count, row.bytes) for row in report.rows}


@pytest.mark.costly
def test_sequence_parallelism_gathers_and_scatters_twice_a_layer_and_direction() -> None:
    """Gathered: what attention, MLP and head read, and in backward the gradients of what attention, MLP and embedding
    gave. Scattered: what attention and MLP gave, and the gradients of what attention, MLP and head read.
    """
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=2))):
        text = partitioned_text(lowered(SEQUENCE))
        found = counts(communication_report(text))
    activation = 4 * B * S * H
    assert found["tensor", "all-gather"] == (6, 6 * activation)
    assert found["tensor", "reduce-scatter"] == (5, 5 * activation)
    # The embedding whole, the cross-entropy's maximum, sum and label, and the gradients of the norms.
    assert found.pop(("tensor", "all-reduce"))[1] - (activation + 3 * 4 * B * S + 3 * 4 * H) in range(SCALARS)
    assert len(found) == 2
    # No slice of a sum, which XLA would make a reduce-scatter of on a GPU alone.
    sums = [line.split(" = ")[0].split()[-1] for line in text.splitlines() if " all-reduce(" in line]
    assert sums
    assert not [line for line in text.splitlines() if "slice(" in line and any(f"({name}," in line for name in sums)]


@pytest.mark.costly
def test_tensor_parallelism_sums_twice_a_layer_and_direction_in_the_dtype_of_a_gpu() -> None:
    """The CPU's own program moves bf16 as fp32."""
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=2))):
        (found,) = counts(communication_report(lowered(dtype=jnp.bfloat16))).items()
    assert found[0] == ("tensor", "all-reduce")
    assert found[1][1] - 6 * 2 * B * S * H - 3 * 4 * B * S in range(SCALARS)


@pytest.mark.costly
def test_fsdp_gathers_kernels_in_each_direction_and_scatters_their_gradients() -> None:
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2))):
        found = counts(communication_report(lowered()))
    assert found["fsdp", "all-gather"] == (11, 4 * (2 * sum(KERNELS) + V * H))
    assert found["fsdp", "reduce-scatter"] == (6, 4 * (sum(KERNELS) + V * H))
    # The gradients of norms.
    assert found.pop(("fsdp", "all-reduce"))[1] - 4 * 3 * H in range(SCALARS)
    assert len(found) == 2


@pytest.mark.costly
def test_data_parallelism_sums_each_gradient_once() -> None:
    with jax.set_mesh(make_mesh(ParallelConfig(data=4))):
        (row,) = communication_report(lowered()).rows
    assert (row.axes, row.kind, row.devices) == (("data",), "all-reduce", 4)
    assert row.bytes - 4 * PARAMETERS in range(SCALARS)
    assert row.sent == 2 * row.bytes * 3 / 4


@pytest.mark.slow
def test_a_ring_of_context_ranks_passes_keys_and_values_on() -> None:
    """In forward once, in backward once, and their gradients twice, back to where they began."""
    with jax.set_mesh(make_mesh(ParallelConfig(context=2))):
        found = counts(communication_report(lowered()))
    assert found["context", "collective-permute"] == (4, 4 * 2 * 4 * B * (S // 2) * H)
    assert found.pop(("context", "all-reduce"))[1] - 4 * PARAMETERS in range(SCALARS)
    assert len(found) == 1


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_a_scan_counts_as_often_as_it_runs(mode: Any) -> None:
    mesh = make_mesh(ParallelConfig(data=2), axis_type=mode)

    def body(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return total + jax.lax.psum(x * total, "data"), None

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.scan(body, x[0], x)[0]

    inside = jax.shard_map(run, mesh=mesh, in_specs=jax.P(None, "data"), out_specs=jax.P("data"))
    x = jax.ShapeDtypeStruct((7, 8), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "data")))
    program = jax.jit(inside).lower(x)
    (row,), (compiled,) = (communication_report(each, mesh).rows for each in (program, program.compile()))
    assert (
        row
        == compiled
        == CollectiveCount(axes=("data",), kind="all-reduce", devices=2, count=7, launches=7, bytes=7 * 4 * 4)
    )


def test_a_program_of_the_cache_on_disk_is_counted_like_any_other() -> None:
    mesh = make_mesh(ParallelConfig(data=2))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=named_sharding(("batch",), mesh))
    program = jax.jit(jnp.sum).lower(x)
    program.compile()
    assert [communication_report(program, mesh).rows[0].bytes for _ in range(2)] == [4, 4]
    assert jax.config.jax_enable_compilation_cache


def of_text(instructions: str, mesh: AbstractMesh = MESH) -> dict[tuple[str, str], tuple[int, int]]:
    return counts(communication_report(program_text(instructions), mesh))


def program_text(instructions: str, others: str = "") -> str:
    return f"HloModule made\n{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{instructions}\n}}\n"


P = "  %p = f32[8]{0} parameter(0)\n"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "tensor"),
        ("{{0,6},{1,7}}", "data*fsdp"),
        ("{}", "data*fsdp*tensor"),
        ("[4,2]<=[8]", "tensor"),
        ("[4,2]<=[2,2,2]T(0,2,1)", "fsdp"),
        ("[2,4]<=[2,4]T(0,1)", "fsdp*tensor"),
        ("[4,2]<=[2,4]T(1,0), x=1", "data"),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','tensor'}", "data*tensor"),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", "fsdp"),
        ("mesh['a'=8] {'a':(1)2}", "data"),
        ("mesh['a'=8] {'a':(2)2}", "fsdp"),
        ("mesh['a'=8] {'a':(4)2}", "tensor"),
    ],
)
def test_groups_are_mesh_axes(groups: str, axes: str) -> None:
    """In each form in which XLA writes them."""
    found = of_text(f"{P}  ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add")
    assert found == {(axes, "all-reduce"): (1, 32)}


def test_permutations_go_along_the_axes_in_which_source_and_target_differ() -> None:
    pairs = "{{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}"
    found = of_text(f"{P}  ROOT %r = f32[8]{{0}} collective-permute(%p), channel_id=1, source_target_pairs={pairs}")
    assert found == {("fsdp", "collective-permute"): (1, 32)}


def test_bytes_are_those_of_the_whole_array_in_its_dtype() -> None:
    lines = [
        "%t = (bf16[4,2]{1,0}, f8e4m3fn[3]{0}, pred[]) parameter(1)",
        "%a = bf16[4,2]{1,0} get-tuple-element(%t), index=0",
        "%g = bf16[8,2]{1,0} all-gather(%a), replica_groups=[4,2]<=[8], dimensions={0}",
        "%s = f32[4]{0} reduce-scatter(%p), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add",
        "%m = (f8e4m3fn[3]{0}, /*index=1*/pred[]) all-to-all(%t#1, %t#2), replica_groups=[4,2]<=[8]",
        "%one = f32[8]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add",
    ]
    found = of_text(P + "\n".join(f"  {line}" for line in lines))
    assert found == {
        ("tensor", "all-gather"): (1, 2 * 2 * 8),
        ("tensor", "reduce-scatter"): (1, 32),
        ("tensor", "all-to-all"): (1, 4),
    }


@pytest.mark.parametrize(
    ("size", "also", "kind"),
    [(4, "", "reduce-scatter"), (4, "  %more = f32[8]{0} negate(%sum)\n", "all-reduce"), (2, "", "all-reduce")],
)
def test_a_sum_of_which_each_device_uses_its_slice_is_scattered(size: int, also: str, kind: str) -> None:
    lines = [
        "  %sum = f32[8]{0} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add",
        "  %same = f32[8]{0} copy(%sum)",
        f"{also}  ROOT %mine = f32[{size}]{{0}} dynamic-slice(%same, %start), dynamic_slice_sizes={{{size}}}",
    ]
    assert of_text(P + "\n".join(lines)) == {("tensor", kind): (1, 32)}


def test_asynchronous_collectives_count_once() -> None:
    """As GPUs have them: with a start and an end of their own, or around a computation."""
    wrapped = "%wrapped (q: f32[8]) -> f32[4] {\n  %q = f32[8]{0} parameter(0)\n  ROOT %rs = f32[4]{0} "
    wrapped += "reduce-scatter(%q), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add\n}\n"
    lines = [
        "%start = (f32[8]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=[4,2]<=[8], dimensions={0}",
        "%done = f32[16]{0} all-gather-done(%start)",
        "%begin = ((f32[8]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%wrapped",
        "%end = f32[4]{0} async-done(%begin), calls=%wrapped",
    ]
    text = program_text(P + "\n".join(f"  {line}" for line in lines), wrapped)
    found = counts(communication_report(text, MESH))
    assert found == {("tensor", "all-gather"): (1, 64), ("tensor", "reduce-scatter"): (1, 32)}


def test_independent_collectives_are_launched_together_up_to_a_size() -> None:
    def launches(size: int, *operands: str) -> int:
        lines = [f"  %p = f32[{size}]{{0}} parameter(0)"]
        for index, operand in enumerate(operands):
            lines.append(f"  %r{index} = f32[{size}]{{0}} all-reduce(%{operand}), replica_groups={{}}, to_apply=%add")
        return communication_report(program_text("\n".join(lines)), MESH).rows[0].launches

    assert launches(8, "p", "p", "p") == 1
    assert launches(8, "p", "r0", "r1") == 3
    assert launches(8, "p", "p", "r0") == 2
    assert launches(4 * 2**20, "p", "p", "p") == 2  # 16 MiB each
    assert launches(16 * 2**20, "p", "p", "p") == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%r = f32[8]{0} all-reduce(%p), replica_groups={{0,8}}", "has device 8, and the mesh 8 devices"),
        ("%r = f32[8]{0} collective-broadcast(%p), replica_groups={{0,1}}", "collective-broadcast %r is not counted"),
        ("%r = f32[8]{0} all-reduce(%p), replica_groups=unheard", "cannot read the groups"),
    ],
)
def test_what_cannot_be_counted_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_text(f"{P}  {line}")


def test_a_loop_that_does_not_say_how_often_it_runs_is_refused_if_it_communicates() -> None:
    body = "%body (q: f32[8]) -> f32[8] {\n  %q = f32[8]{0} parameter(0)\n"
    test = "%test (q: f32[8]) -> pred[] {\n  %q = f32[8]{0} parameter(0)\n  ROOT %c = pred[] custom-call(%q)\n}\n"
    loop = P + "  ROOT %w = f32[8]{0} while(%p), condition=%test, body=%body"
    sums = body + "  ROOT %r = f32[8]{0} all-reduce(%q), replica_groups={}, to_apply=%add\n}\n"
    with pytest.raises(ValueError, match="the loop %w has collectives, and does not say how often it runs"):
        communication_report(program_text(loop, sums + test), MESH)
    known = loop + ', backend_config={"known_trip_count":{"n":"5"}}'
    assert communication_report(program_text(known, sums + test), MESH).rows[0].count == 5
    limits = (
        "  %q = f32[8]{0} parameter(0)\n  %n = s32[] constant(6)\n  %i = s32[] constant(0)\n  %m = s32[] copy(%n)\n"
    )
    counted = "%test (q: f32[8]) -> pred[] {\n" + limits + "  ROOT %c = pred[] compare(%i, %m), direction=LT\n}\n"
    assert communication_report(program_text(loop, sums + counted), MESH).rows[0].count == 6
    alone = body + "  ROOT %r = f32[8]{0} negate(%q)\n}\n"
    assert communication_report(program_text(loop, alone + test), MESH).rows == ()


def test_a_program_needs_a_mesh_and_a_text() -> None:
    with pytest.raises(ValueError, match="give mesh="):
        communication_report(program_text(P))
    with pytest.raises(ValueError, match="not an HLO program"):
        communication_report("nothing", MESH)


def row(kind: str, *axes: str, devices: int, size: int = 800) -> CollectiveCount:
    return CollectiveCount(axes=axes, kind=kind, devices=devices, count=1, launches=2, bytes=size)


def test_times_follow_from_the_links_that_a_group_has() -> None:
    network = Network(devices_per_host=4, intra_host=100.0, inter_host=10.0, latency=1.0)
    shape = {"data": 4, "tensor": 4}
    assert network.seconds(row("all-reduce", "tensor", devices=4), shape) == 2 + 2 * 800 * 3 / 4 / 100
    assert network.seconds(row("all-gather", "data", devices=4), shape) == 2 + 800 * 3 / 4 / 10
    # Four links of each host side by side.
    assert network.seconds(row("reduce-scatter", "data", "tensor", devices=16), shape) == 2 + 800 * 15 / 16 / 40
    assert network.seconds(row("collective-permute", "data", "tensor", devices=16), shape) == 2 + 800 / 10
    # Of 16 parts, 12 go to other hosts.
    assert network.seconds(row("all-to-all", "data", "tensor", devices=16), shape) == 2 + 800 * 12 / 16 / 10
    pairs = Network(devices_per_host=8, intra_host=100.0, inter_host=10.0, latency=0.0)
    assert pairs.seconds(row("all-gather", "data", devices=4), shape) == 800 * 3 / 4 / 20


def test_a_report_adds_up() -> None:
    rows = (row("all-gather", "data", devices=4), row("all-reduce", "tensor", devices=4))
    report = CommunicationReport(rows=rows, mesh_shape={"data": 4, "tensor": 4}, network=Network())
    assert report.sent == 600 + 1200
    assert report.seconds == sum(report.row_seconds()) > 0
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["data", "tensor", "sum"]
    assert len({len(line) for line in lines}) <= 2  # columns line up; a last one may be empty


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=1", "unknown field 'speed' in 'speed=1'; allowed: devices_per_host, intra_host"),
        ("latency=1,latency=2", "'latency' is given twice in 'latency=1,latency=2'"),
        ("intra_host=fast", "intra_host needs a number, got 'fast'"),
        ("intra_host=0", "intra_host must be a number > 0"),
        ("intra_host=nan", "intra_host must be a finite number, got nan"),
        ("latency=-1", "latency must be a number >= 0"),
        ("devices_per_host=0", "devices_per_host must be a number > 0"),
    ],
)
def test_networks_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network.parse(text)


class Clock:
    """Time in which a program's all-gathers take 1 us each and send 8 GB/s: on a shared CPU real times say little."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.program, self.traced = 0.0, 0.0, False
        self.gather, self.wait = lax.all_gather, jax.block_until_ready
        monkeypatch.setattr(lax, "all_gather", self.all_gather)
        monkeypatch.setattr(jax, "block_until_ready", self.block_until_ready)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def all_gather(self, x: jax.Array, axis: str, **options: Any) -> jax.Array:
        if self.traced:  # a new program, since the one before has run
            self.program, self.traced = 0.0, False
        out = self.gather(x, axis, **options)
        self.program += 1e-6 + (out.nbytes - x.nbytes) / 8e9
        return out

    def block_until_ready(self, x: Any) -> Any:
        self.traced = True
        self.now += self.program
        return self.wait(x)


def test_a_measured_network_gives_the_times_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    found = Network.measured(mib=(1 / 16, 1 / 4))
    assert found.devices_per_host == len(jax.devices())
    # Differences of sums of times that are some 1e-4 s, in fp64.
    assert found.intra_host == pytest.approx(8e9, rel=1e-9)
    assert found.latency == pytest.approx(1e-6, rel=1e-6)
    assert found.inter_host == Network().inter_host


def test_networks_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="two devices or more, and there is 1"):
        Network.measured(jax.devices()[:1])
    with pytest.raises(ValueError, match="mib must be two sizes > 0, the smaller first"):
        Network.measured(mib=(32.0, 8.0))
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    with pytest.raises(RuntimeError, match="measure while nothing else runs"):
        Network.measured(mib=(1 / 16, 1 / 4))
