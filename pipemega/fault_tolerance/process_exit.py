"""How the process of a rank ends after an error: in which order, with which code, and safely."""

import atexit
import gc
import io
import os
from contextlib import suppress

from pipemega.data.prefetch import close_prefetchers
from pipemega.distributed.mesh import launched_rank
from pipemega.errors import Stopped
from pipemega.fault_tolerance.failure_store import FailureReport
from pipemega.fault_tolerance.sigterm import SigtermWatch

_INTERRUPTED = 130

# torchrun looks every 0.1 s whether a rank has exited, and sends SIGTERM to the others. On a busy
# machine the exit itself takes seconds.
_LAUNCHER_SECONDS = 3.0


def exit_code(
    error: BaseException,
    reported: BaseException,
    cause: FailureReport | None,
    watch: SigtermWatch,
) -> str | int:
    """Return the exit code of this rank; wait until it is its turn to exit.

    torchrun prints seven lines about each rank that exits with an error. So the rank that failed
    exits first. torchrun then stops the others, and a rank that torchrun has stopped exits with 0,
    because the job already has the exit code of the rank that failed.
    """
    if isinstance(error, SystemExit) and error.code is not None:
        return error.code
    if isinstance(reported, KeyboardInterrupt):
        return _INTERRUPTED
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    rank = launched_rank()
    # All ranks may have been stopped before one of them failed; then none may exit with 0.
    others_failed = not isinstance(error, Stopped) if cause is None else cause.rank != rank
    stopped = watch.wait(_seconds_before_exit(rank, cause)) and others_failed
    is_first = cause is None and _local_rank() == 0
    return 0 if stopped and not is_first else 1


def _seconds_before_exit(rank: int, cause: FailureReport | None) -> float:
    """Return how long this rank waits for torchrun's SIGTERM before it exits."""
    first = rank - _local_rank()
    local = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if cause is not None and cause.rank in local:
        return 0.0 if rank == cause.rank else _LAUNCHER_SECONDS
    missing = set() if cause is None else set(cause.missing)
    # A missing rank of this node has exited, or hangs.
    delay = _LAUNCHER_SECONDS / 2 if missing & set(local) else 0.0
    is_first = rank == min(set(local) - missing, default=rank)
    return delay if is_first else delay + _LAUNCHER_SECONDS


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def skip_teardown(code: str | int) -> None:
    """Make the interpreter end without its teardown, after all functions registered with atexit.

    Daemon threads may be in a call of torch: a store that does not answer, a batch, a background
    save. When such a call returns during the teardown of the interpreter, Python ends the thread
    by unwinding its C++ stack, and C++ aborts the process ("terminate called without an active
    exception", exit code -6).
    """
    number = code if isinstance(code, int) else 1
    is_running = False

    def end() -> None:
        nonlocal is_running
        if is_running:
            return
        is_running = True
        # This function was registered last and therefore runs first.
        with suppress(BaseException):
            atexit._run_exitfuncs()
        _flush_files()
        os._exit(number)

    # Do not wait for a dataset: without a teardown its threads do no harm.
    atexit.unregister(close_prefetchers)
    atexit.register(end)


def _flush_files() -> None:
    """Flush all open files, as the teardown does: those of the script, too."""
    for file in gc.get_objects():
        # Not isinstance(): it reads `__class__`, which some objects compute.
        if issubclass(type(file), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(Exception):
                file.flush()
