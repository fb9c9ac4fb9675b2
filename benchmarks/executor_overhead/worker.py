"""One rank of the measurement, in a separate process; `run.py` starts it and reads its JSON."""

import argparse
import cProfile
import gc
import json
import pstats
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega.distributed.mesh import Axis
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.pipeline.execution_state import MicroBatches
from pipemega.pipeline.executor import Executor, RankStages
from pipemega.pipeline.module import BuildOptions, PipelineModule, RngKey, build_stages
from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.schedules import build_plan
from pipemega.pipeline.spec import LayerSpec
from pipemega.pipeline.split_backward import WeightGradQueue, enable_split_backward
from pipemega.pipeline.transport import Transport

WIDTH = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", nargs="+", required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--layer", choices=["scale", "linear"], required=True)
    parser.add_argument("--ahead", type=int, required=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    plans = [
        lower(build_plan(name, dist.get_world_size(), options.microbatches), options.ahead)
        for name in options.schedules
    ]
    runs = {plan.name: make_run(plan, options.layer) for plan in plans}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds + 1):
        for name, run in runs.items():
            gc.collect()
            dist.barrier()
            cpu_start, start = time.thread_time(), time.perf_counter()
            run()
            end, cpu_end = time.perf_counter(), time.thread_time()
            if turn > 0:
                seconds[name].append(end - start)
                cpu[name].append(cpu_end - cpu_start)
    result = {
        plan.name: {
            "seconds": seconds[plan.name],
            "cpu_seconds": cpu[plan.name],
            "instructions": len(plan.programs[dist.get_rank()]),
            "bare_seconds": bare_seconds(plan, options.rounds, options.layer),
        }
        for plan in plans
    }
    if options.profile:
        for name, run in runs.items():
            result[name]["profile"] = profile(run)
    options.out.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def make_run(plan: Plan, layer: str = "scale") -> Callable[[], None]:
    """Return a function that runs `plan` on an executor built as in `initialize`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net = PipelineModule([LayerSpec(_layer, layer) for _ in range(plan.num_stages)], loss_fn=_loss)
    build_options = BuildOptions(Axis("tensor"), torch.device("cpu"), seed=0)
    stages = build_stages(net, range(plan.num_stages + 1), plan.stages_of(rank), build_options)
    buffer = GradientBuffer([p for stage in stages.values() for p in stage.named_parameters()])
    weights = None
    if any(step.kind is Kind.BACKWARD_INPUT for step in plan.steps()):
        weights = WeightGradQueue(buffer)
        enable_split_backward(stages.values(), weights)
    axis = Axis("pipeline", tuple(range(world)), rank, dist.new_group())
    transport = Transport(axis, plan.rank_of_stage, torch.device("cpu"))
    executor = Executor(
        RankStages(rank, stages, plan.num_stages, _loss), transport, weight_queue=weights
    )
    count = plan.num_microbatches
    batch = MicroBatches(
        [torch.ones(1, WIDTH) for _ in range(count)],
        [torch.ones(1, WIDTH) for _ in range(count)],
        rng_keys=[RngKey(0, 0, m) for m in range(count)],
        loss_factor=1 / count,
    )

    def run() -> None:
        executor.run(plan, batch)

    return run


class _Scale(nn.Module):
    """Multiplies x by a number: almost no computation, but an autograd graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _layer(kind: str) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False) if kind == "linear" else _Scale()


def _loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, labels)


def bare_seconds(plan: Plan, rounds: int, kind: str) -> float:
    """Return the seconds of this rank's forwards and full backwards in a loop without executor."""
    steps = [s for s in plan.programs[dist.get_rank()] if s.kind is Kind.FORWARD]
    layer, labels = _layer(kind), torch.ones(1, WIDTH)
    x = torch.ones(1, WIDTH, requires_grad=True)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for step in steps:
            y = layer(x)
            if step.stage == plan.num_stages - 1:
                y = _loss(y, labels)
            torch.autograd.backward(y, torch.ones_like(y))
        times.append(time.perf_counter() - start)
    return median(times)


def profile(run: Callable[[], None], times: int = 10) -> list[dict[str, Any]]:
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
