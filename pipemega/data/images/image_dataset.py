"""Map-style dataset of images and classes.

From a stored image to the input of a model: size, random changes, channels, normalization.

Build the datasets of images from the config section `data`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from pipemega.config.sections.data_section import DataSection, ImageTransforms
from pipemega.data.images.image_files import (
    EXTRA,
    ChannelStatistics,
    LabelledImages,
    Labels,
    drawn_digits,
    read_cifar,
    read_folder,
    scikit_digits,
)
from pipemega.data.images.image_paths import image_folders, split_folders
from pipemega.data.tokens.build_datasets import Datasets
from pipemega.data.tokens.gpt_dataset import SPLITS, split_ranges
from pipemega.errors import ConfigError, DataError
from pipemega.printing import counted
from pipemega.storage.build_once import digest_of

Transform = Callable[[Tensor], Tensor]

# Luminance of red, green and blue (ITU-R BT.601).
_LUMINANCE = (0.299, 0.587, 0.114)


class ImageTransform:
    """Maps a stored image to the input of a model.

    Random changes draw from torch's default generators.

    Args:
        section: `data.transforms`.
        shape: channels, height and width of the model's images.
        statistics: used for `data.transforms.mean` and `std` if they are not set.
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


ImageSample = tuple[Tensor, int | Tensor]


class ImageDataset(Dataset[ImageSample]):
    """Images of one split in the order of the source; the loader shuffles them in each epoch.

    Random changes and the partner of mixup are drawn from the default generators, which the loader
    seeds for each sample from seed, epoch and number.

    Args:
        source: the images.
        name: name of the split; "train" has the random changes.
        chosen: numbers of the images of the split.
        transforms: `data.transforms`.
        shape: channels, height and width of the model's images.
        num_classes: the number of classes of the model.

    Shape:
        [i] -> (float32 [channels, height, width], class), or with mixup
        (float32 [channels, height, width], float32 [num_classes]): a share of each class

    Raises:
        ConfigError: as `ImageTransform`. While reading: DataError: a file is damaged.
    """

    already_shuffled = False

    def __init__(
        self,
        source: LabelledImages,
        name: str,
        chosen: Labels,
        transforms: ImageTransforms,
        shape: tuple[int, int, int],
        num_classes: int,
    ) -> None:
        training = name == "train"
        self.name, self.source, self.num_classes = name, source, num_classes
        self.deterministic = not (training and transforms.is_random)
        self._mixup = transforms.mixup if training else 0.0
        self._chosen, self._shape = chosen, shape
        self._transform = ImageTransform(transforms, shape, source.statistics, training=training)
        described: dict[str, Any] = transforms.model_dump()
        self.fingerprint = digest_of(
            {
                "images": source.identity,
                "split": [name, digest_of({"chosen": chosen.tolist()})],
                "shape": shape,
                "classes": num_classes,
                "transforms": described,
            }
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.source.classes

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> ImageSample:
        """Return one sample; a negative index counts from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"image index {index} is out of range: {len(self)} images")
        image, label = self._single(index)
        if not self._mixup:
            return image, label
        # Both are drawn after the changes of the image, and before the changes of its partner.
        share = float(np.random.beta(self._mixup, self._mixup))
        partner = int(torch.randint(len(self), ()))
        other, other_label = self._single(partner)
        labels = torch.zeros(self.num_classes)
        labels[label] += share
        labels[other_label] += 1 - share
        return torch.lerp(other, image, share), labels

    def _single(self, index: int) -> tuple[Tensor, int]:
        at = int(self._chosen[index])
        return self._transform(self.source.pixels[at]), int(self.source.labels[at])

    def describe(self) -> str:
        """Return one line: images, classes, size."""
        channels, height, width = self._shape
        return (
            f"{self.name}: {len(self):,} images of {len(self.source.classes)} classes, "
            f"{self.source.name}, as {channels} x {height} x {width}"
        )


_MEANING = {"train": "training", "valid": "validation", "test": "the test set"}


class _Part(NamedTuple):
    """Images of a source that are one split."""

    source: LabelledImages
    chosen: Labels


def build_images(
    section: DataSection,
    shape: tuple[int, int, int],
    num_classes: int | None,
    requested: Sequence[str] = ("train",),
) -> Datasets:
    """Read the images of `section`; every rank calls it with equal values.

    Args:
        shape: channels, height and width of the model's images.
        num_classes: the number of classes of the model; None: use the number in the data.
        requested: the sets that are read: "train", "valid", "test".

    Raises:
        ConfigError: no folder is named, a package is missing, or the model has fewer classes.
        DataError: files are missing or damaged, or a class has no images of a split.
    """
    lines: list[str] = []
    parts = _parts(section, requested, lines)
    first = next(iter(parts.values())).source
    needed = len(first.classes)
    if num_classes is not None and num_classes < needed:
        raise ConfigError(
            f"model.num_classes is {num_classes}, and the data, {first.name}, has {needed} "
            f"classes: set model.num_classes to {needed}",
            on_every_rank=True,
        )
    splits: dict[str, ImageDataset | None] = dict.fromkeys(SPLITS)
    for name, (source, chosen) in parts.items():
        dataset = ImageDataset(
            source, name, chosen, section.transforms, shape, num_classes or needed
        )
        splits[name] = dataset
        lines.append(dataset.describe())
    return Datasets(**splits, vocab_size=None, tokenizer=None, description=tuple(lines))


def _parts(section: DataSection, splits: Sequence[str], lines: list[str]) -> dict[str, _Part]:
    """Return the images of each split that is requested and exists.

    Args:
        lines: lines for the log; more are added.
    """
    kind, folders = section.images, [*image_folders(section).items()]
    if not folders:
        return _cut(_digits(kind == "glyphs", lines), section, splits)
    key, path = folders[0]
    if kind in ("cifar10", "cifar100"):
        sets = {"train": False, "valid": True}
        return {
            name: _whole(read_cifar(kind, path, key, test=is_test))
            for name, is_test in sets.items()
            if name in splits
        }
    training, validation = split_folders(path)
    valid_key = key
    if len(folders) > 1:
        valid_key, validation = folders[1]
    source = read_folder(training, key)
    if validation is None:
        return _cut(source, section, splits)
    parts = {"train": _whole(source)} if "train" in splits else {}
    if "valid" in splits:
        part = _whole(read_folder(validation, valid_key, source))
        parts["valid"] = part._replace(chosen=_in_mixed_order(part.chosen))
    return parts


def _digits(drawn: bool, lines: list[str]) -> LabelledImages:
    found = None if drawn else scikit_digits()
    if found is None and not drawn:
        lines.append(f"scikit-learn is not installed ({EXTRA}): the digits are drawn instead")
    return found or drawn_digits()


def _whole(source: LabelledImages) -> _Part:
    return _Part(source, np.arange(len(source.labels)))


def _cut(source: LabelledImages, section: DataSection, splits: Sequence[str]) -> dict[str, _Part]:
    """Cut the images of each class by `data.split`: always the same ones.

    Raises:
        ConfigError: no training images are left.
        DataError: a class has no images in a split.
    """
    weights = dict(zip(SPLITS, section.split_weights, strict=True))
    if "train" in splits and not weights["train"]:
        raise ConfigError(f"data.split is {section.split!r}, which leaves no training data")
    chosen: dict[str, list[Labels]] = {name: [] for name in splits if weights[name]}
    for label, name_of_class in enumerate(source.classes):
        own = np.flatnonzero(source.labels == label)
        order = np.random.default_rng(label).permutation(own)
        ranges = split_ranges(section.split_weights, len(own))
        for name, lists in chosen.items():
            if not len(ranges[name]):
                raise DataError(
                    f"class {name_of_class!r} of {source.name} has {len(own)} images, of which "
                    f"data.split ({section.split!r}) leaves none for {_MEANING[name]}: change "
                    "data.split, set data.valid_path, or add images"
                )
            lists.append(order[ranges[name].start : ranges[name].stop])
    return {
        name: _Part(source, _in_mixed_order(np.concatenate(lists)))
        for name, lists in chosen.items()
    }


def _in_mixed_order(chosen: Labels) -> Labels:
    """Return numbers of images in a fixed order, so that the first ones are not of one class."""
    return np.random.default_rng(0).permutation(np.sort(chosen))
