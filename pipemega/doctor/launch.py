"""Checks the variables that the launcher has set for this process.  Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipemega.config.launch_variables import START, Launcher, LaunchVariables, launch_variables
from pipemega.doctor.findings import Finding


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Args:
        variables: the environment for torch.distributed, with what follows from other variables.
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
    found = launch_variables(environment)
    return Launch(
        found.launcher,
        found.number("RANK", 0),
        max(1, found.number("WORLD_SIZE", 1)),
        found.number("LOCAL_RANK", 0),
        dict(found.values),
        (_finding(found),),
    )


def _finding(launch: LaunchVariables) -> Finding:
    found = launch.values
    if launch.launcher == "none":
        return Finding("ok", "launch", f"one process; for several ranks, {START}")
    if problem := launch.problem():
        return Finding("failed", "launch", *problem)
    if "LOCAL_RANK" not in found:
        return Finding(
            "warning",
            "launch",
            "LOCAL_RANK is not set: ranks that see several GPUs would all use the first one",
            "set it to the index of the rank on its node, or start with torchrun",
        )
    master = f"{found.get('MASTER_ADDR', '')}:{found.get('MASTER_PORT', '')}"
    ranks = f"{found['WORLD_SIZE']} ranks"
    return Finding("ok", "launch", f"{launch.launcher}: {ranks}, store at {master}")
