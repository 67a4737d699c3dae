"""Language models built from the layers."""

from jax_te.models.generate import generate
from jax_te.models.gpt import POSITION_EMBEDDINGS, REMAT, GPTModel

__all__ = ["POSITION_EMBEDDINGS", "REMAT", "GPTModel", "generate"]
