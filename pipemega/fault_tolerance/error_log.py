"""The log with the details of an error from every rank; one rank prints the error itself."""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pipemega.config.launch_variables import launch_variables
from pipemega.distributed.mesh import launched_rank
from pipemega.fault_tolerance.failure_store import call_with_deadline, own_identity
from pipemega.fault_tolerance.run_progress import run_progress

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
