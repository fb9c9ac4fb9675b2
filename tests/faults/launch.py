"""Starts the ranks of a job as torchrun does, but from a fork server that has imported torch.

What is the same: the environment, a store that no rank holds, SIGTERM to all others as soon as one
has ended badly, SIGKILL to those that stay. What differs: a start takes a tenth of a second instead
of ten.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.faults.training import Job, main
from tests.ranks.pool import PRELOAD

_CONTEXT = multiprocessing.get_context("forkserver")
# multiprocessing looks after all its children whenever one is started, in whatever thread.
_PROCESSES = threading.Lock()

GLANCE = 0.01
# How often the ranks are looked at, and how long those that were told to end may take: torchrun's
# are 0.1 and 30 s.
INTERVAL, GRACE = 0.1, 12.0


class Ended(NamedTuple):
    """How a life of a run ended.

    Args:
        codes: exit code of each rank; that of a signal is negative.
        texts: what each rank wrote on its terminal.
        at: when the last process had ended, on the monotonic clock.
        forced: the ranks that SIGTERM did not end.
        left: processes that were still there afterwards.
    """

    codes: list[int]
    texts: list[str]
    at: float
    forced: list[int]
    left: list[int]

    def __str__(self) -> str:
        parts = [f"exit codes {self.codes}, forced {self.forced}, left {self.left}"]
        for rank, text in enumerate(self.texts):
            parts.append(f"--- rank {rank}\n{text}")
        return "\n".join(parts)

    def last_words(self, rank: int) -> str:
        """The message that a rank ends with; "" for none."""
        _, found, words = self.texts[rank].rpartition(f"error: rank {rank}: ")
        return words.strip() if found else ""


@dataclass
class _Rank:
    process: Any
    output: Path


def run(
    job: Job,
    store: dist.TCPStore | None = None,
    *,
    limit: float = 90.0,
    watch: Callable[[list[int]], None] | None = None,
) -> Ended:
    """One life of the job.

    Args:
        store: of the lives before; None: a new one.
        limit: seconds after which whatever is left is killed, and counts as forced.
        watch: called over and over with the process ids of the ranks, from start to end.
    """
    store = store or store_for_ranks()
    life = sum(1 for _ in Path(job.folder).glob("output*.0"))
    ranks = [_start(job, rank, store.port, life) for rank in range(job.world_size)]
    pids = [rank.process.pid for rank in ranks]
    try:
        forced = _attend(ranks, pids, time.monotonic() + limit, watch)
        at = time.monotonic()
        left = _left(pids)
    finally:
        for pid in pids:
            _signal_session(pid, signal.SIGKILL)
    texts = [rank.output.read_text(errors="replace") for rank in ranks]
    return Ended([_code(rank) or 0 for rank in ranks], texts, at, forced, left)


def store_for_ranks() -> dist.TCPStore:
    """As torchrun --standalone keeps one, over all restarts."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _start(job: Job, rank: int, port: int, life: int) -> _Rank:
    output = Path(job.folder) / f"output{life}.{rank}"
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # As on a node none of whose ranks has failed: there torchrun counts no restart.
        "TORCHELASTIC_RESTART_COUNT": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    with _PROCESSES:
        _CONTEXT.set_forkserver_preload(PRELOAD)
        process = _CONTEXT.Process(target=_live, args=(job.to_json(), variables, str(output)))
        process.daemon = True
        process.start()
    return _Rank(process, output)


def _live(job: str, variables: dict[str, str], output: str) -> None:
    """In the process of a rank."""
    from tests.faults.plant import die_with_parent

    os.setsid()
    die_with_parent()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    main(Job.of_json(job))


def _attend(
    ranks: list[_Rank],
    pids: list[int],
    deadline: float,
    watch: Callable[[list[int]], None] | None,
) -> list[int]:
    """Until all have ended; returns those that had to be killed."""
    last_call = deadline
    told = False
    while True:
        codes = [_code(rank) for rank in ranks]
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running:
            return []
        if watch is not None:
            watch(pids)
        if not told and any(code not in (None, 0) for code in codes):
            time.sleep(INTERVAL)
            for rank in running:
                _signal(pids[rank], signal.SIGTERM)
            told, last_call = True, min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > last_call:
            for rank in running:
                _signal_session(pids[rank], signal.SIGKILL)
            for rank in running:
                ranks[rank].process.join(5.0)
            return running
        time.sleep(GLANCE)


def _code(rank: _Rank) -> int | None:
    with _PROCESSES:
        code: int | None = rank.process.exitcode
        return code


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_session(pid: int, number: signal.Signals) -> None:
    for other in _in_sessions([pid]):
        _signal(other, number)


def _left(pids: list[int], patience: float = 2.0) -> list[int]:
    """What the ranks have started and left behind: each is the head of a session of its own."""
    until = time.monotonic() + patience
    while (left := _in_sessions(pids)) and time.monotonic() < until:
        time.sleep(GLANCE)
    return left


def _in_sessions(heads: list[int]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in brackets, may hold anything; after it: state, parent, group, session.
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and int(session) in heads:
                found.append(int(entry.parent.name))
    return found
