"""Connects the ranks before any process group exists."""

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipemega.doctor.launch import Launch
from pipemega.errors import MeshError

_POLL_SECONDS = 0.1


def open_store(launch: Launch, seconds: float) -> Any:
    """Return the store of all ranks; None for one rank.

    Args:
        seconds: how long to wait for the process that hosts the store.

    Raises:
        MeshError: the store cannot be reached, or its port is taken.
    """
    if launch.world_size == 1:
        return None
    host, port = launch.variables["MASTER_ADDR"], int(launch.variables["MASTER_PORT"])
    hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = launch.rank == 0 and not hosted_by_torchrun
    if not is_host:
        _wait_for_host(launch.rank, host, port, seconds)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=is_host,
            timeout=timedelta(seconds=seconds),
            # Otherwise rank 0 waits for all ranks here, and could not name those that do not come.
            wait_for_workers=False,
            # The process group opens a second store at this port.
            multi_tenant=True,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise MeshError(
            f"rank {launch.rank} cannot open the store at {host}:{port}: {reason}"
        ) from error
    return dist.PrefixStore("pipemega/doctor", store)  # type: ignore[attr-defined]


def _wait_for_host(rank: int, host: str, port: int, seconds: float) -> None:
    """Wait until something listens at the address of the store; torch's own wait prints stacks.

    Raises:
        MeshError: nothing does.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, port), timeout=seconds):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise MeshError(
                    f"rank {rank}: no store at {host}:{port} within {seconds:g} s "
                    f"({error.strerror or error})"
                ) from error
        time.sleep(_POLL_SECONDS)
