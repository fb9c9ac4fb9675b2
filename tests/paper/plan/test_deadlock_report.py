"""Tests of the deadlock report."""

from pipemega.pipeline.plan.lowering import excerpt, lower
from pipemega.pipeline.plan.validate import PlanPosition, describe_deadlock
from pipemega.pipeline.schedules import build_plan


def _plan(pp_size=3, num_microbatches=4):
    return lower(build_plan("1f1b", pp_size, num_microbatches))


def _at(plan, rank, step):
    return list(map(str, plan.programs[rank])).index(step)


def test_the_report_places_a_silent_rank_between_its_last_and_its_missing_message():
    plan = _plan()
    place = PlanPosition(plan, (0, 1, 2), 2, _at(plan, 2, "F1@2"))
    at = {2: place.at, 0: _at(plan, 0, "B0@0")}
    first, *table = describe_deadlock(place, at, [1]).splitlines()
    assert first == (
        "  rank 1 has finished SA0@1 but not SA1@1, which rank 2 waits for: it is at one of "
        "RG0@1 F1@1 SA1@1"
    )
    assert [row.split()[1] for row in table] == ["0", "1", "2"]
    assert "> B0@0" in table[0]
    assert "SA0@1" in table[1].split(">")[0]
    assert "> RG0@1 F1@1" in table[1]
    assert "> F1@2" in table[2]


def test_the_report_says_that_a_rank_has_sent_nothing():
    plan = _plan()
    place = PlanPosition(plan, (0, 1, 2), 1, _at(plan, 1, "F0@1"))
    first = describe_deadlock(place, {1: place.at, 2: 1}, [0]).splitlines()[0]
    assert first == (
        "  rank 0 has sent nothing in this step but not SA0@0, which rank 1 waits for: it is at "
        "one of F0@0 SA0@0"
    )


def test_ranks_have_global_numbers_and_the_table_maps_them():
    plan = _plan()
    place = PlanPosition(plan, (1, 3, 5), 2, _at(plan, 2, "F0@2"))
    # Rank 4 is of another pipeline: nothing is known of it here.
    silent, numbers, *_ = describe_deadlock(place, {5: place.at}, [3, 4]).splitlines()
    assert silent.startswith("  rank 3 has sent nothing in this step but not SA0@1, which rank 5")
    assert numbers == "  pipeline ranks 0 to 2 are [1, 3, 5]"


def test_the_report_says_that_no_rank_waits_for_a_silent_one():
    plan = _plan(2, 2)
    ends = {0: len(plan.programs[0])}
    first, *table = describe_deadlock(
        PlanPosition(plan, (0, 1), 0, ends[0]), ends, [1]
    ).splitlines()
    assert first == "  rank 1 has finished SG1@1; no other rank waits for it"
    assert table[0].endswith("B1@0 >")
    assert table[1].endswith("SG1@1 >")


def test_long_lists_of_steps_are_shortened_in_the_middle():
    plan = lower(build_plan("gpipe", 2, 16))
    place = PlanPosition(plan, (0, 1), 0, _at(plan, 0, "B0@0"))
    first = describe_deadlock(place, {0: place.at}, [1]).splitlines()[0]
    assert len(first) < 200
    assert " .. " in first
    assert first.endswith("SG0@1")


def test_a_finished_program_has_its_arrow_at_the_end():
    plan = _plan(2, 1)
    assert excerpt(plan, {0: len(plan.programs[0])}).splitlines()[0].endswith("B0@0 >")
