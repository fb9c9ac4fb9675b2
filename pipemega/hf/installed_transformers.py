"""Imports transformers, or says which version to install."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipemega.errors import ConfigError

MINIMUM, BELOW = (5, 9), (6, 0)


def import_transformers() -> Any:
    """Return the module `transformers`.

    Raises:
        ConfigError: it is not installed, or its version is not supported.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"Hugging Face models need transformers ({error}): pip install 'pipemega[hf]'"
        ) from error
    version = transformers.__version__
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not MINIMUM <= numbers < BELOW:
        raise ConfigError(
            f"transformers {version} is installed; pipemega needs "
            f">= {MINIMUM[0]}.{MINIMUM[1]}, < {BELOW[0]}: pip install 'pipemega[hf]'"
        )
    return transformers


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, which loads and saves small models for a command."""
    logging = import_transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
