"""Find the cause of a lost connection: another rank's report, or the ranks that do not report."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipemega.distributed.comm_errors import TIMED_OUT, trim_backend_error
from pipemega.fault_tolerance.failure_store import POLL_SECONDS, FailureReport, FailureStore
from pipemega.fault_tolerance.run_progress import describe_step
from pipemega.pipeline.plan.deadlock_report import PlanPosition, describe_deadlock


@dataclass(frozen=True)
class Where:
    """What this rank did when it lost a connection.

    Args:
        doing: as in "train_batch".
        position: in its plan; None outside of a step.
    """

    doing: str
    position: PlanPosition | None


def find_cause(
    store: FailureStore, own: FailureReport, where: Where, seconds: float
) -> FailureReport:
    """Return the cause of the connection loss that `own` reports, and publish it.

    Waits up to `seconds` for a cause from another rank, or for all ranks to report lost
    connections; after that, ranks without a report are missing.

    Args:
        own: already in the store.
        where: of this rank.
    """
    deadline = time.monotonic() + seconds
    reports: list[FailureReport] = []
    while time.monotonic() < deadline and len(_ranks(reports)) < store.world_size:
        time.sleep(POLL_SECONDS)
        if (cause := store.cause()) is not None:
            return cause
        reports = store.lost_connections()
    return store.publish_cause(_diagnose(store, reports or [own], where))


def _diagnose(store: FailureStore, reports: list[FailureReport], where: Where) -> FailureReport:
    """Name the missing ranks and their locations; if none is missing, what each rank waited for."""
    missing = sorted(set(range(store.world_size)) - _ranks(reports))
    first = reports[0]
    text, *table = first.message.splitlines()
    text = trim_backend_error(text)
    if (position := where.position) is not None:
        at = {r.rank: r.at for r in reports if r.rank is not None and r.at is not None}
        table = [describe_deadlock(position, at, missing)]
    if not missing:
        others = [
            f"  rank {report.rank}: {message}"
            for report in reports
            if (message := trim_backend_error(report.message)) != text and report.at is None
        ]
        return replace(first, message="\n".join([text, *others, *table]))
    locations = {rank: found for rank in missing if (found := store.location(rank)) is not None}
    silent = [rank for rank in missing if rank not in locations]
    causes = []
    if silent:
        causes.append(
            f"no response from rank {_listed(silent)}: killed, crashed, hanging, or slower than "
            "mesh.timeout_seconds"
        )
    if locations:
        causes.append(
            f"rank {_listed(locations)} is alive but did not respond within mesh.timeout_seconds"
        )
    causes.append(f"first noticed by rank {first.rank} in {text}")
    stacks = [f"  rank {rank} is {location}" for rank, location in locations.items()]
    return FailureReport(
        None,
        "\n".join(["; ".join(causes), *stacks, *table]),
        missing=tuple(missing),
        summary=_summary(store, locations, missing, where.doing, text),
    )


def _summary(
    store: FailureStore, locations: dict[int, str], missing: list[int], doing: str, first: str
) -> str:
    """Return in one line which ranks are missing.

    Args:
        locations: of the ranks whose watchdog has answered.
        doing: what this rank did.
        first: the first report of a lost connection. A killed process closes its connections, and
            a hanging one does not.
    """
    # torchrun sends SIGTERM when a rank has exited.
    timed_out = TIMED_OUT in first and not first.startswith("SIGTERM")
    verb = "did not respond within mesh.timeout_seconds" if timed_out else "disappeared"
    when, parts = describe_step(doing), []
    for rank in missing:
        identity = store.identity(rank)
        name = f"rank {rank}" + (f" ({identity})" if identity else "")
        if rank in locations:
            position, *stack = locations[rank].splitlines()
            line = f": {stack[0].strip()}" if stack else ""
            parts.append(
                f"{name} did not respond within mesh.timeout_seconds {when}; it is {position}{line}"
            )
        else:
            parts.append(f"{name} {verb} {when}")
    return "; ".join(parts)


def _ranks(reports: Iterable[FailureReport]) -> set[int | None]:
    return {report.rank for report in reports}


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
