"""One rank of the benchmark: alternates blocking saves, background saves and loads."""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.engine.engine import Engine


class Noise(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(self.width, generator=torch.Generator().manual_seed(index))
        return x, x.flip(0)


def build(options: argparse.Namespace, folder: str, background: bool) -> Engine:
    layers = [LayerSpec(nn.Linear, options.width, options.width) for _ in range(options.layers)]
    engine, *_ = pipemega.initialize(
        PipelineModule(layers, nn.functional.mse_loss),
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "mesh": {"pipeline": options.pipeline, "data": options.data, "device": "cpu"},
            "checkpoint": {"async": background, "save": folder, "keep_last": 1},
        },
        Noise(options.width),
    )
    return engine


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that `action` takes; all ranks start together."""
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("pipeline", "data", "width", "layers", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--folder")
    parser.add_argument("--out")
    options = parser.parse_args()
    blocking, background = (
        build(options, f"{options.folder}/{is_async}", is_async) for is_async in (False, True)
    )
    for engine in (blocking, background):
        engine.train_batch()
    rounds = []
    # The first round allocates the copy buffers and is not counted.
    for _ in range(options.rounds + 1):
        for engine in (blocking, background):
            engine.train_batch()
        seconds = {"save": timed(lambda: blocking.save_checkpoint(f"{options.folder}/False"))}
        seconds["step"] = timed(background.train_batch)
        seconds["blocked"] = timed(lambda: background.save_checkpoint(f"{options.folder}/True"))
        seconds["step during save"] = timed(background.train_batch)
        seconds["rest"] = timed(background.finish_saving)
        for verify in (True, False):
            background.config = blocking.config.model_copy(
                update={
                    "checkpoint": blocking.config.checkpoint.model_copy(update={"verify": verify})
                }
            )
            name = "load" if verify else "load unverified"
            seconds[name] = timed(lambda: background.load_checkpoint(f"{options.folder}/False"))
        rounds.append(seconds)
    Path(options.out).write_text(json.dumps({"rounds": rounds[1:]}))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
