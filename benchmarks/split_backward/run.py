"""Cost of split backward: time, and memory between I and W.

    python -m benchmarks.split_backward.run            from the root of the repository

Four tables: memory of zb-h1 relative to 1F1B by plan; time of I + W relative to full backwards;
memory between I and W relative to memory between F and I; time of one W product for several
micro-batches relative to one product for each.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.pipeline_cpu.model import Block, Sizes
from benchmarks.ranks import machine
from benchmarks.split_backward.memory import table
from pipemega.engine.initialize import keep_freed_memory
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.pipeline.split_backward import WeightGradQueue, enable_split_backward

LAYERS, MICRO_BATCHES, ROUNDS = 4, 4, 9


def build(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = Sizes(hidden=hidden, heads=hidden // 64 or 1)
    return nn.Sequential(*(Block(sizes) for _ in range(LAYERS)))


def seconds(action: Callable[..., None], *arguments: Any) -> float:
    started = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - started


def full_backward(outputs: list[Tensor]) -> None:
    for y in outputs:
        y.backward(torch.ones_like(y))


def run_all_i(outputs: list[Tensor], queue: WeightGradQueue) -> None:
    for number, y in enumerate(outputs):
        with queue.defer(number):
            y.backward(torch.ones_like(y))


def run_all_w(queue: WeightGradQueue) -> None:
    for number in range(MICRO_BATCHES):
        queue.run(number)


def compare(hidden: int, tokens: int) -> dict[str, float]:
    """Return medians over alternating rounds, so that a slow period affects both."""
    full, split = build(hidden), build(hidden)
    inputs = [torch.randn(2, tokens // 2, hidden) for _ in range(MICRO_BATCHES)]
    for x in inputs:
        x.requires_grad_()
    buffers = [GradientBuffer(list(m.named_parameters())) for m in (full, split)]
    queue = WeightGradQueue(buffers[1])
    enable_split_backward([split], queue)
    ratios, shares = [], []
    for _ in range(ROUNDS):
        one = seconds(full_backward, [full(x) for x in inputs])
        first = seconds(run_all_i, [split(x) for x in inputs], queue)
        second = seconds(run_all_w, queue)
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


def memory_ratio(hidden: int, tokens: int) -> float:
    """Return the bytes of one micro-batch between I and W divided by those between F and I.

    As in the executor, only the graph of the output is kept, and the input gradient has been sent.
    Counts all allocations and releases of torch's CPU allocator.
    """
    model = build(hidden)
    queue = WeightGradQueue(GradientBuffer(list(model.named_parameters())))
    enable_split_backward([model], queue)
    x = torch.randn(2, tokens // 2, hidden, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        for _ in range(2):  # the first iteration makes persistent allocations
            with record_function("before F"):
                pass
            edge = get_gradient_edge(model(x))
            with record_function("before I"):
                pass
            with queue.defer(0):
                torch.autograd.backward([edge], [torch.ones_like(x)])
            x.grad = None
            with record_function("before W"):
                pass
            del edge
            queue.run(0)
    events = record.profiler.kineto_results.events()

    def alive(mark: str) -> int:
        at = max(e.start_ns() for e in events if e.name() == mark)
        return sum(e.nbytes() for e in events if e.name() == "[memory]" and e.start_ns() < at)

    before, activations, kept = (alive(f"before {step}") for step in "FIW")
    return (kept - before) / (activations - before)


def one_product(hidden: int, tokens: int, count: int) -> float:
    """Return the time of one dW product of `count` micro-batches, relative to one for each.

    For a linear from hidden to 4 hidden. Includes all work of W: concatenating the rows, the
    product, adding it to the gradient.
    """
    pairs = [(torch.randn(tokens, hidden), torch.randn(tokens, 4 * hidden)) for _ in range(count)]
    gradient = torch.zeros(4 * hidden, hidden)

    def each() -> None:
        for x, dy in pairs:
            gradient.add_(dy.t().mm(x))

    def together() -> None:
        x, dy = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        gradient.add_(dy.t().mm(x))

    each()
    together()
    return statistics.median(seconds(together) / seconds(each) for _ in range(3 * ROUNDS))


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    about = machine()
    print(f"{about['cpu']}, torch {about['torch']}, one thread;")
    print(*table(), "", sep="\n")
    print(f"{LAYERS} GPT blocks, {MICRO_BATCHES} micro-batches, medians of {ROUNDS} rounds.\n")
    print("| hidden, tokens | (I + W) / full, median (minimum) | W of I + W | gradients |")
    print("| --- | ---: | ---: | --- |")
    for hidden, tokens in ((64, 64), (256, 512), (512, 512)):
        r = compare(hidden, tokens)
        print(
            f"| {hidden}, {tokens} | {r['ratio']:.3f} ({r['least']:.3f}) | {r['share']:.2f} "
            f"| {'bitwise equal' if r['equal'] else 'differ'} |"
        )
    print("\n| hidden, tokens | memory between I and W / memory before I |\n| --- | ---: |")
    for hidden, tokens in ((64, 64), (256, 512), (512, 512)):
        print(f"| {hidden}, {tokens} | {memory_ratio(hidden, tokens):.3f} |")
    print("\n| hidden, tokens | one product of 2 / one product each | of 4 |")
    print("| --- | ---: | ---: |")
    for hidden, tokens in ((256, 256), (256, 512), (512, 512), (1024, 512)):
        two, four = (one_product(hidden, tokens, count) for count in (2, 4))
        print(f"| {hidden}, {tokens} | {two:.3f} | {four:.3f} |", flush=True)


if __name__ == "__main__":
    main()
