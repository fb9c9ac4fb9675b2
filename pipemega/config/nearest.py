"""Which known name a misspelt one was meant to be.  Floor 1."""

from collections.abc import Iterable


def distance(a: str, b: str, limit: int | None = None) -> int:
    """Edits from `a` to `b`: one character put in, left out or changed, or two neighbours swapped.

    Args:
        limit: where it does not matter how much farther; anything above it may come back then.

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
        # A swap reaches back over two rows.
        if min(last) > limit and min(before) > limit:
            return limit + 1
    return last[-1]


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known names at the smallest distance, in their order; none if all are far away."""
    names, word = list(known), word.lower()
    for limit in range(max(1, len(word) // 3) + 1):
        close = [name for name in names if abs(len(name) - len(word)) <= limit]
        if found := [name for name in close if distance(word, name.lower(), limit) <= limit]:
            return found
    return []


def one_of(names: Iterable[str]) -> str:
    return f"; did you mean {' or '.join(map(repr, names))}?"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest, or all there are."""
    names = list(dict.fromkeys(known))
    if near := nearest(word, names):
        return one_of(near)
    return f"; known here: {', '.join(names)}" if names else "; nothing is known here"
