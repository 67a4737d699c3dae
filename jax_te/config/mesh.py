"""Sizes of a device mesh."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from math import prod

from jax_te._validation import check_positive, checked

MESH_AXES = ("pipeline", "data", "fsdp", "context", "tensor")
"""Mesh axis names in the order devices are laid out; the last one changes fastest.

Neighbouring devices have the fastest links, so the axes lie in the order of what they communicate: the tensor axis
twice a block, the context axis once a block, FSDP once a layer, data parallelism once a step, and a pipeline's stages
only exchange activations. It is Megatron's default order ``tp-cp-dp-pp``, read from the last axis."""

RESERVED_AXES = {"expert": "experts of a mixture"}
"""Reserved axis names, with their purpose. No mesh has them yet, and other axes must not use them."""


def check_mesh_axis(name: str) -> None:
    """Raise ValueError for a mesh axis name that is reserved.

    >>> check_mesh_axis("tensor")
    """
    if name in RESERVED_AXES:
        raise ValueError(
            f"mesh axis {name!r} is reserved for {RESERVED_AXES[name]} and not there yet; the axes that are there: "
            f"{', '.join(MESH_AXES)}"
        )


@checked
@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the device mesh's axes.

    Args:
        pipeline: devices among which the layers are split (Megatron's pipeline-parallel size); `jax_te.training` runs
            them as stages. Everywhere else it is one more ``fsdp`` axis.
        data: replicas that shard the batch and hold all parameters (Megatron's data-parallel ranks).
        fsdp: devices that shard the batch, and parameters, gradients and optimizer state too (ZeRO-3).
        context: devices that shard the sequence, in attention and everywhere else (Megatron's context-parallel size).
        tensor: devices that shard heads, feed-forward and vocabulary (Megatron's tensor-parallel size).
        expert: must be 1: the axis is reserved.

    Raises:
        ValueError: for a size that is not an integer >= 1; for a reserved axis.

    Source: ``megatron.core.parallel_state.initialize_model_parallel``.

    >>> ParallelConfig(data=2, tensor=4).num_devices
    8
    """

    pipeline: int = 1
    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    expert: InitVar[int] = 1
    # As of jax.sharding.Mesh, for code that takes either.
    axis_names: tuple[str, ...] = field(default=MESH_AXES, init=False, repr=False)

    def __post_init__(self, expert: int) -> None:
        # The reserved axis is an argument already, so that requesting it gives an explanatory error.
        if expert != 1:
            check_mesh_axis("expert")
        check_positive(**{name: getattr(self, name) for name in MESH_AXES})

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes in the order of `MESH_AXES`."""
        return tuple(getattr(self, name) for name in MESH_AXES)

    @property
    def num_devices(self) -> int:
        """Devices the mesh takes."""
        return prod(self.shape)

    @classmethod
    def parse(cls, text: str) -> ParallelConfig:
        """Return the sizes in ``"data=2,fsdp=2,tensor=2"``; axes left out are 1.

        Raises:
            ValueError: for an unknown, reserved or repeated axis, or a size that is not an integer >= 1.

        >>> ParallelConfig.parse("context=2,tensor=2")
        ParallelConfig(pipeline=1, data=1, fsdp=1, context=2, tensor=2)
        """
        sizes: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            check_mesh_axis(name)
            if name not in MESH_AXES:
                raise ValueError(f"unknown mesh axis {name!r} in {text!r}; allowed: {', '.join(MESH_AXES)}")
            if name in sizes:
                raise ValueError(f"mesh axis {name!r} is given twice in {text!r}")
            # int() would also take "+2", " 2" and "2_0".
            if not value.isdigit():
                raise ValueError(f"mesh axis {name!r} needs an integer size >= 1, got {value!r} in {text!r}")
            sizes[name] = int(value)
        return cls(**sizes)
