"""Names of `jax_te.interop.huggingface` for the other packages of jax_te.."""

from jax_te.interop.huggingface.architectures.registry import read_form
from jax_te.interop.huggingface.capabilities import TIED, Architecture, Form, Options, model_options
from jax_te.interop.huggingface.config_json import REQUIRED, Fields
from jax_te.interop.huggingface.folder import CONFIG, INDEX, SINGLE, json_file, open_tensors
from jax_te.interop.huggingface.load import OnProgress, load_tensors, released
from jax_te.interop.huggingface.save import on_host, placed_arrays, said_form
from jax_te.interop.huggingface.tensor_patterns import Table, layers

__all__ = [
    "CONFIG",
    "INDEX",
    "REQUIRED",
    "SINGLE",
    "TIED",
    "Architecture",
    "Fields",
    "Form",
    "OnProgress",
    "Options",
    "Table",
    "json_file",
    "layers",
    "load_tensors",
    "model_options",
    "on_host",
    "open_tensors",
    "placed_arrays",
    "read_form",
    "released",
    "said_form",
]
