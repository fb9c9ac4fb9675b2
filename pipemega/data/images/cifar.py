"""CIFAR-10 and CIFAR-100, from the files that their authors publish: Python's and binary ones.

    cifar-10-batches-py    data_batch_1 ... data_batch_5, test_batch, batches.meta      pickled
    cifar-10-batches-bin   the same with .bin: per image 1 byte class, 3,072 bytes pixels
    cifar-100-python       train, test, meta                                            pickled
    cifar-100-binary       train.bin, test.bin: 1 byte group of classes, 1 byte class, pixels

Source: https://www.cs.toronto.edu/~kriz/cifar.html
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipemega.data.images.image_files import (
    ArrayPixels,
    Bytes,
    ChannelStatistics,
    LabelledImages,
    Labels,
)
from pipemega.errors import DataError

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


@dataclass(frozen=True)
class _Files:
    """The files of one data set.

    Args:
        folders: names of the folders in the published archives.
        train, test: names of the files without `.bin`.
        names: files with the names of the classes: pickled, and as text.
        key, names_key: of the classes in pickled files.
        label_bytes: bytes before the pixels of a binary file; the last one is the class.
    """

    title: str
    num_classes: int
    folders: tuple[str, str]
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: tuple[str, str]
    key: bytes
    names_key: bytes
    label_bytes: int
    statistics: ChannelStatistics


_FILES = {
    "cifar10": _Files(
        title="CIFAR-10",
        num_classes=10,
        folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        names=("batches.meta", "batches.meta.txt"),
        key=b"labels",
        names_key=b"label_names",
        label_bytes=1,
        statistics=ChannelStatistics((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ),
    "cifar100": _Files(
        title="CIFAR-100",
        num_classes=100,
        folders=("cifar-100-python", "cifar-100-binary"),
        train=("train",),
        test=("test",),
        names=("meta", "fine_label_names.txt"),
        key=b"fine_labels",
        names_key=b"fine_label_names",
        label_bytes=2,
        statistics=ChannelStatistics((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ),
}


def find_cifar(kind: str, path: str | Path, key: str) -> Path:
    """Return the folder with the files of "cifar10" or "cifar100": `path`, or one in it.

    Args:
        key: names `path` in messages.

    Raises:
        DataError: it has no such files, or some are missing.
    """
    files, root = _FILES[kind], Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{key}: {path} does not exist")
    for folder in (root, *(root / name for name in files.folders)):
        for suffix in ("", ".bin"):
            names = [f"{name}{suffix}" for name in files.train + files.test]
            missing = [name for name in names if not (folder / name).is_file()]
            if not missing:
                return folder
            if len(missing) < len(names):
                raise DataError(
                    f"{key}: {folder} lacks {', '.join(missing)} of {files.title}: unpack the "
                    "whole archive"
                )
    raise DataError(
        f"{key}: {path} has no files of {files.title} ({files.train[0]} or {files.train[0]}.bin), "
        f"and no folder {files.folders[0]} or {files.folders[1]} with them"
    )


def read_cifar(kind: str, path: str | Path, key: str, *, test: bool) -> LabelledImages:
    """Return the training or the test images of "cifar10" or "cifar100".

    Raises:
        DataError: a file is missing, or is not one of this data set.
    """
    files, folder = _FILES[kind], find_cifar(kind, path, key)
    names = files.test if test else files.train
    read = _read_pickled if (folder / names[0]).is_file() else _read_binary
    parts = [read(files, folder / name) for name in names]
    pixels, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    return LabelledImages(
        f"{files.title} ({folder})",
        ArrayPixels(pixels.reshape(-1, 3, _SIDE, _SIDE)),
        labels,
        _class_names(files, folder),
        files.statistics,
    )


def _read_pickled(files: _Files, path: Path) -> tuple[Bytes, Labels]:
    content = _unpickled(path)
    try:
        pixels = np.asarray(content[b"data"])
        labels = np.asarray(content[files.key], dtype=np.int64)
    except (KeyError, TypeError, ValueError) as error:
        found = f"the keys {sorted(content, key=str)}" if isinstance(content, dict) else "no dict"
        raise _wrong(
            files, path, f"it has {found}; expected are the keys b'data' and {files.key!r}"
        ) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise _wrong(files, path, f"its images are {pixels.dtype} {list(pixels.shape)}")
    return _checked(files, path, pixels, labels)


def _read_binary(files: _Files, path: Path | str) -> tuple[Bytes, Labels]:
    path = Path(f"{path}.bin")
    raw, size = np.fromfile(path, dtype=np.uint8), files.label_bytes + _PIXELS
    if len(raw) % size:
        raise _wrong(
            files, path, f"it has {len(raw):,} bytes, which are no multiple of {size:,} per image"
        )
    rows = raw.reshape(-1, size)
    labels = rows[:, files.label_bytes - 1].astype(np.int64)
    return _checked(files, path, rows[:, files.label_bytes :], labels)


def _checked(files: _Files, path: Path, pixels: Bytes, labels: Labels) -> tuple[Bytes, Labels]:
    if len(pixels) != len(labels) or not len(labels):
        raise _wrong(files, path, f"it has {len(pixels):,} images and {len(labels):,} labels")
    if labels.min() < 0 or labels.max() >= files.num_classes:
        raise _wrong(
            files,
            path,
            f"it has labels from {labels.min()} to {labels.max()}, and {files.num_classes} classes",
        )
    return pixels, labels


def _class_names(files: _Files, folder: Path) -> tuple[str, ...]:
    """Return the names of the classes; their numbers if the files do not tell."""
    pickled, text = (folder / name for name in files.names)
    names: Sequence[Any] = ()
    if pickled.is_file():
        content = _unpickled(pickled)
        names = content.get(files.names_key, ()) if isinstance(content, dict) else ()
    elif text.is_file():
        names = text.read_text().split()
    if len(names) != files.num_classes:
        return tuple(map(str, range(files.num_classes)))
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def _unpickled(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _CifarUnpickler(file, encoding="bytes").load()
    # A damaged pickle can raise anything.
    except Exception as error:
        raise DataError(
            f"{path} is not a file of CIFAR's Python version ({type(error).__name__}: {error}): "
            "unpack the archive again"
        ) from error


def _wrong(files: _Files, path: Path, why: str) -> DataError:
    return DataError(f"{path} is not a file of {files.title}: {why}")


def _latin1(text: str, encoding: str) -> bytes:
    """Encode text, as pickles of bytes in protocol 2 do."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes text as {encoding}")
    return text.encode("latin1")


def _functions_of_arrays() -> dict[tuple[str, str], Any]:
    """(module, name) -> function, of what pickled arrays and numbers of numpy contain."""
    empty = np.empty(0, np.uint8)
    found: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }
    for core in ("numpy.core", "numpy._core"):
        found[f"{core}.multiarray", "_reconstruct"] = empty.__reduce__()[0]
        found[f"{core}.multiarray", "scalar"] = np.int64(0).__reduce__()[0]
        found[f"{core}.numeric", "_frombuffer"] = empty.__reduce_ex__(5)[0]
    return found | {("_codecs", "encode"): _latin1}


class _CifarUnpickler(pickle.Unpickler):
    """Creates arrays, and refuses every other name: a file cannot run code."""

    _allowed = _functions_of_arrays()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which CIFAR does not need")
        return self._allowed[module, name]
