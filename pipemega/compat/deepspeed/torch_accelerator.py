"""`deepspeed.accelerator.get_accelerator()`: the device of this process, by torch's calls."""

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from pipemega.compat.deepspeed.virtual_modules import ADVICE
from pipemega.distributed.mesh import pick_device


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _zero(*_: Any, **__: Any) -> int:
    """Return the bytes that the CPU's allocator counts."""
    return 0


# Names of torch.cuda that torch.cpu does not have.
_ON_CPU: dict[str, Any] = {
    **dict.fromkeys(
        (
            "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
            "memory_cached", "max_memory_cached",
        ),
        _zero,
    ),
    **dict.fromkeys(
        (
            "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated",
            "reset_max_memory_cached", "range_push", "range_pop",
        ),
        _nothing,
    ),
    "memory_stats": lambda device_index=None: {},
    "random": torch.random,
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
    **{
        name: partial(torch.tensor, dtype=dtype)
        for name, dtype in {
            "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8,
            "DoubleTensor": torch.float64, "FloatTensor": torch.float32,
            "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64,
        }.items()
    },
    "default_stream": torch.cpu.current_stream,
    "is_bf16_supported": lambda: True,
}  # fmt: skip


class TorchAccelerator:
    """CUDA or CPU. Other names come from `torch.cuda`, or from `torch.cpu` without a GPU."""

    def __init__(self) -> None:
        self.device_type = self._name = "cuda" if torch.cuda.is_available() else "cpu"

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        on_cpu = self.device_type == "cpu" or device_index is None
        return self.device_type if on_cpu else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return str(pick_device()) if self.device_type == "cuda" else "cpu"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        return "nccl" if self.device_type == "cuda" else "gloo"

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)

    def default_generator(self, device_index: int) -> torch.Generator:
        on_gpu = self.device_type == "cuda"
        return torch.cuda.default_generators[device_index] if on_gpu else torch.default_generator

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory of the GPU, or of the machine."""
        if self.device_type == "cuda":
            return torch.cuda.mem_get_info(device_index)[1]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free bytes of memory of the GPU, or of the machine."""
        if self.device_type == "cuda":
            return torch.cuda.mem_get_info(device_index)[0]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it: the device is ready."""
        return callback()

    def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.pin_memory() if self.device_type == "cuda" else tensor

    def get_compile_backend(self) -> str:
        return "inductor"

    def is_fp16_supported(self) -> bool:
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_type

    def __getattr__(self, name: str) -> Any:
        kind = self.__dict__.get("device_type")
        if kind == "cpu" and name in _ON_CPU:
            return _ON_CPU[name]
        calls = torch.cuda if kind == "cuda" else torch.cpu
        if hasattr(calls, name):
            return getattr(calls, name)
        advice = ADVICE.get(f"accelerator.{name}", "use torch's call")
        raise AttributeError(f"get_accelerator() has no {name!r} on a {kind}: {advice}")


@cache
def get_accelerator() -> TorchAccelerator:
    return TorchAccelerator()
