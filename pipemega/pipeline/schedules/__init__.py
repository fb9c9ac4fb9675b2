"""Pipeline schedules by name: pure functions from sizes to a `Plan` of compute steps.

A schedule gives the order of the compute steps of each rank. `plan.lowering` adds the messages,
`plan.validate` proves the plan, `plan.simulate` computes its timeline. To add a schedule, write one
file with a `ScheduleFamily` and list it in `SCHEDULES`; config, command line, docs and tests read
that registry.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Final

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.schedules.building_blocks import (
    Formula,
    RankCosts,
    ScheduleFamily,
    Sizes,
    loop,
    v,
)
from pipemega.pipeline.schedules.controllable_memory import ONE_F_ONE_B_V, V_HALF, V_MIN
from pipemega.pipeline.schedules.dual_pipe import DUALPIPE_V
from pipemega.pipeline.schedules.interleaved import INTERLEAVED, LOOPED_BFS
from pipemega.pipeline.schedules.one_f_one_b import GPIPE, ONE_F_ONE_B, SEQUENTIAL, forward_only
from pipemega.pipeline.schedules.zero_bubble import INTERLEAVED_ZB, ZB_H1, ZB_H2, ZB_V

SCHEDULES: Final[dict[str, ScheduleFamily]] = {
    family.name: family
    for family in (
        SEQUENTIAL,
        GPIPE,
        ONE_F_ONE_B,
        INTERLEAVED,
        LOOPED_BFS,
        ZB_H1,
        ZB_H2,
        INTERLEAVED_ZB,
        ZB_V,
        DUALPIPE_V,
        V_HALF,
        V_MIN,
        ONE_F_ONE_B_V,
    )
}

# Not a function of sizes: `pipeline.autoschedule` searches a plan for given costs and memory limit.
AUTO: Final = "auto"

__all__ = [
    "AUTO",
    "SCHEDULES",
    "Formula",
    "RankCosts",
    "ScheduleFamily",
    "Sizes",
    "aliases",
    "build_plan",
    "find_schedule",
    "forward_only",
    "named_plans",
    "splits_backward",
]


def aliases() -> dict[str, str]:
    """Return the other names of schedules: alias -> name."""
    return {alias: family.name for family in SCHEDULES.values() for alias in family.aliases}


def find_schedule(name: str) -> ScheduleFamily:
    """Return the schedule with this name or alias.

    Raises:
        ScheduleError: unknown name, with the nearest known one; or `auto`, which is not a function
            of sizes.
    """
    other_names = aliases()
    if (family := SCHEDULES.get(other_names.get(name, name))) is not None:
        return family
    known = f"the schedules are {', '.join(SCHEDULES)} and {AUTO}"
    if name == AUTO:
        raise ScheduleError(
            f"schedule {name!r} depends on costs and a memory limit: use python -m pipemega "
            f"schedule auto, or pipemega.pipeline.autoschedule.find_plan"
        )
    near = get_close_matches(name.casefold(), [*other_names, *SCHEDULES, AUTO], n=1, cutoff=0.5)
    if not near:
        raise ScheduleError(f"unknown schedule {name!r}: {known}")
    raise ScheduleError(f"unknown schedule {name!r}; did you mean {near[0]!r}? {known}")


def splits_backward(name: str) -> bool:
    """Return whether the plans of schedule `name` have I and W."""
    family = SCHEDULES[name]
    return family.plan(Sizes(2, 4, family.default_chunks)).splits_backward


def named_plans(
    rank_of_stage: tuple[int, ...], pp_size: int, num_microbatches: int
) -> Iterator[Plan]:
    """Yield the plans of all named schedules that place the stages so."""
    chunks, rest = divmod(len(rank_of_stage), pp_size)
    places = {"loop": loop(pp_size, chunks), "v": v(pp_size, chunks)}
    for family in SCHEDULES.values() if not rest else ():
        if places[family.placement] == rank_of_stage and family.chunks_error(chunks) is None:
            yield family.plan(Sizes(pp_size, num_microbatches, chunks))


def build_plan(name: str, pp_size: int, num_microbatches: int, chunks: int | None = None) -> Plan:
    """Return the plan of the schedule `name` for `pp_size` ranks with `chunks` stages each.

    Args:
        chunks: number of stages on each rank; None: the default of the schedule, 1 or 2.

    Raises:
        ScheduleError: unknown schedule, or sizes that it does not accept.
    """
    family = find_schedule(name)
    sizes = Sizes(pp_size, num_microbatches, family.default_chunks if chunks is None else chunks)
    for what, size in zip(("pipeline ranks", "micro-batches", "chunks"), sizes, strict=True):
        if size < 1:
            raise ScheduleError(f"schedule {family.name!r} for {size} {what}: give at least 1")
    if (error := family.chunks_error(sizes.chunks)) is not None:
        raise ScheduleError(error)
    return family.plan(sizes)
