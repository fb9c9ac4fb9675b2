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
        name: a tokenizer.json; GPT-2's vocab.json or merges.txt, with the other one beside it
            (gpt2-vocab.json and gpt2-merges.txt too), or both, separated by a comma; a
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
    files = tokenizer_paths(name)
    path = tokenizer_file(files[0]) if len(files) == 1 else files[0]
    vocabulary, merges = files if len(files) == 2 else _vocabulary_and_merges(path)
    missing = [file for file in (vocabulary, merges) if file and not file.is_file()]
    if missing and (len(files) == 2 or _is_half_of_a_bpe(path)):
        raise DataError(
            f"{missing[0]} does not exist: a BPE needs vocab.json and merges.txt in one folder, or "
            "both names, as VOCAB.json,MERGES.txt"
        )
    if vocabulary and merges and not missing:
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
    if text.lstrip().startswith("[") and '"token_bytes"' in text[:1000]:
        raise DataError(
            f"{path} is a vocabulary of Megatron-LM's TikTokenizer, which is not supported. Token "
            "files need no tokenizer: remove data.tokenizer, set model.vocab_size (131072 unless "
            "the job said otherwise) and data.eod_id (2, the id of '</s>')"
        )
    own = _own_content(text)
    try:
        if own.get("type") == sentencepiece_tokenizer.KIND:
            return SentencePieceTokenizer.of_json(own, path)
        if own.get("type") == tiktoken_tokenizer.KIND:
            return TiktokenTokenizer.of_json(own)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return FastTokenizer.of_json(text, path)


def tokenizer_paths(name: str) -> tuple[Path, ...]:
    """Return the file or folder of `load_tokenizer`'s name, or the two files of a BPE."""
    path = Path(name).expanduser()
    names = name.split(",")
    if len(names) != 2 or path.exists():
        return (path,)
    return Path(names[0].strip()).expanduser(), Path(names[1].strip()).expanduser()


def _vocabulary_and_merges(path: Path) -> tuple[Path, Path] | tuple[None, None]:
    """Return the two files of a BPE, one of which is `path`, by their names."""
    if path.suffix == ".json" and "vocab" in path.name:
        return path, path.with_name(path.stem.replace("vocab", "merges") + ".txt")
    if path.suffix == ".txt" and "merges" in path.name:
        return path.with_name(path.stem.replace("merges", "vocab") + ".json"), path
    return None, None


def _is_half_of_a_bpe(path: Path) -> bool:
    """Return whether a file with the name of a vocabulary or merges is one, not a tokenizer."""
    if path.suffix == ".txt":
        return True
    try:
        ids = json.loads(path.read_bytes()).values()
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return all(isinstance(token_id, int) for token_id in ids)


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
