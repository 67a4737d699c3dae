"""Sizes of a device mesh."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from jax_te._text import parse_pairs
from jax_te._validation import check_positive, checked

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axis names in the order devices are laid out; the last one changes fastest.

Neighbouring devices have the fastest links, so the axes lie in the order of what they communicate: the tensor axis
twice a block, the context axis once a block, the expert axis twice in a block of experts, FSDP once a layer, data
parallelism once a step, and a pipeline's stages only exchange activations. It is Megatron's default order
``tp-cp-ep-dp-pp``, read from the last axis."""


@checked
@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the device mesh's axes.

    Args:
        pipeline: devices among which the layers are split (Megatron's pipeline-parallel size); `jax_te.training` runs
            them as stages. Everywhere else it is one more ``fsdp`` axis.
        data: replicas that shard the batch and hold all parameters (Megatron's data-parallel ranks).
        fsdp: devices that shard the batch, and parameters, gradients and optimizer state too (ZeRO-3).
        expert: devices among which the experts of a mixture are split (Megatron's expert-parallel size). They shard the
            batch, too, and hold all other parameters.
        context: devices that shard the sequence, in attention and everywhere else (Megatron's context-parallel size).
        tensor: devices that shard heads, feed-forward and vocabulary (Megatron's tensor-parallel size).

    Raises:
        ValueError: for a size that is not an integer >= 1.

    Source: ``megatron.core.parallel_state.initialize_model_parallel``.

    >>> ParallelConfig(data=2, tensor=4).num_devices
    8
    """

    pipeline: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    # As of jax.sharding.Mesh, for code that takes either.
    axis_names: tuple[str, ...] = field(default=MESH_AXES, init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive(**{name: getattr(self, name) for name in MESH_AXES})

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes in the order of `MESH_AXES`."""
        return tuple(getattr(self, name) for name in MESH_AXES)

    @property
    def num_devices(self) -> int:
        """Devices the mesh takes."""
        return prod(self.shape)

    @property
    def batch_devices(self) -> int:
        """Number of devices among which a batch is split (Megatron's data-parallel size)."""
        return self.data * self.fsdp * self.expert

    @classmethod
    def parse(cls, text: str) -> ParallelConfig:
        """Return the sizes in ``"data=2,fsdp=2,tensor=2"``; axes left out are 1.

        Raises:
            ValueError: for an unknown or repeated axis, or a size that is not an integer >= 1.

        >>> ParallelConfig.parse("context=2,tensor=2")
        ParallelConfig(pipeline=1, data=1, fsdp=1, expert=1, context=2, tensor=2)
        """
        sizes: dict[str, int] = {}
        for name, value in parse_pairs(text, MESH_AXES, "mesh axis").items():
            # int() would also take "+2", " 2" and "2_0".
            if not value.isdecimal():
                raise ValueError(f"mesh axis {name!r} needs an integer size >= 1, got {value!r} in {text!r}")
            sizes[name] = int(value)
        return cls(**sizes)
