"""Tests of `python -m pipemega schedule`: arguments and output."""

import argparse
import json

import pytest

from pipemega.cli import schedule
from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.schedules import SCHEDULES, build_plan


@pytest.fixture
def run(capsys):
    """Run the command with the given words; return its output."""

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
def test_json_output_contains_only_the_plan(run, name):
    text = run(f"{name} --pp 3 --microbatches 4 --format json")
    assert list(json.loads(text)) == ["name", "num_microbatches", "rank_of_stage", "programs"]
    assert Plan.from_json(text) == build_plan(name, 3, 4)


def test_csv_output_contains_only_the_plan(run):
    assert run("gpipe --pp 2 --microbatches 1 --format csv") == "0F0,0B0\n1F0,1B0\n"


def test_text_has_the_drawing_and_the_simulated_and_formula_values(run):
    assert run("1f1b --pp 2 --microbatches 3 --costs 1,1,1,0.5").splitlines() == [
        "1f1b: 2 ranks, 3 micro-batches; F=1 I=1 W=1 c=0.5 per rank   (arXiv:2104.04473)",
        "",
        "rank 0   F0 F1 .. .. .. B0 -- F2 B1 -- .. .. B2 --",
        "rank 1   .. F0 B0 -- F1 B1 -- .. F2 B2 -- .. .. ..",
        "",
        "makespan   14   (from the first instruction to the last; formula: "
        "(m + p - 1) * (F + I + W) + 2 * (p + m - 3 - (m - 2) // p) * c)",
        "span       14   (longest time of a rank, from its own first instruction to its own last)",
        "bubble     35.71% simulated, 35.71% by the formula",
        "memory     2 1 micro-batches held at most, per rank (formula: min(m, p - r))",
    ]


def test_the_condition_of_a_formula_that_is_not_exact_is_printed(run):
    lines = run("zb-h1 --pp 2 --microbatches 3 --costs 1,1,2").splitlines()
    (bubble,) = [line for line in lines if line.startswith("bubble")]
    assert bubble.endswith(
        "simulated; the formula is exact only if m >= p and W <= min(F, I) and "
        "(c == 0 or (m >= 2 * p and 2 * c <= W))"
    )


def test_chunks_default_to_those_of_the_schedule(run):
    assert run("zb-v --pp 2 --microbatches 4").startswith("zb-v: 2 ranks, 2 stages per rank, 4 ")
    assert "4 stages per rank" in run("interleaved --pp 2 --microbatches 4 --chunks 4")


def test_an_alias_is_printed_as_the_real_name(run):
    assert run("f-then-b --pp 2 --microbatches 2").startswith("gpipe: 2 ranks, 2 micro-batches")


def test_output_for_many_ranks_is_shortened(run):
    text = run("1f1b --pp 64 --microbatches 64")
    assert "micro-batches held at most" in text
    assert ".. (the highest: 64)" in text
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("1f1b --pp 2 --microbatches 0", "schedule '1f1b' for 0 micro-batches: give at least 1"),
        (
            "1f1b --pp 2 --microbatches 2 --chunks 2",
            "schedule '1f1b' runs one stage per rank: set it to 1",
        ),
        (
            "auto --pp 2 --microbatches 2 --memory-limit 0.5",
            "a memory limit of 0.5 is too low for rank 0",
        ),
        ("autoo --pp 2 --microbatches 2", "did you mean 'auto'"),
        (
            "1f1b --pp 4 --microbatches 8 --memory-limit 3",
            "schedule '1f1b' holds 4 micro-batches on rank 0, and --memory-limit is 3: raise "
            "the limit, or use schedule 'auto'",
        ),
        (
            'gpipe --pp 1 --microbatches 1 --stage-costs {"forward":[1],"backward_input":[1],'
            '"backward_weight":[1]}',
            "--stage-costs is for auto, not for 'gpipe': use --costs",
        ),
        (
            'auto --pp 2 --microbatches 1 --chunks 2 --stage-costs {"forward":[1,1],'
            '"backward_input":[1,1],"backward_weight":[1,1]}',
            "--stage-costs has 2 stages, 1 on each of 2 ranks, but --chunks is 2: remove",
        ),
        ("zb-v --pp 2 --microbatches 2 --chunks 4", "placed in a v: set it to 2"),
        ("gpip --pp 2 --microbatches 2", "did you mean 'gpipe'"),
    ],
)
def test_impossible_requests_raise_a_schedule_error(run, words, message):
    with pytest.raises(ScheduleError, match=message):
        run(words)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("1,2", "'1,2': give three or four numbers, F,I,W or F,I,W,c, as in 1,1,1,0.1"),
        ("1,2,3,4,5", "give three or four numbers"),
        ("1,1,x", "'1,1,x': give three or four numbers"),
        ("1,1,nan", "the cost backward_weight of stage 0 is nan"),
        ("1,1,1,-1", "the cost message is -1.0: give a finite number, at least 0"),
    ],
)
def test_invalid_costs_are_a_usage_error(run, capsys, costs, message):
    with pytest.raises(SystemExit) as left:
        run(f"1f1b --pp 2 --microbatches 2 --costs {costs}")
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_auto_prints_the_plan_and_its_lower_bound(run):
    assert run("auto --pp 2 --microbatches 2 --chunks 1 --memory-limit 2").splitlines() == [
        "auto: 2 ranks, 2 micro-batches; F=1 I=1 W=1 c=0 per rank",
        "",
        "rank 0   F0 F1 .. I0 W0 I1 W1",
        "rank 1   .. F0 I0 F1 I1 W0 W1",
        "",
        "makespan   7   (from the first instruction to the last)",
        "span       7   (longest time of a rank, from its own first instruction to its own last)",
        "bubble     14.29%",
        "memory     2 2 held at most, per rank",
        "bound      7   (lower limit of the makespan within this memory; this plan is at it)",
        "origin     zb-h1",
    ]


def test_auto_uses_the_memory_of_1f1b_by_default(run):
    text = run("auto --pp 3 --microbatches 4 --chunks 1 --format json")
    plan = Plan.from_json(text)
    assert plan.name == "auto"
    assert max(simulate(plan, CostModel.uniform(3)).peak) <= 3


def test_auto_reads_stage_costs_from_json_text_and_files(run, tmp_path):
    costs = {"forward": [1, 2], "backward_input": [1, 2], "backward_weight": [1, 2], "message": 0.5}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs))
    words = json.dumps(costs).replace(" ", "")
    texts = [
        run(f"auto --pp 2 --microbatches 3 --stage-costs {source}") for source in (words, file)
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith("auto: 2 ranks, 3 micro-batches; costs per stage\n")


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("nowhere.json", "neither JSON nor a JSON file"),
        ('{"forward":[1]}', "stage costs need the keys forward, backward_input,"),
        (
            '{"forward":[1],"backward_input":[1],"backward_weight":1}',
            "backward_weight of the stage costs: give a list of numbers, one per stage",
        ),
        (
            '{"forward":[1],"backward_input":[1],"backward_weight":[true]}',
            "give a list of numbers, one per stage",
        ),
        (
            '{"forward":[1],"backward_input":[1],"backward_weight":[1],"message":[1]}',
            "message of the stage costs: give a number",
        ),
        (
            '{"forward":[1],"backward_input":[-1],"backward_weight":[1]}',
            "the cost backward_input of stage 0 is -1.0",
        ),
        (
            '{"forward":[1],"backward_input":[1],"backward_weight":[NaN]}',
            "the cost backward_weight of stage 0 is nan",
        ),
    ],
)
def test_invalid_stage_costs_are_a_usage_error(run, capsys, costs, message):
    with pytest.raises(SystemExit) as left:
        run(f"auto --pp 1 --microbatches 2 --stage-costs {costs}")
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "much"])
def test_an_invalid_limit_is_a_usage_error(run, capsys, limit):
    with pytest.raises(SystemExit) as left:
        run(f"auto --pp 1 --microbatches 2 --memory-limit {limit}")
    assert left.value.code == 2
    assert f"{limit!r}: give a number above 0" in capsys.readouterr().err


def test_the_help_lists_all_schedules_and_options(run, capsys):
    with pytest.raises(SystemExit) as left:
        run("--help")
    assert left.value.code == 0
    text = capsys.readouterr().out
    options = "--pp --microbatches --chunks --costs --memory-limit --stage-costs --objective"
    for word in (*SCHEDULES, "auto", *options.split(), "json", "csv"):
        assert word in text


def test_auto_can_be_drawn_as_html(run, tmp_path):
    page = tmp_path / "auto.html"
    run(f"auto --pp 2 --microbatches 2 --chunks 1 --format html --output {page}")
    assert "auto, 2 ranks, 2 micro-batches" in page.read_text()
