"""Forward and backward of compiled GPT blocks beside uncompiled ones, on one device.

python -m benchmarks.compile.run
"""

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipemega import PipelineModule, initialize
from pipemega.config import load
from pipemega.engine.engine import Engine
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.model.module import RngKey, Stage

BLOCKS, HIDDEN, HEADS, LENGTH, BATCH = 4, 256, 4, 256, 2
MODEL: dict[str, Any] = {
    "num_layers": BLOCKS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "seq_length": LENGTH,
    "vocab_size": 512,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
# Equal up to the order of sums, in units of the largest gradient.
MOST_DIFFERENCE = {"fp32": 1e-5, "bf16": 5e-2}


def blocks(dtype: str, compiled: bool, mode: str) -> Stage:
    """Return the blocks as the stage of a run."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "model": MODEL,
        "compile": {"enabled": compiled, "mode": mode},
    }
    if dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    config = load(settings)
    # Without embedding, positions, last norm and head.
    layers = gpt(GPTConfig.of(config, MODEL["vocab_size"])).specs[2:-2]
    net = PipelineModule(list(layers), lambda y, _: y.float().square().mean())
    engine: Engine = initialize(net, config)[0]
    stage = engine.module[0]
    assert isinstance(stage, Stage)
    return stage


class Run:
    """Forward and backward of a stage."""

    def __init__(self, stage: Stage, x: Tensor) -> None:
        self.stage, self.x = stage, x

    def step(self) -> None:
        self.x.grad = None
        # The input of a stage is no leaf.
        y = self.stage(self.x.view_as(self.x), RngKey(0, 0, 0))
        y.backward(torch.ones_like(y))
        if self.x.is_cuda:
            torch.cuda.synchronize()


def seconds(run: Run, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run.step()
    return (time.perf_counter() - started) / repeats


def compare(dtype: str, mode: str, rounds: int) -> tuple[str, bool]:
    """Return a row of the table, and whether the gradients are equal."""
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    stages = [blocks(dtype, compiled, mode) for compiled in (False, True)]
    device = next(stages[0].parameters()).device
    x = torch.randn(BATCH, LENGTH, HIDDEN, device=device).to(torch_dtype)
    eager, compiled = (Run(stage, x.clone().requires_grad_()) for stage in stages)
    eager.step()
    first = seconds(compiled, 1)
    assert eager.x.grad is not None
    assert compiled.x.grad is not None
    difference = (eager.x.grad - compiled.x.grad).abs().max() / eager.x.grad.abs().max()
    equal = float(difference) <= MOST_DIFFERENCE[dtype]
    found: list[tuple[float, float]] = []
    for _ in range(rounds):
        found.append((seconds(eager, 5), seconds(compiled, 5)))
    times = [1e3 * statistics.median(column) for column in zip(*found, strict=True)]
    ratio = statistics.median(there / here for here, there in found)
    row = f"| {dtype} | {times[0]:.1f} | {times[1]:.1f} | {ratio:.2f} | {first:.1f} | "
    return row + f"{float(difference):.1e} |", equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="default", help="compile.mode")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{BLOCKS} blocks, hidden size {HIDDEN}, {BATCH} x {LENGTH} tokens")
    print("| dtype | uncompiled, ms | compiled, ms | ratio | first call, s | difference of dx |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    rows = [*map(partial(compare, mode=arguments.mode, rounds=arguments.rounds), MOST_DIFFERENCE)]
    for row, _ in rows:
        print(row)
    if not all(equal for _, equal in rows):
        raise SystemExit("FAIL: the gradients of compiled blocks differ from uncompiled ones")
    print("gradients are equal up to rounding: pass")


if __name__ == "__main__":
    main()
