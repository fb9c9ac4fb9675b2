"""The folders of images that the config section `data` names; imports no torch."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipemega.config.sections.data_section import SOURCES_OF_FILES, DataSection
from pipemega.data.tokens.data_files import DataInput
from pipemega.errors import ConfigError

PATH_VARIABLE = "DATA"

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

_VALID = ("val", "valid", "validation", "test")
# Classes that a message names.
_SHOWN = 5


def image_folders(section: DataSection) -> dict[str, Path]:
    """Return key -> folder, the training images first; {}: `data.images` needs no files.

    Raises:
        ConfigError: neither `data.path` nor the environment variable names a folder.
    """
    if section.images not in SOURCES_OF_FILES:
        return {}
    path, key = section.path, "data.path"
    if path is None:
        path, key = os.environ.get(PATH_VARIABLE), f"the environment variable {PATH_VARIABLE}"
    if not path:
        raise ConfigError(
            f"data.images {section.images!r} needs a folder: set data.path, or the environment "
            f"variable {PATH_VARIABLE}",
            on_every_rank=True,
        )
    found = {key: Path(str(path)).expanduser()}
    if section.valid_path is not None:
        found["data.valid_path"] = Path(str(section.valid_path)).expanduser()
    return found


def split_folders(path: Path) -> tuple[Path, Path | None]:
    """Return the folders of training and validation images: `train` and `val` in `path`, or it.

    None: `path` has no validation images of its own.
    """
    if (path / "train").is_dir():
        for name in _VALID:
            if (path / name).is_dir():
                return path / "train", path / name
    return path, None


def class_names(path: Path) -> tuple[str, ...]:
    """Return the sub-folders of a folder of images, in order."""
    entries = (entry for entry in os.scandir(path) if entry.is_dir())
    return tuple(sorted(entry.name for entry in entries if not entry.name.startswith(".")))


def image_files(folder: Path) -> Iterator[Path]:
    """Yield the image files below a folder, in no order."""
    for path in folder.rglob("*"):
        if path.suffix.lower() in ENDINGS and path.is_file():
            yield path


def folder_error(path: Path, key: str) -> str:
    """Return why a folder with a sub-folder per class cannot be read; "" if it can.

    Args:
        key: names `path` in the message.
    """
    if not path.is_dir():
        return f"{key}: the folder {path} does not exist"
    found = class_names(path)
    empty = [name for name in found if next(image_files(path / name), None) is None]
    if len(empty) == len(found):
        return (
            f"{key}: {path} has no images: it needs a sub-folder per class with files "
            f"{', '.join(ENDINGS)} in it"
        )
    if empty:
        return (
            f"{key}: {path} has no images of {listed(empty)}: add files {', '.join(ENDINGS)}, or "
            "remove the sub-folder"
        )
    return ""


def listed(names: Sequence[str]) -> str:
    """Return "class 'a'", or "3 classes ('a', 'b', ...)"."""
    if len(names) == 1:
        return f"class {names[0]!r}"
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} classes ({shown})"


def image_inputs(section: DataSection) -> Iterator[DataInput]:
    """Yield the folders of images that `section` names."""
    try:
        folders = image_folders(section)
    except ConfigError as error:
        yield DataInput("data.path", "", error=str(error))
        return
    for key, path in folders.items():
        if section.images == "folder":
            problem = _error_of(key, path, has_validation=len(folders) > 1)
            count = 0 if problem else len(class_names(split_folders(path)[0]))
            yield DataInput(key, str(path), error=problem, classes=count)
        else:
            problem = "" if path.is_dir() else f"{key}: the folder {path} does not exist"
            yield DataInput(key, str(path), error=problem)


def _error_of(key: str, path: Path, *, has_validation: bool) -> str:
    """Return why the images of `path` cannot be read; "" if they can."""
    if key == "data.valid_path":
        return folder_error(path, key)
    training, validation = split_folders(path)
    error = folder_error(training, key)
    return error if error or validation is None or has_validation else folder_error(validation, key)
