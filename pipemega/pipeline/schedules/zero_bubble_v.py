"""ZB-V: two chunks in a v with split backward; holds pp_size micro-batches, almost no bubble."""

from pipemega.pipeline.plan.instructions import Plan, Program
from pipemega.pipeline.schedules.family import Formula, ScheduleFamily
from pipemega.pipeline.schedules.placement import v
from pipemega.pipeline.schedules.sequences import keep_first
from pipemega.pipeline.schedules.two_chunks import TwoChunkProgram


def zb_v(pp_size: int, num_microbatches: int) -> Plan:
    """Each rank runs a returning micro-batch as soon as it can; W fills the idle time.

    pp_size=2, num_microbatches=4, all steps equally long:

        rank 0   F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
        rank 1   .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

    Every rank holds at most pp_size micro-batches. If F, I and W take equally long, no rank is idle
    between its first step and its last. The first rank holds both ends of the model.

    Built for at least 2 * pp_size - 1 micro-batches; fewer keep the order that they have in the
    plan for that many.

    Source: Qi et al. 2023, arXiv:2401.10241, section 6 ("ZB-V"), the handcrafted order.
    """
    full = max(num_microbatches, 2 * pp_size - 1)
    programs = tuple(_program(pp_size, full, rank) for rank in range(pp_size))
    return keep_first(Plan("zb-v", full, v(pp_size), programs), num_microbatches)


def _program(pp_size: int, num_microbatches: int, rank: int) -> Program:
    """Build the program for num_microbatches >= 2 * pp_size - 1; lower case is the second chunk."""
    p, m, r = pp_size, num_microbatches, rank
    row = TwoChunkProgram(p, r)
    row.run("F", times=2 * (p - r) - 1)
    row.run("f F", times=r)
    row.run("f i w", times=p - r)
    row.run("F I W f i w", times=m - (2 * p - 1 - r))
    row.run("I W f i w", times=p - 1 - r)
    row.run("I i", times=r)
    row.run("I W", times=p - r)
    row.append_open_weights()
    return row.program


ZB_V = ScheduleFamily(
    name="zb-v",
    build=zb_v,
    placement="v",
    chunks=2,
    makespan=Formula(
        "m * (F + I + W) + "
        "max((p - 1) * I / 2 + (5 * p - 7) * c, (p - 1) * (I - W) + (6 * p - 8) * c)"
    ),
    exact=Formula("m >= 2 * p - 1 and W <= F <= I and (c == 0 or (p > 1 and 4 * c <= W))"),
    peak=Formula("(min(m, 2 * p - 1 - r) + min(m, r + 1)) / 2"),
    source="arXiv:2401.10241",
)
