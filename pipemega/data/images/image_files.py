"""Folders of images: one sub-folder per class.

photos/train/cat/1.jpg     photos/train/dog/a.png     photos/val/cat/7.jpg   ...

Images of digits for trials without a download: scikit-learn's, or drawn here.

Images of one source with their classes, as they are stored.

CIFAR-10 and CIFAR-100, from the files that their authors publish: Python's and binary ones.

    cifar-10-batches-py    data_batch_1 ... data_batch_5, test_batch, batches.meta      pickled
    cifar-10-batches-bin   the same with .bin: per image 1 byte class, 3,072 bytes pixels
    cifar-100-python       train, test, meta                                            pickled
    cifar-100-binary       train.bin, test.bin: 1 byte group of classes, 1 byte class, pixels

Source: https://www.cs.toronto.edu/~kriz/cifar.html
"""

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from pipemega.data.images.image_paths import class_names, folder_error, image_files, listed
from pipemega.errors import ConfigError, DataError
from pipemega.storage.build_once import digest_of

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

EXTRA = "pip install 'pipemega[vision]'"


class Pixels(Protocol):
    """Images that are read one by one."""

    @property
    def identity(self) -> str:
        """Text that differs if the images differ."""

    def __getitem__(self, index: int) -> Tensor:
        """Return an image: uint8 [channels, height, width]."""


@dataclass(frozen=True)
class ChannelStatistics:
    """Mean and standard deviation of each channel, of values from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET = ChannelStatistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class LabelledImages:
    """Images with a class each.

    Args:
        name: name of the source, in messages.
        pixels: the images.
        labels: class of each image, [images].
        classes: names of the classes.
        statistics: mean and standard deviation of the channels.
    """

    name: str
    pixels: Pixels
    labels: Labels
    classes: tuple[str, ...]
    statistics: ChannelStatistics = IMAGENET

    @property
    def identity(self) -> str:
        """32 hex digits that differ if images, labels or classes differ."""
        labels = digest_of({"labels": self.labels.tolist()})
        return digest_of({"images": self.pixels.identity, "labels": labels, "of": self.classes})


@dataclass(frozen=True)
class ArrayPixels:
    """Images in memory: uint8 [images, channels, height, width]."""

    array: Bytes

    @property
    def identity(self) -> str:
        # A sum of 64-bit words with their positions: 180 MB of CIFAR would take a second to hash.
        flat = np.ascontiguousarray(self.array).reshape(len(self.array), -1)
        weights = np.arange(1, flat.shape[1] + 1, dtype=np.int64)
        return digest_of({"shape": self.array.shape, "sums": (flat @ weights).tolist()})

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.array[index])


@dataclass(frozen=True)
class FilePixels:
    """Image files below a folder, read as RGB.

    Args:
        root: the folder.
        files: paths relative to it.
        sizes: bytes of each file.
    """

    root: Path
    files: Sequence[str]
    sizes: Sequence[int] = field(repr=False)

    @property
    def identity(self) -> str:
        return digest_of({"files": list(self.files), "sizes": list(self.sizes)})

    def __getitem__(self, index: int) -> Tensor:
        from PIL import Image

        path = self.root / self.files[index]
        try:
            with Image.open(path) as image:
                rgb = _rgb(image)
        # Damaged files raise errors of many kinds, SyntaxError among them. The message has all that
        # is of use: a worker process would add the traceback of the cause to it.
        except Exception as error:
            raise DataError(
                f"{path} cannot be read as an image ({type(error).__name__}: {error}): repair the "
                "file, or remove it"
            ) from None
        return torch.from_numpy(rgb).permute(2, 0, 1)


def _rgb(image: Any) -> Bytes:
    """Return the pixels of a Pillow image; Pillow would clip values of 16 bits at 255."""
    mode = image.mode
    # Pillow has 16 bits of these formats in 32.
    if mode == "F" or (mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError("its values have 32 bits, and their range is not known: use 8 or 16")
    if mode.startswith("I"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return grey[..., None].repeat(3, -1)
    return np.array(image.convert("RGB"))


def require_pillow() -> None:
    """Check that image files can be read.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.images 'folder' reads files with Pillow, which is not installed: {EXTRA}"
        ) from error


def read_folder(path: Path, key: str, train: LabelledImages | None = None) -> LabelledImages:
    """Return the images of a folder with a sub-folder per class; no image is read yet.

    Args:
        key: names `path` in messages.
        train: the training images, if these are for validation: their classes must be the same.

    Raises:
        ConfigError: Pillow is not installed.
        DataError: the folder is missing or has no classes, a class has no images, or the classes
            are not the classes of `train`.
    """
    require_pillow()
    if error := folder_error(path, key):
        raise DataError(error)
    found = class_names(path)
    if train is not None:
        _check_classes(path, key, found, train)
    files: list[str] = []
    sizes: list[int] = []
    counts = []
    for name in found:
        before = len(files)
        for file in sorted(image_files(path / name)):
            files.append(file.relative_to(path).as_posix())
            sizes.append(file.stat().st_size)
        counts.append(len(files) - before)
    labels = np.repeat(np.arange(len(found), dtype=np.int64), counts)
    return LabelledImages(str(path), FilePixels(path, files, sizes), labels, found)


def _check_classes(path: Path, key: str, found: tuple[str, ...], train: LabelledImages) -> None:
    missing = [name for name in train.classes if name not in found]
    unknown = [name for name in found if name not in train.classes]
    if missing:
        raise DataError(
            f"{key}: {path} has no sub-folder for {listed(missing)} of {train.name}: "
            "validation needs images of every class; add them, or remove the class from both"
        )
    if unknown:
        raise DataError(
            f"{key}: {path} has {listed(unknown)}, and {train.name} has no such sub-folder: a "
            "model cannot know a class without training images; add them, or remove the class from "
            "both"
        )


_CLASSES = tuple("0123456789")

# Of values from 0 to 1: normalized values are from -1 to 1.
_STATISTICS = ChannelStatistics((0.5,), (0.5,))

_DRAWN, _SIDE = 4000, 20
_SEED = 20
_TURN, _SHEAR, _SHIFT, _NOISE = math.radians(15), 0.2, 0.15, 0.1

# 7 rows of 5 pixels per digit; the highest bit is the leftmost pixel.
_FONT = (
    (14, 17, 19, 21, 25, 17, 14), (4, 12, 4, 4, 4, 4, 14), (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14), (2, 6, 10, 18, 31, 2, 2), (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14), (31, 1, 2, 4, 8, 8, 8), (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)  # fmt: skip


def scikit_digits() -> LabelledImages | None:
    """Return the 1,797 handwritten digits of scikit-learn, 8 x 8; None: it is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "sklearn":
            raise
        return None
    found = load_digits()
    # 17 levels of grey.
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = np.asarray(found.target, dtype=np.int64)
    name = "the digits of scikit-learn"
    return LabelledImages(name, ArrayPixels(pixels), labels, _CLASSES, _STATISTICS)


def drawn_digits() -> LabelledImages:
    """Return 4,000 digits, 20 x 20: turned, sheared, scaled, shifted, with noise; always equal."""
    random = torch.Generator().manual_seed(_SEED)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.empty(_DRAWN).uniform_(low, high, generator=random)

    labels = torch.arange(_DRAWN) % len(_CLASSES)
    font = torch.tensor([[[row >> 4 - x & 1 for x in range(5)] for row in rows] for rows in _FONT])
    turn, shear = uniform(-_TURN, _TURN), uniform(-_SHEAR, _SHEAR)
    # From positions in the image to positions in the 5 x 7 pixels of a digit.
    wide, high = uniform(1.2, 2.0), uniform(1.1, 1.6)
    rows = [
        [wide * turn.cos(), wide * (shear - turn.sin()), uniform(-_SHIFT, _SHIFT) * wide],
        [high * turn.sin(), high * turn.cos(), uniform(-_SHIFT, _SHIFT) * high],
    ]
    maps = torch.stack([torch.stack(row, -1) for row in rows], 1)
    grid = F.affine_grid(maps, [_DRAWN, 1, _SIDE, _SIDE], align_corners=False)
    glyphs = font[labels, None].float()
    drawn = (
        F.grid_sample(glyphs, grid, align_corners=False) * uniform(0.6, 1.0)[:, None, None, None]
    )
    drawn += torch.empty_like(drawn).uniform_(-_NOISE, _NOISE, generator=random)
    pixels = (drawn.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return LabelledImages(
        "digits that pipemega draws", ArrayPixels(pixels), labels.numpy(), _CLASSES, _STATISTICS
    )


_CIFAR_SIDE = 32
_PIXELS = 3 * _CIFAR_SIDE * _CIFAR_SIDE


@dataclass(frozen=True)
class _Files:
    """The files of one data set.

    Args:
        folders: names of the folders in the published archives.
        train, test: names of the files without `.bin`.
        names: files with the names of the classes: pickled, and as text.
        key, names_key: keys of the labels and of the class names in pickled files.
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
        ArrayPixels(pixels.reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE)),
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
