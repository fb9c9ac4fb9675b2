"""All ranks read the same data, also if it draws random numbers; other data is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.engine import data_runs
from tests.ranks.pool import RankPool, RanksFailed

MESHES = {
    "pipeline 2": {"pipeline": 2},
    "tensor 2": {"tensor": 2},
    "data 2": {"data": 2},
    "pipeline 2, tensor 2": {"pipeline": 2, "tensor": 2},
    "pipeline 2, data 2": {"pipeline": 2, "data": 2},
    "pipeline 3": {"pipeline": 3},
}


def ranks_of(mesh: dict[str, int]) -> int:
    return int(np.prod([*mesh.values()]))


def assert_equal(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one[0], other[0], rtol=1e-10)
    for name, value in one[1].items():
        np.testing.assert_allclose(value, other[1][name], rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def unsplit(pool: RankPool) -> dict[str, Any]:
    kinds = ("plain", "mixed")
    return {kind: pool.run(1, data_runs.train, kind, 4, {})[0] for kind in kinds}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_augmented_data_trains_as_the_unsplit_model_and_resumes_on_another_mesh(
    pool: RankPool, unsplit: dict[str, Any], tmp_path: Path, mesh: dict[str, int]
) -> None:
    kind = "mixed" if "tensor" in mesh else "plain"
    folder = str(tmp_path)
    run = pool.run(ranks_of(mesh), data_runs.train, kind, 4, {"mesh": mesh}, folder, 2)
    for result in run:
        assert_equal(result, unsplit[kind])
    losses, parameters = pool.run(1, data_runs.train, kind, 4, {}, folder)[0]
    assert_equal((unsplit[kind][0][:2] + losses, parameters), unsplit[kind])


def test_worker_processes_of_both_stages_read_the_same(
    pool: RankPool, unsplit: dict[str, Any]
) -> None:
    config = {"mesh": {"pipeline": 2}, "data": {"num_workers": 1}}
    for result in pool.run(2, data_runs.train, "mixed", 4, config):
        assert_equal(result, unsplit["mixed"])


@pytest.mark.parametrize(
    ("what", "mesh", "message"),
    [
        (
            "own generator",
            {"pipeline": 2},
            "rank 0 (pipeline rank 0, tensor rank 0) and rank 1 (pipeline rank 1, tensor rank 0) "
            "have read different labels in call 1 of train_batch: ",
        ),
        (
            "other list",
            {"pipeline": 3},
            "have read different inputs in call 1 of train_batch: 4",
        ),
        (
            "other list",
            {"tensor": 2},
            "rank 1 (pipeline rank 0, tensor rank 1) have read differ",
        ),
        ("iterator", {"pipeline": 2, "data": 2}, "rank 0 (pipeline rank 0, tensor rank 0) and ra"),
        ("evaluation", {"tensor": 2}, "have read different inputs in call 1 of eval_batch: 4 of 4"),
        ("same data ranks", {"data": 2}, "data ranks 0 and 1 have read the same data in call 1"),
        ("DataLoader", {"data": 2}, "takes an iterator, and DataLoader starts again at each call"),
    ],
)
def test_data_that_differs_between_ranks_is_refused_on_every_rank(
    pool: RankPool, what: str, mesh: dict[str, int], message: str
) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(ranks_of(mesh), data_runs.read_differently, what, {"mesh": mesh})
    assert len(caught.value.errors) == ranks_of(mesh)
    for text, _ in caught.value.errors.values():
        assert message in text
    if "have read differ" in message or what == "iterator":
        assert "must read the same" in text
        assert "__getitem__" in text


def test_a_stage_may_get_only_the_part_that_it_reads(pool: RankPool) -> None:
    one, other = pool.run(2, data_runs.read_parts, {"mesh": {"pipeline": 2}})
    assert one == other


def test_deterministic_data_is_not_compared(pool: RankPool) -> None:
    config = {"mesh": {"pipeline": 2}}
    assert pool.run(2, data_runs.count_collectives, True, config) == [0, 0]
    # Of the first three steps.
    assert pool.run(2, data_runs.count_collectives, False, config) == [3, 3]
    assert pool.run(
        2, data_runs.count_collectives, False, {**config, "data": {"compare_every": 2}}
    ) == [4, 4]
    assert pool.run(
        2, data_runs.count_collectives, False, {**config, "data": {"compare_every": 0}}
    ) == [0, 0]


@pytest.mark.parametrize(
    "mesh",
    [{"pipeline": 2}, {"pipeline": 2, "tensor": 2}, {"data": 2}, {"pipeline": 2, "data": 2}],
    ids=str,
)
def test_a_shuffled_dataloader_gives_all_stages_the_same_and_resumes(
    pool: RankPool, tmp_path: Path, mesh: dict[str, int]
) -> None:
    size, folder = ranks_of(mesh), str(tmp_path)
    whole = pool.run(size, data_runs.train_on_loader, 5, {"mesh": mesh}, folder, 3)
    for result in whole[1:]:
        assert_equal(result, whole[0])
    losses, parameters = pool.run(size, data_runs.train_on_loader, 5, {"mesh": mesh}, folder)[0]
    assert_equal((whole[0][0][:3] + losses, parameters), whole[0])
    if "data" not in mesh:
        assert_equal(pool.run(1, data_runs.train_on_loader, 5, {})[0], whole[0])


def test_a_trainer_validates_on_equal_random_numbers_on_every_mesh(pool: RankPool) -> None:
    expected = pool.run(1, data_runs.evaluate_augmented, {})[0]
    for mesh in ({"pipeline": 2}, {"data": 2}):
        for losses in pool.run(2, data_runs.evaluate_augmented, {"mesh": mesh}):
            np.testing.assert_allclose(losses, expected, rtol=1e-10)
