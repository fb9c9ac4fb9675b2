"""CUDA's settings and driver, seen from outside of CUDA; imports no torch.

The proofs of message order depend on environment variables that CUDA reads when it starts. So they
are set when pipemega is imported, in jobs of several ranks; values that the user has set stay.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADING: Final = "CUDA_MODULE_LOADING"
DEFAULTS: Final = {
    # Hardware queues between host and GPU. With CUDA's own default of 8, streams share queues.
    CONNECTIONS: "32",
    # A kernel that is loaded at its first launch waits for receives that are posted.
    LOADING: "EAGER",
}
_CUDAS_QUEUES = 8
_DRIVER_FILE = Path("/sys/module/nvidia/version")
# Major version of CUDA -> the oldest driver for it. Source: NVIDIA's page on CUDA compatibility.
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
# Of torchrun, srun and mpirun; `config.launch_variables` reads all of their variables.
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


def set_defaults() -> None:
    """Set the variables that are not set, unless CUDA has started or there is only one rank."""
    if not has_started() and any(os.environ.get(name, "1") != "1" for name in _SIZES):
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)


def driver_version() -> str:
    """Return the version of NVIDIA's kernel driver, "" without one; starts no process."""
    with suppress(OSError):
        return _DRIVER_FILE.read_text(encoding="ascii").strip()
    return ""


def why_unusable(torch_version: str, cuda: str | None) -> str:
    """Return why torch uses no GPU although there is a driver, and what to install; "" if unknown.

    Args:
        cuda: the version of CUDA that this torch was built for; None: for CPUs only.
    """
    found = driver_version()
    if not found:
        return ""
    if cuda is None:
        return (
            f"torch {torch_version} is built without CUDA, and NVIDIA driver {found} is installed: "
            "install torch from the index of a CUDA version (docs/install.md)"
        )
    needed, driver = _DRIVER_OF_CUDA.get(int(cuda.split(".")[0]), 0), int(found.split(".")[0])
    if driver >= needed:
        return ""
    fitting = [version for version, least in _DRIVER_OF_CUDA.items() if least <= driver]
    other = f", or a torch that is built for CUDA {max(fitting)}" if fitting else ""
    return (
        f"torch {torch_version} is built for CUDA {cuda}, which needs NVIDIA driver {needed} or "
        f"newer, and driver {found} is installed: install a newer driver{other} (docs/install.md)"
    )


def has_started() -> bool:
    """Return whether this process uses CUDA: variables that are not set have CUDA's defaults."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def hardware_queues() -> int:
    """Return the number of hardware queues of a GPU of this job."""
    default = str(_CUDAS_QUEUES) if has_started() else DEFAULTS[CONNECTIONS]
    value = os.environ.get(CONNECTIONS, default)
    return int(value) if value.isdecimal() and int(value) else _CUDAS_QUEUES


def loads_lazily() -> bool:
    """Return whether a kernel is loaded at its first launch."""
    return os.environ.get(LOADING, "LAZY" if has_started() else DEFAULTS[LOADING]) != "EAGER"
