"""Measures the overhead of tracing: traced and plain steps in one run.

torchrun --standalone --nproc_per_node=2 -m benchmarks.trace_overhead.run
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import pipemega
from pipemega.config import Config, load
from pipemega.engine.engine import Engine
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.recorder import ClockRecorder
from pipemega.profiling.step_tracer import Tracer

VOCAB, MICRO = 4096, 2


def settings(schedule: str, hidden: int) -> Config:
    return load(
        {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": 8,
            "gradient_clipping": 1.0,
            "mesh": {"pipeline": 2, "device": "cpu"},
            "pipeline": {"schedule": schedule},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "model": {
                "num_layers": 4,
                "hidden_size": hidden,
                "num_attention_heads": 4,
                "seq_length": hidden,
                "vocab_size": VOCAB,
            },
        }
    )


class Cost(NamedTuple):
    """Seconds of one step on one rank."""

    wall: float  # between two barriers
    thread: float  # CPU time of the main thread
    tracing: float  # part of it spent in the calls that trace the step


class CallTimer:
    """Adds up the thread time of patched methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def patch(self, owner: type, name: str) -> Any:
        """Return a context in which calls of the method are timed."""
        real: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return real(*arguments)
            finally:
                self.seconds += time.thread_time() - started

        return mock.patch.object(owner, name, timed)


def cost(engine: Engine, traced: bool, memory: bool) -> Cost:
    length = engine.config.model.seq_length if engine.config.model else 0
    same = torch.Generator().manual_seed(engine.global_steps)  # the ranks compare their data
    tokens = torch.randint(VOCAB, (MICRO, length + 1), generator=same)
    batch = iter([(tokens[:, :-1], tokens[:, 1:])] * engine.batch.num_microbatches)
    if traced:
        engine.trace_next_step(memory)
    timer = CallTimer()
    dist.barrier()
    started, worked = time.perf_counter(), time.thread_time()
    with (
        timer.patch(Tracer, "before_step"),
        timer.patch(ClockRecorder, "ready"),
        timer.patch(ClockRecorder, "end"),
        timer.patch(Tracer, "after_step"),
    ):
        engine.train_batch(batch)
    thread = time.thread_time() - worked
    dist.barrier()
    return Cost(time.perf_counter() - started, thread, timer.seconds)


def measure(schedule: str, hidden: int, memory: bool, pairs: int) -> str:
    """Return a row of the table.

    The steps of a pair run directly after each other, in alternating order, so that a slow moment
    affects both.
    """
    config = settings(schedule, hidden)
    engine, *_ = pipemega.initialize(gpt(GPTConfig.of(config, VOCAB)), config)
    for _ in range(3):
        cost(engine, True, memory)
    plain, traced_costs = [], []
    for pair in range(pairs):
        for traced in (False, True) if pair % 2 else (True, False):
            (traced_costs if traced else plain).append(cost(engine, traced, memory))
    walls = [statistics.median(c.wall for c in costs) for costs in (plain, traced_costs)]
    thread = statistics.median(c.thread for c in traced_costs)
    tracing = statistics.median(c.tracing for c in traced_costs)
    count = len(engine.plan.programs[0])
    return (
        f"| {schedule}{', memory' * memory} | {hidden} | {count} | {1e3 * thread / count:.1f} | "
        f"{1e6 * tracing / count:.0f} | {tracing / (thread - tracing):.2%} | "
        f"{1e3 * walls[0]:.0f} | {walls[1] / walls[0] - 1:+.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of a traced and a plain step")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-v"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(schedule, hidden, memory, arguments.pairs)
        for memory in (False, True)
        for hidden in arguments.hidden
        for schedule in arguments.schedules
    ]
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {arguments.pairs} pairs of steps\n")
        print(
            "| schedule | hidden | instructions | ms each | µs tracing each | CPU overhead | "
            "wall ms, plain | wall, traced |"
        )
        print("| --- |" + " ---: |" * 7)
        print("\n".join(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
