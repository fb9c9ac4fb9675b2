"""One rank of one measurement, in a process of its own: `run.py` starts it and reads its JSON."""

import argparse
import ctypes
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.memory.systems import prepare
from benchmarks.pipeline_cpu.model import Sizes

# Allocations grow from the first step, that makes the optimizer's state, to the second.
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
    options.out.write_text(json.dumps(weigh(options)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def weigh(options: argparse.Namespace) -> dict[str, int]:
    """Bytes by which the process grew: the most at one time, and after a step.

    The kernel's own mark of the resident memory. `run.py` starts the process so that malloc takes
    what has 128 KiB or more from the kernel, and gives it back when it is freed. torch's record of
    allocations would be exact, but for gloo's threads, whose releases it does not see.
    """
    build = prepare(options.system, Sizes(**options.sizes), options.dtype)
    # What is made once, at the first use, is no part of what a system holds.
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
    """Gives freed memory back and restarts the kernel's mark; the resident bytes of now."""
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
