"""``--peer megatron`` against a stand-in for torch, Transformer Engine and Megatron-Core, in a real process."""

import itertools
import json
import os
import select
import signal

import jax
import numpy as np
import pytest

from jax_te.bench import ExpertsCase, Settings, bench_experts, contestants, experts, megatron, train_steps
from jax_te.bench.megatron import MegatronProcess, megatron_model
from jax_te.bench.peers import megatron_core
from jax_te.bench.settings import Sizes
from jax_te.cli.bench import model as command
from jax_te.cli.main import main
from jax_te.cli.presets import PRESETS, Preset
from jax_te.config import RouterOptions, TransformerConfig
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format

# Everything else of it is an object that can be called and has every attribute: the path through it is what is tested.
ANYTHING = """
class Anything:
    def __call__(self, *args, **options):
        return self

    def __getattr__(self, name):
        return self

    def __getitem__(self, key):
        return self

    def __truediv__(self, number):
        return self
"""
STAND_IN = {
    "torch/__init__.py": ANYTHING
    + """
import os, time
print("torch says something on stdout")
bfloat16 = "bfloat16"
arange = Generator = Anything()
nn = type("nn", (), {"functional": type("functional", (), {"gelu": "gelu", "silu": "silu"})})

def randint(low, high, shape, **options):
    note(tokens=shape)
    return Anything()

def tensor(rows, **options):
    note(tokens=[len(rows), len(rows[0])], first=rows[0][:8])
    return Anything()

def randn(shape, **options):
    note(tokens=shape)
    return Anything()

def note(**fields):
    import json
    place = {"rank": int(os.environ["RANK"])}
    print(json.dumps(place | fields), file=open(os.environ["STAND_IN_LOG"], "a"))

class cuda:
    is_available = lambda: os.environ.get("STAND_IN") != "no GPU"
    get_device_name = lambda index: os.environ.get("STAND_IN_DEVICE", "cpu")
    set_device = lambda index: note(device=index)
    synchronize = lambda: None
    max_memory_allocated = lambda: 2**24
    mem_get_info = lambda: (int(os.environ.get("STAND_IN_FREE", 2**40)), 2**40)

class distributed:
    get_world_size = lambda: int(os.environ["WORLD_SIZE"])

    def init_process_group(backend):
        note(backend=backend, port=int(os.environ["MASTER_PORT"]))
""",
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": "",
    "transformer_engine/pytorch/optimizers.py": """
import os, time
import torch
steps = 0

class FusedAdam:
    def __init__(self, parameters, **options):
        torch.note(optimizer=options)

    def step(self):
        global steps
        steps += 1
        time.sleep(0.02)
        torch.note(step=steps, at=time.time())
        fails = os.environ.get("STAND_IN"), int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if fails == ("out of memory", True) and steps > 6:
            raise RuntimeError("CUDA out of memory.\\nTried to allocate 2 GiB")
        if fails == ("dies", True) and steps > 6:
            os._exit(77)
        if steps > 6 and os.environ.get("STAND_IN") == "out of memory":
            time.sleep(60)  # as in a collective that waits for the rank that failed

    def zero_grad(self, set_to_none=True):
        assert set_to_none
""",
    "megatron/core/distributed.py": """
import torch
from torch import Anything
finalize_model_grads = lambda models, tokens: torch.note(finalized=len(models))

class DistributedDataParallelConfig:
    def __init__(self, **fields):
        self.fields = fields

class DistributedDataParallel(Anything):
    def __init__(self, config, reduction, model):
        self.config = config
        torch.note(reduction=reduction.fields)

    def set_is_first_microbatch(self):
        torch.note(first=True)

    def no_sync(self):
        import contextlib
        torch.note(unreduced=True)
        return contextlib.nullcontext()
""",
    "megatron/core/optimizer.py": """
from transformer_engine.pytorch.optimizers import FusedAdam
OptimizerConfig = dict
get_megatron_optimizer = lambda config, models: FusedAdam(models, **config)
""",
    "megatron/core/__init__.py": "",
    "megatron/core/parallel_state.py": """
import os
import torch

def initialize_model_parallel(tensor, stages):
    global stage, last
    stage, last = int(os.environ["RANK"]) * stages // int(os.environ["WORLD_SIZE"]), stages - 1
    torch.note(groups=[tensor, stages])

is_pipeline_first_stage = lambda: stage == 0
is_pipeline_last_stage = lambda: stage == last
""",
    "megatron/core/pipeline_parallel.py": """
import torch

def get_forward_backward_func():
    def run(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size):
        torch.note(schedule=num_microbatches, sent=[micro_batch_size, seq_length])
        for _ in range(num_microbatches - 1):
            model.config.no_sync_func()
        output, average = forward_step_func(data_iterator, model)
        loss, figures = average(output)
        assert figures == {}
    return run
""",
    "megatron/core/tensor_parallel/__init__.py": "",
    "megatron/core/tensor_parallel/random.py": "model_parallel_cuda_manual_seed = print",
    "megatron/core/models/__init__.py": "",
    "megatron/core/models/gpt/__init__.py": "",
    "megatron/core/models/gpt/gpt_layer_specs.py": """
from torch import Anything
get_gpt_layer_with_transformer_engine_spec = lambda qk_layernorm: "te layers"
""",
    "megatron/core/fp8_utils.py": """
import contextlib
import torch

@contextlib.contextmanager
def get_fp8_context(config):
    torch.note(context=config.fields.get("fp8_recipe"))
    yield
""",
    "megatron/core/models/gpt/moe_module_specs.py": """
import time
import torch

class Experts(torch.Anything):
    def modules(self):
        return [self, *made]

    def cuda(self):
        return self

    def to(self, dtype):
        return self

    def zero_grad(self, set_to_none):
        assert set_to_none

    def __call__(self, x):
        time.sleep(0.02)
        torch.note(first=[module.is_first_microbatch for module in made])
        for module in made:
            module.is_first_microbatch = False
        return x, None

made = [type("Linear", (), {"is_first_microbatch": None})() for _ in range(2)]

def get_moe_module_spec(*, use_te, num_experts, moe_grouped_gemm):
    assert use_te and moe_grouped_gemm and num_experts == 4
    return lambda config, layer_number: Experts()
""",
    "megatron/core/fusions/__init__.py": "",
    "megatron/core/fusions/fused_bias_geglu.py": "def quick_gelu(x):\n    return x",
    "megatron/core/models/gpt/gpt_model.py": """
import torch

class GPTModel(torch.Anything):
    def __init__(self, config, **options):
        torch.note(config=config.fields, model=options)

    def set_is_first_microbatch(self):
        torch.note(first=True)
""",
    "megatron/core/transformer/__init__.py": "",
    "megatron/core/transformer/module.py": "def Float16Module(config, model):\n    return model",
    "megatron/core/transformer/transformer_config.py": """
import os

class TransformerConfig:
    num_moe_experts = mtp_num_layers = None

    def __init__(self, **fields):
        if os.environ.get("STAND_IN") == "no such form":
            raise ValueError("no such form")
        self.fields = {name: value for name, value in fields.items() if not callable(value)}
        self.__dict__.update(fields)
        if "num_moe_experts" in fields:
            import torch
            torch.note(config=self.fields)

class MLATransformerConfig(TransformerConfig):
    pass
""",
}
OPTIONS = ["--preset", "tiny", "--vocab-size", "64", "--rounds", "3", "--calls", "2", "--backend", "xla"]


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch):
    """The packages on the path of new processes; the file they write is returned as a function's list."""
    for name, text in STAND_IN.items():
        path = tmp_path / "path" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("STAND_IN", "")
    return lambda: [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {"num_layers": 1, "hidden_size": 64, "num_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 128}
    sizes |= {"seq_len": 32, "batch_size": 4}
    # In place of the presets' own forms: the command line knows their names alone.
    forms = {"tiny": {}, "gpt-125m": {"num_layers": 2}, "llama-1b": {"num_query_groups": 2}}
    for name, other in forms.items():
        base = PRESETS["gpt-125m" if name == "tiny" else name].values
        monkeypatch.setitem(PRESETS, name, Preset(summary="for this test", values=base | sizes | other))


@pytest.fixture
def processes(monkeypatch):
    """The processes that are started."""
    started, popen = [], megatron.subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(megatron.subprocess, "Popen", start)
    yield started
    assert started
    assert all(process.returncode is not None for process in started)


def bench(capsys, *argv):
    """Status of the command, its rows, and its errors."""
    status = main(["bench", "model", *OPTIONS, "--peer", "megatron", *argv])
    shown = capsys.readouterr()
    return status, [json.loads(line) for line in shown.out.splitlines() if line.startswith("{")], shown.err


@pytest.mark.slow
def test_both_libraries_step_on_the_text_of_data(capsys, stand_in, monkeypatch, tmp_path):
    (tmp_path / "text").write_text("0123456789" * 200)
    given = []
    run = train_steps.run_contestants

    def kept(contestants, arrays, *rest):
        given.append(np.asarray(arrays))
        return run(contestants, arrays, *rest)

    monkeypatch.setattr(train_steps, "run_contestants", kept)
    status, rows, _ = bench(capsys, "--recipes", "none", "--data", str(tmp_path / "text"), "--rounds", "1")
    assert (status, len(rows)) == (0, 2)
    [peer] = [line for line in stand_in() if "tokens" in line]
    [own] = given
    assert (list(own.shape), own.dtype) == (peer["tokens"], np.int32)
    assert own[0, :8].tolist() == peer["first"] == [*b"01234567"]
    assert len({tuple(row) for row in own}) > 1, "sequences from one place only"
    following = {int(a): int(b) for a, b in zip(b"0123456789", b"1234567890", strict=True)}
    assert all(following[int(a)] == int(b) for row in own for a, b in itertools.pairwise(row))


@pytest.mark.slow
def test_rows_and_turns(capsys, stand_in, processes, tmp_path):
    output = tmp_path / "rows.json"
    status, rows, _ = bench(capsys, "--recipes", "none", "--output", str(output))
    assert status == 0
    assert [row["name"] for row in rows] == ["none, Megatron-Core", "none, unrolled, recompute none"]
    peer, own = rows
    assert peer["ms"] >= 20.0  # the stand-in sleeps that long
    assert peer["tokens_s"] == pytest.approx(4 * 32 / peer["ms"] * 1e3, rel=1e-3)
    assert peer["peak_gib"] == 0.0156  # of GiB, four digits
    assert peer["speed_ratio"] == peer["memory_ratio"] == 1.0
    assert own["speed_ratio"] == pytest.approx(peer["ms"] / own["ms"], rel=0.01)
    assert own["memory_ratio"] == pytest.approx(own["peak_gib"] / 0.0156, abs=5e-4)  # three digits
    assert json.loads(output.read_text())["rows"] == rows

    found = stand_in()
    [made], [optimizer] = ([line for line in found if name in line] for name in ("model", "optimizer"))
    assert optimizer["optimizer"]["master_weights"]
    assert not any("reduction" in line for line in found)
    assert made["model"] == {
        "transformer_layer_spec": "te layers",
        "vocab_size": 64,
        "max_sequence_length": 32,
        "pre_process": True,
        "post_process": True,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
    }
    expected = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    expected |= {"bf16": True, "params_dtype": "bfloat16", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    assert expected.items() <= made["config"].items()
    assert "fp8" not in made["config"]
    assert {"groups": [1, 1], "rank": 0} in found
    # A whole round does not count, nor a step before each that does.
    assert len([line for line in found if "step" in line]) == megatron_core.WARM_UP + 2 + 3 * (1 + 2)
    # Each step quantizes its kernels.
    assert len([line for line in found if "first" in line]) == megatron_core.WARM_UP + 2 + 3 * (1 + 2)


@pytest.mark.slow
@pytest.mark.parametrize(("free", "apart"), [(2**40, False), (2**16, True)])
def test_a_peer_that_leaves_too_little_memory_is_ended_before_jax_te_begins(
    capsys, monkeypatch, processes, stand_in, free, apart
):
    """And measured as often: both keep their states, which a GPU may not hold at once."""
    ended = []

    def created(*args):
        ended.append([process.poll() is not None for process in processes])
        return create(*args)

    create = train_steps.create_bench_state
    monkeypatch.setattr(train_steps, "create_bench_state", created)
    monkeypatch.setenv("STAND_IN_FREE", str(free))
    status, rows, said = bench(capsys, "--recipes", "none")
    assert status == 0
    # The first process only says what is installed.
    assert ended == [[True, apart]]
    assert ("measured one after the other" in said) == apart
    assert rows[0]["ms"] >= 20.0
    assert rows[1]["speed_ratio"] == pytest.approx(rows[0]["ms"] / rows[1]["ms"], rel=0.01)
    assert rows[1]["memory_ratio"] > 0.0
    steps = [line["step"] for line in stand_in() if "step" in line]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_ranks_on_a_mesh(capsys, stand_in, processes):
    options = ["--mesh", "data=2,fsdp=2,tensor=2", "--sequence-parallel", "--microbatches", "2", "--batch-size", "16"]
    options += ["--distributed-optimizer"]
    status, rows, _ = bench(capsys, "--recipes", "none", *options)
    assert status == 0
    assert rows[0]["ms"] >= 20.0
    assert rows[0]["peak_gib"] == 0.0156
    found = stand_in()

    def of(name):
        return [line for line in found if name in line]

    assert sorted(line["rank"] for line in of("device")) == [*range(8)]
    assert all(line["device"] == line["rank"] for line in of("device"))
    assert len({line["port"] for line in of("port")}) == 1
    assert {tuple(line["groups"]) for line in of("groups")} == {(2, 1)}
    assert all(line["config"]["tensor_model_parallel_size"] == 2 for line in of("model"))
    assert all(line["config"]["sequence_parallel"] for line in of("model"))
    # 16 sequences in 2 microbatches over 4 ranks that hold replicas, and a label more than positions.
    assert {tuple(line["tokens"]) for line in of("tokens")} == {(2, 33)}
    assert len(of("reduction")) == 8
    assert all(line["reduction"]["use_distributed_optimizer"] for line in of("reduction"))
    assert all(line["reduction"]["overlap_grad_reduce"] for line in of("reduction"))
    assert all(line["reduction"]["grad_reduce_in_fp32"] for line in of("reduction"))
    steps = megatron_core.WARM_UP + 2 + 3 * (1 + 2)
    # Only the last microbatch of a step reduces gradients.
    assert len(of("finalized")) == len(of("unreduced")) == len(of("step")) == 8 * steps


@pytest.mark.slow
def test_stages_of_a_pipeline(capsys, stand_in, processes):
    options = [
        "--preset",
        "gpt-125m",
        "--mesh",
        "pipeline=2,data=2,tensor=2",
        "--microbatches",
        "4",
        "--batch-size",
        "16",
    ]
    status, rows, _ = bench(capsys, "--recipes", "none", *options)
    assert status == 0
    assert [row["ms"] >= 20.0 for row in rows] == [True, True]
    found = stand_in()

    def of(name):
        return {line["rank"]: line for line in found if name in line}

    assert {tuple(line["groups"]) for line in of("groups").values()} == {(2, 2)}
    assert {line["config"]["pipeline_model_parallel_size"] for line in of("config").values()} == {2}
    # Ranks of one stage are neighbours.
    assert [rank for rank, line in sorted(of("model").items()) if line["model"]["pre_process"]] == [0, 1, 2, 3]
    assert [rank for rank, line in sorted(of("model").items()) if line["model"]["post_process"]] == [4, 5, 6, 7]
    # 16 sequences in 4 microbatches on 2 replicas.
    assert {(line["schedule"], *line["sent"]) for line in of("schedule").values()} == {(4, 2, 32)}
    assert all(line["reduction"]["overlap_grad_reduce"] for line in of("reduction").values())


@pytest.mark.slow
def test_stages_without_replicas_have_nothing_to_overlap(capsys, stand_in):
    options = ["--preset", "gpt-125m", "--mesh", "pipeline=2", "--microbatches", "2"]
    status, _, _ = bench(capsys, "--recipes", "none", *options)
    assert status == 0
    assert [line["reduction"]["overlap_grad_reduce"] for line in stand_in() if "reduction" in line] == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_replicas_split_the_state_where_those_of_jax_te_do(capsys, stand_in, split):
    options = ["--distributed-optimizer", "--wgrad-dtype", "bfloat16"] if split else []
    status, _, _ = bench(capsys, "--recipes", "none", "--mesh", "data=2", *options)
    assert status == 0
    found = [line["reduction"] for line in stand_in() if "reduction" in line]
    assert [fields["use_distributed_optimizer"] for fields in found] == 2 * [split]
    assert [fields["overlap_param_gather"] for fields in found] == 2 * [split]
    assert [fields["grad_reduce_in_fp32"] for fields in found] == 2 * [not split]


@pytest.mark.slow
def test_microbatches_on_one_device_are_added_up_in_buffers(capsys, stand_in):
    status, rows, _ = bench(capsys, "--recipes", "none", "--microbatches", "2")
    assert status == 0
    assert rows[0]["ms"] >= 20.0
    [fields] = [line["reduction"] for line in stand_in() if "reduction" in line]
    assert fields["grad_reduce_in_fp32"]
    assert not fields["overlap_grad_reduce"]


@pytest.mark.slow
def test_a_rank_that_lacks_a_package(capsys, monkeypatch, processes):
    monkeypatch.setattr(command, "check_megatron", lambda: None)
    monkeypatch.setenv("STAND_IN", "no GPU")
    status, rows, _ = bench(capsys, "--recipes", "none", "--mesh", "tensor=2")
    assert status == 0
    assert rows[0]["error"] == "RuntimeError: Megatron-Core: a rank cannot use packages: torch: it finds no GPU"


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(capsys, monkeypatch, processes):
    """The others may wait for it in a collective: they do not answer."""
    monkeypatch.setenv("STAND_IN", "out of memory")
    monkeypatch.setattr(megatron, "PATIENCE_S", 2.0)
    status, rows, _ = bench(capsys, "--recipes", "none", "--mesh", "tensor=2")
    assert status == 0
    error = "RuntimeError: Megatron-Core: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"
    assert rows[0] == {"name": "none, Megatron-Core", "error": error}
    assert rows[1]["speed_ratio"] == 1.0
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 1]


@pytest.mark.slow
def test_a_model_of_llamas_form(capsys, stand_in, processes):
    status, rows, _ = bench(capsys, "--recipes", "none", "--preset", "llama-1b")
    assert status == 0
    assert rows[0]["ms"] >= 20.0
    [made] = [line for line in stand_in() if "model" in line]
    assert made["model"]["position_embedding_type"] == "rope"
    assert made["model"]["share_embeddings_and_output_weights"] is False
    expected = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "num_query_groups": 2}
    expected |= {"activation_func": "silu", "ffn_hidden_size": 128}
    assert expected.items() <= made["config"].items()


@pytest.mark.costly
def test_recipes_reach_it_and_others_are_beside_its_bf16(capsys, stand_in, monkeypatch, processes):
    def begin_not(_):
        raise RuntimeError("not compiled: this test is not about it")

    monkeypatch.setattr(contestants.CompiledStep, "_begin", begin_not)
    status, rows, _ = bench(capsys, "--recipes", "delayed", "nvfp4")
    assert status == 0
    assert [row["name"] for row in rows[::2]] == ["delayed, Megatron-Core", "none, Megatron-Core"]
    assert all(row["ms"] >= 20.0 for row in rows[::2])
    delayed, bf16 = (line["config"] for line in stand_in() if "config" in line)
    assert {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024}.items() <= delayed.items()
    assert "fp8" not in bf16


@pytest.mark.slow
def test_contestants_take_turns(capsys, stand_in, monkeypatch):
    """A round of the peer, one of jax_te, and again; neither steps in the other's time."""
    turns, send, receive = [], MegatronProcess.send, MegatronProcess.receive

    def sent(process, request):
        turns.append("model" if isinstance(request, dict) else request)
        return send(process, request)

    def received(process):
        answer = receive(process)
        turns.append("answer")
        return answer

    begin = jax.block_until_ready
    monkeypatch.setattr(MegatronProcess, "send", sent)
    monkeypatch.setattr(MegatronProcess, "receive", received)
    monkeypatch.setattr(jax, "block_until_ready", lambda value: (turns.append("jax"), begin(value))[1])
    status, _, _ = bench(capsys, "--recipes", "none")
    assert status == 0
    own = ["jax", "jax"]  # before it starts its clock, and before it stops it
    one, two = ([count, "answer"] for count in (1, 2))
    # The peer has its memory before jax_te's state is made; each then takes a round that does not count.
    assert turns == ["answer", "answer", "model", "answer", *own, *two, *(3 * [*one, *two, *own, *own])]


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        (None, {}),
        (Float8CurrentScaling(), {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
        (Float8CurrentScaling(fp8_format=Format.E4M3), {"fp8": "e4m3", "fp8_recipe": "tensorwise"}),
        (Float8BlockScaling(), {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
        (
            DelayedScaling(margin=1, amax_history_len=4, amax_compute_algo="most_recent"),
            {
                "fp8": "hybrid",
                "fp8_recipe": "delayed",
                "fp8_margin": 1,
                "fp8_amax_history_len": 4,
                "fp8_amax_compute_algo": "most_recent",
            },
        ),
    ],
)
def test_recipes_in_megatrons_words(recipe, fields):
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2)
    made = megatron_model(Sizes(config=config, vocabulary=64, batch=2, sequence=8), recipe)
    assert {name: value for name, value in made["config"].items() if name.startswith("fp8")} == fields
    assert made["config"]["ffn_hidden_size"] == 4 * 64
    assert {"activation": "gelu", "batch": 2, "sequence": 8, "microbatches": 1}.items() <= made.items()


def test_experts_in_megatrons_words():
    experts = {"num_moe_experts": 8, "moe_ffn_hidden_size": 32, "moe_layer_freq": 2, "moe_aux_loss_coeff": 0.01}
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=2, qk_layernorm=True, **experts)
    made = megatron_model(Sizes(config=config, vocabulary=64, batch=2, sequence=8), None)["config"]
    assert (experts | {"moe_router_topk": 2, "qk_layernorm": True}).items() <= made.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("out of memory", "RuntimeError: Megatron-Core: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"),
        ("dies", "RuntimeError: Megatron-Core's process ended with status 77; its output is on stderr"),
    ],
)
def test_a_peer_that_fails_is_a_row_and_jax_te_goes_on(capsys, monkeypatch, processes, kind, error):
    monkeypatch.setenv("STAND_IN", kind)
    status, rows, _ = bench(capsys, "--recipes", "none")
    assert status == 0
    assert rows[0] == {"name": "none, Megatron-Core", "error": error}
    assert rows[1]["speed_ratio"] == rows[1]["memory_ratio"] == 1.0


@pytest.mark.slow
def test_a_peer_that_cannot_be_built(capsys, monkeypatch, processes):
    monkeypatch.setenv("STAND_IN", "no such form")
    status, rows, _ = bench(capsys, "--recipes", "none")
    assert status == 0
    error = "RuntimeError: Megatron-Core: ValueError: no such form"
    assert rows[0] == {"name": "none, Megatron-Core", "error": error}


def remove(folder, name):
    os.rename(folder / "path" / name, folder / "path" / "gone")


def refused(capsys, *argv):
    status, rows, error = bench(capsys, *argv)
    assert (status, rows) == (2, [])
    return error


@pytest.mark.costly("transformer_engine/pytorch")
@pytest.mark.parametrize("name", ["torch", "megatron", "transformer_engine/pytorch"])
def test_what_is_missing_is_named(capsys, tmp_path, processes, name):
    remove(tmp_path, name)
    error = refused(capsys)
    assert "--peer megatron needs packages that cannot be used here: " in error
    dotted = {"megatron": "megatron.core"}.get(name, name.replace("/", "."))
    assert f"{dotted}: ModuleNotFoundError: No module named '{name.replace('/', '.')}'" in error


def test_a_package_that_ends_the_process(capsys, tmp_path):
    (tmp_path / "path" / "torch" / "__init__.py").write_text("import os; os._exit(3)")
    assert "--peer megatron: Megatron-Core's process ended with status 3" in refused(capsys)


@pytest.mark.parametrize(
    ("hangs", "status"),
    [
        ("import atexit; atexit.register(time.sleep, 60)", 0),
        ("import sys; sys.stdin = type('Stuck', (), {'readline': lambda self: time.sleep(60)})()", -signal.SIGKILL),
    ],
    ids=["when it is unloaded", "in a step"],
)
def test_a_process_that_does_not_end_by_itself(tmp_path, monkeypatch, processes, hangs, status):
    with (tmp_path / "path" / "torch" / "__init__.py").open("a") as file:
        file.write(f"\n{hangs}\n")
    monkeypatch.setattr(megatron, "PATIENCE_S", 2.0)
    process = MegatronProcess(0, 1)
    process.receive()
    megatron.close_all([process])
    assert processes[0].returncode == status


def test_a_rank_that_does_not_answer_is_named(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text("import os, time\nif os.environ['RANK'] == '0':\n    print('{}', flush=True)\ntime.sleep(60)")
    monkeypatch.setattr(megatron, "_PROGRAM", program)
    monkeypatch.setattr(megatron, "ANSWER_S", 0.6)
    monkeypatch.setattr(megatron, "PATIENCE_S", 0.0)
    ranks = [MegatronProcess(rank, 2) for rank in range(2)]
    try:
        select.select([ranks[0].process.stdout], [], [], 60.0)  # Python takes its time to start
        with pytest.raises(RuntimeError, match="no answer in 1 s from rank 1 of 2"):
            megatron.receive_all(ranks)
    finally:
        megatron.close_all(ranks)
    program.write_text("import time; time.sleep(60)")
    with pytest.raises(ValueError, match="--peer megatron: Megatron-Core: no answer in 1 s from rank 0 of 1"):
        megatron.check_megatron()


def test_torch_without_a_gpu_and_another_device(capsys, monkeypatch):
    monkeypatch.setenv("STAND_IN", "no GPU")
    assert "torch: it finds no GPU" in refused(capsys)
    monkeypatch.setenv("STAND_IN", "")
    monkeypatch.setenv("STAND_IN_DEVICE", "NVIDIA H200")
    assert "torch runs on NVIDIA H200, JAX on cpu; let both use one device" in refused(capsys)


def test_jax_must_leave_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    with pytest.raises(ValueError, match="set XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment"):
        megatron.check_megatron()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    megatron.check_megatron()


@pytest.mark.costly("argv1---peer megatron has the axes pipeline, data, fsdp and tensor")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mesh", "context=2"], "--peer megatron has the axes pipeline, data, fsdp and tensor; got --mesh context=2"),
        (["--mesh", "tensor=2,context=2"], "--peer megatron has the axes pipeline, data, fsdp and tensor"),
    ],
)
def test_other_meshes_are_refused_before_a_process_starts(capsys, monkeypatch, argv, message):
    monkeypatch.setattr(command, "check_megatron", lambda: pytest.fail("started"))
    assert message in refused(capsys, *argv)


EXPERTS = ["--batch-size", "2", "--seq-len", "16", "--hidden-size", "32", "--ffn-hidden-size", "48"]
EXPERTS += ["--num-experts", "4", "--moe-router-topk", "2", "--rounds", "2", "--calls", "1", "--backend", "xla"]


@pytest.mark.slow
def test_an_expert_layer_beside_megatrons(capsys, stand_in, processes):
    status = main(["bench", "layer", "--modules", "moe", *EXPERTS, "--recipes", "delayed", "--peer", "megatron"])
    shown = capsys.readouterr()
    rows = [json.loads(line) for line in shown.out.splitlines() if line.startswith("{")]
    assert status == 0, shown.err
    assert [row["name"] for row in rows] == ["Megatron-Core moe delayed", "jax_te moe delayed (xla)"]
    peer, own = rows
    assert peer["ms"] >= 20.0
    if "error" in own:  # of XLA, raised again so that conftest.py tells a CPU without fp16
        raise jax.errors.JaxRuntimeError(own["error"])
    assert own["speed_ratio"] == pytest.approx(peer["ms"] / own["ms"], 0.01)
    flops = 3 * 2 * (2 * 16 * 2) * 3 * 32 * 48
    assert own["tflops"] == pytest.approx(flops / own["ms"] / 1e9, 1e-2)
    # Its kernels in bf16 twice, as parameters and as gradients.
    assert own["peak_gib"] * 2**30 > 2 * 2 * 4 * 3 * 32 * 48
    found = stand_in()
    (config,) = (line["config"] for line in found if "config" in line)
    expected = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "hidden_size": 32}
    assert (expected | {"fp8_recipe": "delayed", "moe_aux_loss_coeff": 0.01}).items() <= config.items()
    assert [line["tokens"] for line in found if "tokens" in line] == 2 * [[32, 1, 32]]  # and the gradient
    steps = [line["first"] for line in found if "first" in line]
    assert len(steps) == megatron_core.WARM_UP + 1 + 2 * (1 + 1)
    assert all(step == [True, True] for step in steps)  # kernels are quantized in every step
    assert [line["context"] for line in found if "context" in line] == ["delayed"] * len(steps)


@pytest.mark.slow
def test_the_form_of_the_expert_layer_is_the_peers_too(capsys, stand_in, processes):
    form = ["--moe-bias", "--moe-activation", "clamped_swiglu", "--moe-router-force-biased", "0.5"]
    status = main(["bench", "layer", "--modules", "moe", *EXPERTS, *form, "--recipes", "none", "--peer", "megatron"])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert "error" not in shown.out
    (config,) = (line["config"] for line in stand_in() if "config" in line)
    expected = {"add_bias_linear": True, "moe_router_force_biased": 0.5}
    assert (expected | {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}).items() <= config.items()


def test_an_expert_layers_step_has_the_output(monkeypatch):
    """Gradients alone do not need forward's last GEMM, and the compiler would remove it from the measurement."""
    router = RouterOptions(num_experts=2, topk=1, pre_softmax=True)
    case = ExpertsCase(batch=1, sequence=8, hidden_size=16, ffn_hidden_size=32, router=router, recipe=None)
    lowered = []

    def run(contestants, arrays, *_):
        lowered.append(contestants[0].lower().out_info)
        return []

    monkeypatch.setattr(experts, "run_contestants", run)
    list(bench_experts([case], Settings(backend="xla", rounds=1, calls=1), peer=None))
    ((_, (y, _, dx)),) = lowered
    assert y.shape == dx.shape == (1, 8, 16)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--modules", "layernorm_mlp", "--peer", "megatron"], "--peer have no effect without moe in --modules"),
        (["--modules", "moe", "--mesh", "tensor=2"], "measured on one device"),
        (["--modules", "moe", "--moe-router-topk", "5"], "topk"),
    ],
)
def test_what_the_expert_layer_lacks_is_refused(capsys, argv, message):
    assert main(["bench", "layer", *EXPERTS, *argv]) == 2
    assert message in capsys.readouterr().err
