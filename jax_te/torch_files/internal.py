"""Names of `jax_te.torch_files` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.torch_files.distributed import METADATA
from jax_te.torch_files.file import open_torch_file
from jax_te.torch_files.megatron_folder import TRACKER
from jax_te.torch_files.tensors import StoredTensor

__all__ = ["METADATA", "TRACKER", "StoredTensor", "open_torch_file"]
