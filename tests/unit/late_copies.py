"""Host memory with the asynchronous copies of a CUDA device, on a CPU."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipemega.distributed.host_memory import HostMemory


class LateHostMemory(HostMemory):
    """Copies to the host arrive when somebody waits for their event, at the latest moment.

    Before that their target holds nan (numbers of integer dtypes: 77).  A copy to the device must
    find its source unchanged until its event.  Copies on the side stream read their source when
    somebody waits for their event, at the latest moment too.  The copies of all instances are in
    one order; `reset` starts a test.
    """

    log: list[tuple[str, str]]
    """(name of the thread, what it did): see the calls of `note`."""
    _copies: list[tuple[Tensor, Tensor, Tensor]]
    """(target, source, value that the source must have at the event)."""
    _hosts: set[int]
    _on_side_stream = False
    _lock = threading.RLock()

    @classmethod
    def reset(cls, device: torch.device) -> "LateHostMemory":
        cls.log, cls._copies, cls._hosts = [], [], set()
        return cls(device)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        memory = super().empty(*shape, dtype=dtype)
        _spoil(memory)
        self._hosts.add(memory.untyped_storage().data_ptr())
        return memory

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self._lock:
            note(self, "copies")
            if self._on_side_stream:
                _spoil(target)
                self._copies.append((target, source, source))
                return
            # What the device reads at this point of the stream.
            value = source.detach().to(target.dtype, copy=True)
            if target.untyped_storage().data_ptr() in self._hosts:
                _spoil(target)
                self._copies.append((target, value, value))
            else:
                target.copy_(value)
                self._copies.append((value, source.detach(), source.detach().clone()))

    def record(self) -> "LateEvent":
        note(self, "records")
        return LateEvent(self, len(self._copies))

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self._on_side_stream = True
        yield
        self._on_side_stream = False

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._hosts

    def arrive(self, number: int) -> None:
        """Complete the first `number` copies since `reset`."""
        with self._lock:
            for at, (target, source, expected) in enumerate(self._copies[:number]):
                assert torch.equal(source, expected), "changed before the copy from it was complete"
                target.copy_(source)
                self._copies[at] = 3 * (torch.empty(0),)


class LateEvent:
    """Has not occurred before the host waits for it."""

    def __init__(self, memory: LateHostMemory, number: int) -> None:
        self._memory, self._number, self._occurred = memory, number, False

    def query(self) -> bool:
        return self._occurred

    def synchronize(self) -> None:
        note(self._memory, "synchronizes")
        self._memory.arrive(self._number)
        self._occurred = True

    def wait(self) -> None:
        note(self._memory, "waits")
        self._memory.arrive(self._number)


def note(memory: LateHostMemory, what: str) -> None:
    memory.log.append((threading.current_thread().name, what))


def _spoil(tensor: Any) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
