"""Bandwidth of save and load, beside plain torch.distributed.checkpoint and torch.save.

    python -m benchmarks.checkpoint.bandwidth            from the root of the repository

One rank saves fp32 linear layers with Adam's state, 1 GB, to a local disk. All files are synced.
As in a run, the previous checkpoint is deleted after the new one is complete. pipemega also
computes checksums in a save, and compares them in a load before it overwrites a tensor; the
others compare nothing, so its load is also measured without. Each load is measured twice: from the
page cache, which still holds the files, and from the disk, after the page cache has dropped them.
Each round has another order: the first use of memory of the page cache is slow, and hits any of
them.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import pipemega
from benchmarks.ranks import machine
from pipemega import LayerSpec, PipelineModule

SAVE, LOAD, DISK = "save", "load", "load from disk"
UNVERIFIED, DCP = "pipemega, checkpoint.verify false", "torch.distributed.checkpoint"

# What each system loads, in the folder.
FILES = {
    "pipemega": "pipemega",
    UNVERIFIED: "pipemega",
    DCP: "dcp",
    "torch.load": "state.pt",
}


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
        cases = [*actions, *((system, DISK) for system, kind in actions if kind == LOAD)]
        seconds: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        order = random.Random(0)
        for _ in range(options.rounds):
            for system, kind in order.sample(cases, len(cases)):
                if kind == DISK:
                    _drop_from_page_cache(Path(folder, FILES[system]))
                started = time.perf_counter()
                actions[system, LOAD if kind == DISK else kind]()
                seconds[system, kind].append(time.perf_counter() - started)
    size = 12 * layers * (options.width**2 + options.width) / 1e6
    print(f"{size:.0f} MB; {machine()}\n")
    print("| | MB/s | bandwidth of pipemega / this |")
    print("| --- | ---: | ---: |")
    for (system, kind), times in seconds.items():
        mine = seconds["pipemega", kind]
        ratio = median(other / own for own, other in zip(mine, times, strict=True))
        print(f"| {system}: {kind} | {size / median(times):.0f} | {ratio:.2f} |")


def systems(folder: str, width: int, layers: int) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return the saves and loads by system and kind; a load reads what its system saved."""
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
        ("pipemega", SAVE): lambda: engine.save_checkpoint(f"{folder}/pipemega", tag="step"),
        (DCP, SAVE): dcp_save,
        ("torch.save", SAVE): lambda: _torch_save(state, f"{folder}/state.pt"),
        ("pipemega", LOAD): lambda: load(verify=True),
        (UNVERIFIED, LOAD): lambda: load(verify=False),
        (DCP, LOAD): lambda: dcp.load(target, checkpoint_id=f"{folder}/dcp", no_dist=True),
        ("torch.load", LOAD): lambda: _torch_load(target, f"{folder}/state.pt"),
    }


def _drop_from_page_cache(path: Path) -> None:
    """Make the next read of a file, or of all files of a folder, come from the disk."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            # Only synced pages can be dropped; all systems have synced them.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


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
