"""The table of docs/gpu.md: which plans are proven under which limits of a GPU.

PIPEMEGA_WRITE_TABLE=1 pytest -m sweep tests/paper/plan/test_hardware_table.py    writes it
"""

import itertools
import os
from pathlib import Path

import pytest

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.channels import Hardware, connections_per_rank
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.validate import validate_messages
from pipemega.pipeline.plan_selection import warmup_plan
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from tests.paper.plan.nccl_simulation import Simulation
from tests.paper.plan.test_messages import SHAPES, _transport_groups

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
BEGIN, END = "<!-- table of limits -->\n", "<!-- end of the table of limits -->\n"


def plans(name, ranks):
    """The lowered plans of a schedule with 1, 2 and 4 stages per rank; None: not applicable."""
    for chunks in (1, 2, 4):
        for m in sorted({ranks - 1, ranks, 2 * ranks, 4 * ranks + 1}):
            try:
                yield lower(build_plan(name, ranks, m, chunks))
            except ScheduleError:
                yield None


def shared(plan, channels):
    """Limits with which `channels` connections of the busiest rank share a stream."""
    return Hardware(streams=-(-max(connections_per_rank(plan.rank_of_stage)) // channels))


MODES = {
    "32 queues (pipemega's default)": lambda plan: Hardware(queues=32),
    "8 queues (CUDA's default)": lambda plan: Hardware(queues=8),
    "one queue": lambda plan: Hardware(queues=1),
    "2 connections per stream": lambda plan: shared(plan, 2),
    "4 connections per stream": lambda plan: shared(plan, 4),
}
WARM, COLD = "lazy loading, after the warm-up", "lazy loading, without it"


def verdicts(name, sizes, modes=MODES):
    """Mode -> verdict of each combination of sizes and header mode."""
    found = {mode: [] for mode in (*modes, WARM, COLD)}
    for plan, shapes in itertools.product(
        (plan for ranks in sizes for plan in plans(name, ranks)), SHAPES
    ):
        if plan is None:
            for each in found.values():
                each.append("not applicable")
            continue
        for mode, limits in modes.items():
            found[mode].append(verdict(plan, shapes, limits(plan)))
        # Shapes that are sent with every message may be new in every micro-batch.
        runs = plan if shapes == "exchanged" else warmup_plan(plan)
        found[WARM].append(verdict(runs, shapes, Hardware(loads=True)))
        ends = Simulation(plan, _transport_groups(plan), shapes, loads="first").run()
        found[COLD].append("proven" if ends else "refused")
    return found


def verdict(plan, shapes, hardware):
    try:
        validate_messages(plan, "queues", shapes, hardware=hardware)
    except ScheduleError:
        return "refused"
    return "proven"


def cell(found):
    """Text of a cell: how many of the combinations are proven, if not all."""
    proven, refused = found.count("proven"), found.count("refused")
    return "proven" if not refused else f"{proven} of {proven + refused}" if proven else "refused"


def table(sizes):
    heads = ["schedule", "plans", *MODES, WARM, COLD]
    rows = [heads, ["---"] * len(heads)]
    for name in SCHEDULES:
        found = verdicts(name, sizes)
        applicable = [each for each in found[WARM] if each != "not applicable"]
        rows.append([f"`{name}`", str(len(applicable)), *map(cell, found.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_plan_is_proven_with_the_defaults_of_pipemega(name):
    modes = {key: MODES[key] for key in MODES if key.startswith("32")}
    found = verdicts(name, [2, 3], modes)
    assert set(found["32 queues (pipemega's default)"]) <= {"proven", "not applicable"}
    fixed = [each for at, each in enumerate(found[WARM]) if SHAPES[at % 3] != "exchanged"]
    assert set(fixed) <= {"proven", "not applicable"}


@pytest.mark.sweep
def test_the_page_has_the_verdict_of_every_plan():
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    new = "\n" + table([2, 3, 4, 8]) + "\n"
    if os.environ.get("PIPEMEGA_WRITE_TABLE") == "1":
        PAGE.write_text(before + BEGIN + new + END + after, encoding="utf-8")
    else:
        assert old == new
