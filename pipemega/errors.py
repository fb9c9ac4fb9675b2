"""Every error that pipemega raises on purpose.  Floor 0: imports nothing of ours."""


class PipemegaError(Exception):
    """Root of the family, so that a caller can catch ours and nothing else.

    Args:
        on_every_rank: all ranks raise it, at the same point. Then nobody waits for anybody, and a
            caller who catches it may go on; any other error ends the run on all ranks.
    """

    def __init__(self, *args: object, on_every_rank: bool = False) -> None:
        super().__init__(*args)
        self.on_every_rank = on_every_rank


class ConfigError(PipemegaError, ValueError):
    """The configuration asks for something that cannot be; the message names the key."""


class MeshError(PipemegaError, ValueError):
    """The ranks that were started do not fit the mesh that was asked for."""


class ScheduleError(PipemegaError, ValueError):
    """A plan breaks a rule of pipeline schedules; the message shows the plan."""


class DataError(PipemegaError, ValueError):
    """A file, a sample or a batch is missing, damaged or not what was announced."""


class PipelineError(PipemegaError, RuntimeError):
    """A step could not be carried out; the message names rank, stage and micro-batch.

    Args:
        place: where in its plan the rank stood, where that is known; a
            `pipeline.standstill.Place`.
    """

    def __init__(
        self, *args: object, on_every_rank: bool = False, place: object | None = None
    ) -> None:
        super().__init__(*args, on_every_rank=on_every_rank)
        self.place = place


class NonFiniteError(PipelineError):
    """The loss or a gradient is inf or nan; parameters and optimizer state are as before the step.

    Args:
        what: which step, and which of its numbers.
        origin: where in the step it was first, in words; empty if nobody has looked.
        advice: the way out.
    """

    def __init__(
        self, what: str, *, origin: str = "", advice: str = "", on_every_rank: bool = False
    ) -> None:
        found = ": ".join(filter(None, (what, origin)))
        super().__init__(". ".join(filter(None, (found, advice))), on_every_rank=on_every_rank)
        self.what, self.origin, self.advice = what, origin, advice


class ReplicaError(PipelineError):
    """Copies of a parameter, which must be equal, are not; the message names it and the ranks."""


class PeerError(PipelineError):
    """Another rank failed or is gone; the message carries that rank's own first cause."""


class LossScaleError(PipemegaError, RuntimeError):
    """fp16 overflowed at the smallest loss scale; the message carries the history."""


class CheckpointError(PipemegaError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or of another model or mesh."""
