"""What it costs to cut backward in two: time, and memory that waits for the second half.

    python -m benchmarks.split_backward.run            from the root of the repository

Three tables: I + W against whole backwards; what is held between them against what was held before;
and whether the weight halves of several micro-batches would be faster as one product.
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


def held(hidden: int, tokens: int) -> float:
    """Bytes alive between I and W over those alive between F and I, of one micro-batch.

    As the executor holds them: of the output the graph alone; the gradient of the input has been
    sent. Every allocation and release of torch's CPU allocator counts.
    """
    model = build(hidden)
    queue = WeightGradients(GradientBuffer(list(model.named_parameters())))
    split([model], queue)
    x = torch.randn(2, tokens // 2, hidden, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        for _ in range(2):  # the first time allocates what stays
            with record_function("before F"):
                pass
            edge = get_gradient_edge(model(x))
            with record_function("before I"):
                pass
            with queue.putting_off(0):
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
    """Seconds of one dW product over `count` micro-batches over those of a product for each.

    Of a linear from hidden to 4 hidden, everything counted that W does: putting the rows together,
    the product, adding it to the gradient.
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
    print(f"{LAYERS} GPT blocks, {MICRO_BATCHES} micro-batches, medians of {ROUNDS} rounds.\n")
    print("| hidden, tokens | (I + W) / whole, median (least) | W of I + W | gradients |")
    print("| --- | ---: | ---: | --- |")
    for hidden, tokens in ((64, 64), (256, 512), (512, 512)):
        r = compare(hidden, tokens)
        print(
            f"| {hidden}, {tokens} | {r['ratio']:.3f} ({r['least']:.3f}) | {r['share']:.2f} "
            f"| {'equal bit for bit' if r['equal'] else 'differ'} |"
        )
    print("\n| hidden, tokens | held between I and W / held before I |\n| --- | ---: |")
    for hidden, tokens in ((64, 64), (256, 512), (512, 512)):
        print(f"| {hidden}, {tokens} | {held(hidden, tokens):.3f} |")
    print("\n| hidden, tokens | one product of 2 / a product each | of 4 |")
    print("| --- | ---: | ---: |")
    for hidden, tokens in ((256, 256), (256, 512), (512, 512), (1024, 512)):
        two, four = (one_product(hidden, tokens, count) for count in (2, 4))
        print(f"| {hidden}, {tokens} | {two:.3f} | {four:.3f} |", flush=True)


if __name__ == "__main__":
    main()
