"""Suggest the known name that a misspelled one probably means."""

from collections.abc import Iterable

# In characters.
_LONGEST_LIST = 160
_MOST_SIMILAR = 5


def edit_distance(a: str, b: str, limit: int | None = None) -> int:
    """Return the edit distance: insert, delete or replace a character, or swap two neighbours.

    Args:
        limit: if the distance is above this, return any number above it (stops early).

    Source: optimal string alignment, Damerau 1964 and Wagner & Fischer 1974.
    """
    limit = len(a) + len(b) if limit is None else limit
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
        # A swap uses the row before the previous one.
        if min(last) > limit and min(before) > limit:
            return limit + 1
    return last[-1]


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known names at the smallest edit distance, in order; [] if none is close."""
    names, word = list(known), word.lower()
    for limit in range(max(1, len(word) // 3) + 1):
        close = [name for name in names if abs(len(name) - len(word)) <= limit]
        if found := [name for name in close if edit_distance(word, name.lower(), limit) <= limit]:
            return found
    return []


def suggestion(names: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the given names."""
    return f"; did you mean {' or '.join(map(repr, names))}?"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the nearest known names, or all of them.

    Of many names, only those that share a part with the word are listed.
    """
    names = list(dict.fromkeys(known))
    if near := nearest(word, names):
        return suggestion(near)
    if not names:
        return "; no names are known here"
    if len(all_names := ", ".join(names)) <= _LONGEST_LIST:
        return f"; known: {all_names}"
    parts = set(word.lower().split("_"))
    similar = [name for name in names if parts & set(name.lower().split("_"))][:_MOST_SIMILAR]
    return f"; similar: {', '.join(similar)}" if similar else ""
