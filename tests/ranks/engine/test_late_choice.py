"""Plan and stages do not depend on how the data come in."""

import pytest

from tests.ranks.engine import late_choice_runs as runs
from tests.sampling import some

ZERO = {"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}
LATE_SYNC = {"schedule": "zb-h1", "optimizer_sync": "post_validate"}
CASES = {
    2: [
        ("built", {"schedule": "auto"}, {}),
        ("from_module", LATE_SYNC, {}),
    ],
    4: [("built", {"schedule": "1f1b"}, ZERO)],
}
ALL_CASES = {
    2: [
        (net, {"schedule": schedule}, changes)
        for net in ("specs", "built", "from_module", "from_built")
        for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v", "auto")
        for changes in ({}, BF16)
    ]
    + [("from_built", {"schedule": "zb-h1", "weight_queue_limit": 10**6}, {})],
    4: [
        (net, {"schedule": schedule}, {**ZERO, **changes})
        for net in ("specs", "built", "from_built")
        for schedule in ("1f1b", "zb-v", "auto")
        for changes in ({}, {"mesh": {"pipeline": 4}})
        # zb-v has eight stages on four ranks, and a model has seven layers.
        if not (changes and schedule == "zb-v")
    ],
}


def check(pool, world, cases):
    for rank in pool.run(world, runs.all_compared, cases, timeout=500.0):
        for case, found in zip(cases, rank, strict=True):
            assert all(found["same"].values()), (case, found["same"])
            assert found["different"] == [], case
            assert found["compared"] > 12
    assert any(found["moved"] for found in rank)


@pytest.mark.parametrize("world", some(CASES, list(CASES).index(4)))
def test_an_iterator_gives_the_plan_and_the_stages_of_data_given_to_initialize(pool, world):
    """With the caller's iterator, stages had equal numbers of parameters: 13 % of the speed."""
    check(pool, world, CASES[world])


@pytest.mark.sweep
@pytest.mark.parametrize("world", ALL_CASES)
def test_every_schedule_has_the_same_stages_however_the_data_come_in(pool, world):
    check(pool, world, ALL_CASES[world])


@pytest.mark.sweep
def test_hugging_face_models_have_the_same_stages_however_the_data_come_in(pool):
    pytest.importorskip("transformers")
    check(pool, 2, [("hf", {"schedule": name}, {}) for name in ("1f1b", "zb-v")])


def test_a_loaded_checkpoint_moves_with_the_stages(pool, tmp_path):
    for found in pool.run(4, runs.resumed, str(tmp_path), ZERO):
        assert found == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("module", "engine.module was read"),
        ("hook", "its hooks or settings were changed after initialize()"),
        ("frozen", "parameters were frozen after initialize()"),
    ],
)
def test_stages_that_the_caller_refers_to_stay_and_one_warning_names_the_way_out(
    pool, case, reason
):
    results = pool.run(2, runs.held, case)
    assert [stays for _, stays, _ in results] == [True, True]
    (warning,), nothing = (lines for lines, *_ in results)
    assert reason in warning
    assert "would be chosen" in warning
    assert "initialize(example=(inputs, labels))" in warning
    assert nothing == []
    assert results[0][2] == results[1][2]


def test_auto_takes_no_placement_whose_last_rank_reads_no_labels(pool):
    whole, half = ({*pool.run(2, runs.without_labels, case)} for case in ("both", "none"))
    assert half == {(0, 1, 0, 1)}
    assert whole == {(0, 1, 1, 0)}


def test_a_memory_limit_holds_with_an_iterator(pool):
    assert pool.run(2, runs.limited, 10**8) == ["", ""]
    for error in pool.run(2, runs.limited, 100):
        assert error.startswith("pipeline.memory_limit: no plan on these stages keeps 100 bytes")
