"""DualPipeV: two chunks in a v, forward of the one beside backward of the other."""

from pipemega.pipeline.instructions import Plan, Program
from pipemega.pipeline.schedules.family import ScheduleFamily, ShareCosts, Sizes
from pipemega.pipeline.schedules.phrases import without_the_rest
from pipemega.pipeline.schedules.placement import v
from pipemega.pipeline.schedules.two_chunks import TwoChunks


def dual_pipe_v(pp_size: int, num_microbatches: int) -> Plan:
    """Forward and whole backward of the two chunks by turns; halves only on the way in and out.

    pp_size=2, num_microbatches=4, all steps equally long:

        rank 0   F0 F1 F2 f0 i0 w0 f1 F3 b1 f2 B0 b2 f3 B1 b3 I2 W2 I3 W3
        rank 1   .. F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 b2 B2 i3 I3 w3 W3

    Each forward stands beside a backward of the other chunk, so that a rank can send for the one
    while it computes the other. Holds pp_size + 1/2 micro-batches on every rank.

    Made for at least 2 * pp_size micro-batches; fewer run in the order that they would have among
    so many.

    Source: DualPipeV of github.com/deepseek-ai/DualPipe: DualPipe of DeepSeek-V3, arXiv:2412.19437,
    cut in half, which Qi et al. of Sea AI Lab proposed, so that one copy of the parameters will do.
    """
    full = max(num_microbatches, 2 * pp_size)
    programs = tuple(_program(pp_size, full, rank) for rank in range(pp_size))
    return without_the_rest(Plan("dualpipe-v", full, v(pp_size), programs), num_microbatches)


def _program(pp_size: int, num_microbatches: int, rank: int) -> Program:
    """For num_microbatches >= 2 * pp_size; small letters are the second chunk."""
    p, m, r = pp_size, num_microbatches, rank
    row = TwoChunks(p, r)
    row.run("F", times=2 * (p - 1 - r))
    row.run("F f", times=r + 1)
    row.run("i * f", times=p - 1 - r)
    row.run("F b f B", times=m - 2 * p + r + 1)
    row.run("b f B", times=p - 1 - r)
    # The last r + 1 pairs of backwards: from the middle of them on in halves.
    backwards = ["b", "B"] * (r + 1)
    row.run(" ".join(backwards[: r + 1]))
    row.run(" ".join(backwards[r + 1 :]).replace("b", "i").replace("B", "I"))
    row.run("* I", times=p - 1 - r)
    row.run("*", times=r + 1)
    return row.program


def _makespan(sizes: Sizes, costs: ShareCosts) -> float:
    p, m, _ = sizes
    forward, inputs, weights, message = costs
    wait = (p - 1) * ((forward + inputs - weights) / 2 + 4 * message)
    # With many ranks, the difference between I and F adds up to more than half a forward hides.
    late = (p - 1) * ((inputs - forward) / 2 + 2 * message) - forward / 2
    return m * costs.work + wait + max(0.0, late)


def _exact(sizes: Sizes, costs: ShareCosts) -> bool:
    forward, inputs, weights, message = costs
    enough = sizes.num_microbatches >= 2 * sizes.pp_size
    return enough and weights <= forward <= inputs and 4 * message <= weights


def _peak(sizes: Sizes, rank: int) -> float:
    p, m, _ = sizes
    return (min(m, 2 * p - rank) + min(m, rank + 1)) / 2


DUALPIPE_V = ScheduleFamily(
    name="dualpipe-v",
    build=lambda sizes: dual_pipe_v(sizes.pp_size, sizes.num_microbatches),
    placement="v",
    chunks=2,
    makespan=_makespan,
    makespan_formula="m * (F + I + W) + (p - 1) * ((F + I - W) / 2 + 4 * c) + "
    "max(0, (p - 1) * ((I - F) / 2 + 2 * c) - F / 2)",
    exact=_exact,
    exact_formula="m >= 2 * p and W <= F <= I and 4 * c <= W",
    peak=_peak,
    peak_formula="(min(m, 2 * p - r) + min(m, r + 1)) / 2",
    source="arXiv:2412.19437",
)
