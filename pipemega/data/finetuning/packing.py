"""Cut examples to the length of a sample, and put several of them into one sample."""

from bisect import bisect_left, insort
from collections import defaultdict
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Truncation = Literal["truncate", "split", "drop"]


class Pieces(NamedTuple):
    """Parts of examples that fit into a sample.

    Args:
        bounds: int64 [pieces, 2], first token of each and the one after its last. A piece of n + 1
            tokens has n inputs and n labels.
        labels: number of labels of each piece that count.
        too_long: examples that did not fit.
        without_loss: pieces that were left out, because none of their labels counts.
    """

    bounds: Indices
    labels: Indices
    too_long: int
    without_loss: int


def cut(
    bounds: Indices, is_answer: npt.NDArray[np.bool_], seq_length: int, truncation: Truncation
) -> Pieces:
    """Return pieces of at most seq_length + 1 tokens, each of which has labels that count.

    Pieces of one example overlap by one token: it is the last label of the first piece and the
    first input of the second.

    Args:
        bounds: first token of each example and the one after its last. [examples, 2]
        is_answer: of each token of all examples.
        truncation: what to do with longer examples; see `data.truncation`.
    """
    starts, ends = bounds[:, 0], bounds[:, 1]
    inputs = ends - starts - 1
    is_long = inputs > seq_length
    if truncation == "drop":
        pieces = bounds[~is_long]
    elif truncation == "truncate":
        pieces = np.stack([starts, np.minimum(ends, starts + seq_length + 1)], axis=1)
    else:
        number = np.maximum(-(-inputs // seq_length), 1)
        first = np.repeat(starts, number)
        place = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
        first = first + place * seq_length
        last = np.minimum(first + seq_length + 1, np.repeat(ends, number))
        pieces = np.stack([first, last], axis=1)
    # Number of labels that count before each token; the first token of a piece is no label.
    before = np.concatenate([[0], np.cumsum(is_answer, dtype=np.int64)])
    labels = before[pieces[:, 1]] - before[np.minimum(pieces[:, 0] + 1, pieces[:, 1])]
    has_loss = labels > 0
    return Pieces(pieces[has_loss], labels[has_loss], int(is_long.sum()), int((~has_loss).sum()))


def pack(lengths: Indices, capacity: int) -> tuple[Indices, Indices]:
    """Put items into bins: the longest first, each into the fullest bin that has space.

    Args:
        lengths: of the items, each at most `capacity`.

    Returns:
        The items bin by bin, and where each bin starts and the last one ends. [items], [bins + 1]
    """
    bins: list[list[int]] = []
    with_space: dict[int, list[int]] = defaultdict(list)  # space -> bins
    spaces: list[int] = []  # sorted, those that bins have
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            chosen = with_space[space].pop()
            if not with_space[space]:
                del spaces[place]
            bins[chosen].append(item)
        else:
            space, chosen = capacity, len(bins)
            bins.append([item])
        left = space - length
        if left:
            if not with_space[left]:
                insort(spaces, left)
            with_space[left].append(chosen)
    items = np.array([item for each in bins for item in each], dtype=np.int64)
    return items, np.cumsum([0, *(len(each) for each in bins)], dtype=np.int64)
