"""RunConfig: what is refused, and its file."""

import dataclasses
import json

import pytest

from jax_te.cli.presets import PRESETS
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Format
from jax_te.training.run_config import (
    CONFIG_FILE,
    MAY_CHANGE,
    RunConfig,
    check_resumable,
    read_config,
    write_config,
)


def config(**changes):
    values = PRESETS["tiny"].values | {"preset": "tiny", "batch_size": 8, "decay_steps": 400, "min_learning_rate": 0.0}
    return RunConfig(**(values | changes))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
def test_every_preset_is_valid_under_every_recipe(name, recipe):
    config(**PRESETS[name].values, decay_steps=4000, recipe=recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 130}, r"--hidden-size 130 is not divisible by --num-heads 4; the next that is: 132"),
        ({"num_query_groups": 3}, r"--num-heads 4 is not divisible by --num-query-groups 3"),
        ({"hidden_size": 12}, r"rope needs heads of even size"),
        ({"microbatches": 3}, r"--batch-size 8 is not divisible by --microbatches 3; the next that is: 9"),
        ({"mesh": "data=3"}, r"microbatch of 8 examples .* data\*fsdp = 3 .*--batch-size that does: 9"),
        ({"mesh": "tensor=3"}, r"--num-query-groups 4 does not divide over tensor=3"),
        ({"mesh": "fsdp=8,data=2"}, r"data\*fsdp = 16"),
        ({"mesh": "tensors=2"}, r"unknown mesh axis 'tensors'"),
        (
            {"recipe": "delayed", "ffn_hidden_size": 500},
            r"--ffn-hidden-size 500 must be a multiple of 16 .* next is 512",
        ),
        ({"recipe": "current", "hidden_size": 120}, r"--hidden-size 120 must be a multiple of 16 .* next is 128"),
        ({"recipe": "current", "seq_len": 33, "batch_size": 1}, r"tokens of a microbatch 33 .* next is 48"),
        ({"recipe": "mxfp9"}, r"unknown --recipe 'mxfp9'; allowed: none, delayed, current"),
        ({"margin": 1}, r"--margin is for --recipe delayed"),
        ({"fp8_format": "e4m3"}, r"--fp8-format is for --recipe delayed or current"),
        ({"recipe": "current", "amax_history_len": 4}, r"--amax-history-len is for --recipe delayed"),
        ({"min_learning_rate": 1.0}, r"--min-learning-rate 1 is above --learning-rate"),
        ({"warmup_steps": 400}, r"--warmup-steps 400 leaves no step"),
        ({"params_dtype": "int8"}, r"params_dtype must be one of float32, bfloat16, float16"),
    ],
)
def test_bad_values_are_refused_with_the_option_and_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_recipes_have_the_fields_given():
    assert config().make_recipe() is None
    assert config(recipe="current", fp8_format="e4m3").make_recipe() == Float8CurrentScaling(fp8_format=Format.E4M3)
    delayed = config(recipe="delayed", amax_history_len=8, margin=1, amax_compute_algo="most_recent").make_recipe()
    assert delayed == DelayedScaling(amax_history_len=8, margin=1, amax_compute_algo="most_recent")


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
    values["of_a_newer_version"] = 1
    (tmp_path / CONFIG_FILE).write_text(json.dumps(values))
    assert read_config(tmp_path) == config()


def test_all_that_differs_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"--hidden-size is 128 there, 256 here; --seed is 0 there, 1 here\. .*--output"
    ):
        check_resumable(config(), {"hidden_size": 256, "seed": 1, "steps": 9, "num_heads": 4}, tmp_path)


def test_fields_of_time_and_place_may_change(tmp_path):
    assert {field.name for field in dataclasses.fields(RunConfig)} >= MAY_CHANGE
    check_resumable(config(), dict.fromkeys(MAY_CHANGE, "anything"), tmp_path)
