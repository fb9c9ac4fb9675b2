"""Straggler detection: which ranks are compared, and when a straggler is reported."""

from dataclasses import replace

import pytest

from pipemega.config.sections.run_sections import StragglersSection
from pipemega.diagnostics.stragglers import Episodes, StragglerWatch, summarize
from pipemega.distributed.mesh import Mesh
from pipemega.distributed.topology import Topology
from pipemega.pipeline.schedules import build_plan


def test_a_rank_is_compared_with_the_data_ranks_of_the_same_stages() -> None:
    # The second stage has twice the work, which makes no rank a straggler.
    summary = summarize([1.0, 1.1, 2.0, 2.1], Topology(2, 2))
    assert summary.slow(1.5) == ()
    assert summary.scalars()["work_stage_imbalance"] == pytest.approx(4 / 3)
    summary = summarize([1.0, 1.1, 2.0, 4.0], Topology(2, 2))
    assert summary.slow(1.5) == (3,)
    assert (summary.slowest, summary.usual[3], summary.ratio(3)) == (3, 2.0, 2.0)
    assert summary.scalars()["work_slowest_rank"] == 3


def test_the_tensor_ranks_of_a_slow_rank_are_slow_with_it() -> None:
    assert summarize([1.0, 1.0, 3.0, 4.0], Topology(1, 2, 2)).slow(1.5) == (3, 2)


def test_ranks_of_different_stages_are_not_compared() -> None:
    """Without data and tensor ranks, an unequal partition was reported as a straggler."""
    summary = summarize([1.0, 1.0, 9.0, 1.0], Topology(4))
    assert summary.slow(1.5) == ()
    scalars = summary.scalars()
    assert scalars.pop("work_stage_imbalance") == 3.0
    assert list(scalars) == [f"work_seconds_rank{rank}" for rank in range(4)]


def test_without_a_pipeline_no_imbalance_of_stages_is_recorded() -> None:
    assert "work_stage_imbalance" not in summarize([1.0, 1.0], Topology(1, 2)).scalars()


def test_a_difference_of_milliseconds_makes_no_straggler() -> None:
    assert summarize([0.001, 0.009], Topology(1, 2)).slow(1.5) == ()


@pytest.mark.parametrize(
    ("checks", "begun"),
    [
        ("sss", "..b"),
        ("ss.sss", ".....b"),  # not in a row
        ("sssssss", "..b...."),  # once per episode
        ("sss..ssss", "..b......"),  # two fast checks do not end it
        ("sss...ssss", "..b.....b."),
    ],
)
def test_an_episode_begins_and_ends_after_three_checks_in_a_row(checks: str, begun: str) -> None:
    episodes = Episodes(3)
    found = [episodes.begin((7,) if check == "s" else ()) for check in checks]
    assert "".join("b" if ranks else "." for ranks in found) == begun


def test_two_ranks_that_alternate_as_the_slowest_are_both_stragglers() -> None:
    episodes = Episodes(3)
    assert [episodes.begin(slow) for slow in ((2, 3), (3, 2), (2, 3))] == [(), (), (2, 3)]


def test_the_warning_names_rank_stage_times_and_the_number_of_checks() -> None:
    mesh = replace(Mesh.single(), topology=Topology(1, 3))
    watch = StragglerWatch(mesh, StragglersSection(checks=2), 5)
    plan = build_plan("1f1b", 1, 2)
    slow = summarize([0.4, 0.1, 0.1], mesh.topology)
    assert watch.warning(slow, plan) is None
    warning = watch.warning(slow, plan)
    assert warning is not None
    assert warning.startswith("rank 0 (")
    assert warning.endswith(
        "; stage 0, data rank 0) takes 400.0 ms for its own work in a step, 4.0 times the usual "
        "100.0 ms of its stage, in 2 checks of 5 steps in a row; all ranks wait for it "
        "(training.stragglers.factor 1.5)"
    )
    assert watch.warning(slow, plan) is None
