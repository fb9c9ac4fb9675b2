"""The folders of images that the config section `data` names; imports no torch."""

import os
from pathlib import Path

from pipemega.config.data import DataSection
from pipemega.config.data_images import SOURCES_OF_FILES
from pipemega.errors import ConfigError

PATH_VARIABLE = "DATA"


def image_folders(section: DataSection) -> dict[str, Path]:
    """Return name of the key -> folder, first that of the training images; {}: it has no files.

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
