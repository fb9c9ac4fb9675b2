"""Schedule `auto`: searches the best plan for given costs and a memory limit.

    placements_of_rank_costs or placements_of_stage_costs -> find_plan -> AutoPlan

`problem.py` lists the placements of stages; `problem.py` holds the numbers that the searches
work on, `greedy.py` computes the times of a plan, `problem.py` lower bounds; `greedy.py` and
`greedy.py` construct plans, `anneal.py` improves them, `search.py` divides the effort among them.
"""

from pipemega.pipeline.autoschedule.problem import (
    Placement,
    chunk_counts,
    limit_of_1f1b,
    placements_of_rank_costs,
    placements_of_stage_costs,
)
from pipemega.pipeline.autoschedule.search import AutoPlan, find_plan

__all__ = [
    "AutoPlan",
    "Placement",
    "chunk_counts",
    "find_plan",
    "limit_of_1f1b",
    "placements_of_rank_costs",
    "placements_of_stage_costs",
]
