"""Padding of a matrix's groups of rows, and its removal, in te.pytorch's names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import jax.numpy as jnp

from jax_te._validation import check_axes, check_positive, checked
from jax_te.quantize import pad_rows, padded_size, precision_of
from jax_te.recipe import ambient_recipe
from jax_te.typing import Array


@checked
class Fp8Padding:
    """Append rows of zeros to each group, up to a number of rows that low-precision GEMMs accept.

    The layers of this package pad automatically; use this for your own grouped GEMMs and kernels.

    Args:
        num_gemms: number of groups.
        align_size: multiple of rows. None: that of the ambient recipe's quantizers, 16 without one.

    Source: ``transformer_engine.pytorch.Fp8Padding``. There NVFP4's multiple is 64; the GEMMs here take 32.

    >>> padded, m_splits = Fp8Padding(2, 16)(jnp.ones((25, 8)), [5, 20])
    >>> padded.shape, m_splits
    ((48, 8), [16, 32])
    """

    def __init__(self, num_gemms: int, align_size: int | None = None):
        check_positive(num_gemms=num_gemms, **{} if align_size is None else {"align_size": align_size})
        self.num_gemms, self.align_size = num_gemms, align_size

    def __call__(self, inp: Array, m_splits: Sequence[int]) -> tuple[Array, list[int]]:
        """Return the padded rows and the groups' new sizes.

        Args:
            inp: ``[..., k]``, whose rows are the groups, one behind another.
            m_splits: rows of each group; an empty group stays empty.

        Raises:
            ValueError: if there are not ``num_gemms`` groups, or their rows are not those of ``inp``.
        """
        check_axes("inp", inp)
        sizes = self._padded_sizes(m_splits)
        rows = inp.reshape(-1, inp.shape[-1])
        self._check(sum(m_splits), rows.shape[0], m_splits)
        if sizes == list(m_splits):
            return rows, sizes
        groups = jnp.split(rows, list(accumulate(m_splits))[:-1])
        padded = [pad_rows(group, 1, size) if size else group for group, size in zip(groups, sizes, strict=True)]
        return jnp.concatenate(padded), sizes

    def _padded_sizes(self, m_splits: Sequence[int]) -> list[int]:
        if len(m_splits) != self.num_gemms or min(m_splits) < 0:
            raise ValueError(f"m_splits must be {self.num_gemms} sizes of groups (num_gemms), got {list(m_splits)}")
        recipe = ambient_recipe.value
        multiple = self.align_size or (16 if recipe is None else precision_of(recipe).alignment)
        return [padded_size(size, multiple) for size in m_splits]

    def _check(self, wanted: int, rows: int, m_splits: Sequence[int]) -> None:
        if wanted != rows:
            raise ValueError(f"m_splits {list(m_splits)} make {wanted} rows, and the input has {rows}")


class Fp8Unpadding(Fp8Padding):
    """Take away the rows that `Fp8Padding` has appended to each group.

    Args:
        num_gemms, align_size: values of the `Fp8Padding`.

    Source: ``transformer_engine.pytorch.Fp8Unpadding``.

    >>> Fp8Unpadding(2, 16)(jnp.ones((48, 8)), [5, 20]).shape
    (25, 8)
    """

    @checked
    def __call__(self, inp: Array, m_splits: Sequence[int]) -> Array:  # type: ignore[override]
        """Return the groups' own rows, ``[sum(m_splits), k]``.

        Args:
            inp: ``[..., k]``: padded groups, one behind another.
            m_splits: rows of each group before it was padded.

        Raises:
            ValueError: see `Fp8Padding`, for the padded groups' rows.
        """
        check_axes("inp", inp)
        sizes = self._padded_sizes(m_splits)
        rows = inp.reshape(-1, inp.shape[-1])
        self._check(sum(sizes), rows.shape[0], sizes)
        if sizes == list(m_splits):
            return rows
        groups = jnp.split(rows, list(accumulate(sizes))[:-1])
        return jnp.concatenate([group[:size] for group, size in zip(groups, m_splits, strict=True)])
