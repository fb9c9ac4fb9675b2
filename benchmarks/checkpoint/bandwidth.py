"""Bandwidth of save and load, beside plain torch.distributed.checkpoint and torch.save.

    python -m benchmarks.checkpoint.bandwidth            from the root of the repository

One rank saves fp32 linear layers with Adam's state, 1 GB, to a local disk. All files are synced.
As in a run, the previous checkpoint is deleted after the new one is complete. pipemega also
computes checksums in a save, and compares them in a load before it overwrites a tensor; the
others compare nothing, so its load is also measured without. Each round has another order: the
first use of memory of the page cache is slow, and hits any of them.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import pipemega
from benchmarks.ranks import machine
from pipemega import LayerSpec, PipelineModule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to save; default: a temporary folder")
    options = parser.parse_args()
    # torch.distributed.checkpoint warns that it runs in one process.
    warnings.simplefilter("ignore")
    layers = max(1, round(options.megabytes * 1e6 / 12 / (options.width**2 + options.width)))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        actions = systems(folder, options.width, layers)
        for action in actions.values():
            action()
        seconds: dict[str, list[float]] = {name: [] for name in actions}
        order = random.Random(0)
        for _ in range(options.rounds):
            for name in order.sample(list(actions), len(actions)):
                started = time.perf_counter()
                actions[name]()
                seconds[name].append(time.perf_counter() - started)
    size = 12 * layers * (options.width**2 + options.width) / 1e6
    print(f"{size:.0f} MB; {machine()}\n")
    print("| | MB/s | bandwidth of pipemega / this |")
    print("| --- | ---: | ---: |")
    for name, times in seconds.items():
        mine = seconds[f"pipemega {name.rsplit(' ', 1)[1]}"]
        ratio = median(other / own for own, other in zip(mine, times, strict=True))
        print(f"| {name} | {size / median(times):.0f} | {ratio:.2f} |")


def systems(folder: str, width: int, layers: int) -> dict[str, Callable[[], Any]]:
    """Return the saves and loads, by name; each load reads what the save of its system wrote."""
    engine, *_ = pipemega.initialize(
        PipelineModule(
            [LayerSpec(nn.Linear, width, width) for _ in range(layers)], nn.functional.mse_loss
        ),
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "mesh": {"device": "cpu"},
        },
    )
    engine.train_batch(batch=(torch.randn(1, width), torch.randn(1, width)))
    config = engine.config
    state = {
        f"{kind}.{layer}.{name}": torch.randn(shape)
        for layer in range(layers)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for name, shape in (("weight", (width, width)), ("bias", (width,)))
    }
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def load(verify: bool) -> None:
        checkpoint = config.checkpoint.model_copy(update={"verify": verify})
        engine.config = config.model_copy(update={"checkpoint": checkpoint})
        engine.load_checkpoint(f"{folder}/pipemega", tag="step")

    def dcp_save() -> None:
        dcp.save(state, checkpoint_id=f"{folder}/new", no_dist=True)
        shutil.rmtree(f"{folder}/dcp", ignore_errors=True)
        os.rename(f"{folder}/new", f"{folder}/dcp")

    return {
        "pipemega save": lambda: engine.save_checkpoint(f"{folder}/pipemega", tag="step"),
        "torch.distributed.checkpoint save": dcp_save,
        "torch.save save": lambda: _torch_save(state, f"{folder}/state.pt"),
        "pipemega load": lambda: load(verify=True),
        "pipemega, checkpoint.verify false, load": lambda: load(verify=False),
        "torch.distributed.checkpoint load": lambda: dcp.load(
            target, checkpoint_id=f"{folder}/dcp", no_dist=True
        ),
        "torch.load load": lambda: _torch_load(target, f"{folder}/state.pt"),
    }


def _torch_save(state: dict[str, Tensor], path: str) -> None:
    with open(f"{path}.new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def _torch_load(target: dict[str, Tensor], path: str) -> None:
    for name, tensor in torch.load(path, weights_only=True).items():
        target[name].copy_(tensor)


if __name__ == "__main__":
    main()
