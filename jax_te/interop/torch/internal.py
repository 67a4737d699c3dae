"""Names of `jax_te.interop.torch` for the other packages of jax_te.."""

from jax_te.interop.torch.pickles import Record
from jax_te.interop.torch.read_distributed import METADATA
from jax_te.interop.torch.read_file import Mapped, open_torch_file
from jax_te.interop.torch.stored_tensor import Piece, StoredTensor, Tensor, joined

__all__ = ["METADATA", "Mapped", "Piece", "Record", "StoredTensor", "Tensor", "joined", "open_torch_file"]
