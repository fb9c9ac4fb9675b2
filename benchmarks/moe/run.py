"""Cost of a layer with experts: against a dense MLP of as many FLOPs, and of its exchanges.

python -m benchmarks.moe.run            from the root of the repository
"""

import statistics
from collections.abc import Sequence

from benchmarks.moe.worker import CHOSEN, EXPERTS, RATES, SIZES
from benchmarks.ranks import machine, measure


def spread(values: Sequence[float]) -> str:
    """Return median (lowest to highest)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    where = machine()
    found = measure("benchmarks.moe.worker", 2, [])[0]
    print(f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, two ranks, fp32;")
    print(f"{EXPERTS} experts, {CHOSEN} for each token; load before: {where['load_before']:.1f}\n")
    print("| tokens, hidden, expert | dense, ms | experts / dense | exchange / plain exchanges |")
    print("| --- | ---: | ---: | ---: |")
    for size, times in zip(SIZES, found["times"], strict=True):
        ratios = [a / b for a, b in zip(times["expert 1"], times["dense"], strict=True)]
        extra = [
            (two - one) / plain
            for one, two, plain in zip(
                times["expert 1"], times["expert 2"], times["exchanges"], strict=True
            )
        ]
        milliseconds = 1e3 * statistics.median(times["dense"])
        row = f"| {', '.join(f'{n:,}' for n in size)} | {milliseconds:.0f} | {spread(ratios)} "
        print(f"{row}| {spread(extra)} |")
    print("\n| a step, ms | expert 1 | expert 2 | filled | exchanges | hidden share |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for rate, steps in zip(RATES, found["filled"], strict=True):
        where = "gloo" if rate is None else f"network of {rate / 1e9:g} GB/s, emulated"
        numbers = " | ".join(f"{1e3 * statistics.median(times):.0f}" for times in steps.values())
        zipped = zip(steps["expert 2"], steps["filled"], steps["exchanges"], strict=True)
        hidden = [(plain - filled) / exchanged for plain, filled, exchanged in zipped]
        print(f"| {where} | {numbers} | {spread(hidden)} |")
    whole, half = found["bytes"]
    without, with_full = found["counts"]
    print(f"\nbytes of experts per rank, expert 2 / 1: {half / whole:.2f}")
    print(f"exchanges of counts, recompute full / none: {with_full} / {without}")


if __name__ == "__main__":
    main()
