"""One rank of the measurement, in a separate process; `run.py` starts it and reads its JSON.

Several source trees take turns: each has its own ranks, and only one tree's ranks run at a time.
"""

import argparse
import cProfile
import gc
import importlib.util
import json
import pstats
import resource
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

Run = Callable[[], None]


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    worker, turns = _worker_of(options.tree), _Turns(options)
    names = [(layer, name) for layer in options.layers for name in options.schedules]
    if hasattr(worker, "make_plan"):
        make_plan, make_run = worker.make_plan, worker.make_run
    else:  # 2371ce9
        make_plan, make_run = _plan_of(worker), worker.rank_at_work
    runs: dict[tuple[str, str], Run] = {}
    for layer, name in names:
        plan = make_plan(name, dist.get_world_size(), options.microbatches, options.ahead)
        runs[layer, name] = make_run(plan, layer)
        turns.plans[layer, name] = plan
    result = turns.take(runs, options.rounds)
    for (layer, name), run in runs.items():
        row, program = result[f"{layer} {name}"], turns.plans[layer, name].programs[dist.get_rank()]
        row["instructions"] = len(program)
        row["python_calls"] = python_calls(run)
        row["bare_seconds"] = bare_seconds(worker, turns.plans[layer, name], layer, options.rounds)
        if options.profile:
            row["profile"] = profile(run)
    options.out.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--schedules", nargs="+", required=True)
    parser.add_argument("--layers", nargs="+", required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--ahead", type=int, required=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--turns", type=int, required=True, help="port of the store")
    parser.add_argument("--system", type=int, required=True)
    parser.add_argument("--systems", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _worker_of(tree: Path) -> Any:
    """Import the measured pipeline of a source tree, with the package of that tree."""
    sys.path.insert(0, str(tree))
    file = tree / "benchmarks" / "executor_overhead" / "worker.py"
    spec = importlib.util.spec_from_file_location("measured_worker", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plan_of(worker: Any) -> Callable[[str, int, int, int], Any]:
    """Return what makes a lowered plan from the functions that a worker without it imports."""
    return lambda name, ranks, count, ahead: worker.lower(
        worker.build_plan(name, ranks, count), ahead
    )


class _Turns:
    """Runs the steps of this tree in turns with the other trees."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._store = dist.TCPStore("127.0.0.1", options.turns, timeout=timedelta(minutes=1))
        self._system, self._systems = options.system, options.systems
        self.plans: dict[tuple[str, str], Any] = {}

    def take(self, runs: dict[tuple[str, str], Run], rounds: int) -> dict[str, dict[str, Any]]:
        """Return the seconds of each round; one more round before is not counted."""
        rows: dict[str, dict[str, Any]] = {
            f"{layer} {name}": {"seconds": [], "cpu_seconds": [], "switches": []}
            for layer, name in runs
        }
        turn = self._system
        for number in range(rounds + 1):
            for (layer, name), run in runs.items():
                self._store.wait([f"turn {turn}"])
                times = _timed(run)
                if number > 0:
                    row = rows[f"{layer} {name}"]
                    for key, value in zip(row, times, strict=True):
                        row[key].append(value)
                else:
                    gc.freeze()  # later collections are short
                if self._store.add(f"done {turn}", 1) == dist.get_world_size():
                    self._store.set(f"turn {turn + 1}", "")
                turn += self._systems
        return rows


def _timed(run: Run) -> tuple[float, float, int]:
    """Return wall-clock and CPU seconds of the thread, and its waits (voluntary switches)."""
    gc.collect()
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    cpu_start, start = time.thread_time(), time.perf_counter()
    run()
    end, cpu_end = time.perf_counter(), time.thread_time()
    waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    return end - start, cpu_end - cpu_start, waits


def python_calls(run: Run) -> int:
    """Return how many Python functions one step calls; the number does not depend on the load."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    dist.barrier()
    sys.setprofile(count)
    run()
    sys.setprofile(None)
    return calls


def bare_seconds(worker: Any, plan: Any, kind: str, rounds: int) -> float:
    """Return the seconds of this rank's forwards and full backwards in a loop without executor."""
    steps = [s for s in plan.programs[dist.get_rank()] if s.kind.name == "FORWARD"]
    layer, labels = worker._layer(kind), torch.ones(1, worker.WIDTH)
    x = torch.ones(1, worker.WIDTH, requires_grad=True)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for step in steps:
            y = layer(x)
            if step.stage == plan.num_stages - 1:
                y = worker._loss(y, labels)
            torch.autograd.backward(y, torch.ones_like(y))
        times.append(time.perf_counter() - start)
    return median(times)


def profile(run: Run, times: int = 10) -> list[dict[str, Any]]:
    """Return the functions with the most own time in cProfile, in microseconds per step."""
    dist.barrier()
    with cProfile.Profile() as recorder:
        for _ in range(times):
            run()
    stats = pstats.Stats(recorder).stats  # type: ignore[attr-defined]
    rows = [
        {
            "function": f"{Path(file).name}:{line} {name}" if line else name,
            "calls": calls // times,
            "own_us": own * 1e6 / times,
            "with_callees_us": total * 1e6 / times,
        }
        for (file, line, name), (_, calls, own, total, _) in stats.items()
    ]
    return sorted(rows, key=lambda row: -row["own_us"])[:40]


if __name__ == "__main__":
    main()
