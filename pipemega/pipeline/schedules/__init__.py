"""Pipeline schedules by name.  Each is a pure function from sizes to a `Plan` of compute steps.

A schedule says only what each rank computes, in order. `lowering` adds the messages, `validate`
proves the rules, `simulate` says how long it takes. A new schedule is one file, with one
`ScheduleFamily` in it, and one line here.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from pipemega.errors import ScheduleError
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.schedules.controllable_memory import (
    ONE_F_ONE_B_V,
    V_HALF,
    V_MIN,
    one_f_one_b_v,
    v_half,
    v_min,
)
from pipemega.pipeline.schedules.dual_pipe import DUALPIPE_V, dual_pipe_v
from pipemega.pipeline.schedules.evaluation import forward_only
from pipemega.pipeline.schedules.family import ScheduleFamily, ShareCosts, Sizes
from pipemega.pipeline.schedules.gpipe import GPIPE, gpipe
from pipemega.pipeline.schedules.interleaved import (
    INTERLEAVED,
    LOOPED_BFS,
    interleaved,
    looped_bfs,
)
from pipemega.pipeline.schedules.one_f_one_b import ONE_F_ONE_B, one_f_one_b
from pipemega.pipeline.schedules.sequential import SEQUENTIAL, sequential
from pipemega.pipeline.schedules.zero_bubble import (
    INTERLEAVED_ZB,
    ZB_H1,
    ZB_H2,
    interleaved_zb,
    zb_h1,
    zb_h2,
)
from pipemega.pipeline.schedules.zero_bubble_v import ZB_V, zb_v

_FAMILIES = (
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

SCHEDULES: Final[Mapping[str, ScheduleFamily]] = MappingProxyType(
    {family.name: family for family in _FAMILIES}
)

# No family: it is made for given costs and a memory limit, by `pipeline.synthesis`.
SYNTHESIZED: Final = "auto"

__all__ = [
    "SCHEDULES",
    "SYNTHESIZED",
    "ScheduleFamily",
    "ShareCosts",
    "Sizes",
    "build_plan",
    "dual_pipe_v",
    "find_schedule",
    "forward_only",
    "gpipe",
    "interleaved",
    "interleaved_zb",
    "looped_bfs",
    "one_f_one_b",
    "one_f_one_b_v",
    "sequential",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


def find_schedule(name: str) -> ScheduleFamily:
    """The schedule that goes by `name`, its own or an alias.

    Raises:
        ScheduleError: there is none, or it is `auto`, which is no function of sizes; the message
            has the nearest name.
    """
    by_name = {alias: family for family in SCHEDULES.values() for alias in family.aliases}
    by_name |= SCHEDULES
    if name in by_name:
        return by_name[name]
    there = f"the schedules are {', '.join(SCHEDULES)} and {SYNTHESIZED}"
    if name == SYNTHESIZED:
        raise ScheduleError(
            f"schedule {name!r} is not written down but looked for, by costs and a memory limit: "
            f"python -m pipemega schedule auto, or pipemega.pipeline.synthesis.synthesize"
        )
    near = get_close_matches(name.casefold(), [*by_name, SYNTHESIZED], n=1, cutoff=0.5)
    if not near:
        raise ScheduleError(f"unknown schedule {name!r}: {there}")
    raise ScheduleError(f"unknown schedule {name!r}; did you mean {near[0]!r}? {there}")


def build_plan(name: str, pp_size: int, num_microbatches: int, chunks: int | None = None) -> Plan:
    """The plan of the schedule `name` for `pp_size` ranks that hold `chunks` stages each.

    Without `chunks`, they hold as many as the schedule usually has: one, or two.

    Raises:
        ScheduleError: there is no such schedule, or it cannot take these sizes.
    """
    family = find_schedule(name)
    sizes = Sizes(pp_size, num_microbatches, family.usual_chunks if chunks is None else chunks)
    for what, size in zip(("pipeline ranks", "micro-batches", "chunks"), sizes, strict=True):
        if size < 1:
            raise ScheduleError(f"schedule {family.name!r} for {size} {what}: give at least 1")
    if (reason := family.refuses(sizes)) is not None:
        raise ScheduleError(f"schedule {family.name!r} {reason}")
    return family.build(sizes)
