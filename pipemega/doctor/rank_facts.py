"""What one rank knows about itself: versions, device, memory, variables, config."""

import hashlib
import os
import platform
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipemega.config import Config
from pipemega.config.launch_variables import launch_variables
from pipemega.distributed.mesh import launched_rank, launched_world_size, pick_device
from pipemega.distributed.mixed_mesh import pick_mixed_device
from pipemega.distributed.topology import Topology
from pipemega.errors import MeshError
from pipemega.startup.version import __version__

# Variables that change how ranks communicate; they should be equal on all ranks.
_NETWORK_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS")


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank; only JSON values.

    Args:
        versions: name -> version; "none" if there is none.
        device: "cpu" or "cuda:1"; empty if there is none for this rank.
        device_error: why there is no device for this rank.
        device_name, device_id: of a GPU; the id is unique in the cluster.
        device_free, device_total: bytes of a GPU.
        host_free: bytes of host memory that processes can still get.
        shared_free: free bytes of /dev/shm; None without it.
        network: variables of NCCL and gloo.
        config: hash of the config with all defaults; empty without a config.
    """

    host: str
    pid: int
    versions: dict[str, str]
    device: str = ""
    device_error: str = ""
    device_name: str = ""
    device_id: str = ""
    device_free: int | None = None
    device_total: int | None = None
    host_free: int | None = None
    shared_free: int | None = None
    omp_threads: str = ""
    network: dict[str, str] = field(default_factory=dict)
    config: str = ""


def read_facts(config: Config | None) -> RankFacts:
    """Return the facts of this process; it uses its GPU from now on.

    Args:
        config: of the run; its `mesh.device` selects the device.
    """
    device, error = None, ""
    try:
        device = _device_of(config)
    except MeshError as problem:
        error = str(problem)
    network = {k: v for k, v in os.environ.items() if k.startswith(_NETWORK_VARIABLES)}
    text = "" if config is None else config.to_json()
    return RankFacts(
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=_versions(),
        device="" if device is None else str(device),
        device_error=error,
        host_free=host_free(),
        shared_free=_shared_free(),
        omp_threads=os.environ.get("OMP_NUM_THREADS", ""),
        network=dict(sorted(network.items())),
        config=hashlib.sha256(text.encode()).hexdigest()[:12] if text else "",
        **(_gpu(device) if device is not None and device.type == "cuda" else {}),
    )


def _device_of(config: Config | None) -> torch.device:
    """Return the device of this rank.

    Raises:
        MeshError: there is none.
    """
    if config is None or not config.mesh.mixed_devices:
        return pick_device("auto" if config is None else config.mesh.first_device)
    world, mesh = launched_world_size(), config.mesh
    topology = Topology.fit(world, mesh.pipeline, mesh.tensor, mesh.data)
    wishes = [mesh.mixed_devices[topology.coordinate(r).pipeline] for r in range(world)]
    # The ranks of a node follow one another.
    rank, host = launched_rank(), socket.gethostname()
    first = rank - launch_variables().number("LOCAL_RANK", 0)
    hosts = [host if first <= r <= rank else "" for r in range(world)]
    return pick_mixed_device(rank, wishes, hosts)


def _versions() -> dict[str, str]:
    return {
        "pipemega": __version__,
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": _nccl(),
        "driver": _driver(),
        "Python": platform.python_version(),
    }


def _nccl() -> str:
    if not torch.cuda.is_available():
        return "none"
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _driver() -> str:
    """Return the version of NVIDIA's kernel driver, without starting a process."""
    with suppress(OSError):
        text = Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
        return text or "none"
    return "none"


def _gpu(device: torch.device) -> dict[str, Any]:
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    unique = getattr(properties, "uuid", None)
    return {
        "device_name": properties.name,
        "device_id": str(unique) if unique else f"{socket.gethostname()} {device.index}",
        "device_free": free,
        "device_total": total,
    }


def host_free(read: Callable[[str], str] = lambda path: Path(path).read_text()) -> int | None:
    """Return the bytes of host memory that are still available, within the limit of the cgroup.

    Args:
        read: path of a file of the kernel -> its text.
    """
    limits: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        line = next(
            row for row in read("/proc/meminfo").splitlines() if row.startswith("MemAvailable:")
        )
        limits.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # also "max": no limit
        limit = int(read("/sys/fs/cgroup/memory.max"))
        limits.append(max(0, limit - int(read("/sys/fs/cgroup/memory.current"))))
    return min(limits, default=None)


def _shared_free() -> int | None:
    with suppress(OSError):
        usage = os.statvfs("/dev/shm")
        return usage.f_bavail * usage.f_frsize
    return None
