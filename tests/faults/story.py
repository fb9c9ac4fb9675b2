"""A run that something happens to, goes on from its newest checkpoint, and is compared."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults import launch
from tests.faults.launch import Ended
from tests.faults.training import STEPS, Job

# Until all processes have ended, after whatever has happened: the other ranks wait 3 s for the
# cause, and 2 s for each other; a rank that is deep in a call is given 6 s.
SOON = 25.0


class Books:
    """What the ranks have written so far, over all lives of the run."""

    def __init__(self, job: Job) -> None:
        self.ranks = [_read(Path(job.folder) / f"book{rank}") for rank in range(job.world_size)]

    def _all(self, key: str) -> list[Any]:
        return [entry[key] for book in self.ranks for entry in book if key in entry]

    @property
    def first(self) -> list[dict[str, Any]]:
        return self.ranks[0]

    @property
    def struck(self) -> list[float]:
        """When the fault happened, on the monotonic clock; none if the run never came to it."""
        return self._all("struck")

    @property
    def done(self) -> int:
        """The most steps that were ever done."""
        return max(self._all("step"), default=0)

    @property
    def saved(self) -> int:
        """The last step whose checkpoint had been written when rank 0 went on."""
        return max((entry["saved"] for entry in self.first if "saved" in entry), default=0)

    @property
    def began(self) -> list[int]:
        """Where each life began."""
        return [entry["began"] for entry in self.first if "began" in entry]

    @property
    def repeated(self) -> int:
        """The steps that some rank did twice."""
        steps = [[entry["step"] for entry in book if "step" in entry] for book in self.ranks]
        return max(len(numbers) - len(set(numbers)) for numbers in steps)

    @property
    def losses(self) -> dict[int, set[str]]:
        """Step -> its loss in every life and on every rank; one, if all is well."""
        found: dict[int, set[str]] = {}
        for book in self.ranks:
            for entry in book:
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
    """Of a fault.

    Args:
        lost: steps that were done twice.
        seconds: from the fault until all processes had ended; None where that says nothing.
    """

    lost: int
    seconds: float | None


@dataclass
class Undisturbed:
    """The runs without a fault, each made once."""

    folder: Path
    _known: dict[str, Books] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, job: Job) -> Books:
        changes = {k: v for k, v in job.changes.items() if k in ("fp16", "bf16", "optimizer")}
        key = json.dumps([job.mesh, changes], sort_keys=True)
        with self._lock:
            if key not in self._known:
                folder = self.folder / str(len(self._known))
                folder.mkdir()
                plain = Job(str(folder), job.mesh, changes)
                ended = launch.run(plain)
                assert set(ended.codes) == {0}, str(ended)
                self._known[key] = Books(plain)
            return self._known[key]


def suffer(
    job: Job,
    undisturbed: Undisturbed,
    check: Callable[[Ended], None] = lambda ended: None,
    *,
    between: Callable[[], None] = lambda: None,
    watch: Callable[[list[int]], None] | None = None,
    must_strike: bool = True,
    frozen: tuple[int, ...] = (),
    soon: float = SOON,
) -> Outcome:
    """Runs the job into its fault and on to its end; asserts what holds after every fault.

    Args:
        check: of how the first life ended.
        between: done before it goes on.
        must_strike: a fault that never happens is a mistake of the test.
        frozen: the ranks that hear no signal but SIGKILL, which torchrun sends in the end.
        soon: seconds from the fault until all must have ended.
    """
    store = launch.store_for_ranks()
    ended = launch.run(job, store, watch=watch)
    books = Books(job)
    struck = max(books.struck, default=None)
    assert struck is not None or not must_strike, f"nothing happened: {ended}"
    _ended_well(ended, frozen)
    seconds = None if struck is None else ended.at - struck
    assert seconds is None or seconds < soon, f"{seconds:.1f} s until all had ended: {ended}"
    check(ended)
    between()
    lost = 0
    if set(ended.codes) != {0} or not books.digests:
        lost = _go_on(job, store, books)
    _same(job, undisturbed)
    return Outcome(lost, seconds)


def _ended_well(ended: Ended, frozen: tuple[int, ...] = ()) -> None:
    assert not ended.left, f"processes that did not end: {ended}"
    assert set(ended.forced) == set(frozen), f"ranks that had to be killed: {ended}"


def _go_on(job: Job, store: Any, before: Books) -> int:
    """The next life; returns the steps that are done again."""
    ended = launch.run(replace(job, fault=None, deadline=None), store)
    _ended_well(ended)
    assert set(ended.codes) == {0}, f"the run did not go on: {ended}"
    began = Books(job).began[-1]
    assert began >= before.saved, f"saved at {before.saved}, and went on at {began}: {ended}"
    # Steps that only some ranks have written down were under way.
    lost = before.done - began
    assert lost <= job.may_lose, f"step {before.done} was done, and it went on at {began}: {ended}"
    return max(0, lost)


def _same(job: Job, undisturbed: Undisturbed) -> None:
    """Bit for bit what the run would have been."""
    mine, wanted = Books(job), undisturbed.of(job)
    assert mine.losses == wanted.losses
    assert sorted(wanted.losses) == list(range(1, STEPS + 1))
    assert mine.digests == wanted.digests
    assert len(wanted.digests) == 1
