"""The variables that the launcher of this process has set, under the names of torchrun.

torchrun, torch.distributed.launch      RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
srun (Slurm)                            SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, ...
mpirun (Open MPI)                       OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, ...

If RANK is not set, these variables follow from the variables of srun or mpirun. Variables of
torchrun that are set keep their values: `MASTER_PORT=29500 srun python pretrain_gpt.py`.

Imports no torch.
"""

import os
import re
import zlib
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Launcher = Literal["torchrun", "srun", "mpirun", "variables", "none"]

NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START: Final = (
    "start the ranks with torchrun, on several nodes one torchrun per node, or with srun or mpirun "
    "(docs/long_runs.md)"
)
_NAMES: Final = (*NEEDED, "LOCAL_RANK")
_NUMBERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")

# Ports of jobs of one node must differ: they follow from the job id.
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


class LaunchVariables(NamedTuple):
    """How this process was started.

    Args:
        launcher: "variables" if RANK or WORLD_SIZE is set, but not by torchrun.
        values: name -> value of torchrun's variables that are set or follow from others.
    """

    launcher: Launcher
    values: Mapping[str, str]

    def problem(self) -> tuple[str, str] | None:
        """Return why the ranks cannot find each other, and what to do; None if they can."""
        values = self.values
        missing = [name for name in NEEDED if name not in values]
        if values.get("WORLD_SIZE") == "1":
            missing = []
        if missing:
            have = f"found {', '.join(sorted(values))}" if values else "found none of the others"
            remedy = START
            if missing == ["MASTER_ADDR"] and self.launcher in ("mpirun", "srun"):
                example = (
                    "mpirun -x MASTER_ADDR=node0" if self.launcher == "mpirun" else "export it"
                )
                remedy = f"set it to the host of rank 0 ({example})"
            return f"{', '.join(missing)} not set ({have})", remedy
        wrong = [f"{n}={values[n]!r}" for n in _NUMBERS if not values.get(n, "0").isdecimal()]
        if wrong:
            return f"not a number: {', '.join(wrong)}", START
        if not 0 < int(values.get("MASTER_PORT", "1")) < 65536:
            port = values["MASTER_PORT"]
            return f"MASTER_PORT={port} is no port", "set it to a free port, 1024 to 65535"
        if int(values.get("RANK", "0")) >= int(values["WORLD_SIZE"]):
            text = f"RANK={values['RANK']} is not below WORLD_SIZE={values['WORLD_SIZE']}"
            return text, f"number the ranks from 0, or {START}"
        return None

    def number(self, name: str, default: int) -> int:
        """Return a variable as a number; `default` if it is not a number, or missing."""
        text = self.values.get(name, "")
        return int(text) if text.isdecimal() else default


def launch_variables(environment: Mapping[str, str] = os.environ) -> LaunchVariables:
    """Return the variables of torchrun: set, or derived from the variables of srun or mpirun."""
    given = {name: environment[name] for name in _NAMES if environment.get(name)}
    local = environment.get("OMPI_COMM_WORLD_LOCAL_RANK") or environment.get("SLURM_LOCALID")
    if local:
        given.setdefault("LOCAL_RANK", local)
    if "TORCHELASTIC_RUN_ID" in environment:
        return LaunchVariables("torchrun", given)
    if "RANK" in given:
        return LaunchVariables("variables", given)
    # mpirun first: in a Slurm job it starts its processes by srun.
    for launcher, derive in (("mpirun", _of_open_mpi), ("srun", _of_slurm)):
        derived = {name: value for name, value in derive(environment).items() if value}
        if derived:
            return LaunchVariables(launcher, derived | given)  # type: ignore[arg-type]
    return LaunchVariables("variables" if "WORLD_SIZE" in given else "none", given)


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a task of srun; {} if this is none of several tasks."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    # The batch script has SLURM_NTASKS and SLURM_PROCID too, and is one process.
    if not tasks and environment.get("ENVIRONMENT") != "BATCH":
        tasks = environment.get("SLURM_NTASKS") or environment.get("SLURM_NPROCS", "")
    if "SLURM_PROCID" not in environment or not _is_several(tasks):
        return {}
    job, step = (environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "MASTER_ADDR": _first_host_of_slurm(environment),
        "MASTER_PORT": _port(_number(job) + 101 * _number(step)),
    }


def _of_open_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process of Open MPI's mpirun; {} if it is none of several."""
    size = environment.get("OMPI_COMM_WORLD_SIZE", "")
    if "OMPI_COMM_WORLD_RANK" not in environment or not _is_several(size):
        return {}
    # Open MPI does not tell a rank where rank 0 is, except that all are on one node. In a Slurm
    # job, rank 0 is on the first node.
    one_node = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", size) == size
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    return {
        "RANK": environment["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1" if one_node else _first_host_of_slurm(environment),
        "MASTER_PORT": _port(zlib.crc32(job.encode())),
    }


def _first_host_of_slurm(environment: Mapping[str, str]) -> str:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return first_host(next((environment[name] for name in names if environment.get(name)), ""))


def first_host(nodes: str) -> str:
    """Return the first host of a list of Slurm, such as node[01-04,07],gpu5."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    assert match is not None, "every part of the pattern may be empty"
    return "".join(part or "" for part in match.groups())


def _port(job: int) -> str:
    return str(_FIRST_PORT + job % _NUM_PORTS)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _is_several(size: str) -> bool:
    # Text that is not a number is an error that the caller reports.
    return size not in ("", "0", "1")
