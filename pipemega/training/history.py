"""What has befallen a run so far, over all its restarts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Lines that an error message may look back on.
_KEPT_LINES = 20


@dataclass
class RunHistory:
    """Counters that a checkpoint carries on.

    Args:
        nan_steps: with a loss or a gradient norm that is not finite, those of fp16's scale among
            them.
        spent: steps that were skipped or rolled back for `training.on_nonfinite`.
        rollbacks: times that a checkpoint was loaded for it.
        spikes: losses that jumped.
        resumes: times that the run went on from a checkpoint after its process had ended.
        nonfinite: a line for each of the last steps with inf or nan.
    """

    nan_steps: int = 0
    spent: int = 0
    rollbacks: int = 0
    spikes: int = 0
    resumes: int = 0
    nonfinite: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "RunHistory":
        """From `state_dict`; what an older checkpoint does not have begins at 0."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in state.items() if key in known})

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def note(self, line: str) -> None:
        """Keeps a line about a step with inf or nan."""
        self.nonfinite = [*self.nonfinite, line][-_KEPT_LINES:]

    def in_words(self, skipped: int) -> str:
        """For the end of a run: "skipped 1, rolled back 0, loss spikes 2, nan 1, resumed 3"."""
        return (
            f"skipped {skipped}, rolled back {self.rollbacks}, loss spikes {self.spikes}, "
            f"nan {self.nan_steps}, resumed {self.resumes}"
        )
