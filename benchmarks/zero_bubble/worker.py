"""One rank of one layout: runs all schedules in turn in each round; started by `run.py`."""

import argparse
import gc
import json
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pipemega
from benchmarks.bubble.stages import Seconds, SleepingStage, SleepLog, sleep_precisely
from pipemega.distributed.mesh import Axis, build_mesh
from pipemega.distributed.topology import Topology
from pipemega.engine.engine import Engine
from pipemega.kernels import Kernels
from pipemega.models.gpt import GPTConfig, gpt
from pipemega.models.transformer_block import Block
from pipemega.parameters import mark_partial_gradient
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.spec import TENSOR_AXIS, LayerSpec

WARM_UP_SCALE = 0.05


class SleepingBlock(Block):
    """A small GPT block that sends the messages of a large one and sleeps for its computation.

    The time is divided evenly among the tensor ranks.
    """

    def __init__(
        self, config: GPTConfig, kernels: Kernels, axis: Axis, seconds: Seconds, log: SleepLog
    ) -> None:
        super().__init__(config, kernels, axis)
        share = Seconds(*(part / axis.size for part in seconds))
        self.sleep = SleepingStage(0, share, 1.0, log, config.hidden_size)
        if config.sequence_parallel:
            mark_partial_gradient(self.sleep)

    def forward(self, inputs: Any) -> Tensor:
        y: Tensor = self.sleep(super().forward(inputs))
        return y


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=json.loads, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sleep_precisely()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    logging.getLogger("pipemega").setLevel(logging.WARNING)
    options.out.write_text(json.dumps(measure(options.task)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(task: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return schedule -> (start, end) of each timed step on this rank, by the monotonic clock."""
    sizes = task["mesh"]
    topology = Topology.fit(dist.get_world_size(), sizes["pipeline"], sizes.get("tensor", 1))
    mesh = build_mesh(topology, torch.device("cpu"), timedelta(minutes=5))
    log = SleepLog()
    engines: dict[str, Engine] = {}
    for schedule in task["schedules"]:
        engines[schedule], *_ = pipemega.initialize(
            _model(task, log), _config(task, schedule, mesh.data.size), mesh=mesh
        )
    taken: dict[str, list[tuple[float, float]]] = {schedule: [] for schedule in engines}
    for turn in range(task["rounds"] + 1):
        log.scale = 1.0 if turn else WARM_UP_SCALE
        for schedule, engine in engines.items():
            log.clear()
            gc.collect()
            dist.barrier()
            start = time.monotonic()
            engine.train_batch(_batches(task))
            if turn:
                taken[schedule].append((start, time.monotonic()))
    return taken


def _model(task: dict[str, Any], log: SleepLog) -> PipelineModule:
    hidden, seq = task["hidden"], task["seq"]
    config = GPTConfig(
        vocab_size=128,
        seq_length=seq,
        num_layers=task["blocks"],
        hidden_size=hidden,
        num_attention_heads=2,
        ffn_hidden_size=4 * hidden,
        num_query_groups=2,
        kv_channels=hidden // 2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        untie_embeddings_and_output_weights=True,
        sequence_parallel=task["mesh"].get("sequence_parallel", False),
    )
    kernels = Kernels.detect("cpu")
    net = gpt(config, kernels)
    block = LayerSpec(SleepingBlock, config, kernels, TENSOR_AXIS, Seconds(*task["block"]), log)
    return net.with_specs(block if spec.typename is Block else spec for spec in net.specs)


def _config(task: dict[str, Any], schedule: str, data_ranks: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": task["samples"] // data_ranks,
        "mesh": {**task["mesh"], "device": "cpu"},
        "pipeline": {"schedule": schedule, "partition": "type:SleepingBlock"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


def _batches(task: dict[str, Any]) -> Any:
    ids = torch.arange(task["seq"])[None]
    return iter([(ids, ids)] * task["samples"])


if __name__ == "__main__":
    main()
