"""Build the datasets of images from the config section `data`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipemega.config.data import DataSection
from pipemega.data.images.cifar import read_cifar
from pipemega.data.images.drawn_digits import drawn_digits, scikit_digits
from pipemega.data.images.image_dataset import ImageDataset
from pipemega.data.images.image_folder import read_folder
from pipemega.data.images.image_paths import image_folders, split_folders
from pipemega.data.images.labelled_images import EXTRA, LabelledImages, Labels
from pipemega.data.samples import SPLITS, split_ranges
from pipemega.errors import ConfigError, DataError

_MEANING = {"train": "training", "valid": "validation", "test": "the test set"}


@dataclass(frozen=True)
class ImageRequest:
    """What a run needs from its images.

    Attributes:
        shape: channels, height and width of the model's images.
        num_classes: of the model; None: those of the data.
        splits: the sets that are read.
    """

    shape: tuple[int, int, int]
    num_classes: int | None
    splits: Sequence[str] = ("train",)


class BuiltImages(NamedTuple):
    """The datasets of a run.

    Args:
        splits: "train", "valid", "test" -> dataset; None: not requested, or there is none.
        description: lines for the log.
    """

    splits: Mapping[str, ImageDataset | None]
    description: tuple[str, ...]


class _Part(NamedTuple):
    """Images of a source that are one split."""

    source: LabelledImages
    chosen: Labels


def build_images(section: DataSection, request: ImageRequest) -> BuiltImages:
    """Read the images of `section`; every rank calls it with equal values.

    Raises:
        ConfigError: no folder is named, a package is missing, or the model has fewer classes.
        DataError: files are missing or damaged, or a class has no images of a split.
    """
    lines: list[str] = []
    parts = _parts(section, request.splits, lines)
    first = next(iter(parts.values())).source
    known, needed = request.num_classes, len(first.classes)
    if known is not None and known < needed:
        raise ConfigError(
            f"model.num_classes is {known}, and the data, {first.name}, has {needed} classes: set "
            f"model.num_classes to {needed}",
            on_every_rank=True,
        )
    splits = {
        name: ImageDataset(
            part.source, name, part.chosen, section.transforms, request.shape, known or needed
        )
        for name, part in parts.items()
    }
    lines += [dataset.describe() for dataset in splits.values()]
    return BuiltImages({name: splits.get(name) for name in SPLITS}, tuple(lines))


def _parts(section: DataSection, splits: Sequence[str], lines: list[str]) -> dict[str, _Part]:
    """Return the images of each split that is requested and exists.

    Args:
        lines: for the log; more are added.
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
