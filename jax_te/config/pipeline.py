"""Pipeline schedule of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_te._validation import check_choice, check_positive, checked

PIPELINE_SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
"""Names of `make_schedule`."""


@checked
@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Schedule and split of a model's layers into pipeline stages, see `jax_te.training.pipeline`.

    Args:
        schedule: name of the schedule, one of `PIPELINE_SCHEDULES`.
        virtual_stages: chunks of layers on each stage (Megatron's ``virtual_pipeline_model_parallel_size``).
        first_layers, last_layers: layers of the first and of the last chunk, which run the embedding and the loss as
            well. None: as many as any other.

    Raises:
        ValueError: for another schedule, and numbers below 1.

    >>> PipelineConfig(schedule="zero_bubble").virtual_stages
    1
    """

    schedule: str = "1f1b"
    virtual_stages: int = 1
    first_layers: int | None = None
    last_layers: int | None = None

    def __post_init__(self) -> None:
        check_choice(PIPELINE_SCHEDULES, schedule=self.schedule)
        layers = {"first_layers": self.first_layers, "last_layers": self.last_layers}
        check_positive(virtual_stages=self.virtual_stages, **{k: v for k, v in layers.items() if v is not None})

    @classmethod
    def parse(cls, text: str) -> PipelineConfig:
        """Return the configuration in ``"1f1b,virtual_stages=2,last_layers=3"``: a schedule, then fields that differ
        from the defaults.

        Raises:
            ValueError: for another schedule, an unknown or repeated name, and a value that is not an integer >= 1.

        >>> PipelineConfig.parse("zero_bubble,last_layers=3")
        PipelineConfig(schedule='zero_bubble', virtual_stages=1, first_layers=None, last_layers=3)
        """
        schedule, *pieces = [piece.strip() for piece in text.split(",")]
        sizes: dict[str, Any] = {}
        for piece in pieces:
            name, _, value = piece.partition("=")
            if name not in ("virtual_stages", "first_layers", "last_layers") or name in sizes or not value.isdecimal():
                raise ValueError(
                    f"{piece!r} in {text!r} must be virtual_stages=N, first_layers=N or last_layers=N, and given once"
                )
            sizes[name] = int(value)
        return cls(schedule=schedule, **sizes)
