"""`training.deterministic_mode`: the same run on the same machines gives the same bits."""

import logging
import os
from collections.abc import Collection, Mapping

import torch

from pipemega.config import Config
from pipemega.errors import ConfigError

# What a variable may be; the first value is set where it is unset. cuBLAS adds in a fixed order
# only with these workspaces. Of NCCL's algorithms a ring has one order for each number of ranks; a
# tree depends on the topology that NCCL has found.
_ENVIRONMENT: Mapping[str, Collection[str]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
}


def use_deterministic_algorithms(config: Config, device: torch.device, log: logging.Logger) -> None:
    """Let torch use only operations with a fixed result, if the config says so.

    This sets the mode of the whole process. An operation that has no deterministic implementation
    then raises an error that names it. A config without the key changes nothing, so that a script
    may set the mode itself.

    Args:
        device: of the run; on a GPU the environment is set too, before CUDA's libraries read it.

    Raises:
        ConfigError: the environment asks for an order of additions that is not fixed.
    """
    if not config.training.deterministic_mode:
        return
    if device.type == "cuda":
        _set_environment(log)
        # Else it picks the kernel that was the fastest in a trial.
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def _set_environment(log: logging.Logger) -> None:
    for name, accepted in _ENVIRONMENT.items():
        given = os.environ.get(name)
        words = [] if given is None else [word.strip() for word in given.split(",")]
        wrong = [word for word in words if word not in accepted]
        if wrong:
            raise ConfigError(
                f"training.deterministic_mode is true, and {name} is {given!r}, with which results "
                f"may differ from run to run: unset it, or set it to {' or '.join(accepted)}"
            )
        if given is None:
            os.environ[name] = next(iter(accepted))
            if name == "CUBLAS_WORKSPACE_CONFIG" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                log.warning(
                    f"training.deterministic_mode sets {name}, but CUDA was used before "
                    f"initialize(): if the script has multiplied matrices there, set {name}="
                    f"{os.environ[name]} in the environment of the job"
                )
