"""Schedule `auto` cuts the vocabulary over the pipeline ranks where the step is shorter."""

from typing import Any

import pytest

from pipemega.config import load
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.plan.simulate import simulate
from pipemega.pipeline.plan_selection import with_passes
from pipemega.pipeline.schedules import build_plan
from pipemega.planning.estimate import Report, Request, estimate
from pipemega.planning.report import as_json
from pipemega.planning.schedule_choice import with_cut_vocabulary


def settings(vocabulary: int, schedule: str = "auto", **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "mesh": {"pipeline": 2, "device": "cpu"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipeline": {"schedule": schedule, "chunks": 1, **changes.pop("pipeline", {})},
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": 128,
            "vocab_size": vocabulary,
            "untie_embeddings_and_output_weights": True,
        },
        **changes,
    }


def planned(vocabulary: int, schedule: str = "auto", **changes: Any) -> Report:
    return estimate(Request(load(settings(vocabulary, schedule, **changes)), quick=True))


def test_a_large_vocabulary_is_cut_and_the_plan_says_so() -> None:
    report, stage = planned(32768), planned(32768, pipeline={"vocabulary": "stage"})
    assert report.prediction.plan.has_vocabulary
    assert any("pipeline.vocabulary 'auto' cuts" in note for note in report.notes)
    # The ranks have equal parameters, and the model is the whole one.
    first, last = (rank.footprint.parameters for rank in report.prediction.memory)
    assert first == pytest.approx(last, rel=0.1)
    assert first + last == report.parameters == stage.parameters
    assert report.prediction.peak < stage.prediction.peak
    # E and F, hidden, S, C, T and G: five transfers and two messages of 1F1B per micro-batch.
    assert as_json(report, ())["outcome"]["messages"] == 4 * 7


def test_a_small_vocabulary_is_not_cut() -> None:
    assert not planned(512).prediction.plan.has_vocabulary


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline": {"vocabulary": "stage"}},
        {"pipeline": {"optimizer_sync": "post_validate"}},
        {"pipeline": {"partition": [0, 3, 8]}},
        {"lora": {"r": 2}},
        {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}},
    ],
)
def test_a_vocabulary_is_not_cut_if_the_config_or_the_model_cannot_have_it(
    changes: dict[str, Any],
) -> None:
    plain = load(settings(512))
    net = gpt(GPTConfig.of(plain, 512))
    cut = with_cut_vocabulary(plain, net)
    assert cut is not None
    assert cut.pipeline.vocabulary == "parallel"
    assert with_cut_vocabulary(load(settings(512, **changes)), net) is None
    net.vocabulary = None
    assert with_cut_vocabulary(plain, net) is None


def test_the_passes_are_in_the_best_order_for_the_counted_times() -> None:
    prediction = planned(512, "1f1b", pipeline={"vocabulary": "parallel"}).prediction
    assumed = with_passes(build_plan("1f1b", 2, 4))
    assert prediction.plan.compute_only().programs != assumed.programs
    assert prediction.timeline.makespan < simulate(assumed, prediction.costs).makespan


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "gpipe", "interleaved"])
def test_a_cut_vocabulary_is_planned_with_every_kind_of_schedule(schedule: str) -> None:
    chunks = {"zb-v": 2, "interleaved": 2}.get(schedule, 1)
    report = planned(4096, schedule, pipeline={"vocabulary": "parallel", "chunks": chunks})
    prediction = report.prediction
    assert prediction.plan.has_vocabulary
    # The heads of the ranks take time in the simulation.
    stages = sum(map(sum, (prediction.costs.forward, prediction.costs.whole_backward)))
    busy = sum(prediction.timeline.busy(rank) for rank in range(2))
    assert busy > 1.2 * 4 * stages
    assert all(rank.activations > 0 for rank in prediction.memory)
