"""Parameters of a test of which some run by default.

The others run with `pytest -m "sweep or not sweep"`. The ones by default are those that combine
most: the whole suite has to end in minutes.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], *by_default: int) -> list[Any]:
    """Mark the values that are not at the indices `by_default` as a sweep."""
    return [
        value if index in by_default else pytest.param(value, marks=pytest.mark.sweep)
        for index, value in enumerate(values)
    ]


def some_cases(cases: Iterable[Any], *by_default: int) -> list[Any]:
    """As `some`, for cases of several arguments; those with marks keep them."""
    return [
        case
        if index in by_default or isinstance(case, _Marked)
        else pytest.param(*case, marks=pytest.mark.sweep)
        for index, case in enumerate(cases)
    ]


_Marked = type(pytest.param())
