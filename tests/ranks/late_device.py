"""Gloo works that behave as NCCL's: `wait` returns at once, and a stream waits for them.

    host     isend  irecv  work.wait()  ..  all_reduce  ..  synchronize(): polls
    stream                 waits for the message        waits for the sum     event

The data of a receive may arrive after the host has used it, so results have no meaning: for tests
of ranks that wait for another one in vain.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed import device_waits
from pipemega.distributed.device_waits import DeviceWaits
from pipemega.fault_tolerance import error_propagation
from pipemega.pipeline import transport

_FOREVER = timedelta(minutes=10)


class Stream:
    """Runs calls in order, in a thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, call: Callable[[], Any]) -> None:
        self._calls.put(call)

    def record(self) -> "Recorded":
        event = Recorded()
        self.put(event.occurred.set)
        return event

    def _run(self) -> None:
        # After an error the process breaks its connections.
        with suppress(RuntimeError):
            while True:
                self._calls.get()()


class Recorded:
    """An event of a `Stream`."""

    def __init__(self) -> None:
        self.occurred = threading.Event()

    def query(self) -> bool:
        return self.occurred.is_set()

    def synchronize(self) -> None:
        raise AssertionError("the host would be blocked without a deadline")


class LateWork:
    """The work of an operation that the stream starts, and for which the stream waits."""

    def __init__(self, stream: Stream, start: Callable[[], dist.Work]) -> None:
        self._stream, self._works = stream, []
        stream.put(lambda: self._works.append(start()))

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._stream.put(lambda: self._works[0].wait(_FOREVER))
        return True


@contextmanager
def late_device(timeout: timedelta) -> Iterator[None]:
    """Make the operations of the block return `LateWork`, and mark the waits for them."""
    stream, isend, irecv, all_reduce = Stream(), dist.isend, dist.irecv, dist.all_reduce

    def late_send(*args: Any, **options: Any) -> LateWork:
        return LateWork(stream, lambda: isend(*args, **options))

    def late_receive(*args: Any, tag: int, **options: Any) -> Any:
        if tag == error_propagation._UNUSED_TAG:  # on the host
            return irecv(*args, tag=tag, **options)
        return LateWork(stream, lambda: irecv(*args, tag=tag, **options))

    def late_sum(tensor: Tensor, *args: Any, **options: Any) -> None:
        if not tensor.is_floating_point():  # a count, on the host
            all_reduce(tensor, *args, **options)
        else:
            LateWork(stream, lambda: all_reduce(tensor, *args, async_op=True, **options)).wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "LOCAL_BYTES", -1)  # no local sockets
        patch.setattr(dist, "isend", late_send)
        patch.setattr(dist, "irecv", late_receive)
        patch.setattr(dist, "all_reduce", late_sum)
        patch.setattr(device_waits, "_waits", DeviceWaits(timeout, stream.record))
        yield
