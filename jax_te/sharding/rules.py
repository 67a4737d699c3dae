"""Logical axis names, and the rules that map them to mesh axes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_te._validation import checked
from jax_te.config import MESH_AXES
from jax_te.typing import Array, LogicalAxes

MeshAxes = tuple[str, ...]
Dims = tuple[MeshAxes, ...]
"""Sharding of an array: the mesh axes of each of its dimensions, the outermost first; ``()``: not sharded."""

# The tensor axis is outermost: an all-gather over fsdp then yields each device's tensor shard, contiguously. The tokens
# of experts, [tokens, h], are those of [b, s, h] under sequence parallelism.
_COMPOSED = {"tokens": ("batch", "sequence_parallel"), "heads_fsdp": ("heads", "fsdp"), "ffn_fsdp": ("ffn", "fsdp")}
_SHARDED_KERNELS = {name: _COMPOSED.get(name, (name,)) for name in ("fsdp", "heads_fsdp", "ffn_fsdp")}
_COMPOSED |= {f"{name}_replicas": (*parts, "replicas") for name, parts in _SHARDED_KERNELS.items()}
# Kernel axes sharded by fsdp are all-gathered before the GEMM: for an activation the axis is whole.
_OF_ACTIVATIONS: dict[str | None, str | None] = {"fsdp": "hidden", "heads_fsdp": "heads", "ffn_fsdp": "ffn"}


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Mesh axes over which each logical axis is sharded, with the reasons.

    Axes of `jax_te.config.MESH_AXES` that the mesh does not have, and axes that it has with size 1, are left out. A
    rule may name axes of a custom mesh; `logical_to_spec` refuses those that its mesh does not have.

    Logical rules that are set in Flax (``nn.logical_axis_rules``, ``nnx.logical_axis_rules``) join them: for names that
    are not fields here, and in the place of a field's default. The first rule of a name is used, as in Linen.

    Args:
        batch: examples, over the data, FSDP and expert axes alike: devices of the FSDP axis that saw the same data
            would compute the same, and those of the expert axis outside of experts. So would those of the pipeline axis
            where no pipeline runs, as in evaluation.
        sequence: positions of activations, over the context axis: everything but attention treats each position
            alone, so only attention communicates, and activations of a long sequence fit.
        sequence_parallel: positions between the tensor-parallel parts of a layer, over the context and tensor axes:
            norms, dropout and residuals are then computed once, not on every tensor device; the all-reduce around
            them becomes an all-gather and a reduce-scatter of the same bytes. Context comes first, so that a group of
            tensor devices together holds the shard that ``sequence`` gives it.
        hidden: the model dimension of activations, over nothing: each GEMM contracts or produces it, and to split it
            would cost an all-reduce for each.
        heads: attention heads of activations and kernels, over the tensor axis: heads are independent, so that the
            column-parallel projection in front and the row-parallel one behind need one all-reduce together.
        ffn: the feed-forward dimension, over the tensor axis: the activation function is elementwise, so that the two
            projections need one all-reduce together.
        vocab: rows of the embedding, columns of the head and of logits, over the tensor axis: the largest kernels and
            activations of a model with a large vocabulary. A loss needs a maximum and a sum over it, ``[b, s]`` each.
        fsdp: the first axis of kernels, over the FSDP axis, and over the pipeline axis outside of a pipeline's stages:
            a kernel is all-gathered where it is used, and shards of its first axis are contiguous in memory, so that no
            copy follows an all-gather or precedes a reduce-scatter.
            Kernels that the tensor axis shards along that axis too (row-parallel ones) name it ``heads_fsdp``
            or ``ffn_fsdp``, which is the rule of ``heads`` or ``ffn`` and then that of ``fsdp``. Embeddings have it on
            their hidden axis.
        replicas: mesh axes, besides those of ``fsdp``, over which ``create_train_state(distributed_optimizer=True)``
            splits masters and optimizer state: the data axis, whose devices hold the same parameters, and the expert
            axis, whose devices hold the same parameters other than experts'. The names are ``fsdp_replicas``,
            ``heads_fsdp_replicas`` and ``ffn_fsdp_replicas``.
        expert: the first axis of experts' kernels, biases and states, over the expert axis; tokens travel to their
            experts. It may name other axes that shard tokens, such as ``("fsdp",)``, or ``("expert", "tensor")`` under
            sequence parallelism. In an array with experts no other dimension is sharded over the axes of this rule.
        norm: parameters of norms and routers, and biases over the hidden axis, over nothing: too small to be worth
            all-gathering.
        components: component axes of fused kernels (query/key/value, gate/up), over nothing: so each device has its
            shard of every component, and any number of devices shards in the same way.

    Raises:
        TypeError: for a rule that is not a tuple of strings.

    Source: Megatron-Core's column/row rules; ``flax.linen.logical_axis_rules``.
    """

    batch: MeshAxes = ("data", "fsdp", "expert", "pipeline")
    sequence: MeshAxes = ("context",)
    sequence_parallel: MeshAxes = ("context", "tensor")
    hidden: MeshAxes = ()
    heads: MeshAxes = ("tensor",)
    ffn: MeshAxes = ("tensor",)
    vocab: MeshAxes = ("tensor",)
    fsdp: MeshAxes = ("fsdp", "pipeline")
    replicas: MeshAxes = ("data", "expert")
    expert: MeshAxes = ("expert",)
    norm: MeshAxes = ()
    components: MeshAxes = ()

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return all logical axes.

        >>> ShardingRules.names()[:3]
        ('batch', 'sequence', 'sequence_parallel')
        """
        return (*(rule.name for rule in fields(ShardingRules)), *_COMPOSED)

    @checked
    def mesh_axes(self, name: str) -> MeshAxes:
        """Return the mesh axes of one of these `names`.

        >>> ShardingRules().mesh_axes("ffn_fsdp")
        ('tensor', 'fsdp', 'pipeline')
        """
        if name not in self.names():
            raise ValueError(f"name must be one of {', '.join(self.names())}, got {name!r}")
        # Each axis once: batch and sequence_parallel may name the same axis, since no array has both.
        return tuple(dict.fromkeys(axis for part in _COMPOSED.get(name, (name,)) for axis in getattr(self, part)))

    def __post_init__(self) -> None:
        for rule in fields(ShardingRules):
            value = getattr(self, rule.name)
            if not isinstance(value, tuple) or not all(isinstance(axis, str) for axis in value):
                raise TypeError(f"rule {rule.name!r} must be a tuple of mesh axis names, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class _WithFlax(ShardingRules):
    """The library's rules with Flax's among them; ``others`` are Flax's for names that are not fields."""

    others: tuple[tuple[str, MeshAxes], ...] = ()

    def mesh_axes(self, name: str) -> MeshAxes:
        others = dict(self.others)
        return others[name] if name in others else super().mesh_axes(name)


_rules = jax.make_user_context(ShardingRules())


@checked
@contextlib.contextmanager
def use_rules(rules: ShardingRules) -> Iterator[None]:
    """Return a context that resolves logical axes by ``rules``; part of the jit cache key, like the recipe.

    Raises:
        TypeError: for anything but `ShardingRules`.

    >>> mesh = AbstractMesh((2, 4), ("fsdp", "tensor"))
    >>> with use_rules(ShardingRules(vocab=())):
    ...     tuple(logical_to_spec(("vocab", "fsdp"), mesh))
    (None, 'fsdp')
    >>> tuple(logical_to_spec(("vocab", "fsdp"), mesh))
    ('tensor', 'fsdp')
    """
    with _rules(rules):
        yield


def whole_sequences() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no array is split along a sequence, by the ambient rules otherwise: for single tokens.

    >>> with whole_sequences():
    ...     tuple(logical_to_spec(("sequence",), AbstractMesh((2,), ("context",))))
    (None,)
    """
    return use_rules(replace(current_rules(), sequence=(), sequence_parallel=()))


@checked
def logical_to_spec(
    axes: LogicalAxes | PartitionSpec, mesh: Mesh | AbstractMesh, rules: ShardingRules | None = None
) -> PartitionSpec:
    """Return the PartitionSpec of an array whose dimensions carry the logical names ``axes``, without axes of size 1.

    Args:
        axes: a logical name or None for each dimension; or a PartitionSpec, which is returned.
        mesh: mesh whose axis names count.
        rules: None for the ambient rules, with those that are set in Flax.

    Raises:
        ValueError: for a name that neither these rules nor Flax's contain, a rule with a mesh axis that is neither one
            of `jax_te.config.MESH_AXES` nor the mesh's, or two dimensions on one mesh axis; for a rule that is set both
            here and in Flax, and differs; for a PartitionSpec with an axis that the mesh lacks.

    >>> tuple(logical_to_spec(("batch", "sequence", "ffn"), jax.sharding.AbstractMesh((2, 2), ("data", "tensor"))))
    ('data', None, 'tensor')
    """
    if isinstance(axes, PartitionSpec):
        return _checked(axes, mesh)
    return _resolved(tuple(axes), mesh, current_rules(mesh) if rules is None else rules)


def _checked(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    for axis in jax.tree.leaves(tuple(spec)):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{axis!r} of {spec} is not an axis of the mesh ({', '.join(map(str, mesh.axis_names))}), "
                "and Flax's logical rules do not map it to one; set them: nnx.logical_axis_rules([(name, axis), ...])"
            )
    return spec


# Cached, because layers ask for the same few axes at every call; meshes and rules are hashable.
@functools.lru_cache(maxsize=4096)
def _resolved(axes: LogicalAxes, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> PartitionSpec:
    known = known_names(rules)
    free = free_axes(mesh)
    of_experts = rules.mesh_axes("expert") if "expert" in axes else ()
    taken: dict[str, str] = {}
    spec: list[Any] = []
    for name in axes:
        if name is None:
            spec.append(None)
            continue
        if name not in known:
            raise ValueError(
                f"unknown logical axis {name!r} in {axes}; allowed: {', '.join(sorted(known))}, and what Flax's rules "
                "name (nn.logical_axis_rules, nnx.logical_axis_rules)"
            )
        for axis in rules.mesh_axes(name):
            # One set of rules serves every mesh, so an axis of MESH_AXES may be missing; any other name is a mistake.
            if axis not in mesh.axis_names and axis not in MESH_AXES:
                raise ValueError(
                    f"the rule of logical axis {name!r} has mesh axis {axis!r}, and the mesh's axes are "
                    f"{', '.join(map(str, mesh.axis_names))}; name one of them, or of {', '.join(MESH_AXES)}"
                )
        mesh_axes = tuple(axis for axis in rules.mesh_axes(name) if axis in mesh.axis_names)
        if name != "expert":
            # Experts may be split over axes that split other kernels by their inputs or outputs.
            mesh_axes = tuple(axis for axis in mesh_axes if axis not in of_experts)
        for axis in mesh_axes:
            if axis in taken:
                raise ValueError(
                    f"logical axes {taken[axis]!r} and {name!r} of {axes} both map to mesh axis {axis!r}; "
                    "one array cannot be split twice over one mesh axis: change one of the two rules"
                )
            taken[axis] = name
        # An axis of size 1 shards nothing, and naming it would change the array's type on an Explicit mesh.
        mesh_axes = tuple(axis for axis in mesh_axes if mesh.shape[axis] > 1 and axis in free)
        spec.append(entry_of(mesh_axes))
    return PartitionSpec(*spec)


def known_names(rules: ShardingRules) -> set[str]:
    """Return the logical names that rules give mesh axes: this package's, and those that are set in Flax.

    >>> "batch" in known_names(current_rules())
    True
    """
    others = rules.others if isinstance(rules, _WithFlax) else ()
    return {*rules.names(), *(name for name, _ in others)}


def current_rules(mesh: Mesh | AbstractMesh | None = None) -> ShardingRules:
    """Return the rules of the innermost `use_rules`, with those that are set in Flax.

    Args:
        mesh: mesh on which this package's and Flax's rules are compared. None: the mesh in use.

    Raises:
        ValueError: for a rule that is set both here and in Flax, and differs.

    >>> from flax import nnx
    >>> with nnx.logical_axis_rules([("ffn", "model")]):
    ...     current_rules(AbstractMesh((2,), ("model",))).ffn
    ('model',)
    """
    rules, flax = _rules.value, get_logical_axis_rules()
    if not flax or isinstance(rules, _WithFlax):
        return rules
    pairs = tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in flax)
    return _combined(rules, pairs, jax.sharding.get_abstract_mesh() if mesh is None else mesh)


@functools.lru_cache(maxsize=256)
def _combined(rules: ShardingRules, flax: tuple[tuple[str, Any], ...], mesh: Mesh | AbstractMesh) -> ShardingRules:
    def split(axes: MeshAxes) -> MeshAxes:
        return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)

    def conflict(name: str, own: MeshAxes, theirs: MeshAxes) -> ValueError:
        return ValueError(
            f"logical axis {name!r} is split over {own} by jax_te's rules (use_rules), and over {theirs} by those that "
            "are set in Flax (logical_axis_rules); let one of them name it, or both the same"
        )

    # Reversed, so that the first of several rules for a name is kept.
    theirs = {name: entry_axes(axes) for name, axes in flax[::-1]}
    default, changed = ShardingRules(), {}
    for rule in fields(ShardingRules):
        own, wanted = getattr(rules, rule.name), theirs.get(rule.name)
        if wanted is None or split(wanted) == split(own):
            continue
        if own != getattr(default, rule.name):
            raise conflict(rule.name, own, wanted)
        changed[rule.name] = wanted
    known = set(rules.names())
    others = tuple((name, axes) for name, axes in theirs.items() if name not in known)
    combined = _WithFlax(**{rule.name: getattr(rules, rule.name) for rule in fields(rules)} | changed, others=others)
    # A composed name follows the rules of its parts, which ops rely on.
    for name in _COMPOSED.keys() & theirs.keys():
        if split(theirs[name]) != split(combined.mesh_axes(name)):
            raise conflict(name, combined.mesh_axes(name), theirs[name])
    return combined


def row_axis(axis: str | None) -> str:
    """Return the logical name of the first axis of a kernel whose inputs are sharded over the tensor axis along
    ``axis``.

    ``axis`` None: they are not sharded.

    >>> row_axis("ffn"), row_axis(None)
    ('ffn_fsdp', 'fsdp')
    """
    return "fsdp" if axis is None else f"{axis}_fsdp"


def replica_axes(axes: Any) -> Any:
    """Return the logical axes under which replicas shard optimizer state of a parameter; other axes stay.

    >>> replica_axes(("ffn_fsdp", None)), replica_axes(("norm",))
    (('ffn_fsdp_replicas', None), ('norm',))
    """
    names = isinstance(axes, tuple)
    return tuple(f"{name}_replicas" if name in _SHARDED_KERNELS else name for name in axes) if names else axes


def activation_axis(axis: str | None) -> str | None:
    """Return the logical axis of the activations that a kernel's axis is contracted with, or produces.

    >>> activation_axis("fsdp"), activation_axis("ffn_fsdp"), activation_axis("ffn")
    ('hidden', 'ffn', 'ffn')
    """
    return _OF_ACTIVATIONS.get(axis, axis)


def leading_axes(x: Array) -> LogicalAxes:
    """Return the logical axes of all axes of an activation but its last: batch, then sequence, then unnamed ones.

    >>> leading_axes(jax.numpy.ones((2, 8, 16)))
    ('batch', 'sequence')
    """
    return ("batch", "sequence", *(None,) * x.ndim)[: x.ndim - 1]


def batch_axes(ndim: int) -> LogicalAxes:
    """Return the logical axes of an array of a batch: the first one, of the examples, is the batch axis.

    >>> batch_axes(3)
    ('batch', None, None)
    """
    return ("batch", *(None,) * (ndim - 1))


def batch_ranks() -> int:
    """Return the number of shards into which the mesh in use splits a batch; 1 without a mesh.

    >>> batch_ranks()
    1
    """
    return axis_ranks("batch")


def axis_ranks(name: str) -> int:
    """Return the number of shards into which the mesh in use splits a logical axis; 1 without a mesh.

    >>> axis_ranks("ffn")
    1
    """
    mesh = current_mesh()
    return 1 if mesh is None else ranks_of(logical_to_spec((name,), mesh)[0], mesh)[1]


def ranks_of(entry: Any, mesh: Mesh | AbstractMesh) -> tuple[str, int]:
    """Return the mesh axes that an entry of a PartitionSpec names, as text, and the number of shards they make.

    >>> ranks_of(("data", "fsdp"), AbstractMesh((2, 4), ("data", "fsdp")))
    ('data*fsdp', 8)
    """
    over = entry_axes(entry)
    return "*".join(over), math.prod(mesh.shape[axis] for axis in over)


def current_mesh() -> AbstractMesh | None:
    """Return the mesh set by ``jax.set_mesh``, or None.

    >>> current_mesh() is None
    True
    >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
    ...     current_mesh().axis_names
    ('data',)
    """
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


@functools.lru_cache(maxsize=256)
def free_axes(mesh: Mesh | AbstractMesh) -> MeshAxes:
    """Return the mesh axes that no surrounding ``shard_map`` has made manual.

    Along manual axes an array belongs to one device and is whole: no rule shards it there.

    >>> free_axes(AbstractMesh((2, 2), ("data", "tensor")))
    ('data', 'tensor')
    """
    if AxisType.Manual not in mesh.axis_types:
        return mesh.axis_names
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple([name for name, kind in types if kind != AxisType.Manual])


def mesh_dims(axes: LogicalAxes | PartitionSpec, mesh: AbstractMesh, rules: ShardingRules | None = None) -> Dims:
    """Return the mesh axes that shard each dimension of an array with these logical axes, or this PartitionSpec.

    >>> mesh_dims(("batch", None, "ffn"), AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor")))
    (('data', 'fsdp'), (), ('tensor',))
    """
    return tuple(map(entry_axes, logical_to_spec(axes, mesh, rules)))


def partition_spec(dims: Dims) -> PartitionSpec:
    """Return `Dims` as a PartitionSpec.

    >>> tuple(partition_spec((("data", "fsdp"), (), ("tensor",))))
    (('data', 'fsdp'), None, 'tensor')
    """
    return PartitionSpec(*map(entry_of, dims))


def entry_axes(entry: Any) -> MeshAxes:
    """Return the mesh axes that an entry of a PartitionSpec, or a rule of Flax, names.

    >>> entry_axes(None), entry_axes("tensor"), entry_axes(("data", "fsdp"))
    ((), ('tensor',), ('data', 'fsdp'))
    """
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def entry_of(axes: MeshAxes) -> Any:
    """Return the entry of a PartitionSpec that names these mesh axes.

    >>> entry_of(()), entry_of(("tensor",)), entry_of(("data", "fsdp"))
    (None, 'tensor', ('data', 'fsdp'))
    """
    return axes[0] if len(axes) == 1 else axes or None


def gathered_axes(kernel_axes: LogicalAxes, mesh: AbstractMesh) -> MeshAxes:
    """Return the mesh axes along which a kernel is all-gathered before its GEMM.

    >>> gathered_axes(("heads_fsdp", "hidden"), AbstractMesh((2, 2), ("fsdp", "tensor")))
    ('fsdp',)
    """
    split = mesh_dims(tuple(map(activation_axis, kernel_axes)), mesh)
    pairs = zip(mesh_dims(kernel_axes, mesh), split, strict=True)
    return tuple(axis for axes, kept in pairs for axis in axes if axis not in kept)


def summed_axes(
    kernel_axes: LogicalAxes | PartitionSpec | None, mesh: AbstractMesh | None, summands: tuple[int, ...] | None = None
) -> MeshAxes:
    """Return the mesh axes over which a kernel's gradient is summed, not scattered: they shard tokens, not the kernel.

    Args:
        kernel_axes: logical axes of the kernel. None: it has none.
        mesh: mesh of the kernel. None: no axes.
        summands: ``(n,)``, to get no axes unless they have exactly ``n`` devices, as they may not under other rules or
            inside of a ``shard_map``. None: all axes.

    >>> mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    >>> summed_axes(("fsdp", "ffn"), mesh), summed_axes(("fsdp", "ffn"), mesh, (4,))
    (('data',), ())
    """
    if mesh is None:
        return ()
    own = flat(mesh_dims(kernel_axes or (), mesh))
    # One after the other, since both may name the same axis if no array has both.
    tokens = dict.fromkeys(flat(mesh_dims(("batch",), mesh)) + flat(mesh_dims(("sequence",), mesh)))
    axes = tuple(axis for axis in tokens if axis not in own)
    return axes if summands in (None, (math.prod(mesh.shape[axis] for axis in axes),)) else ()


def local_shape(shape: tuple[int, ...], dims: Dims, mesh: AbstractMesh) -> tuple[int, ...] | None:
    """Return the shape of one device's shard; None if the array does not divide.

    >>> local_shape((8, 6), (("data",), ("tensor",)), AbstractMesh((2, 4), ("data", "tensor"))) is None
    True
    """
    sizes = [math.prod(mesh.shape[axis] for axis in axes) for axes in dims]
    if any(size % shards for size, shards in zip(shape, sizes, strict=True)):
        return None
    return tuple(size // shards for size, shards in zip(shape, sizes, strict=True))


def indivisible_reason(name: str, shape: tuple[int, ...], dims: Dims, mesh: AbstractMesh) -> str | None:
    """Return the reason why an array has no shards of equal shape, as text; None if it has.

    Args:
        name: name of the array, for the text.
        shape: shape of the array.
        dims: mesh axes of each of its dimensions.
        mesh: the mesh.

    >>> indivisible_reason("kernel", (8, 6), ((), ("tensor",)), AbstractMesh((4,), ("tensor",)))
    "the kernel (8, 6) does not divide over P(None, 'tensor') of the mesh {'tensor': 4}"
    """
    if local_shape(shape, dims, mesh) is not None:
        return None
    return f"the {name} {shape} does not divide over {partition_spec(dims)} of the mesh {dict(mesh.shape)}"


def flat(dims: Dims) -> MeshAxes:
    """Return all mesh axes of ``dims`` in one tuple.

    >>> flat((("data", "fsdp"), (), ("tensor",)))
    ('data', 'fsdp', 'tensor')
    """
    return sum(dims, ())


@checked
def named_sharding(axes: LogicalAxes | PartitionSpec, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the NamedSharding on ``mesh`` of an array with these logical axes, by the ambient rules.

    Raises:
        ValueError: see `logical_to_spec`.

    >>> sharding = named_sharding(("batch", "ffn"), AbstractMesh((2, 4), ("data", "tensor")))
    >>> sharding.shard_shape((8, 16))
    (4, 4)
    """
    return NamedSharding(mesh, logical_to_spec(axes, mesh))
