"""Identity of a process: enough to decide later, on this or another host, whether it has ended."""

import getpass
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class ProcessIdentity:
    """A process on a host, and the Slurm job that it belongs to.

    Args:
        host, pid, user: as the system reports them.
        boot: id of the host's current boot.
        namespace: the pid namespace; containers on one host have different ones.
        start_ticks: start time of the process since boot, because pids are used again; 0: unknown.
        job: cluster and id of the Slurm job; empty without Slurm.
        requeues: how often Slurm has requeued the job.
    """

    host: str
    pid: int
    user: str = ""
    boot: str = ""
    namespace: str = ""
    start_ticks: int = 0
    job: str = ""
    requeues: int = 0

    @classmethod
    def current(cls) -> "ProcessIdentity":
        """Return the identity of this process."""
        return cls._of(os.getpid())

    @classmethod
    def parent(cls) -> "ProcessIdentity":
        """Return the identity of the parent process, such as torchrun, in the same job."""
        return cls._of(os.getppid())

    @classmethod
    def _of(cls, pid: int) -> "ProcessIdentity":
        user = str(os.getuid()) if hasattr(os, "getuid") else ""
        with suppress(OSError, KeyError, ImportError):
            user = getpass.getuser()
        environ = os.environ
        job = environ.get("SLURM_JOB_ID", "")
        requeues = environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            host=socket.gethostname(),
            pid=pid,
            user=user,
            boot=_boot_id(),
            namespace=_pid_namespace(),
            start_ticks=_status_of(pid).start_ticks,
            job=f"{environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else "",
            requeues=int(requeues) if requeues.isdigit() else 0,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ProcessIdentity":
        """Restore the result of `to_dict`.

        Raises:
            ValueError: host or pid is missing, or a value has another type.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        known = {name: value for name, value in values.items() if name in kinds}
        wrong = [n for n, value in known.items() if type(value) is not kinds[n]]
        if wrong or not {"host", "pid"} <= known.keys():
            raise ValueError(f"not the identity of a process: {dict(values)}")
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def describe(self) -> str:
        """Return for example "process 4711 on node7 (user alice, Slurm job 12)"."""
        user = f"user {self.user}" if self.user else ""
        job = f"Slurm job {self.job.rpartition('/')[2]}" if self.job else ""
        more = ", ".join(filter(None, (user, job)))
        return f"{self} ({more})" if more else str(self)

    def has_ended(self) -> bool:
        """Return True if the process has certainly ended; False if it runs or is out of sight."""
        now = ProcessIdentity.current()
        if self.job and self.job == now.job and self.requeues < now.requeues:
            # Slurm ends all processes of a job before it requeues the job.
            return True
        return self._is_on_this_host(now) and not self._is_running()

    def is_running_here(self) -> bool:
        """Return True if the process runs, and can be seen from this process."""
        return self._is_on_this_host(ProcessIdentity.current()) and self._is_running()

    def is_sibling(self) -> bool:
        """Return True if the process runs here, with the same parent process as this one."""
        is_other = self.pid != os.getpid() and self.is_running_here()
        return is_other and _status_of(self.pid).parent == os.getppid()

    def _is_on_this_host(self, now: "ProcessIdentity") -> bool:
        return (self.host, self.boot, self.namespace) == (now.host, now.boot, now.namespace)

    def _is_running(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            pass  # a process of another user
        status = _status_of(self.pid)
        ticks = self.start_ticks, status.start_ticks
        reused = all(ticks) and ticks[0] != ticks[1]
        # Z: it has ended, and its parent has not read its exit code yet.
        return status.state != "Z" and not reused


class _Status(NamedTuple):
    """State, parent and start time of a process; "" and 0: unknown."""

    state: str = ""
    parent: int = 0
    start_ticks: int = 0


def _status_of(pid: int) -> _Status:
    """Return the status of a process, from Linux's /proc."""
    try:
        # The name is in parentheses, and may contain spaces and parentheses.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return _Status(values[0], int(values[1]), int(values[19]))
    except (OSError, ValueError, IndexError):
        return _Status()


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _pid_namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
