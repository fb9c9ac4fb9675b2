"""Measures the optimizer step with and without the fence, on stages that sleep.

    python -m benchmarks.optimizer_sync.run            from the root of the repository

Four ranks, one process each, connected by gloo. After each F, I and W a rank sleeps for the given
time, so two cores are enough for four ranks. Fenced and unfenced rounds alternate in the same
processes.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.engine.engine import Engine
from pipemega.pipeline.plan.instructions import Instruction, Kind
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.schedules import build_plan

RANKS, WIDTH, LAYERS = 4, 8, 8
WARM_UP_STEPS = 2
# schedule -> stages per rank
SCHEDULES = {"1f1b": 1, "zb-h1": 1, "zb-h2": 1, "zb-v": 2}
SYNCS = ("fenced", "post_validate")


class Noise(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Map-style dataset: every rank reads its own data."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.flip(0)


def build(schedule: str, sync: str, num_microbatches: int) -> Engine:
    net = PipelineModule(
        [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(LAYERS)], nn.functional.mse_loss
    )
    engine, *_ = pipemega.initialize(
        net,
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": num_microbatches,
            "gradient_clipping": 1e6,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "mesh": {"pipeline": RANKS, "device": "cpu"},
            "pipeline": {
                "schedule": schedule,
                "optimizer_sync": sync,
                **({"optimizer_sync_after": 0} if sync == "post_validate" else {}),
            },
        },
        Noise(),
    )
    return engine


def add_sleeps(engine: Engine, seconds: float) -> None:
    """Sleep `seconds` after each F, I and W, and twice as long after a full backward."""
    executor = engine.steps.executor
    sleeps = {
        Kind.FORWARD: 1,
        Kind.BACKWARD_INPUT: 1,
        Kind.BACKWARD_WEIGHT: 1,
        Kind.BACKWARD: 2,
    }

    def with_sleep(
        run: Callable[[Instruction], None], pause: float
    ) -> Callable[[Instruction], None]:
        def run_and_sleep(step: Instruction) -> None:
            run(step)
            time.sleep(pause)

        return run_and_sleep

    executor._handlers = {
        kind: with_sleep(run, sleeps[kind] * seconds) if kind in sleeps else run
        for kind, run in executor._handlers.items()
    }


def measure(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    """Run one rank and write the seconds per step of every round."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found: dict[str, dict[str, list[float]]] = {}
    for schedule in arguments.schedules:
        chunks = SCHEDULES[schedule]
        engines = {sync: build(schedule, sync, arguments.microbatches) for sync in SYNCS}
        for engine in engines.values():
            add_sleeps(engine, arguments.seconds / chunks)
        found[schedule] = {sync: [] for sync in SYNCS}
        for _ in range(arguments.rounds):
            for sync, engine in engines.items():
                found[schedule][sync].append(seconds_per_step(engine, arguments.steps))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def seconds_per_step(engine: Engine, steps: int) -> float:
    """Return the mean time on this rank from the end of one step to the end of the next."""
    for _ in range(WARM_UP_STEPS):
        engine.train_batch()
    start = time.perf_counter()
    for _ in range(steps):
        engine.train_batch()
    seconds = time.perf_counter() - start
    engine.settle()
    return seconds / steps


def predicted(schedule: str, num_microbatches: int, seconds: float) -> dict[str, float]:
    """Return the simulated makespan for the fenced step and the span for the other."""
    plan = build_plan(schedule, RANKS, num_microbatches)
    share = seconds / SCHEDULES[schedule]
    costs = CostModel.uniform(plan.num_stages, share, share, share)
    timeline = simulate(plan, costs)
    return {"fenced": timeline.makespan, "post_validate": timeline.span}


def row(name: str, found: dict[str, list[float]], expected: dict[str, float]) -> str:
    cells = [name]
    for sync in SYNCS:
        cells += [f"{expected[sync] * 1e3:.0f}", f"{median(found[sync]) * 1e3:.0f}"]
    gain = median(found["fenced"]) / median(found["post_validate"]) - 1
    cells += [f"{(expected['fenced'] / expected['post_validate'] - 1) * 100:.1f} %"]
    cells += [f"{gain * 100:.1f} %"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=0.06, help="time of F, of I and of W on a rank"
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder, arguments), nprocs=RANKS)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    heads = ("schedule", "fenced: makespan", "measured", "post_validate: span", "measured")
    print(f"| {' | '.join(heads)} | gain: predicted | measured |\n|{' --- |' * 7}")
    for schedule, times in found.items():
        print(row(schedule, times, predicted(schedule, arguments.microbatches, arguments.seconds)))


if __name__ == "__main__":
    main()
