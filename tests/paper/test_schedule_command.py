"""`python -m pipemega schedule`, from its arguments to what it prints."""

import argparse
import json

import pytest

from pipemega.cli import schedule
from pipemega.errors import ScheduleError
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.schedules import SCHEDULES, build_plan


@pytest.fixture
def run(capsys):
    """Runs the command with the given words; what it printed."""

    def run(words):
        parser = argparse.ArgumentParser(prog="pipemega")
        schedule.add_parser(parser.add_subparsers())
        arguments = parser.parse_args(["schedule", *words.split()])
        assert arguments.func(arguments) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


@pytest.mark.parametrize("name", SCHEDULES)
def test_json_is_the_plan_and_nothing_else(run, name):
    text = run(f"{name} --pp 3 --microbatches 4 --format json")
    assert list(json.loads(text)) == ["name", "num_microbatches", "rank_of_stage", "programs"]
    assert Plan.from_json(text) == build_plan(name, 3, 4)


def test_csv_is_the_plan_and_nothing_else(run):
    assert run("gpipe --pp 2 --microbatches 1 --format csv") == "0F0,0B0\n1F0,1B0\n"


def test_text_draws_the_plan_and_gives_its_figures_twice(run):
    assert run("1f1b --pp 2 --microbatches 3 --costs 1,1,1,0.5").splitlines() == [
        "1f1b: 2 ranks, 3 micro-batches; F=1 I=1 W=1 c=0.5 per rank's share   (arXiv:2104.04473)",
        "",
        "rank 0   F0 F1 .. .. .. B0 -- F2 B1 -- .. .. B2 --",
        "rank 1   .. F0 B0 -- F1 B1 -- .. F2 B2 -- .. .. ..",
        "",
        "makespan   14   (first step to last; formula: "
        "(m + p - 1) * (F + I + W) + 2 * (p + m - 3 - (m - 2) // p) * c)",
        "span       14   (the longest of any one rank, from its own first step to its own last)",
        "bubble     35.71% simulated, 35.71% by the formula",
        "memory     2 1 micro-batches held at most, by rank (formula: min(m, p - r))",
    ]


def test_a_formula_that_does_not_hold_says_where_it_would(run):
    lines = run("zb-h1 --pp 2 --microbatches 3 --costs 1,1,2").splitlines()
    (bubble,) = [line for line in lines if line.startswith("bubble")]
    assert bubble.endswith(
        "simulated; the formula is for m >= p and W <= min(F, I) and "
        "(c == 0 or (m >= 2 * p and 2 * c <= W))"
    )


def test_chunks_are_those_that_the_schedule_usually_has(run):
    assert run("zb-v --pp 2 --microbatches 4").startswith("zb-v: 2 ranks, 2 stages per rank, 4 ")
    assert "4 stages per rank" in run("interleaved --pp 2 --microbatches 4 --chunks 4")


def test_an_alias_is_shown_by_its_own_name(run):
    assert run("f-then-b --pp 2 --microbatches 2").startswith("gpipe: 2 ranks, 2 micro-batches")


def test_many_ranks_are_cut_short(run):
    text = run("1f1b --pp 64 --microbatches 64")
    assert "micro-batches held at most" in text
    assert ".. (the highest: 64)" in text
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("1f1b --pp 2 --microbatches 0", "schedule '1f1b' for 0 micro-batches: give at least 1"),
        ("1f1b --pp 2 --microbatches 2 --chunks 2", "pipeline.chunks is 2: set it to 1"),
        ("auto --pp 2 --microbatches 2", "schedule 'auto' is not there yet"),
        ("zb-v --pp 2 --microbatches 2 --chunks 4", "pipeline.chunks is 4: set it to 2"),
        ("gpip --pp 2 --microbatches 2", "did you mean 'gpipe'"),
    ],
)
def test_what_no_schedule_can_do_is_an_error_of_ours(run, words, message):
    with pytest.raises(ScheduleError, match=message):
        run(words)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("1,2", "'1,2': give three or four numbers, F,I,W or F,I,W,c, as in 1,1,1,0.1"),
        ("1,2,3,4,5", "give three or four numbers"),
        ("1,1,x", "'1,1,x': give three or four numbers"),
        ("1,1,nan", "the cost backward_weight of stage 0 is nan"),
        ("1,1,1,-1", "the cost message is -1.0: a time or size is a number from 0 up"),
    ],
)
def test_costs_that_are_none_end_in_a_usage_error(run, capsys, costs, message):
    with pytest.raises(SystemExit) as left:
        run(f"1f1b --pp 2 --microbatches 2 --costs {costs}")
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_is_enough(run, capsys):
    with pytest.raises(SystemExit) as left:
        run("--help")
    assert left.value.code == 0
    text = capsys.readouterr().out
    for word in (*SCHEDULES, "--pp", "--microbatches", "--chunks", "--costs", "json", "csv"):
        assert word in text
