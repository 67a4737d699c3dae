"""The resolved configuration of a training run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from jax_te.cli.precision_rules import quantization_rules
from jax_te.cli.run_recipe import RECIPE_FIELDS, build_recipe, gemm_list, option, recipe_defaults
from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.megatron import RecipeConfig
from jax_te.models import runs_scanned
from jax_te.models.internal import check_recompute_policy
from jax_te.recipe import Recipe

VOCAB_SIZE = 256
"""Tokens are bytes."""

_RECOMPUTE = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "recompute_policy"),
    *("distribute_saved_activations", "scan_layers"),
)
_ON_ONE_DEVICE: dict[str, Any] = {
    "mesh": None,
    "mesh_axis_type": "auto",
    "sequence_parallel": False,
    "cp_comm_type": "p2p",
    "cp_load_balanced": False,
}
_WHERE_IT_RUNS = ("data", "microbatches", "backend", *_ON_ONE_DEVICE, *_RECOMPUTE)
_HOW_OFTEN = ("steps", "save_every", "keep", "eval_every", "eval_batches", "log_every", "inspect_every")
MAY_CHANGE = {*_WHERE_IT_RUNS, *_HOW_OFTEN}
"""Fields that a resumed run may give anew: they change where, how long and how often, not what is trained.

A text may have moved; that it is the same one, `TrainBatches` checks."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run trains; each field is an option of ``jax-te train``.

    Args:
        preset: name the defaults came from.
        num_layers, hidden_size, num_heads, num_query_groups, ffn_hidden_size, normalization, activation: as in
            `TransformerConfig`.
        position_embedding: ``"rope"``, ``"learned_absolute"`` or ``"none"``.
        bias: biases in linear layers.
        tie_embeddings: the output head is the transposed embedding.
        dropout: of attention and hidden states.
        data: absolute path of the text; None for the standard library's sources.
        seq_len, batch_size: tokens of an example, examples of a step.
        microbatches: parts a batch is cut into for gradient accumulation.
        steps: optimizer steps of the run.
        learning_rate, min_learning_rate, warmup_steps, decay_steps: linear warm-up, then a cosine that reaches the
            minimum at ``decay_steps`` and stays there.
        weight_decay, clip_norm, seed: as they say.
        recipe: a key of `jax_te.recipe.RECIPES`.
        fp8_format, amax_history_len, amax_compute_algo, margin, use_power_2_scales, use_f32_scales: the recipe's
            fields; None where it has no such field, otherwise None is filled in with its default.
        rht, stochastic_rounding, square_blocks: NVFP4's Hadamard transform, stochastic rounding of gradients, and 16 x
            16 blocks of kernels; as above.
        fp8_accumulation: ``"fast"`` or ``"precise"``, of all three GEMMs, see `MMParams`; as above.
        override_linear_precision: the GEMMs that stay in high precision, as `gemm_list` takes them; None for none.
        fp8_param: hold the kernels quantized, with fp32 masters.
        bf16_layers_start, bf16_layers_end: first and last layers that stay in high precision.
        precision_config: text of a precision file, whose rules give layers their own recipes; None without.
        params_dtype, compute_dtype: dtype names.
        backend: ``"auto"``, ``"xla"`` or ``"te"``.
        mesh: as `ParallelConfig.parse` takes it; None for one device and no mesh.
        mesh_axis_type: ``"auto"`` or ``"explicit"``.
        sequence_parallel: split activations between tensor-parallel parts over the tensor ranks.
        cp_comm_type: how context ranks exchange keys and values: ``"p2p"``, ``"all_gather"`` or ``"a2a"``.
        cp_load_balanced: context ranks have the tokens of a sequence in zig-zag order.
        recompute_granularity: ``"none"``, ``"full"`` or ``"selective"``.
        recompute_method, recompute_num_layers, distribute_saved_activations: as in `RecomputeConfig`; None is
            ``"uniform"`` and 1 under full recomputation.
        recompute_modules: as there, separated by commas; None for its default.
        recompute_policy, scan_layers: as in `GPTModel`.
        save_every, keep, eval_every, eval_batches, log_every: cadences.
        inspect_every: steps between statistics of the quantized tensors; 0 for never.

    Raises:
        ValueError: for sizes that do not divide, values that do not go together, or options of a mesh that have no
            effect on this one. The message names the option.
    """

    preset: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    normalization: str
    activation: str
    position_embedding: str
    bias: bool
    tie_embeddings: bool
    dropout: float = 0.0
    data: str | None = None
    seq_len: int
    batch_size: int
    microbatches: int = 1
    steps: int
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    decay_steps: int
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    recipe: str = "none"
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    margin: int | None = None
    use_power_2_scales: bool | None = None
    use_f32_scales: bool | None = None
    rht: bool | None = None
    stochastic_rounding: bool | None = None
    square_blocks: bool | None = None
    fp8_accumulation: str | None = None
    override_linear_precision: str | None = None
    fp8_param: bool = False
    bf16_layers_start: int = 0
    bf16_layers_end: int = 0
    precision_config: str | None = None
    params_dtype: str = "float32"
    compute_dtype: str = "float32"
    backend: str = "auto"
    mesh: str | None = None
    mesh_axis_type: str = "auto"
    sequence_parallel: bool = False
    cp_comm_type: str = "p2p"
    cp_load_balanced: bool = False
    recompute_granularity: str = "none"
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: str | None = None
    recompute_policy: str = "full"
    distribute_saved_activations: bool = False
    scan_layers: bool | str = "auto"
    save_every: int = 100
    keep: int = 3
    eval_every: int = 100
    eval_batches: int = 16
    log_every: int = 10
    inspect_every: int = 0

    def __post_init__(self) -> None:
        self._check_quantized_layers()
        check_recompute_policy(self.transformer_config(), self.recompute_policy)
        runs_scanned(self.scan_layers, self.num_layers)
        recipe, rules = self.make_recipe(), self.quantization_rules()
        for name, default in recipe_defaults(self.recipe).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.override_linear_precision is not None:
            object.__setattr__(self, "override_linear_precision", ",".join(gemm_list(self.override_linear_precision)))
        self._check_schedule()
        self._check_parallel(self.parallel_config())
        if recipe is not None and rules is None:  # rules may keep a layer out; then its sizes do not matter
            self._check_alignment(recipe)

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one step predicts."""
        return self.batch_size * self.seq_len

    def transformer_config(self) -> TransformerConfig:
        """The model's configuration."""
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} is not divisible by --num-heads {self.num_heads}; "
                f"the next that is: {_next(self.hidden_size, self.num_heads)}"
            )
        if self.num_heads % self.num_query_groups:
            raise ValueError(
                f"--num-heads {self.num_heads} is not divisible by --num-query-groups {self.num_query_groups}"
            )
        if self.position_embedding == "rope" and (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"--position-embedding rope needs heads of even size, and --hidden-size {self.hidden_size} / "
                f"--num-heads {self.num_heads} is odd"
            )
        return TransformerConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            num_query_groups=self.num_query_groups,
            ffn_hidden_size=self.ffn_hidden_size,
            normalization=self.normalization,  # type: ignore[arg-type]
            activation=self.activation,
            add_bias_linear=self.bias,
            attention_dropout=self.dropout,
            hidden_dropout=self.dropout,
            params_dtype=self.params_dtype,
            compute_dtype=self.compute_dtype,
            first_last_layers_bf16=bool(self.bf16_layers_start or self.bf16_layers_end),
            num_layers_at_start_in_bf16=self.bf16_layers_start,
            num_layers_at_end_in_bf16=self.bf16_layers_end,
            cp_comm_type=self.cp_comm_type,
            cp_load_balanced=self.cp_load_balanced,
            **self._sequence_parallel_fields(),
            **self._recompute_fields(),
        )

    def _sequence_parallel_fields(self) -> dict[str, Any]:
        """Of the model's configuration."""
        if not self.sequence_parallel:
            return {}
        mesh = self.parallel_config()
        if mesh is None or mesh.tensor == 1:
            raise ValueError(
                f"--sequence-parallel splits activations over tensor ranks, and --mesh {self.mesh or '(none)'} has "
                "one; give --mesh with tensor=N, or leave it out"
            )
        return {"sequence_parallel": True, "tensor_model_parallel_size": mesh.tensor}

    def _recompute_fields(self) -> dict[str, Any]:
        """Of the model's configuration."""
        full = self.recompute_granularity == "full"
        method, count, names = self.recompute_method, self.recompute_num_layers, self.recompute_modules
        return {
            "recompute_granularity": None if self.recompute_granularity == "none" else self.recompute_granularity,
            "recompute_method": "uniform" if full and method is None else method,
            "recompute_num_layers": 1 if full and count is None else count,
            "recompute_modules": None if names is None else names.split(","),
            "distribute_saved_activations": self.distribute_saved_activations,
        }

    def make_recipe(self) -> Recipe | None:
        """The precision recipe, or None."""
        return build_recipe(self.recipe, {name: getattr(self, name) for name in RECIPE_FIELDS})

    def quantization_rules(self) -> RecipeConfig | None:
        """The rules of the precision file, or None."""
        return None if self.precision_config is None else quantization_rules(self.precision_config)

    @property
    def tokens_per_microbatch(self) -> int:
        """Rows of the layers' inputs."""
        return self.tokens_per_step // self.microbatches

    def parallel_config(self) -> ParallelConfig | None:
        """Sizes of the mesh's axes, or None for no mesh."""
        return None if self.mesh is None else ParallelConfig.parse(self.mesh)

    def on_one_device(self) -> RunConfig:
        """The same model and training without a mesh and what goes with one, on whatever backend is there."""
        return dataclasses.replace(self, backend="auto", **_ON_ONE_DEVICE)

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
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"--batch-size {self.batch_size} is not divisible by --microbatches {self.microbatches}; the next "
                f"that is: {_next(self.batch_size, self.microbatches)}"
            )

    def _check_parallel(self, sizes: ParallelConfig | None) -> None:
        self._check_context_options(1 if sizes is None else sizes.context)
        if sizes is None:
            if self.mesh_axis_type != "auto":
                raise ValueError(
                    f"--mesh-axis-type {self.mesh_axis_type} is of a mesh's axes, and there is no --mesh; give --mesh, "
                    "or leave it out"
                )
            return
        examples, ranks = self.batch_size // self.microbatches, sizes.data * sizes.fsdp
        if examples % ranks:
            raise ValueError(
                f"a microbatch of {examples} examples (--batch-size / --microbatches) does not divide over "
                f"data*fsdp = {ranks} ranks of --mesh {self.mesh}; the next --batch-size that does: "
                f"{_next(self.batch_size, self.microbatches * ranks)}"
            )
        split = {
            "num_query_groups": (self.num_query_groups, "tensor"),
            "ffn_hidden_size": (self.ffn_hidden_size, "tensor*fsdp"),
            "hidden_size": (self.hidden_size, "tensor*fsdp"),
            "seq_len": (self.seq_len, "context"),
        }
        for name, (size, axis) in split.items():
            parts = math.prod(getattr(sizes, part) for part in axis.split("*"))
            if size % parts:
                raise ValueError(
                    f"{option(name)} {size} does not divide over {axis}={parts} of --mesh {self.mesh}; "
                    f"the next that does: {_next(size, parts)}"
                )
        ranks = sizes.context * sizes.tensor
        for name in ("sequence_parallel", "distribute_saved_activations"):
            if getattr(self, name) and self.seq_len % ranks:
                raise ValueError(
                    f"{option(name)} splits --seq-len {self.seq_len} over context*tensor={ranks} of --mesh "
                    f"{self.mesh}, and it does not divide; the next that does: {_next(self.seq_len, ranks)}"
                )
        groups = self.num_query_groups // sizes.tensor
        if self.cp_comm_type == "a2a" and groups % sizes.context:  # query heads are a multiple of them
            raise ValueError(
                f"--cp-comm-type a2a exchanges heads among context={sizes.context} ranks of --mesh {self.mesh}, and "
                f"each of tensor={sizes.tensor} has {groups} of --num-query-groups {self.num_query_groups}, which do "
                f"not divide; the next that does: {_next(self.num_query_groups, ranks)}; or take p2p or all_gather"
            )
        chunks = 2 * sizes.context
        if self.cp_load_balanced and sizes.context > 1 and self.seq_len % chunks:
            raise ValueError(
                f"--cp-load-balanced cuts --seq-len {self.seq_len} into two chunks for each of context={sizes.context} "
                f"ranks of --mesh {self.mesh}, and it does not divide by {chunks}; the next that does: "
                f"{_next(self.seq_len, chunks)}"
            )

    def _check_context_options(self, ranks: int) -> None:
        if ranks > 1:
            return
        given = {
            "--cp-load-balanced": (self.cp_load_balanced, "--no-cp-load-balanced"),
            f"--cp-comm-type {self.cp_comm_type}": (self.cp_comm_type != "p2p", "--cp-comm-type p2p"),
        }
        for what, (is_given, without) in given.items():
            if is_given:
                raise ValueError(
                    f"{what} is for context ranks, and --mesh {self.mesh or '(none)'} has one; give --mesh with "
                    f"context=N, or {without}"
                )

    def _check_quantized_layers(self) -> None:
        start, end = self.bf16_layers_start, self.bf16_layers_end
        if self.recipe == "none" and self.precision_config is None:
            given = {"fp8_param": self.fp8_param, "inspect_every": self.inspect_every}
            given |= {"bf16_layers_start": start, "bf16_layers_end": end}
            for name, value in given.items():
                if value:
                    raise ValueError(
                        f"{option(name)} is for runs that quantize, and the recipe is none; give --recipe or "
                        "--precision-config"
                    )
        if start + end > self.num_layers - (self.precision_config is None):  # rules may still reach all layers
            raise ValueError(
                f"--bf16-layers-start {start} and --bf16-layers-end {end} leave none of --num-layers "
                f"{self.num_layers} to --recipe {self.recipe}; keep fewer layers, or use --recipe none"
            )

    def _check_alignment(self, recipe: Recipe) -> None:
        head, tokens = self.hidden_size // self.num_heads, self.tokens_per_microbatch
        sizes = {
            f"--hidden-size {self.hidden_size}": self.hidden_size,
            f"--ffn-hidden-size {self.ffn_hidden_size}": self.ffn_hidden_size,
            f"key/value size {self.num_query_groups} x {head} (--num-query-groups x head size)": (
                self.num_query_groups * head
            ),
            f"tokens of a microbatch {tokens} (--batch-size x --seq-len / --microbatches)": tokens,
        }
        for what, size in sizes.items():
            if size % recipe.alignment:
                raise ValueError(
                    f"{what} must be a multiple of {recipe.alignment} for --recipe {self.recipe}; "
                    f"the next is {_next(size, recipe.alignment)}"
                )


def _next(size: int, multiple: int) -> int:
    return size + -size % multiple
