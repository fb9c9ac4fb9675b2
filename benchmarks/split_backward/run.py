"""What it costs to cut backward in two: the time of I + W over that of a whole backward.

python -m benchmarks.split_backward.run
"""

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipeline_cpu.model import Block, Sizes
from pipemega.allocator import keep_freed_memory
from pipemega.gradients import GradientBuffer
from pipemega.pipeline.split_backward import WeightGradients, split

LAYERS, MICRO_BATCHES, ROUNDS = 4, 4, 9


def build(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = Sizes(hidden=hidden, heads=hidden // 64 or 1)
    return nn.Sequential(*(Block(sizes) for _ in range(LAYERS)))


def seconds(action: Callable[..., None], *arguments: Any) -> float:
    started = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - started


def backward(outputs: list[Tensor]) -> None:
    for y in outputs:
        y.backward(torch.ones_like(y))


def input_halves(outputs: list[Tensor], queue: WeightGradients) -> None:
    for number, y in enumerate(outputs):
        with queue.putting_off(number):
            y.backward(torch.ones_like(y))


def weight_halves(queue: WeightGradients) -> None:
    for number in range(MICRO_BATCHES):
        queue.run(number)


def compare(hidden: int, tokens: int) -> dict[str, float]:
    """Medians over rounds that take turns, so that a slow moment hits both."""
    whole, halves = build(hidden), build(hidden)
    inputs = [torch.randn(2, tokens // 2, hidden) for _ in range(MICRO_BATCHES)]
    for x in inputs:
        x.requires_grad_()
    buffers = [GradientBuffer(list(m.named_parameters())) for m in (whole, halves)]
    queue = WeightGradients(buffers[1])
    split([halves], queue)
    ratios, shares = [], []
    for _ in range(ROUNDS):
        one = seconds(backward, [whole(x) for x in inputs])
        first = seconds(input_halves, [halves(x) for x in inputs], queue)
        second = seconds(weight_halves, queue)
        ratios.append((first + second) / one)
        shares.append(second / (first + second))
    flats = zip(*(buffer.flats.values() for buffer in buffers), strict=True)
    equal = all(torch.equal(a, b) for a, b in flats)
    return {
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "share": statistics.median(shares),
        "equal": float(equal),
    }


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread;")
    print(f"{LAYERS} GPT blocks, {MICRO_BATCHES} micro-batches, medians of {ROUNDS} rounds.\n")
    print("| hidden, tokens | (I + W) / whole, median (least) | W of I + W | gradients |")
    print("| --- | ---: | ---: | --- |")
    for hidden, tokens in ((64, 64), (256, 512), (512, 512)):
        r = compare(hidden, tokens)
        print(
            f"| {hidden}, {tokens} | {r['ratio']:.3f} ({r['least']:.3f}) | {r['share']:.2f} "
            f"| {'equal bit for bit' if r['equal'] else 'differ'} |"
        )


if __name__ == "__main__":
    main()
