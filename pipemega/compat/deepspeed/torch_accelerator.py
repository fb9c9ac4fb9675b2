"""`deepspeed.accelerator.get_accelerator()`: the device of this process, by torch's calls."""

from functools import cache
from typing import Any

import torch

from pipemega.distributed.mesh import pick_device


class TorchAccelerator:
    """CUDA or CPU. Names that are not here are those of `torch.cuda`, if there is a GPU."""

    def __init__(self) -> None:
        self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self._name = self.device_type

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        on_cpu = self.device_type == "cpu" or device_index is None
        return self.device_type if on_cpu else f"cuda:{device_index}"

    def current_device(self) -> Any:
        return torch.cuda.current_device() if self.device_type == "cuda" else "cpu"

    def current_device_name(self) -> str:
        return str(pick_device()) if self.device_type == "cuda" else "cpu"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        if self.device_type == "cuda":
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        return torch.cuda.device_count() if self.device_type == "cuda" else 1

    def communication_backend_name(self) -> str:
        return "nccl" if self.device_type == "cuda" else "gloo"

    def synchronize(self, device_index: int | None = None) -> None:
        if self.device_type == "cuda":
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if self.device_type == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self.device_type == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self.device_type == "cuda" else 0

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def is_bf16_supported(self) -> bool:
        return self.device_type == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_type

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("device_type") == "cuda" and hasattr(torch.cuda, name):
            return getattr(torch.cuda, name)
        raise AttributeError(
            f"get_accelerator() has no {name!r} on a {self.__dict__.get('device_type')}: use "
            "torch's call"
        )


@cache
def get_accelerator() -> TorchAccelerator:
    return TorchAccelerator()
