"""Images of one source with their classes, as they are stored."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipemega.data.file_cache import digest_of
from pipemega.errors import ConfigError, DataError

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
