"""Checkpoints of Hugging Face: models from folders that transformers wrote, and back."""

from jax_te.interop.huggingface.adapters import load_peft, save_peft
from jax_te.interop.huggingface.architectures.registry import ARCHITECTURES, named_classes, read_form
from jax_te.interop.huggingface.capabilities import TIED, Architecture, Form, Options, model_options
from jax_te.interop.huggingface.config_json import REQUIRED, Fields
from jax_te.interop.huggingface.folder import CONFIG, INDEX, SINGLE, config_values, open_tensors
from jax_te.interop.huggingface.load import OnProgress, load_huggingface, load_tensors, release_after_each
from jax_te.interop.huggingface.save import architecture_of, copy_companions, on_host, placed_arrays, save_huggingface
from jax_te.interop.huggingface.tensor_patterns import Entry, Table, converted, is_state, layer_rows, rows_of_layer

# For users. The other names above are for the other packages of jax_te.
__all__ = ["ARCHITECTURES", "load_huggingface", "load_peft", "save_huggingface", "save_peft"]
