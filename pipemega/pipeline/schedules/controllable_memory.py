"""V-Half, V-Min and 1F1B-V: V placements that hold half, a third or two thirds of 1F1B's memory.

Each is a building block, repeated and moved together; `slots.py` says how.
"""

from collections.abc import Callable, Sequence

from pipemega.pipeline.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.schedules.family import ScheduleFamily, ShareCosts
from pipemega.pipeline.schedules.placement import v
from pipemega.pipeline.schedules.slots import (
    BACKWARD_DOWN,
    BACKWARD_UP,
    FORWARD_DOWN,
    FORWARD_UP,
    Slots,
    Step,
    pull_forward,
    push_together,
    repeat,
    weights_in_gaps,
)


def v_half(pp_size: int, num_microbatches: int) -> Plan:
    """Forward at half speed down and full speed up, backward likewise: half of 1F1B's memory.

    pp_size=3, num_microbatches=3, all steps equally long:

        rank 0   F0 F1 F2 .. .. f0 i0 w0 f1 i1 w1 .. I0 W0 .. f2 i2 I1 w2 W1 .. I2 W2
        rank 1   .. F0 F1 .. f0 .. f1 i0 w0 F2 i1 I0 w1 W0 f2 .. I1 i2 w2 W1 I2 W2 ..
        rank 2   .. .. F0 f0 F1 f1 .. .. i0 w0 I0 W0 F2 f2 i1 I1 w1 W1 i2 I2 w2 W2 ..

    Holds pp_size // 2 + 1 micro-batches where 1F1B holds pp_size, and less of a bubble. Where F, I
    and W are unequal it waits once per micro-batch, as it does for each message.

    Source: Qi et al. 2024, arXiv:2405.15362 ("V-Half").
    """
    p = pp_size
    # Without it two steps of a rank would fall into one slot of the six.
    shift = 3 if p % 2 == 0 else 0
    blocks = [
        (2 * r, 3 * p - r - 2, 3 * p + shift + 2 * r - 1, 6 * p + shift - r - 2) for r in range(p)
    ]
    return _in_halves("v-half", blocks, num_microbatches)


def v_min(pp_size: int, num_microbatches: int) -> Plan:
    """All four legs at full speed, so that a micro-batch is let go soonest: a third of the memory.

    pp_size=3, num_microbatches=3, all steps equally long:

        rank 0   F0 F1 F2 .. .. f0 i0 w0 f1 i1 w1 I0 W0 .. .. .. .. f2 I1 i2 w2 W1 .. .. I2 W2
        rank 1   .. F0 F1 .. f0 .. f1 i0 w0 .. I0 W0 i1 F2 w1 .. f2 I1 W1 .. i2 w2 .. I2 W2 ..
        rank 2   .. .. F0 f0 F1 f1 .. .. i0 I0 w0 W0 .. i1 F2 f2 I1 w1 W1 .. .. i2 I2 w2 W2 ..

    Holds (pp_size + 4) // 3 micro-batches where 1F1B holds pp_size. Where F, I and W are unequal
    it waits once per micro-batch, as it does for each message.

    Source: Qi et al. 2024, arXiv:2405.15362 ("V-Min").
    """
    p = pp_size
    shift = 2 if p % 3 == 0 else 0  # as in `v_half`
    blocks = [(r, 2 * p - r - 1, 2 * p + shift + r, 4 * p + shift - r - 1) for r in range(p)]
    return _in_halves("v-min", blocks, num_microbatches)


def one_f_one_b_v(pp_size: int, num_microbatches: int) -> Plan:
    """1F1B in a v, with whole backwards: two thirds of the memory of 1F1B.

    pp_size=2, num_microbatches=3, backward as long as forward:

        rank 0   F0 F1 F2 f0 b0 f1 b1 B0 .. f2 b2 B1 .. B2
        rank 1   .. F0 f0 F1 f1 b0 B0 F2 f2 b1 B1 b2 B2 ..

    Holds 2 * pp_size // 3 + 1 micro-batches where 1F1B holds pp_size. Backward is taken to be
    twice as long as forward; where it is not, and for each message, it waits once per micro-batch.

    Source: Qi et al. 2024, arXiv:2405.15362 ("1F1B-V").
    """
    ranks = repeat(_whole_backward_blocks(pp_size), num_microbatches)
    ranks = pull_forward(ranks, (1, 1, 2, 2), lambda step: True)
    return _plan("1f1b-v", num_microbatches, ranks, Kind.BACKWARD)


def _whole_backward_blocks(pp_size: int) -> list[list[int]]:
    """Forward down and up without a pause; backward, of two slots, in runs of three with a pause
    of three slots between them, so that no two steps of a rank fall into one slot of the six."""
    p = pp_size
    blocks = [[r, 2 * p - 1 - r] for r in range(p)]
    slot = 2 * p + (3 if p % 3 == 0 else 0)
    first_run = (p + 1) % 3 + 1
    for place, rank in enumerate([*range(p), *reversed(range(p))], start=1):
        blocks[rank].append(slot)
        slot += 5 if (place - first_run) % 3 == 0 else 2
    return blocks


def _in_halves(name: str, blocks: Sequence[Sequence[int]], num_microbatches: int) -> Plan:
    """The repeated blocks, moved together with their weight halves in the first gaps; then, in the
    cool-down alone, once more, with weight halves in whichever gaps are left."""
    ranks = _with_weights(repeat(blocks, num_microbatches))
    ranks = pull_forward(ranks, (1,) * 5, _outside_of_steady_state(num_microbatches))
    ranks = _without_weights(push_together(ranks))
    cool_down = _outside_of_steady_state(num_microbatches, warm_up=False)
    ranks = pull_forward(ranks, (1,) * 4, cool_down, weights_fill_gaps=True)
    ranks = _without_weights(push_together(_with_weights(ranks)))
    return _plan(name, num_microbatches, ranks, Kind.BACKWARD_INPUT)


def _with_weights(ranks: Sequence[Slots]) -> list[Slots]:
    return [[*slots, [slot for slot, _ in weights_in_gaps(slots)]] for slots in ranks]


def _without_weights(ranks: Sequence[Slots]) -> list[Slots]:
    return [slots[:-1] for slots in ranks]


def _outside_of_steady_state(num_microbatches: int, warm_up: bool = True) -> Callable[[Step], bool]:
    """Whether a step is of the cool-down, or, if `warm_up`, of the warm-up. For steps in order.

    The steady state is from the first micro-batch that has come all the way back to the last that
    sets out.
    """
    came_back = last_set_out = False

    def outside(step: Step) -> bool:
        nonlocal came_back, last_set_out
        if not came_back:
            came_back = step.leg == BACKWARD_UP and step.rank == 0
        if not came_back:
            return warm_up
        if not last_set_out:
            last_set_out = step.leg == FORWARD_DOWN and step.place == num_microbatches - 1
            return False
        return True

    return outside


def _plan(name: str, num_microbatches: int, ranks: Sequence[Slots], backward: Kind) -> Plan:
    """The steps of all ranks by slot; halves of a backward get their weight halves in the gaps."""
    num_ranks = len(ranks)

    def program(rank: int) -> Program:
        stage_of_leg = {
            FORWARD_DOWN: rank,
            FORWARD_UP: 2 * num_ranks - 1 - rank,
            BACKWARD_DOWN: 2 * num_ranks - 1 - rank,
            BACKWARD_UP: rank,
        }
        steps = [
            (slot, Instruction(Kind.FORWARD if leg <= FORWARD_UP else backward, stage, microbatch))
            for leg, stage in stage_of_leg.items()
            for microbatch, slot in enumerate(ranks[rank][leg])
        ]
        if backward is Kind.BACKWARD_INPUT:
            next_of_leg = {BACKWARD_DOWN: 0, BACKWARD_UP: 0}
            for slot, leg in weights_in_gaps(ranks[rank]):
                microbatch, stage = next_of_leg[leg], stage_of_leg[leg]
                steps.append((slot, Instruction(Kind.BACKWARD_WEIGHT, stage, microbatch)))
                next_of_leg[leg] += 1
        return tuple(step for _, step in sorted(steps, key=lambda timed: timed[0]))

    return Plan(name, num_microbatches, v(num_ranks), tuple(map(program, range(num_ranks))))


def _even(costs: ShareCosts) -> bool:
    return costs.forward == costs.backward_input == costs.backward_weight and costs.message == 0


V_HALF = ScheduleFamily(
    name="v-half",
    build=lambda sizes: v_half(sizes.pp_size, sizes.num_microbatches),
    placement="v",
    chunks=2,
    makespan=lambda sizes, costs: (
        (3 * sizes.num_microbatches + 3 * ((sizes.pp_size - 1) // 2) - 0.5) * costs.forward
    ),
    makespan_formula="(3 * m + 3 * ((p - 1) // 2) - 0.5) * F",
    exact=lambda sizes, costs: (
        sizes.pp_size >= 3 and sizes.num_microbatches >= 2 * sizes.pp_size and _even(costs)
    ),
    exact_formula="p >= 3 and m >= 2 * p and F == I == W and c == 0",
    peak=lambda sizes, rank: min(sizes.num_microbatches, sizes.pp_size // 2 + 1),
    peak_formula="min(m, p // 2 + 1)",
    source="arXiv:2405.15362",
)

V_MIN = ScheduleFamily(
    name="v-min",
    build=lambda sizes: v_min(sizes.pp_size, sizes.num_microbatches),
    placement="v",
    chunks=2,
    makespan=lambda sizes, costs: (
        (3 * sizes.num_microbatches + 2 * sizes.pp_size - 2.5 - (sizes.pp_size % 3 == 0))
        * costs.forward
    ),
    makespan_formula="(3 * m + 2 * p - 2.5 - (p % 3 == 0)) * F",
    exact=lambda sizes, costs: (
        sizes.pp_size >= 2 and sizes.num_microbatches > sizes.pp_size and _even(costs)
    ),
    exact_formula="p >= 2 and m > p and F == I == W and c == 0",
    peak=lambda sizes, rank: min(sizes.num_microbatches, (sizes.pp_size + 4) // 3),
    peak_formula="min(m, (p + 4) // 3)",
    source="arXiv:2405.15362",
)

ONE_F_ONE_B_V = ScheduleFamily(
    name="1f1b-v",
    build=lambda sizes: one_f_one_b_v(sizes.pp_size, sizes.num_microbatches),
    placement="v",
    chunks=2,
    makespan=lambda sizes, costs: (
        (
            3 * sizes.num_microbatches
            + 7.5 * ((sizes.pp_size - 1) // 3)
            + 1.5 * (sizes.pp_size % 3 == 2)
        )
        * costs.forward
    ),
    makespan_formula="(3 * m + 7.5 * ((p - 1) // 3) + 1.5 * (p % 3 == 2)) * F",
    exact=lambda sizes, costs: (
        sizes.pp_size % 3 != 0
        and sizes.pp_size != 2
        and sizes.num_microbatches >= sizes.pp_size
        and _even(costs)
    ),
    exact_formula="p % 3 != 0 and p != 2 and m >= p and F == I == W and c == 0",
    peak=lambda sizes, rank: min(sizes.num_microbatches, 2 * sizes.pp_size // 3 + 1),
    peak_formula="min(m, 2 * p // 3 + 1)",
    source="arXiv:2405.15362",
)
