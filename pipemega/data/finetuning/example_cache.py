"""Examples as arrays on disk, which one process builds and all ranks map into memory."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from pipemega.data.file_cache import Say, cached_arrays, digest_of
from pipemega.data.finetuning.example_format import Example, ExampleFormat
from pipemega.data.finetuning.record_files import Record, Records
from pipemega.errors import DataError

# Increase it to invalidate files of older versions.
_VERSION = 1
_RECORDS_AT_ONCE = 512


class Examples(NamedTuple):
    """All examples of a source, one after the other.

    Args:
        tokens: int32 [tokens].
        is_answer: bool [tokens]: the loss counts the token as a label.
        offsets: int64 [examples + 1], start of each example.
        counts: int64 [2], records and records without an answer.
    """

    tokens: npt.NDArray[np.int32]
    is_answer: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


class CachedExamples(NamedTuple):
    """Examples, and the digest of what they were made of."""

    examples: Examples
    digest: str


def cached_examples(
    records: Records, form: ExampleFormat, folder: Path, *, say: Say | None, progress: bool
) -> CachedExamples:
    """Return the examples of `records`; one process per file system tokenizes them.

    Args:
        folder: of the arrays.
        say, progress: called with progress lines; whether to show a bar.

    Raises:
        DataError: a record is not valid, or no record has an answer.
    """
    description = {
        "version": _VERSION, "records": records.identity, "example": dict(form.identity)
    }  # fmt: skip

    def build() -> dict[str, npt.NDArray[np.generic]]:
        return dict(_build(records, form, progress)._asdict())

    arrays = cached_arrays(
        folder,
        "examples",
        description,
        Examples._fields,
        build,
        what=f"the examples of {records.name}",
        say=say,
    )
    return CachedExamples(Examples(**arrays), digest_of(description))  # type: ignore[arg-type]


def _build(records: Records, form: ExampleFormat, progress: bool) -> Examples:
    found: list[Example] = []
    number = 0
    bar = tqdm(
        total=records.total, unit="B", unit_scale=True, desc="tokenizing", disable=not progress,
        file=sys.stderr,
    )  # fmt: skip
    with bar:
        for group in _groups(iter(records)):
            found += [example for example in form.examples(group) if example is not None]
            number += len(group)
            bar.update(sum(record.size for record in group))
    if not found:
        raise DataError(
            f"none of the {number} records of {records.name} has an answer to learn from"
            if number
            else f"{records.name} has no records"
        )
    lengths = [len(example.tokens) for example in found]
    return Examples(
        np.concatenate([example.tokens for example in found]),
        np.concatenate([example.is_answer for example in found]),
        np.cumsum([0, *lengths], dtype=np.int64),
        np.array([number, number - len(found)], dtype=np.int64),
    )


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    while group := list(islice(records, _RECORDS_AT_ONCE)):
        yield group
