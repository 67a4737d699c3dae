"""PyTorch files without torch: ``torch.save``, ``torch.distributed.checkpoint``, te.pytorch's state dicts."""

from jax_te.interop.torch.read_distributed import read_torch_distributed
from jax_te.interop.torch.read_file import read_torch_file
from jax_te.interop.torch.te_state_dict import load_te_state_dict
from jax_te.interop.torch.write_distributed import write_torch_distributed
from jax_te.interop.torch.write_file import write_torch_file

__all__ = [
    "load_te_state_dict",
    "read_torch_distributed",
    "read_torch_file",
    "write_torch_distributed",
    "write_torch_file",
]
