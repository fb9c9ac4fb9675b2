"""Schedule `auto` for a model: never worse than a named schedule within the limit."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from pipemega import LayerSpec, PipelineModule
from pipemega.config import load
from pipemega.errors import ScheduleError
from pipemega.planning.estimate import Report, Request, estimate

MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 512,
}


def planned(model: dict[str, Any] | None = None, **changes: Any) -> Report:
    """Return the report of `auto`, compared with all schedules."""
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "mesh": {"pipeline": 2, "device": "cpu"},
        "model": {**MODEL, **(model or {})},
        "pipeline": {"schedule": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **changes,
    }
    return estimate(Request(load(config), compare=("all",)))


def check(report: Report) -> None:
    """Check that auto keeps the limit of 1F1B, and that no named schedule that does is faster."""
    auto = report.prediction
    assert auto.plan.name == "auto"
    by_name = {one.plan.name: one for one in report.compared}
    plain = by_name["1f1b"]
    assert auto.peak <= plain.peak
    assert max(auto.timeline.peak) <= max(plain.timeline.peak) * (1 + 1e-9)
    for name, one in by_name.items():
        if one.peak <= plain.peak and max(one.timeline.peak) <= max(plain.timeline.peak):
            assert auto.timeline.makespan <= one.timeline.makespan * (1 + 1e-9), name


def test_auto_on_the_quickstart_is_faster_than_1f1b_within_its_memory() -> None:
    changes = ["mesh.tensor=1", "mesh.device=cpu", "pipeline.schedule=auto"]
    report = estimate(Request(load("configs/quickstart.json", changes), compare=("all",)))
    check(report)
    plain = next(one for one in report.compared if one.plan.name == "1f1b")
    assert report.prediction.timeline.makespan < 0.95 * plain.timeline.makespan
    assert any(note.startswith("schedule auto is ") for note in report.notes)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"recompute": "full"}, marks=pytest.mark.sweep),
        # Unequal stages: a large embedding and head, and a number of blocks that does not divide.
        {"vocab_size": 8192, "num_layers": 3, "untie_embeddings_and_output_weights": True},
    ],
)
def test_auto_is_never_worse_than_a_named_schedule_within_the_limit(model: dict[str, Any]) -> None:
    check(planned(model))


def random_model(micro_batch_size: int) -> Any:
    """Return a model of unequal layers, with inputs and labels."""
    rng = random.Random(SEED)
    widths = [8, *(rng.choice((8, 64, 256, 700)) for _ in range(rng.randint(4, 9))), 4]
    layers = [LayerSpec(nn.Linear, a, b) for a, b in pairwise(widths)]
    net = PipelineModule(layers, loss_fn=nn.functional.cross_entropy)
    return net, torch.randn(micro_batch_size, 8), torch.randint(4, (micro_batch_size,))


SEED = 0


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.sweep) for n in range(1, 30))]
)
def test_auto_is_never_worse_on_a_model_of_unequal_layers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SEED", seed)
    rng = random.Random(seed)
    config = {
        "train_batch_size": 64 * rng.choice((1, 3, 6, 8)),
        "train_micro_batch_size_per_gpu": 64,
        "mesh": {"pipeline": rng.choice((2, 3, 4)), "device": rng.choice(("cpu", "cuda"))},
        "pipeline": {"schedule": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    request = Request(load(config), model=f"{__name__}:random_model", compare=("all",))
    check(estimate(request))


@pytest.mark.sweep
def test_a_configured_memory_limit_is_a_limit_of_activations() -> None:
    free = planned(pipeline={"schedule": "auto", "memory_limit": 1e12})
    held = max(free.prediction.timeline.peak)
    limit = 0.6 * held
    limited = planned(pipeline={"schedule": "auto", "memory_limit": limit})
    assert max(limited.prediction.timeline.peak) <= limit
    for one in limited.compared:
        if max(one.timeline.peak) <= limit:
            assert limited.prediction.timeline.makespan <= one.timeline.makespan * (1 + 1e-9)
    with pytest.raises(ScheduleError, match=r"pipeline\.memory_limit: no plan .* keeps 10 bytes"):
        planned(pipeline={"schedule": "auto", "memory_limit": 10})


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_configured_chunks_restrict_the_choice(chunks: int) -> None:
    report = planned(pipeline={"schedule": "auto", "chunks": chunks})
    assert report.prediction.chunks == chunks


def test_bounds_of_the_config_restrict_the_choice() -> None:
    report = planned(pipeline={"schedule": "auto", "partition": [0, 2, 4, 6, 8]})
    assert report.prediction.chunks == 2
    assert report.prediction.layout.bounds == (0, 2, 4, 6, 8)
