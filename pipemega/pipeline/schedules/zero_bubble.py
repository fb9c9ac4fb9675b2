"""Zero-bubble variants of 1F1B: split backward, with W where a rank would otherwise be idle.

ZB-V: two chunks in a v with split backward; holds pp_size micro-batches, almost no bubble.
"""

from pipemega.pipeline.plan.instructions import Kind, Plan, Program
from pipemega.pipeline.schedules.building_blocks import (
    Formula,
    ScheduleFamily,
    TwoChunkProgram,
    alternate,
    delay_weights,
    keep_first,
    loop,
    steps,
    steps_in_groups,
    v,
)
from pipemega.pipeline.schedules.interleaved import groups_of


def zb_h1(pp_size: int, num_microbatches: int) -> Plan:
    """1F1B with I instead of B; rank r delays each W by r micro-batches.

    pp_size=3, num_microbatches=4, all steps equally long:

        rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    A third of the bubble of 1F1B. Every rank holds at most pp_size micro-batches: those before
    their backward and those that wait for W. Only rank 0 of 1F1B holds as many; and what W needs
    may be more than F keeps, with recomputation many times more.

    Source: Qi et al. 2023, arXiv:2401.10241, section 2 ("ZB-H1").
    """
    programs = (_one_stage(pp_size, num_microbatches, rank, ahead=1) for rank in range(pp_size))
    return Plan("zb-h1", num_microbatches, loop(pp_size), tuple(programs))


def zb_h2(pp_size: int, num_microbatches: int) -> Plan:
    """ZB-H1 with twice as many warm-up forwards and twice the delay of W.

    pp_size=3, num_microbatches=5, all steps equally long:

        rank 0   F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..
        rank 1   .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
        rank 2   .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    No rank is idle between its first step and its last. This helps only if the first rank can
    start its next step before the last rank has finished this one. Holds twice as many as ZB-H1.

    Source: Qi et al. 2023, arXiv:2401.10241, section 2 ("ZB-H2").
    """
    programs = (_one_stage(pp_size, num_microbatches, rank, ahead=2) for rank in range(pp_size))
    return Plan("zb-h2", num_microbatches, loop(pp_size), tuple(programs))


def _one_stage(pp_size: int, num_microbatches: int, rank: int, ahead: int) -> Program:
    forwards = steps(Kind.FORWARD, rank, num_microbatches)
    inputs = steps(Kind.BACKWARD_INPUT, rank, num_microbatches)
    lead = ahead * (pp_size - 1 - rank)
    return delay_weights(alternate(forwards, inputs, lead), lag=ahead * rank)


def interleaved_zb(pp_size: int, num_microbatches: int, chunks: int = 2) -> Plan:
    """ZB-H1 with `chunks` small stages per rank; with one chunk it is ZB-H1.

    pp_size=2, num_microbatches=4, chunks=2, all steps equally long:

        rank 0   F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
        rank 1   .. F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3

    Divides the bubble of ZB-H1 by `chunks`; needs `chunks` times the messages, and waits for each
    of them. Micro-batches go in groups as in `interleaved`; with groups of pp_size it holds no more
    memory than ZB-H1.

    Source: `ScheduleInterleavedZeroBubble` of torch.distributed.pipelining, after Qi et al. 2023,
    arXiv:2401.10241.
    """
    groups = groups_of(pp_size, num_microbatches)

    def program(rank: int) -> Program:
        stages = range(rank, pp_size * chunks, pp_size)
        forwards = steps_in_groups(Kind.FORWARD, stages, groups)
        inputs = steps_in_groups(Kind.BACKWARD_INPUT, stages[::-1], groups)
        lead = (chunks - 1) * groups[0] + pp_size - 1 - rank
        return delay_weights(alternate(forwards, inputs, lead), lag=rank)

    programs = tuple(map(program, range(pp_size)))
    return Plan("interleaved-zb", num_microbatches, loop(pp_size, chunks), programs)


ZB_H1 = ScheduleFamily(
    name="zb-h1",
    build=zb_h1,
    makespan=Formula("m * (F + I + W) + (p - 1) * (F + I - W + 4 * c)"),
    exact=Formula("m >= p and W <= min(F, I) and (c == 0 or (m >= 2 * p and 2 * c <= W))"),
    peak=Formula("min(m, p)"),
    source="arXiv:2401.10241",
)

ZB_H2 = ScheduleFamily(
    name="zb-h2",
    build=zb_h2,
    makespan=Formula("m * (F + I + W) + (p - 1) * max(F + c, F + I - 2 * W + 2 * c)"),
    exact=Formula("m >= 2 * p - 1 and W <= min(F, I) and c <= W"),
    peak=Formula("min(m, 2 * p - 1)"),
    source="arXiv:2401.10241",
)

INTERLEAVED_ZB = ScheduleFamily(
    name="interleaved-zb",
    build=interleaved_zb,
    chunks=None,
    makespan=Formula("m * (F + I + W) + (p - 1) * (F + I - W) / v + (p * v + 3 * p - 4) * c"),
    exact=Formula(
        "m >= p and W <= min(F, I) and "
        "(c == 0 or (p > 1 and m >= 2 * p and m % p == 0 and 2 * v * c <= W))"
    ),
    peak=Formula("min(m, ((v - 1) * ceil(m / max(1, m // p)) + p) / v)"),
    source="arXiv:2401.10241",
)


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
