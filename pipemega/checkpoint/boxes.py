"""A flat range of a tensor, as the boxes that it consists of."""

from collections.abc import Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins and how large it is, along each dim."""


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a row-major tensor, in order: at most 2 * dims - 1 boxes.

    shape [4, 5], elements 3 to 17          . . . a a
                                            b b b b b
    a: at (0, 3), size [1, 2]               b b b b b
    b: at (1, 0), size [2, 5]               c c c . .
    c: at (3, 0), size [1, 3]
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    rest = tuple(shape[1:])
    row = prod(rest)

    def within(number: int, low: int, high: int) -> list[Box]:
        """A part of one row."""
        return [((number, *at), (1, *size)) for at, size in boxes(rest, low, high)]

    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return within(first, start - first * row, stop - first * row)
    begin, end = -(-start // row), stop // row
    found = within(first, start - first * row, row) if first < begin else []
    if begin < end:
        found.append(((begin, *(0 for _ in rest)), (end - begin, *rest)))
    return found + (within(last, 0, stop - end * row) if last == end else [])
