"""V-Half, V-Min and 1F1B-V: V placements with a half, a third, two thirds of 1F1B's micro-batches.

Each schedule repeats one building block and then moves the steps together, see
`building_blocks.py`.
"""

from collections.abc import Callable, Sequence

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program
from pipemega.pipeline.schedules.building_blocks import (
    BACKWARD_DOWN,
    BACKWARD_UP,
    FORWARD_DOWN,
    FORWARD_UP,
    Formula,
    ScheduleFamily,
    Slots,
    Step,
    compact,
    fill_gaps_with_weights,
    move_earlier,
    repeat,
    v,
)


def v_half(pp_size: int, num_microbatches: int) -> Plan:
    """Forward at half speed down and full speed up, backward the same; half as many micro-batches.

    pp_size=3, num_microbatches=3, all steps equally long:

        rank 0   F0 F1 F2 .. .. f0 i0 w0 f1 i1 w1 .. I0 W0 .. f2 i2 I1 w2 W1 .. I2 W2
        rank 1   .. F0 F1 .. f0 .. f1 i0 w0 F2 i1 I0 w1 W0 f2 .. I1 i2 w2 W1 I2 W2 ..
        rank 2   .. .. F0 f0 F1 f1 .. .. i0 w0 I0 W0 F2 f2 i1 I1 w1 W1 i2 I2 w2 W2 ..

    Holds pp_size // 2 + 1 micro-batches where 1F1B holds pp_size, with a smaller bubble. If F, I
    and W differ, ranks wait once per micro-batch; also once for each message.

    Source: Qi et al. 2024, arXiv:2405.15362 ("V-Half").
    """
    p = pp_size
    # Without the shift, two steps of a rank would fall into the same slot of the interval.
    shift = 3 if p % 2 == 0 else 0
    blocks = [
        (2 * r, 3 * p - r - 2, 3 * p + shift + 2 * r - 1, 6 * p + shift - r - 2) for r in range(p)
    ]
    return _split_backward_plan("v-half", blocks, num_microbatches)


def v_min(pp_size: int, num_microbatches: int) -> Plan:
    """All passes at full speed, so that activations are released soonest: a third of 1F1B's.

    pp_size=3, num_microbatches=3, all steps equally long:

        rank 0   F0 F1 F2 .. .. f0 i0 w0 f1 i1 w1 I0 W0 .. .. .. .. f2 I1 i2 w2 W1 .. .. I2 W2
        rank 1   .. F0 F1 .. f0 .. f1 i0 w0 .. I0 W0 i1 F2 w1 .. f2 I1 W1 .. i2 w2 .. I2 W2 ..
        rank 2   .. .. F0 f0 F1 f1 .. .. i0 I0 w0 W0 .. i1 F2 f2 I1 w1 W1 .. .. i2 I2 w2 W2 ..

    Holds (pp_size + 4) // 3 micro-batches where 1F1B holds pp_size. If F, I and W differ, ranks
    wait once per micro-batch; also once for each message.

    Source: Qi et al. 2024, arXiv:2405.15362 ("V-Min").
    """
    p = pp_size
    shift = 2 if p % 3 == 0 else 0  # as in `v_half`
    blocks = [(r, 2 * p - r - 1, 2 * p + shift + r, 4 * p + shift - r - 1) for r in range(p)]
    return _split_backward_plan("v-min", blocks, num_microbatches)


def one_f_one_b_v(pp_size: int, num_microbatches: int) -> Plan:
    """1F1B in a v, with whole backwards: two thirds of the memory of 1F1B.

    pp_size=2, num_microbatches=3, backward as long as forward:

        rank 0   F0 F1 F2 f0 b0 f1 b1 B0 .. f2 b2 B1 .. B2
        rank 1   .. F0 f0 F1 f1 b0 B0 F2 f2 b1 B1 b2 B2 ..

    Holds 2 * pp_size // 3 + 1 micro-batches where 1F1B holds pp_size. The order assumes that
    backward takes twice as long as forward; otherwise ranks wait once per micro-batch, and once
    for each message.

    Source: Qi et al. 2024, arXiv:2405.15362 ("1F1B-V").
    """
    ranks = repeat(_whole_backward_blocks(pp_size), num_microbatches)
    ranks = move_earlier(ranks, (1, 1, 2, 2), lambda step: True)
    return _plan("1f1b-v", num_microbatches, ranks, Kind.BACKWARD)


def _whole_backward_blocks(pp_size: int) -> list[list[int]]:
    """Return the building blocks of 1F1B-V.

    Forward runs down and up without a pause. Backward takes two slots, in runs of three steps with
    a pause of three slots between runs, so that no two steps of a rank fall into the same slot of
    the interval.
    """
    p = pp_size
    blocks = [[r, 2 * p - 1 - r] for r in range(p)]
    slot = 2 * p + (3 if p % 3 == 0 else 0)
    first_run = (p + 1) % 3 + 1
    for place, rank in enumerate([*range(p), *reversed(range(p))], start=1):
        blocks[rank].append(slot)
        slot += 5 if (place - first_run) % 3 == 0 else 2
    return blocks


def _split_backward_plan(name: str, blocks: Sequence[Sequence[int]], num_microbatches: int) -> Plan:
    """Return the plan of repeated blocks with split backward.

    First all steps outside the steady state are moved earlier, with W in the first gaps. Then the
    steps of the cool-down are moved again, with W in the remaining gaps.
    """
    ranks = _with_weights(repeat(blocks, num_microbatches))
    ranks = move_earlier(ranks, (1,) * 5, _outside_steady_state(num_microbatches))
    ranks = _without_weights(compact(ranks))
    cool_down = _outside_steady_state(num_microbatches, warm_up=False)
    ranks = move_earlier(ranks, (1,) * 4, cool_down, weights_fill_gaps=True)
    ranks = _without_weights(compact(_with_weights(ranks)))
    return _plan(name, num_microbatches, ranks, Kind.BACKWARD_INPUT)


def _with_weights(ranks: Sequence[Slots]) -> list[Slots]:
    return [[*slots, [slot for slot, _ in fill_gaps_with_weights(slots)]] for slots in ranks]


def _without_weights(ranks: Sequence[Slots]) -> list[Slots]:
    return [slots[:-1] for slots in ranks]


def _outside_steady_state(num_microbatches: int, warm_up: bool = True) -> Callable[[Step], bool]:
    """Return whether a step is in the cool-down or, if `warm_up`, in the warm-up.

    The result must be called for all steps in order. The steady state starts when the first
    micro-batch has finished its backward and ends when the last one starts.
    """
    first_finished = last_started = False

    def outside(step: Step) -> bool:
        nonlocal first_finished, last_started
        if not first_finished:
            first_finished = step.leg == BACKWARD_UP and step.rank == 0
        if not first_finished:
            return warm_up
        if not last_started:
            last_started = step.leg == FORWARD_DOWN and step.place == num_microbatches - 1
            return False
        return True

    return outside


def _plan(name: str, num_microbatches: int, ranks: Sequence[Slots], backward: Kind) -> Plan:
    """Return the plan with all steps in the order of their slots; W fills gaps if I and W split."""
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
            for slot, leg in fill_gaps_with_weights(ranks[rank]):
                microbatch, stage = next_of_leg[leg], stage_of_leg[leg]
                steps.append((slot, Instruction(Kind.BACKWARD_WEIGHT, stage, microbatch)))
                next_of_leg[leg] += 1
        return tuple(step for _, step in sorted(steps, key=lambda timed: timed[0]))

    return Plan(name, num_microbatches, v(num_ranks), tuple(map(program, range(num_ranks))))


V_HALF = ScheduleFamily(
    name="v-half",
    build=v_half,
    placement="v",
    chunks=2,
    makespan=Formula("(3 * m + 3 * ((p - 1) // 2) - 0.5) * F"),
    exact=Formula("p >= 3 and m >= 2 * p and F == I == W and c == 0"),
    peak=Formula("min(m, p // 2 + 1)"),
    source="arXiv:2405.15362",
)

V_MIN = ScheduleFamily(
    name="v-min",
    build=v_min,
    placement="v",
    chunks=2,
    makespan=Formula("(3 * m + 2 * p - 2.5 - (p % 3 == 0)) * F"),
    exact=Formula("p >= 2 and m > p and F == I == W and c == 0"),
    peak=Formula("min(m, (p + 4) // 3)"),
    source="arXiv:2405.15362",
)

ONE_F_ONE_B_V = ScheduleFamily(
    name="1f1b-v",
    build=one_f_one_b_v,
    placement="v",
    chunks=2,
    makespan=Formula("(3 * m + 7.5 * ((p - 1) // 3) + 1.5 * (p % 3 == 2)) * F"),
    exact=Formula("p % 3 != 0 and p != 2 and m >= p and F == I == W and c == 0"),
    peak=Formula("min(m, 2 * p // 3 + 1)"),
    source="arXiv:2405.15362",
)
