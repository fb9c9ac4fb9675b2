"""`pipemega.run`: shuts down a training script, or ends all ranks with one error message.

How the process of a rank ends after an error: in which order, with which code, and safely.
"""

import atexit
import gc
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from pipemega.data.read_ahead import close_prefetchers
from pipemega.distributed.mesh import launched_rank, launched_world_size
from pipemega.distributed.topology import collect_exit_hooks
from pipemega.errors import Stopped
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.fault_tolerance.failure_store import FailureReport, SigtermWatch, raise_on_sigterm
from pipemega.fault_tolerance.final_report import report_end, report_from_thread
from pipemega.fault_tolerance.preemption import handles_sigterm
from pipemega.fault_tolerance.watchdog import watchdog

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
    """Flush all open files, as the teardown does: the files that the script opened, too."""
    for file in gc.get_objects():
        # Not isinstance(): it reads `__class__`, which some objects compute.
        if issubclass(type(file), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(Exception):
                file.flush()


@contextmanager
def run() -> Iterator[None]:
    """Wrap the body of a script that torchrun starts.

        with pipemega.run():
            engine, *_ = pipemega.initialize(...)
            ...

    An error on any rank ends all ranks with exit code 1 (0 for a rank that torchrun has stopped
    after the failure of another one). One rank prints the cause, with the traceback of the user's
    code; the details of every rank are in a log that the message names. A rank that hangs is ended.
    Without an error the exit hooks run and the process groups are destroyed: if the interpreter
    destroys them at exit, it may abort a run that had succeeded. `sys.exit(0)` and `StopTraining`
    end the script without an error.
    """
    with (
        raise_on_sigterm(handles_sigterm, report_from_thread) as watch,
        watchdog(),
        collect_exit_hooks() as hooks,
    ):
        code: str | int | None = None
        finished: SystemExit | None = None
        try:
            try:
                yield
            except SystemExit as request:
                if request.code not in (None, 0):
                    raise
                finished = request
            for hook in hooks:
                hook()
            if dist.is_initialized():
                dist.barrier()
        except BaseException as error:
            code = _report(error, watch)
        if code is not None:
            if launched_world_size() > 1:
                skip_teardown(code)
            sys.exit(code)
        if dist.is_initialized():
            dist.destroy_process_group()
        if finished is not None:
            raise finished


def _report(error: BaseException, watch: SigtermWatch) -> str | int:
    """Report why the run ends, wait for the other ranks to do so, and return the exit code."""
    watch.begin_report()
    reporter = failure_reporter()
    reported = reporter.report(error, "the script")
    sys.stdout.flush()
    report_end(error, reported, reporter)
    return exit_code(error, reported, reporter.cause, watch)
