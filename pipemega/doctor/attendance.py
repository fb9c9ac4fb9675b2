"""Collects the results of all ranks at rank 0, and names the ranks that do not answer.

The results go through a key-value store, so this also works if no process group can be created.

    rank r                                  rank 0
    write the result of topic T
                                            wait for all results, or until the deadline
                                            write the decision of topic T
    wait for the decision

Checks the variables that the launcher has set for this process.  Imports no torch.

Results of the checks, as a table for people and as JSON values.  Imports no torch.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipemega.config.launch_variables import START, LaunchVariables
from pipemega.errors import MeshError

# Seconds between two polls of the store.
_POLL_SECONDS = 0.02
# Default of `grace`: all ranks end a step at its deadline, but busy hosts and stores take time.
_GRACE_SECONDS = 5.0
# Of the threads that run the steps; one that is still there has not ended in time.
THREAD_NAME = "pipemega doctor"


class AbsentRanks(MeshError):
    """Ranks did not answer in time.

    Args:
        topic: what they did not answer.
        ranks: their global ranks.
        seconds: how long the others waited.

    Attributes:
        present: on rank 0, the outcomes of the ranks that did answer.
    """

    def __init__(self, topic: str, ranks: tuple[int, ...], seconds: float) -> None:
        super().__init__(f"{topic}: no answer from ranks {ranks} within {seconds:g} s")
        self.topic, self.ranks, self.seconds = topic, ranks, seconds
        self.present: dict[int, Outcome] = {}


@dataclass(frozen=True)
class Outcome:
    """How a step ended on one rank.

    Args:
        value: result, JSON values; None after an error.
        error: text of the error, or that the step did not end in time; empty for success.
    """

    value: Any = None
    error: str = ""


class Attendance:
    """All ranks, connected by a store.

    Args:
        store: a torch.distributed.Store; None for one rank.
        seconds: deadline of each step.
        grace: seconds after a step in which the results of all ranks must arrive.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        seconds: float,
        grace: float = _GRACE_SECONDS,
    ) -> None:
        self._store, self.rank, self.world_size, self.seconds = store, rank, world_size, seconds
        self._grace = grace
        self._missing: tuple[int, ...] = ()
        self.position = ""
        """What the step of this rank waits for; part of the error if the step does not end."""

    def run(self, topic: str, step: Callable[[], Any]) -> dict[int, Outcome]:
        """Run `step` on every rank within the deadline; collective.

        Returns:
            On rank 0 the outcomes of all ranks, by rank; on other ranks the outcome of this rank.

        Raises:
            AbsentRanks: some ranks did not answer; on other ranks than 0: rank 0 did not.
        """
        return self.collect(topic, self._outcome(step), self.seconds + self._grace)

    def collect(self, topic: str, outcome: Outcome, seconds: float) -> dict[int, Outcome]:
        """Send the outcome to rank 0, and wait until rank 0 has all outcomes."""
        if self._store is None:
            return {self.rank: outcome}
        self._store.set(f"{topic}/{self.rank}", json.dumps(asdict(outcome)))
        if self.rank > 0:
            # Rank 0 itself may wait this long for another rank.
            self._wait_for(topic, [f"{topic}/all"], [0], 2 * seconds)
            absent = json.loads(self._store.get(f"{topic}/all"))
            if absent:
                raise AbsentRanks(topic, tuple(absent), seconds)
            return {self.rank: outcome}
        ranks = list(range(self.world_size))
        try:
            self._wait_for(topic, [f"{topic}/{rank}" for rank in ranks], ranks, seconds)
        except AbsentRanks as error:
            self._store.set(f"{topic}/all", json.dumps(error.ranks))
            self._missing = error.ranks
            error.present = self._outcomes(topic, set(ranks) - set(error.ranks))
            raise
        self._store.set(f"{topic}/all", "[]")
        return self._outcomes(topic, ranks)

    def _outcomes(self, topic: str, ranks: Iterable[int]) -> dict[int, Outcome]:
        stored = {rank: json.loads(self._store.get(f"{topic}/{rank}")) for rank in sorted(ranks)}
        return {rank: Outcome(**value) for rank, value in stored.items()}

    def share(self, topic: str, make: Callable[[], Any]) -> Any:
        """Return on every rank what `make` returns on rank 0: JSON values."""
        if self._store is None:
            return make()
        if self.rank == 0:
            self._store.set(topic, json.dumps(make()))
        else:
            self._wait_for(topic, [topic], [0], 2 * (self.seconds + self._grace))
        return json.loads(self._store.get(topic))

    def leave(self) -> None:
        """Let rank 0, which may host the store, wait until the others have left; for `grace`."""
        if self._store is None:
            return
        deadline, count = time.monotonic() + self._grace, self.world_size - len(self._missing)
        with suppress(RuntimeError):
            self._store.add("left", 1)
            while self.rank == 0 and self._store.add("left", 0) < count:
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_SECONDS)

    def _wait_for(self, topic: str, keys: list[str], ranks: list[int], seconds: float) -> None:
        """Wait until all keys exist, the i-th of which `ranks[i]` writes."""
        deadline, waiting = time.monotonic() + seconds, dict(zip(keys, ranks, strict=True))
        while True:
            with suppress(RuntimeError):  # the store is gone: rank 0 is named below
                waiting = {k: rank for k, rank in waiting.items() if not self._store.check([k])}
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise AbsentRanks(topic, tuple(waiting.values()), seconds)
            time.sleep(_POLL_SECONDS)

    def _outcome(self, step: Callable[[], Any]) -> Outcome:
        """Run the step in a thread: a call of torch that hangs cannot be interrupted."""
        outcomes: list[Outcome] = []
        self.position = ""

        def run() -> None:
            try:
                outcomes.append(Outcome(step()))
            # An error of any class is the result of the check.
            except Exception as error:
                text = " ".join(str(error).split()) or type(error).__name__
                where = f" (waiting for {self.position})" if self.position else ""
                outcomes.append(Outcome(None, f"{text}{where}"))

        thread = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
        thread.start()
        thread.join(self.seconds)
        if outcomes:
            return outcomes[0]
        where = f", waiting for {self.position}" if self.position else ""
        return Outcome(None, f"not done within {self.seconds:g} s{where}")


Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        check: name of the check, such as "clocks".
        text: what was found, with numbers.
        remedy: what to do; empty only if the status is "ok" or "skipped".
    """

    status: Status
    check: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.status in ("ok", "skipped"), f"{self.check}: no remedy"


def as_table(findings: Sequence[Finding]) -> str:
    """Return one line per finding, the remedy after the text, and a line that counts them."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        remedy = f"; remedy: {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.status:<7}  {finding.check:<{width}}  {finding.text}{remedy}")
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """Return the verdict in one line."""
    counts = {name: sum(f.status == name for f in findings) for name in ("failed", "warning")}
    if not any(counts.values()):
        return "ok: nothing to repair"
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    return f"{', '.join(parts)}: repair the failed checks first" if counts["failed"] else parts[0]


def has_failed(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "failed" for finding in findings)


def as_values(findings: Sequence[Finding], **facts: Any) -> dict[str, Any]:
    """Return JSON values: `ok`, `checks`, and `facts` under their names."""
    return {
        "ok": not has_failed(findings),
        **facts,
        "checks": [asdict(finding) for finding in findings],
    }


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers with runs folded: 0-3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def judge_launch(launch: LaunchVariables) -> Finding:
    """Return the finding about the launcher; failed if the ranks cannot find each other."""
    found = launch.values
    if launch.launcher == "none":
        return Finding("ok", "launch", f"one process; for several ranks, {START}")
    if problem := launch.problem():
        return Finding("failed", "launch", *problem)
    if "LOCAL_RANK" not in found:
        return Finding(
            "warning",
            "launch",
            "LOCAL_RANK is not set: ranks that see several GPUs would all use the first one",
            "set it to the index of the rank on its node, or start with torchrun",
        )
    master = f"{found.get('MASTER_ADDR', '')}:{found.get('MASTER_PORT', '')}"
    ranks = f"{found['WORLD_SIZE']} ranks"
    return Finding("ok", "launch", f"{launch.launcher}: {ranks}, store at {master}")
