"""What is said when a rank does not answer."""

from pipemega.pipeline.lowering import lower
from pipemega.pipeline.order import excerpt
from pipemega.pipeline.schedules import build_plan
from pipemega.pipeline.standstill import Place, describe


def _plan(pp_size=3, num_microbatches=4):
    return lower(build_plan("1f1b", pp_size, num_microbatches))


def _at(plan, rank, step):
    return list(map(str, plan.programs[rank])).index(step)


def test_the_silent_rank_is_somewhere_between_what_it_sent_last_and_what_is_waited_for():
    plan = _plan()
    place = Place(plan, (0, 1, 2), 2, _at(plan, 2, "F1@2"))
    at = {2: place.at, 0: _at(plan, 0, "B0@0")}
    first, *table = describe(place, at, [1]).splitlines()
    assert first == (
        "  rank 1 has done SA0@1 and not yet SA1@1, for which rank 2 waits: it is at one of "
        "RG0@1 F1@1 SA1@1"
    )
    assert [row.split()[1] for row in table] == ["0", "1", "2"]
    assert "> B0@0" in table[0]
    assert "SA0@1" in table[1].split(">")[0]
    assert "> RG0@1 F1@1" in table[1]
    assert "> F1@2" in table[2]


def test_a_rank_that_has_sent_nothing_yet_is_said_to_have_sent_nothing():
    plan = _plan()
    place = Place(plan, (0, 1, 2), 1, _at(plan, 1, "F0@1"))
    first = describe(place, {1: place.at, 2: 1}, [0]).splitlines()[0]
    assert first == (
        "  rank 0 has sent nothing in this step and not yet SA0@0, for which rank 1 waits: it is "
        "at one of F0@0 SA0@0"
    )


def test_ranks_go_by_their_global_numbers_and_the_table_says_which_is_which():
    plan = _plan()
    place = Place(plan, (1, 3, 5), 2, _at(plan, 2, "F0@2"))
    # Rank 4 is of another pipeline: nothing is known of it here.
    silent, numbers, *_ = describe(place, {5: place.at}, [3, 4]).splitlines()
    assert silent.startswith("  rank 3 has sent nothing in this step and not yet SA0@1, for which")
    assert "for which rank 5 waits" in silent
    assert numbers == "  pipeline ranks 0 to 2 are [1, 3, 5]"


def test_a_silent_rank_that_nobody_waits_for_is_said_to_be_one():
    plan = _plan(2, 2)
    ends = {0: len(plan.programs[0])}
    first, *table = describe(Place(plan, (0, 1), 0, ends[0]), ends, [1]).splitlines()
    assert first == "  rank 1 has done SG1@1; nobody waits for more of it"
    assert table[0].endswith("B1@0 >")
    assert table[1].endswith("SG1@1 >")


def test_long_stretches_are_shortened_in_the_middle():
    plan = lower(build_plan("gpipe", 2, 16))
    place = Place(plan, (0, 1), 0, _at(plan, 0, "B0@0"))
    first = describe(place, {0: place.at}, [1]).splitlines()[0]
    assert len(first) < 200
    assert " .. " in first
    assert first.endswith("SG0@1")


def test_an_arrow_stands_at_the_end_of_a_program_that_was_run_through():
    plan = _plan(2, 1)
    assert excerpt(plan, {0: len(plan.programs[0])}).splitlines()[0].endswith("B0@0 >")
