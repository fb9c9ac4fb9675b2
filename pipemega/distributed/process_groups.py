"""Connect the launched ranks: torch.distributed with the variables of the launcher.

The backends of a process group, one for each type of device.

Whether a GPU starts the kernels of several streams in the order in which they were launched.

Abort the communicators of this process, so that no kernel waits for a lost rank.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pipemega.config.launch_variables import LaunchVariables, launch_variables
from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.topology import agree_on_incarnation
from pipemega.errors import MeshError

_POLL_SECONDS = 0.1


def connect_ranks(backend: str, timeout: timedelta) -> None:
    """Initialize torch.distributed with the variables of the launcher; collective.

    device_id is not set: with it, NCCL runs all single sends and receives of a group in one queue,
    and a receive that is posted early blocks the sends after it.

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
    """Return the store of torchrun, or of rank 0 with another launcher, when all ranks have joined.

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


def backend_names(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of the backend for each type of device: {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return dict(entry.split(":", 1) for entry in config.split(","))


def runs_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether the group uses gloo for tensors on the host."""
    return backend_names(group).get("cpu") == "gloo"


def sends_by_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether collectives of tensors on `device` use gloo; False without a group."""
    return group is not None and backend_names(group).get(device.type) == "gloo"


def goes_through_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether messages of tensors on `device` are copied to the host.

    So it is if some ranks of the group are on CPUs: they have gloo in common, and no other backend.
    """
    if group is None or device.type in ("cpu", "meta"):
        return False
    return device.type not in backend_names(group)


def message_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Return the device of tensors that the group can transfer, on a rank on `device`."""
    return torch.device("cpu") if goes_through_host(group, device) else device


def backends_except_gloo(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of the group other than gloo: `abort` ends their operations."""
    return [
        _unwrapped(group._get_backend(torch.device(device)))
        for device, name in backend_names(group).items()
        if name != "gloo"
    ]


def nccl_backend(group: dist.ProcessGroup) -> Any:
    """Return the ProcessGroupNCCL of the group; None if it has none."""
    if backend_names(group).get("cuda") != "nccl":
        return None
    return _unwrapped(group._get_backend(torch.device("cuda")))


def nccl_options(timeout: timedelta, *, urgent: bool = False, max_ctas: int = 0) -> Any:
    """Return the options of a new ProcessGroupNCCL.

    Args:
        urgent: its kernels start before kernels of other streams that wait for multiprocessors.
        max_ctas: most blocks (CTAs) of one kernel: a pending receive occupies one multiprocessor
            for each. 0: NCCL decides.
    """
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    options._timeout = timeout
    if max_ctas:
        options.config.min_ctas, options.config.max_ctas = 1, max_ctas
    return options


def _unwrapped(backend: Any) -> Any:
    """Return the backend within the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL adds.

    The wrapper has no timeout to set, and cannot abort several communicators at once.
    """
    return getattr(backend, "wrapped_pg", backend)


_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"

# From this compute capability on Megatron-LM does not require the variable (Blackwell).
_ORDERED_CAPABILITY = 10


def launch_order_advice(device: torch.device, tensor_ranks: int) -> str | None:
    """Return how to make tensor-parallel communication overlap with computation; None if it does.

    For runs without a pipeline: with one queue, the messages of most plans hang (docs/gpu.md).

    In backward the all-reduce of an input gradient is launched just before the matrix product of
    the weight gradient, on another stream. If the product is started first, it takes all
    multiprocessors, and the all-reduce runs after it. With one queue between host and GPU, kernels
    start in the order of their launch. CUDA reads the number of queues when a process first uses
    the GPU, so it has to be set before.

    Source: Megatron-LM requires the same setting for tensor parallelism before Blackwell.
    """
    if device.type != "cuda" or tensor_ranks == 1 or torch.version.hip is not None:
        return None
    value = os.environ.get(_VARIABLE)
    if value == "1" or torch.cuda.get_device_capability(device)[0] >= _ORDERED_CAPABILITY:
        return None
    return (
        f"{_VARIABLE} is {value or 'not set'}, and mesh.tensor is {tensor_ranks}: on this GPU the "
        "all-reduce of an input gradient may start only after the weight gradient that it should "
        f"overlap with. Start the job with {_VARIABLE}=1; this changes the speed, not the results"
    )


def device_thread(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Return a daemon thread, not started, that uses the CUDA device of the calling thread.

    torch gives a new thread GPU 0, on which it would create a context of its own.
    """
    cuda = torch.cuda
    device = cuda.current_device() if cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> None:
        if device is not None:
            cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)


# Longest time for an abort. One that is stuck may last for the timeout of its group; the process
# then ends without it.
ABORT_SECONDS = 3.0

_one_at_a_time = threading.Lock()


def abort_communicators() -> bool:
    """Abort all communicators, except gloo's.

    All at once: communicators that are aborted one after another may wait for each other. The
    calls run in a thread that nothing waits for afterwards.

    Returns:
        whether all are aborted within a few seconds.
    """
    backends = _backends()
    if not backends:
        return True
    thread = device_thread(_abort, "abort", backends)
    thread.start()
    thread.join(ABORT_SECONDS)
    return not thread.is_alive()


def _backends() -> list[Any]:
    groups = list(dist.distributed_c10d._world.pg_map)
    return [backend for group in groups for backend in backends_except_gloo(group)]


def _abort(backends: list[Any]) -> None:
    if not _one_at_a_time.acquire(blocking=False):
        return
    try:
        # As torch's _abort_process_group(), which also forgets the groups and their store: the
        # report of the error still needs them.
        grouped = hasattr(backends[0], "_group_start")
        if grouped:
            backends[0]._group_start()
        for backend in backends:
            with suppress(RuntimeError):
                backend.abort()
        if grouped:
            backends[0]._group_end()
    finally:
        _one_at_a_time.release()
