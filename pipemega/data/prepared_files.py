"""The files that `prepare` writes, and the manifest that describes them.  Imports no numpy."""

import json
from dataclasses import dataclass
from pathlib import Path

from pipemega.errors import DataError


def prefix_of(path: str | Path) -> Path:
    """Return the prefix of a pair of files; `path` may also name one of the two files."""
    path = Path(path).expanduser()
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def files_of(prefix: Path) -> tuple[Path, Path]:
    """Return (PREFIX.bin, PREFIX.idx)."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


@dataclass(frozen=True)
class Prepared:
    """The manifest of prepared files: their source and their content.

    Attributes:
        made_of: digest of corpus, tokenizer and settings.
        corpus: name of the corpus.
        vocab_size: vocabulary size of the tokenizer.
        eod: end-of-document id, or None.
        append_eod: whether each document ends with it.
        documents, tokens: their numbers.
        dtype: dtype of the tokens.
        tokenizer_digest: digest of PREFIX.tokenizer.json.
    """

    made_of: str
    corpus: str
    vocab_size: int
    eod: int | None
    append_eod: bool
    documents: int
    tokens: int
    dtype: str
    tokenizer_digest: str

    def describe(self) -> str:
        """Return a one-line description."""
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens ({self.dtype}), "
            f"vocabulary {self.vocab_size:,}"
        )


def manifest_of(prefix: Path) -> Path:
    """Return the path of the manifest of `prefix`."""
    return prefix.with_name(prefix.name + ".manifest.json")


def tokenizer_of(prefix: Path) -> Path:
    """Return the path of the tokenizer of `prefix`."""
    return prefix.with_name(prefix.name + ".tokenizer.json")


def read_manifest(prefix: str | Path) -> Prepared | None:
    """Return the manifest of `prefix`; None if it does not exist, as for files by Megatron.

    Raises:
        DataError: the manifest is damaged.
    """
    path = manifest_of(prefix_of(prefix))
    try:
        return Prepared(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it and prepare again") from error
