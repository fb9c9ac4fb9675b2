"""Facts about a run that its config does not have, for the record of the run."""

import subprocess
from typing import Any

import torch

from pipemega.config import Batch
from pipemega.distributed.mesh import Mesh
from pipemega.lazy_imports import __version__

_GIT_SECONDS = 5.0


def run_facts(mesh: Mesh, batch: Batch, num_parameters: int, schedule: str) -> dict[str, Any]:
    """Return world size, mesh, batch sizes, number of parameters, versions and git commit."""
    return {
        "world_size": mesh.world.size,
        "mesh": {axis: getattr(mesh, axis).size for axis in ("pipeline", "data", "tensor")},
        "batch": {
            "train_batch_size": batch.train_batch_size,
            "micro_batch_size": batch.micro_batch_size,
            "num_microbatches": batch.num_microbatches,
        },
        "num_parameters": num_parameters,
        "schedule": schedule,
        "device": _device_name(mesh.device),
        "git_commit": git_commit(),
        "pipemega": __version__,
        "torch": torch.__version__,
    }


def git_commit() -> str | None:
    """Return the commit of the current folder, with "-dirty" if files have changed; or None."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--match="]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
