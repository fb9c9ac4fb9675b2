"""The head and its loss without the logits of all tokens, beside logits and beside torch.

python benchmarks/head/run.py           memory at the full size (counted), time at a smaller one
python benchmarks/head/run.py --full    time and memory of the process at the full size, once;
                                        --threads 2: in half of the time
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis
from pipemega.layer_costs.tensor_meter import TensorMeter
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.tensor_parallel import VocabParallelHead, cross_entropy_sum
from pipemega.tensor_parallel.deferred_logits import defer_logits

FULL = (128_000, 1024, 8192)  # vocabulary, hidden size, tokens
SMALLER = (32_000, 512, 2048)
MOST_MEMORY, MOST_TIME = 0.35, 1.1


class Loss:
    """The mean of the token losses."""

    def __init__(self, vocab_size: int, fused: bool) -> None:
        self._vocab_size, self.takes_deferred_logits = vocab_size, fused

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        return cross_entropy_sum(
            output, labels, axis=Axis("tensor"), vocab_size=self._vocab_size, factor=1 / len(labels)
        )


class LastStage:
    """The head with its gradient buffer, and one micro-batch."""

    def __init__(
        self, sizes: tuple[int, int, int], ignored: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        vocab, hidden, tokens = sizes
        self.vocab = vocab
        self.head = VocabParallelHead(vocab, hidden, axis=Axis("tensor"), dtype=dtype)
        with torch.no_grad():
            self.head.weight[:vocab].normal_(std=0.02)
        self.gradients = GradientBuffer([("weight", self.head.weight)], dtype=torch.float32)
        self.hidden = torch.randn(tokens, hidden, dtype=dtype).requires_grad_()
        self.labels = torch.randint(vocab, (tokens,))
        self.labels[: round(ignored * tokens)] = -100

    def step(self, fused: bool) -> None:
        loss_fn = Loss(self.vocab, fused)
        with defer_logits(loss_fn, self.head):
            output = self.head(self.hidden)
        loss_fn(output, self.labels).backward()

    def torch_step(self) -> None:
        options = torch.nn.LinearCrossEntropyOptions()
        F.linear_cross_entropy(
            self.hidden, self.head.weight, self.labels, reduction="mean", options=options
        ).backward()


def counted_peak(fused: bool, dtype: torch.dtype) -> int:
    """Return the largest bytes of all tensors in a step at the full size."""
    with torch.device("meta"), TensorMeter() as meter:
        stage = LastStage(FULL, dtype=dtype)
        meter.reset_peak()
        stage.step(fused)
    return meter.peak


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def verdict(name: str, ratio: float, most: float) -> None:
    print(f"  {name:44}{ratio:6.3f}  (at most {most}: {'pass' if ratio <= most else 'FAIL'})")


def memory() -> None:
    print(f"memory of the last stage, counted: vocabulary, hidden, tokens = {FULL}")
    for dtype in (torch.float32, torch.bfloat16):
        plain, fused = counted_peak(False, dtype), counted_peak(True, dtype)
        print(f"  {dtype}: {plain / 1e9:.2f} GB with logits, {fused / 1e9:.2f} GB without")
        verdict("ratio", fused / plain, MOST_MEMORY)


def times(rounds: int) -> None:
    print(f"seconds of forward and backward: vocabulary, hidden, tokens = {SMALLER}, fp32")
    for ignored in (0.0, 0.5):
        stage = LastStage(SMALLER, ignored)
        works: dict[str, Callable[[], None]] = {
            "logits": partial(stage.step, False),
            "fused": partial(stage.step, True),
        }
        if hasattr(torch.nn, "LinearCrossEntropyOptions"):
            works["torch linear_cross_entropy"] = stage.torch_step
        found: dict[str, list[float]] = {name: [] for name in works}
        for number in range(rounds + 1):
            for name, work in works.items():
                spent = seconds(work)
                if number:
                    found[name].append(spent)
        medians = {name: statistics.median(values) for name, values in found.items()}
        print(f"  {ignored:.0%} of the labels are -100")
        for name, value in medians.items():
            print(f"    {name:42}{value:6.3f}  {value / medians['logits']:.3f}")
        verdict("fused / logits", medians["fused"] / medians["logits"], MOST_TIME)


def full() -> None:
    """Run a step at the full size with and without logits; the process measures its own peak."""
    stage = LastStage(FULL)
    found = []
    print(f"vocabulary, hidden, tokens = {FULL}, fp32, threads: {torch.get_num_threads()}")
    # The peak of a process never falls: the smaller one first.
    for fused in (True, False):
        cpu = time.process_time()
        spent = seconds(partial(stage.step, fused))
        cpu = time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found.append((spent, peak))
        name = "fused" if fused else "logits"
        print(f"{name:8}{spent:8.1f} s  CPU {cpu:.1f} s  peak {peak / 1e9:.2f} GB", flush=True)
    verdict("memory", found[0][1] / found[1][1], MOST_MEMORY)
    verdict("time", found[0][0] / found[1][0], MOST_TIME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="time and memory at the full size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    if arguments.full:
        full()
        return
    memory()
    times(arguments.rounds)


if __name__ == "__main__":
    main()
