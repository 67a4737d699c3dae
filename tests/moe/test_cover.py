"""The list of cases for the MoE layer: each two values of different options meet in one, or are refused together."""

from __future__ import annotations

from tests.support.moe import cover


def test_each_pair_is_a_case_or_refused() -> None:
    cases, refused = cover.read()
    listed = [*cases, *(case for case, _ in refused)]
    missing = [pair for pair in cover.all_pairs() if not any(pair.items() <= case.items() for case in listed)]
    assert not missing, "python -m tests.support.moe.cover"


def test_cases_are_allowed_and_the_others_refused_for_one_reason() -> None:
    cases, refused = cover.read()
    assert not [case for case in cases if cover.refusals(case)]
    assert all(cover.refusals(case) == [field] for case, field in refused)


def test_there_are_few_cases() -> None:
    cases, _ = cover.read()
    assert len(cases) < 60 < len(list(cover.all_pairs())) / 10
