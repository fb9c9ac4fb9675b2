"""Memory of zb-h1 relative to 1F1B on the fullest rank by plan, with and without a limit of W."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule
from pipemega.config import load
from pipemega.planning.estimate import Request, estimate
from pipemega.planning.prediction import Prediction

WIDTH, LINEARS, ROWS = 128, 16, 1024
BASE: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
CHAIN = BASE | {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": 8,
    "mesh": {"pipeline": 2, "device": "cpu"},
}
GPT = BASE | {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "mesh": {"pipeline": 2, "device": "cpu"},
    "model": {
        "num_layers": 8, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256,
        "vocab_size": 8192, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    },
}  # fmt: skip


class Mark(NamedTuple):
    """One model and the most memory that zb-h1 may need, relative to 1F1B."""

    name: str
    config: Any
    most: float
    changes: tuple[str, ...] = ()
    model: str | None = None


MARKS = (
    Mark("16 linears", CHAIN, 1.5, model=f"{__name__}:linears"),
    Mark(
        "Llama 7 B, full recompute", "configs/llama_7b_tp4_pp4.json", 1.25,
        ("model.recompute=full", "train_batch_size=32"),
    ),
    Mark("GPT of benchmarks/pipeline_cpu", GPT, 1.02),
)  # fmt: skip


def linears(micro_batch_size: int) -> tuple[PipelineModule, Tensor, Tensor]:
    net = PipelineModule(
        [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(LINEARS)], nn.functional.mse_loss
    )
    return net, torch.empty(micro_batch_size, WIDTH), torch.empty(micro_batch_size, WIDTH)


def plan(mark: Mark, schedule: str, limit: str) -> Prediction:
    """Return the prediction of a run; `limit`: pipeline.weight_queue_limit as JSON."""
    changes = [f"pipeline.schedule={schedule}", f"pipeline.weight_queue_limit={limit}"]
    config = load(mark.config, [*mark.changes, *changes])
    return estimate(Request(config, model=mark.model)).prediction


def table() -> list[str]:
    """Return the rows of the table of marks."""
    rows = [
        "| model | 1f1b, MB | zb-h1, any queue | zb-h1 | target | step: 1f1b, any queue, zb-h1 |",
        "| --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for mark in MARKS:
        runs = [
            plan(mark, *run) for run in (("1f1b", "null"), ("zb-h1", "null"), ("zb-h1", '"auto"'))
        ]
        plain, free, limited = (run.peak for run in runs)
        passed = "reached" if limited <= mark.most * plain else "not reached"
        times = ", ".join(f"{run.timeline.makespan:.1f}" for run in runs)
        rows.append(
            f"| {mark.name} | {plain / 1e6:,.1f} | {free / plain:.2f} | {limited / plain:.2f} "
            f"| at most {mark.most}: {passed} | {times} |"
        )
    return rows
