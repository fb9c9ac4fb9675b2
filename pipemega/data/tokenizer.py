"""Byte-level BPE, loaded from a tokenizer.json or trained on a corpus."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipemega.errors import ConfigError, DataError

EOD = "<|endoftext|>"
# Every byte, and the end of a document.
SMALLEST_VOCABULARY = 257


class TextTokenizer:
    """Text to token ids and back: a thin wrapper of the `tokenizers` package.

    Attributes:
        vocab_size: one more than the largest id.
        eod: id of "<|endoftext|>"; None if the tokenizer has no such token.
    """

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        # "<|endoftext|>" inside of a text is text, not the end of a document.
        inner.encode_special_tokens = True
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod: int | None = inner.token_to_id(EOD)

    @classmethod
    def load(cls, path: str | Path) -> "TextTokenizer":
        """Load a tokenizer.json.

        Raises:
            DataError: the file does not exist, or is not a tokenizer.json.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise DataError(f"the tokenizer {path} does not exist")
        try:
            return cls(Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package raises Exception, or panics
            raise DataError(
                f"{path} is not a tokenizer.json of the tokenizers package: {error}"
            ) from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "TextTokenizer":
        """Train a tokenizer with `vocab_size` tokens, or fewer if the text yields fewer.

        The same texts in the same order give the same tokenizer.

        Raises:
            ConfigError: `vocab_size` is smaller than the number of bytes and special tokens.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.vocab_size is {vocab_size}, but a byte-level vocabulary needs at least "
                f"{SMALLEST_VOCABULARY}: every byte and the end of a document"
            )
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOD],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def to_json(self) -> str:
        """Return the text of its tokenizer.json."""
        return str(self._inner.to_str())

    def digest(self) -> str:
        """Return a digest of the tokenizer, independent of its path."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end-of-document id."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the ids of each text; the package encodes in parallel threads."""
        # Newer versions have a faster variant that omits the offsets.
        encode = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
        for encoding in encode(list(texts), add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))
