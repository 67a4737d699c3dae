"""RunConfig: what is refused, and its file."""

import dataclasses
import json

import pytest

from jax_te.cli.options import MAY_CHANGE
from jax_te.cli.parser import build_parser, options_from
from jax_te.cli.presets import PRESETS
from jax_te.cli.resolve import resolve
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_files import CONFIG_FILE, check_resumable, read_config, write_config
from jax_te.cli.run_recipe import RECIPE_FIELDS
from jax_te.recipe import (
    RECIPES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    recipe_from_name,
)
from tests.support.numerics import without_type_checker


def config(**changes):
    values = PRESETS["tiny"].values | {"preset": "tiny", "batch_size": 8, "decay_steps": 400, "min_learning_rate": 0.0}
    return RunConfig(**(values | changes))


def test_a_run_on_one_device_has_no_option_of_a_mesh():
    options = {"cp_comm_type": "a2a", "cp_load_balanced": True, "sequence_parallel": True, "mesh_axis_type": "explicit"}
    assert config(mesh="context=2,tensor=2", backend="xla", **options).on_one_device() == config()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_preset_is_valid_under_every_recipe(name, recipe):
    config(**PRESETS[name].values, decay_steps=4000, recipe=recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 130},
            r"--hidden-size 130 is not divisible by --num-heads 4, and no .* the next multiple is 132$",
        ),
        ({"num_query_groups": 3}, r"--num-heads 4 is not divisible by --num-query-groups 3"),
        (
            {"hidden_size": 12},
            r"--hidden-size 12 / --num-heads 4 = 3 is not .* by 2, as --position-embedding rope",
        ),
        ({"microbatches": 3}, r"--batch-size 8 is not divisible by --microbatches 3; the next multiple is 9"),
        ({"mesh": "data=3"}, r"--batch-size 8 .* --microbatches 1 times data\*fsdp\*expert = 3 .* next multiple is 9"),
        ({"mesh": "tensor=3"}, r"--num-query-groups 4 is not divisible by tensor=3"),
        ({"mesh": "fsdp=8,data=2"}, r"data\*fsdp\*expert = 16"),
        ({"mesh": "tensors=2"}, r"unknown mesh axis 'tensors'"),
        ({"mesh": "context=3"}, r"--seq-len \d+ is not divisible by context=3 of --mesh context=3"),
        ({"mesh": "expert=3"}, r"--batch-size 8 .* times data\*fsdp\*expert = 3 .* next multiple is 9"),
        ({"moe_router_topk": 4}, r"--moe-router-topk 4 is for layers with experts; give --num-experts"),
        (
            {"recompute_granularity": "selective", "recompute_modules": "mlp,moe"},
            r"--recompute-modules moe is for layers with experts",
        ),
        ({"num_experts": 4, "mesh": "expert=8"}, r"--num-experts 4 is not divisible by expert=8 of --mesh expert=8"),
        ({"num_experts": 4, "moe_router_topk": 5}, r"moe_router_topk 5 .* num_moe_experts 4"),
        (
            {"num_experts": 4, "moe_ffn_hidden_size": 40, "recipe": "current"},
            r"--moe-ffn-hidden-size 40 is not divisible by 16, .* the next multiple is 48",
        ),
        ({"num_experts": 4, "moe_layer_freq": "0,1"}, r"for each of 4 layers, .* \(set by .*--moe-layer-freq"),
        *(
            ({"num_experts": 4, "moe_layer_freq": text}, r"--moe-layer-freq must be .* 0 for each layer, such as")
            for text in ("[2]", "[]", "[0]*0+[1", "[1]*99999", "print(1)", "[1]-[0]", "1+1", "[[1]]", "(" * 999, "")
        ),
        ({"num_experts": 4, "moe_layer_freq": 0}, r"--moe-layer-freq must be an integer >= 1, got 0"),
        ({"pipeline": "gpipe"}, r"--pipeline gpipe is for pipeline ranks, and --mesh \(none\) has one"),
        ({"mesh": "pipeline=2", "microbatches": 2, "pipeline": "2f2b"}, r"--pipeline schedule must be one of .*1f1b"),
        ({"mesh_axis_type": "explicit"}, r"--mesh-axis-type explicit is for the axes of a --mesh"),
        ({"cp_load_balanced": True}, r"--cp-load-balanced is for context ranks, and --mesh \(none\) has one; give"),
        ({"cp_load_balanced": True, "mesh": "data=2"}, r"--mesh data=2 has one; .* or --no-cp-load-balanced"),
        ({"cp_comm_type": "a2a"}, r"--cp-comm-type a2a is for context ranks, and --mesh \(none\) has one"),
        ({"cp_comm_type": "all_gather", "mesh": "tensor=2"}, r"--mesh tensor=2 has one; .* or --cp-comm-type p2p"),
        (
            {"sequence_parallel": True, "mesh": "context=2,tensor=4", "seq_len": 36},
            r"--seq-len 36 .* context\*tensor=8 .* --sequence-parallel splits it; the next multiple is 40",
        ),
        (
            {"recompute_granularity": "full", "distribute_saved_activations": True, "mesh": "tensor=4", "seq_len": 34},
            r"--seq-len 34 .* context\*tensor=4 .* --distribute-saved-activations splits it; .* multiple is 36",
        ),
        (
            {"cp_comm_type": "a2a", "mesh": "context=4,tensor=2"},
            r"--num-query-groups 4 .* context\*tensor=8 .* --cp-comm-type a2a .* p2p and all_gather .* multiple is 8",
        ),
        (
            {"cp_comm_type": "a2a", "mesh": "context=4", "num_query_groups": 2},
            r"--num-query-groups 2 .* context\*tensor=4 .* --cp-comm-type a2a .* p2p and all_gather .* multiple is 4",
        ),
        (
            {"recipe": "delayed", "ffn_hidden_size": 500},
            r"--ffn-hidden-size 500 is not divisible by 16, .* --recipe delayed; the next multiple is 512",
        ),
        (
            {"recipe": "current", "hidden_size": 120},
            r"--hidden-size 120 is not divisible by 16, .* the next multiple is 128",
        ),
        (
            {"recipe": "current", "seq_len": 33, "batch_size": 1, "mesh": "tensor=2"},
            r"tokens of a microbatch, .* 33 .* on a mesh.* next multiple is 48",
        ),
        ({"recipe": "mxfp9"}, r"--recipe must be none, delayed, current, .* got 'mxfp9'"),
        ({"margin": 1}, r"--margin is for --recipe delayed"),
        ({"fp8_format": "e4m3"}, r"--fp8-format is for --recipe delayed, current, block or mxfp8, and .* is none"),
        ({"recipe": "nvfp4", "fp8_format": "e4m3"}, r"--fp8-format is for .* and the recipe is nvfp4"),
        ({"recipe": "block", "fp8_format": "e5m3"}, r"--fp8-format must be hybrid or e4m3, got 'e5m3'"),
        ({"recipe": "mxfp8", "fp8_accumulation": "fast"}, r"--fp8-accumulation is for --recipe delayed or current"),
        ({"recipe": "current", "fp8_accumulation": "quick"}, r"--fp8-accumulation must be fast or precise"),
        ({"recipe": "block", "use_power_2_scales": True}, r"--use-power-2-scales is for --recipe current"),
        ({"recipe": "current", "use_f32_scales": True}, r"--use-f32-scales is for --recipe block"),
        ({"recipe": "mxfp8", "rht": False}, r"--rht is for --recipe nvfp4"),
        ({"recipe": "block", "stochastic_rounding": True}, r"--stochastic-rounding is for --recipe nvfp4"),
        ({"square_blocks": True}, r"--square-blocks is for --recipe nvfp4"),
        ({"override_linear_precision": "wgrad"}, r"--override-linear-precision is for .* and the recipe is none"),
        (
            {"recipe": "current", "override_linear_precision": "wgrad,egrad"},
            r"must be some of fprop,dgrad,wgrad, .* 'wgrad,egrad'",
        ),
        (
            {"recipe": "current", "override_linear_precision": ""},
            r"--override-linear-precision must be some of fprop,dgrad,wgrad",
        ),
        ({"scan_layers": "maybe"}, r"--scan-layers must be auto, yes or no, got 'maybe'"),
        ({"fp8_param": True}, r"--fp8-param is for runs that quantize"),
        ({"inspect_every": 5}, r"--inspect-every is for runs that quantize"),
        ({"bf16_layers_end": 1}, r"--bf16-layers-end is for runs that quantize"),
        ({"recipe": "current", "bf16_layers_start": 3, "bf16_layers_end": 1}, r"leave none of --num-layers 4"),
        ({"recipe": "current", "bf16_layers_start": 9}, r"--bf16-layers-start 9"),
        ({"recipe": "mxfp8", "hidden_size": 144, "num_heads": 1, "num_query_groups": 1}, r"divisible by 32, .* 160"),
        ({"precision_config": "configs: ["}, r"--precision-config: the text cannot be read"),
        ({"precision_config": "matcher: {}"}, r"--precision-config: unknown section 'matcher'"),
        ({"precision_config": "matchers: {a: {enabled: true}}"}, r"--precision-config: matcher 'a' lacks 'type'"),
        ({"precision_config": "matchers: {a: {enabled: true, type: re}}"}, r"--precision-config: .* has type 're'"),
        ({"recipe": "current", "amax_history_len": 4}, r"--amax-history-len is for --recipe delayed"),
        ({"min_learning_rate": 1.0}, r"--min-learning-rate 1 is above --learning-rate"),
        ({"warmup_steps": 400}, r"--warmup-steps 400 leaves no step"),
        ({"params_dtype": "int8"}, r"--params-dtype must be float32, bfloat16 or float16, got 'int8'"),
    ],
)
def test_bad_values_are_refused_with_the_option_and_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("text", ["0,1,0,1", "[0, 1, 0, 1]", "([0]+[1])*2", "2*[0,1]", "[0]+[1]*1+([0]+[1])"])
def test_layers_with_experts_are_listed_as_in_megatron(text, tmp_path):
    listed = config(num_experts=4, moe_layer_freq=text)
    assert listed.moe_layer_freq == "[0,1,0,1]"
    assert [listed.transformer_config().has_experts(layer) for layer in range(4)] == [False, True, False, True]
    write_config(listed, tmp_path)
    assert read_config(tmp_path) == listed


def test_recipes_have_the_fields_given():
    assert config().make_recipe() is None
    assert config(recipe="current", fp8_format="e4m3").make_recipe() == Float8CurrentScaling(fp8_format=Format.E4M3)
    delayed = config(recipe="delayed", amax_history_len=8, margin=1, amax_compute_algo="most_recent").make_recipe()
    assert delayed == DelayedScaling(amax_history_len=8, margin=1, amax_compute_algo="most_recent")


def test_every_field_of_a_recipe_reaches_it():
    recipe = config(recipe="current", fp8_accumulation="precise", override_linear_precision="wgrad,fprop").make_recipe()
    assert recipe == Float8CurrentScaling(
        override_linear_precision=(True, False, True),
        fp8_gemm_fprop=MMParams(use_split_accumulator=True),
        fp8_gemm_dgrad=MMParams(use_split_accumulator=True),
        fp8_gemm_wgrad=MMParams(use_split_accumulator=True),
    )
    assert config(recipe="current", use_power_2_scales=True).make_recipe().use_power_2_scales
    assert config(recipe="block", use_f32_scales=True).make_recipe() == Float8BlockScaling(use_f32_scales=True)
    assert config(recipe="mxfp8", fp8_format="hybrid").make_recipe() == MXFP8BlockScaling(fp8_format=Format.HYBRID)
    expected = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    off = {"rht": False, "stochastic_rounding": False, "square_blocks": False}
    assert config(recipe="nvfp4", **off).make_recipe() == expected


@pytest.mark.parametrize("name", RECIPES)
def test_fields_that_a_recipe_has_are_filled_in_and_the_others_are_none(name):
    made = config(recipe=name)
    assert made.make_recipe() == recipe_from_name(name)
    for field, owners in RECIPE_FIELDS.items():
        empty = name not in owners or field == "override_linear_precision"
        assert (getattr(made, field) is None) == empty, field
    assert dataclasses.replace(made, steps=3).make_recipe() == made.make_recipe()


def test_first_and_last_layers_reach_the_model():
    made = config(recipe="current", bf16_layers_start=1, bf16_layers_end=2).transformer_config()
    assert [made.in_high_precision(layer) for layer in range(4)] == [True, False, True, True]
    plain = config(recipe="current").transformer_config()
    assert not any(plain.in_high_precision(layer) for layer in range(4))


def test_rules_may_do_without_a_recipe_and_reach_all_layers():
    made = config(precision_config="", fp8_param=True, inspect_every=3, bf16_layers_start=4)
    assert made.quantization_rules().matchers == ()
    with pytest.raises(ValueError, match="leave none"):
        config(precision_config="", bf16_layers_start=4, bf16_layers_end=1)


def test_another_precision_file_is_named_by_its_size(tmp_path):
    saved = config(precision_config="configs: {}")
    with pytest.raises(ValueError, match=r"--precision-config is a file of 11 characters \(CRC \w+\) there, None here"):
        check_resumable(saved, {"precision_config": None}, tmp_path)


def test_the_file_gives_the_configuration_back(tmp_path):
    assert read_config(tmp_path) is None
    write_config(config(seed=3, recipe="delayed"), tmp_path)
    assert read_config(tmp_path) == config(seed=3, recipe="delayed")
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"architectures": ["GPT2"]}', '{"preset": 3}'])
def test_another_programs_file_is_refused(tmp_path, text):
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ValueError, match="is not the configuration of a jax-te run"):
        read_config(tmp_path)


def test_a_file_of_an_older_version_lacks_fields_with_defaults(tmp_path):
    write_config(config(), tmp_path)
    values = json.loads((tmp_path / CONFIG_FILE).read_text())
    del values["eval_batches"]
    del values["version"], values["crc32"]
    (tmp_path / CONFIG_FILE).write_text(json.dumps(values))
    assert read_config(tmp_path) == config()


def edited(**changes):
    def edit(values):
        return values | changes

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edited(learning_rate=1.0), "it was edited by hand"),
        (edited(version=2), r"its version is 2, and this jax-te reads those up to 1"),
        (edited(of_a_newer_version=1), "unknown fields 'of_a_newer_version'"),
        (edited(factory_modules="os"), "unknown fields 'factory_modules'"),
        (edited(num_heads=0), "--num-heads must be an integer >= 1, got 0"),
        (edited(num_heads=None), "--num-heads must be an integer >= 1, got 'None'"),
        (edited(num_layers=1.5), "--num-layers must be an integer >= 1, got '1.5'"),
        (edited(hidden_size=[64]), "--hidden-size must be an integer >= 1"),
        (edited(bias="no"), "--bias must be True or False, got 'no'"),
        (edited(bias=1), "--bias must be True or False, got 1"),
        (edited(recompute_granularity="selective", recompute_modules="head"), "--recompute-modules must be some of"),
        (lambda values: [values], "it is not a JSON object"),
        (lambda values: {}, "RunConfig.*missing"),
    ],
)
def test_a_file_that_cannot_be_a_runs_is_refused(tmp_path, edit, message):
    write_config(config(), tmp_path)
    values = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps(edit(values)))
    wanted = f"config.json is not the configuration of a jax-te run .{message}"
    with without_type_checker(), pytest.raises(ValueError, match=wanted):
        read_config(tmp_path)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 100_000, b'{"seed": NaN}', b"7" * 5000])
def test_a_file_that_is_no_json_is_refused(tmp_path, text):
    (tmp_path / CONFIG_FILE).write_bytes(text)
    with pytest.raises(ValueError, match=r"config\.json is not the configuration of a jax-te run") as error:
        read_config(tmp_path)
    assert len(str(error.value)) < 500


def test_all_that_differs_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"--hidden-size is 128 there, 256 here; --seed is 0 there, 1 here\. .*--output"
    ):
        check_resumable(config(), {"hidden_size": 256, "seed": 1, "steps": 9, "num_heads": 4}, tmp_path)


def test_fields_of_time_and_place_may_change(tmp_path):
    assert {field.name for field in dataclasses.fields(RunConfig)} >= MAY_CHANGE
    check_resumable(config(), dict.fromkeys(MAY_CHANGE, "anything"), tmp_path)


def test_a_foreign_folder_with_a_number_as_its_name_is_no_run(tmp_path):
    (tmp_path / "run" / "checkpoints" / "2024").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "2024" / "notes.txt").write_text("of somebody else")
    options = options_from(build_parser().parse_args(["train", "--output", str(tmp_path / "run")]))
    _, resumes = resolve(options, tmp_path / "run")
    assert not resumes
