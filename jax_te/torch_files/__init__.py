"""Files of PyTorch, read and written without torch: ``torch.save``, ``torch.distributed.checkpoint``, Megatron-LM."""

from jax_te.torch_files.distributed import read_torch_distributed
from jax_te.torch_files.file import read_torch_file
from jax_te.torch_files.megatron_folder import read_megatron
from jax_te.torch_files.megatron_model import load_megatron, save_megatron
from jax_te.torch_files.te_state_dict import load_te_state_dict
from jax_te.torch_files.write import write_torch_file
from jax_te.torch_files.write_distributed import write_torch_distributed

__all__ = [
    "load_megatron",
    "load_te_state_dict",
    "read_megatron",
    "read_torch_distributed",
    "read_torch_file",
    "save_megatron",
    "write_torch_distributed",
    "write_torch_file",
]
