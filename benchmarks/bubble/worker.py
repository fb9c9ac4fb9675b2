"""One rank of the comparison: runs all systems in turn in each round; started by `run.py`."""

import argparse
import gc
import json
import time
from collections.abc import Mapping
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bubble.stages import Seconds, SleepLog, sleep_precisely
from benchmarks.bubble.systems import System, Task, build
from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import simulate

WARM_UP_SCALE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--share", type=float, nargs=3, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--systems", nargs="+", required=True)
    parser.add_argument("--plans", type=Path, required=True, help="JSON: name -> plan as JSON")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sleep_precisely()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    task = Task(dist.get_world_size(), options.microbatches, Seconds(*options.share))
    written = json.loads(options.plans.read_text(encoding="utf-8"))
    plans = {name: Plan.from_json(text) for name, text in written.items()}
    result = measure(task, options.systems, options.rounds, plans)
    options.out.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(task: Task, names: list[str], rounds: int, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Return, for each system, the numbers of its plan and the start and end of its steps.

    The times are read from the monotonic clock, which all processes share. In each round all
    systems run once; each round begins with another system.
    """
    rank, group = dist.get_rank(), dist.new_group()
    log = SleepLog()
    systems: dict[str, System] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            systems[name] = build(name, task, rank, group, log, plans)
        except ScheduleError as error:
            refused[name] = str(error)
    results = {name: _numbers(system, task) for name, system in systems.items()}
    log.scale = WARM_UP_SCALE
    for system in systems.values():
        # The first step exchanges shapes, opens connections and allocates memory; torch also runs
        # its stages once, to find the shapes of the messages.
        _step(system, log)
    log.scale = 1.0
    order = list(systems)
    for turn in range(rounds):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            entry = _step(systems[name], log)
            _check(systems[name], rank, log)
            results[name]["rounds"].append(entry)
            results[name]["sleeps"] = [(sleep.start, sleep.end) for sleep in log.sleeps]
    return {"systems": results, "refused": refused}


def _numbers(system: System, task: Task) -> dict[str, Any]:
    timeline = simulate(system.plan, system.costs)
    return {
        "simulated": timeline.makespan,
        "simulated_peak": max(timeline.peak),
        "ideal": task.ideal,
        "plan": system.plan.to_json(),
        "parts": [len(parts) for parts in system.parts(dist.get_rank())],
        "rounds": [],
    }


def _step(system: System, log: SleepLog) -> dict[str, Any]:
    """Run one step between barriers."""
    log.clear()
    gc.collect()
    dist.barrier()
    cpu, start = time.process_time(), time.monotonic()
    system.step()
    end, cpu_end = time.monotonic(), time.process_time()
    dist.barrier()
    return {
        "start": start,
        "end": end,
        "peak": log.peak,
        "slept": sum(sleep.end - sleep.start for sleep in log.sleeps),
        "cpu": cpu_end - cpu,
    }


def _check(system: System, rank: int, log: SleepLog) -> None:
    """Raise an AssertionError if the sleeps or their order differ from the plan."""
    slept = [(sleep.part, sleep.stage) for sleep in log.sleeps]
    planned = [part for parts in system.parts(rank) for part in parts]
    for at, (was, should) in enumerate(zip_longest(slept, planned)):
        if was != should:
            raise AssertionError(f"{system.name}, rank {rank}, sleep {at}: {was}, planned {should}")


if __name__ == "__main__":
    main()
