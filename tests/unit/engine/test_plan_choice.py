"""The plans that `initialize` chooses, on one process without groups."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.config import Config, load
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.topology import Topology
from pipemega.engine.plan_choice import ChosenPlan, PlanChooser, plan_chooser
from pipemega.engine.run_setup import RunSetup
from pipemega.errors import ConfigError, ScheduleError
from pipemega.layer_costs.counted_model import explain
from pipemega.layer_costs.stage_costs import StageCounts
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.plan.instructions import Kind
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.partition import Cut, LayerCosts
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.plan_selection import measurement_plan
from pipemega.pipeline.schedules import SCHEDULES, Sizes, build_plan
from pipemega.planning import schedule_choice
from pipemega.planning.estimate import Request, estimate
from pipemega.planning.planner import MeasuredStages, Planner, split_was_measured
from pipemega.planning.prediction import Rates, predict
from pipemega.planning.schedule_tuner import TunedPlans
from tests.paper.hand_made_plans import one_queue_per_pair, queued_bytes
from tests.sampling import some

MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 512,
}
COSTS = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0}


def config(pipeline: dict[str, Any], **changes: Any) -> Config:
    return load(
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 1,
            "mesh": {"pipeline": 2, "device": "cpu"},
            "model": MODEL,
            "pipeline": pipeline,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            **changes,
        }
    )


def mesh() -> Mesh:
    """Return rank 0 of a mesh of two pipeline ranks, without groups."""
    ranks = Axis("pipeline", (0, 1), 0)
    return Mesh(Topology(2, 1, 1), ranks, Axis("data"), Axis("tensor"), ranks, torch.device("cpu"))


def chooser(
    settings: Config, net: PipelineModule | None = None, *, has_read: bool = False
) -> Planner:
    net = net or gpt(GPTConfig.of(settings, MODEL["vocab_size"]))
    return Planner(RunSetup(settings, mesh(), net, has_read=has_read))


@pytest.mark.parametrize(
    "pipeline", [pytest.param({}, marks=pytest.mark.sweep), {"chunks": 2}], ids=str
)
def test_initialize_chooses_the_same_plan_as_the_plan_command(pipeline: dict[str, Any]) -> None:
    settings = config({"schedule": "auto", **pipeline})
    planned = estimate(Request(settings)).prediction
    chosen = chooser(settings).first_plan(None)
    assert chosen == ChosenPlan(planned.plan, planned.layout.bounds)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_planner_and_a_plain_start_choose_the_same_plan_and_cut(schedule: str) -> None:
    settings = config({"schedule": schedule})
    net = gpt(GPTConfig.of(settings, MODEL["vocab_size"]))
    setup = RunSetup(settings, mesh(), net)
    plain, planner = plan_chooser(setup), Planner(setup)
    assert type(plain) is PlanChooser
    chosen = plain.configured_plan(None)
    assert chosen.bounds is not None
    assert chosen == planner.configured_plan(None)


def test_an_error_of_pipemega_itself_while_layers_are_counted_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(StageCounts, "of_stages", fail)
    settings = config({"schedule": "1f1b"})
    setup = RunSetup(settings, mesh(), gpt(GPTConfig.of(settings, MODEL["vocab_size"])))
    with pytest.raises(KeyError, match="a mistake"):
        plan_chooser(setup).configured_plan(None)


@pytest.mark.parametrize(
    ("pipeline", "kind"),
    [
        ({"schedule": "zb-h1"}, Planner),
        ({"schedule": "1f1b", "vocabulary": "parallel"}, Planner),
        ({"schedule": "auto", "costs": COSTS}, Planner),
        ({"schedule": "auto"}, TunedPlans),
    ],
    ids=str,
)
def test_plans_that_need_bytes_or_a_search_come_from_the_planner(
    pipeline: dict[str, Any], kind: type[Planner]
) -> None:
    settings = config(pipeline)
    setup = RunSetup(settings, mesh(), gpt(GPTConfig.of(settings, MODEL["vocab_size"])))
    assert type(plan_chooser(setup)) is kind
    # A plan of the caller without W needs neither.
    assert type(plan_chooser(setup, build_plan("1f1b", 2, 8))) is (
        Planner if "vocabulary" in pipeline else PlanChooser
    )


def test_every_chosen_plan_is_proven_for_the_backend_in_use(monkeypatch: Any) -> None:
    choose = "pipemega.engine.plan_choice"
    monkeypatch.setattr(f"{choose}.message_order", lambda pipeline, device: "queues")
    monkeypatch.setattr("pipemega.pipeline.plan.validate.queues_of", one_queue_per_pair)
    plan = lower(build_plan("1f1b", 2, 8))
    found = SimpleNamespace(
        plan=plan,
        timeline=SimpleNamespace(makespan=0.0),
        costs=None,
        layout=SimpleNamespace(bounds=(0, 4, 8)),
    )
    monkeypatch.setattr(Planner, "_choose", lambda *_: found)
    named, auto = chooser(config({"schedule": "1f1b"})), chooser(config({"schedule": "auto"}))
    limited = chooser(config({"schedule": "zb-h1", "weight_queue_limit": 10**9}))
    measured = MeasuredStages((0, 4, 8), (0, 1), True, CostModel((1, 1), (1, 1), (1, 1)))
    choices = [
        lambda: named.configured_plan(None),
        lambda: named.configured_plan(plan),
        lambda: limited.configured_plan(None),
        lambda: named.next_plan(plan, measured),
        lambda: auto.first_plan(None),
        lambda: auto.next_plan(plan, measured),
    ]
    for choice in choices:
        with pytest.raises(ScheduleError, match=r"as over NCCL:\n  rank 0 waits"):
            choice()


def test_modules_that_are_already_built_are_counted_and_stay_unchanged() -> None:
    built = nn.Linear(8, 8)
    net = PipelineModule([nn.Linear(8, 8), built, nn.Tanh(), nn.Linear(8, 4)])
    copied = net.on_meta()
    assert [p.device.type for p in copied.specs[1].build(Axis("tensor")).parameters()] == [
        "meta"
    ] * 2
    assert built.weight.device.type == "cpu"


def test_without_known_shapes_auto_starts_with_one_stage_per_rank() -> None:
    settings = config({"schedule": "auto"}, model=None)
    net = PipelineModule([LayerSpec(nn.Linear, 8, 8) for _ in range(6)], nn.functional.mse_loss)
    choice = chooser(settings, net, has_read=True)
    plan, bounds, predicted, *_ = choice.first_plan(None)
    assert plan.compute_only() == measurement_plan(2, 8, 1)
    assert bounds is None, "pipeline.partition determines them without the plan"
    assert predicted is None
    costs = CostModel((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), activation=(9.0, 9.0), kept=(9.0, 9.0))
    best, _ = choice.next_plan(plan, MeasuredStages((0, 3, 6), (0, 1), True, costs))
    plain = simulate(SCHEDULES["1f1b"].plan(Sizes(2, 8)), costs)
    found = simulate(best, costs)
    assert found.makespan < plain.makespan
    assert max(found.peak) <= max(plain.peak)


@pytest.mark.sweep
def test_measured_costs_choose_among_all_placements_in_the_next_run() -> None:
    settings = config({"schedule": "auto"})
    choice = chooser(settings)
    choice.first_plan(None)
    first, bounds = lower(build_plan("1f1b-v", 2, 8)), (0, 2, 4, 6, 8)
    one = (1.0,) * first.num_stages
    slow_messages = CostModel(one, one, one, message=50.0)
    split = split_was_measured(first)
    measured = MeasuredStages(bounds, first.rank_of_stage, split, slow_messages)
    best, _, predicted, _ = choice.first_plan(measured)
    assert best.num_stages == 2
    assert choice.lowered(choice.best_stages(measured)) == best
    # In the same run the stages cannot move.
    same_run, costs = choice.next_plan(first, measured)
    assert same_run.rank_of_stage == first.rank_of_stage
    assert predicted is not None
    assert predicted < simulate(same_run, costs).makespan <= simulate(first, costs).makespan


def test_the_log_says_what_the_cut_gains_and_how_to_keep_the_old_default() -> None:
    # The head takes longer than all blocks, and has the parameters of the embedding.
    model = {"model": {**MODEL, "vocab_size": 4096}}
    settings = config({"schedule": "1f1b"}, **model)
    old = config({"schedule": "1f1b", "partition": "parameters"}, **model)
    even, cut = (estimate(Request(each)).prediction for each in (old, settings))
    net = gpt(GPTConfig.of(settings, 4096))
    reason = chooser(settings, net).configured_plan(None).reason
    assert reason is not None
    found = re.fullmatch(
        r"partition auto: stages (.+) \(bounds of layers\) for the shortest simulated step of "
        r"1f1b; share of the work by stage: (\d+)%, (\d+)%; with even numbers of parameters "
        r"\((.+)\) it is (.+)% longer \(pipeline\.partition 'parameters' divides the parameters "
        r"evenly, the default before\)",
        reason,
    )
    assert found is not None
    bounds, *shares, others, longer = found.groups()
    assert bounds == str(list(cut.layout.bounds))
    assert others == str(list(even.layout.bounds))
    assert sum(map(int, shares)) == 100
    ratio = even.timeline.makespan / cut.timeline.makespan
    # The log has the times of layers, the plan those of whole stages.
    assert float(longer) / 100 == pytest.approx(ratio - 1, abs=0.02)
    one = (1.0, 1.0)
    only = Cut.of((0, 1, 2), build_plan("1f1b", 2, 8), LayerCosts(one, one, one, one, one, one))
    assert explain(only, only).endswith("; even numbers of parameters give the same stages")


@pytest.mark.sweep
@pytest.mark.parametrize("slower", [1.1, 1.5])
def test_the_next_run_keeps_the_measured_stages_if_others_gain_little(
    slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_choice, "_EFFORT", 0.01)
    model = {"model": {**MODEL, "vocab_size": 1024}}
    settings = config({"schedule": "auto", "chunks": 1}, **model)
    net = gpt(GPTConfig.of(settings, 1024))
    choice = chooser(settings, net)
    counted = estimate(Request(settings)).prediction.costs
    place, bounds = (0, 1), (0, 5, 8)
    costs = replace(counted, forward=(slower * counted.forward[0], counted.forward[1]))
    measured = MeasuredStages(bounds, place, True, costs)
    plan, found, seconds, _ = choice.first_plan(measured)
    best = choice.best_stages(measured)
    here = simulate(*choice.next_plan(plan, measured)).makespan
    assert found is not None
    if found == bounds:
        assert seconds == pytest.approx(simulate(plan, costs).makespan)
    gain = 1 - best.timeline.makespan / here
    assert 0 < gain < 0.02 or gain > 0.05
    assert (found == bounds) == (gain < 0.02)
    # A run has tried the others.
    tried = replace(measured, tried_others=True)
    assert choice.first_plan(tried).bounds == bounds
    # The config excludes stages of an earlier run.
    two = chooser(config({"schedule": "auto", "chunks": 2}, **model), net)
    assert two.first_plan(tried).plan.num_stages == 4


def test_the_best_stages_are_searched_once_if_they_are_the_current_ones(monkeypatch: Any) -> None:
    bounds = 0, 4, 8
    choice = chooser(config({"schedule": "auto", "partition": bounds, "chunks": 1}))
    plan, *_ = choice.first_plan(None)
    costs = CostModel((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    measured = MeasuredStages(bounds, (0, 1), split_was_measured(plan), costs)
    best = choice.best_stages(measured)
    once = choice.next_plan(plan, measured)
    monkeypatch.setattr(Planner, "_choose", lambda *_: pytest.fail("searched again"))
    assert choice.next_plan(plan, measured, best) == once


@pytest.mark.parametrize("partition", ["auto", "uniform"])
def test_the_passes_of_a_cut_vocabulary_are_those_of_the_plan_command(partition: str) -> None:
    settings = config({"schedule": "1f1b", "vocabulary": "parallel", "partition": partition})
    report = estimate(Request(settings)).prediction
    chosen = chooser(settings).configured_plan(None)
    assert chosen.plan == report.plan
    assert chosen.bounds == report.layout.bounds


def test_the_queue_of_w_is_limited_to_the_configured_bytes() -> None:
    free = chooser(config({"schedule": "zb-h1"})).configured_plan(None).plan
    report = estimate(Request(config({"schedule": "zb-h1"})))
    kept = [costs.kept for costs in report.prediction.layout.costs]
    limit = max(kept)
    settings = config({"schedule": "zb-h1", "weight_queue_limit": limit})
    limited = chooser(settings).configured_plan(None).plan
    assert limited == estimate(Request(settings)).prediction.plan
    assert max(queued_bytes(p, kept) for p in free.compute_only().programs) > limit
    assert max(queued_bytes(p, kept) for p in limited.compute_only().programs) <= limit
    none = (
        chooser(config({"schedule": "zb-h1", "weight_queue_limit": 0})).configured_plan(None).plan
    )
    assert not any(step.kind is Kind.BACKWARD_INPUT for step in none.steps())


def test_a_limit_of_the_queue_without_known_shapes_is_an_error_with_the_way_out() -> None:
    settings = config({"schedule": "zb-h1", "weight_queue_limit": 1000}, model=None)
    net = PipelineModule([LayerSpec(nn.Linear, 8, 8) for _ in range(6)], nn.functional.mse_loss)
    with pytest.raises(
        ConfigError,
        match=r"pipeline\.weight_queue_limit needs the bytes .* of a micro-batch are unknown; give "
        r"initialize\(\) layers that run on torch's meta device and example=\(inputs, labels\)",
    ):
        chooser(settings, net, has_read=True).configured_plan(None)


RAMP_UP = {"training": {"rampup_batch_size": [2, 2, 16]}}


@pytest.mark.parametrize(
    "pipeline",
    some(
        [
            {"schedule": "1f1b"},
            {"schedule": "zb-v"},
            {"schedule": "interleaved", "chunks": 3},
            {"schedule": "zb-h1", "weight_queue_limit": 1},
            {"schedule": "zb-h1", "vocabulary": "parallel"},
            {"schedule": "auto", "costs": COSTS},
            {"schedule": "auto"},
        ],
        *(1, 2, 3, 4, 5),
    ),
    ids=str,
)
def test_the_plans_of_a_growing_batch_have_the_stages_of_the_full_step(
    pipeline: dict[str, Any],
) -> None:
    settings = config(pipeline, **RAMP_UP)
    chosen = chooser(settings)
    if pipeline == {"schedule": "auto"}:
        found = chosen.first_plan(None)
    else:
        found = chosen.configured_plan(None)
    full, bounds = found.plan, found.bounds
    assert bounds is not None
    assert full.num_microbatches == 8
    for count in (1, 2, 3, 6):
        plan = chosen.plan_of_size(full, bounds, count)
        assert (plan.num_microbatches, plan.rank_of_stage) == (count, full.rank_of_stage)


@pytest.mark.parametrize("share", [0.7, pytest.param(0.8, marks=pytest.mark.sweep)])
def test_all_plans_of_a_growing_batch_keep_the_memory_limit(share: float) -> None:
    """The plans of smaller steps had the memory of 1F1B."""
    limit = share * max(estimate(Request(config({"schedule": "1f1b"}))).prediction.timeline.peak)
    settings = config({"schedule": "auto", "memory_limit": limit}, **RAMP_UP)
    chosen = chooser(settings)
    full, bounds, *_ = chosen.first_plan(None)
    model = chosen._model
    assert model is not None
    assert bounds is not None
    for count in (1, 2, 5):
        plan = chosen.plan_of_size(full, bounds, count)
        assert (plan.num_microbatches, plan.rank_of_stage) == (count, full.rank_of_stage)
        assert max(predict(model, plan, Rates(), bounds).timeline.peak) <= limit


def test_a_plan_for_one_number_of_micro_batches_is_refused_with_a_growing_batch(
    tmp_path: Path,
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(build_plan("1f1b", 2, 8).to_json())
    settings = config({"schedule": {"file": str(file)}}, **RAMP_UP)
    chosen = chooser(settings)
    full = chosen.configured_plan(None).plan
    with pytest.raises(ConfigError) as error:
        chosen.plan_of_size(full, (0, 3, 6), 3)
    assert str(error.value) == (
        "training.rampup_batch_size has steps of 3 micro-batches, but the plan in "
        f"pipeline.schedule.file {str(file)!r} is for 8: name a schedule"
    )
    settings = config({}, mesh={"pipeline": 1, "device": "cpu"}, **RAMP_UP)
    with pytest.raises(ConfigError) as error:
        initialize(
            gpt(GPTConfig.of(settings, MODEL["vocab_size"])),
            settings,
            plan=build_plan("1f1b", 1, 8),
        )
    assert (
        "training.rampup_batch_size changes the number of micro-batches, and the plan '1f1b' given"
        in str(error.value)
    )
