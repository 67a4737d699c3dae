"""The resolved configuration of a training run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from jax_te.cli.model_config import as_run, check_described
from jax_te.cli.option_table import check_effects, flag
from jax_te.cli.options import OF_MESH, OPTIONS, RULES, ExpertOptions, RunOptions
from jax_te.cli.precision_rules import quantization_rules
from jax_te.cli.run_recipe import RECIPE_FIELDS, build_recipe, recipe_defaults
from jax_te.config import DENSE_RECOMPUTE_MODULES, ParallelConfig, TransformerConfig
from jax_te.megatron import RecipeConfig
from jax_te.models import check_recompute_policy
from jax_te.recipe import Recipe
from jax_te.typing import WriterName

_OPTION_OF = {name: field for field, row in OPTIONS.items() for name in row.library or (field,)}
"""Fields of a run's configuration by the library's names of the fields that they set."""

_FLAGS = {name: flag(field) for name, field in _OPTION_OF.items()}
"""Options by the library's names of the fields that they set."""

_OF_THE_MODEL = {field.name for field in dataclasses.fields(TransformerConfig)} - {"fp8_param"}  # of the train state


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunOptions):
    """Everything that decides what a run trains: an option of ``jax-te train`` in each field, see `OPTIONS`.

    Values are those of the command line, with ``data``, ``tokenizer`` and ``init_from`` absolute paths,
    ``precision_config`` a file's text, and ``model_config`` that of a ``config.json``, of ``init_from`` if that is
    given. A field of the recipe that is None becomes the recipe's default, if it has that
    field.

    Args:
        preset: name of the preset that defaults came from.

    Raises:
        ValueError: for a value that the command line would refuse, for sizes that do not divide, for conflicting
            values, and for options that have no effect on this mesh or recipe. The message names the option.
    """

    preset: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, row = getattr(self, field.name), field.metadata.get("option")
            # None stands for the library's or the recipe's default, where it is one.
            if row is not None and (value is not None or field.default is not None):
                object.__setattr__(self, field.name, row.check(field.name, value))
        check_described(self)
        self._check_heads()
        self._check_experts()
        self._check_quantized_layers()
        self._check_mesh_options(self.parallel_config() or ParallelConfig())
        with _options_named():
            check_recompute_policy(self.transformer_config(), self.recompute_policy)
        recipe, _ = self.make_recipe(), self.quantization_rules()  # these raise for invalid values
        for name, default in recipe_defaults(self.recipe).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        self._check_schedule()
        for option, size, divisor, why in self._divisions(recipe, self.parallel_config() or ParallelConfig()):
            if size % divisor:
                the_next = size + -size % divisor
                raise ValueError(f"{option} {size} is not divisible by {why}; the next multiple is {the_next}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step predicts."""
        return self.batch_size * self.seq_len

    @property
    def writers(self) -> list[WriterName]:
        """Names of the destinations of metrics."""
        given = self.metrics_writers.split(",")
        return [name for name in get_args(WriterName) if name in given]

    def transformer_config(self) -> TransformerConfig:
        """Return the model's configuration."""
        fields = self.library_fields()
        if self.model_config is None:
            return TransformerConfig(**fields)
        return as_run(self.model_config, self.ignore_fields, fields).config

    def library_fields(self) -> dict[str, Any]:
        """Return the fields of a `TransformerConfig` that the options set."""
        fields: dict[str, Any] = {
            name: getattr(self, field) for name, field in _OPTION_OF.items() if name in _OF_THE_MODEL
        }
        if self.dropout is None:  # the rates of the config.json that describes the model, or none
            del fields["attention_dropout"], fields["hidden_dropout"]
        fields["first_last_layers_bf16"] = bool(self.bf16_layers_start or self.bf16_layers_end)
        if not fields["first_last_layers_bf16"]:  # numbers of such layers that have no effect, and say so
            del fields["num_layers_at_start_in_bf16"], fields["num_layers_at_end_in_bf16"]
        if self.sequence_parallel:
            fields["tensor_model_parallel_size"] = (self.parallel_config() or ParallelConfig()).tensor
        if self.recompute_granularity == "none":
            fields["recompute_granularity"] = None
        elif self.recompute_granularity == "full":
            fields["recompute_method"] = self.recompute_method or "uniform"
            fields["recompute_num_layers"] = 1 if self.recompute_num_layers is None else self.recompute_num_layers
        if self.recompute_modules is not None:
            fields["recompute_modules"] = self.recompute_modules.split(",")
        if isinstance(self.moe_layer_freq, str):
            fields["moe_layer_freq"] = json.loads(self.moe_layer_freq)
        if self.lora_rank is not None and self.num_experts is not None:
            fields["moe_router_bias_update_rate"] = 0.0  # adapters alone are trained
        return fields

    def make_recipe(self) -> Recipe | None:
        """Return the precision recipe, or None."""
        return build_recipe(self.recipe, {name: getattr(self, name) for name in RECIPE_FIELDS})

    def quantization_rules(self) -> RecipeConfig | None:
        """Return the rules of the precision file, or None."""
        return None if (text := self.precision_config) is None else quantization_rules(text, self.factory_modules)

    def parallel_config(self) -> ParallelConfig | None:
        """Return the sizes of the mesh's axes, or None for no mesh."""
        return None if self.mesh is None else ParallelConfig.parse(self.mesh)

    def on_one_device(self, factory_modules: str | None = None) -> RunConfig:
        """Return the same model and training without a mesh and its options, on any available backend.

        Args:
            factory_modules: see `on_any_backend`.

        Raises:
            ValueError: see `on_any_backend`.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.name in OF_MESH}
        return dataclasses.replace(self, **defaults).on_any_backend(factory_modules)

    def on_any_backend(self, factory_modules: str | None = None) -> RunConfig:
        """Return the same model and training on any available backend.

        Args:
            factory_modules: see `PrecisionOptions`; given anew, because a run does not keep them.

        Raises:
            ValueError: for such modules without rules that could name them.
        """
        config = dataclasses.replace(self, backend="auto", factory_modules=factory_modules)
        check_effects(config, {RULES: self.precision_config is not None}, {"factory_modules"})
        return config

    def _check_heads(self) -> None:
        if self.model_config is not None:
            return  # whose heads may have any size
        hidden, heads, groups = self.hidden_size, self.num_heads, self.num_query_groups
        if hidden % heads and self.kv_channels is None:
            the_next = hidden + -hidden % heads
            raise ValueError(
                f"--hidden-size {hidden} is not divisible by --num-heads {heads}, and no --kv-channels are given; the "
                f"next multiple is {the_next}"
            )
        if heads % groups:
            raise ValueError(f"--num-heads {heads} is not divisible by --num-query-groups {groups}")

    def _check_experts(self) -> None:
        """Raise ValueError for options of layers with experts in a model without them."""
        if self.num_experts is not None or self.model_config is not None:
            return
        for field in dataclasses.fields(ExpertOptions):
            if (value := getattr(self, field.name)) != field.default:
                raise ValueError(
                    f"{flag(field.name)} {value} is for layers with experts; give --num-experts, too, or leave it out"
                )
        modules = set((self.recompute_modules or "").split(","))
        if experts := modules - {"", *DENSE_RECOMPUTE_MODULES}:
            raise ValueError(
                f"--recompute-modules {', '.join(sorted(experts))} is for layers with experts; give --num-experts, or "
                f"take some of {', '.join(DENSE_RECOMPUTE_MODULES)}"
            )

    def _check_schedule(self) -> None:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"--min-learning-rate {self.min_learning_rate:g} is above --learning-rate {self.learning_rate:g}"
            )
        if self.warmup_steps >= self.decay_steps:
            raise ValueError(
                f"--warmup-steps {self.warmup_steps} leaves no step to decay in; it must be below --decay-steps "
                f"{self.decay_steps} (by default --steps)"
            )

    def _check_mesh_options(self, mesh: ParallelConfig) -> None:
        """Raise ValueError for an option that has no effect because an axis of the mesh has one device."""
        ranks = {
            "cp_load_balanced": ("context", mesh.context, "--no-cp-load-balanced"),
            "cp_comm_type": ("context", mesh.context, "--cp-comm-type p2p"),
            "sequence_parallel": ("tensor", mesh.tensor, "--no-sequence-parallel"),
            "pipeline": ("pipeline", mesh.pipeline, "--pipeline 1f1b"),
            "distributed_optimizer": ("data", mesh.data, "--no-distributed-optimizer"),
            "reduce_gradients": ("data", mesh.data * mesh.context, "--reduce-gradients microbatch"),
        }
        for name, (axis, size, remedy) in ranks.items():
            if size == 1 and (given := getattr(self, name)) not in (False, "p2p", "1f1b", "microbatch"):
                what = flag(name) if given is True else f"{flag(name)} {given}"
                raise ValueError(
                    f"{what} is for {axis} ranks, and --mesh {self.mesh or '(none)'} has one; give --mesh with "
                    f"{axis}=N, or {remedy}"
                )
        if self.mesh is None and self.mesh_axis_type != "auto":
            raise ValueError(f"--mesh-axis-type {self.mesh_axis_type} is for the axes of a --mesh; give one, too")

    def _check_quantized_layers(self) -> None:
        """Raise ValueError for options of runs that quantize in one that does not, and for no layer to quantize."""
        start, end = self.bf16_layers_start, self.bf16_layers_end
        if self.recipe == "none" and self.precision_config is None:
            for name in ("fp8_param", "inspect_every", "bf16_layers_start", "bf16_layers_end"):
                if getattr(self, name):
                    raise ValueError(
                        f"{flag(name)} is for runs that quantize, and the recipe is none; give --recipe or "
                        "--precision-config"
                    )
        if start + end > self.num_layers - (self.precision_config is None):  # rules may still reach all layers
            raise ValueError(
                f"--bf16-layers-start {start} and --bf16-layers-end {end} leave none of --num-layers "
                f"{self.num_layers} to --recipe {self.recipe}; keep fewer layers, or use --recipe none"
            )

    def _divisions(self, recipe: Recipe | None, mesh: ParallelConfig) -> Iterator[_Division]:
        """Yield sizes, and numbers that must divide them.

        The library refuses most of these, too, but only while the model is built or run, where no option has a name.
        """
        head = self.transformer_config().kv_channels or 1
        yield from self._rope_divisions(head)
        yield from self._batch_divisions(mesh)
        yield from self._kernel_divisions(mesh)
        yield from self._sequence_divisions(mesh)
        if recipe is not None and self.precision_config is None:  # rules may exclude a layer, whose sizes do not matter
            yield from self._recipe_divisions(recipe, head)

    def _rope_divisions(self, head: int) -> Iterator[_Division]:
        if self.position_embedding == "rope":
            size = (
                f"--kv-channels {head}"
                if self.kv_channels
                else f"--hidden-size {self.hidden_size} / --num-heads {self.num_heads}"
            )
            yield _Division(f"{size} =", head, 2, "2, as --position-embedding rope needs it")

    def _batch_divisions(self, mesh: ParallelConfig) -> Iterator[_Division]:
        parts, ranks, turns = self.microbatches, mesh.batch_devices, self.batch_parts
        yield _Division("--batch-size", self.batch_size, parts, f"--microbatches {parts}")
        spread = f"--microbatches {parts} times data*fsdp*expert = {ranks} of --mesh {self.mesh}"
        yield _Division("--batch-size", self.batch_size, parts * ranks, spread)
        why = f"{spread} times --batch-parts {turns}"
        yield _Division("--batch-size", self.batch_size, parts * ranks * turns, why)

    def _kernel_divisions(self, mesh: ParallelConfig) -> Iterator[_Division]:
        # One axis of a kernel is split over all of these.
        kernels = "tensor*fsdp*pipeline", mesh.tensor * mesh.fsdp * mesh.pipeline
        axes = {"num_query_groups": ("tensor", mesh.tensor), "ffn_hidden_size": kernels, "hidden_size": kernels}
        for name, (axis, ranks) in (axes | {"seq_len": ("context", mesh.context)}).items():
            yield _Division(flag(name), getattr(self, name), ranks, f"{axis}={ranks} of --mesh {self.mesh}")
        if self.num_experts is not None:
            why = f"expert={mesh.expert} of --mesh {self.mesh}"
            yield _Division("--num-experts", self.num_experts, mesh.expert, why)
            if self.moe_ffn_hidden_size is not None:
                axis, ranks = kernels
                why = f"{axis}={ranks} of --mesh {self.mesh}"
                yield _Division("--moe-ffn-hidden-size", self.moe_ffn_hidden_size, ranks, why)

    def _sequence_divisions(self, mesh: ParallelConfig) -> Iterator[_Division]:
        ranks = mesh.context * mesh.tensor
        for name in ("sequence_parallel", "distribute_saved_activations"):
            if getattr(self, name):
                why = f"context*tensor={ranks} of --mesh {self.mesh}, over which {flag(name)} splits it"
                yield _Division("--seq-len", self.seq_len, ranks, why)
        if self.cp_comm_type == "a2a":  # query heads are a multiple of the groups
            why = f"context*tensor={ranks} of --mesh {self.mesh}, among which --cp-comm-type a2a exchanges heads"
            why = f"{why}, as p2p and all_gather do not"
            yield _Division("--num-query-groups", self.num_query_groups, ranks, why)
        if self.cp_load_balanced:
            why = f"two chunks for each of context={mesh.context} of --mesh {self.mesh}, for --cp-load-balanced"
            yield _Division("--seq-len", self.seq_len, 2 * mesh.context, f"{2 * mesh.context}, {why}")

    def _recipe_divisions(self, recipe: Recipe, head: int) -> Iterator[_Division]:
        multiple, why = recipe.alignment, f"{recipe.alignment}, as it must be for --recipe {self.recipe}"
        yield _Division("--hidden-size", self.hidden_size, multiple, why)
        yield _Division("--ffn-hidden-size", self.ffn_hidden_size, multiple, why)
        if self.moe_ffn_hidden_size is not None:
            yield _Division("--moe-ffn-hidden-size", self.moe_ffn_hidden_size, multiple, why)
        yield _Division("--num-query-groups x head size =", self.num_query_groups * head, multiple, why)
        if self.mesh is not None:  # kernels are quantized once a step on each device, without padding of tokens
            what = "tokens of a microbatch, --batch-size x --seq-len / --microbatches ="
            yield _Division(what, self.tokens_per_step // self.microbatches, multiple, f"{why} on a mesh")


class _Division(NamedTuple):
    """A size that must be a multiple of a number.

    Args:
        option: name of the size, such as an option's.
        size: value.
        divisor: number that must divide it.
        why: the number and where it comes from, for the message.
    """

    option: str
    size: int
    divisor: int
    why: str


@contextlib.contextmanager
def _options_named() -> Iterator[None]:
    """Yield, and let a ValueError of the library end with the options that set the fields in its message."""
    try:
        yield
    except ValueError as error:
        # Names of one word, like "bias" and "data", are words of sentences, too.
        words = dict.fromkeys(word for word in re.findall(r"\w+", str(error)) if "_" in word)
        named = [_FLAGS[word] for word in words if word in _FLAGS]
        raise ValueError(f"{error} (set by {', '.join(named)})" if named else str(error)) from error
