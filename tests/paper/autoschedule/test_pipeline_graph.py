"""PipelineGraph: Colossal-AI's names for the costs of a V schedule."""

from typing import Any

import pytest

from pipemega.errors import ScheduleError
from pipemega.pipeline.pipeline_graph import PipelineGraph
from pipemega.pipeline.plan.simulate import simulate
from pipemega.pipeline.plan.validate import validate
from pipemega.pipeline.schedules import build_plan
from pipemega.pipeline.schedules.building_blocks import v

# Hidden size, heads and tokens of a layer, and the memory of F, B and W per element of a batch.
H, A, S = 1024, 16, 256
F_MEM, W_MEM = 34 * H + 5 * A * S, -32 * H
MEMORY = {"f_mem": F_MEM, "b_mem": -W_MEM - F_MEM, "w_mem": W_MEM}
TIMES = {"f_cost": 6, "b_cost": 6, "w_cost": 6, "c_cost": 1}


@pytest.mark.parametrize("n_micro", [2, 4, 8])
def test_the_plan_is_valid_and_not_slower_than_zb_v_within_the_memory_of_1f1b(n_micro: int) -> None:
    graph = PipelineGraph(4, n_micro, **TIMES, **MEMORY)
    plan = graph.get_v_schedule()
    validate(plan)
    assert plan.rank_of_stage == v(4)
    found = simulate(plan, graph.costs)
    assert found.makespan <= simulate(build_plan("zb-v", 4, n_micro), graph.costs).makespan
    assert max(found.peak) <= 2 * 4 * F_MEM


def test_the_plan_keeps_the_given_memory_limit() -> None:
    limit = 5 * F_MEM
    graph = PipelineGraph(4, 8, **TIMES, **MEMORY, max_mem=limit)
    assert max(simulate(graph.get_v_schedule(), graph.costs).peak) <= limit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b_mem": -1.0, "f_mem": 4.0, "w_mem": -2.0}, r"must be 0, and 4 \+ -1 \+ -2 = 1: give"),
        ({"f_mem": 1.0, "b_mem": -2.0, "w_mem": 1.0}, r"w_mem \(1\) must not be positive"),
        ({"f_mem": -2.0, "b_mem": 4.0, "w_mem": -2.0}, r"f_mem of a PipelineGraph \(-2\) must not"),
        ({"max_mem": F_MEM}, "too low for rank 0: .* the lowest limit that is enough for all"),
    ],
)
def test_costs_that_cannot_be_planned_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        PipelineGraph(4, 4, **{**TIMES, **MEMORY, **changes}).get_v_schedule()
