"""`deepspeed.accelerator.get_accelerator()`: the device of this process, by torch's calls."""

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from pipemega.distributed.mesh import pick_device

_NO_BUILDERS = "there are no CUDA extensions of DeepSpeed to build; use a layer of torch"
_ADVICE = {
    "get_op_builder": _NO_BUILDERS,
    "create_op_builder": _NO_BUILDERS,
    "build_extension": _NO_BUILDERS,
}


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _zero(*_: Any, **__: Any) -> int:
    """Return the bytes that the CPU's allocator counts."""
    return 0


# Names of torch.cuda that have another meaning, or none, without a GPU.
_ON_CPU: dict[str, Any] = {
    **dict.fromkeys(
        (
            "memory_reserved", "max_memory_reserved", "memory_cached", "max_memory_cached",
        ),
        _zero,
    ),
    **dict.fromkeys(
        (
            "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
            "range_push", "range_pop",
        ),
        _nothing,
    ),
    "memory_stats": lambda device_index=None: {},
    "random": torch.random,
    **{
        name: partial(torch.tensor, dtype=dtype)
        for name, dtype in {
            "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8,
            "DoubleTensor": torch.float64, "FloatTensor": torch.float32,
            "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64,
        }.items()
    },
    **{
        name: getattr(torch.cpu, name)
        for name in ("Stream", "stream", "current_stream")
    },
    "default_stream": torch.cpu.current_stream,
}  # fmt: skip


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

    def default_generator(self, device_index: int) -> torch.Generator:
        on_gpu = self.device_type == "cuda"
        return torch.cuda.default_generators[device_index] if on_gpu else torch.default_generator

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if self.device_type == "cpu":
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self.device_type == "cpu":
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

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

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def is_synchronized_device(self) -> bool:
        return self.device_type == "cpu"

    use_host_timers = resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    def is_triton_supported(self) -> bool:
        return self.device_type == "cuda"

    def get_compile_backend(self) -> str:
        return "inductor"

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return self.device_type == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_type

    def __getattr__(self, name: str) -> Any:
        kind = self.__dict__.get("device_type")
        if kind == "cuda" and hasattr(torch.cuda, name):
            return getattr(torch.cuda, name)
        if kind == "cpu" and name in _ON_CPU:
            return _ON_CPU[name]
        advice = _ADVICE.get(name, "use torch's call")
        raise AttributeError(f"get_accelerator() has no {name!r} on a {kind}: {advice}")


@cache
def get_accelerator() -> TorchAccelerator:
    return TorchAccelerator()
