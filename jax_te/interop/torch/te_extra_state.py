"""The ``_extra_state`` of a linear layer of Transformer Engine: scales and amax histories of delayed scaling."""

from __future__ import annotations

import functools
import io
import itertools
import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_te.errors import CheckpointMismatchError
from jax_te.interop.torch.pickles import Global, Record, read_pickle
from jax_te.interop.torch.read_file import TENSOR_HANDLERS, plain_storage
from jax_te.interop.torch.write_file import pickled

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
# Megatron-Core puts a function of its own in the place of torch's, and pickles made beside it name that one.
_READERS_OF_STORAGES = ("torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes")
_RECIPE = "transformer_engine.common.recipe"
_ARRAYS = {"scale_fwd": 1, "amax_history_fwd": 2, "scale_bwd": 1, "amax_history_bwd": 2}
"""Arrays of a state, and their axes."""

# Values of Transformer Engine's ``Format``, by which pickles name its members.
_FORMATS = {"E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344)}


class ExtraState(NamedTuple):
    """State of delayed scaling of a layer of ``g`` GEMMs.

    Args:
        scale_fwd: scales of the next use, fp32 ``[3 g]``: of the inputs of all GEMMs, of their weights, their outputs.
        amax_history_fwd: fp32 ``[L, 3 g]``: in row 0 the amax since the last update, in the last row the newest one
            before, and in row 1 the oldest one.
        scale_bwd, amax_history_bwd: the same of the gradients of outputs and of inputs, ``[2 g]`` and ``[L, 2 g]``.
        recipe: fields of ``DelayedScaling``; the format's name. Those that are absent have the class's defaults.
    """

    scale_fwd: np.ndarray
    amax_history_fwd: np.ndarray
    scale_bwd: np.ndarray
    amax_history_bwd: np.ndarray
    recipe: Mapping[str, Any]

    @property
    def gemms(self) -> int:
        """Number of GEMMs."""
        return self.scale_bwd.size // 2


def read_extra_state(data: bytes, what: str) -> ExtraState | None:
    """Return the state in the bytes of an ``_extra_state``, without running what they name.

    Args:
        data: the bytes.
        what: name of the entry, for messages.

    Returns:
        None for a layer without FP8, and for a recipe without state.

    Raises:
        CheckpointMismatchError: for arrays of other shapes.
        ValueError: for bytes that are no pickle of this form.

    Source: ``get_extra_state`` of ``transformer_engine.pytorch``'s modules.
    """
    if not data:
        return None
    storage = functools.partial(_read_storage, what=what)
    values_of_file = read_pickle(data, what, {**TENSOR_HANDLERS, **dict.fromkeys(_READERS_OF_STORAGES, storage)})
    if not isinstance(values_of_file, dict) or not _ARRAYS.keys() <= values_of_file.keys():
        return None
    arrays = {name: np.asarray(values_of_file[name]) for name in _ARRAYS}
    gemms = arrays["scale_bwd"].size // 2
    length = len(arrays["amax_history_fwd"]) if arrays["amax_history_fwd"].ndim else 0
    columns = {"fwd": 3 * gemms, "bwd": 2 * gemms}
    for name, axes in _ARRAYS.items():
        shape = (length, columns[name[-3:]])[2 - axes :]
        if arrays[name].shape != shape or arrays[name].dtype != np.float32 or not all(shape):
            raise CheckpointMismatchError(
                f"{what}: {name} is {arrays[name].dtype}{list(arrays[name].shape)}, and must be float32{list(shape)} "
                f"for {gemms} GEMMs"
            )
    recipe = values_of_file.get("recipe")
    fields = dict(recipe.state) if isinstance(recipe, Record) and isinstance(recipe.state, dict) else {}
    if isinstance(form := fields.get("fp8_format"), Record):
        values = form.args[0].args if form.args and isinstance(form.args[0], Record) else None
        fields["fp8_format"] = next((name for name, known in _FORMATS.items() if known == values), str(values))
    return ExtraState(**arrays, recipe=fields)


def write_extra_state(state: ExtraState) -> bytes:
    """Return the bytes of an ``_extra_state``, for ``set_extra_state`` of Transformer Engine 2.

    Source: ``get_extra_state`` of ``transformer_engine.pytorch``'s modules.
    """
    form = _FORMATS[state.recipe["fp8_format"]]
    helper = f"c{_RECIPE}\n_FormatHelper\n".encode() + _plain(form) + b"\x81"
    fields = [_plain(name) + _plain(value) for name, value in state.recipe.items() if name != "fp8_format"]
    fields.append(_plain("fp8_format") + f"c{_RECIPE}\nFormat\n(".encode() + helper + b"tR")
    recipe = f"c{_RECIPE}\nDelayedScaling\n)\x81".encode("latin-1") + b"}(" + b"".join(fields) + b"ub"
    extra = {
        "fp8_checkpoint": True,
        "fp8_max_fwd": float(form[0]),
        "fp8_max_bwd": float(form[1]),
        "num_gemms": state.gemms,
    }
    entries = [_plain(name) + _tensor(getattr(state, name)) for name in _ARRAYS]
    entries += [_plain("recipe") + recipe, _plain("extra_fp8_variables") + _plain(extra)]
    return b"\x80\x04}(" + b"".join(entries) + b"u."


def _plain(value: Any) -> bytes:
    return b"".join(pickled(value, []))


def _tensor(array: np.ndarray) -> bytes:
    """Return the opcodes that build a tensor, with its own storage in torch's older format."""
    strides = tuple(stride // array.itemsize for stride in np.ascontiguousarray(array).strides)
    stored = _storage(np.ascontiguousarray(array))
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\nB"
        + struct.pack("<I", len(stored))
        + stored
        + b"\x85RK\x00"
        + _plain(array.shape)
        + _plain(strides)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def _storage(array: np.ndarray) -> bytes:
    """Return a storage of fp32 as ``torch.save(storage, file, _use_new_zipfile_serialization=False)`` writes it."""
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": _VERSION, "little_endian": True, "type_sizes": sizes}
    place = b"(" + _plain("storage") + b"ctorch\nFloatStorage\n" + b"".join(map(_plain, ("0", "cpu", array.size, None)))
    parts = [_plain(_MAGIC), _plain(_VERSION), _plain(system), place + b"tQ", _plain(["0"])]
    pickles = b"".join(b"\x80\x02" + part + b"." for part in parts)
    return pickles + struct.pack("<q", array.size) + array.tobytes()


def _read_storage(data: Any, *, what: str) -> Any:
    """Return a storage in torch's older format: pickles, and the bytes behind them."""
    if not isinstance(data, bytes):
        raise TypeError("a storage that is not bytes")
    magic, _, _, stored, keys = (read() for read in _pickles(data, what, 5))
    kind, dtype, key, _, count, *_ = stored if isinstance(stored, tuple) else ((None,) * 5)
    end = sum(_lengths(data, 5))
    if magic != _MAGIC or kind != "storage" or not isinstance(dtype, Global) or keys != [key] or type(count) is not int:
        raise ValueError("a storage of another format")
    if data[end : end + 8] != struct.pack("<q", count):
        raise ValueError("a storage of another size")
    return plain_storage(data[end + 8 :], dtype, count, what)


def _pickles(data: bytes, what: str, count: int) -> list[Callable[[], Any]]:
    """Return functions that read the first pickles of data."""
    begin, readers = 0, []
    for length in _lengths(data, count):
        part = data[begin : begin + length]
        readers.append(functools.partial(read_pickle, part, what, {}, lambda place: place))
        begin += length
    return readers


def _lengths(data: bytes, count: int) -> list[int]:
    """Return the numbers of bytes of the first pickles of data."""
    file, ends = io.BytesIO(data), [0]
    for _ in range(count):
        for _ in pickletools.genops(file):
            pass
        ends.append(file.tell())
    return [end - begin for begin, end in itertools.pairwise(ends)]
