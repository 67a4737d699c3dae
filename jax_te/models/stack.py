"""Execution of a stack of layers: unrolled or scanned, with the recomputation of a configuration."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict

import jax
from flax import nnx

from jax_te._validation import checked
from jax_te.config import RecomputeConfig
from jax_te.layers import Rotary, TransformerLayer, output_of, split_output
from jax_te.models.batch_parts import join_batch, split_arguments, split_batch
from jax_te.ops import BiasType, MaskType, scan_layers
from jax_te.quantize import QuantizerState, as_float32_inside, with_max_gradients_inside
from jax_te.remat import (
    Changes,
    RecomputePolicy,
    Watched,
    recompute_policy,
    remat,
    run_with_gradients_at_once,
    selective_recompute,
)
from jax_te.typing import Array, Words

_NO_RECOMPUTE = RecomputeConfig()

Parts = tuple[Array, ...]
"""A batch ``[b, s, h]`` in parts, see `split_batch`."""


class MaskTypes(TypedDict, total=False):
    """Arguments of a `TransformerLayer` that are names, the same for all layers of a stack."""

    self_attn_mask_type: MaskType
    enc_dec_attn_mask_type: MaskType
    core_attention_bias_type: BiasType


ScanChoice = Annotated[bool | Literal["auto"], Words("True, False or 'auto'", error=ValueError)]
"""Whether layers run in a loop; ``"auto"``: see `runs_scanned`."""

UNROLL_LIMIT = 96
"""Maximum number of layers that ``"auto"`` unrolls, see `runs_scanned`."""


@checked
def runs_scanned(scan: ScanChoice, num_layers: int) -> bool:
    """Return whether a stack of ``num_layers`` layers runs in a loop.

    A loop saves compile time, which in an unrolled stack grows with the number of layers. In return the parameters are
    stacked, residuals are written to stacked arrays and read from them, and the compiler fuses nothing across the
    loop's boundary. At 1.3 billion parameters on an H200 a loop costs 12 to 17 % of the speed. So ``"auto"`` unrolls up
    to `UNROLL_LIMIT` layers, above which compile time grows faster than the stack, and scans longer stacks.
    ``jax-te bench model`` measures both; docs/recompute.md has the figures.

    Args:
        scan: whether to run in a loop: True, False, or ``"auto"``.
        num_layers: number of layers in the stack. The two stacks of a `T5Model` are decided separately.

    Raises:
        ValueError: for another ``scan``.

    >>> runs_scanned("auto", UNROLL_LIMIT), runs_scanned("auto", UNROLL_LIMIT + 1), runs_scanned(True, 2)
    (False, True, True)
    """
    return num_layers > UNROLL_LIMIT if scan == "auto" else scan


_layers_share_a_trace = jax.make_user_context(False)
"""Whether layers of one structure are traced once, see `layers_traced_once`."""


@contextlib.contextmanager
def layers_traced_once() -> Iterator[None]:
    """Yield inside of a function that ``jit`` traces; JAX then traces unrolled layers of one structure once.

    The first one is traced as a jitted function of its arrays, and the others call that function. XLA inlines it, so
    that the compiled program has the same operations. Where nothing is jitted, each pass would compile that function
    anew; so it is the steps of `jax_te.training` that enter this context, which are jitted.

    Layers with a module of another class than this package's or Flax's are traced one by one. There a call may depend
    on more than attributes and arguments: on what an earlier layer has left in a list, a dict or a counter.
    """
    with _layers_share_a_trace(True):
        yield


def layer_keys(key: Array | None, count: int) -> list[Array | None]:
    """Return a key for each of ``count`` layers, or None for each if ``key`` is None."""
    return [None if key is None else jax.random.fold_in(key, i) for i in range(count)]


@dataclass(frozen=True)
class Group:
    """Consecutive layers ``first``, …, ``first + count - 1``, which backward recomputes together if ``recomputed``."""

    first: int
    count: int
    recomputed: bool


def recompute_groups(config: RecomputeConfig, num_layers: int) -> list[Group]:
    """Return the groups of layers that full recomputation recomputes together; without it one group for each layer.

    >>> config = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    >>> [(group.first, group.count) for group in recompute_groups(config, 3)]
    [(0, 2), (2, 1)]
    """
    full, size = config.recompute_granularity == "full", config.recompute_num_layers
    if not full or size is None:
        return [Group(i, 1, False) for i in range(num_layers)]
    if config.recompute_method == "block":
        return [Group(i, 1, i < size) for i in range(num_layers)]
    return [Group(i, min(size, num_layers - i), True) for i in range(0, num_layers, size)]


def check_recompute_policy(config: RecomputeConfig, policy: RecomputePolicy | str | None) -> None:
    """Raise ValueError for a policy that is unknown, contradicts ``config``, or has no effect under it.

    A policy has an effect under full recomputation only; there it must not save everything.

    >>> check_recompute_policy(RecomputeConfig(), "full")
    """
    chosen, full = recompute_policy(policy), config.recompute_granularity == "full"
    if chosen is None:
        if config.recompute_granularity is None:
            return
        raise ValueError(f"recompute_policy={policy!r} keeps everything; leave recompute_granularity None for that")
    if not full and not chosen.saves_nothing:
        raise ValueError(
            f"recompute_policy={policy!r} says what full recomputation keeps, and recompute_granularity is "
            f"{config.recompute_granularity!r}; set recompute_granularity='full' in the config"
        )
    if config.distribute_saved_activations and not chosen.saves_nothing:
        raise ValueError(
            "distribute_saved_activations=True goes with recompute_policy='full' only, under which inputs are all that "
            f"is kept; got {policy!r}"
        )


@checked
def run_layers(
    layers: Sequence[nnx.Module],
    x: Array,
    keys: Sequence[Array | None],
    *,
    recompute: RecomputeConfig = _NO_RECOMPUTE,
    policy: RecomputePolicy | str | None = "full",
    scan: ScanChoice = "auto",
    batch_parts: int = 1,
    mask_types: MaskTypes | None = None,
    **arrays: Any,
) -> Array:
    """Return the output ``[b, s, h]`` of a stack of layers.

    Args:
        layers: layers of one stack: `TransformerLayer`, or modules of your own that are called in the same way,
            ``layer(x, dropout_key=key, **arrays)``.
        x: ``[b, s, h]``.
        keys: dropout key of each layer, or None for each.
        recompute: layers, or modules of layers, that backward recomputes.
        policy: residuals that full recomputation saves inside of the layers, see `jax_te.remat.remat`. Leave it at its
            default without full recomputation.
        scan: whether to run consecutive layers of the same structure in loops, see `jax_te.ops.scan_layers`, whose
            body is compiled once for each; if groups of layers are recomputed together, a loop is over the groups.
            ``"auto"``: see `runs_scanned`. The parameters remain those of the single layers, and are stacked before a
            loop. A layer that differs from its neighbours, because it has its own recipe or name, runs outside of it.
        batch_parts: number of parts of the batch, see `Execution`.
        mask_types: arguments that are strings, see `MaskTypes`.
        **arrays: the other arguments of `TransformerLayer`, the same for all layers; ``rotary_pos_emb`` may be a pair,
            see `rotary_of`.

    Raises:
        ValueError: for a ``policy`` that is unknown or has no effect under ``recompute``; for another ``scan``; for a
            batch that does not divide into its parts.

    >>> layers = [TransformerLayer(16, 32, 2, layer_number=number, rngs=nnx.Rngs(number)) for number in (1, 2)]
    >>> keys = [*jax.random.split(jax.random.key(0))]  # of dropout
    >>> recompute = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    >>> run_layers(layers, jnp.ones((2, 8, 16)), keys, recompute=recompute, policy="save_gemms").shape
    (2, 8, 16)
    """
    options = StackOptions(recompute, policy, scan, batch_parts, mask_types or {})
    return _run(layers, x, keys, options, arrays)


@checked
@dataclass(frozen=True)
class StackOptions:
    """Execution of a stack of layers: the arguments of `run_layers` that are not arrays, see there.

    >>> StackOptions(batch_parts=2).scan
    'auto'
    """

    recompute: RecomputeConfig = _NO_RECOMPUTE
    policy: RecomputePolicy | str | None = "full"
    scan: ScanChoice = "auto"
    batch_parts: int = 1
    mask_types: MaskTypes = field(default_factory=MaskTypes)


_OPTIONS = StackOptions()


@checked
@dataclass(frozen=True)
class StackInput:
    """Input of a stack of layers: the arguments of `run_layers` other than the layers.

    It ends the first part of a model in parts, see `ModelInParts`.

    Args:
        x: ``[b, s, h]``, input of the first layer.
        keys: dropout key of each layer; None in place of a key: that layer drops nothing. None: no layer does. The
            stages of a pipeline take keys of all layers, or none.
        arrays: other arguments of all layers that do not depend on parameters, such as masks, lengths and rotations.
        learned: other arguments of all layers that are computed from parameters, such as a bias of attention scores or
            an encoder's output. Their gradients pass on to these parameters.
        options: execution of the layers.

    >>> layers = [TransformerLayer(16, 32, 2, layer_number=number, rngs=nnx.Rngs(number)) for number in (1, 2)]
    >>> StackInput(jnp.ones((2, 8, 16)), [*jax.random.split(jax.random.key(0))]).output(layers).shape
    (2, 8, 16)
    """

    x: Array
    keys: Sequence[Array | None] | None = None
    arrays: Mapping[str, Any] = field(default_factory=dict)
    learned: Mapping[str, Any] = field(default_factory=dict)
    options: StackOptions = _OPTIONS

    def output(self, layers: Sequence[nnx.Module]) -> Array:
        """Return the output ``[b, s, h]`` of layers: of the whole stack, or of one that begins at this input."""
        keys = [None] * len(layers) if self.keys is None else self.keys
        return _run(layers, self.x, keys, self.options, dict(**self.arrays, **self.learned))


def run_each(
    layers: Sequence[nnx.Module], stack: StackInput, own: Sequence[Mapping[str, Any]], returned: str
) -> tuple[Array, list[Any]]:
    """Return the output of layers one after the other, and a further result of each one.

    It is for passes without a backward: nothing is recomputed, and there is no loop, in which all layers would have the
    same arguments.

    Args:
        layers: layers of one stack.
        stack: input of the layers.
        own: further arguments of each layer, among which is the request for its result.
        returned: name of the result.

    Raises:
        ValueError: for a layer that does not return it.
    """
    x, found = stack.x, []
    keys = [None] * len(layers) if stack.keys is None else stack.keys
    each = zip(layers, keys, own, strict=True)
    for i, (layer, key, arguments) in enumerate(each):
        with jax.named_scope(f"layer_{i}"):
            arrays = {**stack.arrays, **stack.learned, **arguments}
            x, extra = split_output(_call_layer(layer, x, key, stack.options.mask_types, arrays), f"layers[{i}]")
        if returned not in extra:
            raise ValueError(
                f"layers[{i}] returned no {returned}, which it was asked for; pass on what TransformerLayer returns, "
                "a NamedTuple that has it under this name"
            )
        found.append(extra[returned])
    return x, found


def _run(
    layers: Sequence[nnx.Module],
    x: Array,
    keys: Sequence[Array | None],
    options: StackOptions,
    arrays: dict[str, Any],
) -> Array:
    """Return what `run_layers` does for the same arguments, of which ``arrays`` are ``**arrays``."""
    recompute, policy, batch_parts = options.recompute, options.policy, options.batch_parts
    check_recompute_policy(recompute, policy)
    distribute = recompute.distribute_saved_activations
    if batch_parts > 1 and distribute:
        raise ValueError("distribute_saved_activations=True saves one input of each layer; it goes with batch_parts=1")
    # Bound, not passed: jax.checkpoint and scan_layers take arrays, and mask types are strings.
    plain = functools.partial(_run_group, options.mask_types)
    saved = functools.partial(remat, plain, policy=policy, distribute_saved_activations=distribute)
    modules = (recompute.recompute_modules or ()) if recompute.recompute_granularity == "selective" else ()
    partly = functools.partial(run_with_gradients_at_once, plain)
    calls: dict[bool, Callable[..., Parts]] = {False: partly if modules else plain, True: saved}
    groups = recompute_groups(recompute, len(layers))
    given, xs = split_arguments(arrays, len(x), batch_parts), split_batch(x, batch_parts)
    # Entered also without modules: the configuration decides, not a context around the model.
    with selective_recompute(*modules):
        if runs_scanned(options.scan, len(layers)):
            return join_batch(_run_scanned(calls, groups, layers, xs, keys, given))
        return join_batch(_run_one_by_one(calls, groups, layers, xs, keys, given))


class ModelInParts(Protocol):
    """A model in three parts, which the stages of a pipeline run: before its layers, the layers, and after them.

    `GPTModel`, `BertModel`, `T5Model` and `MegatronGPTModel` are such models, and so is one of your own that has these
    three. The model chooses the arguments of ``embed_inputs`` and ``compute_loss``; a `jax_te.training.PipelinedLoss`
    calls them.

    >>> class Own(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.first, self.last = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
    ...         rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    ...         self.layers = nnx.List([TransformerLayer(16, 32, 2, rngs=rngs, **rates) for _ in range(2)])
    ...
    ...     def embed_inputs(self, features):
    ...         return StackInput(self.first(features))
    ...
    ...     def compute_loss(self, y, targets):
    ...         return jnp.mean((self.last(y) - targets) ** 2)
    ...
    ...     def loss(self, features, targets):
    ...         return self.compute_loss(self.embed_inputs(features).output(self.layers), targets)
    >>> Own(nnx.Rngs(0)).loss(jnp.ones((2, 8, 4)), jnp.ones((2, 8, 1))).shape
    ()
    """

    @property
    def layers(self) -> Sequence[nnx.Module]:
        """The layers, all of one kind; no other part reads their parameters."""
        ...

    def embed_inputs(self, *inputs: Any, **options: Any) -> StackInput:
        """Return what the layers are called with."""
        ...

    def compute_loss(self, y: Array, *targets: Any, **options: Any) -> Array:
        """Return the loss, given the layers' output ``[b, s, h]``."""
        ...


def _run_group(
    mask_types: MaskTypes,
    xs: Parts,
    layers: Sequence[nnx.Module],
    keys: Sequence[Any],
    given: tuple[dict[str, Any], ...],
    first: int | None = None,
) -> Parts:
    """Run consecutive layers; ``first`` is the number of the first one, None inside a loop, where it varies."""
    each: Any = zip(layers, keys, strict=True)
    for i, (layer, key) in enumerate(each):
        with jax.named_scope("layer" if first is None else f"layer_{first + i}"):
            # Each part of the batch has its own dropout masks.
            own = [key] if len(xs) == 1 else layer_keys(key, len(xs))
            parts: Any = zip(xs, own, given, strict=True)
            xs = tuple(_run_layer(layer, x, key, mask_types, arrays) for x, key, arrays in parts)
    return xs


def _run_layer(layer: nnx.Module, x: Array, key: Array | None, mask_types: MaskTypes, arrays: dict[str, Any]) -> Array:
    return output_of(_call_layer(layer, x, key, mask_types, arrays))  # Megatron's layers also return their context


def _call_layer(layer: nnx.Module, x: Array, key: Array | None, mask_types: MaskTypes, arrays: dict[str, Any]) -> Any:
    """Return what a layer returns for its input and the arguments of all layers."""
    if "rotary_pos_emb" in arrays:
        arrays = arrays | {"rotary_pos_emb": rotary_of(layer, arrays["rotary_pos_emb"])}  # type: ignore[arg-type]
    return layer(x, dropout_key=key, **mask_types, **arrays)  # type: ignore[operator]


def of_experts(padding_mask: Array | None) -> dict[str, Any]:
    """Return the argument of layers that says which tokens are padding; none if there is no mask."""
    # Left out, not None: layers of one's own need not know it.
    return {} if padding_mask is None else {"padding_mask": padding_mask}


def rotary_of(layer: TransformerLayer, rotary: Rotary | tuple[Rotary, Rotary] | None) -> Rotary | None:
    """Return the rotary embedding of a layer; of a pair the first one is for layers without a window."""
    if not isinstance(rotary, tuple):
        return rotary
    return rotary[layer.self_attention.core_attention.window_size is not None]


def _run_one_by_one(
    calls: dict[bool, Callable[..., Parts]],
    groups: Sequence[Group],
    layers: Sequence[nnx.Module],
    xs: Parts,
    keys: Sequence[Any],
    given: tuple[dict[str, Any], ...],
) -> Parts:
    """Run groups one after the other; in `layers_traced_once` JAX traces layers of one structure once."""

    traced_once: dict[tuple[bool, nnx.GraphDef[Any]], Callable[..., tuple[Parts, _Changed]] | None] = {}

    def jitted(
        recomputed: bool, graphdef: nnx.GraphDef[Any], own: list[nnx.Module]
    ) -> Callable[..., tuple[Parts, _Changed]] | None:
        """Return the function for layers of this structure, such as these; None if JAX has to trace each of them."""
        structure = recomputed, graphdef
        try:
            is_new = structure not in traced_once
        except Exception:  # of an attribute that somebody set, such as a list, by which layers cannot be told apart
            return None
        if is_new:
            # Arguments of all layers are closed over: some are no arrays.
            call = functools.partial(_call_copies, calls[recomputed], graphdef, given=given)
            traced_once[structure] = jax.jit(call) if _depend_on_themselves_alone(own) else None
        return traced_once[structure]

    for group in groups:
        members = slice(group.first, group.first + group.count)
        own, own_keys = list(layers[members]), list(keys[members])
        # A group of several layers is traced by itself, so that each of them has its number in the names of operations.
        if _layers_share_a_trace.value and group.count == 1:
            graphdef, state = nnx.split(own)
            if call := jitted(group.recomputed, graphdef, own):
                with jax.named_scope(f"layer_{group.first}"):
                    xs, changed = call(state, xs, own_keys)
                changed.apply(own)
                continue
        xs = calls[group.recomputed](xs, own, own_keys, given, first=group.first)
    return xs


def _depend_on_themselves_alone(layers: list[nnx.Module]) -> bool:
    """Return whether calls of layers are known to depend on their attributes, their arrays and the arguments alone."""
    modules = (module for layer in layers for _, module in nnx.iter_modules(layer))
    return all(type(module).__module__.partition(".")[0] in ("jax_te", "flax") for module in modules)


class _Changed(NamedTuple):
    """What a call of copies of layers has changed: arrays, and where they belong."""

    arrays: list[Array]
    where: _Where

    def apply(self, layers: list[nnx.Module]) -> None:
        """Change the layers."""
        self.where.changes.apply(layers, self.arrays)


@jax.tree_util.register_static  # so that a jitted function returns it also in calls that JAX does not trace again
@dataclass(frozen=True, eq=False)
class _Where:
    changes: Changes


def _call_copies(
    call: Callable[..., Parts],
    graphdef: nnx.GraphDef[Any],
    state: Any,
    xs: Parts,
    keys: Sequence[Any],
    *,
    given: tuple[dict[str, Any], ...],
) -> tuple[Parts, _Changed]:
    """Call copies of layers, and return what the call has changed beside the result."""
    copies = nnx.merge(graphdef, state)
    watched = Watched(copies)
    xs = call(xs, copies, keys, given)
    arrays, changes = watched.changes()
    return xs, _Changed(arrays, _Where(changes))


def _run_scanned(
    calls: dict[bool, Callable[..., Parts]],
    groups: Sequence[Group],
    layers: Sequence[nnx.Module],
    xs: Parts,
    keys: Sequence[Any],
    given: tuple[dict[str, Any], ...],
) -> Parts:
    """Run consecutive groups of the same structure in one loop."""
    members = [slice(group.first, group.first + group.count) for group in groups]
    split = [nnx.split(list(layers[own])) for own in members]

    def structure(place: int) -> tuple[Any, ...]:
        graphdef, state = split[place]
        return groups[place].recomputed, graphdef, jax.tree.structure(state), _types(state)

    # graphdefs hold all static attributes, so layers with another recipe, window or name are in another group; and
    # structures tell which kernels are cached, and the sinks without arrays of an abstract pass. Neither has dtypes,
    # and a stack of arrays of two would promote one of them.
    for (recomputed, graphdef, *_), found in itertools.groupby(range(len(groups)), key=structure):
        places = list(found)
        steps = [(_stackable(split[place][1]), list(keys[members[place]])) for place in places]
        run = functools.partial(_call_copies, calls[recomputed], graphdef, given=given)
        with jax.named_scope("layers"):
            xs = _scan(run, steps, [list(layers[members[place]]) for place in places], xs)
    return xs


def _types(state: nnx.State) -> tuple[Any, ...]:
    """Return shape and dtype of each array."""
    return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state))


def _stackable(state: nnx.State) -> nnx.State:
    """Return ``state`` with its quantizer states in plain fp32."""
    # JAX cannot stack arrays of the dtype whose gradients merge by maximum.
    return _of_quantizers(as_float32_inside, state)


def _merging(state: nnx.State) -> nnx.State:
    """Return ``state`` with quantizer states whose gradients merge by maximum, for those of parts of the batch."""
    return _of_quantizers(with_max_gradients_inside, state)


def _of_quantizers(convert: Callable[[Any], Any], state: nnx.State) -> nnx.State:
    def converted(variable: Any) -> Any:
        is_state = isinstance(variable, QuantizerState)
        return convert(variable) if is_state else variable

    return jax.tree.map(converted, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _scan(
    call: Callable[..., tuple[Parts, _Changed]],
    steps: list[tuple[nnx.State, list[Any]]],
    layers: list[list[nnx.Module]],
    xs: Parts,
) -> Parts:
    """Run steps of layers in a loop over the layers' states; what the calls change reaches the layers of each step."""

    def run(xs: Parts, step: tuple[nnx.State, list[Any]]) -> tuple[Parts, _Changed]:
        state, keys = step
        return call(_merging(state), xs, keys)

    # One step needs no loop, which would stack and slice needlessly.
    if len(steps) == 1:
        xs, changed = run(xs, steps[0])
        changed.apply(layers[0])
        return xs
    xs, changed = scan_layers(run, xs, steps)
    _check_own_state(changed[0].where.changes, layers)
    for own, change in zip(layers, changed, strict=True):
        change.apply(own)
    return xs


def _check_own_state(changes: Changes, layers: list[list[nnx.Module]]) -> None:
    """Raise ValueError for a Variable of several layers that their calls change: in a loop each changes a copy."""
    changed = [variable for own in layers for variable in changes.changed_variables(own)]
    if len({id(variable) for variable in changed}) < len(changed):
        kinds = ", ".join(sorted({type(variable).__name__ for variable in changed}))
        raise ValueError(
            f"layers share state that their calls change ({kinds}), and a loop over layers gives each one a copy: give "
            "each layer its own, or take scan=False"
        )
