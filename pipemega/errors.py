"""The exception classes of pipemega, and the cause in a long error text."""

from collections.abc import Iterator
from contextlib import contextmanager


class PipemegaError(Exception):
    """Base class of all pipemega errors.

    Args:
        on_every_rank: all ranks raise the error at the same point, so no rank waits for another
            and a caller may catch it and continue; any other error ends the run on all ranks.
    """

    def __init__(self, *args: object, on_every_rank: bool = False) -> None:
        super().__init__(*args)
        self.on_every_rank = on_every_rank


class ConfigError(PipemegaError, ValueError):
    """The configuration cannot be run; the message names the key.

    Args:
        problems: if there are several errors, one line for each; the message contains all of them.
    """

    def __init__(
        self, *args: object, on_every_rank: bool = False, problems: tuple[str, ...] = ()
    ) -> None:
        super().__init__(*args, on_every_rank=on_every_rank)
        self.problems = problems


class MeshError(PipemegaError, ValueError):
    """The number of ranks or GPUs does not fit the mesh, or rank 0 cannot be reached."""


class ScheduleError(PipemegaError, ValueError):
    """A plan breaks a rule of pipeline schedules; the message shows the plan."""


class DataError(PipemegaError, ValueError):
    """A file, a sample or a batch is missing, damaged or of an unexpected form."""


class PipelineError(PipemegaError, RuntimeError):
    """A step failed; the message names rank, stage and micro-batch.

    Args:
        place: the position of the rank in its plan, a
            `pipeline.plan.deadlock_report.PlanPosition`; None if unknown.
    """

    def __init__(
        self, *args: object, on_every_rank: bool = False, place: object | None = None
    ) -> None:
        super().__init__(*args, on_every_rank=on_every_rank)
        self.place = place


class NonFiniteError(PipelineError):
    """The loss or a gradient is inf or nan; parameters and optimizer state are as before the step.

    Args:
        what: the step, and whether its loss or its gradient.
        origin: text that names the first operation with inf or nan; empty if not searched.
        advice: what the user can do.
    """

    def __init__(
        self, what: str, *, origin: str = "", advice: str = "", on_every_rank: bool = False
    ) -> None:
        finding = ": ".join(filter(None, (what, origin)))
        super().__init__(". ".join(filter(None, (finding, advice))), on_every_rank=on_every_rank)
        self.what, self.origin, self.advice = what, origin, advice


class ReplicaError(PipelineError):
    """Replicas of a parameter differ; the message names the parameter and the ranks."""


class PeerError(PipelineError):
    """Another rank failed or is gone; the message contains that rank's error."""


class LossScaleError(PipemegaError, RuntimeError):
    """fp16 overflowed at the smallest loss scale; the message contains the history."""


class CheckpointError(PipemegaError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or of another model or mesh."""


class StopTraining(SystemExit):
    """A signal or a time limit has ended the run, which is saved; the exit code is 0.

    Args:
        reason: such as "SIGTERM on all ranks".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


class FolderLockedError(CheckpointError):
    """Another run uses a folder, or has taken it over; the message names the run."""


class Stopped(BaseException):
    """SIGTERM was received: from torchrun after another rank ended, or from the job scheduler."""


@contextmanager
def code_of_user(what: str, kind: type[PipemegaError] = ConfigError) -> Iterator[None]:
    """Turn an error of the caller's code in the block into `kind`; errors of pipemega stay.

    Only calls of that code belong into the block: an error of pipemega itself must end the run.
    """
    try:
        yield
    except PipemegaError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error


def short_cause(error: BaseException) -> str:
    """Return the one sentence of torch's long error texts that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in lines if "GLOBAL" in line), lines[0] if lines else "")
    return cause.split(". ")[0] or type(error).__name__
