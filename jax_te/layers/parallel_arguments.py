"""Arguments of layers for tensor and sequence parallelism: their checks, and the logical axes that they select.

The collectives themselves are in `jax_te.sharding`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.layers.quantizable import QuantizableModule
from jax_te.sharding import axis_ranks, constrain, current_mesh, leading_axes, logical_to_spec, ranks_of
from jax_te.typing import Array, LogicalAxes, TensorGroup

TENSOR_AXIS = "tensor"
"""The mesh axis that stands for Transformer Engine's tensor-parallel process group."""


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Tensor-parallel options of one layer.

    Args:
        group: None or ``"tensor"``, which both leave the split to the mesh.
        size: size of the tensor axis; 1 leaves it to the mesh. Any other size must be that of the mesh in use.
        sequence_parallel: whether to shard activations over the tensor axis along the sequence outside of the layer.
        split: whether the layer's kernels are sharded over the tensor axis.

    Raises:
        TypeError: for any other group.
        ValueError: for a size that is not positive, or sequence parallelism of a layer that is not split.

    >>> TensorParallel(group="tensor", size=2).size
    2
    """

    group: str | None = None
    size: int = 1
    sequence_parallel: bool = False
    split: bool = True

    def __post_init__(self) -> None:
        check_tp_group(self.group)
        check_positive(tp_size=self.size)
        if self.sequence_parallel and not self.split:
            raise ValueError(
                "sequence_parallel=True is for a layer whose kernel is sharded over the tensor axis: set "
                "parallel_mode='column' or 'row' (LayerNormMLP: set_parallel_mode=True), or leave sequence_parallel off"
            )

    def enter(self, x: Array, axes: LogicalAxes) -> Array:
        """Return a layer's input ``x``, sharded along the sequence if its logical axes require it.

        Raises:
            ValueError: if a size was given, and the mesh in use has a tensor axis of another size.
        """
        ranks, mesh = axis_ranks("ffn"), current_mesh()
        # Without a mesh, and in a shard_map over the axis, one device computes the whole layer, whatever its size.
        if self.size not in (1, ranks) and mesh is not None and TENSOR_AXIS not in mesh.manual_axes:
            raise ValueError(
                f"the layer was built with tp_size={self.size}, and the mesh in use has {ranks} tensor ranks; set a "
                "mesh with that many (jax.set_mesh), or build the layer with tp_size=1, which leaves it to the mesh"
            )
        return constrain(x, axes) if "sequence_parallel" in axes else x


def check_tp_group(tp_group: TensorGroup) -> None:
    """Raise TypeError unless ``tp_group`` is None or the mesh's axis ``"tensor"``.

    >>> check_tp_group("tensor")
    """
    if tp_group is not None and tp_group != TENSOR_AXIS:
        raise TypeError(
            f"tp_group must be None or the mesh axis {TENSOR_AXIS!r}, got {tp_group!r}: JAX has no process groups. "
            "jax.set_mesh(make_mesh(ParallelConfig(tensor=...))) says which devices split a layer"
        )


def check_context_size(size: int) -> None:
    """Raise ValueError unless ``size``, a ``context_parallel_size``, is 1 or that of the mesh in use, if any.

    >>> check_context_size(4)  # without a mesh one device has the whole sequence
    """
    ranks, mesh = axis_ranks("sequence"), current_mesh()
    if size not in (1, ranks) and mesh is not None and "context" not in mesh.manual_axes:
        raise ValueError(
            f"context_parallel_size is {size}, and the mesh in use has {ranks} context ranks; set a mesh with that "
            "many (jax.set_mesh), or leave it 1, which takes the mesh's"
        )


def check_expert_size(size: int) -> None:
    """Raise ValueError unless ``size``, an ``expert_model_parallel_size``, is 1 or the number of devices among which
    the mesh in use splits experts, if there is a mesh.

    >>> check_expert_size(4)  # without a mesh one device has all experts
    """
    ranks, mesh = axis_ranks("expert"), current_mesh()
    if size not in (1, ranks) and mesh is not None and not mesh.manual_axes:
        raise ValueError(
            f"expert_model_parallel_size is {size}, and the mesh in use splits experts over {ranks} devices; set one "
            "with that many (jax.set_mesh), or leave it 1, which takes the mesh's"
        )


def sequence_axes(x: Array, sequence_parallel: bool = True) -> LogicalAxes:
    """Return the logical axes of all axes of an activation but its last; with the sequence sharded if requested.

    Raises:
        ValueError: with ``sequence_parallel``, if ``x`` is not ``[b, s, ..., h]`` or ``s`` does not divide over the
            context and tensor axes together.

    >>> import jax.numpy as jnp
    >>> sequence_axes(jnp.ones((2, 8, 16)))
    ('batch', 'sequence_parallel')
    """
    axes = leading_axes(x)
    if not sequence_parallel:
        return axes
    if x.ndim < 3:
        raise ValueError(f"sequence parallelism splits the second axis of [b, s, ..., h], got shape {x.shape}")
    mesh = current_mesh()
    if mesh is not None:
        over, ranks = ranks_of(logical_to_spec(("sequence_parallel",), mesh)[0], mesh)
        if x.shape[1] % ranks:
            raise ValueError(
                f"sequence length {x.shape[1]} of {x.shape} does not divide over mesh axes {over} = {ranks}; pad it, "
                "or turn sequence_parallel off"
            )
    return ("batch", "sequence_parallel", *axes[2:])


class TensorParallelModule(QuantizableModule):
    """Base of the layers whose kernels tensor parallelism splits.

    Attributes:
        tensor_parallel: the options.
    """

    tensor_parallel: TensorParallel

    @checked
    def set_tensor_parallel_group(self, tp_group: TensorGroup) -> None:
        """Set the mesh axis over which the layer is sharded, if it was not given when the layer was built.

        There is one such axis, so the call changes nothing; Transformer Engine needs it where ``tp_size > 1``.

        Args:
            tp_group: None or ``"tensor"``.

        Raises:
            TypeError: for anything else.

        >>> from flax import nnx
        >>> from jax_te.layers import Linear
        >>> layer = Linear(16, 32, tp_size=2, parallel_mode="column", rngs=nnx.Rngs(0))
        >>> layer.set_tensor_parallel_group("tensor")
        >>> layer.tensor_parallel.group
        'tensor'
        """
        self.tensor_parallel = replace(self.tensor_parallel, group=tp_group)


def set_tensor_parallel_group(module: nnx.Module, tp_group: TensorGroup) -> None:
    """Call the same method of every layer inside of ``module``."""
    check_tp_group(tp_group)
    for _, layer in nnx.iter_modules(module):
        if isinstance(layer, TensorParallelModule):
            layer.set_tensor_parallel_group(tp_group)
