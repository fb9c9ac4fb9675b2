"""The backends of a process group, one for each type of device."""

from typing import Any

import torch
import torch.distributed as dist


def backend_names(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of the backend for each type of device: {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return dict(entry.split(":", 1) for entry in config.split(","))


def runs_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether the group uses gloo for tensors on the host."""
    return backend_names(group).get("cpu") == "gloo"


def sends_by_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether collectives of tensors on `device` use gloo; False without a group."""
    return group is not None and backend_names(group).get(device.type) == "gloo"


def goes_through_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether messages of tensors on `device` are copied to the host.

    So it is if some ranks of the group are on CPUs: they have gloo in common, and no other backend.
    """
    if group is None or device.type in ("cpu", "meta"):
        return False
    return device.type not in backend_names(group)


def message_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Return the device of tensors that the group can transfer, on a rank on `device`."""
    return torch.device("cpu") if goes_through_host(group, device) else device


def backends_except_gloo(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of the group other than gloo: those whose operations `abort` ends."""
    return [
        _unwrapped(group._get_backend(torch.device(device)))
        for device, name in backend_names(group).items()
        if name != "gloo"
    ]


def nccl_backend(group: dist.ProcessGroup) -> Any:
    """Return the ProcessGroupNCCL of the group; None if it has none."""
    if backend_names(group).get("cuda") != "nccl":
        return None
    return _unwrapped(group._get_backend(torch.device("cuda")))


def _unwrapped(backend: Any) -> Any:
    """Return the backend within the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL adds.

    The wrapper has no timeout to set, and cannot abort several communicators at once.
    """
    return getattr(backend, "wrapped_pg", backend)
