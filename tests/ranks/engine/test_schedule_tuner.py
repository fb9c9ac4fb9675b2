"""Schedule "auto" on real ranks: it measures, changes the plan, and trains the same bits."""

import json
import logging
import os
from typing import Any

import pytest

from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.schedules import build_plan
from pipemega.planning.schedule_tuner import TIMED, WARM_UP
from tests.paper.hand_made_plans import with_w_last
from tests.ranks.pool import RanksFailed
from tests.ranks.training_runs import ADAMW_FP32, build, data, settings

ROUND = WARM_UP + TIMED


def run(
    pipeline: dict[str, Any], cache: str, steps: int, changes: dict[str, Any]
) -> dict[str, Any]:
    """Return the losses, the plan of each step, and the log lines of rank 0."""
    os.environ["XDG_CACHE_HOME"] = cache
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipemega").addHandler(handler)
    try:
        engine = build(settings(pipeline=pipeline, **{"train_batch_size": 16, **changes}))
        losses, plans, measured = [], [], None
        for step in range(steps):
            plans.append(engine.plan.to_json())
            losses.append(engine.train_batch(data(engine, step)))
            if measured is None and any("step time of" in line for line in lines):
                measured = step
        evaluated = engine.eval_batch(data(engine, 99))
        parameters = {n: p.double().numpy() for n, p in engine.parameter_state().items()}
    finally:
        logging.getLogger("pipemega").removeHandler(handler)
    logged = [line for line in lines if "schedule auto" in line]
    return {
        "losses": losses,
        "plans": plans,
        "measured": measured,  # the last of the first timed steps
        "logged": logged,
        "eval": evaluated,
        "state": parameters,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        one["losses"] == other["losses"]
        and one["eval"] == other["eval"]
        and all((one["state"][name] == value).all() for name, value in other["state"].items())
    )


@pytest.mark.sweep
def test_auto_measures_only_full_steps_of_a_growing_batch(pool, tmp_path):
    """Steps of 8, 8, 16 and then 24 samples."""
    training = {"rampup_batch_size": [8, 8, 24]}
    changes = {"mesh": {"pipeline": 2}, "training": training, "train_batch_size": 24}
    arguments = (str(tmp_path), 2 * ROUND + 4, changes)
    plain = pool.run(2, run, {"schedule": "1f1b"}, *arguments)[0]
    auto = pool.run(2, run, {"schedule": "auto", "chunks": 2}, *arguments)[0]
    assert same(auto, plain)
    counts = [json.loads(plan)["num_microbatches"] for plan in auto["plans"]]
    # `engine.plan` before a step is that of the step before.
    assert counts == [12, 4, 4, 8, *[12] * (2 * ROUND)]
    assert len(set(auto["plans"][4 : 3 + ROUND])) == 1
    assert auto["measured"] == 2 + ROUND


@pytest.mark.parametrize(
    ("mesh", "chunks"),
    [
        pytest.param({"pipeline": 2}, 1, marks=pytest.mark.sweep),
        ({"pipeline": 2}, 2),
        pytest.param({"pipeline": 2, "tensor": 2}, 1, marks=pytest.mark.sweep),
        pytest.param({"pipeline": 2, "tensor": 2}, 2, marks=pytest.mark.sweep),
    ],
)
def test_auto_changes_the_plan_and_trains_the_same_bits(pool, tmp_path, mesh, chunks):
    world, steps = 2 * mesh.get("tensor", 1), 2 * ROUND + 1
    changes = {"mesh": mesh, "model": {"num_layers": 6}}
    plain = pool.run(world, run, {"schedule": "1f1b"}, str(tmp_path), steps, changes)
    auto = {"schedule": "auto", "chunks": chunks}
    found = pool.run(world, run, auto, str(tmp_path), steps, changes)

    assert same(found[0], plain[0])
    for rank in found:
        assert rank["plans"] == found[0]["plans"]
        assert len(set(rank["plans"][:ROUND])) == 1
        assert len(set(rank["plans"][ROUND : 2 * ROUND])) == 1
    first, then = (json.loads(found[0]["plans"][at]) for at in (0, ROUND))
    assert len(first["rank_of_stage"]) == len(then["rank_of_stage"]) == 2 * chunks
    searches, chosen, first_line, searches_again, again, *later = found[0]["logged"]
    assert searches == "schedule auto: rank 0 searches for the best plan, by counted times"
    assert searches_again == "schedule auto: rank 0 searches for the best plan, by measured times"
    assert chosen.startswith("schedule auto is ")
    assert again.startswith("schedule auto is ")
    assert f"the first {ROUND} steps run auto and are measured" in first_line
    assert any("the next steps run auto: predicted" in line for line in later)
    assert any("step time of auto: predicted" in line for line in later)
    assert not any(rank["logged"] for rank in found[1:])


@pytest.mark.sweep
def test_a_change_of_the_plan_trains_the_same_bits_with_overlapping_zero(pool, tmp_path):
    steps = ROUND + 2
    changes = {"mesh": {"pipeline": 2, "data": 2}}
    plain = pool.run(4, run, {"schedule": "1f1b"}, str(tmp_path), steps, changes)
    zero = {"stage": 1, "reduce_bucket_size": 1500, "overlap_comm": True}
    changes["zero_optimization"] = zero
    found = pool.run(4, run, {"schedule": "auto", "chunks": 1}, str(tmp_path), steps, changes)
    assert same(found[0], plain[0])


def test_the_next_run_starts_with_the_best_plan_for_the_cached_costs(pool, tmp_path):
    changes = {"mesh": {"pipeline": 2}, "model": {"num_layers": 2}}
    auto = {"schedule": "auto", "chunks": 1}
    first = pool.run(2, run, auto, str(tmp_path), ROUND + 1, changes)
    second = pool.run(2, run, auto, str(tmp_path), 1, changes)
    assert any("from cached costs" in line for line in second[0]["logged"])
    assert second[0]["plans"] == second[1]["plans"]
    assert second[0]["plans"][0] == first[0]["plans"][ROUND]
    (file,) = (tmp_path / "pipemega" / "schedules").glob("*.json")
    # A damaged file is ignored.
    file.write_text("{")
    third = pool.run(2, run, auto, str(tmp_path), 1, changes)
    assert "are measured" in third[0]["logged"][2]


def test_a_memory_limit_that_no_plan_meets_stops_all_ranks_with_the_least_memory(pool, tmp_path):
    limited = {"schedule": "auto", "memory_limit": 10}
    with pytest.raises(Exception, match="10") as failure:
        pool.run(2, run, limited, str(tmp_path), ROUND + 1, {"mesh": {"pipeline": 2}})
    assert "memory" in str(failure.value)


def test_a_plan_from_a_file_trains_the_same_bits_as_its_schedule(pool, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(build_plan("zb-h1", 2, 8).to_csv())
    named = pool.run(2, run, {"schedule": "zb-h1"}, "", 2, {"mesh": {"pipeline": 2}})
    from_file = pool.run(
        2, run, {"schedule": {"file": str(file)}}, "", 2, {"mesh": {"pipeline": 2}}
    )
    assert same(from_file[0], named[0])
    assert json.loads(from_file[1]["plans"][0])["name"] == "mine.csv"


def test_costs_in_the_config_give_the_best_plan_from_the_first_step(pool, tmp_path):
    costs = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "message": 0.1}
    changes = {"mesh": {"pipeline": 2}, "model": {"num_layers": 6}}
    plain = pool.run(2, run, {}, "", 2, changes)
    chosen = pool.run(2, run, {"costs": costs, "chunks": 1}, "", 2, changes)
    assert same(chosen[0], plain[0])
    assert any(Kind.BACKWARD_WEIGHT.value + "0@0" in plan for plan in chosen[0]["plans"])


def test_a_limited_queue_of_w_trains_the_same_bits(pool):
    changes = {"mesh": {"pipeline": 2, "data": 2}}
    changes["zero_optimization"] = {"stage": 1, "reduce_bucket_size": 1500, "overlap_comm": True}
    plain = pool.run(4, run, {"schedule": "1f1b"}, "", 3, changes)
    plans = set()
    for limit in (0, 30_000, None):
        # The limits are for stages with equal numbers of parameters.
        limited = {"schedule": "zb-h1", "weight_queue_limit": limit, "partition": "parameters"}
        found = pool.run(4, run, limited, "", 3, changes)
        assert same(found[0], plain[0])
        plans.add(found[0]["plans"][0])
    assert len(plans) == 3


def test_a_limited_queue_trains_a_plan_file_whose_w_have_another_order_than_its_i(pool, tmp_path):
    plan = with_w_last(build_plan("zb-h1", 2, 8))
    file = tmp_path / "mine.json"
    file.write_text(plan.to_json())
    changes = {"mesh": {"pipeline": 2}} | ADAMW_FP32
    plain = pool.run(2, run, {"schedule": "1f1b"}, "", 2, changes)[0]
    limited = {"schedule": {"file": str(file)}, "weight_queue_limit": 30_000}
    found = pool.run(2, run, limited, "", 2, changes)[0]
    assert Plan.from_json(found["plans"][0]).compute_only().programs != plan.programs
    for name, value in plain["state"].items():
        # Gradients are added in another order.
        assert found["state"][name] == pytest.approx(value, rel=1e-5, abs=1e-6)


def fail_in_timed_step(cache: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    engine = build(settings(pipeline={"schedule": "auto"}, mesh={"pipeline": 2}))

    def fail(*_: Any) -> None:
        if engine.global_steps == WARM_UP and engine.mesh.pipeline.rank == 1:
            raise ValueError("no such token")

    engine.module[0].register_forward_pre_hook(fail)
    for step in range(ROUND):
        engine.train_batch(data(engine, step))


def test_an_exception_in_a_timed_step_stops_all_ranks_with_its_message(pool, tmp_path):
    with pytest.raises(RanksFailed) as failure:
        pool.run(2, fail_in_timed_step, str(tmp_path), timeout=60.0)
    errors = failure.value.errors
    assert sorted(errors) == [0, 1]
    for message, *_ in errors.values():
        assert "ValueError: no such token" in message
    assert not list(tmp_path.rglob("*.json"))
