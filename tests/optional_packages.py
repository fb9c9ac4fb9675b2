"""Packages and features of torch that a test uses if they are installed."""

from importlib import import_module
from typing import Any

import pytest
import torch

# torchvision raises a RuntimeError if it was built for another version of torch.
ERRORS = (ImportError, RuntimeError)

HAS_MUON = hasattr(torch.optim, "Muon")


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


needs_meta_collectives = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"),
    reason="collectives of this torch do not take tensors on the meta device",
)
needs_muon = pytest.mark.skipif(not HAS_MUON, reason="this torch has no Muon")
