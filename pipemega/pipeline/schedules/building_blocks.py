"""Building blocks of V placements: repeated every six slots, then moved together.

A micro-batch passes through the two chunks of a v in four legs: forward down the ranks (leg 0),
forward up (1), backward down (2), backward up (3). Time is counted in slots of one unit. A
*building block* gives the slot in which each rank runs each leg of one micro-batch; the block of
the next micro-batch starts `INTERVAL` slots later. The time that a block takes from forward to
backward determines the memory of the schedule.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

INTERVAL: Final = 6
FORWARD_DOWN, FORWARD_UP, BACKWARD_DOWN, BACKWARD_UP, WEIGHT = range(5)

Slots = list[list[int]]  # slots[leg][k]: the slot of the k-th step of a leg on one rank
Line = list[int | None]  # line[slot]: the leg that one rank runs in the slot, or None

_SECOND_HALF: Final = 5  # the second slot of a step that takes two


class Step(NamedTuple):
    """One step; the k-th of its leg (`place`) on its rank. Sorts by slot, then by rank."""

    slot: int
    rank: int
    leg: int
    place: int


def repeat(blocks: Sequence[Sequence[int]], num_microbatches: int) -> list[Slots]:
    """Return the slots of each rank when its block is repeated for every micro-batch."""
    starts = range(0, INTERVAL * num_microbatches, INTERVAL)
    return [[[offset + start for start in starts] for offset in block] for block in blocks]


def sort_by_slot(ranks: Sequence[Slots]) -> list[Step]:
    """Return all steps in the order of their slots."""
    return sorted(
        Step(slot, rank, leg, place)
        for rank, slots in enumerate(ranks)
        for leg, row in enumerate(slots)
        for place, slot in enumerate(row)
    )


def fill_gaps_with_weights(slots: Slots) -> list[tuple[int, int]]:
    """Return where one rank runs its W steps: (slot, leg of the I), in order.

    Each idle slot takes one W whose I has run, those of leg 2 first; the rest follow at the end.
    """
    legs = {slot: leg for leg, row in enumerate(slots[:WEIGHT]) for slot in row}
    backward = (BACKWARD_DOWN, BACKWARD_UP)
    ready = dict.fromkeys(backward, 0)
    weights: list[tuple[int, int]] = []
    slot, total = 0, sum(len(slots[leg]) for leg in backward)
    while len(weights) < total:
        if slot in legs:
            if (leg := legs[slot]) in ready:
                ready[leg] += 1
        elif (leg := next((leg for leg in backward if ready[leg]), -1)) in ready:
            ready[leg] -= 1
            weights.append((slot, leg))
        slot += 1
    return weights


def compact(ranks: Sequence[Slots]) -> list[Slots]:
    """Keep the order of every rank and move each step to the first slot that its inputs allow."""
    moved: list[Slots] = [[[] for _ in slots] for slots in ranks]
    free = [0] * len(ranks)
    for _, rank, leg, place in sort_by_slot(ranks):
        slot = max(free[rank], 1 + _last_input(moved, rank, leg, place))
        moved[rank][leg].append(slot)
        free[rank] = slot + 1
    return moved


def move_earlier(
    ranks: Sequence[Slots],
    lengths: Sequence[int],
    may_move: Callable[[Step], bool],
    weights_fill_gaps: bool = False,
) -> list[Slots]:
    """Move each step to the earliest idle slot after its inputs that keeps the memory limit.

    The limit for every rank is the highest memory of any rank before the move.

    Args:
        ranks: the slots of each rank; legs 0 to 3, and optionally 4 for W.
        lengths: slots that a step of each leg takes, 1 or 2. Memory is released by W, or in the
            second slot of a backward that takes two.
        may_move: called for each step, in order; returns whether the step may move.
        weights_fill_gaps: count memory as if each idle slot ran a W whose I has run.
    """
    ranks = [[list(row) for row in slots] for slots in ranks]
    lines = [_line(slots, lengths) for slots in ranks]
    limit = max(_peak(line, weights_fill_gaps) for line in lines)
    inputs: list[list[int]] = [[] for _ in ranks]  # slots of the I steps seen so far
    for step in sort_by_slot(ranks):
        slot, rank, leg, place = step
        if may_move(step):
            first = 1 + _last_input(ranks, rank, leg, place, lengths)
            if leg == WEIGHT:
                first = max(first, 1 + sorted(inputs[rank])[place])
            slot = _earliest(lines[rank], step, first, lengths[leg], limit, weights_fill_gaps)
            ranks[rank][leg][place] = slot
        if leg in (BACKWARD_DOWN, BACKWARD_UP):
            inputs[rank].append(slot)
    return ranks


def _last_input(
    ranks: Sequence[Slots], rank: int, leg: int, place: int, lengths: Sequence[int] = (1,) * 5
) -> int:
    """Return the last slot of the inputs of a step and of the previous step of its leg; -1: none.

    For W only the latter.
    """
    last = ranks[rank][leg][place - 1] + lengths[leg] - 1 if place else -1
    if leg == WEIGHT:
        return last
    before = rank - 1 if leg in (FORWARD_DOWN, BACKWARD_DOWN) else rank + 1
    if 0 <= before < len(ranks):
        return max(last, ranks[before][leg][place] + lengths[leg] - 1)
    if leg == FORWARD_DOWN:
        return last
    return max(last, ranks[rank][leg - 1][place] + lengths[leg - 1] - 1)


def _line(slots: Slots, lengths: Sequence[int]) -> Line:
    line: Line = [None] * (2 + max(slot for row in slots for slot in row))
    for leg, row in enumerate(slots):
        for slot in row:
            line[slot] = leg
            if lengths[leg] == 2:
                line[slot + 1] = _SECOND_HALF
    return line


def _peak(line: Line, weights_fill_gaps: bool) -> int:
    held = most = ready = 0
    for leg in line:
        if leg is None:
            if weights_fill_gaps and ready:
                ready -= 1
                held -= 1
        elif leg <= FORWARD_UP:
            held += 1
            most = max(most, held)
        elif leg <= BACKWARD_UP:
            ready += 1
        else:
            held -= 1
    return most


def _earliest(
    line: Line, step: Step, first: int, length: int, limit: int, weights_fill_gaps: bool
) -> int:
    """Move `step` in `line` to the earliest possible slot from `first` on; return that slot."""
    here, leg = step.slot, step.leg
    content, idle = line[here : here + length], [None] * length
    line[here : here + length] = idle
    for slot in range(first, here):
        if line[slot : slot + length] != idle:
            continue
        line[slot : slot + length] = content
        takes_more = leg <= FORWARD_UP or weights_fill_gaps
        if not takes_more or _peak(line, weights_fill_gaps) <= limit:
            return slot
        line[slot : slot + length] = idle
    line[here : here + length] = content
    return here
