"""Cases that run by default and in the sweep."""

import pytest

from tests.sampling import some_cases


def test_a_case_that_is_marked_already_keeps_its_values() -> None:
    """318 tests of the sweep got the whole case as their first argument, and could only fail."""
    marked = pytest.param("bert", (2, 2), marks=pytest.mark.sweep)
    cases = some_cases([("bert", (1, 2)), ("gpt2", (2, 1)), marked], 0)
    assert cases[0] == ("bert", (1, 2))
    assert [case.values for case in cases[1:]] == [("gpt2", (2, 1)), ("bert", (2, 2))]
    assert all(case.marks for case in cases[1:])
