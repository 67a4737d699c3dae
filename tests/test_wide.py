"""Which cases of a test marked ``wide`` run by default."""

from types import SimpleNamespace

import pytest

from tests.support.wide import mark_wide, quick_cases

DICTS = {"a": {}, "b": {}}


class Item(SimpleNamespace):
    """What of a test item `quick_cases` reads."""

    def __init__(self, params, *named, marks=()):
        super().__init__(parent=None, originalname="test", nodeid="test", params=params, slow="slow" in marks)
        self.callspec = SimpleNamespace(params=params, id="-".join(map(str, params.values())))
        self.named = named

    def get_closest_marker(self, name):
        return SimpleNamespace(args=self.named) if name == "wide" or self.slow else None

    def add_marker(self, marker):
        self.slow = marker.name == "slow"


def product(*named):
    return [Item({"n": n, "d": d}, *named) for n in (1, 2, 3) for d in DICTS.values()]


def test_each_value_once_in_as_few_cases_as_there_can_be():
    cases = product()
    kept = quick_cases(cases)
    assert [case.params["n"] for case in kept] == [1, 2, 3]
    assert kept[0].params["d"] is DICTS["a"]  # equal dicts, and yet two values
    assert kept[1].params["d"] is DICTS["b"]


def test_values_of_a_long_list_are_spread_over_those_of_a_short_one():
    cases = [Item({"name": name, "mode": mode}) for name in "abcdef" for mode in ("auto", "explicit")]
    modes = [case.params["mode"] for case in quick_cases(cases)]
    assert sorted(modes) == ["auto"] * 3 + ["explicit"] * 3


def test_cases_that_are_named():
    cases = product("1-{}")
    mark_wide(cases)
    assert [case.slow for case in cases] == [False, False, True, True, True, True]
    with pytest.raises(ValueError, match=r"`wide` names \('4-{}',\); there are \['1-{}'"):
        quick_cases(product("4-{}"))
    assert quick_cases(product("1-{}")[5:]) == []  # asked for by its id


def test_a_case_that_is_slow_stands_for_no_value():
    cases = [Item({"n": 1}, marks=["slow"]), Item({"n": 1}), Item({"n": 2})]
    mark_wide(cases)
    assert [case.slow for case in cases] == [True, False, False]
