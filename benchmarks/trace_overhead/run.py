"""What it costs to time every instruction: timed steps beside steps that are not, in one run.

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
from pipemega.engine import Engine
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.recorder import ClockRecorder
from pipemega.tracer import Tracer

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

    wall: float  # from one barrier to the next
    thread: float  # that the main thread worked; waiting does not count, nor do other processes
    tracing: float  # of them, in the calls that time the step


class Watch:
    """Adds up the thread time of the calls that it stands before."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, owner: type, name: str) -> Any:
        real: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return real(*arguments)
            finally:
                self.seconds += time.thread_time() - started

        return mock.patch.object(owner, name, watched)


def cost(engine: Engine, traced: bool, memory: bool) -> Cost:
    length = engine.config.model.seq_length if engine.config.model else 0
    tokens = torch.randint(VOCAB, (MICRO, length + 1))
    batch = iter([(tokens[:, :-1], tokens[:, 1:])] * engine.batch.num_microbatches)
    if traced:
        engine.trace_next_step(memory)
    watch = Watch()
    dist.barrier()
    started, worked = time.perf_counter(), time.thread_time()
    with (
        watch.over(Tracer, "begin"),
        watch.over(ClockRecorder, "ready"),
        watch.over(ClockRecorder, "end"),
        watch.over(Tracer, "finish"),
    ):
        engine.train_batch(batch)
    thread = time.thread_time() - worked
    dist.barrier()
    return Cost(time.perf_counter() - started, thread, watch.seconds)


def measure(schedule: str, hidden: int, memory: bool, pairs: int) -> str:
    """A row of the table.

    The two of a pair run one after the other, in changing order, so that a slow moment hits both.
    """
    config = settings(schedule, hidden)
    engine, *_ = pipemega.initialize(gpt(GPTConfig.of(config, VOCAB)), config)
    for _ in range(3):
        cost(engine, True, memory)
    plain, timed = [], []
    for pair in range(pairs):
        for traced in (False, True) if pair % 2 else (True, False):
            (timed if traced else plain).append(cost(engine, traced, memory))
    walls = [statistics.median(c.wall for c in costs) for costs in (plain, timed)]
    thread = statistics.median(c.thread for c in timed)
    tracing = statistics.median(c.tracing for c in timed)
    count = len(engine.plan.programs[0])
    return (
        f"| {schedule}{', weighed' * memory} | {hidden} | {count} | {1e3 * thread / count:.1f} | "
        f"{1e6 * tracing / count:.0f} | {tracing / (thread - tracing):.2%} | "
        f"{1e3 * walls[0]:.0f} | {walls[1] / walls[0] - 1:+.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="of steps, timed and not")
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
            "| schedule | hidden | instructions | ms each | µs to time each | more work | "
            "wall ms, plain | wall, timed |"
        )
        print("| --- |" + " ---: |" * 7)
        print("\n".join(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
