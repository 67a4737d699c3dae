"""``--peer megatron`` against a stand-in for torch, Transformer Engine and Megatron-Core, in a real process."""

import json
import os
import signal

import jax
import pytest

from jax_te.bench import contestants, megatron
from jax_te.bench.megatron import MegatronProcess, megatron_model
from jax_te.bench.peers import megatron_gpt
from jax_te.cli import bench as command
from jax_te.cli.main import main
from jax_te.cli.presets import PRESETS, Preset
from jax_te.config import TransformerConfig
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
"""
STAND_IN = {
    "torch/__init__.py": ANYTHING
    + """
import os, time
print("torch says something on stdout")
bfloat16 = "bfloat16"
randint = arange = Anything()

class cuda:
    is_available = lambda: os.environ.get("STAND_IN") != "no GPU"
    get_device_name = lambda index: os.environ.get("STAND_IN_DEVICE", "cpu")
    set_device = lambda index: None
    synchronize = lambda: None
    max_memory_allocated = lambda: 2**24

class distributed:
    def init_process_group(backend, rank, world_size):
        assert (backend, rank, world_size) == ("nccl", 0, 1) and int(os.environ["MASTER_PORT"]) > 0
""",
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": "",
    "transformer_engine/pytorch/optimizers.py": """
import json, os, time
steps = 0

class FusedAdam:
    def __init__(self, parameters, **options):
        print(json.dumps({"optimizer": options}), file=open(os.environ["STAND_IN_LOG"], "a"))

    def step(self):
        global steps
        steps += 1
        time.sleep(0.02)
        print(json.dumps({"step": steps, "at": time.time()}), file=open(os.environ["STAND_IN_LOG"], "a"))
        if os.environ.get("STAND_IN") == "out of memory" and steps > 6:
            raise RuntimeError("CUDA out of memory.\\nTried to allocate 2 GiB")
        if os.environ.get("STAND_IN") == "dies" and steps > 6:
            os._exit(77)

    def zero_grad(self, set_to_none):
        assert set_to_none
""",
    "megatron/core/__init__.py": "",
    "megatron/core/parallel_state.py": "initialize_model_parallel = print",
    "megatron/core/tensor_parallel/__init__.py": "",
    "megatron/core/tensor_parallel/random.py": "model_parallel_cuda_manual_seed = print",
    "megatron/core/models/__init__.py": "",
    "megatron/core/models/gpt/__init__.py": "",
    "megatron/core/models/gpt/gpt_layer_specs.py": """
from torch import Anything
get_gpt_layer_with_transformer_engine_spec = lambda: "te layers"
""",
    "megatron/core/models/gpt/gpt_model.py": """
import json, os
from torch import Anything

class GPTModel(Anything):
    def __init__(self, config, **options):
        fields = {"config": config.fields, "model": options}
        print(json.dumps(fields), file=open(os.environ["STAND_IN_LOG"], "a"))
""",
    "megatron/core/transformer/__init__.py": "",
    "megatron/core/transformer/module.py": "def Float16Module(config, model):\n    return model",
    "megatron/core/transformer/transformer_config.py": """
import os

class TransformerConfig:
    def __init__(self, **fields):
        if os.environ.get("STAND_IN") == "no such form":
            raise ValueError("no such form")
        self.fields = fields
""",
}
OPTIONS = ["--model", "small", "--vocabulary", "64", "--rounds", "3", "--calls", "2", "--backend", "xla"]


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
    sizes = {"num_layers": 1, "hidden_size": 64, "num_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 128}
    values = PRESETS["gpt-125m"].values | sizes | {"seq_len": 32, "batch_size": 4}
    monkeypatch.setitem(PRESETS, "small", Preset(summary="for this test", values=values))


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
    status = main(["bench", *OPTIONS, "--peer", "megatron", *argv])
    shown = capsys.readouterr()
    return status, [json.loads(line) for line in shown.out.splitlines() if line.startswith("{")], shown.err


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

    made, optimizer, *steps = stand_in()
    assert optimizer["optimizer"]["master_weights"]
    assert made["model"] == {
        "transformer_layer_spec": "te layers",
        "vocab_size": 64,
        "max_sequence_length": 32,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
    }
    expected = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 128}
    expected |= {"bf16": True, "params_dtype": "bfloat16", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    assert expected.items() <= made["config"].items()
    assert "fp8" not in made["config"]
    assert len(steps) == megatron_gpt.WARM_UP + 1 + 3 * 2


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


def test_contestants_take_turns(capsys, stand_in, monkeypatch):
    """A round of the peer, one of jax_te, and again; neither steps in the other's time."""
    turns, ask = [], MegatronProcess.ask

    def noted(process, request):
        turns.append("model" if isinstance(request, dict) else request)
        return ask(process, request)

    begin = jax.block_until_ready
    monkeypatch.setattr(MegatronProcess, "ask", noted)
    monkeypatch.setattr(jax, "block_until_ready", lambda value: (turns.append("jax"), begin(value))[1])
    status, _, _ = bench(capsys, "--recipes", "none")
    assert status == 0
    own = ["jax", "jax"]  # before it starts its clock, and before it stops it
    assert turns == ["model", 1, *own, *(3 * [2, *own])]


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
    made = megatron_model(config, recipe, vocabulary=64, batch=2, sequence=8)
    assert {name: value for name, value in made["config"].items() if name.startswith("fp8")} == fields
    assert made["config"]["ffn_hidden_size"] == 4 * 64
    assert {"vocabulary": 64, "batch": 2, "sequence": 8}.items() <= made.items()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("out of memory", "RuntimeError: Megatron-Core: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"),
        ("dies", "RuntimeError: Megatron-Core's process ended with status 77; what it said is on stderr"),
    ],
)
def test_a_peer_that_fails_is_a_row_and_jax_te_goes_on(capsys, monkeypatch, processes, kind, error):
    monkeypatch.setenv("STAND_IN", kind)
    status, rows, _ = bench(capsys, "--recipes", "none")
    assert status == 0
    assert rows[0] == {"name": "none, Megatron-Core", "error": error}
    assert rows[1]["speed_ratio"] == rows[1]["memory_ratio"] == 1.0


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
    monkeypatch.setattr(megatron, "_PATIENCE_S", 2.0)
    MegatronProcess().close()
    assert processes[0].returncode == status


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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mesh", "tensor=2"], "--peer megatron is a GPT on one device, without microbatches"),
        (["--model", "tiny"], "--peer megatron is a GPT in GPT-2's form, and tiny is not"),
    ],
)
def test_other_models_are_refused_before_a_process_starts(capsys, monkeypatch, argv, message):
    monkeypatch.setattr(command, "check_megatron", lambda: pytest.fail("started"))
    assert message in refused(capsys, *argv)
