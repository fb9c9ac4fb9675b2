"""Text to token ids and back, with any tokenizer."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pipemega.errors import DataError
from pipemega.lazy_imports import deferred

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = deferred("numpy")

EOD = "<|endoftext|>"

# Of a key that needs it.
UNKNOWN_EOD = (
    "data.{key} needs the end-of-document id, but no tokenizer defines one: set data.tokenizer, or "
    "data.eod_id to the id"
)


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: one more than the largest id.
        eod: id of the token that ends a document; None if there is none.
    """

    vocab_size: int
    eod: int | None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text; the text of a special token has no special meaning."""

    @abstractmethod
    def encode_example(self, text: str) -> list[int]:
        """Return the ids of text that is a whole example, as the model's own tokenizer does.

        Special tokens in the text are recognised, and those that the tokenizer itself adds (such as
        the one that begins a sequence) are added.
        """

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if it is not in the vocabulary."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special tokens included."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the text of a file from which `load_tokenizer` loads the tokenizer."""

    def encode_examples(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as `encode_example`."""
        return [self.encode_example(text) for text in texts]

    def encode_batch(self, texts: Sequence[str]) -> "Iterator[npt.NDArray[np.int64]]":
        """Yield the ids of each text, as `encode`."""
        for text in texts:
            yield np.array(self.encode(text), dtype=np.int64)

    def digest(self) -> str:
        """Return a digest of the tokenizer, independent of its path."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def set_eod(self, eod: int | str) -> None:
        """Set the token that ends a document: its id or its text.

        Raises:
            DataError: it is not in the vocabulary.
        """
        found = self.id_of(eod) if isinstance(eod, str) else eod
        if found is None or not 0 <= found < self.vocab_size:
            raise DataError(
                f"data.eod_id is {eod!r}, which is not in the vocabulary of the tokenizer: its ids "
                f"are 0 to {self.vocab_size - 1}"
            )
        self.eod = found
