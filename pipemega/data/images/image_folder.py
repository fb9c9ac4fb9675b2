"""Folders of images: one sub-folder per class.

photos/train/cat/1.jpg     photos/train/dog/a.png     photos/val/cat/7.jpg   ...
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipemega.data.images.labelled_images import FilePixels, LabelledImages, require_pillow
from pipemega.errors import DataError

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

_VALID = ("val", "valid", "validation", "test")
_SHOWN = 5


def split_folders(path: Path) -> tuple[Path, Path | None]:
    """Return the folders of training and validation images: `train` and `val` in `path`, or it.

    None: `path` has no validation images of its own.
    """
    if (path / "train").is_dir():
        for name in _VALID:
            if (path / name).is_dir():
                return path / "train", path / name
    return path, None


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
    if not path.is_dir():
        raise DataError(f"{key}: the folder {path} does not exist")
    found = tuple(sorted(entry.name for entry in os.scandir(path) if _is_class(entry)))
    if train is not None:
        _check_classes(path, key, found, train)
    files: list[str] = []
    sizes: list[int] = []
    counts = []
    for name in found:
        before = len(files)
        for file, size in _images(path / name):
            files.append(file.relative_to(path).as_posix())
            sizes.append(size)
        counts.append(len(files) - before)
    if not files:
        raise DataError(
            f"{key}: {path} has no images: it needs a sub-folder per class with files "
            f"{', '.join(ENDINGS)} in it"
        )
    if empty := [name for name, count in zip(found, counts, strict=True) if not count]:
        raise DataError(
            f"{key}: {path} has no images of {_listed(empty)}: add files {', '.join(ENDINGS)}, or "
            "remove the sub-folder"
        )
    labels = np.repeat(np.arange(len(found), dtype=np.int64), counts)
    return LabelledImages(str(path), FilePixels(path, files, sizes), labels, found)


def _is_class(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _images(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the image files below a folder, in order, and their sizes."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in ENDINGS and path.is_file():
            yield path, path.stat().st_size


def _check_classes(path: Path, key: str, found: tuple[str, ...], train: LabelledImages) -> None:
    missing = [name for name in train.classes if name not in found]
    unknown = [name for name in found if name not in train.classes]
    if missing:
        raise DataError(
            f"{key}: {path} has no sub-folder for {_listed(missing)} of {train.name}: "
            "validation needs images of every class; add them, or remove the class from both"
        )
    if unknown:
        raise DataError(
            f"{key}: {path} has {_listed(unknown)}, and {train.name} has no such sub-folder: a "
            "model cannot know a class without training images; add them, or remove the class from "
            "both"
        )


def _listed(names: list[str]) -> str:
    """Return "class 'a'", or "3 classes ('a', 'b', ...)"."""
    if len(names) == 1:
        return f"class {names[0]!r}"
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} classes ({shown})"
