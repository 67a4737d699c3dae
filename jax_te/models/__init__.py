"""Language models built from the layers."""

from jax_te.models.bert import BertModel
from jax_te.models.from_config import transformer_layer
from jax_te.models.generate import generate
from jax_te.models.gpt import POSITION_EMBEDDINGS, GPTModel
from jax_te.models.language_model import LanguageModel
from jax_te.models.megatron_gpt import MegatronGPTModel
from jax_te.models.multi_token import multi_token_metrics
from jax_te.models.options import Execution, Multipliers, RelativePositions, RotaryPositions
from jax_te.models.stack import (
    UNROLL_LIMIT,
    ModelInParts,
    StackInput,
    StackOptions,
    check_recompute_policy,
    layers_traced_once,
    run_layers,
    runs_scanned,
)
from jax_te.models.t5 import T5_POSITION_EMBEDDINGS, T5Model
from jax_te.models.upcycle import upcycle

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "POSITION_EMBEDDINGS",
    "T5_POSITION_EMBEDDINGS",
    "UNROLL_LIMIT",
    "BertModel",
    "Execution",
    "GPTModel",
    "MegatronGPTModel",
    "ModelInParts",
    "Multipliers",
    "RelativePositions",
    "RotaryPositions",
    "StackInput",
    "StackOptions",
    "T5Model",
    "generate",
    "multi_token_metrics",
    "run_layers",
    "runs_scanned",
    "transformer_layer",
    "upcycle",
]
