"""Load the tokenizer that `data.tokenizer` names."""

import json
from pathlib import Path
from typing import Any

from pipemega.data import sentencepiece_tokenizer, tiktoken_tokenizer
from pipemega.data.fast_tokenizer import FastTokenizer
from pipemega.data.sentencepiece_tokenizer import SentencePieceTokenizer
from pipemega.data.tiktoken_tokenizer import TiktokenTokenizer
from pipemega.data.tokenizer import Tokenizer
from pipemega.errors import DataError

# In a folder, the first of these that exists is the tokenizer.
_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model")


def load_tokenizer(name: str | Path, eod: int | str | None = None) -> Tokenizer:
    """Load a tokenizer from files of this machine.

    Args:
        name: a tokenizer.json; GPT-2's vocab.json or merges.txt, with the other one beside it; a
            `.model` of SentencePiece; a folder with one of these, as transformers writes it; or
            "tiktoken:NAME".
        eod: id or text of the token that ends a document; None: the end-of-sequence
            token that the files name, otherwise "<|endoftext|>".

    Raises:
        DataError: no file exists, a file is damaged, or `eod` is not in the vocabulary.
        ConfigError: the package of the format is not installed.
    """
    tokenizer = _load(str(name))
    if eod is not None:
        tokenizer.set_eod(eod)
    return tokenizer


def _load(name: str) -> Tokenizer:
    if name.startswith(tiktoken_tokenizer.PREFIX):
        return TiktokenTokenizer.named(name.removeprefix(tiktoken_tokenizer.PREFIX))
    path = tokenizer_file(Path(name).expanduser())
    if path.name in ("vocab.json", "merges.txt"):
        vocabulary, merges = path.with_name("vocab.json"), path.with_name("merges.txt")
        missing = next((file for file in (vocabulary, merges) if not file.is_file()), None)
        if missing is not None:
            raise DataError(
                f"{missing} does not exist: a BPE needs vocab.json and merges.txt in one folder"
            )
        return FastTokenizer.of_merges(vocabulary, merges)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the tokenizer {path} cannot be read: {error.strerror}") from error
    if path.suffix == ".model":
        return SentencePieceTokenizer(content, path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error
    own = _own_content(text)
    try:
        if own.get("type") == sentencepiece_tokenizer.KIND:
            return SentencePieceTokenizer.of_json(own, path)
        if own.get("type") == tiktoken_tokenizer.KIND:
            return TiktokenTokenizer.of_json(own)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return FastTokenizer.of_json(text, path)


def _own_content(text: str) -> dict[str, Any]:
    """Return the content of a file by `Tokenizer.to_json` of the other packages, else {}."""
    if not text.startswith('{"type"'):
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer's file that `path` names: itself, or one in the folder `path`.

    Raises:
        DataError: it does not exist; the message names the files that were looked for.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"the tokenizer {path} does not exist")
    for name in _FILES:
        if (path / name).is_file():
            return path / name
    found = sorted(file.name for file in path.iterdir())
    shown = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
    raise DataError(
        f"the folder {path} has no tokenizer: it has none of {', '.join(_FILES)}"
        + (f", but {shown}" if shown else "")
    )
