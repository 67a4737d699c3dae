"""``jax-te bench``, at sizes that say nothing about speed: its rows, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jax_te.bench import Settings, plain_flax, train_steps
from jax_te.bench import contestants as bench_contestants
from jax_te.bench.compiling import compile_and_time
from jax_te.cli.bench import flax as bench_flax
from jax_te.cli.bench import layer, preset_config
from jax_te.cli.bench import model as bench_model
from jax_te.cli.bench import rows as bench_rows
from jax_te.cli.bench.options import MODULES
from jax_te.cli.main import main
from jax_te.cli.presets import PRESETS, Preset
from jax_te.recipe import DelayedScaling
from tests.support.runs import assert_refused

WITHOUT_HEADS = ["--batch-size", "4", "--seq-len", "32", "--rounds", "2", "--calls", "1", "--backend", "xla"]
QUICK = [*WITHOUT_HEADS, "--num-heads", "4"]
WIDTHS = ["--hidden-size", "64", "--ffn-hidden-size", "128"]


def rows(capsys, what, *argv, sizes=QUICK):
    assert main(["bench", what, *sizes, *argv]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_what_is_timed_is_compiled_though_a_cache_holds_it(tmp_path):
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        x = np.ones((8, 8), np.float32)

        def lower():
            def timed(x):
                return x @ x

            return jax.jit(timed).lower(x)

        compiled, seconds = compile_and_time(lower)
        assert seconds > 0.0
        np.testing.assert_array_equal(compiled(x), np.full((8, 8), 8.0))
        assert not list(tmp_path.glob("jit_timed*"))
        lower().compile()
        assert list(tmp_path.glob("jit_timed*"))
    finally:
        reset_cache()
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_file_of_rows_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    def measure():
        pytest.fail("measured")
        yield

    (tmp_path / "file").write_text("")
    for output in (tmp_path, tmp_path / "file" / "rows.json"):
        with pytest.raises(OSError, match=str(tmp_path)):
            bench_rows.show_rows(measure(), str(output))


def test_a_file_of_rows_gets_its_folder_and_appears_when_all_are_measured(tmp_path):
    output = tmp_path / "new" / "rows.json"

    def measure():
        assert not output.exists()
        yield {"name": "one", "ms": 1.0}

    assert bench_rows.show_rows(measure(), str(output)) == 0
    assert json.loads(output.read_text())["rows"] == [{"name": "one", "ms": 1.0}]


@pytest.mark.slow
def test_modules_and_recipes(capsys, tmp_path):
    modules = ["layernorm_mlp", "layernorm_linear"]
    options = ["--modules", *modules, "--recipes", "none", "delayed", "--output", str(tmp_path / "rows.json")]
    found = rows(capsys, "layer", *WIDTHS, *options, sizes=WITHOUT_HEADS)
    assert [row["name"] for row in found] == [
        f"jax_te {module} {recipe} (xla)" for module in modules for recipe in ("none", "delayed")
    ]
    # Nothing to be compared with, and a rate that a CPU's digits are left of.
    assert all(row["ms"] > 0.0 and row["tflops"] > 0.0 for row in found)
    assert not any({"collectives", "speed_ratio", "memory_ratio"} & row.keys() for row in found)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == found


@pytest.mark.slow
def test_layers_of_every_module_are_profiled(capsys, tmp_path):
    sizes = ["--batch-size", "1", "--seq-len", "8", *WIDTHS, "--rounds", "1", "--calls", "1", "--backend", "xla"]
    argv = ["--modules", "layernorm_linear", "moe", "--num-experts", "2", "--recipes", "none", "--profile"]
    assert main(["bench", "layer", *sizes, *argv, str(tmp_path)]) == 0
    shown = capsys.readouterr()
    found = [json.loads(line) for line in shown.out.splitlines() if line.startswith("{")]
    assert shown.err.count("kind of kernel") == len(found) == len(list(tmp_path.glob("*/kernel_times.json"))) == 2
    assert all(row["kinds"]["GEMM"] > 0 for row in found)


@pytest.mark.slow  # test_context_parallelism has the mesh of a bench, tests/multi_device the counts
def test_a_mesh(capsys):
    (row,) = rows(capsys, "layer", *WIDTHS, "--mesh", "tensor=4", "--sequence-parallel", "--recipes", "none")
    # Of the layer alone: the loss that is differentiated does not need the last scatter.
    assert (row["collectives"]["all-gather"], row["collectives"]["reduce-scatter"]) == (4, 3)


@pytest.mark.slow
def test_microbatches(capsys):
    """The counts say something on a GPU only: the compiler for CPUs takes the kernels out of the loop by itself."""
    found = rows(capsys, "microbatches", *WIDTHS, "--microbatches", "2", "--recipes", "current")
    assert [row["name"] for row in found] == [
        "current, quantized in every microbatch",
        "current, quantized once a step",
    ]
    assert all(row["quantizations_in_loop"] > 0 and row["quantizations_outside"] > 0 for row in found)


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # Flax's norms rely on it
def test_a_plain_flax_model(capsys, tmp_path):
    sizes = [*WIDTHS, "--num-layers", "1", "--vocab-size", "64", "--profile", str(tmp_path)]
    found = rows(capsys, "flax", *sizes, "--recipes", "current", "--head", "high", "quantized")
    assert [row["name"] for row in found] == ["none", "current", "current, head quantized"]
    assert [row["quantized_layers"] for row in found] == [0, 4, 5]
    assert found[0]["speed_ratio"] == 1.0
    assert all(row["speed_ratio"] == pytest.approx(found[0]["ms"] / row["ms"], rel=0.01) for row in found)
    assert all(row["kinds"]["GEMM"] > 0 for row in found)


def forms_of(monkeypatch, *argv):
    """Return the names of the rows that ``jax-te bench flax`` would measure."""
    measured = []

    def measure(forms, *_):
        measured.extend(form.name for form in forms)
        return [{"name": name, "ms": 1.0} for name in measured]

    monkeypatch.setattr(bench_flax, "bench_plain_flax", measure)
    assert main(["bench", "flax", *QUICK, *WIDTHS, "--num-layers", "1", *argv]) == 0
    return measured


def test_a_form_of_a_plain_flax_model_that_is_given_twice_is_measured_once(monkeypatch):
    found = forms_of(monkeypatch, "--recipes", "current", "delayed", "current", "--head", "quantized", "quantized")
    assert found == ["none", "current, head quantized", "delayed, head quantized"]


def test_a_vocabulary_of_a_plain_flax_model_may_have_any_size_if_the_head_is_not_quantized(monkeypatch):
    assert forms_of(monkeypatch, "--recipes", "mxfp8", "--vocab-size", "250") == ["none", "mxfp8"]


@jax.numpy_dtype_promotion("standard")
def test_the_least_memory_of_a_plain_flax_model_is_that_of_its_arrays(monkeypatch):
    needed = []
    monkeypatch.setattr(bench_flax, "check_fits", lambda bytes_, *_: needed.append(bytes_))
    sizes = plain_flax.PlainSizes(layers=2, hidden=1024, ffn=4096, heads=4, vocabulary=2048, batch=1, sequence=1)
    bench_flax._check_memory(sizes)
    model = plain_flax._Model(plain_flax.PlainForm(name="none"), sizes, "xla")
    arrays = [leaf for leaf in jax.tree.leaves(jax.eval_shape(model.create)) if leaf.size > 1]
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
    gradients = sum(2 * leaf.size for leaf in arrays if leaf.dtype == jnp.bfloat16)  # in their parameters' dtype
    # What the bound leaves out: biases and norms, of at most 9 h + f = 13 h of 12 h^2 parameters a layer (0.1 %); a
    # single token's activations are less than that.
    assert needed == [pytest.approx(held + gradients, rel=2e-3)]


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")
def test_forms_of_a_plain_flax_model_step_one_state(monkeypatch):
    """Each quantizes as its user's own loop would, and leaves the quantizers of the others alone."""
    found = []

    def steps(contestants, tokens, *_):
        state = contestants[0].state.take()
        for contestant in contestants:
            contestant.begin()
            state, loss = contestant.compiled(state, tokens)
            found.append((float(loss), jax.tree.map(np.array, state[1])))
        return [{"name": contestant.name} for contestant in contestants]

    monkeypatch.setattr(plain_flax, "run_contestants", steps)
    sizes = plain_flax.PlainSizes(layers=1, hidden=64, ffn=128, heads=4, vocabulary=64, batch=2, sequence=16)
    delayed = plain_flax.PlainForm(name="delayed", recipe=DelayedScaling(amax_history_len=2), quantizes_head=True)
    forms = [plain_flax.PlainForm(name="none"), delayed]
    assert plain_flax.bench_plain_flax(forms, sizes, Settings(backend="xla")) == [
        {"name": "none", "quantized_layers": 0},
        {"name": "delayed", "quantized_layers": 5},
    ]
    (first, untouched), (second, quantized) = found
    # Logits of a new model are nearly equal, and a step of 1e-4 lowers their loss.
    assert first == pytest.approx(np.log(64), rel=0.2)
    assert second < first
    for state, seen in ((untouched, False), (quantized, True)):
        assert state["none"] == {}
        histories = [leaf for leaf in jax.tree.leaves(state["delayed"]) if leaf.shape == (2,)]
        assert len(histories) == 3 * 5
        assert all(history.any() == seen for history in histories)


SIZES = ["--preset", "tiny", "--num-layers", "1", "--vocab-size", "64", "--rounds", "2"]
MODEL = [*SIZES, "--calls", "2", "--backend", "xla"]
BATCH, LENGTH = 4, 32


@pytest.fixture(autouse=True)
def tinier(monkeypatch):
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "seq_len": LENGTH, "batch_size": BATCH}
    values = PRESETS["tiny"].values | sizes
    monkeypatch.setitem(PRESETS, "tiny", Preset(summary="for tests", values=values))


@pytest.fixture
def states(monkeypatch):
    """The train states that are made."""
    made, create = [], train_steps.create_train_state

    def counted(*args, **options):
        made.append(create(*args, **options))
        return made[-1]

    monkeypatch.setattr(train_steps, "create_train_state", counted)
    return made


def model_rows(capsys, *argv):
    """Status of the command, and its rows."""
    status = main(["bench", "model", *MODEL, *argv])
    shown = capsys.readouterr()
    return status, [json.loads(line) for line in shown.out.splitlines() if line.startswith("{")], shown.err


@pytest.mark.slow
def test_a_models_rows_share_a_state(capsys, states, monkeypatch):
    steps, found_rows = [], bench_contestants.rows_of

    def rows_of(contestants, tokens):
        assert len({contestant.state for contestant in contestants}) == 1
        steps.append(int(contestants[0].state.take().step))
        return found_rows(contestants, tokens)

    monkeypatch.setattr(bench_contestants, "rows_of", rows_of)
    ways = ["--stack", "scanned", "unrolled", "--recompute", "mlp,core_attn"]
    status, found, _ = model_rows(capsys, *ways, "--recipes", "none")
    assert status == 0
    assert [row["name"] for row in found] == [f"none, {stack}, recompute core_attn,mlp" for stack in ways[1:3]]
    for row in found:
        assert row["tokens_s"] == pytest.approx(BATCH * LENGTH / row["ms"] * 1e3, rel=1e-3)
        assert row["speed_ratio"] == pytest.approx(found[0]["ms"] / row["ms"], abs=1e-3)
        assert row["memory_ratio"] == pytest.approx(row["peak_gib"] / found[0]["peak_gib"], abs=2e-2)
        assert row["compile_s"] > 0.0
        assert "error" not in row
    assert len(states) == 1
    # Of each contestant: a round of two steps to warm up, and two rounds of two steps after one that is not timed.
    assert steps == [2 * (2 + 2 * (1 + 2))]
    assert states[0].step.is_deleted()


@pytest.mark.slow
def test_train_steps_on_a_mesh(capsys, states):
    """With a batch of one's own."""
    mesh = ["--mesh", "pipeline=2,tensor=2", "--sequence-parallel", "--num-layers", "2", "--batch-size", "4"]
    schedules = ["--microbatches", "2", "--pipeline", "gpipe"]
    status, found, _ = model_rows(capsys, *mesh, *schedules, "--recipes", "none")
    assert status == 0
    assert [row["name"] for row in found] == [f"none, unrolled, recompute none, {name}" for name in schedules[3:]]
    assert all("error" not in row for row in found)
    assert found[0]["tokens_s"] == pytest.approx(4 * LENGTH / found[0]["ms"] * 1e3, rel=1e-3)
    assert len(states) == 1
    assert len(states[0].step.sharding.device_set) == 4


@pytest.mark.slow
def test_forms_of_a_train_step_on_replicas(capsys, states):
    ways = ["--batch-parts", "2", "--wgrad-dtype", "float32", "bfloat16", "--distributed-optimizer"]
    status, found, _ = model_rows(capsys, "--mesh", "data=2,tensor=2", *ways, "--batch-size", "4", "--recipes", "none")
    assert status == 0
    one = "none, unrolled, recompute none, 2 parts"
    assert [row["name"] for row in found] == [one, f"{one}, gradients bfloat16"]
    assert all("error" not in row for row in found)
    (state,) = states
    assert "data" in state.masters["embedding"]["embedding"].get_value().sharding.spec


@pytest.mark.slow
def test_train_steps_are_profiled(capsys, states, tmp_path):
    forms = ["--recipes", "none", "--stack", "unrolled", "scanned"]
    status, found, shown = model_rows(capsys, *forms, "--profile", str(tmp_path))
    assert status == 0
    assert shown.count("kind of kernel") == len(found) == len(list(tmp_path.iterdir())) == 2
    for row in found:
        assert row["kinds"]["GEMM"] > 0
        (kept,) = tmp_path.glob(f"*{row['name'].split(', ')[1]}*/kernel_times.json")
        assert json.loads(kept.read_text())["kinds"].keys() == row["kinds"].keys()


@pytest.mark.slow
def test_checkpoints(capsys, tmp_path):
    folder = tmp_path / "new" / "folder"
    assert main(["bench", "checkpoint", str(folder), *SIZES, "--recipes", "delayed"]) == 0
    orbax, own = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert (orbax["name"], own["name"]) == ("delayed, Orbax", "delayed, jax_te")
    assert orbax["gib"] == own["gib"] > 0
    for row in (orbax, own):
        assert 0 < row["blocked_s"] <= row["stalled_s"]  # of milliseconds
        assert row["blocked_s"] < row["save_s"]
        assert row["copy_s"] == orbax["copy_s"] > 0
        assert row["beyond_copy_s"] == pytest.approx(row["stalled_s"] - row["copy_s"], abs=0.0015)
        assert row["restore_ratio"] == pytest.approx(orbax["restore_s"] / row["restore_s"], rel=0.05)
        assert row["save_ratio"] == pytest.approx(orbax["save_s"] / row["save_s"], rel=0.05)
    assert list(folder.iterdir()) == []


def test_one_row_has_no_ratio():
    def contestant(name, seconds):
        return bench_contestants.Contestant(name, seconds=[seconds])

    one, two = contestant("one", 0.5), contestant("two", 0.25)
    assert bench_contestants.rows_of([one], 8) == [{"name": "one", "ms": 500.0, "spread_ms": 0.0, "tokens_s": 16}]
    assert [row["speed_ratio"] for row in bench_contestants.rows_of([one, two], 8)] == [1.0, 2.0]


def test_what_a_row_stands_for():
    def config(way):
        return preset_config.preset_config("gpt-1.3b", "current", way, num_layers=3).transformer_config()

    assert config("none").recompute_granularity is None
    assert (config("none").num_layers, jnp.dtype(config("none").compute_dtype)) == (3, jnp.bfloat16)
    assert config("layernorm,mlp").recompute_granularity == "selective"
    assert list(config("layernorm,mlp").recompute_modules) == ["layernorm", "mlp"]
    full = config("save_gemms")
    assert (full.recompute_granularity, full.recompute_method, full.recompute_num_layers) == ("full", "uniform", 1)
    block = config("block:3")
    assert (block.recompute_granularity, block.recompute_method, block.recompute_num_layers) == ("full", "block", 3)


@pytest.mark.slow
def test_a_contestant_that_fails_is_a_row_and_the_others_go_on(capsys, states, monkeypatch):
    """One that cannot be compiled, and one that takes the state with it when it runs."""
    begin, steps = bench_contestants.CompiledStep._begin, bench_contestants.CompiledStep._steps

    def compile_not(contestant):
        if contestant.name.endswith("layernorm"):
            raise NotImplementedError("no such\nkernel")
        begin(contestant)

    def run_not(contestant, tokens, calls):
        if contestant.name.endswith("core_attn"):
            contestant.compiled(contestant.prepare(contestant.state.take()), tokens)
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return steps(contestant, tokens, calls)

    monkeypatch.setattr(bench_contestants.CompiledStep, "_begin", compile_not)
    monkeypatch.setattr(bench_contestants.CompiledStep, "_steps", run_not)
    status, found, _ = model_rows(capsys, "--recompute", "layernorm", "core_attn", "none", "--recipes", "none")
    assert status == 0
    names = [row["name"].split()[-1] for row in found]
    assert names == ["layernorm", "core_attn", "none"]
    assert found[0] == {"name": "none, unrolled, recompute layernorm", "error": "NotImplementedError: no such kernel"}
    assert found[1]["error"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert found[1]["peak_gib"] > 0.0
    assert "ms" not in found[1]
    assert found[2]["speed_ratio"] == found[2]["memory_ratio"] == 1.0
    assert len(states) == 2  # the one that failed took the first with it


def test_rounds_are_timed_after_a_whole_round_that_is_not():
    taken = []

    class Steps(bench_contestants.Contestant):
        def _begin(self):
            pass

        def _steps(self, arrays, calls):
            taken.append(calls)
            return float(len(taken))

    contestant = Steps("steps")
    bench_contestants.run_contestants([contestant], None, 1, Settings(rounds=2, calls=5))
    assert taken == [5, 1, 5, 1, 5]  # a round, and then a step before each that counts
    assert contestant.seconds == [3.0, 5.0]


@pytest.mark.costly
def test_nothing_to_measure_is_an_error(capsys):
    status, _, error = model_rows(capsys, "--loss-chunks", "3", "--recipes", "none")
    assert status == 2
    assert "nothing could be measured; none, unrolled, recompute none: ValueError" in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pipeline", "gpipe"], "--pipeline gpipe is for pipeline ranks, and --mesh (none) has one"),
        (["--batch-size", "3", "--microbatches", "2"], "--batch-size 3 is not divisible by --microbatches 2"),
        (["--peer", "te"], "--peer te is a GPT in GPT-2's form, and the model is not"),
        (["--peer", "te", "--preset", "gpt-125m"], "--peer te: not here"),
        (["--peer", "te", "--mesh", "tensor=2"], "leave out --mesh and --microbatches"),
        (["--distributed-optimizer", "--mesh", "fsdp=2"], "give --mesh with data=N"),
        (["--reduce-gradients", "step"], "give --mesh with data=N"),
        (["--sequence-parallel", "--mesh", "data=2"], "give --mesh with tensor=N"),
        (["--batch-parts", "3"], "--batch-parts 3"),
        (["--tokenizer", "tokenizer.json"], "--tokenizer has no effect without --data"),
        (["--tokenizer", "tokenizer.json", "--data", "text"], "leave --vocab-size"),
        (["--data", "there is no such file"], "no such file"),
        (["--data", __file__], "give --vocab-size"),
    ],
)
def test_options_without_effect_on_a_model_are_refused(capsys, monkeypatch, argv, message):
    monkeypatch.setattr(bench_model, "available", lambda: (False, "not here"))
    status, found, error = model_rows(capsys, *argv)
    assert (status, found) == (2, [])
    assert message in error


@pytest.mark.parametrize(
    "argv",
    [
        ["layer", "--batch-size", "1000000", "--seq-len", "100000"],
        ["layer", "--hidden-size", "100000000"],
        ["layer", "--ffn-hidden-size", "2000000000", "--modules", "layernorm_linear"],
        ["layer", "--batch-size", "1", "--seq-len", "10000000"],
        ["attention", "--batch-size", "1", "--seq-len", "10000000", "--mesh", "context=2"],
        ["microbatches", "--microbatches", "1000000000", "--batch-size", "1000000000"],
        ["flax", "--num-layers", "1000000"],
    ],
    ids=" ".join,
)
def test_sizes_that_cannot_fit_are_refused_before_anything_is_allocated(argv, capsys, monkeypatch):
    monkeypatch.setattr(bench_rows, "keep_compiled_programs", lambda: pytest.fail("measured"))
    assert_refused(main(["bench", *argv]), capsys.readouterr().err, "take at least", "lower --batch-size")


@pytest.mark.parametrize("module", [name for name in MODULES if name != "moe"])
def test_every_module_counts_its_operations(module):
    case = layer.Case(module=module, shape=(4, 32, 64, 4, 128), recipe=None)
    assert case.flops >= 3 * 2 * 4 * 32 * 64 * 128  # those of one of its GEMMs, and of its two gradients


def test_a_vocabulary_that_cannot_fit_is_refused_before_anything_is_allocated(capsys, monkeypatch):
    monkeypatch.setattr(bench_model, "build_model", lambda *_, **__: pytest.fail("built"))
    status = main(["bench", "model", "--preset", "tiny", "--vocab-size", "2000000000"])
    assert_refused(status, capsys.readouterr().err, "take at least", "lower --num-layers or --vocab-size")


def test_recomputations_that_are_none_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "model", *MODEL, "--recompute", "mlp,full"])
    assert "must be none, one of full, save_gemms" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["layer", "--sequence-parallel"], "--sequence-parallel shards activations over the tensor axis"),
        (["layer", "--sequence-parallel", "--mesh", "data=2"], "give --mesh with tensor=N"),
        (["attention", "--mesh", "tensor=2"], "--mesh tensor=2 has no context axis"),
        (["attention", "--head-dim", "64", "--recipes", "none", "current"], "heads of 128, not --head-dim 64"),
        (["layer", "--num-heads", "8", "--fp8-dpa"], "--fp8-dpa is for heads of 128; give --hidden-size 1024"),
        (["attention", "--num-query-groups", "3"], "--num-heads 32 is not divisible by --num-query-groups 3"),
        (["flax", "--num-heads", "3"], "--hidden-size 4096 is not divisible by --num-heads 3"),
        (
            ["flax", "--head", "quantized", "--vocab-size", "250"],
            "--vocab-size 250 is not divisible by 16, as it must be for a head quantized under the recipe current; "
            "take the next multiple, 256, or leave quantized out of --head",
        ),
        (
            ["flax", "--recipes", "current", "mxfp8", "--hidden-size", "80", "--num-heads", "4"],
            "--hidden-size 80 is not divisible by 32, as it must be for the recipe mxfp8; take the next multiple, 96, "
            "or leave mxfp8 out of --recipes",
        ),
        (["flax", "--ffn-hidden-size", "100"], "--ffn-hidden-size 100 is not divisible by 16"),
        (["microbatches", "--microbatches", "3"], "--batch-size 32 is not divisible by --microbatches 3"),
    ],
)
def test_what_is_refused(capsys, argv, message):
    assert_refused(main(["bench", *argv]), capsys.readouterr().err, message)


@pytest.mark.slow
def test_context_parallelism(capsys):
    sizes = ["--head-dim", "16", "--num-query-groups", "4"]
    found = rows(capsys, "attention", *sizes, "--mesh", "context=4")
    assert [row["name"] for row in found] == [f"jax_te, {way}" for way in ("one device", "p2p", "all_gather", "a2a")]
    assert "collectives" not in found[0]
    ring, gather, exchange = (row["collectives"] for row in found[1:])
    assert ring == {"collective-permute": ring["collective-permute"]}
    assert set(gather) == {"all-gather", "reduce-scatter"}
    assert set(exchange) == {"all-to-all"}
    (alone,) = rows(capsys, "attention", *sizes)
    assert (alone["name"], alone["of_one_device"]) == ("jax_te, one device", 1.0)


@pytest.mark.slow
def test_attention_in_fp8(capsys):
    sizes = ["--batch-size", "1", "--seq-len", "128", "--num-heads", "2", "--head-dim", "128"]
    found = rows(capsys, "attention", *sizes, "--recipes", "none", "delayed", "current")
    names = [f"{name}, one device" for name in ("jax_te", "jax_te delayed fp8_dpa", "jax_te current fp8_dpa")]
    assert [(row["name"], row["of_one_device"]) for row in found] == [(name, 1.0) for name in names]
    assert all(row["ms"] > 0.0 for row in found)
