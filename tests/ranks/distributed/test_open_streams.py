"""Streams between the ranks of one host, and none to ranks of another one."""

import socket
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipemega.distributed import local_sockets
from pipemega.distributed.local_sockets import Receiver, Sender, open_streams
from pipemega.distributed.mesh import Axis
from tests.ranks.pool import RankPool

# Two streams between ranks 0 and 1, one way each; two from rank 1 to 2; one from rank 2 to 0.
STREAMS = [(0, 1), (1, 0), (1, 2), (1, 2), (2, 0)]


def exchange(elsewhere: int | None) -> list[tuple[str, float]]:
    """Send the number of each stream over it; return the kind of each end, and what came."""
    rank = dist.get_rank()
    axis = Axis("pipeline", (0, 1, 2), rank, dist.group.WORLD)

    def connect(address: str, count: int, own: int) -> list[socket.socket]:
        return [] if own == elsewhere else found(address, count, own)

    found = local_sockets._connect
    with mock.patch.object(local_sockets, "_connect", connect):
        ends = open_streams(axis, STREAMS)
    for number, end in enumerate(ends):
        if isinstance(end, Sender):
            end.send(torch.tensor(float(number)))
    received: list[tuple[str, float]] = []
    for end in ends:
        value = torch.tensor(-1.0)
        if isinstance(end, Receiver):
            end.receive(value).wait(timedelta(seconds=20))
        received.append((type(end).__name__, value.item()))
    return received


@pytest.mark.parametrize("elsewhere", [None, 2])
def test_each_stream_connects_its_two_ranks(pool: RankPool, elsewhere: int | None) -> None:
    """Rank 2 cannot connect to ranks 0 and 1 if it is on another host."""
    found = pool.run(3, exchange, elsewhere)
    for number, (source, target) in enumerate(STREAMS):
        for rank in range(3):
            expected = ("NoneType", -1.0)
            if rank in (source, target) and elsewhere not in (source, target):
                expected = ("Sender", -1.0) if rank == source else ("Receiver", float(number))
            assert found[rank][number] == expected
