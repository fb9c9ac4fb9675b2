"""Tokenizers of SentencePiece: a `.model` file."""

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemega.data.tokenizer import EOD, Tokenizer
from pipemega.errors import ConfigError, DataError
from pipemega.startup.deferred_import import deferred

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = deferred("numpy")

KIND = "sentencepiece"


class SentencePieceTokenizer(Tokenizer):
    """A thin wrapper of SentencePiece. The end of a document is the model's end of a sequence.

    Args:
        model: content of the `.model` file.
        path: of the file, for messages.

    Raises:
        ConfigError: the package is not installed.
        DataError: `model` is not a SentencePiece model.
    """

    def __init__(self, model: bytes, path: Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ConfigError(
                f"the tokenizer {path} needs SentencePiece: pip install sentencepiece"
            ) from error
        try:
            self._inner: Any = SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"{path} is not a SentencePiece model; if it is a list of tokens of tiktoken (as "
                "Llama 3's tokenizer.model), name the folder with its tokenizer.json instead"
            ) from error
        self._model = model
        self.vocab_size = int(self._inner.get_piece_size())
        end = int(self._inner.eos_id())
        self.eod = end if end >= 0 else self.id_of(EOD)

    @classmethod
    def of_json(cls, content: dict[str, Any], path: Path) -> "SentencePieceTokenizer":
        """Load what `to_json` returned."""
        return cls(base64.b64decode(content["model"]), path)

    def to_json(self) -> str:
        model = base64.b64encode(self._model).decode("ascii")
        return json.dumps({"type": KIND, "model": model})

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._inner.encode(text)]

    def encode_example(self, text: str) -> list[int]:
        # A .model does not say whether its model expects the token that begins a sequence.
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> "Iterator[npt.NDArray[np.int64]]":
        for ids in self._inner.encode(list(texts)):
            yield np.array(ids, dtype=np.int64)

    def id_of(self, token: str) -> int | None:
        found = int(self._inner.piece_to_id(token))
        return found if self._inner.id_to_piece(found) == token else None

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode([int(i) for i in ids]))
