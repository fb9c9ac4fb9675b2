"""Folders of images: one sub-folder per class.

photos/train/cat/1.jpg     photos/train/dog/a.png     photos/val/cat/7.jpg   ...

Images of digits for trials without a download: scikit-learn's, or drawn here.

Images of one source with their classes, as they are stored.
"""

import math
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
        name: of the source, in messages.
        pixels: the images.
        labels: class of each image, [images].
        classes: names of the classes.
        statistics: of the channels.
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
            are not those of `train`.
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
