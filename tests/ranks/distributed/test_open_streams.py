"""Streams between the ranks of one host, and none to ranks of another one."""

import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
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


def folders_of_the_addresses(folder: str) -> dict[str, int]:
    """Return how many folders rank 0 makes, and how many there are while it waits for others."""
    rank = dist.get_rank()
    axis = Axis("pipeline", (0, 1, 2), rank, dist.group.WORLD)
    found: dict[str, int] = {}

    def count() -> int:
        return sum(1 for _ in Path(folder, str(rank)).iterdir())

    def listen(*arguments: Any) -> str:
        found["made"] = count()
        return listened(*arguments)

    def accept(*arguments: Any) -> Any:
        found["connected"] = count()
        return accepted(*arguments)

    listened, accepted = local_sockets._listen, local_sockets._accept
    Path(folder, str(rank)).mkdir()
    dist.barrier()
    if rank == 2:
        time.sleep(0.3)
        found["waiting"] = sum(1 for _ in Path(folder).glob("*/*"))
    with (
        mock.patch.object(tempfile, "tempdir", str(Path(folder, str(rank)))),
        mock.patch.object(local_sockets, "_listen", listen),
        mock.patch.object(local_sockets, "_accept", accept),
    ):
        open_streams(axis, STREAMS)
    return found


def test_the_folder_of_an_address_exists_only_until_all_ranks_have_connected(
    pool: RankPool, tmp_path: Path
) -> None:
    """Ranks that were killed while they waited for a late rank left their folders behind."""
    assert pool.run(3, folders_of_the_addresses, str(tmp_path)) == [
        {"made": 1, "connected": 0},
        {"made": 1, "connected": 0},
        {"waiting": 0, "connected": 0},
    ]
