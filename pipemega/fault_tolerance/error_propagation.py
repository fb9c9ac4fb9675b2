"""Error propagation: when one rank fails, all ranks end with an error that names the cause.

A failing rank writes its error to the store of the process group and breaks its connections. Ranks
that wait for it then get a connection error, read the cause from the store and break their own
connections, so the failure reaches every rank that waits in a collective. A rank that was killed or
that hangs writes nothing: the ranks that lost a connection report this, and the ranks without a
report are the missing ones (`missing_ranks`).

Find the cause of a lost connection: another rank's report, or the ranks that do not report.

What the error message says about a run: its step, its newest checkpoint, how to continue.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipemega.checkpoint import newest
from pipemega.distributed.comm_errors import (
    TIMED_OUT,
    describe_comm_error,
    is_connection_loss,
    trim_backend_error,
)
from pipemega.distributed.local_sockets import break_local_sockets
from pipemega.distributed.process_groups import abort_communicators, runs_gloo
from pipemega.errors import PeerError, PipemegaError, Stopped
from pipemega.fault_tolerance.failure_store import (
    POLL_SECONDS,
    FailureReport,
    FailureStore,
    call_with_deadline,
    default_store,
    ignore_sigterm,
)
from pipemega.pipeline.plan.validate import PlanPosition, describe_deadlock
from pipemega.storage.filesystem import is_remote

# How long to wait for the folder of checkpoints, which may be on a disk that hangs.
_DISK_SECONDS = 2.0


@dataclass(frozen=True)
class RunProgress:
    """The state of a run.

    Args:
        steps: completed training steps.
        checkpoints: folder or URL of its checkpoints; None if it has none.
        resumes: whether the same command continues from the newest checkpoint.
        folder: the folder for the log of errors; None: the folder of the checkpoints, if it is
            local.
    """

    steps: int
    checkpoints: str | None
    resumes: bool
    folder: Path | None = None

    @property
    def log_folder(self) -> Path | None:
        if self.folder is not None or self.checkpoints is None or is_remote(self.checkpoints):
            return self.folder
        return Path(self.checkpoints)

    @property
    def newest_checkpoint(self) -> str | None:
        """The tag of the newest checkpoint; None if there is none, or it cannot be read."""
        folder = self.checkpoints
        if folder is None:
            return None
        return call_with_deadline(lambda: newest(folder), _DISK_SECONDS, None)


_progress: Callable[[], Callable[[], RunProgress] | None] | None = None


def register_progress(progress: Any) -> None:
    """Make `progress`, a method without arguments, return the RunProgress of this process."""
    global _progress
    # Do not keep the engine in memory.
    _progress = weakref.WeakMethod(progress)


def run_progress() -> RunProgress | None:
    """Return the progress of this process's run; None before its engine exists."""
    progress = None if _progress is None else _progress()
    return None if progress is None else progress()


def describe_step(doing: str) -> str:
    """Return when an error happened, as in "in step 14".

    Args:
        doing: what the rank did.
    """
    progress = run_progress()
    if progress is None:
        return "while the run started"
    if doing == "train_batch":
        return f"in step {progress.steps + 1}"
    return f"after step {progress.steps}" + ("" if doing == "the script" else f", in {doing}")


def describe_checkpoint() -> str:
    """Return the newest checkpoint, as in "newest checkpoint: global_step10"."""
    progress = run_progress()
    tag = None if progress is None else progress.newest_checkpoint
    return "no checkpoint yet" if tag is None else f"newest checkpoint: {tag}"


def describe_restart() -> str:
    """Return how the run continues after the loss of a rank."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts < most:
        return f"torchrun starts the ranks again (restart {restarts + 1} of {most})"
    progress = run_progress()
    if progress is None or progress.resumes or progress.newest_checkpoint is None:
        return "start again with the same command"
    return f'start again with checkpoint.load "{progress.checkpoints}", or training.resume "auto"'


@dataclass(frozen=True)
class Where:
    """What this rank did when it lost a connection.

    Args:
        doing: name of the call that was running, such as "train_batch".
        position: the position of the rank in its plan; None outside of a step.
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
        own: the report of this rank; it is already in the store.
        where: what this rank was doing.
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
        locations: rank -> where it is, for the ranks whose watchdog has answered.
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


# How long a rank that lost a connection waits for the cause or for the other ranks' reports.
_COLLECT_SECONDS = 3.0

# How long to wait for an answer of the store itself.
_STORE_SECONDS = 0.5

# A tag that no other message has.
_UNUSED_TAG = 0x7FFF


def failure_reporter() -> "FailureReporter":
    """Return the FailureReporter of this process.

    It is created by the first call, and again only if torch.distributed was started since then:
    the reports are in the store of its default process group.
    """
    return _create_reporter(default_store())


@lru_cache(maxsize=1)
def _create_reporter(store: Any) -> "FailureReporter":
    if store is None:
        return FailureReporter(None)
    reports = FailureStore(store, dist.get_rank(), dist.get_world_size())
    reports.publish_identity()
    return FailureReporter(reports)


class FailureReporter:
    """Publishes this rank's first error, and finds the first error of all ranks.

    Args:
        store: where the reports are; None in a run of one rank.

    Attributes:
        store: the argument `store`.
        cause: the first failure of the run; None until this rank has published its own error.
    """

    def __init__(self, store: FailureStore | None) -> None:
        self.store = store
        self.cause: FailureReport | None = None

    @contextmanager
    def propagate_errors(self, doing: str) -> Iterator[None]:
        """End all ranks if this rank raises within the block, and this rank if another does.

        Args:
            doing: what this rank does in the block, for messages.
        """
        try:
            yield
        except StopIteration:
            # The end of the data, which is the same on all ranks.
            raise
        except BaseException as error:
            reported = self.report(error, doing)
            if reported is error:
                raise
            raise reported from error

    def report(self, error: BaseException, doing: str) -> BaseException:
        """Publish `error` and return what this rank has to raise: `error`, or a PeerError.

        The first call writes the error to the store and breaks the connections of this rank, so
        that no other rank waits for it. Later calls only look at the cause that was found. An
        error that all ranks raise at the same point is not published: no rank waits.
        """
        if self.store is None or isinstance(error, PeerError):
            return error
        message, lost = _message(error, doing), is_connection_loss(error)
        if isinstance(error, PipemegaError) and error.on_every_rank and not lost:
            return error
        rank = self.store.rank
        if self.cause is None:
            ignore_sigterm()
            self.cause = self._publish(self.store, message, Where(doing, _position_of(error)), lost)
        cause = self.cause
        if cause.rank == rank or cause.message == message:
            # A bare backend error names neither the operation nor the ranks.
            bare = lost and not isinstance(error, PipemegaError | Stopped)
            return PeerError(cause.message) if bare else error
        name = "" if cause.rank is None else f"rank {cause.rank} failed first: "
        here = f"\n  (rank {rank} was stopped by this in {trim_backend_error(message)})"
        repeated = trim_backend_error(message) in cause.message
        return PeerError(f"{name}{cause.message}{'' if repeated else here}")

    def failure_known(self) -> bool:
        """Return whether a rank has reported a failure, or the store is gone."""
        if self.store is None:
            return False
        with suppress(RuntimeError):
            return self.store.failure_known()
        return True  # the store is gone: the rank or torchrun that hosted it has ended

    def _publish(
        self, store: FailureStore, message: str, where: Where, lost: bool
    ) -> FailureReport:
        """Write the error to the store, break all connections, and return the cause."""
        position = where.position
        own = FailureReport(store.rank, message, None if position is None else position.at)
        trimmed, causes, written = trim_backend_error(message), [], threading.Event()

        def publish() -> None:
            try:
                if not lost:
                    causes.append(store.publish_cause(own))
                    return
                store.report_lost_connection(own)
            except RuntimeError:
                gone = "the store of the process group, in rank 0 or in torchrun, is gone"
                causes.append(FailureReport(None, f"{trimmed}; and {gone}"))
                return
            finally:
                written.set()
            causes.append(find_cause(store, own, where, _COLLECT_SECONDS))

        # In a thread: if the network link is cut, the store never answers.
        thread = _call_in_thread(publish)
        written.wait(_STORE_SECONDS)
        # Do not wait: all ranks must report soon, so that only missing ranks have no report.
        _break_connections()
        # On a busy machine a store that has answered once may need more time for the other calls.
        thread.join(_COLLECT_SECONDS + (4 if written.is_set() else 1) * _STORE_SECONDS)
        if causes:
            return causes[0]
        if not lost:
            return own
        return FailureReport(
            None, f"{trimmed}; and the store of the process group does not respond"
        )


def _call_in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, name="failure-report", daemon=True)
    thread.start()
    return thread


def _position_of(error: BaseException) -> PlanPosition | None:
    """Return the position in the plan at which the error, or the SIGTERM, interrupted this rank."""
    interrupted = error.__context__ if isinstance(error, Stopped) else error
    position = getattr(interrupted, "place", None)
    return position if isinstance(position, PlanPosition) else None


def _break_connections() -> None:
    """Break every connection of this rank in every group, so that no other rank waits for it."""
    # In a thread, because the abort of a communicator may be stuck for seconds.
    abort = _call_in_thread(abort_communicators)
    break_local_sockets()
    for group in list(dist.distributed_c10d._world.pg_map):
        if runs_gloo(group):
            _break_gloo(group)
    abort.join()


def _break_gloo(group: dist.ProcessGroup) -> None:
    """Let one receive of the group time out: gloo then closes all connections of the group."""
    for rank in dist.get_process_group_ranks(group):
        if rank != dist.get_rank():
            # A receive on a connection that is already broken fails at once: try the next rank.
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), rank, group=group, tag=_UNUSED_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def _message(error: BaseException, doing: str) -> str:
    if isinstance(error, PipemegaError):
        return str(error)
    if isinstance(error, Stopped):
        # SIGTERM may interrupt the handling of an error, such as a lost connection: add it.
        interrupted = error.__context__
        return "SIGTERM" + ("" if interrupted is None else f", {_message(interrupted, doing)}")
    if is_connection_loss(error):
        return f"{doing}: {describe_comm_error(error)}"
    return f"{doing}: {type(error).__name__}: {error}".removesuffix(": ")
