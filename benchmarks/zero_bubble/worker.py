"""One rank of one layout: every schedule in turn, round after round; `run.py` starts it."""

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
from benchmarks.bubble.stages import Diary, Seconds, SleepingStage, sleep_precisely
from pipemega.engine import Engine
from pipemega.kernels import Kernels
from pipemega.mesh import Axis, build_mesh
from pipemega.models.gpt import Block, FinalNorm, GPTConfig, GPTLoss, Positions, Words
from pipemega.parameters import mark_partial
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.spec import TENSOR_AXIS, LayerSpec
from pipemega.tensor_parallel import VocabParallelHead
from pipemega.topology import Topology

WARM_UP_PACE = 0.05


class SleepingBlock(Block):
    """A small GPT block, with all messages of a large one, that then sleeps as a large one works.

    Each of the tensor ranks sleeps its share.
    """

    def __init__(
        self, config: GPTConfig, kernels: Kernels, axis: Axis, seconds: Seconds, diary: Diary
    ) -> None:
        super().__init__(config, kernels, axis)
        share = Seconds(*(part / axis.size for part in seconds))
        self.sleep = SleepingStage(0, share, 1.0, diary, config.hidden_size)
        if config.sequence_parallel:
            mark_partial(self.sleep)

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
    """Schedule -> when each timed step began and ended on this rank, by the machine's clock."""
    sizes = task["mesh"]
    topology = Topology.fit(dist.get_world_size(), sizes["pipeline"], sizes.get("tensor", 1))
    mesh = build_mesh(topology, torch.device("cpu"), timedelta(minutes=5))
    diary = Diary()
    engines: dict[str, Engine] = {}
    for schedule in task["schedules"]:
        engines[schedule], *_ = pipemega.initialize(
            _model(task, diary), _config(task, schedule, mesh.data.size), mesh=mesh
        )
    taken: dict[str, list[tuple[float, float]]] = {schedule: [] for schedule in engines}
    for turn in range(task["rounds"] + 1):
        diary.pace = 1.0 if turn else WARM_UP_PACE
        for schedule, engine in engines.items():
            diary.clear()
            gc.collect()
            dist.barrier()
            start = time.monotonic()
            engine.train_batch(_batches(task))
            if turn:
                taken[schedule].append((start, time.monotonic()))
    return taken


def _model(task: dict[str, Any], diary: Diary) -> PipelineModule:
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
        untie_embeddings_and_output_weights=True,
        sequence_parallel=task["mesh"].get("sequence_parallel", False),
    )
    kernels = Kernels.detect("cpu")
    words = {"axis": TENSOR_AXIS, "sequence_parallel": config.sequence_parallel}
    block = LayerSpec(SleepingBlock, config, kernels, TENSOR_AXIS, Seconds(*task["block"]), diary)
    return PipelineModule(
        [
            LayerSpec(Words, config.vocab_size, hidden, **words),
            LayerSpec(Positions, config, TENSOR_AXIS),
            *([block] * config.num_layers),
            LayerSpec(FinalNorm, config, kernels, TENSOR_AXIS),
            LayerSpec(VocabParallelHead, config.vocab_size, hidden, **words),
        ],
        loss_fn=LayerSpec(GPTLoss, config, TENSOR_AXIS),
    )


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
