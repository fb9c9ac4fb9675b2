"""Building blocks of V placements: repeated every six slots, then moved together.

A micro-batch goes through two chunks in a v in four legs: forward down the ranks (leg 0), forward
up (1), backward down (2), backward up (3). A *building block* says in which slot of unit length
each rank runs each leg of one micro-batch; the block of the next one starts `INTERVAL` slots
later. How long a block keeps a leg waiting is how much memory the schedule needs, which makes the
memory a matter of choice.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

INTERVAL: Final = 6
FORWARD_DOWN, FORWARD_UP, BACKWARD_DOWN, BACKWARD_UP, WEIGHT = range(5)

Slots = list[list[int]]  # slots[leg][k]: where one rank runs the k-th step of a leg
Line = list[int | None]  # line[slot]: the leg that one rank runs there, or None

_SECOND_HALF: Final = 5  # the second slot of a step that takes two


class Step(NamedTuple):
    """One step in its slot; in the order of the slots, then of the ranks."""

    slot: int
    rank: int
    leg: int
    place: int


def repeat(blocks: Sequence[Sequence[int]], num_microbatches: int) -> list[Slots]:
    """The block of each rank, once per micro-batch."""
    starts = range(0, INTERVAL * num_microbatches, INTERVAL)
    return [[[offset + start for start in starts] for offset in block] for block in blocks]


def in_order(ranks: Sequence[Slots]) -> list[Step]:
    """All steps by slot."""
    return sorted(
        Step(slot, rank, leg, place)
        for rank, slots in enumerate(ranks)
        for leg, row in enumerate(slots)
        for place, slot in enumerate(row)
    )


def weights_in_gaps(slots: Slots) -> list[tuple[int, int]]:
    """Where the weight halves of one rank go: (slot, leg of the input half), in order.

    Each idle slot takes one that is open, those of leg 2 first; what is left comes at the end.
    """
    legs = {slot: leg for leg, row in enumerate(slots[:WEIGHT]) for slot in row}
    backward = (BACKWARD_DOWN, BACKWARD_UP)
    opened = dict.fromkeys(backward, 0)
    weights: list[tuple[int, int]] = []
    slot, total = 0, sum(len(slots[leg]) for leg in backward)
    while len(weights) < total:
        if slot in legs:
            if (leg := legs[slot]) in opened:
                opened[leg] += 1
        elif (leg := next((leg for leg in backward if opened[leg]), -1)) in opened:
            opened[leg] -= 1
            weights.append((slot, leg))
        slot += 1
    return weights


def push_together(ranks: Sequence[Slots]) -> list[Slots]:
    """The same order on every rank, each step in the first slot that its inputs allow."""
    pushed: list[Slots] = [[[] for _ in slots] for slots in ranks]
    free = [0] * len(ranks)
    for _, rank, leg, place in in_order(ranks):
        slot = max(free[rank], 1 + _last_need(pushed, rank, leg, place))
        pushed[rank][leg].append(slot)
        free[rank] = slot + 1
    return pushed


def pull_forward(
    ranks: Sequence[Slots],
    lengths: Sequence[int],
    may_move: Callable[[Step], bool],
    weights_fill_gaps: bool = False,
) -> list[Slots]:
    """Moves each step to the earliest idle slot behind its inputs that takes no more memory.

    Memory may grow on a rank up to what the rank holds that holds the most to begin with.

    Args:
        ranks: the slots of each rank; legs 0 to 3, and perhaps 4 for weight halves.
        lengths: slots that a step of each leg takes, 1 or 2. Memory is let go in the weight half,
            or in the second slot of a backward that takes two.
        may_move: called for each step, in order.
        weights_fill_gaps: count memory as if each idle slot took an open weight half.
    """
    ranks = [[list(row) for row in slots] for slots in ranks]
    lines = [_line(slots, lengths) for slots in ranks]
    limit = max(_most_held(line, weights_fill_gaps) for line in lines)
    inputs: list[list[int]] = [[] for _ in ranks]  # slots of input halves passed so far
    for step in in_order(ranks):
        slot, rank, leg, place = step
        if may_move(step):
            first = 1 + _last_need(ranks, rank, leg, place, lengths)
            if leg == WEIGHT:
                first = max(first, 1 + sorted(inputs[rank])[place])
            slot = _earliest(lines[rank], step, first, lengths[leg], limit, weights_fill_gaps)
            ranks[rank][leg][place] = slot
        if leg in (BACKWARD_DOWN, BACKWARD_UP):
            inputs[rank].append(slot)
    return ranks


def _last_need(
    ranks: Sequence[Slots], rank: int, leg: int, place: int, lengths: Sequence[int] = (1,) * 5
) -> int:
    """The last slot of what a step needs, the one before it in its own leg included; -1: nothing.

    For weight halves only the latter.
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


def _most_held(line: Line, weights_fill_gaps: bool) -> int:
    held = most = opened = 0
    for leg in line:
        if leg is None:
            if weights_fill_gaps and opened:
                opened -= 1
                held -= 1
        elif leg <= FORWARD_UP:
            held += 1
            most = max(most, held)
        elif leg <= BACKWARD_UP:
            opened += 1
        else:
            held -= 1
    return most


def _earliest(
    line: Line, step: Step, first: int, length: int, limit: int, weights_fill_gaps: bool
) -> int:
    """Where `step` ends up: from slot `first` on, where it is; `line` is changed accordingly."""
    here, leg = step.slot, step.leg
    content, idle = line[here : here + length], [None] * length
    line[here : here + length] = idle
    for slot in range(first, here):
        if line[slot : slot + length] != idle:
            continue
        line[slot : slot + length] = content
        takes_more = leg <= FORWARD_UP or weights_fill_gaps
        if not takes_more or _most_held(line, weights_fill_gaps) <= limit:
            return slot
        line[slot : slot + length] = idle
    line[here : here + length] = content
    return here
