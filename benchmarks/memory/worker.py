"""One rank of one measurement: `run.py` starts it as a process and reads its JSON."""

import argparse
import ctypes
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.memory.systems import prepare
from benchmarks.pipeline_cpu.model import Sizes

# The first step creates the optimizer state, so only the second has the full memory.
STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--sizes", type=json.loads, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    options.out.write_text(json.dumps(measure(options)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[str, int]:
    """Return the growth of the process in bytes: the peak, and after a step.

    This is the resident memory as the kernel counts it. `run.py` sets malloc to allocate blocks of
    128 KiB or more from the kernel and to return them when they are freed. torch's allocation
    profiler would be exact, but it misses memory freed by gloo's threads.
    """
    build = prepare(options.system, Sizes(**options.sizes), options.dtype)
    # Memory allocated once, at the first use of torch, does not count for a system.
    warm = torch.nn.Linear(8, 8)
    torch.optim.AdamW(warm.parameters(), fused=True).step()
    warm(torch.zeros(8)).sum().backward()
    dist.barrier()
    before = _restart_peak()
    step = build()
    for number in range(STEPS):
        step(number)
    peak = _status("VmHWM")
    ctypes.CDLL(None).malloc_trim(0)
    return {"peak": peak - before, "between_steps": _status("VmRSS") - before}


def _restart_peak() -> int:
    """Return freed memory to the kernel, reset its peak, and return the resident bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {key}")


if __name__ == "__main__":
    main()
