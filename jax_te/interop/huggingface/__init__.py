"""Checkpoints of Hugging Face: models from folders that transformers wrote, and back."""

from jax_te.interop.huggingface.architectures.registry import ARCHITECTURES, named_classes, read_form
from jax_te.interop.huggingface.folder import (
    ADAPTER_TENSORS,
    CONFIG,
    INDEX,
    SINGLE,
    config_values,
    json_file,
    open_adapters,
    open_tensors,
)
from jax_te.interop.huggingface.load import load_huggingface
from jax_te.interop.huggingface.peft_load import load_peft
from jax_te.interop.huggingface.peft_save import save_peft
from jax_te.interop.huggingface.save import companions, save_huggingface

# For users. The other names above are for the other packages of jax_te.
__all__ = ["ARCHITECTURES", "load_huggingface", "load_peft", "save_huggingface", "save_peft"]
