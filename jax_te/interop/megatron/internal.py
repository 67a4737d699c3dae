"""Names of `jax_te.interop.megatron` for the other packages of jax_te.."""

from jax_te.interop.megatron.folder import TRACKER

__all__ = ["TRACKER"]
