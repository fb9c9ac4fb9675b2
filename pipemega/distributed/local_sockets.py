"""Streams of small tensors between two processes of one host, without a helper thread.

Gloo transfers messages in a thread, which shares a lock with the thread that posts sends and
receives, so a small message costs more in thread switches than in copies. Here the sender copies
the tensor into the buffer of a Unix socket, and the receiver reads it in its wait:

    sender      send(): copies --+
    kernel                       +--> buffer of the socket --+
    receiver                                                 +--> receive().wait(): reads

A send never blocks. If the buffer is full, a thread writes the rest, so a rank may send any number
of messages before its peer receives the first.
"""

import ctypes
import os
import queue
import select
import socket
import struct
import tempfile
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.mesh import Axis

# A tag that no other message has.
_TAG = 0x7FFE
_EXCHANGE = "the exchange of socket addresses"
# Longer than any path of a socket.
_ADDRESS_BYTES = 256
_RANK = struct.Struct("q")
# About as long as it takes to wake a thread that sleeps.
_AWAKE_SECONDS = 6e-5
_CLOSED = "Connection closed by peer"
# A lost peer is an error also where the script has set SIGPIPE to end the process. Not on macOS.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)

_open: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


class Work(Protocol):
    """A message that was started: a `dist.Work`, or one of this module."""

    def wait(self, timeout: timedelta = ...) -> object: ...

    def is_completed(self) -> bool: ...


class _Sent:
    """A message that the kernel has."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return True


_SENT = _Sent()
# Longest wait for the end of a thread whose stream is closed.
_JOIN_SECONDS = 1.0


class _Queued:
    """A message that a thread writes; keeps its tensor alive."""

    def __init__(self, tensor: Tensor, rest: memoryview) -> None:
        self._tensor, self.rest = tensor, rest
        self.error: OSError | None = None
        self.written = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the kernel has the message.

        Raises:
            RuntimeError: the peer has closed the connection, or did not receive in time.
        """
        if not self.written.wait(None if timeout is None else timeout.total_seconds()):
            raise _timed_out(timeout, "send")
        if self.error is not None:
            raise RuntimeError(f"{_CLOSED}: {self.error}")

    def is_completed(self) -> bool:
        return self.written.is_set()


class Sender:
    """The sending end of a stream."""

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(None)  # removes the timeout of socket.setdefaulttimeout()
        self._stream = stream
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._last: _Queued | None = None
        _open.add(stream)
        self._threads: list[threading.Thread] = []
        closing = stream, self._queue, os.getpid(), self._threads
        self._close = weakref.finalize(self, _close, *closing)

    def send(self, tensor: Tensor) -> Work:
        """Start sending a contiguous tensor of the host; do not change it until the work is done.

        Raises:
            RuntimeError: the peer has closed the connection.
        """
        data, sent = _bytes_of(tensor), 0
        if not len(data):
            return _SENT
        if self._last is None or self._last.written.is_set():
            try:
                sent = self._stream.send(data, socket.MSG_DONTWAIT | _NO_SIGNAL)
            except BlockingIOError:
                pass
            except OSError as error:
                raise RuntimeError(f"{_CLOSED}: {error}") from None
            if sent == len(data):
                return _SENT
        if self._last is None:
            thread = threading.Thread(
                target=_write, args=(self._stream, self._queue), daemon=True, name="local-send"
            )
            self._threads.append(thread)
            thread.start()
        self._last = _Queued(tensor, memoryview(data).cast("B")[sent:])
        self._queue.put(self._last)
        return self._last


def _write(stream: socket.socket, jobs: "queue.SimpleQueue[_Queued | None]") -> None:
    while (job := jobs.get()) is not None:
        try:
            stream.sendall(job.rest, _NO_SIGNAL)
        except OSError as error:
            job.error = error
        job.written.set()
        del job  # its tensor may be freed now, and not when the thread ends


class _Reading:
    """A message that is read when this rank waits for it."""

    __slots__ = ("_receiver", "data", "done", "tensor")

    def __init__(self, receiver: "Receiver", tensor: Tensor) -> None:
        self._receiver, self.tensor, self.done = receiver, tensor, False
        self.data = _bytes_of(tensor)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Read the messages up to this one.

        Raises:
            RuntimeError: the peer has closed the connection, or has not sent in time.
        """
        if not self.done:
            self._receiver.read_until(self, timeout)

    def is_completed(self) -> bool:
        return self.done


class Receiver:
    """The receiving end of a stream."""

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(None)  # removes the timeout of socket.setdefaulttimeout()
        self._stream = stream
        self._poll = select.poll()
        self._poll.register(stream, select.POLLIN)
        self._timeout: timedelta | None = None
        self._expected: deque[_Reading] = deque()
        _open.add(stream)
        self._close = weakref.finalize(self, _close, stream, None, os.getpid(), ())

    def receive(self, tensor: Tensor) -> Work:
        """Request the next message for a contiguous tensor of the host."""
        if not tensor.nbytes:
            return _SENT
        reading = _Reading(self, tensor)
        self._expected.append(reading)
        return reading

    def read_until(self, last: _Reading, timeout: timedelta | None) -> None:
        """Read the requested messages, in their order, up to `last`."""
        if timeout is not self._timeout:
            self._set_timeout(timeout)
        try:
            if not self._poll.poll(0):
                self._wait_shortly()
                # Not by the timeout of `recv`: each signal would start it again.
                if not self._poll.poll(_milliseconds(timeout)):
                    raise _timed_out(timeout, "recv")
            while not last.done:
                self._read(self._expected[0].data)
                self._expected.popleft().done = True
        except BlockingIOError:
            raise _timed_out(timeout, "recv") from None
        except OSError as error:
            raise RuntimeError(f"{_CLOSED}: {error}") from None

    def _wait_shortly(self) -> None:
        """Wait without sleep: a message that is about to come is read sooner."""
        until = perf_counter() + _AWAKE_SECONDS
        while perf_counter() < until and not self._poll.poll(0):
            os.sched_yield()

    def _read(self, data: "ctypes.Array[ctypes.c_char]") -> None:
        size, have = len(data), 0
        while have < size:
            # One system call waits for the whole message. After a signal it returns less.
            into = memoryview(data).cast("B")[have:] if have else data
            read = self._stream.recv_into(into, size - have, socket.MSG_WAITALL)
            if read == 0:
                raise RuntimeError(_CLOSED)
            have += read

    def _set_timeout(self, timeout: timedelta | None) -> None:
        seconds = 0.0 if timeout is None else max(timeout.total_seconds(), 1e-6)
        packed = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        self._timeout = timeout


def _bytes_of(tensor: Tensor) -> "ctypes.Array[ctypes.c_char]":
    """Return the memory of a contiguous tensor; torch has a buffer interface for few dtypes."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _milliseconds(timeout: timedelta | None) -> float | None:
    return None if timeout is None else timeout.total_seconds() * 1000


def _timed_out(timeout: timedelta | None, operation: str) -> RuntimeError:
    milliseconds = int(_milliseconds(timeout) or 0)
    # As gloo's message, which `comm_errors` translates.
    return RuntimeError(f"Timed out waiting {milliseconds}ms for {operation} operation to complete")


def _close(
    stream: socket.socket,
    jobs: "queue.SimpleQueue[_Queued | None] | None",
    process: int,
    threads: Sequence[threading.Thread],
) -> None:
    if jobs is not None:
        jobs.put(None)
    # The end of a forked process must not end the connection of this one.
    if os.getpid() == process:
        with suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)
        # A thread that frees a tensor while the interpreter ends aborts the process.
        for thread in threads:
            thread.join(_JOIN_SECONDS)
    stream.close()


def break_local_sockets() -> None:
    """Close the connections of this process, so that no other rank waits for it."""
    for stream in list(_open):
        with suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)


def open_streams(axis: Axis, streams: Sequence[tuple[int, int]]) -> list[Sender | Receiver | None]:
    """Connect the streams of this rank.  Collective.

    Args:
        axis: the ranks, with a gloo process group.
        streams: (source, target) of all streams, as ranks of the axis; equal on all ranks.

    Returns:
        for each stream its end on this rank; None if this rank has none, or if the ranks cannot
        connect, as on two hosts or in two containers.

    Raises:
        PipelineError: a rank did not take part; names the ranks that had to.
    """
    if not hasattr(socket, "AF_UNIX"):  # Windows
        return [None] * len(streams)
    own = {at: sum(pair) - axis.rank for at, pair in enumerate(streams) if axis.rank in pair}
    peers = Counter(own.values())
    with named_collective(_EXCHANGE, axis.ranks):
        # The folder of a rank that is killed stays. From here on no rank waits for a late one.
        dist.barrier(axis.group)
    connected: dict[int, list[socket.socket]] = {}
    with ExitStack() as stack:
        server = _server(stack)
        # The lower rank of two listens. No rank waits here before it has sent its address.
        higher = {peer: count for peer, count in peers.items() if peer > axis.rank}
        with ExitStack() as until_connected:
            address = ""
            if server is not None and higher:
                address = _listen(server, _folder(until_connected), sum(higher.values()))
            sent = [_isend(axis, address, peer) for peer in higher]
            for peer, count in peers.items():
                if peer < axis.rank:
                    connected[peer] = _connect(_receive(axis, peer), count, axis.rank)
                    sent.append(_isend(axis, str(len(connected[peer])), peer))
            counts = {peer: int(_receive(axis, peer)) for peer in higher}
        connected |= {peer: [] for peer in counts} if server is None else _accept(server, counts)
    for work in sent:
        work.wait()
    return [
        _end(connected[own[at]], is_source=pair[0] == axis.rank) if at in own else None
        for at, pair in enumerate(streams)
    ]


def _end(connected: list[socket.socket], *, is_source: bool) -> Sender | Receiver | None:
    """Return this rank's end of the next stream between two ranks; both connect them in order."""
    if not connected:
        return None
    return Sender(connected.pop(0)) if is_source else Receiver(connected.pop(0))


def _server(stack: ExitStack) -> socket.socket | None:
    """Return a new socket; None if this process may have none, as in some sandboxes."""
    try:
        return stack.enter_context(socket.socket(socket.AF_UNIX))
    except OSError:
        return None


def _folder(stack: ExitStack) -> Path | None:
    """Return a new folder that only this user can read; None if there is no place for one."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="pipemega-", ignore_cleanup_errors=True)
    except OSError:  # such as a full disk
        return None
    return Path(stack.enter_context(folder))


def _listen(server: socket.socket, folder: Path | None, count: int) -> str:
    """Return the address at which `server` listens; "" if the platform allows none there."""
    if folder is None:
        return ""
    address = str(folder / "socket")
    try:
        server.bind(address)
        server.listen(count)
        address.encode()
    except (OSError, UnicodeEncodeError):  # such as a path that is too long
        return ""
    return address


def _connect(address: str, count: int, rank: int) -> list[socket.socket]:
    """Return `count` connections to `address`, or none if it is not on this host."""
    connected: list[socket.socket] = []
    try:
        for _ in range(count):
            connected.append(socket.socket(socket.AF_UNIX))
            connected[-1].connect(address)
            connected[-1].sendall(_RANK.pack(rank), _NO_SIGNAL)
    except OSError:
        for stream in connected:
            stream.close()
        return []
    return connected


def _accept(server: socket.socket, counts: Mapping[int, int]) -> dict[int, list[socket.socket]]:
    """Return the connections that each rank has made, in its order."""
    accepted: dict[int, list[socket.socket]] = {rank: [] for rank in counts}
    while any(len(accepted[rank]) < count for rank, count in counts.items()):
        stream, _ = server.accept()
        data = stream.recv(_RANK.size, socket.MSG_WAITALL)
        if len(data) == _RANK.size and counts[rank := _RANK.unpack(data)[0]]:
            accepted[rank].append(stream)
        else:  # a connection of a rank that could not make all of them, and uses none
            stream.close()
    return accepted


def _isend(axis: Axis, text: str, peer: int) -> dist.Work:
    message = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    data = text.encode()
    message[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    with named_collective(_EXCHANGE, (axis.ranks[axis.rank], axis.ranks[peer])):
        work = dist.isend(message, axis.ranks[peer], group=axis.group, tag=_TAG)
    assert work is not None
    return work


def _receive(axis: Axis, peer: int) -> str:
    message = torch.empty(_ADDRESS_BYTES, dtype=torch.uint8)
    with named_collective(_EXCHANGE, (axis.ranks[peer], axis.ranks[axis.rank])):
        dist.recv(message, axis.ranks[peer], group=axis.group, tag=_TAG)
    return bytes(message.tolist()).rstrip(b"\0").decode()
