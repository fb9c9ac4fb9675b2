"""Ranks whose GPU is a fake one: host memory that torch takes for another device."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

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


class FakeStream:
    """A stream that has completed all work; notes what waits for what."""

    def __init__(self, name: str = "side") -> None:
        self.name = name

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: "FakeStream") -> None:
        FakeModule.log.append(f"{self.name} waits for {stream.name}")


class FakeEvent:
    """An event that has occurred as soon as it is recorded; notes where it is recorded."""

    def __init__(self, **options: bool) -> None:
        self._name = ""

    def record(self) -> None:
        self._name = FakeModule.streams[-1].name
        FakeModule.log.append(f"record on {self._name}")

    def query(self) -> bool:
        return bool(self._name)

    def synchronize(self) -> None:
        FakeModule.log.append(f"host waits for {self._name}")

    def wait(self) -> None:
        FakeModule.log.append(f"{FakeModule.streams[-1].name} waits for event of {self._name}")


class FakeModule(_Base or object):
    """`torch.fake_gpu`, with streams and events that note their order."""

    log: ClassVar[list[str]] = []
    streams: ClassVar[list[FakeStream]] = [FakeStream("main")]
    Stream, Event = FakeStream, FakeEvent

    def current_stream(self) -> FakeStream:
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()

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
