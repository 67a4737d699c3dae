"""Folders as torch.distributed.checkpoint writes them, made without torch."""

import itertools
import pickle
import sys
import types
from contextlib import contextmanager

import numpy as np

from jax_te.interop.torch import write_torch_file

METADATA, FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
CLASSES = {
    **dict.fromkeys(("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"), METADATA),
    **dict.fromkeys(("MetadataIndex", "TensorProperties"), METADATA),
    "_StorageInfo": FILESYSTEM,
    "Size": "torch",
}


@contextmanager
def classes():
    """Yield classes that pickle writes under torch's names."""
    found = {}
    stubs = {name: types.ModuleType(name) for name in {*CLASSES.values()}}
    for name, module in CLASSES.items():
        bases = (tuple,) if name == "Size" else ()
        members = {"__reduce__": lambda self: (type(self), (tuple(self),))} if name == "Size" else {}
        found[name] = type(name, bases, {"__module__": module, "__qualname__": name, **members})
        setattr(stubs[module], name, found[name])
    kept = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        yield found
    finally:
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


class DType:
    """Pickled as torch's dtypes are: a name in its module."""

    def __init__(self, name):
        self.name, self.__module__ = name, "torch"

    def __reduce__(self):
        return self.name


def write_distributed(folder, arrays, others=None, change=None):
    """Write arrays in up to four chunks each, and other values, in two files; ``change`` changes places by name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [bytearray(), bytearray()]
    with classes() as kinds:

        def make(kind, **state):
            made = kinds[kind]()
            made.__dict__.update(state)
            return made

        entries = {name: make("BytesStorageMetadata") for name in others or {}}
        places = {}
        for name, value in (others or {}).items():
            write_torch_file(folder / "chunk.pt", value)
            data = (folder / "chunk.pt").read_bytes()
            place = {"relative_path": "__0_0.distcp", "offset": len(files[0]), "length": len(data)}
            place |= {"transform_descriptors": None} | (change(name, place) if change else {})
            places[make("MetadataIndex", fqn=name, offset=None, index=None)] = make("_StorageInfo", **place)
            files[0] += data
        for name, array in arrays.items():
            cuts = [
                [0, size // 2, size] if size > 1 and axis < 2 else [0, size] for axis, size in enumerate(array.shape)
            ]
            chunks = []
            for index, corner in enumerate(itertools.product(*[list(itertools.pairwise(cut)) for cut in cuts])):
                part = array[tuple(slice(*ends) for ends in corner)]
                write_torch_file(folder / "chunk.pt", np.array(part, order="C"))
                data, at = (folder / "chunk.pt").read_bytes(), index % 2
                offsets, sizes = kinds["Size"](begin for begin, _ in corner), kinds["Size"](part.shape)
                chunks.append(make("ChunkStorageMetadata", offsets=offsets, sizes=sizes))
                place = {"relative_path": f"__{at}_0.distcp", "offset": len(files[at]), "length": len(data)}
                place |= {"transform_descriptors": None} | (change(name, place) if change else {})
                places[make("MetadataIndex", fqn=name, offset=offsets, index=index)] = make("_StorageInfo", **place)
                files[at] += data
            properties = kinds["TensorProperties"]()
            properties.__class__.__getstate__ = lambda self: (self.dtype, None, False, 0, False)
            sys.modules["torch"].__dict__.setdefault(array.dtype.name, DType(array.dtype.name))
            properties.__dict__["dtype"] = sys.modules["torch"].__dict__[array.dtype.name]
            sizes = kinds["Size"](array.shape)
            entries[name] = make("TensorStorageMetadata", properties=properties, size=sizes, chunks=chunks)
        described = make("Metadata", state_dict_metadata=entries, planner_data=None, storage_data=places)
        (folder / ".metadata").write_bytes(pickle.dumps(described))
    (folder / "chunk.pt").unlink(missing_ok=True)
    for at, data in enumerate(files):
        (folder / f"__{at}_0.distcp").write_bytes(data)
