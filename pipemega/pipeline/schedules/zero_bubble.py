"""1F1B with the backward cut in two, its weight half put where a rank would wait."""

from pipemega.pipeline.instructions import Kind, Plan, Program
from pipemega.pipeline.schedules.family import ScheduleFamily, ShareCosts, Sizes
from pipemega.pipeline.schedules.interleaved import groups_of
from pipemega.pipeline.schedules.phrases import by_turns, in_groups, steps, weights_behind
from pipemega.pipeline.schedules.placement import loop


def zb_h1(pp_size: int, num_microbatches: int) -> Plan:
    """1F1B on input halves; rank r puts its weight halves off by r micro-batches.

    pp_size=3, num_microbatches=4, all steps equally long:

        rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    A third of the bubble of 1F1B at the memory of its first rank: pp_size micro-batches on every
    rank, on their way or waiting for W.

    Source: Qi et al. 2023, arXiv:2401.10241, section 2 ("ZB-H1").
    """

    def program(rank: int) -> Program:
        forwards = steps(Kind.FORWARD, rank, num_microbatches)
        inputs = steps(Kind.BACKWARD_INPUT, rank, num_microbatches)
        return weights_behind(by_turns(forwards, inputs, pp_size - 1 - rank), lag=rank)

    return Plan("zb-h1", num_microbatches, loop(pp_size), tuple(map(program, range(pp_size))))


def zb_h2(pp_size: int, num_microbatches: int) -> Plan:
    """Twice as many forwards ahead as in ZB-H1, and weight halves put off twice as long.

    pp_size=3, num_microbatches=5, all steps equally long:

        rank 0   F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..
        rank 1   .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
        rank 2   .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    No rank waits between its first step and its last; that is worth something where the next step
    of the first rank need not wait for the last rank of this one. Twice the memory of 1F1B.

    Source: Qi et al. 2023, arXiv:2401.10241, section 2 ("ZB-H2").
    """

    def program(rank: int) -> Program:
        forwards = steps(Kind.FORWARD, rank, num_microbatches)
        inputs = steps(Kind.BACKWARD_INPUT, rank, num_microbatches)
        return weights_behind(by_turns(forwards, inputs, 2 * (pp_size - 1 - rank)), lag=2 * rank)

    return Plan("zb-h2", num_microbatches, loop(pp_size), tuple(map(program, range(pp_size))))


def interleaved_zb(pp_size: int, num_microbatches: int, chunks: int = 2) -> Plan:
    """ZB-H1 over `chunks` thin stages per rank; with one chunk it is ZB-H1.

    pp_size=2, num_microbatches=4, chunks=2, all steps equally long:

        rank 0   F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
        rank 1   .. F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3

    The bubble of ZB-H1 divided by the chunks, for as many times the messages, which this order
    waits for each time. Micro-batches go in groups as in `interleaved`; with groups of pp_size it
    holds no more than ZB-H1.

    Source: `ScheduleInterleavedZeroBubble` of torch.distributed.pipelining, after Qi et al. 2023,
    arXiv:2401.10241.
    """
    groups = groups_of(pp_size, num_microbatches)

    def program(rank: int) -> Program:
        stages = range(rank, pp_size * chunks, pp_size)
        forwards = in_groups(Kind.FORWARD, stages, groups)
        inputs = in_groups(Kind.BACKWARD_INPUT, stages[::-1], groups)
        lead = (chunks - 1) * groups[0] + pp_size - 1 - rank
        return weights_behind(by_turns(forwards, inputs, lead), lag=rank)

    programs = tuple(map(program, range(pp_size)))
    return Plan("interleaved-zb", num_microbatches, loop(pp_size, chunks), programs)


def _makespan_zb_h1(sizes: Sizes, costs: ShareCosts) -> float:
    p, m, _ = sizes
    wait = costs.forward + costs.backward_input - costs.backward_weight
    return m * costs.work + (p - 1) * (wait + 4 * costs.message)


def _exact_zb_h1(sizes: Sizes, costs: ShareCosts) -> bool:
    p, m, _ = sizes
    forward, inputs, weights, message = costs
    few_messages = message == 0 or (m >= 2 * p and 2 * message <= weights)
    return m >= p and weights <= min(forward, inputs) and few_messages


def _makespan_zb_h2(sizes: Sizes, costs: ShareCosts) -> float:
    p, m, _ = sizes
    forward, inputs, weights, message = costs
    wait = max(forward + message, forward + inputs - 2 * weights + 2 * message)
    return m * costs.work + (p - 1) * wait


def _exact_zb_h2(sizes: Sizes, costs: ShareCosts) -> bool:
    forward, inputs, weights, message = costs
    enough = sizes.num_microbatches >= 2 * sizes.pp_size - 1
    return enough and weights <= min(forward, inputs) and message <= weights


def _makespan_interleaved_zb(sizes: Sizes, costs: ShareCosts) -> float:
    p, m, v = sizes
    wait = costs.forward + costs.backward_input - costs.backward_weight
    return m * costs.work + (p - 1) * wait / v + (p * v + 3 * p - 4) * costs.message


def _exact_interleaved_zb(sizes: Sizes, costs: ShareCosts) -> bool:
    p, m, v = sizes
    forward, inputs, weights, message = costs
    few_messages = message == 0 or (
        p > 1 and m >= 2 * p and m % p == 0 and 2 * v * message <= weights
    )
    return m >= p and weights <= min(forward, inputs) and few_messages


ZB_H1 = ScheduleFamily(
    name="zb-h1",
    build=lambda sizes: zb_h1(sizes.pp_size, sizes.num_microbatches),
    makespan=_makespan_zb_h1,
    makespan_formula="m * (F + I + W) + (p - 1) * (F + I - W + 4 * c)",
    exact=_exact_zb_h1,
    exact_formula="m >= p and W <= min(F, I) and (c == 0 or (m >= 2 * p and 2 * c <= W))",
    peak=lambda sizes, rank: min(sizes.num_microbatches, sizes.pp_size),
    peak_formula="min(m, p)",
    source="arXiv:2401.10241",
)

ZB_H2 = ScheduleFamily(
    name="zb-h2",
    build=lambda sizes: zb_h2(sizes.pp_size, sizes.num_microbatches),
    makespan=_makespan_zb_h2,
    makespan_formula="m * (F + I + W) + (p - 1) * max(F + c, F + I - 2 * W + 2 * c)",
    exact=_exact_zb_h2,
    exact_formula="m >= 2 * p - 1 and W <= min(F, I) and c <= W",
    peak=lambda sizes, rank: min(sizes.num_microbatches, 2 * sizes.pp_size - 1),
    peak_formula="min(m, 2 * p - 1)",
    source="arXiv:2401.10241",
)

INTERLEAVED_ZB = ScheduleFamily(
    name="interleaved-zb",
    build=lambda sizes: interleaved_zb(*sizes),
    chunks=None,
    makespan=_makespan_interleaved_zb,
    makespan_formula="m * (F + I + W) + (p - 1) * (F + I - W) / v + (p * v + 3 * p - 4) * c",
    exact=_exact_interleaved_zb,
    exact_formula="m >= p and W <= min(F, I) and "
    "(c == 0 or (p > 1 and m >= 2 * p and m % p == 0 and 2 * v * c <= W))",
    peak=lambda sizes, rank: min(
        sizes.num_microbatches,
        ((sizes.chunks - 1) * groups_of(*sizes[:2])[0] + sizes.pp_size) / sizes.chunks,
    ),
    peak_formula="min(m, ((v - 1) * ceil(m / max(1, m // p)) + p) / v)",
    source="arXiv:2401.10241",
)
