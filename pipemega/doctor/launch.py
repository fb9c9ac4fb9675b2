"""Reads the variables that the launcher has set for this process.  Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipemega.doctor.findings import Finding, listed

Launcher = Literal["torchrun", "srun", "variables", "none"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")

# Ports of jobs of one node must differ: they follow from the job id.
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000

_START = "start the ranks with torchrun, on several nodes one torchrun per node (docs/multinode.md)"


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Args:
        variables: the environment for torch.distributed, with what was derived from Slurm's.
        findings: of the check "launch"; failed if the ranks cannot find each other.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    variables: dict[str, str]
    findings: tuple[Finding, ...]


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Return how this process was started, and what is missing."""
    found = {name: environment[name] for name in (*_NEEDED, "LOCAL_RANK") if name in environment}
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    launcher: Launcher = "variables" if found.keys() & {"RANK", "WORLD_SIZE"} else "none"
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher = "torchrun"
    elif launcher == "none" and tasks.isdecimal() and int(tasks) > 1:
        launcher = "srun"
        found = _variables_of_slurm(environment) | found
    findings = tuple(_findings(launcher, found, environment))
    numbers = {name: int(found[name]) if _is_number(found.get(name)) else 0 for name in _NUMBERS}
    return Launch(
        launcher,
        numbers["RANK"],
        max(1, numbers["WORLD_SIZE"]),
        numbers["LOCAL_RANK"],
        found,
        findings,
    )


def _findings(
    launcher: Launcher, found: Mapping[str, str], environment: Mapping[str, str]
) -> list[Finding]:
    if launcher == "none":
        return [Finding("ok", "launch", f"one process; for several ranks, {_START}")]
    missing = [name for name in _NEEDED if name not in found]
    if found.get("WORLD_SIZE") == "1":
        missing = []
    if missing:
        have = f"found {listed(sorted(found))}" if found else "found none of the others"
        return [Finding("failed", "launch", f"{listed(missing)} not set ({have})", _START)]
    wrong = [f"{n}={found[n]!r}" for n in _NUMBERS if n in found and not _is_number(found[n])]
    if wrong:
        return [Finding("failed", "launch", f"not a number: {listed(wrong)}", _START)]
    if int(found["RANK"]) >= int(found["WORLD_SIZE"]):
        text = f"RANK={found['RANK']} is not below WORLD_SIZE={found['WORLD_SIZE']}"
        return [Finding("failed", "launch", text, f"number the ranks from 0, or {_START}")]
    master = f"{found.get('MASTER_ADDR', '')}:{found.get('MASTER_PORT', '')}"
    if launcher == "srun":
        return [
            Finding(
                "warning",
                "launch",
                f"srun without torchrun: {listed(_NEEDED)} are not set; this check derived them "
                f"from Slurm's variables ({found['WORLD_SIZE']} tasks, {master})",
                f"a training script needs them: {_START}, or export them in the job script",
            )
        ]
    if "LOCAL_RANK" not in found and "SLURM_LOCALID" not in environment:
        return [
            Finding(
                "warning",
                "launch",
                "LOCAL_RANK is not set: ranks that see several GPUs would all use the first one",
                "set it to the index of the rank on its node, or start with torchrun",
            )
        ]
    return [Finding("ok", "launch", f"{launcher}: {found['WORLD_SIZE']} ranks, store at {master}")]


def _variables_of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = environment.get("SLURM_JOB_ID", "0")
    derived = {
        "RANK": environment.get("SLURM_PROCID", ""),
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", ""),
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(_FIRST_PORT + (int(job) if job.isdecimal() else 0) % _NUM_PORTS),
    }
    return {name: value for name, value in derived.items() if value}


def first_host(nodes: str) -> str:
    """Return the first host of a list of Slurm, such as node[01-04,07],gpu5."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    assert match is not None, "every part of the pattern may be empty"
    return "".join(part or "" for part in match.groups())


def _is_number(text: str | None) -> bool:
    return text is not None and text.isdecimal()
