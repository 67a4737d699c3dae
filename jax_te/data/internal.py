"""Names of `jax_te.data` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.data.batches import text_crc32, whole_batches
from jax_te.data.sources import Tokens, read_tokens
from jax_te.data.tokenizer import FILE_NAME, tokenizer_file

__all__ = ["FILE_NAME", "Tokens", "read_tokens", "text_crc32", "tokenizer_file", "whole_batches"]
