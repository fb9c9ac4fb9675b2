"""Folders of images: one sub-folder per class.

photos/train/cat/1.jpg     photos/train/dog/a.png     photos/val/cat/7.jpg   ...
"""

from pathlib import Path

import numpy as np

from pipemega.data.images.image_paths import class_names, folder_error, image_files, listed
from pipemega.data.images.labelled_images import FilePixels, LabelledImages, require_pillow
from pipemega.errors import DataError


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
