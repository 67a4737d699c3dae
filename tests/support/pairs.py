"""Cases in which every two values of different options meet: pairwise testing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]

_DRAWS = 1500
_CANDIDATES = 12


def pairwise(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True, *, draws: int = _DRAWS
) -> list[Case]:
    """Return few cases, each with one value of every option, in which all pairs of values meet that may.

    The same options give the same cases. A pair that meets in less than about ten of its ``draws`` cases may be left
    out.

    Args:
        options: Values of each option by its name.
        allowed: Says of a whole case whether it may be. Pairs that meet in no such case are left out.
        draws: Random cases of each pair, of which the best of those that are allowed is taken.
    """
    rng, chosen, met = random.Random(0), [], set()
    for (a, b), (i, j) in _index_pairs(options):
        if (a, i, b, j) in met:
            continue
        fixed = {a: options[a][i], b: options[b][j]}
        candidates = []
        for _ in range(draws):  # most cases are not allowed where options depend on each other
            case = {name: fixed[name] if name in fixed else rng.choice(values) for name, values in options.items()}
            if allowed(case):
                candidates.append(case)
                if len(candidates) == _CANDIDATES:
                    break
        if candidates:
            best = max(candidates, key=lambda case: len(_met(case, options) - met))
            met |= _met(best, options)
            chosen.append(best)
    return chosen


def _index_pairs(options: Mapping[str, Sequence[Any]]) -> list[tuple[tuple[str, str], tuple[int, int]]]:
    """Return all pairs of values, of the longest options first: few cases have several of those."""
    names = sorted(itertools.combinations(options, 2), key=lambda ab: -len(options[ab[0]]) * len(options[ab[1]]))
    return [((a, b), ij) for a, b in names for ij in itertools.product(range(len(options[a])), range(len(options[b])))]


def _met(case: Case, options: Mapping[str, Sequence[Any]]) -> set[tuple[str, int, str, int]]:
    at = {name: options[name].index(value) for name, value in case.items()}
    return {(a, at[a], b, at[b]) for a, b in itertools.combinations(options, 2)}


def pairs(case: Case) -> set[Any]:
    """Return all pairs of a case: ``((option, value), (option, value))``."""
    return set(itertools.combinations(case.items(), 2))


def case_id(case: Case) -> str:
    """Return a name for pytest."""
    return "-".join(str(value).replace(" ", "").replace("'", "") for value in case.values())
