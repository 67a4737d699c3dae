"""Sizes of a device mesh."""

from __future__ import annotations

from dataclasses import dataclass, field

from jax_te.config.checks import check_positive

MESH_AXES = ("data", "fsdp", "tensor")
"""Mesh axis names in the order devices are laid out; the last one changes fastest."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the device mesh's axes.

    Args:
        data: replicas that split the batch and hold all parameters.
        fsdp: ranks that split the batch and the parameters (ZeRO-3).
        tensor: ranks that split heads, feed-forward and vocabulary (Megatron's tensor parallel size).

    >>> ParallelConfig(data=2, tensor=4).num_devices
    8
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    axis_names: tuple[str, ...] = field(default=MESH_AXES, init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive(data=self.data, fsdp=self.fsdp, tensor=self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes in the order of `MESH_AXES`."""
        return tuple(getattr(self, name) for name in MESH_AXES)

    @property
    def num_devices(self) -> int:
        """Devices the mesh takes."""
        return self.data * self.fsdp * self.tensor

    @classmethod
    def parse(cls, text: str) -> ParallelConfig:
        """From ``"data=2,fsdp=2,tensor=2"``; axes left out are 1.

        Raises:
            ValueError: for an unknown or repeated axis, or a size that is not an integer >= 1.

        >>> ParallelConfig.parse("tensor=2")
        ParallelConfig(data=1, fsdp=1, tensor=2)
        """
        sizes: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            if name not in MESH_AXES:
                raise ValueError(f"unknown mesh axis {name!r} in {text!r}; allowed: {', '.join(MESH_AXES)}")
            if name in sizes:
                raise ValueError(f"mesh axis {name!r} is given twice in {text!r}")
            if not value.isdigit():
                raise ValueError(f"mesh axis {name!r} needs an integer size >= 1, got {value!r} in {text!r}")
            sizes[name] = int(value)
        return cls(**sizes)
