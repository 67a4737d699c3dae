"""Files that torch itself wrote, and torch reading what is written here."""

import argparse
import dataclasses
import enum
import io
import pickle
import sys
import types
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="compares with torch: pip install -e '.[parity]'")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

from jax_te.interop.torch import (  # noqa: E402
    ExtraState,
    read_extra_state,
    read_torch_distributed,
    read_torch_file,
    write_extra_state,
    write_torch_distributed,
    write_torch_file,
)

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
TYPES += [torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]


def tensors():
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    views = {"base": base, "transposed": base.T, "part": base[1:, 2:], "steps": base[::2, 1::3]}
    views |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "parameter": torch.nn.Parameter(torch.ones(2))}
    views |= {f"{dtype}": torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype) for dtype in TYPES[:-1]}
    z = torch.tensor([1 + 2j, 3 - 1j])
    marked = {"conjugate": z.conj(), "negative": z.clone().conj().imag}  # one storage has one dtype in a file
    return views | {"complex": z} | marked


def bits(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def assert_same(found, tensor):
    assert tuple(found.shape) == tuple(tensor.shape)
    assert str(tensor.dtype) == f"torch.{found.dtype}"
    np.testing.assert_array_equal(np.ascontiguousarray(found).reshape(-1).view(np.uint8), bits(tensor))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_of_torch_save_is_read(protocol, tmp_path):
    model = OrderedDict(tensors())
    model._metadata = {"": {"version": 1}}  # as Module.state_dict does
    args = argparse.Namespace(hidden_size=8, params_dtype=torch.bfloat16)
    value = {"model": model, "args": args, "iteration": 7, "rng": np.random.get_state(), "extra": io.BytesIO(b"x")}
    value |= {"linear": torch.nn.Linear(2, 3).state_dict(), "names": {"a", "b"}, "shape": torch.Size([2, 3])}
    torch.save(value, tmp_path / "a.pt", pickle_protocol=protocol)
    found = read_torch_file(tmp_path / "a.pt")
    assert found["args"].state == {"hidden_size": 8, "params_dtype": "torch.bfloat16"}
    assert (found["iteration"], found["shape"], list(found["model"])) == (7, (2, 3), list(model))
    for name, tensor in model.items():
        assert_same(found["model"][name], tensor)
    assert_same(found["linear"]["weight"], value["linear"]["weight"])


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_what_is_written(mmap, tmp_path):
    arrays = _arrays(tmp_path)
    value = {"model": arrays, "plain": [1, -300, 2**70, 1.5, None, True, "½", (), []]}
    write_torch_file(tmp_path / "b.pt", value)
    found = torch.load(tmp_path / "b.pt", weights_only=True, mmap=mmap)
    assert found["plain"] == value["plain"]
    for name, tensor in tensors().items():
        assert_same(arrays[name], found["model"][name])
        assert_same(arrays[name], tensor)


def _arrays(folder):
    torch.save(tensors(), folder / "a.pt")
    return read_torch_file(folder / "a.pt")


def test_torch_refuses_what_is_refused_here(tmp_path):
    """The older format, and an expanded tensor, which torch reads: it is to be made contiguous."""
    torch.save(tensors(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"torch\.save\(torch\.load"):
        read_torch_file(tmp_path / "old.pt")
    torch.save(torch.ones(1).expand(10**6), tmp_path / "wide.pt")
    with pytest.raises(ValueError, match="storage of 1 elements does not hold"):
        read_torch_file(tmp_path / "wide.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_is_read(tmp_path):
    nested = {"model": {name: tensor for name, tensor in tensors().items() if tensor.numel()}, "step": 5}
    dcp.save(nested, checkpoint_id=tmp_path / "it", no_dist=True)
    found = read_torch_distributed(tmp_path / "it")
    assert {name: read() for name, read in found.others.items()} == {"step": 5}
    for name, tensor in nested["model"].items():
        assert_same(np.asarray(found.tensors[f"model.{name}"]), tensor)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_reads_a_distributed_checkpoint_of_ours(tmp_path):
    arrays, wanted = _arrays(tmp_path), tensors()
    write_torch_distributed(tmp_path / "it", {**arrays, "step": [{"at": 5}]})
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()} | {"step": None}
    dcp.load(found, checkpoint_id=tmp_path / "it", no_dist=True)
    assert found.pop("step") == [{"at": 5}]
    for name, tensor in found.items():
        assert_same(arrays[name], tensor)
    dcp_to_torch_save(tmp_path / "it", tmp_path / "whole.pt")
    assert torch.load(tmp_path / "whole.pt", weights_only=True).keys() == {*wanted, "step"}


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True


@pytest.fixture
def recipes(monkeypatch):
    """A module of the name and with the classes that pickles of Transformer Engine name."""
    name = "transformer_engine.common.recipe"
    module = types.ModuleType(name)
    for each in (_FormatHelper, Format, DelayedScaling):
        monkeypatch.setattr(each, "__module__", name)
        setattr(module, each.__name__, each)
    for package in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, name, module)


def put_megatrons_reader_of_storages(monkeypatch):
    """Do what importing Megatron-Core does to torch, with a function of that name."""

    def safe_load_from_bytes(data):
        raise AssertionError("pickles are read without running what they name")

    module = types.ModuleType("megatron.core.safe_globals")
    module.safe_load_from_bytes = safe_load_from_bytes
    safe_load_from_bytes.__module__, safe_load_from_bytes.__qualname__ = module.__name__, "safe_load_from_bytes"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", safe_load_from_bytes)


@pytest.mark.parametrize("beside_megatron", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_an_extra_state_that_pickle_wrote_is_read(split, beside_megatron, recipes, monkeypatch):
    """As ``get_extra_state`` makes it, and as Megatron splits it: columns of tensors, with the whole storage."""
    if beside_megatron:
        put_megatrons_reader_of_storages(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    whole = {"scale_fwd": (6,), "amax_history_fwd": (4, 6), "scale_bwd": (4,), "amax_history_bwd": (4, 4)}
    state = {name: torch.rand(shape, generator=generator) for name, shape in whole.items()}
    if split:
        counts = {"fwd": 3, "bwd": 2}
        state = {name: each.view(*each.shape[:-1], counts[name[-3:]], -1)[..., 1] for name, each in state.items()}
    recipe = DelayedScaling(margin=1, amax_history_len=4)
    data = pickle.dumps({**state, "recipe": recipe, "extra_fp8_variables": {"num_gemms": 1 if split else 2}})
    found = read_extra_state(data, "an entry")
    assert found.gemms == (1 if split else 2)
    for name, tensor in state.items():
        np.testing.assert_array_equal(getattr(found, name), tensor.numpy(), err_msg=name)
    assert found.recipe == {**vars(recipe), "fp8_format": "HYBRID"}


def test_an_extra_state_that_is_written_pickle_reads(recipes):
    rng = np.random.default_rng(0)
    shapes = {"scale_fwd": (6,), "amax_history_fwd": (4, 6), "scale_bwd": (4,), "amax_history_bwd": (4, 4)}
    arrays = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    fields = {"margin": 1, "fp8_format": "E4M3", "amax_history_len": 4, "amax_compute_algo": "most_recent"}
    found = pickle.loads(write_extra_state(ExtraState(**arrays, recipe=fields)))
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].numpy(), array, err_msg=name)
    assert found["recipe"] == DelayedScaling(1, Format.E4M3, 4, "most_recent")
    assert found["extra_fp8_variables"]["num_gemms"] == 2
