"""Tokenizers of the `tokenizers` package: tokenizer.json, vocab.json with merges.txt, trained."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pipemega.data.tokenizer import EOD, Tokenizer
from pipemega.errors import ConfigError, DataError
from pipemega.startup.deferred_import import deferred

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = deferred("numpy")

# Every byte, and the end of a document.
SMALLEST_VOCABULARY = 257


class FastTokenizer(Tokenizer):
    """A thin wrapper of a tokenizer of the `tokenizers` package.

    Args:
        end_of_sequence: token that ends a document; None: "<|endoftext|>".
    """

    def __init__(self, inner: tokenizers.Tokenizer, end_of_sequence: str | None = None) -> None:
        self._inner = inner
        # "<|endoftext|>" inside of a text is text, not the end of a document.
        inner.encode_special_tokens = True
        # transformers stores the settings of its last call in tokenizer.json.
        inner.no_truncation()
        inner.no_padding()
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod = None
        if end_of_sequence is not None:
            self.eod = inner.token_to_id(end_of_sequence)
        if self.eod is None:
            self.eod = inner.token_to_id(EOD)

    @classmethod
    def of_json(cls, text: str, path: Path) -> "FastTokenizer":
        """Load a tokenizer from the content of the tokenizer.json at `path`.

        Raises:
            DataError: it is not a tokenizer.json.
        """
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package raises Exception, or panics
            raise DataError(
                f"{path} is not a tokenizer.json of the tokenizers package: {error}"
            ) from error
        is_own = path.name == "tokenizer.json"
        return cls(inner, end_of_sequence_of(path.parent) if is_own else None)

    @classmethod
    def of_merges(cls, vocabulary: Path, merges: Path) -> "FastTokenizer":
        """Load GPT-2's byte-level BPE.

        Raises:
            DataError: the files are not a vocabulary and its merges.
        """
        try:
            model = models.BPE.from_file(str(vocabulary), str(merges))
        except Exception as error:  # the package raises Exception
            raise DataError(
                f"{vocabulary} and {merges} are not the vocabulary and the merges of a BPE: {error}"
            ) from error
        inner = _byte_level(model)
        if inner.token_to_id(EOD) is not None:
            inner.add_special_tokens([EOD])
        return cls(inner, end_of_sequence_of(vocabulary.parent))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "FastTokenizer":
        """Train a byte-level BPE with `vocab_size` tokens, or fewer if the text yields fewer.

        The same texts in the same order give the same tokenizer.

        Raises:
            ConfigError: `vocab_size` is smaller than the number of bytes and special tokens.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.vocab_size is {vocab_size}, but a byte-level vocabulary needs at least "
                f"{SMALLEST_VOCABULARY}: every byte and the end of a document"
            )
        inner = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOD],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def to_json(self) -> str:
        return str(self._inner.to_str())

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_example(self, text: str) -> list[int]:
        return list(self._with_special_tokens.encode(text).ids)

    def encode_batch(self, texts: Sequence[str]) -> "Iterator[npt.NDArray[np.int64]]":
        """Yield the ids of each text; the package encodes in parallel threads."""
        for encoding in _batch_encoder(self._inner)(list(texts), add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.int64)

    def encode_examples(self, texts: Sequence[str]) -> list[list[int]]:
        encode = _batch_encoder(self._with_special_tokens)
        return [list(encoding.ids) for encoding in encode(list(texts))]

    def id_of(self, token: str) -> int | None:
        found: int | None = self._inner.token_to_id(token)
        return found

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))

    @cached_property
    def _with_special_tokens(self) -> tokenizers.Tokenizer:
        inner = copy.deepcopy(self._inner)
        inner.encode_special_tokens = False
        return inner


def _batch_encoder(inner: tokenizers.Tokenizer) -> Callable[..., Any]:
    # Newer versions have a faster variant that omits the offsets.
    encode: Callable[..., Any] = getattr(inner, "encode_batch_fast", inner.encode_batch)
    return encode


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def end_of_sequence_of(folder: Path) -> str | None:
    """Return the end-of-sequence token of a folder of transformers; None if it names none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            token = content["eos_token"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None
