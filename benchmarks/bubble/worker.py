"""One rank of the comparison: every system in turn, round after round; `run.py` starts it."""

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

from benchmarks.bubble.stages import Diary, Seconds, sleep_precisely
from benchmarks.bubble.systems import System, Task, build
from pipemega.errors import ScheduleError
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.simulate import simulate

WARM_UP_PACE = 0.05


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
    """Of each system: its plan's figures, and from each round when the step began and ended here.

    The clock is that of the machine, the same for all processes. The rounds are interleaved, and
    each begins with another system.
    """
    rank, group = dist.get_rank(), dist.new_group()
    diary = Diary()
    systems: dict[str, System] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            systems[name] = build(name, task, rank, group, diary, plans)
        except ScheduleError as error:
            refused[name] = str(error)
    results = {name: _figures(system, task) for name, system in systems.items()}
    diary.pace = WARM_UP_PACE
    for system in systems.values():
        # Shapes, connections and allocations are met for the first time; torch also runs its
        # stages once, to learn what crosses them.
        _step(system, diary)
    diary.pace = 1.0
    order = list(systems)
    for turn in range(rounds):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            entry = _step(systems[name], diary)
            _check(systems[name], rank, diary)
            results[name]["rounds"].append(entry)
            results[name]["naps"] = [(nap.start, nap.end) for nap in diary.naps]
    return {"systems": results, "refused": refused}


def _figures(system: System, task: Task) -> dict[str, Any]:
    timeline = simulate(system.plan, system.costs)
    return {
        "simulated": timeline.makespan,
        "simulated_peak": max(timeline.peak),
        "ideal": task.ideal,
        "plan": system.plan.to_json(),
        "parts": [len(parts) for parts in system.parts(dist.get_rank())],
        "rounds": [],
    }


def _step(system: System, diary: Diary) -> dict[str, Any]:
    """One step between barriers."""
    diary.clear()
    gc.collect()
    dist.barrier()
    cpu, start = time.process_time(), time.monotonic()
    system.step()
    end, cpu_end = time.monotonic(), time.process_time()
    dist.barrier()
    return {
        "start": start,
        "end": end,
        "peak": diary.peak,
        "slept": sum(nap.end - nap.start for nap in diary.naps),
        "cpu": cpu_end - cpu,
    }


def _check(system: System, rank: int, diary: Diary) -> None:
    """Raises AssertionError: it slept something else than its plan says, or in another order."""
    slept = [(nap.part, nap.stage) for nap in diary.naps]
    planned = [nap for naps in system.parts(rank) for nap in naps]
    for at, (was, should) in enumerate(zip_longest(slept, planned)):
        if was != should:
            raise AssertionError(f"{system.name}, rank {rank}, nap {at}: {was}, planned {should}")


if __name__ == "__main__":
    main()
