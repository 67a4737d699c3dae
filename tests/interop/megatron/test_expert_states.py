"""FP8 states of experts in checkpoints of Megatron-LM: the scales of all later steps are Transformer Engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.errors import CheckpointMismatchError
from jax_te.interop.megatron import load_megatron, save_megatron
from jax_te.interop.megatron.expert_states import of_expert
from jax_te.interop.torch import ExtraState, read_extra_state, read_torch_file, write_extra_state, write_torch_file
from jax_te.layers import GroupedLinear
from jax_te.quantize.scaling import amax_rule_of, next_amax_state, scale_in_use
from jax_te.recipe import DelayedScaling, autocast
from tests.interop.megatron.test_experts import build

FORM, EXPERTS = "bias of experts, shared experts", 4
LARGEST = {"x": 448.0, "kernel": 448.0, "grad": 57344.0}
DTYPES = {"x": jnp.float8_e4m3fn, "kernel": jnp.float8_e4m3fn, "grad": jnp.float8_e5m2}


class InTransformerEngine:
    """Scales and histories of all experts' operands, by the formulas of ``_fused_amax_and_scale_update``."""

    def __init__(self, recipe: DelayedScaling):
        self.recipe = recipe
        self.scale = {role: np.ones(EXPERTS, np.float32) for role in LARGEST}
        self.rows = {role: np.zeros((recipe.amax_history_len, EXPERTS), np.float32) for role in LARGEST}

    def update(self, amaxes: dict[str, np.ndarray]) -> None:
        for role, largest in LARGEST.items():
            rows = self.rows[role]
            rows[0] = amaxes[role]
            amax = rows.max(0) if self.recipe.amax_compute_algo == "max" else rows[0].copy()
            with np.errstate(divide="ignore"):
                scale = np.float32(largest) / amax / np.float32(2.0**self.recipe.margin)
            self.scale[role] = np.where((amax > 0.0) & np.isfinite(amax), scale, self.scale[role]).astype(np.float32)
            rows[:] = np.roll(rows, -1, 0)
            rows[0] = 0.0

    def state(self, **recipe: Any) -> ExtraState:
        others = np.full((len(self.rows["x"]), EXPERTS), 7.0, np.float32)  # of outputs and of inputs' gradients
        fields = {
            "margin": self.recipe.margin,
            "fp8_format": "HYBRID",
            "amax_history_len": len(others),
            "amax_compute_algo": self.recipe.amax_compute_algo,
        }
        return ExtraState(
            scale_fwd=np.concatenate([self.scale["x"], self.scale["kernel"], others[0]]),
            amax_history_fwd=np.concatenate([self.rows["x"], self.rows["kernel"], others], axis=1),
            scale_bwd=np.concatenate([self.scale["grad"], others[0]]),
            amax_history_bwd=np.concatenate([self.rows["grad"], others], axis=1),
            recipe=fields | recipe,
        )


def amaxes(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Amaxes of a step; some experts have no tokens, whose amax is 0."""
    return {role: np.float32(rng.lognormal(size=EXPERTS) * (rng.random(EXPERTS) > 0.2)) for role in LARGEST}


def after(steps: int, recipe: DelayedScaling) -> tuple[InTransformerEngine, np.random.Generator]:
    rng, theirs = np.random.default_rng(0), InTransformerEngine(recipe)
    for _ in range(steps):
        theirs.update(amaxes(rng))
    return theirs, rng


def assert_same_later_scales(model: nnx.Module, theirs: InTransformerEngine, rng: np.random.Generator) -> None:
    """All layers of experts compute Transformer Engine's scales, now and in later steps."""
    layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, GroupedLinear)]
    assert len(layers) == 4
    states = [nnx.to_pure_dict(nnx.state(layer))["quantizers"] for layer in layers]
    rule = amax_rule_of(theirs.recipe)
    for _ in range(5):
        seen = amaxes(rng)
        for state in states:
            for role in LARGEST:
                scale = scale_in_use(state[role], DTYPES[role], rule)
                np.testing.assert_array_equal(scale, theirs.scale[role], err_msg=role)
                state[role] = next_amax_state(state[role], scale, jnp.asarray(seen[role]))
        theirs.update(seen)


def in_file(path: Path, state: ExtraState, form: str = "grouped") -> Path:
    """A checkpoint whose layers of experts all have this state."""
    if not path.with_name("plain.pt").exists():
        save_megatron(build(FORM), path.with_name("plain.pt"))
    file = read_torch_file(path.with_name("plain.pt"))
    for layer in range(2):
        experts = f"decoder.layers.{layer}.mlp.experts."
        for name in ("linear_fc1", "linear_fc2"):
            if form == "grouped":
                entries = {f"{name}._extra_state": state}
            elif form == "numbered":
                entries = {f"{name}._extra_state{i or ''}": of_expert(state, i) for i in range(EXPERTS)}
            else:
                entries = {f"local_experts.{i}.{name}._extra_state": of_expert(state, i) for i in range(EXPERTS)}
            for entry, each in entries.items():
                file["model"][experts + entry] = np.frombuffer(write_extra_state(each), np.uint8)
    write_torch_file(path, file)
    return path


RECIPES = {
    "max": DelayedScaling(amax_history_len=4),
    "most recent, with a margin": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1),
    "one step": DelayedScaling(amax_history_len=1),
}


@pytest.mark.costly(
    "numbered-one step", slow=("sequential-max", "numbered-most recent, with a margin", "grouped-one step")
)
@pytest.mark.parametrize(
    ("form", "recipe"),
    [
        ("grouped", "max"),
        ("grouped", "one step"),
        ("sequential", "max"),
        ("numbered", "one step"),
        ("numbered", "most recent, with a margin"),
    ],
)
def test_scales_are_those_of_transformer_engine_now_and_later(form: str, recipe: str, tmp_path: Path) -> None:
    theirs, rng = after(9, RECIPES[recipe])
    path = in_file(tmp_path / "states.pt", theirs.state(), form)
    with autocast(RECIPES[recipe]):
        assert_same_later_scales(load_megatron(path), theirs, rng)


@pytest.mark.wide("torch")
@pytest.mark.parametrize("format", ["torch", "torch_dist"])
def test_states_are_written_as_they_were_read(format: Any, tmp_path: Path) -> None:
    theirs, rng = after(9, RECIPES["max"])
    with autocast(RECIPES["max"]):
        model = load_megatron(in_file(tmp_path / "states.pt", theirs.state()))
        save_megatron(model, tmp_path / "again", format=format)
        assert_same_later_scales(load_megatron(tmp_path / "again"), theirs, rng)


@pytest.mark.slow
def test_the_entries_of_a_file_are_those_of_transformer_engine(tmp_path: Path) -> None:
    theirs, _ = after(9, RECIPES["max"])
    with autocast(RECIPES["max"]):
        save_megatron(load_megatron(in_file(tmp_path / "states.pt", theirs.state())), tmp_path / "again.pt")
    entry = read_torch_file(tmp_path / "again.pt")["model"]["decoder.layers.1.mlp.experts.linear_fc2._extra_state"]
    found, expected = read_extra_state(entry.tobytes(), "entry"), theirs.state()
    assert found is not None
    assert found.recipe == expected.recipe
    used = {"fwd": 2 * EXPERTS, "bwd": EXPERTS}  # behind these are the operands that are not quantized here
    for direction, count in used.items():
        for name in (f"scale_{direction}", f"amax_history_{direction}"):
            np.testing.assert_array_equal(getattr(found, name)[..., :count], getattr(expected, name)[..., :count])


@pytest.mark.slow
def test_states_that_do_not_fit_are_refused_or_left_out(tmp_path: Path) -> None:
    theirs, _ = after(9, RECIPES["max"])
    path = in_file(tmp_path / "states.pt", theirs.state())
    with autocast(DelayedScaling(amax_history_len=4, margin=2)):
        with pytest.raises(CheckpointMismatchError, match=r"with {'margin': 0}, .* {'margin': 2}; .*fp8_states=False"):
            load_megatron(path)
        layer: Any = load_megatron(path, fp8_states=False).layers[0]
        assert bool((layer.mlp.experts.linear_fc1.quantizers["x"]["amax_history"][...] == 0.0).all())
    wrong = theirs.state()
    wrong.scale_bwd[1] *= 1.5
    with autocast(RECIPES["max"]):
        with pytest.raises(CheckpointMismatchError, match="grad: the scale of expert 1 does not follow"):
            load_megatron(in_file(path, wrong))
        file = read_torch_file(in_file(path, theirs.state(), "sequential"))
        file["model"]["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1._extra_state"] = np.zeros(0, np.uint8)
        write_torch_file(path, file)
        with pytest.raises(CheckpointMismatchError, match=r"experts \[2\] of layer 1's linear_fc1 have no FP8 state"):
            load_megatron(path)


@pytest.mark.costly
def test_states_of_expert_ranks_are_joined(tmp_path: Path) -> None:
    """Two ranks, each of which has one entry for its two experts."""
    theirs, rng = after(9, RECIPES["max"])
    file = read_torch_file(in_file(tmp_path / "states.pt", theirs.state()))
    halves = [theirs.state() for _ in range(2)]
    for rank in range(2):
        folder = tmp_path / "ranks" / f"mp_rank_00_{rank:03d}"
        folder.mkdir(parents=True)
        part: dict[str, Any] = {}
        arrays = {}
        for name in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"):
            whole = getattr(halves[rank], name)
            split = whole.reshape(*whole.shape[:-1], -1, EXPERTS)[..., 2 * rank : 2 * rank + 2]
            arrays[name] = split.reshape(*whole.shape[:-1], -1)
        own = np.frombuffer(write_extra_state(ExtraState(**arrays, recipe=halves[rank].recipe)), np.uint8)
        for name, tensor in file["model"].items():
            if name.endswith("_extra_state"):
                part[name] = own
            elif ".mlp.experts." not in name:
                part[name] = tensor
            elif int(name[-1]) // 2 == rank:
                part[f"{name[:-1]}{int(name[-1]) % 2}"] = tensor
        arguments = {**file["jax_te_args"], "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
        write_torch_file(folder / "model_optim_rng.pt", {**file, "jax_te_args": arguments, "model": part})
    with autocast(RECIPES["max"]):
        assert_same_later_scales(load_megatron(tmp_path / "ranks"), theirs, rng)
