"""Packages that a test uses if they are installed."""

from importlib import import_module
from typing import Any

import pytest

# torchvision raises a RuntimeError if it was built for another version of torch.
ERRORS = (ImportError, RuntimeError)


def imported(name: str) -> Any:
    """Import a package; skip the test if it is missing or does not fit to torch."""
    try:
        return import_module(name)
    except ERRORS as error:
        pytest.skip(f"{name} cannot be imported: {error}")


def can_be_imported(name: str) -> bool:
    """Whether `imported` returns."""
    try:
        import_module(name)
    except ERRORS:
        return False
    return True
