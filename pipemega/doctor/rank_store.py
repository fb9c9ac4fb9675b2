"""Connects the ranks before any process group exists."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipemega.distributed.connect_ranks import is_store_of_torchrun, wait_for_store
from pipemega.doctor.launch import Launch
from pipemega.errors import MeshError


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
    is_host = launch.rank == 0 and not is_store_of_torchrun()
    if not is_host:
        wait_for_store(launch.rank, host, port, seconds)
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
