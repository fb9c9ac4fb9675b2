"""Sharding of the vocabulary over the tensor ranks.

Vocabulary of 1000, divisible_by 128, 2 ranks: padded to 1024, 512 rows each

    rank 0   0 .. 511           [0, 512)
    rank 1   512 .. 999 + 24    [512, 1000), then 24 rows of padding
"""

import torch
from torch import Tensor

from pipemega.errors import DataError


def rows_per_rank(vocab_size: int, ranks: int, divisible_by: int) -> int:
    """Return the rows per rank with padding, a multiple of `divisible_by`."""
    return -(-vocab_size // (divisible_by * ranks)) * divisible_by


def local_range(vocab_size: int, rows: int, rank: int) -> tuple[int, int]:
    """Return [start, stop) of the ids of this rank; empty if it has only padding."""
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


def require_one_target_per_token(target: Tensor, tokens: int) -> None:
    """Check that the targets are those of all tokens: a part of them would stand for other tokens.

    Raises:
        DataError: their numbers differ; names both.
    """
    if target.numel() != tokens:
        raise DataError(
            f"the labels {list(target.shape)} are {target.numel()}, and the inputs have {tokens} "
            "tokens: give one label for each token, the id of the next one, or -100"
        )


def require_in_vocabulary(
    ids: Tensor, vocab_size: int, what: str, ignore_index: int | None = None
) -> None:
    """Check that all ids are in the vocabulary.

    On a GPU, this is an assertion on the device, as in torch's embedding: an error message would
    make the host wait for the device.

    Raises:
        DataError: an id is negative or not less than `vocab_size`; names both.
    """
    if ids.numel() == 0:
        return
    if ignore_index is not None:
        ids = ids.masked_fill(ids == ignore_index, 0)
    low, high = torch.aminmax(ids)
    if ids.device.type != "cpu":
        torch._assert_async(((low >= 0) & (high < vocab_size)), f"{what} outside the vocabulary")
        return
    wrong = int(low) if low < 0 else int(high)
    if not 0 <= wrong < vocab_size:
        raise DataError(
            f"{what} {wrong} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1}): "
            f"was the data made with another tokenizer, or is model.vocab_size too small?"
        )
