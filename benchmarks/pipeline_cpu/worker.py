"""One rank of one system: `run.py` starts it as a process and reads its JSON."""

import argparse
import ctypes
import gc
import json
import os
import resource
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.pipeline_cpu.megatron import megatron
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
    parser.add_argument("--sizes", type=json.loads, required=True)
    parser.add_argument("--split", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="measure the live tensors and write them here")
    what.add_argument("--turns", type=int, metavar="FD", help="take turns over this socket")
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
        if family == "megatron":
            return megatron(sizes, place, schedule)
        # Imported here, so that pipemega is not in the processes of the other systems.
        from benchmarks.pipeline_cpu.ours import train

        return train(sizes, place, schedule, own_modules=family == "own")

    if options.out:
        result = {"live_mb": peak_live_bytes(build, MEMORY_STEPS) / MB}
        options.out.write_text(json.dumps(result), encoding="utf-8")
    else:
        with socket.socket(fileno=options.turns).makefile("rw") as lines:
            for answer in take_turns(build, options.warmup, options.steps, lines):
                lines.write(json.dumps(answer) + "\n")
                lines.flush()
    dist.barrier()
    dist.destroy_process_group()


def take_turns(
    build: Callable[[], Step], warmup: int, steps: int, orders: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Yield the losses of the warm-up steps; then, for each order, the results of `steps` steps."""
    before = _reset_peak_rss()
    step = build()
    yield {"losses": [step(number) for number in range(warmup)]}
    for turn, _ in enumerate(orders):
        first = warmup + turn * steps
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        losses = [step(number) for number in range(first, first + steps)]
        yield {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
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
