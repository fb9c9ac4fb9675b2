"""Records of fine-tuning data: from JSON lines, parquet files and objects of Python."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipemega.config.sections.data_section import DataSection
from pipemega.data.tokens.corpus import as_object, is_json_lines, json_lines, parsed, reading
from pipemega.data.tokens.data_files import DataInput
from pipemega.errors import ConfigError, DataError

PARQUET = ".parquet"


class Record(NamedTuple):
    """One record.

    Args:
        content: its keys and values.
        where: its file and line (or row), for messages.
        size: share of `Records.total`, for a progress bar.
    """

    content: Mapping[str, Any]
    where: str
    size: float


class Records(Protocol):
    """A source of records: its name in messages, what identifies its content (JSON-serialisable),
    and the sum of the sizes of all records.
    """

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> object: ...

    @property
    def total(self) -> float: ...

    def __iter__(self) -> Iterator[Record]: ...


@dataclass(frozen=True)
class RecordFiles:
    """Files of records, in order."""

    name: str
    files: tuple[Path, ...]

    @property
    def identity(self) -> object:
        stats = [(path, path.stat()) for path in self.files]
        return [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats]

    @property
    def total(self) -> float:
        return sum(path.stat().st_size for path in self.files)

    def __iter__(self) -> Iterator[Record]:
        for path in self.files:
            yield from _parquet(path) if path.suffix == PARQUET else _json(path)


class RecordObjects:
    """A list of dicts, or an object with `len` and `[i]` such as a dataset of `datasets`."""

    def __init__(self, records: Any) -> None:
        if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
            raise DataError(
                f"the records are a {type(records).__name__}, but must have `len` and `[i]`, as a "
                "list of dicts or a dataset of the package `datasets` (of one split)"
            )
        self._records = records
        self.name = type(records).__name__
        self.total = float(len(records))

    @property
    def identity(self) -> object:
        # A dataset of `datasets` has a digest of its content.
        given = getattr(self._records, "_fingerprint", None)
        if isinstance(given, str):
            return given
        digest = hashlib.sha256()
        for record in self:
            text = json.dumps(record.content, sort_keys=True, default=str)
            digest.update(text.encode() + b"\n")
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Record]:
        for index in range(len(self._records)):
            where = f"record {index} of {self.name}"
            yield Record(as_object(self._records[index], where), where, 1.0)


def record_inputs(section: DataSection) -> Iterator[DataInput]:
    """Yield the files, folders and globs of records that `section` names."""
    for key in ("path", "valid_path"):
        names = getattr(section, key)
        for name in (names,) if isinstance(names, str) else names or ():
            try:
                yield DataInput(f"data.{key}", name, int(find_records(name, f"data.{key}").total))
            except DataError as error:
                yield DataInput(f"data.{key}", name, error=str(error))


def find_records(names: str | Sequence[str], key: str = "data.path") -> RecordFiles:
    """Return the files that `names` (files, folders and globs) name, each once.

    Raises:
        DataError: a name matches no file, or a file of another format.
    """
    given = [names] if isinstance(names, str) else list(names)
    files: dict[Path, None] = {}
    for name in given:
        matches = _matches(Path(name).expanduser())
        if not matches:
            raise DataError(f"{key} {name!r}: no file of JSON lines or parquet exists there")
        files.update(dict.fromkeys(matches))
    foreign = [path for path in files if not (is_json_lines(path) or path.suffix == PARQUET)]
    if foreign:
        raise DataError(
            f"{key}: {foreign[0]} is neither JSON lines (.jsonl, .ndjson, .json, also .gz) nor "
            "parquet (.parquet)"
        )
    label = given[0] + (f" and {len(given) - 1} more" if len(given) > 1 else "")
    return RecordFiles(label, tuple(files))


def _matches(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(file for file in path.iterdir() if file.is_file())
        return [file for file in inside if is_json_lines(file) or file.suffix == PARQUET]
    if not has_magic(str(path)):
        return []
    return sorted(Path(match) for match in glob(str(path), recursive=True) if Path(match).is_file())


def _json(path: Path) -> Iterator[Record]:
    """Yield the records of a file of JSON lines, or of one JSON list."""
    with reading(path) as file:
        content = b"" if file.read(1) != b"[" else b"[" + file.read()
    if not content:
        for record, where, size in json_lines(path):
            yield Record(record, where, size)
        return
    records = parsed(content, str(path))
    for index, record in enumerate(records):
        where = f"{path}, record {index}"
        yield Record(as_object(record, where), where, len(content) / len(records))


def _parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            size = path.stat().st_size / max(file.metadata.num_rows, 1)
            row = 0
            for batch in file.iter_batches(batch_size=1024):
                for content in batch.to_pylist():
                    yield Record(content, f"{path}, row {row}", size)
                    row += 1
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
