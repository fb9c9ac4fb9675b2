"""DualPipeV: two chunks in a v; the forward of one chunk next to the backward of the other."""

from pipemega.pipeline.plan.instructions import Plan, Program
from pipemega.pipeline.schedules.building_blocks import (
    Formula,
    ScheduleFamily,
    TwoChunkProgram,
    keep_first,
    v,
)


def dual_pipe_v(pp_size: int, num_microbatches: int) -> Plan:
    """Forward and whole backward of the two chunks in turn; split backward at both ends.

    pp_size=2, num_microbatches=4, all steps equally long:

        rank 0   F0 F1 F2 f0 i0 w0 f1 F3 b1 f2 B0 b2 f3 B1 b3 I2 W2 I3 W3
        rank 1   .. F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 b2 B2 i3 I3 w3 W3

    Each forward is next to a backward of the other chunk, so that a rank can communicate for one
    while it computes the other. Every rank holds at most pp_size + 1/2 micro-batches.

    Built for at least 2 * pp_size micro-batches; fewer keep the order that they have in the plan
    for that many.

    Source: DualPipeV of github.com/deepseek-ai/DualPipe: DualPipe of DeepSeek-V3, arXiv:2412.19437,
    cut in half, as proposed by Qi et al. of Sea AI Lab; it needs only one copy of the parameters.
    """
    full = max(num_microbatches, 2 * pp_size)
    programs = tuple(_program(pp_size, full, rank) for rank in range(pp_size))
    return keep_first(Plan("dualpipe-v", full, v(pp_size), programs), num_microbatches)


def _program(pp_size: int, num_microbatches: int, rank: int) -> Program:
    """Build the program for num_microbatches >= 2 * pp_size; lower case is the second chunk."""
    p, m, r = pp_size, num_microbatches, rank
    row = TwoChunkProgram(p, r)
    row.run("F", times=2 * (p - 1 - r))
    row.run("F f", times=r + 1)
    row.run("i * f", times=p - 1 - r)
    row.run("F b f B", times=m - 2 * p + r + 1)
    row.run("b f B", times=p - 1 - r)
    # The second half of the last r + 1 pairs of backwards is split.
    backwards = ["b", "B"] * (r + 1)
    row.run(" ".join(backwards[: r + 1]))
    row.run(" ".join(backwards[r + 1 :]).replace("b", "i").replace("B", "I"))
    row.run("* I", times=p - 1 - r)
    row.run("*", times=r + 1)
    return row.program


DUALPIPE_V = ScheduleFamily(
    name="dualpipe-v",
    build=dual_pipe_v,
    placement="v",
    chunks=2,
    # max(..): with many ranks the sum of the differences I - F exceeds half a forward.
    makespan=Formula(
        "m * (F + I + W) + (p - 1) * ((F + I - W) / 2 + 4 * c) + "
        "max(0, (p - 1) * ((I - F) / 2 + 2 * c) - F / 2)"
    ),
    exact=Formula("m >= 2 * p and W <= F <= I and 4 * c <= W"),
    peak=Formula("(min(m, 2 * p - r) + min(m, r + 1)) / 2"),
    source="arXiv:2412.19437",
)
