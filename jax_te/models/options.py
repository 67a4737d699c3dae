"""Options of the models, in groups: how a model runs, and how its position embeddings are computed."""

from __future__ import annotations

from dataclasses import dataclass

from jax_te._validation import check_positive, checked
from jax_te.config import MLATransformerConfig, RecomputeConfig, TransformerConfig
from jax_te.layers import RotaryScaling
from jax_te.megatron import mla_rotary
from jax_te.models.stack import MaskTypes, ScanChoice, StackOptions, check_recompute_policy
from jax_te.remat import RecomputePolicy


@checked
@dataclass(frozen=True)
class Execution:
    """Execution of a model: options that trade memory, speed and compile time, and affect results only by rounding (and
    by dropout masks, for a batch in parts).

    Args:
        recompute_policy: `jax_te.remat.RecomputePolicy` or its name: the residuals that are saved inside of layers that
            ``config.recompute_granularity="full"`` recomputes. ``"full"``: none.
        scan_layers: whether to run the layers in a loop, see `run_layers`; the same parameters, compiled sooner.
            ``"auto"``: only stacks of many layers, see `runs_scanned`.
        loss_chunks: number of pieces of the sequence whose logits the loss computes one after the other, see
            `linear_cross_entropy`; must divide the sequence length. 1: all at once, as it must be for
            ``config.fp8_output_proj``.
        batch_parts: number of parts of the batch that take turns in every layer, so that the collectives of one run
            beside the GEMMs of another; must divide the rows of each device, in evaluation, too. With tensor
            parallelism take 2. Kernels are read, and under FSDP all-gathered, for each part; each has its own dropout
            masks and, under current scaling, its own amaxes.

    Raises:
        ValueError: for another ``scan_layers``, or ``loss_chunks`` or ``batch_parts`` below 1.

    Source of ``batch_parts``: Wang et al. 2024, "Domino: Eliminating Communication in LLM Training via Generic Tensor
    Slicing and Overlapping"; in place of ``tp_comm_overlap`` of Megatron-Core.

    >>> Execution(scan_layers=True).loss_chunks
    1
    """

    recompute_policy: RecomputePolicy | str = "full"
    scan_layers: ScanChoice = "auto"
    loss_chunks: int = 1
    batch_parts: int = 1

    def __post_init__(self) -> None:
        check_positive(loss_chunks=self.loss_chunks, batch_parts=self.batch_parts)

    def of_stack(self, config: RecomputeConfig, mask_types: MaskTypes | None = None) -> StackOptions:
        """Return the options of the model's stack of layers.

        Args:
            config: layers, or modules of layers, that backward recomputes.
            mask_types: see `run_layers`.

        >>> Execution(batch_parts=2).of_stack(RecomputeConfig()).batch_parts
        2
        """
        return StackOptions(
            recompute=config,
            policy=self.recompute_policy,
            scan=self.scan_layers,
            batch_parts=self.batch_parts,
            mask_types={} if mask_types is None else mask_types,
        )

    def check(self, config: RecomputeConfig) -> None:
        """Raise ValueError for a recompute policy that is unknown or has no effect under ``config``."""
        check_recompute_policy(config, self.recompute_policy)


@checked
@dataclass(frozen=True)
class Multipliers:
    """Constants of a model, its attribute ``multipliers``: ``model.multipliers = Multipliers(...)``.

    Args:
        embedding: factor of the token embeddings, in the parameters' dtype. Gemma has ``h**0.5``.
        head: factor of the head's input. T5 with a tied head has ``h**-0.5``.
        softcap: softcap of the head's output: logits are ``cap tanh(logits / cap)``, computed in fp32. Gemma 2 has 30.
            None: no cap.

    Raises:
        ValueError: for a number that is not positive.

    Source: ``mup_embedding_mult`` and ``mup_output_mult`` of Megatron-Core; Gemma Team 2024; Raffel et al. 2020.

    >>> Multipliers(embedding=8.0).head
    1.0
    """

    embedding: float = 1.0
    head: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0.0:
                raise ValueError(f"{name} must be > 0, got {value!r}")


@checked
@dataclass(frozen=True)
class RotaryPositions:
    """Rotary position embeddings of a `GPTModel`, see `jax_te.layers.rotary_embedding`.

    Args:
        base: base of the geometric series of wavelengths, which grow from 2π to 2π times this number. Llama 3.1 has
            ``500000.0``.
        percent: the part of each head that is rotated, in (0, 1].
        scaling: scaling of the frequencies, for sequences longer than those of training. Llama 3.1 has `Llama3Scaling`.
        window_base: base in the layers that attend in a window, where nothing is scaled. Gemma 3 has ``10000.0`` beside
            a ``base`` of ``1000000.0``. None: those layers are as the others.
        interleaved: whether neighbouring features form a pair, as in DeepSeek's latent attention, see
            `rotary_embedding`.

    >>> RotaryPositions(base=500000.0).percent
    1.0
    """

    base: float = 10000.0
    percent: float = 1.0
    scaling: RotaryScaling | None = None
    window_base: float | None = None
    interleaved: bool = False


def rotary_positions(config: TransformerConfig, given: RotaryPositions | None) -> RotaryPositions | None:
    """Return how a model's positions rotate: as an `MLATransformerConfig` says, else as ``given``.

    Raises:
        ValueError: for ``given`` that contradicts an `MLATransformerConfig`.

    >>> config = MLATransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, rope_type="rope")
    >>> rotary_positions(config, None)
    RotaryPositions(base=10000.0, percent=1.0, scaling=None, window_base=None, interleaved=True)
    """
    if not isinstance(config, MLATransformerConfig):
        return given
    options = mla_rotary(config)
    own = RotaryPositions(
        options["base"], options["rotary_percent"], options["scaling"], interleaved=options["interleaved"]
    )
    if given in (None, own):
        return own
    raise ValueError(
        f"the model's {given} contradicts its MLATransformerConfig, whose fields give {own}; give "
        "position_embedding_type='rope' without rotary options, or a TransformerConfig with latent_attention"
    )


@checked
@dataclass(frozen=True)
class RelativePositions:
    """Relative position biases of a `T5Model`, see `jax_te.layers.RelativePositionBias`.

    Args:
        num_buckets: rows of the table of biases.
        max_distance: distance from which on all share one bucket.

    >>> RelativePositions(num_buckets=8).max_distance
    128
    """

    num_buckets: int = 32
    max_distance: int = 128
