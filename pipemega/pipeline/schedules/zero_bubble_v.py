"""ZB-V: two chunks in a v, the backward cut in two; the memory of 1F1B and next to no bubble."""

from pipemega.pipeline.instructions import Plan, Program
from pipemega.pipeline.schedules.family import ScheduleFamily, ShareCosts, Sizes
from pipemega.pipeline.schedules.phrases import without_the_rest
from pipemega.pipeline.schedules.placement import v
from pipemega.pipeline.schedules.two_chunks import TwoChunks


def zb_v(pp_size: int, num_microbatches: int) -> Plan:
    """Each rank turns a micro-batch round as soon as it comes back, and W fills what is left.

    pp_size=2, num_microbatches=4, all steps equally long:

        rank 0   F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
        rank 1   .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

    Holds pp_size micro-batches on every rank. Where F, I and W take as long as each other, no rank
    waits between its first step and its last. The first rank has both ends of the model.

    Made for at least 2 * pp_size - 1 micro-batches; fewer run in the order that they would have
    among so many.

    Source: Qi et al. 2023, arXiv:2401.10241, section 6 ("ZB-V"), in the order by hand.
    """
    full = max(num_microbatches, 2 * pp_size - 1)
    programs = tuple(_program(pp_size, full, rank) for rank in range(pp_size))
    return without_the_rest(Plan("zb-v", full, v(pp_size), programs), num_microbatches)


def _program(pp_size: int, num_microbatches: int, rank: int) -> Program:
    """For num_microbatches >= 2 * pp_size - 1; small letters are the second chunk."""
    p, m, r = pp_size, num_microbatches, rank
    row = TwoChunks(p, r)
    row.run("F", times=2 * (p - r) - 1)
    row.run("f F", times=r)
    row.run("f i w", times=p - r)
    row.run("F I W f i w", times=m - (2 * p - 1 - r))
    row.run("I W f i w", times=p - 1 - r)
    row.run("I i", times=r)
    row.run("I W", times=p - r)
    row.run_rest()
    return row.program


def _makespan(sizes: Sizes, costs: ShareCosts) -> float:
    p, m, _ = sizes
    _, inputs, weights, message = costs
    wait = max(
        (p - 1) * inputs / 2 + (5 * p - 7) * message,
        (p - 1) * (inputs - weights) + (6 * p - 8) * message,
    )
    return m * costs.work + wait


def _exact(sizes: Sizes, costs: ShareCosts) -> bool:
    forward, inputs, weights, message = costs
    return (
        sizes.num_microbatches >= 2 * sizes.pp_size - 1
        and weights <= forward <= inputs
        and (message == 0 or (sizes.pp_size > 1 and 3 * message <= weights))
    )


def _peak(sizes: Sizes, rank: int) -> float:
    p, m, _ = sizes
    return (min(m, 2 * p - 1 - rank) + min(m, rank + 1)) / 2


ZB_V = ScheduleFamily(
    name="zb-v",
    build=lambda sizes: zb_v(sizes.pp_size, sizes.num_microbatches),
    placement="v",
    chunks=2,
    makespan=_makespan,
    makespan_formula="m * (F + I + W) + "
    "max((p - 1) * I / 2 + (5 * p - 7) * c, (p - 1) * (I - W) + (6 * p - 8) * c)",
    exact=_exact,
    exact_formula="m >= 2 * p - 1 and W <= F <= I and (c == 0 or (p > 1 and 3 * c <= W))",
    peak=_peak,
    peak_formula="(min(m, 2 * p - 1 - r) + min(m, r + 1)) / 2",
    source="arXiv:2401.10241",
)
