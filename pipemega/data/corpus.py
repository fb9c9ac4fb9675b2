"""Where text comes from: files, JSON lines, folders, globs, and Python's own sources."""

import glob
import gzip
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pipemega.errors import DataError

PYTHON_STDLIB = "python-stdlib"
JSON_LINES = (".jsonl", ".ndjson", ".json")
# Tests and generated parts of the library, and what is not of the library at all.
STDLIB_LEFT_OUT = frozenset(
    ("test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages",
     "__pycache__")
)  # fmt: skip
STDLIB_SMALLEST_BYTES = 256
# Of files, and of what was packed into them.
_UNREADABLE = (OSError, EOFError, zlib.error)


@dataclass
class Skipped:
    """Documents that were left out, by reason."""

    empty: int = 0
    undecodable: int = 0

    def __str__(self) -> str:
        return f"{self.empty} empty and {self.undecodable} that are not UTF-8"


@dataclass(frozen=True)
class Corpus:
    """A list of files, each one document or one document per line.

    Attributes:
        files: in the order in which their documents come.
        name: for messages.
        identity: what the content depends on, JSON-able: names, sizes, times.
        json_key: where a JSON line holds its text.
        lenient: files that were found, and not named, may be no text; they are left out.
    """

    files: tuple[Path, ...]
    name: str
    identity: object
    json_key: str = "text"
    lenient: frozenset[Path] = field(default_factory=frozenset)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.files)

    def documents(self, skipped: Skipped) -> Iterator[tuple[str, int]]:
        """(text, bytes on disk read for it), document by document; counts what it leaves out.

        Raises:
            DataError: a file cannot be read, is no UTF-8, or holds a line that is no JSON object
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
        try:
            with open_bytes(path) as file:
                raw = file.read()
            yield raw.decode("utf-8"), path.stat().st_size
        except UnicodeDecodeError as error:
            if path not in self.lenient:
                raise DataError(
                    f"{path} is not UTF-8 text ({error.reason} at byte {error.start})"
                ) from error
            skipped.undecodable += 1
        except _UNREADABLE as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def _lines(self, path: Path) -> Iterator[tuple[str, int]]:
        try:
            with open_bytes(path) as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield self._text_of(line, f"{path}, line {number}"), len(line)
        except _UNREADABLE as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def _text_of(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{where} is a {type(record).__name__}, and must be a JSON object")
        if self.json_key not in record:
            raise DataError(
                f"{where} has no key {self.json_key!r}, but {', '.join(map(repr, record))}: "
                "name the one that holds the text with --json-key"
            )
        text = record[self.json_key]
        if not isinstance(text, str):
            raise DataError(f"{where} holds a {type(text).__name__} at {self.json_key!r}, no text")
        return text


def is_json_lines(path: Path) -> bool:
    """By its name; .gz may follow."""
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return name.suffix in JSON_LINES


def open_bytes(path: Path) -> IO[bytes]:
    """The file, or what was packed into it."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def find_corpus(inputs: str | Path | Sequence[str | Path], json_key: str = "text") -> Corpus:
    """The files that `inputs` name, in order, each once.

    Args:
        inputs: one or more of: "python-stdlib" (alone), a file, a glob, a folder (all files in
            it that are not hidden).
        json_key: where a JSON line holds its text.

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
            hint = f" (it must be the only input then: {PYTHON_STDLIB!r})" * (
                str(name) == PYTHON_STDLIB
            )
            raise DataError(f"the corpus {str(name)!r} is no file, folder or glob with files{hint}")
        if matches != [named]:
            found.update(matches)
        files.update(dict.fromkeys(matches))
    if not files:
        raise DataError("a corpus needs at least one file, folder or glob")
    identity = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files
    ]
    label = str(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    return Corpus(tuple(files), label, [identity, json_key], json_key, frozenset(found))


def _expand(named: Path) -> list[Path]:
    """A file, the files of a folder, or those of a glob, sorted."""
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
    """The running Python's own library: some 11 MB of real text that every machine has.

    A document is a file. Left out are tests, what is built for the machine, files that are hardly
    more than nothing, and the little that is not UTF-8.

    Raises:
        DataError: this Python came without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in STDLIB_LEFT_OUT and not name.startswith("config-")
        ]
        # _sysconfigdata and config-* say how and where this Python was built.
        found = (Path(folder) / name for name in names if not name.startswith("_sysconfigdata"))
        files += [path for path in found if path.suffix == ".py" and path.is_file()]
    files = sorted(path for path in files if path.stat().st_size >= STDLIB_SMALLEST_BYTES)
    if not files:
        raise DataError(
            f"this Python has no sources in {root}, so there is no {PYTHON_STDLIB!r} corpus: "
            "name text files with data.corpus"
        )
    python = f"{platform.python_implementation()} {platform.python_version()}"
    sizes = [("/".join(path.relative_to(root).parts), path.stat().st_size) for path in files]
    return Corpus(
        tuple(files), PYTHON_STDLIB, [PYTHON_STDLIB, python, sizes], lenient=frozenset(files)
    )
