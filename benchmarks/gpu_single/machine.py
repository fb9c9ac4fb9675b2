"""The GPU that is measured: what it is, what it could do, and a clock for it."""

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


def describe(device: torch.device) -> dict[str, Any]:
    """Device, driver and versions."""
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
    """Dense bf16 TFLOP/s by the data sheet; None for a device that is not in the table."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` keeps the device busy, from an idle device to the last kernel."""
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
    """TFLOP/s of a bf16 product of two `size` x `size` matrices; median of `repeats`.

    Of random numbers: a product of zeros can be faster than any real one.
    """
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = [seconds_of(lambda: torch.mm(a, b, out=out), device) for _ in range(repeats + 5)]
    return 2 * size**3 / median(times[5:]) / 1e12


class _Names(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attention_kernel(sizes: Sizes, device: torch.device) -> str:
    """Which of torch's attention kernels these sizes get; the estimate of memory wants a fused."""
    shape = (1, sizes.heads, sizes.seq, sizes.hidden // sizes.heads)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with _Names() as seen:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    fused = [name for name in seen.names if name.startswith("_scaled_dot_product")]
    return fused[0].removeprefix("_scaled_dot_product_") if fused else "math (not fused)"
