"""Sources of text: files, JSON lines, folders, globs, and the Python standard library.

The files that `prepare` writes, and the manifest that describes them.  Imports no numpy.
"""

import glob
import gzip
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from pipemega.errors import DataError

PYTHON_STDLIB = "python-stdlib"
JSON_LINES = (".jsonl", ".ndjson", ".json")
# Tests and generated parts of the library, and packages that are not part of it.
STDLIB_LEFT_OUT = frozenset(
    ("test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages",
     "__pycache__")
)  # fmt: skip
STDLIB_SMALLEST_BYTES = 256


@dataclass
class Skipped:
    """Number of skipped documents, by reason."""

    empty: int = 0
    undecodable: int = 0

    def __str__(self) -> str:
        return f"{self.empty} empty, {self.undecodable} not UTF-8"


@dataclass(frozen=True)
class Corpus:
    """A list of files, each one document or one document per line.

    Attributes:
        files: the files, in the order of their documents.
        name: name in messages.
        identity: names, sizes and times that identify the content; JSON-serialisable.
        num_bytes: size on disk.
        json_key: key of the text in a JSON line.
        lenient: files that were found in a folder or by a glob; skipped if they are not text.
    """

    files: tuple[Path, ...]
    name: str
    identity: object
    num_bytes: int
    json_key: str = "text"
    lenient: Container[Path] = ()

    def documents(self, skipped: Skipped) -> Iterator[tuple[str, int]]:
        """Yield (text, bytes read from disk) of each document; counts skipped ones.

        Raises:
            DataError: a file cannot be read, is not UTF-8, or has a line that is not a JSON object
                with the key; the message names file and line.
        """
        for path in self.files:
            texts = self._lines(path) if is_json_lines(path) else self._whole(path, skipped)
            for text, size in texts:
                if text.strip():
                    yield text, size
                else:
                    skipped.empty += 1

    def _whole(self, path: Path, skipped: Skipped) -> Iterator[tuple[str, int]]:
        with reading(path) as file:
            raw, size = file.read(), path.stat().st_size
        try:
            yield raw.decode("utf-8"), size
        except UnicodeDecodeError as error:
            if path not in self.lenient:
                raise DataError(
                    f"{path} is not UTF-8 text ({error.reason} at byte {error.start})"
                ) from error
            skipped.undecodable += 1

    def _lines(self, path: Path) -> Iterator[tuple[str, int]]:
        for record, where, size in json_lines(path):
            if self.json_key not in record:
                raise DataError(
                    f"{where} has no key {self.json_key!r}; its keys are "
                    f"{', '.join(map(repr, record))}: name the key of the text with --json-key"
                )
            text = record[self.json_key]
            if not isinstance(text, str):
                raise DataError(
                    f"{where}: {self.json_key!r} must be text, not {type(text).__name__}"
                )
            yield text, size


@contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, and decompress .gz.

    Raises:
        DataError: it cannot be read, also within the block.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            yield file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[Mapping[str, Any], str, int]]:
    """Yield the object of each line, file and line for messages, and the bytes of the line.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
    """
    with reading(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield as_object(parsed(line, where), where), where, len(line)


def parsed(text: bytes, where: str) -> Any:
    """Return the content of JSON.

    Raises:
        DataError: it is not JSON; `where` names it in the message.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def as_object(record: Any, where: str) -> Mapping[str, Any]:
    """Return `record`.

    Raises:
        DataError: it has no keys and values; `where` names it in the message.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where} is a {type(record).__name__}, but must be a JSON object")
    return record


def is_json_lines(path: Path) -> bool:
    """Return whether the file has an extension of JSON lines; .gz may follow."""
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return name.suffix in JSON_LINES


def find_corpus(inputs: str | Path | Sequence[str | Path], json_key: str = "text") -> Corpus:
    """Return the files that `inputs` name, in order, each once.

    Args:
        inputs: "python-stdlib", or one or more of: a file, a glob, a folder (all its files that
            are not hidden).
        json_key: key of the text in a JSON line.

    Raises:
        DataError: an input names no file.
    """
    names = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    if [str(name) for name in names] == [PYTHON_STDLIB]:
        return python_stdlib()
    files: dict[Path, None] = {}
    found: set[Path] = set()
    for name in names:
        named = Path(name).expanduser()
        matches = _expand(named)
        if not matches:
            hint = " (it must be the only input)" if str(name) == PYTHON_STDLIB else ""
            raise DataError(f"no file, folder or glob matches the corpus {str(name)!r}{hint}")
        if matches != [named]:
            found.update(matches)
        files.update(dict.fromkeys(matches))
    if not files:
        raise DataError("a corpus needs at least one file, folder or glob")
    identity = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files
    ]
    label = str(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    total = sum(size for _, size, _ in identity)
    return Corpus(tuple(files), label, [identity, json_key], total, json_key, frozenset(found))


def _expand(named: Path) -> list[Path]:
    """Return a file, the files of a folder, or the files of a glob, sorted."""
    if named.is_file():
        return [named]
    if named.is_dir():
        return _files_in(named)
    matches: dict[Path, None] = {}
    for match in sorted(glob.glob(str(named), recursive=True)):
        path = Path(match)
        matches.update(dict.fromkeys([path] if path.is_file() else _files_in(path)))
    return list(matches)


def _files_in(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def python_stdlib() -> Corpus:
    """Return the sources of the running Python's library: about 11 MB of text on every machine.

    A document is a file. Tests, machine-specific files, very small files and files that are not
    UTF-8 are left out.

    Raises:
        DataError: this Python has no sources.
    """
    return _stdlib_sources(sysconfig.get_paths()["stdlib"])


def _is_source(name: str) -> bool:
    return len(name) > 3 and name.endswith(".py") and not name.startswith("_sysconfigdata")


@lru_cache(maxsize=1)
def _stdlib_sources(root: str) -> Corpus:
    # Strings, and sorted by their parts: 2,000 paths as Path objects take 40 ms.
    found: list[tuple[tuple[str, ...], int]] = []
    for folder, folders, names in os.walk(root):
        # _sysconfigdata and config-* depend on the build of this Python.
        folders[:] = [
            name for name in folders
            if name not in STDLIB_LEFT_OUT and not name.startswith("config-")
        ]  # fmt: skip
        parents = folder.removeprefix(root).split(os.sep)[1:]
        for name in filter(_is_source, names):
            path = os.path.join(folder, name)
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            found += [((*parents, name), size)] if size >= STDLIB_SMALLEST_BYTES else []
    found.sort()
    files = tuple(Path(root, *parts) for parts, _ in found)
    if not files:
        raise DataError(
            f"this Python has no sources in {root}, so there is no corpus {PYTHON_STDLIB!r}: "
            "name text files with data.corpus"
        )
    python = f"{platform.python_implementation()} {platform.python_version()}"
    sizes = [("/".join(parts), size) for parts, size in found]
    total = sum(size for _, size in found)
    return Corpus(files, PYTHON_STDLIB, [PYTHON_STDLIB, python, sizes], total, lenient=files)


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
