"""Connect the launched ranks: torch.distributed with the variables of the launcher."""

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pipemega.config.launch_variables import LaunchVariables, launch_variables
from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.rendezvous import agree_on_incarnation
from pipemega.errors import MeshError

_POLL_SECONDS = 0.1


def connect_ranks(backend: str, timeout: timedelta) -> None:
    """Initialize torch.distributed with the variables of the launcher; collective.

    Without device_id: with it, NCCL runs all single sends and receives of a group in one queue, and
    a receive that is posted early blocks the sends after it.

    Raises:
        MeshError: some are missing or wrong, or the ranks do not find each other.
        PipelineError: a rank found the store, and does not create its process group.
    """
    launch = checked_launch()
    rank, size = int(launch.values["RANK"]), int(launch.values["WORLD_SIZE"])
    store = launch_store(launch, timeout)
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        # A new prefix for each restart: ranks never read stale keys.
        incarnation = agree_on_incarnation(store, rank, size, timeout.total_seconds())
        store = dist.PrefixStore(f"run {incarnation}", store)  # type: ignore[attr-defined]
    with named_collective(f"rank {rank} in the creation of the process group", range(size)):
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)


def checked_launch() -> LaunchVariables:
    """Return the variables of the launcher.

    Raises:
        MeshError: some are missing or wrong.
    """
    launch = launch_variables()
    if launch.launcher != "none" and (problem := launch.problem()):
        raise MeshError("variables of the launcher: {}; {}".format(*problem))
    return launch


def launch_store(launch: LaunchVariables, timeout: timedelta) -> Any:
    """Return the store of torchrun; with another launcher that of rank 0, when all ranks have come.

    Raises:
        MeshError: it cannot be reached, its port is taken, or ranks do not come in time.
    """
    host, port = launch.values["MASTER_ADDR"], int(launch.values["MASTER_PORT"])
    rank, size = int(launch.values["RANK"]), int(launch.values["WORLD_SIZE"])
    address = f"{f'[{host}]' if ':' in host else host}:{port}"  # [] for IPv6
    try:
        if rank and not is_store_of_torchrun():
            wait_for_store(rank, host, port, timeout.total_seconds())
        return next(rendezvous(f"tcp://{address}", rank, size, timeout=timeout))[0]
    except (dist.DistStoreError, dist.DistNetworkError, MeshError) as error:
        if "EADDRINUSE" in str(error):
            raise MeshError(
                f"rank {rank}: the port of the store, {address}, is used by another process: "
                "set MASTER_PORT to a free port, the same on all ranks"
            ) from None
        reason = str(error).splitlines()[0].rstrip(".")
        raise MeshError(
            f"rank {rank} of {size}: no connection of all ranks through the store at {address} "
            f"within {timeout.total_seconds():g} s (mesh.timeout_seconds): {reason}; check that "
            "all ranks were started, and MASTER_ADDR and MASTER_PORT (pipemega doctor)"
        ) from None


def is_store_of_torchrun() -> bool:
    """Return whether torchrun hosts the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def wait_for_store(rank: int, host: str, port: int, seconds: float) -> None:
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
