"""Models from checkpoints of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_te._validation import checked, log_once
from jax_te.interop.megatron.expert_states import load_expert_states
from jax_te.interop.megatron.experts import without_unread_bias
from jax_te.interop.megatron.flags import MEGATRON
from jax_te.interop.megatron.folder import read_checkpoint
from jax_te.interop.tables import Fields, OnProgress, load_tensors, release_after_each
from jax_te.models import Execution, GPTModel
from jax_te.typing import DTypeLike

_EXECUTION = Execution()


@checked
def load_megatron(
    path: str | Path,
    *,
    iteration: int | None = None,
    vocab_size: int | None = None,
    args: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = None,
    config: Mapping[str, Any] | None = None,
    execution: Execution = _EXECUTION,
    fp8_states: bool = True,
    on_progress: OnProgress | None = None,
) -> GPTModel:
    """Return the model of a checkpoint of Megatron-LM, with its weights, without torch.

    Args:
        path: path of the checkpoint, in format ``torch`` or ``torch_dist``; see `read_megatron`.
        iteration, vocab_size: see `read_megatron`.
        args: arguments of Megatron-LM by name, in addition to or instead of those in the checkpoint. A message of the
            log names those that nothing reads.
        fp8_states: whether experts get the scales and amax histories that the checkpoint has of them, under a recipe
            with state (`jax_te.recipe.autocast`). False: their states are new, as those of other layers are.
        dtype, config, execution, on_progress: see `jax_te.interop.huggingface.load_huggingface`.

    Returns:
        A `GPTModel`, sharded over the mesh of ``jax.set_mesh``.

    Raises:
        ValueError: see `read_megatron`; for unsupported arguments that change a model's computation; for names in
            ``args`` that are no arguments of Megatron-LM; for fields in ``config`` that the checkpoint decides.
        TypeError: for names in ``config`` that are no fields of `jax_te.config.TransformerConfig`.
        CheckpointMismatchError: for missing, unexpected and wrongly shaped tensors; for FP8 states of experts that are
            of another recipe, or not there for all experts of a layer.

    Source: ``load_checkpoint`` of Megatron-LM with ``--use-checkpoint-args``.

    >>> model = load_megatron("checkpoints", dtype=jnp.bfloat16)  # doctest: +SKIP
    """
    stored = read_checkpoint(path, iteration=iteration, vocab_size=vocab_size, args=args or {})
    given = dict(stored.args)
    # The model has only the rows that are kept.
    if vocab_size is not None:
        given["padded_vocab_size"] = vocab_size
    corrections = args or {}
    # Its older name; the one that the caller gives counts, whichever the file has.
    older = "layernorm_epsilon"
    if older in given and "norm_epsilon" not in (corrections if older in corrections else given):
        given["norm_epsilon"] = given[older]
    fields = Fields(given, f"the arguments of {path}", stored.tensors)
    form = MEGATRON.form(fields)
    if unread := fields.unread(corrections.keys() - {older}):
        log_once(
            f"{len(unread)} of the arguments in args= have no effect, alone or beside the others: "
            f"{', '.join(unread[:8])}{', ...' if len(unread) > 8 else ''}. Those of training do not matter; of "
            "those that say what the model computes give the names that Megatron's programs read"
        )
    model = load_tensors(
        MEGATRON,
        form,
        without_unread_bias(stored.tensors, given, form.config),
        Path(path),
        release_after_each(stored.files, on_progress),
        dtype=dtype,
        config=config,
        execution=execution,
    )
    if fp8_states:
        load_expert_states(model, stored.expert_states, str(path))
    return model
