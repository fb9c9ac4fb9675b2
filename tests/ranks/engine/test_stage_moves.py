"""Stages move to other ranks in a run: the same bits as loading a checkpoint under the new cut."""

import itertools
import re
from pathlib import Path

import pytest

from pipemega.planning.schedule_tuner import TIMED, WARM_UP
from tests.ranks.engine.stage_move_runs import (
    TO_V,
    Move,
    all_moved_and_loaded,
    exchanged,
    fail_in_move,
    moves_of_a_hooked_model,
    nonfinite_step_of_a_move,
    obstacle,
    obstacles_by_caller,
    own_optimizer,
    resumed_in_a_ramp_up,
    tuned,
    tuned_in_a_ramp_up,
    used_over_a_move,
)
from tests.ranks.pool import RanksFailed
from tests.sampling import some

ROOT = Path(__file__).parents[3]
DATA = {"mesh": {"pipeline": 2, "data": 2}}
ZERO = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1500}}
OVERLAP = {
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1500, "overlap_comm": True},
    "bf16": {"enabled": True},
}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
LATE = {"pipeline": {"optimizer_sync": "post_validate"}}
FROM_V = {"bounds": TO_V["bounds"][::-1], "schedules": TO_V["schedules"][::-1]}
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 8,
}
DIVIDED = {"mesh": {"pipeline": 2, "data": 2, "expert": 2}}

MOVES = {
    2: [Move(changes=FP16), Move(**TO_V, net="small", changes=LATE)],
    4: [
        Move(**FROM_V, changes={**DATA, **OVERLAP}),
        Move(changes={**DIVIDED, **ZERO}, model=EXPERTS),
    ],
}
ALL_MOVES = {
    2: [
        Move(changes={"bf16": {"enabled": True}}),
        Move(changes={"pipeline": {"shapes": "exchanged"}}),
        Move(changes={"monitor": {"log_params_norm": True, "log_num_zeros_in_grad": True}}),
        Move(arguments=own_optimizer),
        Move(**FROM_V, arguments=own_optimizer, net="small"),
        Move(**TO_V),
        Move(changes={"lora": {"r": 2}, "checkpoint": {"async": True}}),
        Move(changes={"compile": {"enabled": True, "backend": "aot_eager"}}),
    ],
    4: [
        Move(changes={**DATA, **OVERLAP}),
        Move(**FROM_V, changes={**DATA, **ZERO}, net="traced"),
        Move(changes=DATA, net="small"),
        Move(changes={**DATA, **ZERO, **LATE}),
        Move(changes={**DATA, **ZERO}, arguments=own_optimizer),
        Move(changes={"mesh": {"pipeline": 2, "tensor": 2}}),
        Move(changes={"mesh": {"pipeline": 2, "tensor": 2}}, model=EXPERTS),
        Move(**TO_V, changes={**DIVIDED, **LATE}, model=EXPERTS),
        Move(
            bounds=([0, 2, 4, 6, 8], [0, 1, 2, 3, 8]),
            changes={"mesh": {"pipeline": 4}},
            net="small",
        ),
    ],
}


def compare(pool, tmp_path, world, moves):
    for rank in pool.run(world, all_moved_and_loaded, moves, str(tmp_path), timeout=170.0):
        for move, found in zip(moves, rank, strict=True):
            assert found["obstacle"] == "", move
            assert found["different"] == [], move
            assert found["compared"] > 12
            assert found["same objects"]
            bounds = move.bounds[1]
            spans = {f"layers {a} to {b - 1}" for a, b in itertools.pairwise(bounds)}
            assert {line.split(", ")[1] for line in found["layers"]} <= spans


@pytest.mark.parametrize("world", some(MOVES, list(MOVES).index(4)))
def test_a_move_gives_the_bits_of_a_run_that_loads_the_checkpoint_there(pool, tmp_path, world):
    compare(pool, tmp_path, world, MOVES[world])


@pytest.mark.sweep
@pytest.mark.parametrize("world", ALL_MOVES)
def test_every_kind_of_state_moves(pool, tmp_path, world):
    compare(pool, tmp_path, world, ALL_MOVES[world])


@pytest.mark.sweep
def test_hugging_face_models_and_their_adapters_move(pool, tmp_path):
    pytest.importorskip("transformers")
    adapters = Move(**TO_V, net="hf", changes={"lora": {"r": 2}})
    compare(pool, tmp_path, 2, [Move(net="hf"), adapters])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("built", "layer 0 (Linear) is a module that was built before initialize()"),
        ("reader", "pipeline rank 1 would read labels from now on, and its iterator is at the"),
    ],
)
def test_stages_that_cannot_move_stay_on_every_rank_for_the_same_reason(pool, case, reason):
    for rank, (found, layers, trains) in enumerate(pool.run(2, obstacle, case)):
        assert found.startswith(reason)
        if case != "reader":
            assert layers == [f"stage {rank}, layers {(0, 5)[rank]} to {(4, 7)[rank]}"]
        assert trains


def test_stages_stay_if_the_caller_has_changed_what_a_new_module_would_not_have(pool):
    for found in pool.run(2, obstacles_by_caller):
        free, hook, setting, restored, buffer = found
        assert free == restored == ""
        changed = ", its hooks or settings were changed after initialize()"
        assert hook == buffer == f"the module stage 1.layers.7{changed}"
        assert setting == f"the module stage 1.layers.7.dropout{changed}"


def test_outputs_profiles_and_checkpoints_follow_a_move(pool, tmp_path):
    ranks = pool.run(2, used_over_a_move, str(tmp_path))
    assert [rank["outputs"] for rank in ranks] == [None, 12]  # of the stages before the move
    for rank in ranks:
        assert rank["obstacle"] == ""
        assert rank["bounds"] == (0, 2, 4, 6, 8)
        assert rank["differs"] == []
        assert rank["compared"] == 16
    assert ranks[0]["profiled"] == 2


def test_a_nonfinite_step_before_a_move_raises_on_the_new_stages(pool):
    for message, bounds, steps, loss in pool.run(2, nonfinite_step_of_a_move):
        assert "step 1" in message
        assert bounds == [0, 2, 4, 6, 8]
        assert steps == 1
        assert loss > 0


def without_units(line):
    """Return a line of the log without its times and bytes."""
    return re.sub(r"\b[\d.]+ (ms|s|B)\b", r"# \1", line)


@pytest.mark.sweep
def test_auto_moves_the_stages_if_the_measured_times_differ_from_the_counted_ones(pool, tmp_path):
    steps = WARM_UP + TIMED + 2
    found = pool.run(2, tuned, "auto", str(tmp_path), steps, {})
    plain = pool.run(2, tuned, "1f1b", str(tmp_path), steps, {})[0]
    for rank in found:
        before, after = rank["stages"][WARM_UP + TIMED - 1 :][:2]
        assert len(set(rank["stages"][: WARM_UP + TIMED])) == 1
        assert before != after
        assert rank["stages"] == found[0]["stages"]
        assert rank["losses"] == plain["losses"]
        assert all((rank["state"][name] == value).all() for name, value in plain["state"].items())
        assert rank["follows"]
    # The page shows the log of this run.
    logged = [without_units(line) for line in found[0]["log"]]
    page = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8").splitlines()
    example = [line for line in page if "on other stages a step" in line or "moved the" in line]
    assert len(example) == 2
    assert {without_units(line) for line in example} <= set(logged)
    # The next run starts on the stages for these costs.
    (again,) = pool.run(2, tuned, "auto", str(tmp_path), 1, {})[0]["stages"]
    assert again == after


@pytest.mark.sweep
def test_auto_moves_the_stages_of_a_run_that_returns_to_its_ramp_up(pool, tmp_path):
    measured, folders = WARM_UP + TIMED, [str(tmp_path / name) for name in ("plain", "auto")]
    cache = str(tmp_path)
    plain = pool.run(2, tuned_in_a_ramp_up, "1f1b", cache, folders[0], measured)[0]
    for rank in pool.run(2, tuned_in_a_ramp_up, "auto", cache, folders[1], measured):
        first, moved = rank["stages"][0], rank["stages"][-1]
        sizes = [2, 2, 4, 6, *[8] * 4, 4, 6, *[8] * 4, 4, 6, 8, 8]
        assert rank["sizes"] == plain["sizes"] == sizes
        # The last two of the measured steps come after the return to steps of 4 and 6 samples.
        assert rank["stages"] == [first] * 12 + [moved] * 6
        assert first != moved
        assert rank["losses"] == plain["losses"]
        assert all((rank["state"][name] == value).all() for name, value in plain["state"].items())
    # With schedule "auto" it has the moved stages from its first step.
    for schedule in ("1f1b", "auto"):
        for rank in pool.run(2, resumed_in_a_ramp_up, schedule, cache, folders[1], 3):
            assert rank["losses"] == plain["losses"][-3:]
            state = rank["state"]
            assert all((state[name] == value).all() for name, value in plain["state"].items())


@pytest.mark.sweep
def test_auto_says_why_the_stages_stay_and_changes_only_the_order(pool, tmp_path):
    lines = pool.run(2, moves_of_a_hooked_model, str(tmp_path), WARM_UP + TIMED + 1)[0]
    (line,) = [line for line in lines if "the stages stay" in line]
    assert "the module stage 1, its hooks or settings were changed after initialize()" in line


def test_an_error_during_a_move_stops_all_ranks_with_its_message(pool):
    with pytest.raises(RanksFailed) as failure:
        pool.run(2, fail_in_move, timeout=60.0)
    assert sorted(failure.value.errors) == [0, 1]
    for message, *_ in failure.value.errors.values():
        assert "ValueError: no memory for the new stages" in message


@pytest.mark.parametrize("largest", [1000, 7, 4])
def test_bytes_are_exchanged_in_batches_of_bounded_size(pool, largest):
    ranks = pool.run(3, exchanged, largest)
    # Of rank 1: what it keeps of its own, and what it gets of rank 0.
    assert [values for values, _ in ranks] == [
        [[0, 1], [22, 23, 24]],
        [[2, 3, 4], [10, 11]],
        [[12, 13, 14], [20, 21]],
    ]
    batches = [sum(sizes) for sizes in zip(*(sizes for _, sizes in ranks), strict=True)]
    assert sum(batches) == 3 * 6
    assert max(batches) <= largest
