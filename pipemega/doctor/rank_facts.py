"""What one rank knows about itself: versions, device, memory, variables, config.

Compares the facts of all ranks: versions, devices, memory, variables, config.
"""

import hashlib
import os
import platform
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipemega.config import Config
from pipemega.config.launch_variables import launch_variables
from pipemega.cuda_settings import driver_version
from pipemega.distributed.mesh import (
    launched_rank,
    launched_world_size,
    pick_device,
    pick_mixed_device,
)
from pipemega.distributed.topology import Topology
from pipemega.doctor.attendance import Finding, ranges
from pipemega.errors import MeshError
from pipemega.lazy_imports import __version__
from pipemega.printing import listed, show_bytes

# Variables that change how ranks communicate; they should be equal on all ranks.
_NETWORK_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS")


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank; only JSON values.

    Args:
        versions: name -> version; "none" if there is none.
        device: "cpu" or "cuda:1"; empty if there is none for this rank.
        device_error: why there is no device for this rank.
        device_name, device_id: name and id of the GPU; the id is unique in the cluster.
        device_free, device_total: bytes of a GPU.
        host_free: bytes of host memory that processes can still get.
        shared_free: free bytes of /dev/shm; None if it does not exist.
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
        config: the config of the run; its `mesh.device` selects the device.
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
    topology = Topology.fit(world, mesh.pipeline, mesh.tensor, mesh.data, mesh.expert)
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
        "driver": driver_version() or "none",
        "Python": platform.python_version(),
    }


def _nccl() -> str:
    if not torch.cuda.is_available():
        return "none"
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


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


Facts = Mapping[int, RankFacts]

# Ranks that differ in these cannot be expected to communicate, or compute the same.
_MUST_BE_EQUAL = ("pipemega", "torch", "CUDA", "NCCL")
# NCCL exchanges data of one node through /dev/shm; container runtimes often give it 64 MB.
_SHARED_BYTES = 10**9
# A GPU that no other process uses has more free memory than this share.
_FREE_SHARE = 0.9


def compare(facts: Facts, topology: Topology | None, mixed: bool = False) -> list[Finding]:
    """Return the findings about the facts of all ranks that could read them, at least one.

    Args:
        topology: the topology of the config; None if there is no valid config.
        mixed: mesh.device of the config gives some ranks a GPU and some the CPU.
    """
    return [
        *_nodes(facts, topology),
        *_compare_versions(facts),
        *_configs(facts),
        *_devices(facts, mixed),
        *_memory(facts),
        *_variables(facts),
    ]


def ranks_of_hosts(facts: Facts) -> dict[str, list[int]]:
    """Return host -> ranks."""
    hosts = defaultdict(list)
    for rank, fact in sorted(facts.items()):
        hosts[fact.host].append(rank)
    return dict(hosts)


def _nodes(facts: Facts, topology: Topology | None) -> Iterator[Finding]:
    hosts = ranks_of_hosts(facts)
    text = "; ".join(f"{host}: {_ranks(ranks)}" for host, ranks in list(hosts.items())[:8])
    more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    if len({len(ranks) for ranks in hosts.values()}) > 1:
        yield Finding(
            "warning",
            "nodes",
            f"unequal numbers of ranks: {text}{more}",
            "start the same number of ranks on each node",
        )
    else:
        yield Finding("ok", "nodes", f"{text}{more}")
    if topology is None or topology.tensor == 1:
        return
    groups = {topology.along("tensor", rank) for rank in facts}
    split = sorted(
        group for group in groups if len({facts[r].host for r in group if r in facts}) > 1
    )
    if split:
        per_node = min(map(len, hosts.values()))
        yield Finding(
            "warning",
            "nodes",
            f"tensor ranks {ranges(split[0])} are on different nodes, and they communicate in "
            f"every layer",
            f"choose a mesh.tensor that divides the ranks of a node ({per_node})",
        )


def _compare_versions(facts: Facts) -> Iterator[Finding]:
    # Not of rank 0: its facts may be missing.
    first = next(iter(facts.values()))
    names = list(first.versions)
    different = [name for name in names if len(_groups(facts, _version(name))) > 1]
    for name in different:
        fatal = name in _MUST_BE_EQUAL
        yield Finding(
            "failed" if fatal else "warning",
            "versions",
            f"{name} differs: {_described(_groups(facts, _version(name)))}",
            f"install the same {name} on all nodes",
        )
    same = [f"{name} {first.versions[name]}" for name in names if name not in different]
    if not different:
        yield Finding("ok", "versions", f"equal on all ranks: {', '.join(same)}")


def _version(name: str) -> Callable[[RankFacts], str]:
    return lambda fact: fact.versions.get(name, "none")


def _configs(facts: Facts) -> Iterator[Finding]:
    groups = _groups(facts, lambda fact: fact.config)
    if len(groups) > 1:
        yield Finding(
            "failed",
            "configs",
            f"the configs of the ranks differ (hashes): {_described(groups)}",
            "pass the same file and the same --set on every node",
        )


def _devices(facts: Facts, mixed: bool) -> Iterator[Finding]:
    errors = _groups(facts, lambda fact: fact.device_error)
    for error, ranks in errors.items():
        if error:
            yield Finding(
                "failed", "devices", f"{_ranks(ranks)}: {error}", "see the message, or nvidia-smi"
            )
    kinds = _groups(facts, lambda fact: fact.device.partition(":")[0])
    if len({kind for kind in kinds if kind}) > 1 and not mixed:
        yield Finding(
            "failed",
            "devices",
            f"some ranks use a GPU and some the CPU: {_described(kinds)}",
            "check nvidia-smi on the nodes without GPU, and the CUDA build of torch there",
        )
        return
    blind = [
        rank
        for rank, fact in facts.items()
        if fact.versions["CUDA"] == "none" and fact.versions["driver"] != "none"
    ]
    if blind:
        yield Finding(
            "warning",
            "devices",
            f"{_ranks(blind)}: NVIDIA's driver is loaded, but torch is a build without CUDA",
            "install a CUDA build of torch (docs/install.md)",
        )
    shared = {
        device: ranks
        for device, ranks in _groups(facts, lambda fact: fact.device_id).items()
        if device and len(ranks) > 1
    }
    for device, ranks in shared.items():
        host = facts[ranks[0]].host
        yield Finding(
            "failed",
            "devices",
            f"{_ranks(ranks)} on {host} use the same GPU ({device})",
            "check LOCAL_RANK and CUDA_VISIBLE_DEVICES: each rank needs its own GPU",
        )
    names = _groups(facts, lambda fact: fact.device_name or fact.device)
    gpus = {name: ranks for name, ranks in names.items() if facts[ranks[0]].device_name}
    if len(gpus) > 1:
        yield Finding(
            "warning",
            "devices",
            f"different GPUs: {_described(gpus)}",
            "the slowest GPU sets the speed of a step: use one model of GPU",
        )
    elif not (shared or any(errors)):
        found = ", ".join(f"{len(ranks)} x {name}" for name, ranks in names.items())
        yield Finding("ok", "devices", found)


def _memory(facts: Facts) -> Iterator[Finding]:
    lines, status = [], []
    for rank, fact in facts.items():
        if fact.device_free is not None and fact.device_total:
            share = fact.device_free / fact.device_total
            if share < _FREE_SHARE:
                lines.append(f"rank {rank} on {fact.host} has {show_bytes(fact.device_free)} free")
            status.append(fact.device_free)
    if lines:
        yield Finding(
            "warning",
            "memory",
            f"GPUs are in use: {listed(lines, 8)}",
            "end other processes on them (nvidia-smi shows them)",
        )
    elif status:
        yield Finding("ok", "memory", f"at least {show_bytes(min(status))} free on each GPU")
    hosts = {host: facts[ranks[0]] for host, ranks in ranks_of_hosts(facts).items()}
    free = [fact.host_free for fact in hosts.values() if fact.host_free is not None]
    if free:
        yield Finding("ok", "memory", f"at least {show_bytes(min(free))} of host memory per node")
    with_gpus = {fact.host for fact in facts.values() if fact.device_name}
    small = [
        host
        for host, fact in hosts.items()
        if host in with_gpus and (free_bytes := fact.shared_free) is not None
        if free_bytes < _SHARED_BYTES
    ]
    if small:
        left = min(hosts[host].shared_free or 0 for host in small)
        yield Finding(
            "warning",
            "memory",
            f"/dev/shm has {show_bytes(left)} free on {listed(small, 8)}; NCCL uses it within a "
            "node",
            "start the container with --shm-size=8g or --ipc=host",
        )


def _variables(facts: Facts) -> Iterator[Finding]:
    names = sorted({name for fact in facts.values() for name in fact.network})
    different = [n for n in names if len(_groups(facts, lambda f, n=n: f.network.get(n, ""))) > 1]  # type: ignore[misc]
    if different:
        yield Finding(
            "warning",
            "variables",
            f"not equal on all ranks: {listed(different, 8)}",
            "set the variables of NCCL and gloo to the same values on all nodes, unless the names "
            "of their interfaces differ",
        )
    crowded = [host for host, ranks in ranks_of_hosts(facts).items() if len(ranks) > 1]
    if crowded and not all(fact.omp_threads for fact in facts.values()):
        yield Finding(
            "warning",
            "variables",
            "OMP_NUM_THREADS is not set, and several ranks share a node",
            "set it to the cores of a node divided by its ranks, or 1",
        )


def _groups(facts: Facts, of: Callable[[RankFacts], str]) -> dict[str, list[int]]:
    """Return value -> ranks that have it, the most frequent first."""
    groups = defaultdict(list)
    for rank, fact in sorted(facts.items()):
        groups[of(fact)].append(rank)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _described(groups: Mapping[str, Sequence[int]]) -> str:
    return listed((f"{value or 'none'} on {_ranks(ranks)}" for value, ranks in groups.items()), 8)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"
