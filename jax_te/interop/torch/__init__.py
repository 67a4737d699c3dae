"""PyTorch files without torch: ``torch.save``, ``torch.distributed.checkpoint``, te.pytorch's state dicts."""

from jax_te.interop.torch.pickles import Record
from jax_te.interop.torch.read_distributed import METADATA, read_torch_distributed
from jax_te.interop.torch.read_file import Mapped, open_torch_file, read_torch_file
from jax_te.interop.torch.stored_tensor import Piece, StoredTensor, Tensor, join_tensors
from jax_te.interop.torch.te_extra_state import ExtraState, read_extra_state, write_extra_state
from jax_te.interop.torch.te_state_dict import load_te_state_dict
from jax_te.interop.torch.write_distributed import write_torch_distributed
from jax_te.interop.torch.write_file import write_torch_file

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "load_te_state_dict",
    "read_torch_distributed",
    "read_torch_file",
    "write_torch_distributed",
    "write_torch_file",
]
