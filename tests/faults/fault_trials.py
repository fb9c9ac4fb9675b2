"""Runs a job with a fault, resumes it, and compares it with the run without the fault."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults import launch_runs
from tests.faults.launch_runs import Ended
from tests.faults.training import STEPS, Job

# Limit of the time from the fault until all processes have ended: the other ranks wait 3 s for the
# cause, and 2 s for each other; a rank that is in a call gets 6 s.
END_SECONDS = 25.0


class EventLogs:
    """The event logs of all ranks, over all incarnations of the run."""

    def __init__(self, job: Job) -> None:
        self.ranks = [_read(Path(job.folder) / f"log{rank}") for rank in range(job.world_size)]

    def _all(self, key: str) -> list[Any]:
        return [entry[key] for log in self.ranks for entry in log if key in entry]

    @property
    def first(self) -> list[dict[str, Any]]:
        return self.ranks[0]

    @property
    def injected(self) -> list[float]:
        """Times of the fault on the monotonic clock; [] if it did not happen."""
        return self._all("injected")

    @property
    def done(self) -> int:
        """The largest number of steps done."""
        return max(self._all("step"), default=0)

    @property
    def saved(self) -> int:
        """The last step whose checkpoint is known to be written."""
        return max((entry["saved"] for entry in self.first if "saved" in entry), default=0)

    @property
    def started_at(self) -> list[int]:
        """The step at which each incarnation started."""
        return [entry["started_at"] for entry in self.first if "started_at" in entry]

    @property
    def repeated(self) -> int:
        """The largest number of repeated steps of a rank."""
        steps = [[entry["step"] for entry in log if "step" in entry] for log in self.ranks]
        return max(len(numbers) - len(set(numbers)) for numbers in steps)

    @property
    def losses(self) -> dict[int, set[str]]:
        """{step: losses} of all incarnations and ranks; one loss each in a correct run."""
        found: dict[int, set[str]] = {}
        for log in self.ranks:
            for entry in log:
                if "step" in entry:
                    found.setdefault(entry["step"], set()).add(entry["loss"])
        return found

    @property
    def digests(self) -> set[str]:
        return set(self._all("digest"))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Args:
        lost: repeated steps.
        seconds: from the fault until all processes had ended; None if they need not end.
        codes: exit codes of the ranks after the fault.
        error_lines: lines that all ranks printed then, without those of the logger.
    """

    lost: int
    seconds: float | None
    codes: frozenset[int] = frozenset()
    error_lines: int = 0


@dataclass
class FaultFreeRuns:
    """The runs without a fault, each run once."""

    folder: Path
    _known: dict[str, EventLogs] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, job: Job) -> EventLogs:
        changes = {k: v for k, v in job.changes.items() if k in ("fp16", "bf16", "optimizer")}
        key = json.dumps([job.mesh, changes], sort_keys=True)
        with self._lock:
            if key not in self._known:
                folder = self.folder / str(len(self._known))
                folder.mkdir()
                plain = Job(str(folder), job.mesh, changes)
                ended = launch_runs.run(plain)
                assert set(ended.codes) == {0}, str(ended)
                self._known[key] = EventLogs(plain)
            return self._known[key]


def run_with_fault(
    job: Job,
    fault_free: FaultFreeRuns,
    check: Callable[[Ended], None] = lambda ended: None,
    *,
    between: Callable[[], None] = lambda: None,
    watch: Callable[[list[int]], None] | None = None,
    must_happen: bool = True,
    frozen: tuple[int, ...] = (),
    end_seconds: float = END_SECONDS,
) -> Outcome:
    """Run the job with its fault, resume it to its end, and check what holds after every fault.

    Args:
        check: checks how the first incarnation ended.
        between: called before the job is resumed.
        must_happen: fail if the fault does not happen.
        frozen: ranks that only SIGKILL ends, which torchrun sends last.
        end_seconds: limit of the seconds from the fault until all processes have ended.
    """
    store = launch_runs.store_for_ranks()
    ended = launch_runs.run(job, store, watch=watch)
    logs = EventLogs(job)
    injected = max(logs.injected, default=None)
    assert injected is not None or not must_happen, f"the fault did not happen: {ended}"
    _check_end(ended, frozen)
    _check_printed(ended, job)
    seconds = None if injected is None else ended.at - injected
    assert seconds is None or seconds < end_seconds, f"{seconds:.1f} s until all had ended: {ended}"
    check(ended)
    between()
    lost = 0
    if set(ended.codes) != {0} or not logs.digests:
        lost = _resume(job, store, logs)
    _check_equal(job, fault_free)
    return Outcome(lost, seconds, frozenset(ended.codes), ended.error_lines)


def _check_end(ended: Ended, frozen: tuple[int, ...] = ()) -> None:
    assert not ended.left, f"processes that did not end: {ended}"
    assert set(ended.forced) == set(frozen), f"ranks that had to be killed: {ended}"


def _check_printed(ended: Ended, job: Job) -> None:
    """Check that one rank says why the run has ended."""
    if job.fault is not None and job.fault.place == "start" and 1 in ended.codes:
        # Before the process group exists, ranks with different errors do not know of each other.
        assert ended.printed, str(ended)
    else:
        assert len(ended.printed) == (1 in ended.codes), str(ended)


def _resume(job: Job, store: Any, before: EventLogs) -> int:
    """Run the next incarnation to its end; return the number of repeated steps."""
    ended = launch_runs.run(replace(job, fault=None, timeout=None), store)
    _check_end(ended)
    assert set(ended.codes) == {0}, f"the run did not resume: {ended}"
    started_at = EventLogs(job).started_at[-1]
    assert started_at >= before.saved, f"saved at {before.saved}, resumed at {started_at}: {ended}"
    # Steps that only some ranks have logged were in progress.
    lost = before.done - started_at
    assert lost <= job.may_lose, f"step {before.done} was done, resumed at {started_at}: {ended}"
    return max(0, lost)


def _check_equal(job: Job, fault_free: FaultFreeRuns) -> None:
    """Check that the run is bitwise equal to the run without the fault."""
    mine, wanted = EventLogs(job), fault_free.of(job)
    assert mine.losses == wanted.losses
    assert sorted(wanted.losses) == list(range(1, STEPS + 1))
    assert mine.digests == wanted.digests
    assert len(wanted.digests) == 1
