"""AdamW as commonly used for language models, composed from optax."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.tree_util import DictKey, GetAttrKey

from jax_te._validation import check_leaves, check_rate, checked, float_dtype
from jax_te.typing import DTypeLike, PyTree


@checked
def learning_rate_schedule(
    learning_rate: float, *, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.1
) -> optax.Schedule:
    """Return ``schedule(count) -> learning rate``: linear warm-up from 0, then cosine decay; ``count`` starts at 0.

    Args:
        learning_rate: the largest value, reached after ``warmup_steps``.
        total_steps: steps of warm-up and decay together; the learning rate is constant afterwards.
        warmup_steps: number of warmup steps, in [0, total_steps).
        final_fraction: fraction of ``learning_rate`` at which the decay ends, in [0, 1].

    Raises:
        ValueError: for a value outside these ranges.

    Source: Megatron's ``OptimizerParamScheduler`` with ``lr_decay_style="cosine"``.

    >>> schedule = learning_rate_schedule(1.0, total_steps=10, warmup_steps=2)
    >>> [round(float(schedule(count)), 2) for count in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.55, 0.1]
    """
    if not learning_rate > 0.0:
        raise ValueError(f"learning_rate must be > 0, got {learning_rate!r}")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps must be in [0, total_steps), got warmup_steps {warmup_steps!r} and total_steps "
            f"{total_steps!r}; lower warmup_steps or train longer"
        )
    if not 0.0 <= final_fraction <= 1.0:
        raise ValueError(f"final_fraction must be in [0, 1], got {final_fraction!r}")
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup_steps else learning_rate,
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=total_steps,
        end_value=final_fraction * learning_rate,
    )


def weight_decay_mask(params: PyTree) -> PyTree:
    """Return a tree of bool: True for parameters with two or more axes whose name ends in none of "bias", "scale" and
    "softmax_offset".

    It is the argument ``mask`` of ``optax.adamw``, and ``weight_decay_mask`` of ``optax.contrib.muon``.

    Source: Megatron's rule, ``not name.endswith(".bias") and len(shape) > 1``.

    >>> import jax.numpy as jnp
    >>> weight_decay_mask({"kernel": jnp.ones((2, 2)), "wi_bias": jnp.ones((2, 2)), "scale": jnp.ones(2)})
    {'kernel': True, 'scale': False, 'wi_bias': False}
    """
    check_leaves("params", params)

    def decide(path: tuple[Any, ...], leaf: Any) -> bool:
        # Of a dataclass and a NamedTuple the last name is an attribute's, and so it is of a Variable, which has none.
        named = path[:-1] if path[-1:] == (GetAttrKey("value"),) else path
        names = [
            str(entry.key if isinstance(entry, DictKey) else entry.name)
            for entry in named
            if isinstance(entry, DictKey | GetAttrKey)
        ]
        # A fused layer's bias may have two axes, as the scales of norms and attention's offsets have in stacked layers,
        # so the name decides, too.
        return leaf.ndim > 1 and not (names and names[-1].endswith(("bias", "scale", "softmax_offset")))

    return jax.tree_util.tree_map_with_path(decide, params)


@checked
def adamw_with_schedule(
    schedule: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Return AdamW with decoupled weight decay, after clipping by the global norm.

    Args:
        schedule: learning rate, or a function of the step's number such as `learning_rate_schedule` returns.
        b1, b2, eps: coefficients of Adam.
        weight_decay: weight decay of the parameters that `weight_decay_mask` selects.
        clip_norm: largest global norm of the gradients; larger ones are scaled down to it. None: no clipping.
        mu_dtype: dtype of the first moment. bf16 saves two bytes a parameter. None: the parameters'. The second moment
            keeps its dtype: with ``b2 = 0.999`` a step lowers it by less than bf16 resolves, so that it would never
            shrink.

    Raises:
        TypeError, ValueError: for arguments that are not numbers or out of range.

    Source: Megatron's defaults for GPT; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".

    >>> import jax.numpy as jnp
    >>> tx = adamw_with_schedule(learning_rate_schedule(0.1, total_steps=10))
    >>> params = {"bias": jnp.zeros(2)}
    >>> updates, _ = tx.update({"bias": jnp.ones(2)}, tx.init(params), params)
    >>> [round(float(update), 3) for update in updates["bias"]]
    [-0.1, -0.1]
    """
    if (shape := getattr(schedule, "shape", ())) != ():
        raise ValueError(f"schedule must be a number or a function of the step, got an array {shape}")
    # An array may be traced: optax.inject_hyperparams gives such ones.
    for name, rate in (("b1", b1), ("b2", b2)):
        if isinstance(rate, int | float):
            check_rate(**{name: rate})
    for name, number in (("schedule", schedule), ("eps", eps), ("weight_decay", weight_decay)):
        if isinstance(number, int | float) and not number >= 0.0:
            raise ValueError(f"{name} must be >= 0, got {number!r}")
    mu_dtype = None if mu_dtype is None else float_dtype("mu_dtype", mu_dtype)
    if isinstance(clip_norm, int | float) and not clip_norm > 0.0:
        raise ValueError(f"clip_norm must be > 0, or None for no clipping; got {clip_norm!r}")
    adamw = optax.adamw(
        schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=weight_decay_mask, mu_dtype=mu_dtype
    )
    return adamw if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), adamw)
