"""Ranks whose GPU is a fake one: host memory that torch takes for another device."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration, cpp_extension

NAME = "fake_gpu"
SOURCE = Path(__file__).parent / "fake_device.cpp"

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("ninja") is None,
    reason="the fake device is compiled with g++ and ninja",
)


def load_fake_device(folder: str) -> None:
    """Let this process use the device NAME; the first call compiles it (1 minute)."""
    flags = ["-O0"]
    module = cpp_extension.load("fake_device", [str(SOURCE)], flags, build_directory=folder)
    assert module.ready()
    if not hasattr(torch, NAME):
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, backend_registration._DummyBackendModule())
