"""Connect the launched ranks: torch.distributed with the variables of the launcher."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pipemega.config.launch_variables import launch_variables
from pipemega.distributed.rendezvous import agree_on_incarnation
from pipemega.errors import MeshError


def connect_ranks(backend: str, timeout: timedelta) -> None:
    """Initialize torch.distributed with the variables of the launcher; collective.

    Without device_id: with it, NCCL runs all single sends and receives of a group in one queue, and
    a receive that is posted early blocks the sends after it.

    Raises:
        MeshError: some are missing or wrong, or the port of the store is taken.
    """
    launch = launch_variables()
    values = launch.values
    if problem := launch.problem():
        raise MeshError("variables of the launcher: {}; {}".format(*problem))
    host = values["MASTER_ADDR"]
    address = f"{f'[{host}]' if ':' in host else host}:{values['MASTER_PORT']}"  # [] for IPv6
    given: dict[str, Any] = {"rank": int(values["RANK"]), "world_size": int(values["WORLD_SIZE"])}
    try:
        if "TORCHELASTIC_RESTART_COUNT" in os.environ:
            store = _fresh_store(timeout)
            dist.init_process_group(backend, timeout=timeout, store=store, **given)
        else:
            dist.init_process_group(backend, f"tcp://{address}", timeout=timeout, **given)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise MeshError(
            f"rank {given['rank']}: the port of the store, {address}, is used by another process: "
            "set MASTER_PORT to a free port, the same on all ranks"
        ) from error


def _fresh_store(timeout: timedelta) -> Any:
    """Return torchrun's store with a new prefix for each restart: ranks never read stale keys."""
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    incarnation = agree_on_incarnation(store, rank, world_size, timeout.total_seconds())
    return dist.PrefixStore(f"run {incarnation}", store)  # type: ignore[attr-defined]
