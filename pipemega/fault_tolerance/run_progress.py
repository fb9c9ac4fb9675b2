"""What the error message says about a run: its step, its newest checkpoint, how to continue."""

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipemega.checkpoint import newest
from pipemega.fault_tolerance.failure_store import call_with_deadline
from pipemega.storage.filesystem import is_remote

# How long to wait for the folder of checkpoints, which may be on a disk that hangs.
_DISK_SECONDS = 2.0


@dataclass(frozen=True)
class RunProgress:
    """The state of a run.

    Args:
        steps: completed training steps.
        checkpoints: folder or URL of its checkpoints; None if it has none.
        resumes: whether the same command continues from the newest checkpoint.
        folder: for the log of errors; None: the folder of the checkpoints, if it is local.
    """

    steps: int
    checkpoints: str | None
    resumes: bool
    folder: Path | None = None

    @property
    def log_folder(self) -> Path | None:
        if self.folder is not None or self.checkpoints is None or is_remote(self.checkpoints):
            return self.folder
        return Path(self.checkpoints)

    @property
    def newest_checkpoint(self) -> str | None:
        """The tag of the newest checkpoint; None if there is none, or it cannot be read."""
        folder = self.checkpoints
        if folder is None:
            return None
        return call_with_deadline(lambda: newest(folder), _DISK_SECONDS, None)


_progress: Callable[[], Callable[[], RunProgress] | None] | None = None


def register_progress(progress: Any) -> None:
    """Make `progress`, a method without arguments, return the RunProgress of this process."""
    global _progress
    # Do not keep the engine in memory.
    _progress = weakref.WeakMethod(progress)


def run_progress() -> RunProgress | None:
    """Return the progress of this process's run; None before its engine exists."""
    progress = None if _progress is None else _progress()
    return None if progress is None else progress()


def describe_step(doing: str) -> str:
    """Return when an error happened, as in "in step 14".

    Args:
        doing: what the rank did.
    """
    progress = run_progress()
    if progress is None:
        return "while the run started"
    if doing == "train_batch":
        return f"in step {progress.steps + 1}"
    return f"after step {progress.steps}" + ("" if doing == "the script" else f", in {doing}")


def describe_checkpoint() -> str:
    """Return the newest checkpoint, as in "newest checkpoint: global_step10"."""
    progress = run_progress()
    tag = None if progress is None else progress.newest_checkpoint
    return "no checkpoint yet" if tag is None else f"newest checkpoint: {tag}"


def describe_restart() -> str:
    """Return how the run continues after the loss of a rank."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts < most:
        return f"torchrun starts the ranks again (restart {restarts + 1} of {most})"
    progress = run_progress()
    if progress is None or progress.resumes or progress.newest_checkpoint is None:
        return "start again with the same command"
    return f'start again with checkpoint.load "{progress.checkpoints}", or training.resume "auto"'
