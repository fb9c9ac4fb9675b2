"""Starts the ranks of a job as torchrun does, but from a fork server that has imported torch.

As with torchrun: the environment, a store outside of the ranks, SIGTERM to the other ranks when
one has failed, SIGKILL to those that do not end. Different: a start takes 0.1 s instead of 10 s.
"""

import multiprocessing
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.faults.training import Job, main
from tests.ranks.error_logs import find_logs, read_entries
from tests.ranks.pool import PRELOAD

_CONTEXT = multiprocessing.get_context("forkserver")
# multiprocessing polls all its children whenever one is started, from any thread.
_PROCESSES = threading.Lock()

POLL_SECONDS = 0.01
# Poll interval, and time between SIGTERM and SIGKILL: torchrun uses 0.1 and 30 s.
INTERVAL, GRACE_SECONDS = 0.1, 12.0

_TORCHRUN = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    # As on a node without failed ranks, where torchrun counts no restart.
    "TORCHELASTIC_RESTART_COUNT": "0",
}


class Ended(NamedTuple):
    """How one incarnation of a run ended.

    Args:
        codes: exit code of each rank; negative for a signal.
        texts: the output of each rank.
        details: what each rank has written to the log of errors.
        at: when the last process had ended, on the monotonic clock.
        forced: ranks that SIGTERM did not end.
        left: processes that still ran afterwards.
    """

    codes: list[int]
    texts: list[str]
    details: dict[int, str]
    at: float
    forced: list[int]
    left: list[int]

    def __str__(self) -> str:
        parts = [f"exit codes {self.codes}, forced {self.forced}, left {self.left}"]
        for rank, text in enumerate(self.texts):
            parts.append(f"--- rank {rank}\n{text}")
        for rank, text in self.details.items():
            parts.append(f"--- rank {rank} in the log\n{text}")
        return "\n".join(parts)

    @property
    def printed(self) -> list[str]:
        """The error messages on the terminal."""
        return [message for text in self.texts for message in re.findall(r"^error: .*", text, re.M)]

    @property
    def error_lines(self) -> int:
        """Lines that the ranks have printed, without those of the logger."""
        return sum(
            not line.startswith("[pipemega]") for text in self.texts for line in text.splitlines()
        )


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
    store_in_rank0: bool = False,
) -> Ended:
    """Run one incarnation of the job.

    Args:
        store: that of the earlier incarnations; None: a new one.
        limit: seconds after which running ranks are killed; they count as forced.
        watch: called repeatedly with the process ids of the ranks while they run.
        store_in_rank0: start the ranks as a shell script does: rank 0 has the store, and nothing
            ends the other ranks when one has failed.
    """
    store = None if store_in_rank0 else store or store_for_ranks()
    port = free_port() if store is None else store.port
    incarnation = sum(1 for _ in Path(job.folder).glob("output*.0"))
    logged = len(_log_of_errors(job))
    launcher = {} if store is None else _TORCHRUN
    ranks = [_start(job, rank, port, incarnation, launcher) for rank in range(job.world_size)]
    pids = [rank.process.pid for rank in ranks]
    try:
        forced = _wait_for_ranks(
            ranks, pids, time.monotonic() + limit, watch, signals=store is not None
        )
        at = time.monotonic()
        left = _left(pids)
    finally:
        for pid in pids:
            _signal_session(pid, signal.SIGKILL)
    texts = [rank.output.read_text(errors="replace") for rank in ranks]
    details = read_entries(_log_of_errors(job)[logged:])
    return Ended([_code(rank) or 0 for rank in ranks], texts, details, at, forced, left)


def _log_of_errors(job: Job) -> str:
    """Return the log in the run's folder; before a run has one, that in the temporary folder."""
    return "".join(path.read_text() for path in find_logs(job.saved_in, Path(job.folder)))


def store_for_ranks() -> dist.TCPStore:
    """Return a store that is kept over restarts, as that of torchrun --standalone."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start(job: Job, rank: int, port: int, incarnation: int, launcher: Mapping[str, str]) -> _Rank:
    output = Path(job.folder) / f"output{incarnation}.{rank}"
    output.touch()  # a rank may be killed before it opens the file
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **launcher,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    with _PROCESSES:
        _CONTEXT.set_forkserver_preload(PRELOAD)
        process = _CONTEXT.Process(target=_rank_main, args=(job.to_json(), variables, str(output)))
        process.daemon = True
        process.start()
    return _Rank(process, output)


def _rank_main(job: str, variables: dict[str, str], output: str) -> None:
    """Main function of a rank's process."""
    from tests.faults.fault_injection import die_with_parent

    os.setsid()
    die_with_parent()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    tempfile.tempdir = os.path.dirname(output)
    main(Job.of_json(job))


def _wait_for_ranks(
    ranks: list[_Rank],
    pids: list[int],
    deadline: float,
    watch: Callable[[list[int]], None] | None,
    *,
    signals: bool,
) -> list[int]:
    """Wait until all ranks have ended; return those that had to be killed.

    Args:
        signals: send SIGTERM to the others when a rank has failed.
    """
    kill_at = deadline
    signalled = not signals
    while True:
        codes = [_code(rank) for rank in ranks]
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running:
            return []
        if watch is not None:
            watch(pids)
        if not signalled and any(code not in (None, 0) for code in codes):
            time.sleep(INTERVAL)
            for rank in running:
                _signal(pids[rank], signal.SIGTERM)
            signalled, kill_at = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > kill_at:
            for rank in running:
                _signal_session(pids[rank], signal.SIGKILL)
            for rank in running:
                ranks[rank].process.join(5.0)
            return running
        time.sleep(POLL_SECONDS)


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


def _left(pids: list[int], seconds: float = 2.0) -> list[int]:
    """Return the processes that still run in the sessions of the ranks."""
    until = time.monotonic() + seconds
    while (left := _in_sessions(pids)) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return left


def _in_sessions(heads: list[int]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name is in parentheses; after it: state, parent, group, session.
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and int(session) in heads:
                found.append(int(entry.parent.name))
    return found
