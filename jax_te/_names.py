"""Names of a package that are found when first used: those imported late, and those that moved.

A name that moved keeps working for one minor version, with a DeprecationWarning that says its new place.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

# Old package -> new home -> its names; OLD=NEW where the name itself changed; the home "" for names that are
# gone, with =NEW where something that is called in another way takes their place.
_NAMES: dict[str, dict[str, str]] = {
    "jax_te": {
        "jax_te.recipe": "MMParams current_recipe",
        "": "split_vjp=jax_te.training.deferred_vjp",
    },
    "jax_te.config": {
        "jax_te.config.internal": "SYMMETRIC_AR_TYPES check_bool check_choice check_mesh_axis check_positive "
        "check_rate float_dtype",
        "jax_te.config.mesh": "RESERVED_AXES",
    },
    "jax_te.ops": {
        "jax_te.ops": "Choice=BackendChoice",
    },
    "jax_te.parallel": {
        "jax_te.random": "DATA_PARALLEL_RNG EXPERT_PARALLEL_RNG MODEL_PARALLEL_RNG RNGStatesTracker StreamState "
        "model_parallel_seed model_parallel_seeds",
        "jax_te.remat": "CHECKPOINT_NAMES POLICIES RecomputePolicy checkpoint=remat recompute_policy "
        "selective_recompute",
        "jax_te.remat.internal": "recomputed run_recomputed",
        "jax_te.sharding": "ArrayPlacement ShardingReport ShardingRules auto_region constrain current_mesh "
        "logical_to_spec make_mesh named_sharding sharding_report shardings_of use_rules",
        "jax_te.sharding.internal": "activation_axis axis_ranks batch_ranks create_sharded leaves_with_axes ranks_of "
        "row_axis whole_sequences",
        "": "check_divides split_vjp=jax_te.training.deferred_vjp",
    },
    "jax_te.quantize": {
        "jax_te.layers": "prepare_quantization",
        "jax_te.quantize": "max_merging=with_max_gradients plain_states=as_float32",
        "jax_te.quantize.internal": "Operand ROLES TensorRole amax compute_scale hadamard_rows next_amax_state "
        "quantize_operand scale_in_use",
        "jax_te.training": "split_model",
        "": "AmaxState GemmQuantizers PackedOperand hadamard_matrix power_of_two_scale "
        "quantizer_variable=jax_te.layers.prepare_quantization with_scale",
    },
    "jax_te.recipe": {
        "jax_te.recipe.internal": "fp8_max",
    },
    "jax_te.remat": {
        "jax_te.remat": "checkpoint=remat",
        "": "split_vjp=jax_te.training.deferred_vjp",
    },
    "jax_te.training": {
        "jax_te.data": "TextData TrainBatches byte_bigram_entropy heldout_batches load_text",
        "jax_te.training": "is_matrix=weight_decay_mask",
    },
}

# (old package, old name) -> (new module, new name)
MOVED: dict[tuple[str, str], tuple[str, str]] = {
    (package, entry.partition("=")[0]): (home, entry.rpartition("=")[2])
    for package, homes in _NAMES.items()
    for home, entries in homes.items()
    for entry in entries.split()
}


def late_names(package: str, modules: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return the module-level ``__getattr__`` of a package.

    Packages assign it behind ``if not TYPE_CHECKING``: with a ``__getattr__`` in sight, type checkers accept any name.

    Args:
        package: its dotted name.
        modules: name -> the module that defines it, imported when the name is first used.

    >>> late_names("jax_te.parallel")("check_divides")
    Traceback (most recent call last):
    AttributeError: jax_te.parallel.check_divides is gone and has no successor; see CHANGELOG.md
    """
    modules = modules or {}

    def find(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
        if (package, name) not in MOVED:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, new = MOVED[package, name]
        if not home:
            place = "has no successor" if new == name else f"{new} takes its place"
            raise AttributeError(f"{package}.{name} is gone and {place}; see CHANGELOG.md")
        # Level 2 is the import statement or the attribute in the user's file: Python leaves importlib's frames out.
        warnings.warn(f"{package}.{name} is {home}.{new} now", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(home), new)

    return find
