"""Which plan a config comes to, without a process."""

import pytest

from pipemega.config import load
from pipemega.config.pipeline import PipelineSection
from pipemega.errors import ConfigError, ScheduleError
from pipemega.pipeline.choice import best_plan, check_sizes, first_plan, plain, usual_memory
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Kind
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.schedules import build_plan, forward_only
from pipemega.pipeline.simulate import simulate
from pipemega.pipeline.synthesis import Layout
from pipemega.pipeline.validate import validate

COSTS = {"forward": 1.0, "backward_input": 1.2, "backward_weight": 0.8, "message": 0.1}


def section(pipeline: dict, ranks: int = 2) -> PipelineSection:
    return load({"train_batch_size": 8, "mesh": {"pipeline": ranks}, "pipeline": pipeline}).pipeline


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_plain_plan_has_each_weight_half_right_behind_its_input_half(chunks):
    plan = validate(lower(plain(2, 6, chunks))).compute_only()
    assert plan.num_stages == 2 * chunks
    for program in plan.programs:
        for at, step in enumerate(program):
            assert step.kind is not Kind.BACKWARD
            if step.kind is Kind.BACKWARD_INPUT:
                assert program[at + 1] == step._replace(kind=Kind.BACKWARD_WEIGHT)


def test_the_plain_plan_holds_no_more_than_1f1b():
    for chunks in (1, 2):
        plan = plain(4, 8, chunks)
        costs = CostModel.shared(plan.rank_of_stage)
        assert max(simulate(plan, costs).peak) <= 4.0


def test_auto_begins_plain_where_nobody_knows_the_costs():
    assert first_plan(section({"schedule": "auto"}), 2, 8, num_layers=3) == plain(2, 8, 1)
    assert first_plan(section({"schedule": "auto"}), 2, 8, num_layers=4) == plain(2, 8, 2)
    chosen = section({"schedule": "auto", "chunks": 3})
    assert first_plan(chosen, 2, 8, num_layers=9) == plain(2, 8, 3)


def test_auto_on_one_rank_has_nothing_to_choose():
    assert first_plan(section({"schedule": "auto"}, 1), 1, 8, num_layers=4).name == "1f1b"


def test_costs_by_hand_give_the_best_plan_at_once():
    plan = first_plan(section({"costs": COSTS}), 2, 8, num_layers=8)
    costs = CostModel.shared(plan.rank_of_stage, 1.0, 1.2, 0.8, 0.1)
    named = build_plan("zb-v", 2, 8)
    rival = simulate(named, CostModel.shared(named.rank_of_stage, 1.0, 1.2, 0.8, 0.1))
    found = simulate(validate(plan), costs)
    assert found.makespan <= rival.makespan + 1e-9
    assert max(found.peak) <= 2.0 + 1e-9


def test_no_more_chunks_are_tried_than_there_are_layers():
    plan = first_plan(section({"costs": COSTS}), 2, 8, num_layers=3)
    assert plan.num_stages == 2


def test_costs_stage_by_stage_fix_the_number_of_stages():
    costs = {name: [1.0, 1.0, 1.0, 2.0] for name in COSTS if name != "message"}
    plan = first_plan(section({"costs": costs}), 2, 4, num_layers=9)
    assert plan.num_stages == 4
    odd = {name: [1.0, 1.0, 1.0] for name in costs}
    with pytest.raises(ConfigError, match=r"has 3 numbers .* mesh.pipeline \(2\) times any number"):
        first_plan(section({"costs": odd}), 2, 4, num_layers=9)
    with pytest.raises(ConfigError, match=r"mesh.pipeline \(2\) \* pipeline.chunks \(1\)"):
        first_plan(section({"costs": costs, "chunks": 1}), 2, 4, num_layers=9)


def test_a_memory_limit_in_the_unit_of_the_activations_is_kept():
    costs = {**COSTS, "activation": 100.0, "kept": 40.0}
    plan = first_plan(section({"costs": costs, "memory_limit": 150.0}, 4), 4, 8, num_layers=16)
    share = 4 / plan.num_stages
    model = CostModel.uniform(
        plan.num_stages, share, 1.2 * share, 0.8 * share,
        activation=100 * share, kept=40 * share, message=0.1,
    )  # fmt: skip
    assert max(simulate(plan, model).peak) <= 150.0 + 1e-6


def test_a_memory_limit_that_nothing_keeps_is_answered_with_the_least_that_would_do():
    with pytest.raises(ScheduleError, match=r"0\.1\b"):
        first_plan(section({"costs": COSTS, "memory_limit": 0.1}), 2, 8, num_layers=2)


def test_the_usual_memory_is_what_1f1b_holds_on_its_fullest_rank():
    costs = CostModel((1, 1), (1, 1), (1, 1), activation=(3.0, 5.0), kept=(1.0, 5.2))
    assert usual_memory(Layout((0, 1), costs), 8) == pytest.approx(10.4)
    assert usual_memory(Layout((0, 1), costs), 1) == pytest.approx(5.2)
    assert max(best_plan([Layout((0, 1), costs)], 8, "auto").timeline.peak) <= 10.4 + 1e-9


def test_what_is_computed_again_is_no_usual_memory():
    recomputed = CostModel((1, 1), (2, 2), (1, 1), activation=(1.0, 1.0), kept=(13.0, 13.0))
    assert usual_memory(Layout((0, 1), recomputed), 8) == pytest.approx(2.2)
    plan = best_plan([Layout((0, 1), recomputed)], 8, "auto").plan
    assert not any(step.kind is Kind.BACKWARD_WEIGHT for step in plan.steps())


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_a_plan_from_a_file_is_the_one_that_was_written(tmp_path, suffix):
    plan = build_plan("zb-v", 2, 8)
    file = tmp_path / f"mine.{suffix}"
    file.write_text(plan.to_csv() if suffix == "csv" else plan.to_json())
    found = first_plan(section({"schedule": {"file": str(file)}}), 2, 8, num_layers=4)
    assert (found.programs, found.name) == (plan.programs, f"mine.{suffix}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n1F0,1B0", "rank 0: '0X0' is no step of a plan in CSV"),
        ("0F0,0B0\n1F0,1B0", "for 1 micro-batches, and gradient_accumulation_steps is 2"),
        ("0F0,0B0,0F1,0B1", "for 1 pipeline ranks, and mesh.pipeline is 2: make them equal"),
        ("0F0,0F1\n1F0,1F1", "a plan without a backward"),
        ("0F0,0B0,0F1,0B1\n0F0,1F1", "stage 0 of the plan in CSV is on rank 0 and on rank 1"),
        ('{"name": "x"}', "a plan in JSON has the keys"),
    ],
)
def test_a_file_that_is_no_plan_for_this_run_is_refused_by_its_name(tmp_path, text, message):
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises((ConfigError, ScheduleError)) as refusal:
        first_plan(section({"schedule": {"file": str(file)}}), 2, 2, num_layers=4)
    assert message in str(refusal.value)
    assert f"pipeline.schedule.file {str(file)!r}" in str(refusal.value)


def test_a_missing_plan_file_is_named():
    with pytest.raises(ConfigError, match=r"file 'no\.csv' cannot be read: No such"):
        first_plan(section({"schedule": {"file": "no.csv"}}), 2, 2, num_layers=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cells: cells[0].remove("0B1"), "micro-batch 1 at stage 0 has 0 B"),
        (lambda cells: cells[0].append("0B1"), "micro-batch 1 at stage 0 has 2 B"),
        (lambda cells: cells[1].insert(0, cells[1].pop(1)), "stands still"),
    ],
)
def test_a_plan_with_a_missing_doubled_or_misplaced_step_is_shown_with_an_arrow(
    tmp_path, change, message
):
    cells = [row.split(",") for row in build_plan("1f1b", 2, 2).to_csv().splitlines()]
    change(cells)
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(map(",".join, cells)))
    with pytest.raises(ScheduleError) as refusal:
        validate(lower(first_plan(section({"schedule": {"file": str(file)}}), 2, 2, 4)))
    assert message in str(refusal.value)
    assert "mine.csv" in str(refusal.value)
    assert "rank 0 " in str(refusal.value)


def test_a_plan_that_evaluates_cannot_be_brought_for_training():
    with pytest.raises(ConfigError, match="mine is a plan without a backward"):
        check_sizes(forward_only((0, 1), 4), "mine", 2, 4)
