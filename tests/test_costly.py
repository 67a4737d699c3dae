"""Which cases of a test marked ``costly`` are left out of the default run, and which are slow."""

from types import SimpleNamespace

import pytest

from tests.support.costly import mark_costly


class Item:
    """What of a test item `mark_costly` reads and changes."""

    parent, originalname, nodeid = None, "test", "test"

    def __init__(self, name, *named, **slow):
        self.callspec = SimpleNamespace(id=name)
        self.own_markers = [pytest.mark.wide.mark, pytest.mark.costly(*named, **slow).mark]

    def get_closest_marker(self, name):
        return next((marker for marker in self.own_markers if marker.name == name), None)

    def add_marker(self, marker):
        self.own_markers.append(marker.mark)

    @property
    def marks(self):
        return [marker.name for marker in self.own_markers]


def test_cases_that_are_named():
    cases = [Item(name, "a", "c") for name in "abc"]
    mark_costly(cases)
    assert [case.marks for case in cases] == [["wide", "costly"], ["wide"], ["wide", "costly"]]


def test_without_names_all_of_them():
    cases = [Item(name) for name in "ab"]
    mark_costly(cases)
    assert [case.marks for case in cases] == [["wide", "costly"]] * 2


@pytest.mark.parametrize(("named", "others"), [(["a"], []), ([], ["costly"])], ids=["some costly", "all costly"])
def test_cases_that_are_slow(named, others):
    cases = [Item(name, *named, slow=["b"]) for name in "abc"]
    mark_costly(cases)
    assert [case.marks for case in cases] == [["wide", "costly"], ["wide", "costly", "slow"], ["wide", *others]]


def test_a_case_that_there_is_not():
    with pytest.raises(ValueError, match=r"`costly` names \['d'\]; there are \['a', 'b'\]"):
        mark_costly([Item("a", "d"), Item("b", "d")])
    with pytest.raises(ValueError, match=r"`costly` names \['d'\]"):
        mark_costly([Item("a", slow=["d"]), Item("b", slow=["d"])])
    case = Item("b", "d")  # asked for by its id
    mark_costly([case])
    assert case.marks == ["wide"]
