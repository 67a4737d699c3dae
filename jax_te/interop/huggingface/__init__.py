"""Checkpoints of Hugging Face: models from folders that transformers wrote, and back."""

from jax_te.interop.huggingface.architectures.registry import ARCHITECTURES
from jax_te.interop.huggingface.load import load_huggingface
from jax_te.interop.huggingface.save import save_huggingface

__all__ = ["ARCHITECTURES", "load_huggingface", "save_huggingface"]
