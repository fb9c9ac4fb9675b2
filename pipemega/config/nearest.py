"""Which known name a misspelt one was meant to be.  Floor 1."""

from collections.abc import Iterable


def distance(a: str, b: str) -> int:
    """Edits from `a` to `b`: one character put in, left out or changed, or two neighbours swapped.

    Source: optimal string alignment, Damerau 1964 and Wagner & Fischer 1974.
    """
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
    return last[-1]


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known names at the smallest distance, in their order; none if all are far away."""
    limit = max(1, len(word) // 3)
    found: dict[int, list[str]] = {}
    for name in known:
        if abs(len(name) - len(word)) <= limit:
            steps = distance(word.lower(), name.lower())
            found.setdefault(steps, []).append(name)
            limit = min(limit, steps)
    return found.get(limit, [])


def one_of(names: Iterable[str]) -> str:
    return f"; did you mean {' or '.join(map(repr, names))}?"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest, or all there are."""
    names = list(dict.fromkeys(known))
    if near := nearest(word, names):
        return one_of(near)
    return f"; known here: {', '.join(names)}" if names else "; nothing is known here"
