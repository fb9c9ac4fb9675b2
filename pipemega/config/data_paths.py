"""The keys that name token files: one prefix, several, or a blend in one of Megatron's forms."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# A key's value: text, or a list of prefixes and weights.
DataPaths = str | tuple[str | float, ...]

# "NAME: WEIGHT START:END PREFIX, ...", the form of BigScience's Megatron-DeepSpeed.
_GROUP = re.compile(r"\s*(?:[^\s:,]+\s*:\s+)?([^\s,]+\s+[\d.]+:[\d.]+\s+\S.*)", re.DOTALL)


class TokenFiles(NamedTuple):
    """One pair of token files of a blend.

    Args:
        weight: its share of the samples; None: by its number of samples.
        prefix: common prefix of `.bin` and `.idx`.
        documents: start and end of the part that is read, as shares of its sequences; None: the
            part that `data.split` gives.
    """

    weight: float | None
    prefix: str
    documents: tuple[float, float] | None = None


def parse_data_paths(key: str, given: DataPaths) -> tuple[TokenFiles, ...]:
    """Convert the value of a key to the files that it names.

    "A", "0.3 A 0.7 B", "A B", ["A", "B"], [0.3, "A", 0.7, "B"], ["0.3", "A", "0.7", "B"] and
    "NAME: 0.3 0:0.9 A, 0.7 0:1 B". Text with spaces is one prefix, unless its words are weights
    and prefixes, or prefixes of files that exist.

    Args:
        key: the name of the key, for messages.

    Raises:
        ValueError: it has none of these forms, or a weight is not a positive number.
    """
    parts = (given,) if isinstance(given, str) else given
    groups = [match[1] for part in parts if isinstance(part, str) and (match := _group(part))]
    if groups:
        if len(parts) > 1:
            raise ValueError(
                f"{key} has {len(parts)} groups of token files, and a split is one group: keep "
                f"one; 'pipemega evaluate --data' evaluates on further files"
            )
        files = tuple(_ranges(key, groups[0]))
    else:
        files = _pairs(key, _words(parts[0]) if len(parts) == 1 else list(parts), given)
    _check_weights(key, [part.weight for part in files if part.weight is not None])
    return files


def _group(text: str) -> re.Match[str] | None:
    return _GROUP.fullmatch(text)


def _ranges(key: str, group: str) -> Iterator[TokenFiles]:
    for part in group.split(","):
        try:
            weight, documents, prefix = part.split()
            start, end = map(float, documents.split(":"))
            found = TokenFiles(float(weight), prefix, (start, end))
        except ValueError:
            found = None
        if found is None or not 0 <= start < end <= 1:
            raise ValueError(
                f"{key}: {part.strip()!r} must be WEIGHT START:END PREFIX with 0 <= START < END "
                "<= 1, such as '0.3 0:0.9 data/wiki'; the parts are separated by commas"
            )
        yield found


def _words(text: str | float) -> list[str | float]:
    if not isinstance(text, str):
        return [text]
    words: list[str | float] = [*text.split()]
    is_weighted = len(words) % 2 == 0 and all(_number(word) is not None for word in words[::2])
    # A prefix may contain spaces.
    several = is_weighted or (len(words) > 1 and all(_exists(str(word)) for word in words))
    return words if several else [text.strip()]


def _pairs(key: str, words: Sequence[str | float], given: DataPaths) -> tuple[TokenFiles, ...]:
    words = [word.strip() if isinstance(word, str) else word for word in words]
    weights = [_number(word) for word in words[::2]]
    prefixes = [str(word) for word in words[1::2] if isinstance(word, str)]
    if len(words) == 2 * len(prefixes) and None not in weights and words:
        return tuple(map(TokenFiles, weights, prefixes))
    is_text = all(isinstance(word, str) and word for word in words)
    # Megatron too decides by the words at the places of weights.
    if not words or not is_text or (len(words) % 2 == 0 and any(w is not None for w in weights)):
        shown = given if isinstance(given, str) else list(given)
        raise ValueError(
            f"{key} must be a prefix, a list of prefixes, or a list of weight, prefix, weight, "
            f"prefix, ... (or such words in one text), not {shown!r}"
        )
    return tuple(TokenFiles(None, str(word)) for word in words)


def _check_weights(key: str, weights: Sequence[float]) -> None:
    # nan and inf fail this comparison.
    if not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(
            f"the weights in {key} {list(weights)} must be positive numbers; remove a prefix that "
            "should not be read"
        )


def _number(word: str | float) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _exists(prefix: str) -> bool:
    return Path(re.sub(r"\.(bin|idx)$", "", prefix) + ".idx").expanduser().is_file()
