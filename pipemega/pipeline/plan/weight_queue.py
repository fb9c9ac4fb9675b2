"""Limits the memory that a rank holds between I and W, by running W earlier.

I of a micro-batch queues what W needs. A rank may run a queued W at any time after its I: no other
rank waits for W, and the messages do not change. In all schedules the W of a stage have the order
of its I and keep it, so gradients are added in the order of the micro-batches and the results are
bitwise equal. In a plan file with another order, a W that runs earlier changes the order of
additions.

The decision is part of the plan, so that all data and tensor ranks run the same instructions in
the same order, and the plan that runs is the one that was validated, simulated and drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program


def limit_weight_queue(plan: Plan, kept: Sequence[float], limit: float) -> Plan:
    """Return the compute steps of `plan` with queues of W that never hold more than `limit`.

    An I that would exceed the limit comes after the oldest W of the queue. If `kept` of one I is
    more than the limit, a whole B replaces I and W.

        kept=[1], limit=1:   F0 I0 F1 I1 W0 W1   becomes   F0 I0 F1 W0 I1 W1

    Args:
        kept: memory from I to W, per stage.
        limit: for each rank, in the unit of `kept`.
    """
    plan = plan.compute_only()
    programs = tuple(tuple(_limited(program, kept, limit)) for program in plan.programs)
    return replace(plan, programs=programs)


def _limited(program: Program, kept: Sequence[float], limit: float) -> Iterator[Instruction]:
    queue: list[Instruction] = []
    held = 0.0
    for step in program:
        if step.kind is Kind.BACKWARD_INPUT:
            weight = step._replace(kind=Kind.BACKWARD_WEIGHT)
            while queue and held + kept[step.stage] > limit:
                held -= kept[queue[0].stage]
                yield queue.pop(0)
            if kept[step.stage] > limit:
                yield step._replace(kind=Kind.BACKWARD)
                continue
            queue.append(weight)
            held += kept[step.stage]
        elif step.kind is Kind.BACKWARD_WEIGHT:
            if step not in queue:
                continue  # it ran before
            queue.remove(step)
            held -= kept[step.stage]
        yield step


def queued_bytes(program: Program, kept: Sequence[float]) -> float:
    """Return the most that the queue of W of a rank holds during `program`."""
    held = most = 0.0
    for step in program:
        if step.kind is Kind.BACKWARD_INPUT:
            held += kept[step.stage]
        elif step.kind is Kind.BACKWARD_WEIGHT:
            held -= kept[step.stage]
        most = max(most, held)
    return most
