"""The tensors stored for W: what they add to the memory of a rank, by plan."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule
from pipemega.config import load
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.schedules import SCHEDULES, splits_backward
from pipemega.planning.estimate import Report, Request, estimate
from pipemega.planning.prediction import Prediction

ROOT = Path(__file__).parents[3]
SPLIT = [name for name in SCHEDULES if splits_backward(name)]
LINEARS = f"{__name__}:linears"
WIDTH = 64


def linears(micro_batch_size: int) -> tuple[PipelineModule, Tensor, Tensor]:
    net = PipelineModule(
        [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(16)], loss_fn=nn.functional.mse_loss
    )
    return net, torch.empty(micro_batch_size, WIDTH), torch.empty(micro_batch_size, WIDTH)


def plan_linears(schedule: str, ranks: int, rows: int, limit: str | None = "auto") -> Prediction:
    settings = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 8,
        "mesh": {"pipeline": ranks, "device": "cpu"},
        "pipeline": {"schedule": schedule, "weight_queue_limit": limit},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return estimate(Request(load(settings), model=LINEARS)).prediction


@cache
def plan_llama(schedule: str, recompute: str, limit: str = '"auto"') -> Report:
    changes = [
        f"pipeline.schedule={schedule}", f"model.recompute={recompute}", "train_batch_size=32",
        f"pipeline.weight_queue_limit={limit}",
    ]  # fmt: skip
    return estimate(Request(load(ROOT / "configs/llama_7b_tp4_pp4.json", changes)))


def step_bytes(prediction: Prediction) -> int:
    """Return the bytes of the fullest rank without weights, gradients and optimizer state."""
    return max(rank.schedule_peak.total for rank in prediction.memory)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows", [64, 1024])
def test_linears_need_at_most_one_and_a_half_times_the_memory_of_1f1b(
    ranks: int, rows: int
) -> None:
    plain = plan_linears("1f1b", ranks, rows)
    limited, free = (plan_linears("zb-h1", ranks, rows, limit) for limit in ("auto", None))
    assert step_bytes(limited) <= 1.5 * step_bytes(plain)
    assert limited.peak <= 1.5 * plain.peak
    assert step_bytes(free) > 1.6 * step_bytes(plain)


def test_recomputed_blocks_need_at_most_a_quarter_more_memory_than_1f1b() -> None:
    plain, limited, free = (
        plan_llama(*run).prediction
        for run in (("1f1b", "full"), ("zb-h1", "full"), ("zb-h1", "full", "null"))
    )
    assert limited.peak <= 1.25 * plain.peak
    assert free.peak > 1.5 * plain.peak
    # W still fills some of the bubbles.
    assert free.timeline.makespan <= limited.timeline.makespan < plain.timeline.makespan


def test_without_recomputation_no_w_of_equal_blocks_runs_earlier() -> None:
    limited, free = (plan_llama("zb-h1", "none", limit) for limit in ('"auto"', "null"))
    assert limited.prediction.plan == free.prediction.plan


def test_a_schedule_with_less_memory_than_1f1b_keeps_its_order() -> None:
    """V-Min holds few micro-batches, so that its queue of W is most of its memory."""
    limited, free, plain = (
        estimate(Request(load(ROOT / "configs/quickstart.json", changes))).prediction
        for changes in (
            ["pipeline.schedule=v-min"],
            ["pipeline.schedule=v-min", "pipeline.weight_queue_limit=null"],
            ["pipeline.schedule=1f1b-v"],
        )
    )
    assert limited.plan == free.plan
    assert step_bytes(limited) < step_bytes(plain)


def test_sequence_parallel_ranks_keep_their_slice_of_an_input_for_w() -> None:
    """As a full backward, which gathers it again."""
    split, whole = (
        plan_llama(schedule, "none", "null").prediction.layout.costs
        for schedule in ("zb-h1", "1f1b")
    )
    for one, other in zip(split, whole, strict=True):
        assert one.held == pytest.approx(other.held, rel=1e-4)
    assert all(stage.kept < 1.1 * stage.held for stage in split)


@pytest.mark.parametrize("schedule", SPLIT)
def test_the_limited_plan_of_a_schedule_stays_the_same_if_it_is_limited_again(
    schedule: str,
) -> None:
    prediction = plan_linears(schedule, 2, 64)
    again = plan_linears(schedule, 2, 64)
    assert again.plan == prediction.plan
    order = [_last_jobs(prediction.plan, stage) for stage in range(prediction.plan.num_stages)]
    # Gradients are added in the order of the micro-batches, so the results are bitwise equal.
    assert order == [list(range(8))] * prediction.plan.num_stages


def _last_jobs(plan: Plan, stage: int) -> list[int]:
    """Return the micro-batches of `stage` in the order of their B or W."""
    return [s.microbatch for s in plan.steps() if s.stage == stage and s.kind.value in ("B", "W")]
