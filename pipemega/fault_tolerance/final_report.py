"""The last report of a failed run: one rank prints the error, and every rank logs its details.

The rank that prints is the one that failed; if ranks are missing, the lowest of the others; if all
ranks raise the same error, rank 0. If that rank does not print in time, another one does.

The log with the details of an error from every rank; one rank prints the error itself.
"""

import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipemega.config.launch_variables import launch_variables
from pipemega.distributed.comm_errors import is_connection_loss
from pipemega.distributed.mesh import launched_rank, launched_world_size
from pipemega.errors import PeerError, PipemegaError, Stopped
from pipemega.fault_tolerance.error_propagation import (
    FailureReporter,
    describe_checkpoint,
    describe_restart,
    run_progress,
)
from pipemega.fault_tolerance.failure_store import (
    FailureReport,
    FailureStore,
    call_with_deadline,
    own_identity,
)
from pipemega.monitor import write_to_log_file

FILE = "errors.log"

# How long to wait for a disk that may hang.
_DISK_SECONDS = 2.0


def append_to_error_log(text: str) -> Path | None:
    """Append what this rank knows of an error; return the file, None if it cannot be written.

    The file is in the run's folder. Before a run has one, or if that disk fails, it is in the
    system's folder for temporary files.
    """
    rank, now = launched_rank(), time.strftime("%Y-%m-%d %H:%M:%S")
    entry = f"=== {now} rank {rank} ({own_identity()})\n{text.rstrip()}\n\n".encode()
    for path in _paths():
        if call_with_deadline(lambda path=path: _append(path, entry), _DISK_SECONDS, False):  # type: ignore[misc]
            return path
    return None


def launch_file(kind: str) -> Path:
    """Return a temporary file that all ranks of this node and of this launch have in common."""
    port = launch_variables().values.get("MASTER_PORT", "0")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"pipemega-{os.getuid()}-{os.getppid()}-{port}-{restart}-{kind}"
    return Path(tempfile.gettempdir(), name)


def _paths() -> list[Path]:
    progress = run_progress()
    folder = None if progress is None else progress.log_folder
    return [*([] if folder is None else [folder / FILE]), launch_file(FILE)]


def _append(path: Path, entry: bytes) -> bool:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            # In one write: the ranks share the file.
            return os.write(file, entry) == len(entry)
        finally:
            os.close(file)
    return False


# How long the ranks wait for each other: torchrun stops all as soon as one has exited.
_BARRIER_SECONDS = 2.0

# How long to wait for an answer of the store itself.
_STORE_SECONDS = 0.5

# The import of this module is close to the start of the process.
_STARTED = time.monotonic()


def report_end(error: BaseException, reported: BaseException, reporter: FailureReporter) -> None:
    """Print why the run ends, or log it if another rank prints; wait for the other ranks.

    Args:
        error: what the script raised.
        reported: `error`, or the PeerError that names the cause; from `reporter.report`.
    """
    # A script that calls sys.exit has printed what it wants to.
    prints = reported is not error or not isinstance(error, SystemExit)
    if isinstance(error, Stopped) and reporter.store is None:
        # torchrun reports the rank that failed while the ranks started, or its own signal.
        prints = prints and "TORCHELASTIC_RUN_ID" not in os.environ
    message, cause = describe_error(reported), reporter.cause
    if launched_world_size() == 1:
        if prints:
            print_error(f"{_traceback(reported)}error: {message}")
        return
    log = None
    if cause is not None:
        stack = "".join(traceback.format_exception(error))
        log = append_to_error_log(f"{message}\n\n{stack}")
    store, topic = _connect(), "printed"
    if reporter.store is None:
        # Ranks with different messages do not know of each other.
        topic = hashlib.sha256(message.encode()).hexdigest()[:16]
        store = call_with_deadline(
            lambda: FailureStore.before_mesh(message, _BARRIER_SECONDS), _BARRIER_SECONDS, None
        )

    def text() -> str:
        if cause is None:
            return f"{_traceback(reported)}error: rank {launched_rank()}: {message}"
        if not isinstance(reported, PeerError) and not is_connection_loss(reported):
            own = f"{_traceback(reported)}error: rank {launched_rank()}: {message}"
            return f"{own}{_details(log, describe_checkpoint())}"
        return _cause_line(cause, log)

    is_first = launched_rank() == printing_rank(cause)
    printed = prints and is_first and _print_once(store, topic, text)
    _wait_for_others(store, cause)
    if prints and not printed and not _is_printed(store):
        _print_once(store, topic, text)


def report_from_thread(text: str) -> None:
    """Log why a hanging rank is ended; print the first line if no rank has printed the error."""
    store = _connect()
    log = append_to_error_log(text)
    line = f"error: rank {launched_rank()}: {text.splitlines()[0]}{_details(log)}"
    if not _is_printed(store):
        _print_once(store, "printed", lambda: line)


def printing_rank(cause: FailureReport | None) -> int:
    """Return the rank that prints the error.

    Args:
        cause: the first failure of the run; None if all ranks raise the same error.
    """
    if cause is None:
        return 0
    if cause.rank is not None:
        return cause.rank
    return min(set(range(launched_world_size())) - set(cause.missing), default=0)


def describe_error(error: BaseException) -> str:
    """Return the text of an error; with its class if it is not ours."""
    if isinstance(error, PipemegaError | Stopped):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def print_error(text: str) -> None:
    """Write `text` to stderr, and its error message to the file that torchrun prints at its end."""
    write_to_log_file(text, logging.ERROR)
    # In one write: the ranks share the terminal, and print() writes the newline separately.
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    # As torch's @record does; one line, because the whole text is above torchrun's summary.
    line = re.findall(r"^error: .*", text, re.MULTILINE)[-1]
    extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
    content = {"message": {"message": line, "extraInfo": extra}}
    with suppress(OSError):
        Path(path).write_text(json.dumps(content), encoding="utf-8")


def _cause_line(cause: FailureReport, log: Path | None) -> str:
    """Return one line about the failure of another rank."""
    if cause.summary:
        advice = (describe_checkpoint(), describe_restart())
        return f"error: {cause.summary}{_details(log, *advice)}"
    rank = launched_rank() if cause.rank is None else cause.rank
    first = cause.message.splitlines()[0]
    return f"error: rank {rank}: {first}{_details(log, describe_checkpoint())}"


def _details(log: Path | None, *parts: str) -> str:
    where = () if log is None else (f"details of every rank: {log}",)
    return "".join(f"; {part}" for part in (*parts, *where))


def _traceback(error: BaseException) -> str:
    origin = _foreign_error(error)
    return "" if origin is None else "".join(traceback.format_exception(origin))


def _foreign_error(error: BaseException) -> BaseException | None:
    """Return the error of foreign code, such as a user's layer; its traceback is printed."""
    if isinstance(error, PeerError | KeyboardInterrupt) or is_connection_loss(error):
        return None
    if not isinstance(error, PipemegaError):
        return error
    cause = error.__cause__
    # Our message already contains the text of an OSError.
    return None if cause is None or isinstance(cause, OSError) else _foreign_error(cause)


def _connect() -> FailureStore | None:
    """Return a new connection to the store: another thread may be waiting in the existing one."""
    return call_with_deadline(FailureStore.connect, _STORE_SECONDS, None)


def _print_once(store: FailureStore | None, topic: str, text: Callable[[], str]) -> bool:
    """Print the error unless another rank has; return whether this rank did."""
    claimed: bool | None = None
    if store is not None:
        claimed = call_with_deadline(store.claim_printing, _STORE_SECONDS, None)
        if claimed:
            # Seen by ranks for which the store is gone by then: rank 0 may hold it, and ends.
            _claim_on_node(topic)
    if claimed is None:
        # The store is gone: one rank of each node prints.
        claimed = _claim_on_node(topic)
    if claimed:
        print_error(text())
    return claimed


def _is_printed(store: FailureStore | None) -> bool:
    return store is not None and call_with_deadline(store.is_printed, _STORE_SECONDS, False)


def _claim_on_node(topic: str) -> bool:
    """Return whether this rank is the first of its node that calls this for `topic`."""
    path = launch_file(topic)
    try:
        with suppress(OSError, ValueError):
            # The monotonic clock is the same for all processes: a file of an earlier launch.
            if float(path.read_text()) < _STARTED:
                path.unlink()
        with path.open("x") as file:
            file.write(str(time.monotonic()))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _wait_for_others(store: FailureStore | None, cause: FailureReport | None) -> None:
    """Wait until all ranks are about to exit.

    Exiting early kills peers: if rank 0 hosts the store, others can no longer read the error, and
    torchrun stops all ranks when one has exited.
    """
    if store is None:
        time.sleep(_BARRIER_SECONDS)
        return
    missing = 0 if cause is None else len(cause.missing)
    call_with_deadline(
        lambda: store.exit_barrier(_BARRIER_SECONDS, missing), _BARRIER_SECONDS, None
    )
