"""Lowering: adds the messages to a plan of compute steps.

Instructions of a lowered plan:

    SA m@s   send the output of stage s for micro-batch m to the rank of stage s + 1
    RA m@s   post the receive of the input of stage s for micro-batch m
    SG m@s   send the gradient of the input of stage s to the rank of stage s - 1
    RG m@s   post the receive of the gradient of the output of stage s

- A channel is one direction over one boundary between two stages, first in, first out: the k-th
  posted receive gets the k-th message sent.
- Sends and receives do not wait. A send starts the transfer and keeps the tensor alive until the
  transfer ends. A receive provides a buffer. The only place where a rank waits is the compute step
  that uses the message: F m@s waits for RA m@s, B m@s or I m@s for RG m@s.
- A receive may be posted before the stage has run the forward of that micro-batch, and before the
  message was sent, but not after the step that uses it.
- Stages on the same rank exchange tensors without a message.
- In vocabulary parallelism (`plan.instructions`), a send to the shards sends to all other ranks; a
  receive from the shards, which has the number of the stage, is a receive from each other rank.

Limits the memory that a rank holds between I and W, by running W earlier.

I of a micro-batch queues what W needs. A rank may run a queued W at any time after its I: no other
rank waits for W, and the messages do not change. In all schedules the W of a stage have the order
of its I and keep it, so gradients are added in the order of the micro-batches and the results are
bitwise equal. In a plan file with another order, a W that runs earlier changes the order of
additions.

The decision is part of the plan, so that all data and tensor ranks run the same instructions in
the same order, and the plan that runs is the one that was validated, simulated and drawn.

Splits a plan at the end of the warm-up: the forwards of each rank before its first backward.

    rank 0   F0 F1 F2 F3 |       B0 F4 B1 ..
    rank 1      F0 F1 F2 |    B0 F3 B1 ..
    rank 2         F0 F1 | B0 F2 B1 ..

The steps before the cut can be discarded and run again: no gradient has been computed, and the
warm-up of a rank needs no message from after the cut of another rank. If the first backwards alone
do not give such a cut, as in some hand-made plans, the cut is moved to an earlier position.

A possible execution order of the instructions of a plan, or a report of its deadlock.

Each rank runs its program in order, and an instruction waits for those that it needs
(`Plan.all_needs`), on the same or other ranks. Nothing else waits: sends are asynchronous, and a
receive is only posted.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan, Program


def lower(plan: Plan, ahead: int = 1) -> Plan:
    """Add messages to `plan`, with each receive posted `ahead` compute steps before its use."""
    return hoist_receives(add_messages(plan.compute_only()), ahead)


def add_messages(plan: Plan) -> Plan:
    """Insert a send after each step whose result another rank uses, and the receive on that rank.

    A receive comes right before the step that uses it. If a rank uses messages in another order
    than they were sent in, the receives of earlier messages are posted first, to keep the order of
    the channel. This cannot cause a deadlock, since posting a receive does not wait.
    """
    channels: dict[tuple[Kind, int], deque[Instruction]] = defaultdict(deque)
    listed: set[Instruction] = set()
    for step in plan.steps():
        for _, receives in _messages(plan, step):
            # A receive from all shards is in the order of the first one.
            for receive in receives:
                if receive not in listed:
                    channels[receive.kind, receive.stage].append(receive)
                    listed.add(receive)

    def program(rank: int) -> Program:
        posted: set[Instruction] = set()
        order: list[Instruction] = []
        for step in plan.programs[rank]:
            for receive in _receives(plan, step):
                channel = channels[receive.kind, receive.stage]
                # Empty if the plan is incomplete; `validate` reports what is missing.
                while channel and receive not in posted:
                    order.append(channel.popleft())
                    posted.add(order[-1])
            order.append(step)
            order += [send for send, _ in _messages(plan, step)]
        return tuple(order)

    return replace(plan, programs=tuple(map(program, range(plan.num_ranks))))


def hoist_receives(plan: Plan, ahead: int = 1) -> Plan:
    """Post every receive `ahead` compute steps earlier, so that transfers overlap with compute.

        ahead=0    F0 SA0  F1 SA1  RG0 B0  F2 SA2  RG1 B1
        ahead=1    F0 SA0  RG0 F1 SA1  B0  RG1 F2 SA2  B1

    All receives of a rank move by the same number of steps, so each channel keeps its order. They
    come after the sends of the previous step, because other ranks wait for those.
    """

    def program(steps: Program) -> Program:
        before: list[list[Instruction]] = [[]]  # receives posted before each compute step
        compute: list[Instruction] = []
        sends: list[list[Instruction]] = []  # after each compute step
        for step in steps:
            if step.kind.is_receive:
                before[max(0, len(compute) - ahead)].append(step)
            elif step.kind.is_message:
                sends[-1].append(step)
            else:
                compute.append(step)
                sends.append([])
                before.append([])
        return tuple(
            instruction
            for receives, step, after in zip(before, compute, sends, strict=False)
            for instruction in (*receives, step, *after)
        )

    return replace(plan, programs=tuple(map(program, plan.programs)))


def _messages(
    plan: Plan, step: Instruction
) -> Iterator[tuple[Instruction, tuple[Instruction, ...]]]:
    """Yield each send of the result of `step`, with its receives on other ranks."""
    for transfer in plan.transfers:
        if step.kind in transfer.after and (peers := plan.peers(transfer, step.stage, sends=True)):
            receives = (Instruction(transfer.receive, peer, step.microbatch) for peer in peers)
            yield step._replace(kind=transfer.send), tuple(receives)


def _receives(plan: Plan, step: Instruction) -> Iterator[Instruction]:
    """Yield the receives of the messages that `step` uses."""
    for transfer in plan.transfers:
        if step.kind in transfer.users and plan.peers(transfer, step.stage, sends=False):
            yield step._replace(kind=transfer.receive)


def limit_weight_queue(plan: Plan, kept: Sequence[float], limit: float) -> Plan:
    """Return the compute steps of `plan` with queues of W that never hold more than `limit`.

    An I that would exceed the limit comes after the oldest W of the queue. If `kept` of one I is
    more than the limit, a whole B replaces I and W.

        kept=[1], limit=1:   F0 I0 F1 I1 W0 W1   becomes   F0 I0 F1 W0 I1 W1

    Args:
        kept: memory from I to W, per stage.
        limit: the limit of each rank, in the unit of `kept`.
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


_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class WarmupCut:
    """A lowered plan with its cut.

    Args:
        plan: the same steps in the same order, with receives that only later steps use moved after
            the cut.
        stop: the warm-up of rank r is its first `stop[r]` instructions.
        last_forward: rank r runs no forward after its first `last_forward[r]` instructions; never
            before the cut.
        unread: the receives that rank r must still post to receive all messages that the warm-ups
            of other ranks have sent to it, in the order of each channel.
    """

    plan: Plan
    stop: tuple[int, ...]
    last_forward: tuple[int, ...]
    unread: tuple[Program, ...]


def warmup_cut(plan: Plan) -> WarmupCut:
    """Return the latest possible cut of a lowered `plan`."""
    stops = _move_back(plan, [_first_backward(program) for program in plan.programs])
    parts = [_split(program, stop) for program, stop in zip(plan.programs, stops, strict=True)]
    sent: dict[int, list[Instruction]] = defaultdict(list)  # stage that receives -> in order
    for head, _ in parts:
        for step in head:
            if step.kind is Kind.SEND_ACTIVATION:
                receive = Instruction(Kind.RECV_ACTIVATION, step.stage + 1, step.microbatch)
                sent[receive.stage].append(receive)
    return WarmupCut(
        replace(plan, programs=tuple(head + rest for head, rest in parts)),
        tuple(len(head) for head, _ in parts),
        tuple(max(len(head), _last_forward(head + rest)) for head, rest in parts),
        tuple(
            tuple(
                receive
                for stage in plan.stages_of(rank)
                for receive in sent[stage]
                if receive not in set(head)
            )
            for rank, (head, _) in enumerate(parts)
        ),
    )


def _first_backward(program: Program) -> int:
    kinds = (at for at, step in enumerate(program) if step.kind in _BACKWARD)
    return next(kinds, len(program))


def _last_forward(program: Program) -> int:
    return max((at + 1 for at, step in enumerate(program) if step.kind is Kind.FORWARD), default=0)


def _move_back(plan: Plan, stops: list[int]) -> list[int]:
    """Move the cut back until no forward before it needs one after it."""
    while True:
        heads = [program[:stop] for program, stop in zip(plan.programs, stops, strict=True)]
        done = {step for head in heads for step in head if step.kind is Kind.FORWARD}
        earlier = [_first_unmet(head, done) for head in heads]
        if earlier == stops:
            return stops
        stops = earlier


def _first_unmet(head: Program, done: Iterable[Instruction]) -> int:
    for at, step in enumerate(head):
        needs = step._replace(stage=step.stage - 1)
        if step.kind is Kind.FORWARD and step.stage > 0 and needs not in done:
            return at
    return len(head)


def _split(program: Program, stop: int) -> tuple[Program, Program]:
    """Return the warm-up and the rest of a program.

    A receive stays in the warm-up if the warm-up uses it or a later one of its channel, because
    channels are first in, first out.
    """
    used = {step for step in program[:stop] if step.kind is Kind.FORWARD}
    keep: list[Instruction] = []
    later: list[Instruction] = []
    open_channels: set[int] = set()
    for step in reversed(program[:stop]):
        if not step.kind.is_receive:
            keep.append(step)
        elif step.kind is Kind.RECV_ACTIVATION and (
            step.stage in open_channels or step._replace(kind=Kind.FORWARD) in used
        ):
            open_channels.add(step.stage)
            keep.append(step)
        else:
            later.append(step)
    return tuple(reversed(keep)), (*reversed(later), *program[stop:])


def execution_order(plan: Plan) -> Iterator[tuple[int, Instruction, tuple[Instruction, ...]]]:
    """Yield every instruction after those that it needs: (rank, instruction, needed ones).

    Takes time proportional to the number of instructions.

    Raises:
        ScheduleError: the plan deadlocks, after all possible instructions were yielded; the message
            says which ranks wait for what.
    """
    done: set[Instruction] = set()
    waiting: dict[Instruction, list[int]] = {}
    position = [0] * plan.num_ranks
    runnable = list(reversed(range(plan.num_ranks)))
    while runnable:
        rank = runnable.pop()
        program, at = plan.programs[rank], position[rank]
        while at < len(program):
            step = program[at]
            needs = plan.all_needs(step)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, step, needs
            done.add(step)
            at += 1
            if step in waiting:
                runnable += waiting.pop(step)
        position[rank] = at
    stuck = {r: at for r, at in enumerate(position) if at < len(plan.programs[r])}
    if stuck:
        needed = {rank: need for need, ranks in waiting.items() for rank in ranks}
        waits = _describe_waits(plan, stuck, needed)
        raise ScheduleError(f"schedule {plan.name!r} deadlocks:\n{waits}")


def last_gradients(program: Program) -> frozenset[Instruction]:
    """Return the last B or W of each stage of a rank; after it the gradients are complete.

    Never an I, because weights get their gradients in W.
    """
    last = {s.stage: s for s in program if s.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
    return frozenset(last.values())


def most_in_flight(program: Program) -> dict[int, int]:
    """Return stage -> most micro-batches between F and the end of backward (B or W) at one time."""
    held, most = Counter[int](), dict[int, int]()
    for step in program:
        if step.kind is Kind.FORWARD:
            held[step.stage] += 1
            most[step.stage] = max(most.get(step.stage, 0), held[step.stage])
        elif step.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held[step.stage] -= 1
    return most


class OffloadPoints(NamedTuple):
    """Where a rank moves saved activations to host memory, and back.

    Args:
        moved: the F whose saved activations are copied to the host beside the next compute step.
        fetched: a compute step -> (stage, micro-batch) of the B or I after it; beside the step, the
            activations are copied back.
    """

    moved: frozenset[Instruction]
    fetched: Mapping[Instruction, tuple[int, int]]


def offload_points(program: Program) -> OffloadPoints:
    """Return where a rank with this program moves activations.

    F0 F1 F2 B0 ..      F0: copied beside F1, copied back beside F2
    F0 F1 B0 ..         F0 stays: there is no time for two copies
    """
    steps = [step for step in program if not step.kind.is_message]
    backwards = {
        (step.stage, step.microbatch): at
        for at, step in enumerate(steps)
        if step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    }
    moved, fetched = [], {}
    for at, step in enumerate(steps):
        key = (step.stage, step.microbatch)
        if step.kind is Kind.FORWARD and backwards.get(key, 0) > at + 2:
            moved.append(step)
            fetched[steps[backwards[key] - 1]] = key
    return OffloadPoints(frozenset(moved), fetched)


def _describe_waits(plan: Plan, stuck: Mapping[int, int], needed: Mapping[int, Instruction]) -> str:
    """Describe the cycle of ranks that wait for each other, and show their part of the plan."""
    cycle = cycle_of({r: plan.rank_of(need) for r, need in needed.items()})
    waits = []
    for rank in cycle:
        step = plan.programs[rank][stuck[rank]]
        waits.append(f"  rank {rank} waits at {step} for {needed[rank]}")
    if others := len(stuck) - len(cycle):
        waits.append(f"  and {others} more ranks wait for them")
    cycle_first = {rank: stuck[rank] for rank in (*cycle, *stuck)}
    return "\n".join([*waits, excerpt(plan, cycle_first)])


def cycle_of(waits_for: Mapping[int, int]) -> list[int]:
    """Return the ranks that wait for each other, sorted; a single one if it waits for itself.

    Args:
        waits_for: stuck rank -> the rank that it waits for.
    """
    path: list[int] = []
    rank = min(waits_for)
    while rank not in path:
        path.append(rank)
        if waits_for[rank] not in waits_for:  # it has finished, without what the rank needs
            return [rank]
        rank = waits_for[rank]
    return sorted(path[path.index(rank) :])


def excerpt(plan: Plan, marks: Mapping[int, int], around: int = 5, most: int = 16) -> str:
    """Return part of the plan as text, one row per rank.

        rank 0   F0@0 F1@0 > B0@0
        rank 1   > F1@1 F0@1 B0@1 ..

    Args:
        marks: rank -> position in its program; an arrow marks it, at the end of the row if the rank
            has finished.
        around: instructions shown on either side; `..` stands for the others.
        most: number of rows; marked ranks are shown first.
    """
    chosen = list(dict.fromkeys((*marks, *range(plan.num_ranks))))[:most]
    chosen = sorted(chosen)
    rows = [f"    rank {r:<3} {_row(plan.programs[r], marks.get(r), around)}" for r in chosen]
    if plan.num_ranks > most:
        rows.append(f"    and {plan.num_ranks - most} more ranks")
    return "\n".join(rows)


def _row(program: Program, mark: int | None, around: int) -> str:
    start = max(0, (mark or 0) - around)
    stop = (mark or 0) + around + 1
    shown = enumerate(program[start:stop], start)
    words = [f"> {step}" if at == mark else str(step) for at, step in shown]
    words += [">"] * (mark == len(program))
    return " ".join([".."] * (start > 0) + words + [".."] * (stop < len(program)))
