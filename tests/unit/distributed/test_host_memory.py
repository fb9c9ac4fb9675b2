"""Host memory for copies to and from a device; CUDA is replaced by fakes."""

import gc
import mmap
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pipemega.distributed import host_memory
from pipemega.distributed.host_memory import HostCopy, HostMemory
from pipemega.errors import PipemegaError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class FakeCudart:
    """Records which memory is pinned."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        assert flags == 0
        if not self.error:
            self.pinned[start] = size
        return self.error

    def cudaHostUnregister(self, start: int) -> int:
        del self.pinned[start]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(host_memory, "_cudart", lambda: fake)
    return fake


def test_on_a_cpu_nothing_is_pinned_and_a_copy_is_complete_at_once() -> None:
    memory = HostMemory(CPU)
    source = torch.arange(6.0).view(2, 3)
    assert not memory.pins
    assert memory.pinned(source) is source
    copy = HostCopy(memory, source)
    assert copy.is_complete
    assert torch.equal(copy.wait(), source)
    assert copy.wait().data_ptr() != source.data_ptr()
    with memory.side_stream():
        event = memory.record()
    event.wait()
    event.synchronize()
    assert event.query()


def test_the_host_memory_of_the_meta_device_is_not_allocated() -> None:
    memory = HostMemory(torch.device("meta"))
    assert memory.empty(1 << 50, dtype=torch.float32).device.type == "meta"
    # Reading the copy would raise an error.
    copy = HostCopy(memory, torch.empty(3, device="meta")).wait()
    with pytest.raises(NotImplementedError):
        copy.tolist()


def test_large_buffers_are_pinned_in_exactly_their_pages_and_unpinned_when_freed(
    cudart: FakeCudart,
) -> None:
    memory = HostMemory(CUDA)
    assert memory.pins
    # 5 MiB and a few bytes, which torch's allocator would round up to 8 MiB.
    buffer = memory.empty(5, (1 << 18) + 1, dtype=torch.float32)
    assert (buffer.shape, buffer.dtype) == ((5, (1 << 18) + 1), torch.float32)
    ((start, size),) = cudart.pinned.items()
    assert start == buffer.data_ptr()
    assert start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert 0 <= size - buffer.nbytes < mmap.PAGESIZE
    buffer.fill_(2.0)
    view = buffer[4]
    del buffer
    gc.collect()
    assert start in cudart.pinned
    assert view.sum() == 2.0 * view.numel()
    del view
    gc.collect()
    assert cudart.pinned == {}


def test_pinning_can_be_switched_off(cudart: FakeCudart) -> None:
    memory = HostMemory(CUDA, pin=False)
    source = torch.ones(2)
    assert memory.pinned(source) is source
    buffer = memory.empty(1 << 20, dtype=torch.float64)
    assert buffer.device.type == "cpu"
    assert cudart.pinned == {}


def test_the_error_of_memory_that_cannot_be_pinned_gives_its_size_and_the_ways_out(
    cudart: FakeCudart,
) -> None:
    cudart.error = 2
    with pytest.raises(PipemegaError) as caught:
        HostMemory(CUDA).empty(3 << 20, dtype=torch.uint8)
    message = str(caught.value)
    assert message.startswith("3.0 MiB of host memory cannot be pinned (CUDA error 2)")
    for key in ("ulimit -l", "zero_optimization.offload_optimizer.pin_memory", "checkpoint.async"):
        assert key in message
    # What was not pinned is not unpinned.
    gc.collect()


class FakeStream:
    """Records what it waits for."""

    def __init__(self, log: list[tuple[str, Any]], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append((self.name, f"waits for {other.name}"))


def test_copies_on_the_side_stream_begin_after_the_work_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[str, Any]] = []
    streams = [FakeStream(log, "compute")]

    class FakeEvent:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self) -> None:
            log.append((streams[-1].name, "records"))

    @contextmanager
    def on(stream: FakeStream) -> Any:
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream(log, "side"))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    memory = HostMemory(CUDA)
    with memory.side_stream():
        inside = memory.record()
    outside = memory.record()
    assert log == [("side", "waits for compute"), ("side", "records"), ("compute", "records")]
    assert isinstance(inside, FakeEvent)
    assert isinstance(outside, FakeEvent)
    with memory.side_stream():
        assert streams[-1] is memory._side
