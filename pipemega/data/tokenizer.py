"""Byte-level BPE, loaded from a tokenizer.json or trained on a corpus."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipemega.data.caching import atomic_path
from pipemega.errors import ConfigError, DataError

EOD = "<|endoftext|>"
# Every byte, and the end of a document.
SMALLEST_VOCABULARY = 257


class TextTokenizer:
    """Text to token ids and back; a thin hold on the `tokenizers` package.

    Attributes:
        vocab_size: one more than the largest id.
        eod: the id of "<|endoftext|>", or None when the tokenizer has no such token.
    """

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        # A source file that speaks of "<|endoftext|>" holds text, and no end of a document.
        inner.encode_special_tokens = True
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod: int | None = inner.token_to_id(EOD)

    @classmethod
    def load(cls, path: str | Path) -> "TextTokenizer":
        """From a tokenizer.json.

        Raises:
            DataError: the file is missing, or is none.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise DataError(f"the tokenizer {path} does not exist")
        try:
            return cls(Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package raises Exception itself, or panics
            raise DataError(
                f"{path} is no tokenizer.json of the tokenizers package: {error}"
            ) from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "TextTokenizer":
        """A new one with `vocab_size` tokens, or fewer when the text yields no more.

        The same texts in the same order give the same tokenizer.

        Raises:
            ConfigError: the vocabulary could not even hold all bytes.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.vocab_size is {vocab_size}, and a byte-level vocabulary takes at least "
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

    def save(self, path: Path) -> None:
        """Write a tokenizer.json, whole or not at all."""
        with atomic_path(path) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """The text of its tokenizer.json."""
        return str(self._inner.to_str())

    def encode(self, text: str) -> list[int]:
        """Text -> ids, without an end of document."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.int64]]:
        """Texts -> their ids, one array each; in parallel threads of the package."""
        # Newer versions have a variant without the offsets that nobody reads here.
        encode = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
        for encoding in encode(list(texts), add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; the end of a document is shown."""
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))
