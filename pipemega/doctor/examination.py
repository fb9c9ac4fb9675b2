"""All checks of `pipemega doctor` in order; rank 0 collects the findings.

Connects the ranks before any process group exists.
"""

import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from pipemega.config import Config
from pipemega.config.launch_variables import LaunchVariables
from pipemega.distributed.mesh import Mesh, build_mesh, build_mixed_mesh, pick_device
from pipemega.distributed.process_groups import is_store_of_torchrun, wait_for_store
from pipemega.distributed.topology import Topology
from pipemega.doctor import measurements, rank_facts
from pipemega.doctor.attendance import (
    AbsentRanks,
    Attendance,
    Finding,
    Outcome,
    ranges,
)
from pipemega.doctor.rank_facts import RankFacts, read_facts
from pipemega.errors import MeshError, PipemegaError
from pipemega.planning.estimate import Report, Request, estimate
from pipemega.printing import listed, show_bytes

# torch's own timeout must not end a process before the deadline of a step is reported.
_LONGER_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """What to check.

    Args:
        config: the config of the run; None: check the world and the ring only.
        config_error: why the config is not valid.
        folder: where checkpoints will be written.
        quiet: print no progress on stderr.
    """

    config: Config | None = None
    config_error: str = ""
    folder: str = "."
    quiet: bool = False


@dataclass(eq=False)
class Examination:
    """The checks of one rank.

    Attributes:
        findings: on rank 0, the findings about all ranks; empty on other ranks.
        measured: on rank 0, the numbers behind the findings.
    """

    attendance: Attendance
    options: Options
    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    _mesh: Mesh | None = None

    def run(self) -> None:
        """Run all checks; collective.  Those after a failed connection are skipped."""
        started = time.monotonic()
        try:
            self._tell("waiting for all ranks")
            # Without a grace period: ranks may start at any time until the deadline.
            host = Outcome(socket.gethostname())
            self.attendance.collect("start", host, self.attendance.seconds)
            size, seconds = self.attendance.world_size, time.monotonic() - started
            self._add(Finding("ok", "ranks", f"{size} of {size} answered within {seconds:.1f} s"))
            facts = self._facts()
            topology = self._topology()
            self._check_disk(facts)
            self._check_network(facts, topology)
            if facts:
                self._check_memory(facts, topology)
        except AbsentRanks as error:
            # Rank 0 reports the others. If it cannot, each rank says so.
            if self.attendance.rank == 0 or 0 in error.ranks:
                self.findings.append(_absent_finding(error, self.attendance.world_size))

    def _facts(self) -> dict[int, RankFacts]:
        self._tell("versions, devices, memory")
        config = self.options.config
        outcomes = self.attendance.run("facts", lambda: asdict(read_facts(config)))
        if self.attendance.rank > 0:
            return {}
        self._add(*_errors("devices", outcomes, "check the GPU and its driver (nvidia-smi)"))
        facts = {r: RankFacts(**o.value) for r, o in outcomes.items() if not o.error}
        self.measured["ranks"] = {rank: asdict(fact) for rank, fact in facts.items()}
        return facts

    def _topology(self) -> Topology | None:
        """Return the topology of the config; None without one, or if it does not fit the ranks."""
        config, world = self.options.config, self.attendance.world_size
        error = self.options.config_error
        topology = None
        if config is not None:
            try:
                mesh = config.mesh
                topology = Topology.fit(world, mesh.pipeline, mesh.tensor, mesh.data, mesh.expert)
                config.batch(topology.data)
                measurements.rank_of_stages(config, topology)
            except PipemegaError as problem:
                topology, error = None, str(problem)
        if error:
            remedy = "correct the config (pipemega check); the connections are checked without it"
            self._add(Finding("failed", "config", " ".join(error.split()), remedy))
        elif topology is not None:
            self._add(Finding("ok", "config", f"mesh {topology}"))
        return topology

    def _check_disk(self, facts: dict[int, RankFacts]) -> None:
        """Let the first rank of each node write a file into the folder for checkpoints."""
        attendance = self.attendance
        self._tell(f"the folder {self.options.folder}")
        remedy = "choose a folder that all nodes share and can write (checkpoint.save)"
        prepared = attendance.run("disk folder", self._prepare_folder)
        failures = _errors("disk", prepared, remedy)
        self._add(*failures)
        firsts = {host: ranks[0] for host, ranks in rank_facts.ranks_of_hosts(facts).items()}
        job = attendance.share("disk", lambda: [] if failures else [prepared[0].value, firsts])
        if not job:
            return
        (folder, token), firsts = job

        def check() -> int | None:
            if attendance.rank not in firsts.values():
                return None
            return measurements.check_folder(folder, token, f"node{attendance.rank}")

        try:
            outcomes = attendance.run("disk files", check)
        finally:
            # Also if ranks do not answer.
            if attendance.rank == 0:
                measurements.remove_marker(folder, token)
        failures = _errors("disk", outcomes, remedy)
        self._add(*failures)
        if attendance.rank == 0 and firsts and not failures:
            free = {host: outcomes[rank].value for host, rank in firsts.items()}
            self.measured["disk"] = {host: {"free": number} for host, number in free.items()}
            size = checkpoint_bytes(self.options.config, self._plan)
            self._add(measurements.judge_space(folder, free.values(), size))

    def _prepare_folder(self) -> list[str]:
        """Write the file that the other nodes look for, on rank 0; return [folder, token]."""
        if self.attendance.rank > 0:
            return []
        folder = measurements.existing_folder(self.options.folder)
        token = f"pipemega-doctor-{uuid.uuid4().hex[:12]}"
        measurements.place_marker(folder, token)
        return [folder, token]

    def _check_network(self, facts: dict[int, RankFacts], topology: Topology | None) -> None:
        attendance = self.attendance
        if attendance.rank == 0:
            config = self.options.config
            mixed = config is not None and bool(config.mesh.mixed_devices)
            found = rank_facts.compare(facts, topology, mixed) if facts else []
            self._add(*found)
        if attendance.world_size == 1:
            self._add(Finding("skipped", "connections", "one rank has none"))
            return
        blocked = attendance.share("network", self._blocked)
        if blocked:
            self._add(Finding("skipped", "connections", blocked))
            return
        remedy = (
            "check the network between these nodes, firewalls, and the interface "
            "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO prints NCCL's choice)"
        )
        for topic, work in self._network_steps(topology):
            self._tell(topic)
            outcomes = attendance.run(topic, work)
            failures = _errors(topic, outcomes, remedy)
            self._add(*failures)
            if attendance.share(f"{topic} stops", lambda: bool(failures)):  # noqa: B023
                self._add(Finding("skipped", "connections", f"the checks after {topic!r}"))
                return
            if attendance.rank == 0:
                self._judge_network(topic, {r: o.value for r, o in outcomes.items()}, facts)

    def _blocked(self) -> str:
        """Return why no rank should open connections; empty if they should."""
        fatal = {"configs", "devices", "versions"}
        failed = sorted({f.check for f in self.findings if f.status == "failed"} & fatal)
        return f"not checked: repair {listed(failed, 8)} first" if failed else ""

    def _network_steps(self, topology: Topology | None) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield (topic, function)."""
        world, ready, at = self.attendance.world_size, self._ready_mesh, self._at
        yield "process groups", lambda: self._connect(topology or Topology(data=world))
        yield "axes", lambda: measurements.check_axes(ready(), at)
        if topology is None:
            yield "ring", lambda: measurements.check_ring(ready(), at)
        elif topology.pipeline > 1:
            yield "pipeline", lambda: self._pipeline(topology)
        yield "bandwidth", lambda: measurements.measure_bandwidth(ready(), at)

    def _connect(self, topology: Topology) -> None:
        self._at(f"the process groups of the mesh {topology}")
        config = self.options.config
        timeout = timedelta(seconds=self.attendance.seconds + _LONGER_SECONDS)
        if config is not None and config.mesh.mixed_devices:
            self._mesh = build_mixed_mesh(topology, config.mesh.mixed_devices, timeout)
            return
        device = pick_device("auto" if config is None else config.mesh.first_device)
        self._mesh = build_mesh(topology, device, timeout)

    def _ready_mesh(self) -> Mesh:
        assert self._mesh is not None, "the step 'process groups' comes first"
        if self._mesh.device.type == "cuda":
            # The current device belongs to the thread, and each step has its own.
            torch.cuda.set_device(self._mesh.device)
        return self._mesh

    def _pipeline(self, topology: Topology) -> int:
        assert self.options.config is not None, "the topology comes from the config"
        stages = measurements.rank_of_stages(self.options.config, topology)
        return measurements.check_pipeline(self._ready_mesh(), stages, self._at)

    def _judge_network(
        self, topic: str, values: dict[int, Any], facts: dict[int, RankFacts]
    ) -> None:
        if topic == "axes":
            names = ", ".join(dict.fromkeys(name for rank in values for name in values[rank]))
            self._add(Finding("ok", "connections", f"one element over each group of: {names}"))
        elif topic == "ring":
            self._add(Finding("ok", "connections", f"one element around {values[0]} ranks"))
        elif topic == "pipeline":
            count = sum(values.values()) // 2
            text = f"one element over each of {count} pipeline connections"
            self._add(Finding("ok", "connections", text))
        elif topic == "bandwidth":
            self.measured["bandwidth"] = values[0] if len(values) == 1 else values
            cuda = [fact.device.startswith("cuda") for fact in facts.values()]
            is_nccl = bool(cuda) and all(cuda)
            self._add(*measurements.judge_bandwidth(values, is_nccl))

    def _check_memory(self, facts: dict[int, RankFacts], topology: Topology | None) -> None:
        """Compare the memory that `pipemega plan` predicts with the memory of GPUs and hosts."""
        report = self._plan
        if topology is None or report is None:
            return
        memory = report.prediction.memory
        needed = {rank: memory[topology.coordinate(rank).pipeline].total for rank in facts}
        self.measured["predicted_bytes"] = needed
        self._add(*judge_memory(needed, facts))

    @cached_property
    def _plan(self) -> Report | None:
        """What `pipemega plan` predicts; None without a model, or if it does not fit."""
        config = self.options.config
        if config is None or config.model is None:
            return None
        with suppress(PipemegaError):
            return estimate(Request(config, self.attendance.world_size, quick=True))
        return None

    def _at(self, position: str) -> None:
        self.attendance.position = position

    def _add(self, *findings: Finding) -> None:
        if self.attendance.rank == 0:
            self.findings += findings

    def _tell(self, text: str) -> None:
        if self.attendance.rank == 0 and not self.options.quiet:
            print(f"doctor: {text} ...", file=sys.stderr, flush=True)


def judge_memory(needed: dict[int, int], facts: dict[int, RankFacts]) -> Iterator[Finding]:
    """Yield findings: does the predicted memory fit into the free memory of GPUs and hosts."""
    crowded = list(_crowded_hosts(needed, facts))
    yield from crowded
    free = {r: f.device_free for r, f in facts.items() if f.device_free is not None}
    highest = max(needed.values())
    short = [rank for rank in free if needed[rank] > free[rank]]
    if short:
        rank = max(short, key=lambda r: needed[r] - free[r])
        yield Finding(
            "failed",
            "plan",
            f"pipemega plan predicts {show_bytes(needed[rank])} for rank {rank}, which has "
            f"{show_bytes(free[rank])} free (too little on ranks {ranges(short)})",
            "python -m pipemega plan CONFIG --device-memory SIZE lists changes that fit",
        )
    elif free:
        highest = max(needed[rank] for rank in free)
        text = f"pipemega plan predicts at most {show_bytes(highest)} for a rank on a GPU"
        yield Finding(
            "ok", "plan", f"{text}; each GPU has at least {show_bytes(min(free.values()))} free"
        )
    elif not crowded:
        yield Finding("ok", "plan", f"pipemega plan predicts {show_bytes(highest)} for a rank")


def _crowded_hosts(needed: dict[int, int], facts: dict[int, RankFacts]) -> Iterator[Finding]:
    """Yield a warning for each host with less free memory than its ranks on CPUs need."""
    for host, ranks in rank_facts.ranks_of_hosts(facts).items():
        on_cpu = [rank for rank in ranks if facts[rank].device == "cpu"]
        total, free = sum(needed[rank] for rank in on_cpu), facts[ranks[0]].host_free
        if on_cpu and free is not None and total > free:
            yield Finding(
                "warning",
                "plan",
                f"pipemega plan predicts {show_bytes(total)} for ranks {ranges(on_cpu)} on the CPU "
                f"of {host}, which has {show_bytes(free)} of memory free",
                "start fewer of these ranks on this node, or give mesh.device a GPU for some",
            )


def checkpoint_bytes(config: Config | None, plan: Report | None) -> int | None:
    """Return the size of one checkpoint: fp32 parameters and optimizer state; None if unknown."""
    if plan is None or config is None or config.optimizer is None:
        return None
    return plan.parameters * (4 + config.optimizer.state_bytes)


def _errors(topic: str, outcomes: dict[int, Outcome], remedy: str) -> list[Finding]:
    """Return one finding per error text."""
    ranks_of: dict[str, list[int]] = {}
    for rank, outcome in sorted(outcomes.items()):
        if outcome.error:
            ranks_of.setdefault(outcome.error, []).append(rank)
    return [
        Finding("failed", topic, f"rank{'s' if len(r) > 1 else ''} {ranges(r)}: {error}", remedy)
        for error, r in ranks_of.items()
    ]


def _absent_finding(error: AbsentRanks, world_size: int) -> Finding:
    names = f"rank{'s' if len(error.ranks) > 1 else ''} {ranges(error.ranks)} of {world_size}"
    if error.topic == "start":
        hosts = ", ".join(sorted({str(outcome.value) for outcome in error.present.values()}))
        text = f"{names} did not connect within {error.seconds:g} s; connected: ranks on {hosts}"
        remedy = "start them, and check that they reach MASTER_ADDR and MASTER_PORT"
    else:
        text = f"{names} answered before, but not in the step {error.topic!r}"
        remedy = "look at their output: the process has ended, or its node does not respond"
    return Finding("failed", "ranks", text, remedy)


def open_store(launch: LaunchVariables, seconds: float) -> Any:
    """Return the store of all ranks; None for one rank.

    Args:
        seconds: how long to wait for the process that hosts the store.

    Raises:
        MeshError: the store cannot be reached, or its port is taken.
    """
    rank = launch.number("RANK", 0)
    if launch.number("WORLD_SIZE", 1) <= 1:
        return None
    host, port = launch.values["MASTER_ADDR"], int(launch.values["MASTER_PORT"])
    is_host = rank == 0 and not is_store_of_torchrun()
    if not is_host:
        wait_for_store(rank, host, port, seconds)
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
        raise MeshError(f"rank {rank} cannot open the store at {host}:{port}: {reason}") from error
    return dist.PrefixStore("pipemega/doctor", store)  # type: ignore[attr-defined]
