"""Ignored labels, label smoothing, weights and reductions of both cross-entropies, against a formula in fp64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.config import ParallelConfig
from jax_te.ops import LossOptions, linear_cross_entropy, softmax_cross_entropy
from jax_te.sharding import make_mesh
from tests.support.numerics import TOLERANCE, assert_close, draw, quick_jit, wide, without_type_checker

B, S, H, V = 4, 8, 16, 32
AXES = ("batch", "sequence")
REDUCTIONS = ("none", "sum", "mean")
SMOOTHED = LossOptions(label_smoothing=0.1)
LABELS = np.random.default_rng(0).integers(0, V, (B, S)).astype(np.int32)
LABELS[np.random.default_rng(1).random((B, S)) < 0.4] = -100
LABELS[0] = -100  # a whole example, so that the devices of a mesh count different numbers of tokens
WEIGHTS = np.random.default_rng(2).uniform(0.1, 2.0, (B, S)).astype(np.float32)
G = draw("g", (B, S))


def operands(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    return draw("x", (B, S, H), dtype), draw("kernel", (H, V), dtype, scale=0.3)


def loss(form: str, x: Any, kernel: Any, labels: Any = LABELS, **how: Any) -> Any:
    labels = jnp.asarray(labels)
    if form == "chunked":
        return linear_cross_entropy(x, kernel, labels, chunks=2, out_axes=AXES, **how)
    return softmax_cross_entropy(jnp.einsum("bsh,hv->bsv", x, kernel), labels, out_axes=AXES, **how)


def expected(x: Any, kernel: Any, reduction: str, smoothing: float) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The sum over all entries of target times -log(probability), by the definition."""
    x, kernel = wide(x), wide(kernel)
    logits = x @ kernel
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    counts = LABELS != -100
    target = (1.0 - smoothing) * np.eye(V)[np.where(counts, LABELS, 0)] + smoothing / V
    weights = np.where(counts, wide(WEIGHTS), 0.0)
    losses = -(target * np.log(probabilities)).sum(-1) * weights
    total = weights.sum() if reduction == "mean" else 1.0
    g = wide(G) if reduction == "none" else 1.0 / total
    dlogits = (probabilities - target) * (weights * g)[..., None]
    gradients = dlogits @ kernel.T, np.einsum("bsh,bsv->hv", x, dlogits)
    return losses if reduction == "none" else losses.sum() / total, gradients


def check(form: str, dtype: Any) -> None:
    # In bf16 the whole form's logits are rounded to bf16 before the loss; the chunked form's are not.
    tolerance = TOLERANCE["float32" if form == "chunked" else dtype]

    @quick_jit
    def run(x: Any, kernel: Any) -> Any:
        found = {}
        for reduction in REDUCTIONS:

            def weighted(x: Any, kernel: Any, reduction: str = reduction) -> Any:
                how = {"weights": jnp.asarray(WEIGHTS), "options": SMOOTHED, "reduction": reduction}
                value = loss(form, x, kernel, **how)
                return jnp.sum(value * G) if reduction == "none" else value, value

            found[reduction] = jax.grad(weighted, (0, 1), has_aux=True)(x, kernel)
        return found

    x, kernel = operands(dtype)
    for reduction, (gradients, value) in run(x, kernel).items():
        assert value.dtype == jnp.float32
        wanted, wanted_gradients = expected(x, kernel, reduction, 0.1)
        assert_close(value, wanted, tolerance, what=reduction)
        for got, e in zip(gradients, wanted_gradients, strict=True):
            assert_close(got, e, 3 * TOLERANCE[dtype], what=f"{reduction} gradient")


@pytest.mark.costly("float32-chunked", "bfloat16-chunked")
@pytest.mark.parametrize("form", ["whole", "chunked"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_follow_the_definition(form: str, dtype: str) -> None:
    check(form, dtype)


@pytest.mark.costly("auto-chunked", slow=("explicit-chunked",))
@pytest.mark.parametrize("form", ["whole", "chunked"])
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_on_a_mesh_the_mean_is_that_of_all_devices(form: str, axis_type: Any) -> None:
    """Batch over fsdp, sequence over context, vocabulary over tensor."""
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, context=2, tensor=2), axis_type=axis_type)):
        check(form, "float32")


@pytest.mark.costly("whole")
@pytest.mark.parametrize("form", ["whole", "chunked"])
def test_a_batch_in_which_no_token_counts_gives_zero(form: str) -> None:
    """Also where its logits are not finite: padding adds nothing at all."""
    x, kernel = operands()
    for labels, weights in ((np.full_like(LABELS, -100), None), (np.zeros_like(LABELS), jnp.zeros((B, S)))):
        for reduction in ("sum", "mean"):
            how = {"weights": weights, "reduction": reduction}
            value, gradients = jax.value_and_grad(loss, (1, 2))(form, x, kernel, labels, **how)
            assert value == 0.0
            assert not any(np.asarray(gradient).any() for gradient in gradients)
    labels, logits = jnp.full((B, S), -100), jnp.full((B, S, V), jnp.nan)
    value, gradient = jax.value_and_grad(softmax_cross_entropy)(logits, labels, reduction="mean")
    assert value == 0.0
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("form", ["whole", "chunked"])
@pytest.mark.parametrize(
    ("label", "options"), [(-1, LossOptions()), (V, LossOptions()), (-100, LossOptions(ignore_index=None))]
)
def test_another_label_outside_of_the_vocabulary_makes_the_mean_nan(form: str, label: int, options: Any) -> None:
    """Also with weight 0: an unknown label is a fault of the data, which no mask may hide."""
    labels, weights = np.array(LABELS), np.array(WEIGHTS)
    labels[labels == -100] = 0
    labels[2, 3], weights[2, 3] = label, 0.0
    value = loss(form, *operands(), labels, weights=jnp.asarray(weights), options=options, reduction="mean")
    assert np.isnan(value)


def test_an_entry_of_the_vocabulary_may_be_the_ignored_label() -> None:
    x, kernel = operands()
    padded, options = np.where(LABELS == -100, 0, np.maximum(LABELS, 1)), LossOptions(ignore_index=0)
    ignored = np.where(padded == 0, -100, padded)
    one = loss("whole", x, kernel, padded, options=options, reduction="mean")
    assert_close(one, loss("whole", x, kernel, ignored, reduction="mean"), TOLERANCE["float32"])


def test_a_large_unsigned_label_is_not_the_negative_one_of_the_same_bits() -> None:
    labels = np.array(LABELS, np.uint32)  # -100 becomes 2^32 - 100
    losses = loss("whole", *operands(), labels)
    assert (np.isnan(losses) == (LABELS == -100)).all()


def test_what_is_refused() -> None:
    x, kernel = operands()
    for form in ("whole", "chunked"):
        with pytest.raises(ValueError, match=r"weights must have the shape of the labels \(4, 8\), got \(4,\)"):
            loss(form, x, kernel, weights=jnp.ones(B))
        with pytest.raises(ValueError, match="reduction must be one of 'none', 'sum', 'mean', got 'avg'"):
            loss(form, x, kernel, reduction="avg")
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"label_smoothing must be (in \[0, 1\)|a finite number), got"):
            LossOptions(label_smoothing=smoothing)
    with without_type_checker():
        for index in (True, 1.0, "pad", 2**31):
            with pytest.raises(ValueError, match="ignore_index must be an int32, as labels are, or None, got"):
                LossOptions(ignore_index=index)  # type: ignore[arg-type]
