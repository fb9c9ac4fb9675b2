"""One rank of one measurement, in a process of its own: `run.py` starts it and reads its JSON."""

import argparse
import json
import os
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.systems import build
from benchmarks.pipeline_cpu.model import Sizes

# Allocations grow from the first step, that makes the optimizer's state, to the second.
STEPS = 3


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
    """Bytes that torch's CPU allocator had handed out: the most at one time, and after a step.

    The profiler tells each allocation and each release, from before the model is built.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step = build(options.system, Sizes(**options.sizes), options.dtype)
        for number in range(STEPS):
            step(number)
    events = [
        event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    events.sort(key=lambda event: event.start_ns())
    held = list(accumulate(event.nbytes() for event in events))
    return {"peak": max(held), "between_steps": held[-1]}


if __name__ == "__main__":
    main()
