"""`pipemega.run`: shuts down a training script, or ends all ranks with one error message."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pipemega.distributed.exit_hooks import collect_exit_hooks
from pipemega.distributed.mesh import launched_world_size
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.fault_tolerance.final_report import report_end, report_from_thread
from pipemega.fault_tolerance.preemption import handles_sigterm
from pipemega.fault_tolerance.process_exit import exit_code, skip_teardown
from pipemega.fault_tolerance.sigterm import SigtermWatch, raise_on_sigterm
from pipemega.fault_tolerance.watchdog import watchdog


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
