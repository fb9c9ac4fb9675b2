"""Compares the facts of all ranks: versions, devices, memory, variables, config."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from pipemega.distributed.topology import Topology
from pipemega.doctor.findings import Finding, listed, ranges
from pipemega.doctor.rank_facts import RankFacts
from pipemega.planning.units import show_bytes

Facts = Mapping[int, RankFacts]

# Ranks that differ in these cannot be expected to communicate, or compute the same.
_MUST_BE_EQUAL = ("pipemega", "torch", "CUDA", "NCCL")
# NCCL exchanges data of one node through /dev/shm; container runtimes often give it 64 MB.
_SHARED_BYTES = 10**9
# A GPU that no other process uses has more free memory than this share.
_FREE_SHARE = 0.9


def compare(facts: Facts, topology: Topology | None, mixed: bool = False) -> list[Finding]:
    """Return the findings about the facts of the ranks that could read theirs, at least one.

    Args:
        topology: of the config; None without a valid config.
        mixed: mesh.device of the config gives some ranks a GPU and some the CPU.
    """
    return [
        *_nodes(facts, topology),
        *_versions(facts),
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


def _versions(facts: Facts) -> Iterator[Finding]:
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
            f"GPUs are in use: {listed(lines)}",
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
            f"/dev/shm has {show_bytes(left)} free on {listed(small)}; NCCL uses it within a node",
            "start the container with --shm-size=8g or --ipc=host",
        )


def _variables(facts: Facts) -> Iterator[Finding]:
    names = sorted({name for fact in facts.values() for name in fact.network})
    different = [n for n in names if len(_groups(facts, lambda f, n=n: f.network.get(n, ""))) > 1]  # type: ignore[misc]
    if different:
        yield Finding(
            "warning",
            "variables",
            f"not equal on all ranks: {listed(different)}",
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
    return listed([f"{value or 'none'} on {_ranks(ranks)}" for value, ranks in groups.items()])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"
