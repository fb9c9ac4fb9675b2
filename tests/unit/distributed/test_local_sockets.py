"""Streams of tensors between processes of one host."""

import os
import signal
import socket
import tempfile
import threading
import time
import weakref
from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import pytest
import torch

from pipemega.distributed import local_sockets
from pipemega.distributed.local_sockets import Receiver, Sender, break_local_sockets

SECOND = timedelta(seconds=1)


@pytest.fixture
def stream():
    source, target = socket.socketpair()
    return Sender(source), Receiver(target)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor([1.5, -2.0]).bfloat16(),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.arange(1 << 20),
    ],
    ids=["float", "bfloat16", "scalar", "empty", "larger than the buffer"],
)
def test_a_message_arrives_with_its_bytes(stream, tensor):
    sender, receiver = stream
    sent, result = sender.send(tensor), torch.empty_like(tensor)
    receiver.receive(result).wait(SECOND)
    sent.wait(SECOND)
    assert sent.is_completed()
    assert torch.equal(result, tensor)


def test_sends_never_block_and_messages_keep_their_order(stream):
    """More than the buffer holds, before the first is received; waits in any order."""
    sender, receiver = stream
    sent = [sender.send(torch.full((16384,), float(number))) for number in range(40)]
    assert not sent[-1].is_completed()
    results = [torch.empty(16384) for _ in sent]
    works = [receiver.receive(result) for result in results]
    works[30].wait(SECOND)
    assert [work.is_completed() for work in works] == [True] * 31 + [False] * 9
    for work in (*works, *sent):
        work.wait(SECOND)
    assert [result.unique().tolist() for result in results] == [[number] for number in range(40)]
    # The thread is done: the next message is written directly again.
    assert sender.send(torch.ones(1)).is_completed()


def test_a_small_message_is_copied_when_it_is_sent(stream):
    sender, receiver = stream
    x, y = torch.ones(2), torch.empty(2)
    assert sender.send(x).is_completed()
    x.zero_()
    receiver.receive(y).wait(SECOND)
    assert y.tolist() == [1.0, 1.0]


def test_a_message_that_does_not_come_times_out(stream):
    sender, receiver = stream
    late = receiver.receive(torch.empty(2))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out waiting 50ms for recv operation"):
        late.wait(timedelta(milliseconds=50))
    assert 0.04 < time.monotonic() - started < 5
    sender.send(torch.ones(2))
    late.wait(SECOND)
    assert late.tensor.tolist() == [1.0, 1.0]


def test_a_send_that_nobody_receives_times_out(stream):
    with pytest.raises(RuntimeError, match="Timed out waiting 50ms for send operation"):
        stream[0].send(torch.ones(1 << 20)).wait(timedelta(milliseconds=50))


@pytest.mark.parametrize("how", ["the peer ends", "break_local_sockets"])
def test_a_broken_connection_ends_both_sides(how):
    source, target = socket.socketpair()
    sender, receiver = Sender(source), Receiver(target)
    queued, late = sender.send(torch.ones(1 << 20)), receiver.receive(torch.empty(1 << 21))
    if how == "the peer ends":
        target.shutdown(socket.SHUT_RDWR)
    else:
        break_local_sockets()
    for work in (queued, late):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            work.wait(SECOND)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        sender.send(torch.ones(1))


def test_a_lost_peer_is_an_error_where_the_script_has_changed_sigpipe(stream):
    """With the default action of SIGPIPE, the rank ended without a message."""
    seen = []
    old = signal.signal(signal.SIGPIPE, lambda *_: seen.append("SIGPIPE"))
    try:
        queued = stream[0].send(torch.ones(1 << 20))
        stream[1]._close()
        for send in (lambda: queued.wait(SECOND), lambda: stream[0].send(torch.ones(1))):
            with pytest.raises(RuntimeError, match="Connection closed by peer"):
                send()
    finally:
        signal.signal(signal.SIGPIPE, old)
    assert seen == []


def test_unused_streams_are_closed():
    source, target = socket.socketpair()
    sender, receiver = Sender(source), Receiver(target)
    sender.send(torch.ones(1 << 20))  # the thread waits
    del sender, receiver
    assert source.fileno() == target.fileno() == -1


def test_the_deadline_holds_while_signals_come(stream):
    """Each signal started the timeout of the system call again."""
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    late = threading.Timer(5, stream[0].send, [torch.ones(2)])
    late.start()
    try:
        with pytest.raises(RuntimeError, match="Timed out waiting 100ms"):
            stream[1].receive(torch.empty(2)).wait(timedelta(milliseconds=100))
    finally:
        late.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_the_default_timeout_of_sockets_does_not_count():
    source, target = socket.socketpair()
    source.settimeout(0.05)
    target.settimeout(0.05)
    sender, receiver = Sender(source), Receiver(target)
    sent, result = sender.send(torch.ones(1 << 20)), torch.empty(1 << 20)
    time.sleep(0.1)
    receiver.receive(result).wait(SECOND)
    sent.wait(SECOND)
    assert result.unique().tolist() == [1.0]


def test_a_forked_process_leaves_the_connection_open():
    """The end of a process that the user had forked shut the connection of the rank down."""
    source, target = socket.socketpair()
    sender, receiver, forked = Sender(source), Receiver(target), Sender(source.dup())
    with mock.patch.object(os, "getpid", return_value=0):
        forked._close()
    sender.send(torch.ones(2))
    receiver.receive(result := torch.empty(2)).wait(SECOND)
    assert result.tolist() == [1.0, 1.0]


def test_connections_of_a_rank_that_gave_up_are_not_used(tmp_path):
    """Rank 1 could not make all of its connections; rank 2 waited for ever."""
    with socket.socket(socket.AF_UNIX) as server:
        address = local_sockets._listen(server, tmp_path, 5)
        for stream in local_sockets._connect(address, 2, 1):
            stream.close()
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(address)
        (own,) = local_sockets._connect(address, 1, 2)
        accepted = local_sockets._accept(server, {1: 0, 2: 1})
        assert accepted[1] == []
        with accepted[2][0] as other, own:
            own.sendall(b"x")
            assert other.recv(1) == b"x"


def test_without_a_temporary_folder_there_is_no_address():
    with (
        mock.patch.object(tempfile, "mkdtemp", side_effect=FileNotFoundError),
        ExitStack() as stack,
    ):
        folder = local_sockets._folder(stack)
    with socket.socket(socket.AF_UNIX) as server:
        assert local_sockets._listen(server, folder, 1) == ""


def test_where_unix_sockets_are_forbidden_there_are_no_connections():
    """As in a service with systemd's RestrictAddressFamilies=AF_INET: the run ended."""
    with mock.patch.object(socket, "socket", side_effect=PermissionError), ExitStack() as stack:
        assert local_sockets._server(stack) is None
        assert local_sockets._connect("/tmp/socket", 1, 0) == []


def test_an_address_of_another_host_gives_no_connection(tmp_path):
    assert local_sockets._connect(str(tmp_path / "missing"), 2, 0) == []
    with socket.socket(socket.AF_UNIX) as server:
        assert local_sockets._listen(server, tmp_path / ("long" * 40), 1) == ""
    assert local_sockets._connect("", 1, 0) == []


def test_a_closed_stream_leaves_no_thread_and_no_tensor():
    """A thread that frees a tensor while the interpreter ends aborts the process."""
    source, target = socket.socketpair()
    sender, receiver = Sender(source), Receiver(target)
    tensor = torch.ones(1 << 20)
    kept = weakref.ref(tensor)
    sent, result = sender.send(tensor), torch.empty_like(tensor)
    receiver.receive(result).wait(SECOND)
    sent.wait(SECOND)
    assert "local-send" in {thread.name for thread in threading.enumerate()}
    del tensor, sent, sender
    assert "local-send" not in {thread.name for thread in threading.enumerate()}
    assert kept() is None
