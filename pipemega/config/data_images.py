"""`data.images` and `data.transforms`: images with classes, and how they become samples."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from pipemega.config.key_kinds import Section, own, rule
from pipemega.config.value_types import NotNegative, Whole
from pipemega.printing import counted

ImageSource = Literal["cifar10", "cifar100", "folder", "digits", "glyphs"]

# Sources that are files, in `data.path`.
SOURCES_OF_FILES = ("cifar10", "cifar100", "folder")

# Sources whose validation images `data.split` cuts off.
_CUT_SOURCES = ("folder", "digits", "glyphs")

_PartOfSide = Annotated[float, Field(gt=0, le=1)]
_Spread = Annotated[float, Field(gt=0)]

_SCALES = (0.08, 1.0)


class ImageTransforms(Section):
    """How images become samples of the size that the model has.

    An image is scaled until its shorter side has the model's size, and its centre is cut out. The
    random changes are for training images only; they are drawn from the seed, the epoch and the
    number of the sample, so that every mesh sees the same.
    """

    random_crop: Whole = own(
        0, "Pixels that are added to each side of a training image before a random part is cut out."
    )
    random_resized_crop: bool | tuple[_PartOfSide, _PartOfSide] = own(
        False,
        "Cut a random part out of a training image and scale it: true for parts of "
        f"{_SCALES[0]:g} to {_SCALES[1]:g} of the area, or [smallest, largest]; needs torchvision.",
    )
    flip: bool = own(False, "Mirror training images left to right, half of them.")
    auto_augment: Literal["imagenet", "cifar10", "svhn"] | None = own(
        None, "AutoAugment's policy for this data set, for training images; needs torchvision."
    )
    mixup: NotNegative = own(
        0.0,
        "Mix each training image with another one, with a share from Beta(mixup, mixup); the label "
        "is then a share of each class; 0: off.",
    )
    center_crop: _PartOfSide = own(
        1.0,
        "Size of the centre that is cut out, divided by the shorter side of the scaled image; "
        "0.875: a model of 224 pixels gets the centre of an image of 256.",
    )
    mean: tuple[float, ...] | None = own(
        None,
        "Mean of each channel, subtracted from values of 0 to 1; null: that of the data set, for a "
        "folder that of ImageNet.",
    )
    std: tuple[_Spread, ...] | None = own(
        None,
        "Divisor of each channel after `mean` is subtracted; null: that of the data set, for a "
        "folder that of ImageNet.",
    )

    @property
    def scales(self) -> tuple[float, float] | None:
        """Smallest and largest area of `random_resized_crop`; None: it is off."""
        given = self.random_resized_crop
        return given if isinstance(given, tuple) else _SCALES if given else None

    @property
    def is_random(self) -> bool:
        """Whether training images have random changes."""
        return bool(self.random_crop or self.scales or self.flip or self.auto_augment or self.mixup)

    @rule("mean", "std")
    def _mean_and_std(self) -> Iterator[str]:
        if (self.mean is None) != (self.std is None):
            here, there = ("mean", "std") if self.std is None else ("std", "mean")
            yield f"data.transforms.{here} is set without data.transforms.{there}: set both"
        elif self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            yield (
                f"data.transforms.mean has {counted(len(self.mean), 'number')}, and "
                f"data.transforms.std has {len(self.std)}: give both one number per channel"
            )

    @rule("random_crop", "random_resized_crop")
    def _one_crop(self) -> Iterator[str]:
        if self.random_crop and self.scales:
            yield (
                "data.transforms.random_crop and data.transforms.random_resized_crop are set: keep "
                "one"
            )
        if self.scales and self.scales[0] > self.scales[1]:
            yield (
                f"data.transforms.random_resized_crop is [{self.scales[0]:g}, {self.scales[1]:g}]: "
                "give the smallest area first"
            )


def errors_of_images(data: Any, default_split: str) -> Iterator[str]:
    """Yield errors between `data.images` and other keys of the section `data`."""
    kinds = ", ".join(repr(kind) for kind in get_args(ImageSource))
    if data.images is None:
        if data.transforms != ImageTransforms():
            yield f"data.transforms needs data.images: set it to one of {kinds}"
        return
    for key in ("path", "valid_path"):
        value = getattr(data, key)
        if value is not None and data.images not in SOURCES_OF_FILES:
            yield f"data.{key} is set, and data.images {data.images!r} needs no files: remove one"
        elif isinstance(value, tuple):
            yield f"data.{key} of data.images must be one folder, not a list of {len(value)}"
    if data.valid_path is not None and data.images.startswith("cifar"):
        yield (
            f"data.valid_path is set, and the files of data.images {data.images!r} contain the "
            "validation images: remove it"
        )
    if data.split != default_split and (data.images not in _CUT_SOURCES or data.valid_path):
        yield (
            f"data.split ({data.split!r}) is set, and the validation images are those of "
            f"{'data.valid_path' if data.valid_path else data.images}: remove data.split"
        )
    if data.format is not None:
        yield f"data.format {data.format!r} is for texts, and data.images is set: keep one"
