"""Checkpoints of Megatron-LM: folders as one flat dict, and models from them and back."""

from jax_te.interop.megatron.folder import RANK_FILE, TRACKER, read_megatron
from jax_te.interop.megatron.load import load_megatron
from jax_te.interop.megatron.save import save_megatron

# For users. The other names above are for the other packages of jax_te.
__all__ = ["load_megatron", "read_megatron", "save_megatron"]
