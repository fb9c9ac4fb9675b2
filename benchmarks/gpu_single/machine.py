"""Describes the GPU, measures its peak and times work on it."""

import platform
import shutil
import subprocess
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_single.estimate import Sizes
from pipemega.kernels import Kernels
from pipemega.monitor import peak_tflops


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return device, driver and versions."""
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernels": Kernels.detect(device).description,
        "device": "cpu",
        "driver": None,
        "memory_bytes": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "device": properties.name,
            "driver": _driver(),
            "memory_bytes": properties.total_memory,
        }
    return machine


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return result.stdout.split()[0] if result.stdout.split() else None


def data_sheet_tflops(device: torch.device) -> float | None:
    """Return the dense bf16 TFLOP/s of the data sheet; None for an unknown device."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the device time of `work` in seconds, starting with an idle device."""
    if device.type != "cuda":
        begin = perf_counter()
        work()
        return perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def matrix_tflops(device: torch.device, size: int, repeats: int = 20) -> float:
    """Return the TFLOP/s of a bf16 product of two `size` x `size` matrices, median of `repeats`.

    The matrices are random, because products of zeros can be faster.
    """
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = [seconds_of(lambda: torch.mm(a, b, out=out), device) for _ in range(repeats + 5)]
    return 2 * size**3 / median(times[5:]) / 1e12


class _OperatorNames(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attention_kernel(sizes: Sizes, device: torch.device) -> str:
    """Return the attention kernel that torch selects; the memory estimate assumes a fused one."""
    shape = (1, sizes.heads, sizes.seq, sizes.hidden // sizes.heads)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with _OperatorNames() as operators:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    fused = [name for name in operators.names if name.startswith("_scaled_dot_product")]
    return fused[0].removeprefix("_scaled_dot_product_") if fused else "math (not fused)"
