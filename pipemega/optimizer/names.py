"""What a message says about a name that is not known."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known name, or all of them."""
    names = sorted(known)
    near = get_close_matches(word, names, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(names)}"
