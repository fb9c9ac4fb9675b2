"""Counters of a run over all its restarts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# Lines kept for error messages.
_MAX_LINES = 20


@dataclass
class RunStats:
    """Counters that are saved in checkpoints.

    Args:
        nan_steps: steps whose loss or gradient norm is not finite, including overflows of fp16's
            loss scale.
        spent: steps that were skipped or rolled back by `training.on_nonfinite`.
        rollbacks: rollbacks to a checkpoint by `training.on_nonfinite`.
        spikes: loss spikes.
        resumes: times that a process resumed the run from a checkpoint.
        nonfinite: a line for each of the latest steps with inf or nan.
    """

    nan_steps: int = 0
    spent: int = 0
    rollbacks: int = 0
    spikes: int = 0
    resumes: int = 0
    nonfinite: list[str] = field(default_factory=list)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; counters that an older checkpoint lacks start at 0."""
        start = asdict(RunStats())
        for name, value in start.items():
            setattr(self, name, state.get(name, value))

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def add_nonfinite(self, line: str) -> None:
        """Keep a line about a step with inf or nan."""
        self.nonfinite = [*self.nonfinite, line][-_MAX_LINES:]

    def summary(self, skipped: int) -> str:
        """Return "skipped 1, rolled back 0, loss spikes 2, nan 1, resumed 3"."""
        return (
            f"skipped {skipped}, rolled back {self.rollbacks}, loss spikes {self.spikes}, "
            f"nan {self.nan_steps}, resumed {self.resumes}"
        )
