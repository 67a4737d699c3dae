"""Names of `jax_te.huggingface` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.huggingface.architectures import read_form
from jax_te.huggingface.fields import REQUIRED, Fields
from jax_te.huggingface.folder import CONFIG, INDEX, SINGLE, json_file, open_tensors
from jax_te.huggingface.form import TIED, Architecture, Form, Options, model_options
from jax_te.huggingface.layout import Table, layers
from jax_te.huggingface.load import OnProgress, load_tensors, released
from jax_te.huggingface.save import on_host, placed_arrays, said_form

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
