"""From a stored image to the input of a model: size, random changes, channels, normalization."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipemega.config.data_images import ImageTransforms
from pipemega.data.images.labelled_images import EXTRA, ChannelStatistics
from pipemega.errors import ConfigError
from pipemega.printing import counted

Transform = Callable[[Tensor], Tensor]

# Luminance of red, green and blue (ITU-R BT.601).
_LUMINANCE = (0.299, 0.587, 0.114)


class ImageTransform:
    """Maps a stored image to the input of a model.

    Random changes draw from torch's default generators.

    Args:
        section: `data.transforms`.
        shape: channels, height and width of the model's images.
        statistics: of the data set, for `data.transforms.mean` and `std` that are not set.
        training: make the random changes.

    Shape:
        uint8 [1 or 3, any, any] -> float32 `shape`

    Raises:
        ConfigError: the model has neither 1 nor 3 channels, `mean` has not as many as it, or
            torchvision is missing.
    """

    def __init__(
        self,
        section: ImageTransforms,
        shape: tuple[int, int, int],
        statistics: ChannelStatistics,
        *,
        training: bool,
    ) -> None:
        channels, *size = shape
        if channels not in (1, 3):
            raise ConfigError(
                f"data.images have 1 or 3 channels, and the model takes {channels}: set "
                "model.num_channels to 1 or 3",
                on_every_rank=True,
            )
        mean, std = section.mean or statistics.mean, section.std or statistics.std
        if section.mean and len(section.mean) != channels:
            raise ConfigError(
                f"data.transforms.mean has {counted(len(section.mean), 'number')}, and the images "
                f"of the model have {counted(channels, 'channel')}: give one number per channel",
                on_every_rank=True,
            )
        self._channels, self._size = channels, (size[0], size[1])
        self._mean, self._std = _per_channel(mean, channels), _per_channel(std, channels)
        self._center_crop = section.center_crop
        self._flip = training and section.flip
        self._padding = section.random_crop if training else 0
        self._resized_crop: Transform | None = None
        self._augment: Transform | None = None
        if training and section.random_resized_crop:
            v2 = _torchvision("random_resized_crop")
            self._resized_crop = v2.RandomResizedCrop(self._size, scale=section.scales)
        if training and section.auto_augment:
            v2 = _torchvision("auto_augment")
            self._augment = v2.AutoAugment(v2.AutoAugmentPolicy(section.auto_augment))

    def __call__(self, image: Tensor) -> Tensor:
        """Return the input of the model for one image."""
        image = self._of_size(image) if self._resized_crop is None else self._resized_crop(image)
        if self._padding:
            image = _random_crop(image, self._padding)
        if self._flip and torch.rand(()) < 0.5:
            image = image.flip(-1)
        if self._augment is not None:
            image = self._augment(image)
        return (_of_channels(image.float() / 255, self._channels) - self._mean) / self._std

    def _of_size(self, image: Tensor) -> Tensor:
        """Scale the image and cut out its centre: the model's size."""
        wanted, (height, width) = self._size, image.shape[-2:]
        scale = max(wanted[0] / height, wanted[1] / width) / self._center_crop
        scaled = [max(math.floor(side * scale + 0.5), least)
                  for side, least in zip((height, width), wanted, strict=True)]  # fmt: skip
        if scaled != [height, width]:
            floats = image[None].float()
            floats = F.interpolate(floats, scaled, mode="bilinear", antialias=True)
            image = floats[0].round().clamp(0, 255).to(torch.uint8)
        top, left = ((have - want) // 2 for have, want in zip(scaled, wanted, strict=True))
        return image[..., top : top + wanted[0], left : left + wanted[1]]


def _random_crop(image: Tensor, padding: int) -> Tensor:
    """Add black pixels on each side, and cut out a random part of the old size."""
    height, width = image.shape[-2:]
    top, left = torch.randint(2 * padding + 1, (2,)).tolist()
    padded = F.pad(image, [padding] * 4)
    return padded[..., top : top + height, left : left + width]


def _of_channels(image: Tensor, channels: int) -> Tensor:
    """Return the image in grey or in three channels."""
    if image.shape[0] == channels:
        return image
    if channels == 3:
        return image.expand(3, -1, -1)
    return (image * image.new_tensor(_LUMINANCE)[:, None, None]).sum(0, keepdim=True)


def _per_channel(numbers: tuple[float, ...], channels: int) -> Tensor:
    """Return numbers of a data set, whose channels may be other ones: [channels, 1, 1]."""
    found = torch.tensor(numbers)
    if len(found) != channels:
        found = found.mean().expand(channels)
    return found[:, None, None]


def _torchvision(key: str) -> Any:
    try:
        from torchvision.transforms import v2
    # One that was built for another version of torch raises a RuntimeError.
    except (ImportError, RuntimeError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torchvision"
        why = "is not installed" if is_missing else f"cannot be imported ({error})"
        raise ConfigError(
            f"data.transforms.{key} needs torchvision, which {why}: {EXTRA}, or remove the key",
            on_every_rank=True,
        ) from error
    return v2
