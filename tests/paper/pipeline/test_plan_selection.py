"""Plan selection from a config, without torch."""

from dataclasses import replace

import pytest

from pipemega.config import load
from pipemega.config.sections.pipeline_sections import PipelineSection
from pipemega.errors import ConfigError, ScheduleError
from pipemega.pipeline.autoschedule import Placement, limit_of_1f1b
from pipemega.pipeline.plan.instructions import Kind
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.plan.validate import validate
from pipemega.pipeline.plan_selection import (
    best_plan,
    check_sizes,
    first_plan,
    measurement_plan,
    training_plan,
)
from pipemega.pipeline.schedules import build_plan, forward_only
from tests.paper.hand_made_plans import one_queue_per_pair

COSTS = {"forward": 1.0, "backward_input": 1.2, "backward_weight": 0.8, "message": 0.1}


def section(pipeline: dict, ranks: int = 2) -> PipelineSection:
    return load({"train_batch_size": 8, "mesh": {"pipeline": ranks}, "pipeline": pipeline}).pipeline


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_measurement_plan_runs_each_w_directly_after_its_i(chunks):
    plan = validate(lower(measurement_plan(2, 6, chunks))).compute_only()
    assert plan.num_stages == 2 * chunks
    for program in plan.programs:
        for at, step in enumerate(program):
            assert step.kind is not Kind.BACKWARD
            if step.kind is Kind.BACKWARD_INPUT:
                assert program[at + 1] == step._replace(kind=Kind.BACKWARD_WEIGHT)


def test_the_measurement_plan_needs_no_more_memory_than_1f1b():
    for chunks in (1, 2):
        plan = measurement_plan(4, 8, chunks)
        costs = CostModel.from_rank_costs(plan.rank_of_stage)
        assert max(simulate(plan, costs).peak) <= 4.0


def test_auto_without_costs_starts_with_the_measurement_plan():
    auto = section({"schedule": "auto"})
    assert first_plan(auto, 2, 8, num_layers=3) == measurement_plan(2, 8, 1)
    assert first_plan(auto, 2, 8, num_layers=4) == measurement_plan(2, 8, 1)
    three_chunks = section({"schedule": "auto", "chunks": 3})
    assert first_plan(three_chunks, 2, 8, num_layers=9) == measurement_plan(2, 8, 3)


def test_auto_on_one_rank_selects_1f1b():
    assert first_plan(section({"schedule": "auto"}, 1), 1, 8, num_layers=4).name == "1f1b"


def test_configured_costs_select_the_best_plan_for_the_first_step():
    plan = first_plan(section({"costs": COSTS}), 2, 8, num_layers=8)
    costs = CostModel.from_rank_costs(plan.rank_of_stage, 1.0, 1.2, 0.8, 0.1)
    named = build_plan("zb-v", 2, 8)
    rival = simulate(named, CostModel.from_rank_costs(named.rank_of_stage, 1.0, 1.2, 0.8, 0.1))
    found = simulate(validate(plan), costs)
    assert found.makespan <= rival.makespan + 1e-9
    assert max(found.peak) <= 2.0 + 1e-9


def test_auto_tries_no_more_stages_than_layers():
    plan = first_plan(section({"costs": COSTS}), 2, 8, num_layers=3)
    assert plan.num_stages == 2


def test_costs_per_stage_determine_the_number_of_stages():
    costs = {name: [1.0, 1.0, 1.0, 2.0] for name in COSTS if name != "message"}
    plan = first_plan(section({"costs": costs}), 2, 4, num_layers=9)
    assert plan.num_stages == 4
    odd = {name: [1.0, 1.0, 1.0] for name in costs}
    with pytest.raises(ConfigError, match=r"has 3 numbers .* mesh.pipeline \(2\) times any number"):
        first_plan(section({"costs": odd}), 2, 4, num_layers=9)
    with pytest.raises(ConfigError, match=r"mesh.pipeline \(2\) \* pipeline.chunks \(1\)"):
        first_plan(section({"costs": costs, "chunks": 1}), 2, 4, num_layers=9)


def test_auto_keeps_a_memory_limit_in_the_unit_of_the_activations():
    costs = {**COSTS, "activation": 100.0, "kept": 40.0}
    plan = first_plan(section({"costs": costs, "memory_limit": 150.0}, 4), 4, 8, num_layers=16)
    share = 4 / plan.num_stages
    times = (share, 1.2 * share, 0.8 * share)
    model = CostModel.uniform(plan.num_stages, *times, kept=40 * share, message=0.1)
    model = replace(model, activation=(100 * share,) * plan.num_stages)
    assert max(simulate(plan, model).peak) <= 150.0 + 1e-6


def test_a_memory_limit_that_no_plan_fits_is_an_error_with_the_limit():
    with pytest.raises(ScheduleError, match=r"0\.1\b"):
        first_plan(section({"costs": COSTS, "memory_limit": 0.1}), 2, 8, num_layers=2)


def test_the_default_limit_is_what_1f1b_holds_on_its_fullest_rank():
    costs = CostModel((1, 1), (1, 1), (1, 1), activation=(3.0, 5.0), kept=(1.0, 5.2))
    placements = [Placement((0, 1), costs)]
    assert limit_of_1f1b(placements, 8) == max(simulate(build_plan("1f1b", 2, 8), costs).peak) == 6
    assert limit_of_1f1b(placements, 1) == 5
    assert max(simulate(best_plan(placements, 8, "auto"), costs).peak) <= 6
    # Two stages per rank: consecutive stages together are those of 1F1B.
    four = CostModel((1,) * 4, (1,) * 4, (1,) * 4, activation=(1.0, 2.0, 4.0, 1.0))
    assert limit_of_1f1b([Placement((0, 1, 1, 0), four)], 8) == 6


def test_the_default_limit_is_enough_for_one_micro_batch():
    costs = CostModel((1,) * 4, (1,) * 4, (1,) * 4, activation=(5.0, 1.0, 1.0, 5.0))
    assert limit_of_1f1b([Placement((0, 1, 1, 0), costs)], 1) == 10


def test_recomputed_activations_do_not_raise_the_default_limit():
    recomputed = CostModel((1, 1), (2, 2), (1, 1), activation=(1.0, 1.0), kept=(13.0, 13.0))
    assert limit_of_1f1b([Placement((0, 1), recomputed)], 8) == 2
    plan = best_plan([Placement((0, 1), recomputed)], 8, "auto")
    assert not any(step.kind is Kind.BACKWARD_WEIGHT for step in plan.steps())


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_a_plan_survives_a_round_trip_through_a_file(tmp_path, suffix):
    plan = build_plan("zb-v", 2, 8)
    file = tmp_path / f"mine.{suffix}"
    file.write_text(plan.to_csv() if suffix == "csv" else plan.to_json())
    found = first_plan(section({"schedule": {"file": str(file)}}), 2, 8, num_layers=4)
    assert (found.programs, found.name) == (plan.programs, f"mine.{suffix}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n1F0,1B0", "rank 0: '0X0' is not an instruction of a plan in CSV"),
        ("0F0,0B0\n1F0,1B0", "for 1 micro-batches, and gradient_accumulation_steps is 2"),
        ("0F0,0B0,0F1,0B1", "for 1 pipeline ranks, and mesh.pipeline is 2: make them equal"),
        ("0F0,0F1\n1F0,1F1", "has no backward"),
        ("0F0,0B0,0F1,0B1\n0F0,1F1", "stage 0 of the plan in CSV is on rank 0 and on rank 1"),
        ('{"name": "x"}', "a plan in JSON needs the keys"),
    ],
)
def test_a_plan_file_that_does_not_fit_the_run_is_an_error_that_names_the_file(
    tmp_path, text, message
):
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises((ConfigError, ScheduleError)) as refusal:
        first_plan(section({"schedule": {"file": str(file)}}), 2, 2, num_layers=4)
    assert message in str(refusal.value)
    assert f"pipeline.schedule.file {str(file)!r}" in str(refusal.value)


def test_a_missing_plan_file_is_an_error_that_names_the_file():
    with pytest.raises(ConfigError, match=r"file 'no\.csv' cannot be read: No such"):
        first_plan(section({"schedule": {"file": "no.csv"}}), 2, 2, num_layers=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cells: cells[0].remove("0B1"), "micro-batch 1 at stage 0 has 0 B"),
        (lambda cells: cells[0].append("0B1"), "micro-batch 1 at stage 0 has 2 B"),
        (lambda cells: cells[1].insert(0, cells[1].pop(1)), "deadlocks"),
    ],
)
def test_an_error_about_a_missing_duplicate_or_misplaced_step_shows_the_plan(
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


def test_a_forward_only_plan_is_refused_for_training():
    with pytest.raises(ConfigError, match="mine has no backward"):
        check_sizes(forward_only((0, 1), 4), "mine", 2, 4)


@pytest.mark.parametrize("source", ["name", "csv", "json", "given"])
def test_a_plan_whose_messages_would_never_arrive_is_refused_before_the_first_step(
    source, monkeypatch, tmp_path
):
    monkeypatch.setattr("pipemega.pipeline.plan.validate.queues_of", one_queue_per_pair)
    plan, schedule, given = build_plan("1f1b", 2, 8), "1f1b", None
    if source == "given":
        given = plan
    elif source != "name":
        text = plan.to_csv() if source == "csv" else plan.to_json()
        (tmp_path / "plan").write_text(text)
        schedule = {"file": str(tmp_path / "plan")}
    sizes = (section({"schedule": schedule}), 2, 8, 4)
    assert training_plan(*sizes, "tags", given).compute_only().programs == plan.programs
    with pytest.raises(ScheduleError) as refused:
        training_plan(*sizes, "queues", given)
    assert "deadlocks if the messages between two ranks run in the order" in str(refused.value)
    assert "rank 0 waits at B0@0 for SG0@1; next in this queue: " in str(refused.value)


def test_evaluation_and_the_discarded_warmup_are_proven_too(monkeypatch):
    checked = []

    def record(plan, order, shapes, *, discards, hardware):
        checked.append((plan.name, order, shapes, discards))
        return plan

    monkeypatch.setattr("pipemega.pipeline.plan_selection.validate_messages", record)
    pipeline = {"schedule": "gpipe", "shapes": "exchanged", "optimizer_sync": "post_validate"}
    training_plan(section(pipeline), 2, 8, 4, "queues")
    assert checked == [
        ("gpipe", "queues", "exchanged", True),
        ("forward-only", "queues", "exchanged", True),
    ]


def test_the_partial_step_of_an_epoch_is_proven_too(monkeypatch):
    checked = []

    def record(plan, order, shapes, *, discards, hardware):
        checked.append((plan.name, shapes))
        return plan

    monkeypatch.setattr("pipemega.pipeline.plan_selection.validate_messages", record)
    training_plan(section({"schedule": "1f1b"}), 2, 8, 4, "queues")
    assert checked == [("1f1b", "cached"), ("1f1b", "exchanged"), ("forward-only", "cached")]


# A GPU of this job; see docs/gpu.md.


def chosen(monkeypatch, environ, pipeline=None, ranks=2, layers=16):
    """Return the plan with variables of CUDA as in `environ`, or the error."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    try:
        return training_plan(section(pipeline or {"schedule": "1f1b"}), ranks, 8, layers, "queues")
    except ScheduleError as error:
        return str(error)


def test_a_plan_that_hangs_with_one_hardware_queue_is_refused_where_the_variable_sets_one(
    monkeypatch,
):
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert "(CUDA_DEVICE_MAX_CONNECTIONS=1):" in chosen(monkeypatch, one)
    assert chosen(monkeypatch, {}).name == "1f1b"
    assert chosen(monkeypatch, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}).name == "1f1b"
    # CUDA's own number is enough for few connections only.
    eight = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert chosen(monkeypatch, eight).name == "1f1b"
    many = {"schedule": "looped-bfs", "chunks": 4}
    assert "(CUDA_DEVICE_MAX_CONNECTIONS=8):" in chosen(monkeypatch, eight, many, 4)
    assert chosen(monkeypatch, {}, many, 4).name == "looped-bfs"


def test_more_connections_than_streams_are_refused_if_their_messages_would_block_each_other(
    monkeypatch,
):
    many = {"schedule": "interleaved", "chunks": 8}
    text = chosen(monkeypatch, {}, many, 4, 32)
    assert "deadlocks if the connections of a rank share 28 streams:" in text
    assert "use fewer stages per rank (pipeline.chunks)" in text


def test_kernels_that_are_loaded_while_messages_wait_are_refused(monkeypatch):
    lazy = {"CUDA_MODULE_LOADING": "LAZY"}
    assert chosen(monkeypatch, lazy).name == "1f1b"  # after the warm-up
    for changes in ({"shapes": "exchanged"}, {"warm_up": False}):
        pipeline = {"schedule": "zb-v", **changes}
        assert "(CUDA_MODULE_LOADING=LAZY):" in chosen(monkeypatch, lazy, pipeline)
        assert chosen(monkeypatch, {}, pipeline).name == "zb-v"
