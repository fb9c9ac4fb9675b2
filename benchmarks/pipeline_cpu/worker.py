"""One rank of one measurement: `run.py` starts it as a process and reads its JSON."""

import argparse
import ctypes
import gc
import json
import os
import resource
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.pipeline_cpu.model import Sizes
from benchmarks.pipeline_cpu.peers import (
    Place,
    Step,
    deepspeed_1f1b,
    one_process,
    torch_pipelining,
)

# The first step creates the optimizer state, so only later steps have the full memory.
MEMORY_STEPS = 3

MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True, help="FAMILY or FAMILY:SCHEDULE")
    parser.add_argument("--phase", choices=["time", "memory"], required=True)
    parser.add_argument("--sizes", type=json.loads, required=True)
    parser.add_argument("--split", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    sizes, place = Sizes(**options.sizes), Place(rank, world_size, options.split)
    family, _, schedule = options.system.partition(":")

    def build() -> Step:
        if family == "one-process":
            return one_process(sizes, place)
        if family == "torch":
            return torch_pipelining(sizes, place, schedule)
        if family == "deepspeed":
            return deepspeed_1f1b(sizes, place)
        # Imported here, so that pipemega is not in the processes of the other systems.
        from benchmarks.pipeline_cpu.ours import train

        return train(sizes, place, schedule)

    if options.phase == "time":
        result = measure_time(build, options.warmup, options.steps)
    else:
        result = {"live_mb": peak_live_bytes(build, MEMORY_STEPS) / MB}
    options.out.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure_time(build: Callable[[], Step], warmup: int, steps: int) -> dict[str, Any]:
    """Return the times of the timed steps, the losses of all steps, and the memory growth."""
    before = _reset_peak_rss()
    step = build()
    losses = [step(number) for number in range(warmup)]
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    ends = []
    for number in range(warmup, warmup + steps):
        losses.append(step(number))
        ends.append(time.perf_counter() - start)
    return {
        "seconds": ends[-1],
        "cpu_seconds": time.process_time() - cpu_start,
        "step_seconds": [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)],
        "losses": losses,
        "rss_growth_mb": (_peak_rss() - before) / MB,
        "ru_maxrss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB,
    }


def peak_live_bytes(build: Callable[[], Step], steps: int) -> int:
    """Return the peak of the bytes allocated by torch's CPU allocator.

    The profiler records each allocation and each release; the peak is the largest prefix sum. It
    starts before the model is built, so it misses nothing, and runs in a separate process, because
    recording takes time.
    """
    # Otherwise the releases of earlier objects are recorded, but not their allocations.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step = build()
        for number in range(steps):
            step(number)
    events = [
        event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


def _reset_peak_rss() -> int:
    """Return freed memory to the kernel, reset its peak, and return the resident bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status_bytes("VmRSS")


def _peak_rss() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {key}")


if __name__ == "__main__":
    main()
