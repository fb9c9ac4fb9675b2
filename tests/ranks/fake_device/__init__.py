"""Ranks whose GPU is a fake one: host memory that torch takes for another device."""

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import backend_registration, cpp_extension

NAME = "fake_gpu"
ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).parent / "fake_device.cpp"

# torch 2.8 has none.
_Base: Any = getattr(backend_registration, "_DummyBackendModule", None)
needs_compiler = pytest.mark.skipif(
    None in (_Base, shutil.which("g++"), shutil.which("ninja")),
    reason="the fake device needs torch 2.9, g++ and ninja",
)


class FakeModule(_Base or object):
    """`torch.fake_gpu`; its streams have completed all work."""

    def current_stream(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None, wait_stream=lambda stream: None)

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def compile_fake_device(folder: str) -> None:
    """Compile the fake device in a process of its own (1 minute)."""
    command = f"from tests.ranks.fake_device import load_fake_device as load; load({folder!r})"
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True)


def load_fake_device(folder: str) -> None:
    """Let this process use the device NAME; before its first backward, which counts the devices."""
    module = cpp_extension.load("fake_device", [str(SOURCE)], ["-O0"], build_directory=folder)
    assert module.ready()
    if not hasattr(torch, NAME):
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, FakeModule())
