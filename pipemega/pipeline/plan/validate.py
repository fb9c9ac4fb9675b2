"""Validation: the rules that every plan must keep, proven before a process starts.

1.  Every stage is on an existing rank, and every instruction is on the rank of its stage.
2.  Every stage runs each micro-batch forward exactly once, and backward exactly once: as one B, or
    as one I and one W. A plan without any backward is an evaluation and needs none.
3.  In a lowered plan, each result that another rank uses is sent exactly once and its receive
    posted exactly once, before the step that uses it. In each channel (one direction over one stage
    boundary), receives are posted in the order of the sends.
4.  It does not deadlock. Sends are *unbuffered*: a message arrives once its send has run and its
    receive was posted, without relying on a buffer in between. Because sends are asynchronous and
    both ends of a channel have the same order (rule 3), that is as soon as the later of the two has
    run.

Duplicates are counted: a step that occurs twice is as wrong as a missing one.

`validate_messages` checks one more rule, under the transport that will carry the messages:

5.  Every message arrives, in every way that the plan is run: the first step, in which headers are
    sent, a later step, and with post-validation the discarded warm-up and its second run.

Proof that a plan with rules 1 to 4 keeps rule 5 if no queue of the transport has two channels:
order the instructions of all ranks as `execution_order` does. By induction, each instruction is
reached. Only a step that uses a message waits. Its send is earlier in this order (rule 4), and its
receive earlier in its program (rule 3), so both were posted, at the latest by this step (a receive
whose shapes are not known yet is posted when its header arrives, which is sent ahead of the message
on the same channel). All messages ahead of it in the queue are earlier ones of its channel. Both
ranks posted them in the same order (rule 3), before this one, so they have arrived.

With tags no queue has two channels; without, `channels.connections` makes it so. Rule 5 does not
assume it: it runs the operations of the transport through its queues.

Report of the position of each pipeline rank when a rank does not answer.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.channels import (
    UNLIMITED,
    Channel,
    Hardware,
    MessageOperations,
    MessageOrder,
    MessageQueues,
    ShapeMode,
    channels,
    queues_of,
)
from pipemega.pipeline.plan.instructions import (
    TRANSFER_OF_RECEIVE,
    VOCABULARY_PASSES,
    Instruction,
    Kind,
    Plan,
)
from pipemega.pipeline.plan.lowering import excerpt, execution_order, warmup_cut

_COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def validate(plan: Plan) -> Plan:
    """Return `plan` unchanged if it keeps rules 1 to 4; messages are checked if it is lowered.

    Raises:
        ScheduleError: names the instruction and the rank, and shows the position.
    """
    _check_places(plan)
    _check_counts(plan)
    _check_vocabulary(plan)
    if plan.is_lowered:
        _check_messages(plan)
        _check_channels(plan)
    for _ in execution_order(plan):
        pass
    return plan


def validate_messages(
    plan: Plan,
    order: MessageOrder,
    shapes: ShapeMode = "cached",
    *,
    discards: bool = False,
    queue_of: Mapping[Channel, Hashable] | None = None,
    hardware: Hardware = UNLIMITED,
) -> Plan:
    """Return the lowered `plan` unchanged if it keeps rules 1 to 5.

    Args:
        order: how the backend separates the messages of different channels.
        shapes: when the transport sends headers.
        discards: the warm-up may be discarded and run again (post-validation).
        queue_of: the queue of each channel; None: the queue that the transport uses for `order`.
        hardware: how a GPU runs the messages; without effect with tags.

    Raises:
        ScheduleError: says which ranks wait for each other, and shows their positions.
    """
    validate(plan)
    if not channels(plan.rank_of_stage, plan.transfers):
        return plan
    assert plan.is_lowered, f"plan {plan.name!r} has no messages yet"
    cut = warmup_cut(plan) if discards and not plan.forward_only else None
    runs = plan if cut is None else cut.plan
    queue_of = queue_of or queues_of(plan.rank_of_stage, order, plan.transfers)
    if order == "tags":
        hardware = UNLIMITED
    queues = MessageQueues(runs, queue_of, hardware)
    ranks = [MessageOperations(runs, shapes, hardware.loads) for _ in range(plan.num_ranks)]

    def run_step() -> None:
        queues.run([rank.step(program) for rank, program in zip(ranks, runs.programs, strict=True)])
        queues.end_step()

    run_step()
    if cut is not None:
        heads = [program[:stop] for program, stop in zip(runs.programs, cut.stop, strict=True)]
        queues.run([rank.program(head) for rank, head in zip(ranks, heads, strict=True)])
        parts = zip(ranks, cut.stop, cut.unread, strict=True)
        queues.run([rank.discard(stop, unread) for rank, stop, unread in parts])
        queues.end_step()
    if cut is not None or (shapes == "cached" and not plan.forward_only):
        run_step()  # with `cached` without headers
    return plan


def _check_places(plan: Plan) -> None:
    """Check rule 1, and the range of stages and micro-batches."""
    if plan.num_microbatches < 1 or plan.num_stages < 1:
        _fail(
            plan,
            f"{plan.num_microbatches} micro-batches and {plan.num_stages} stages; both must be at "
            f"least 1",
        )
    for stage, rank in enumerate(plan.rank_of_stage):
        if not 0 <= rank < plan.num_ranks:
            _fail(plan, f"stage {stage} is on rank {rank}, but there are {plan.num_ranks} ranks")
    for rank in range(plan.num_ranks):
        if not plan.stages_of(rank):
            _fail(plan, f"rank {rank} holds no stage; rank_of_stage is {list(plan.rank_of_stage)}")
    for rank, program in enumerate(plan.programs):
        for at, step in enumerate(program):
            if step.kind.has_shard:
                if step.stage != rank:
                    problem = (
                        f"{step} is on rank {rank}, but it is for the shard of rank {step.stage}"
                    )
                    _fail(plan, problem, {rank: at})
            elif not 0 <= step.stage < plan.num_stages:
                _fail(plan, f"{step}: the stages are 0 to {plan.num_stages - 1}", {rank: at})
            if not 0 <= step.microbatch < plan.num_microbatches:
                last = plan.num_microbatches - 1
                _fail(plan, f"{step}: the micro-batches are 0 to {last}", {rank: at})
            if (owner := plan.rank_of(step)) != rank:
                problem = f"{step} is on rank {rank}, but stage {step.stage} is on rank {owner}"
                _fail(plan, problem, {rank: at})


def _check_counts(plan: Plan) -> None:
    """Check rule 2."""
    count = Counter(plan.steps())
    valid_backward = [[0, 0, 0]] if plan.forward_only else [[1, 0, 0], [0, 1, 1]]
    for stage in range(plan.num_stages):
        for m in range(plan.num_microbatches):
            forward, *backward = (count[Instruction(kind, stage, m)] for kind in _COMPUTE)
            if forward != 1:
                problem = f"F{m}@{stage} occurs {_times(forward)} instead of once"
                _fail(plan, problem, _second(plan, Instruction(Kind.FORWARD, stage, m)))
            if backward not in valid_backward:
                whole, inputs, weights = backward
                doubled = (Instruction(kind, stage, m) for kind in _COMPUTE[1:])
                _fail(
                    plan,
                    f"micro-batch {m} at stage {stage} has {whole} B, {inputs} I and {weights} W; "
                    f"its backward must be one B, or one I and one W",
                    next((_second(plan, step) for step in doubled if count[step] > 1), None),
                )


def _check_vocabulary(plan: Plan) -> None:
    """Check rule 2 for the passes of vocabulary parallelism: all of them, or none."""
    if not plan.has_vocabulary:
        return
    last, shards = plan.num_stages - 1, range(plan.num_ranks)
    passes: tuple[Kind, ...] = VOCABULARY_PASSES
    if plan.forward_only:
        passes = (Kind.EMBED, Kind.OUTPUT, Kind.LOSS)
    count = Counter(step for step in plan.steps() if step.kind in VOCABULARY_PASSES)
    expected = {
        Instruction(kind, place, m)
        for kind in passes
        for place in (shards if kind.has_shard else (last,))
        for m in range(plan.num_microbatches)
    }
    for step in sorted(expected | set(count), key=str):
        if count[step] != int(step in expected):
            wanted = "instead of once" if step in expected else "but is not a pass of this plan"
            _fail(plan, f"{step} occurs {_times(count[step])} {wanted}", _second(plan, step))


def _check_messages(plan: Plan) -> None:
    """Check rule 3: each send and receive once, receives before their use."""
    count = Counter(step for step in plan.steps() if step.kind.is_message)
    expected = _expected_messages(plan)
    for step in [*expected, *count]:
        if count[step] != int(step in expected):
            wanted = "instead of once" if step in expected else "but no other rank uses its result"
            _fail(plan, f"{step} occurs {_times(count[step])} {wanted}", _second(plan, step))
    for rank, program in enumerate(plan.programs):
        position = {step: at for at, step in enumerate(program)}
        for receive, at in position.items():
            if not receive.kind.is_receive:
                continue
            kinds = TRANSFER_OF_RECEIVE[receive.kind].users
            users = (receive._replace(kind=kind) for kind in kinds)
            user = next(user for user in users if user in position)
            if position[user] < at:
                problem = f"{user} uses the message of {receive}, but comes before it"
                _fail(plan, problem, {rank: at})


def _expected_messages(plan: Plan) -> dict[Instruction, None]:
    """Return the sends and receives that the plan needs, grouped by transfer."""
    expected: dict[Instruction, None] = {}
    for transfer in plan.transfers:
        for kind, sends in ((transfer.send, True), (transfer.receive, False)):
            for place in range(plan.num_ranks if kind.has_shard else plan.num_stages):
                if plan.peers(transfer, place, sends=sends):
                    steps = (Instruction(kind, place, m) for m in range(plan.num_microbatches))
                    expected |= dict.fromkeys(steps)
    return expected


def _check_channels(plan: Plan) -> None:
    """Check rule 3: both ends of a channel have the same order."""
    ends: dict[tuple[Kind, int], list[Instruction]] = defaultdict(list)
    for step in plan.steps():
        if step.kind.is_message:
            ends[step.kind, step.stage].append(step)
    for (kind, stage), receives in list(ends.items()):
        if not kind.is_receive:
            continue
        transfer = TRANSFER_OF_RECEIVE[kind]
        for source in plan.peers(transfer, stage, sends=False):
            _check_order(plan, ends[transfer.send, source], receives)


def _check_order(plan: Plan, sends: list[Instruction], receives: list[Instruction]) -> None:
    for send, receive in zip(sends, receives, strict=True):
        if send.microbatch != receive.microbatch:
            sender, receiver = (plan.rank_of(step) for step in (send, receive))
            _fail(
                plan,
                f"rank {sender} sends {send} when rank {receiver} receives {receive}: "
                f"sends and receives of a channel must have the same order",
                {
                    sender: plan.programs[sender].index(send),
                    receiver: plan.programs[receiver].index(receive),
                },
            )


def _second(plan: Plan, step: Instruction) -> dict[int, int]:
    """Return {rank: position} of the second occurrence of `step`; empty if there is none."""
    rank = plan.rank_of(step)
    places = [at for at, found in enumerate(plan.programs[rank]) if found == step]
    return {rank: places[1]} if len(places) > 1 else {}


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _fail(plan: Plan, problem: str, marks: Mapping[int, int] | None = None) -> NoReturn:
    raise ScheduleError(f"schedule {plan.name!r}: {problem}\n{excerpt(plan, marks or {})}")


@dataclass(frozen=True)
class PlanPosition:
    """Position of one rank in a plan.

    Args:
        plan: the lowered plan that is run.
        ranks: the global rank of each pipeline rank.
        rank: the pipeline rank.
        at: index of its current instruction; the length of its program if it has finished.
    """

    plan: Plan
    ranks: tuple[int, ...]
    rank: int
    at: int

    @property
    def table(self) -> str:
        """Part of the plan as text, with an arrow at the position."""
        return excerpt(self.plan, {self.rank: self.at})


def describe_deadlock(place: PlanPosition, at: Mapping[int, int], silent: Collection[int]) -> str:
    """Return the positions of all ranks in the plan, and a line for each rank that is silent.

        rank 1 has finished SA0@1 but not SA1@1, which rank 2 waits for: it is at one of
        F1@1 SA1@1
            rank 0   F0@0 SA0@0 > F1@0 ..
            ...

    Args:
        place: the position of any rank of the pipeline; it has the plan.
        at: global rank -> position in its program, of the ranks that have reported one.
        silent: the global ranks that have not reported.
    """
    plan, global_ranks = place.plan, place.ranks
    known = {r: at[g] for r, g in enumerate(global_ranks) if g in at}
    marks, lines = dict(known), []
    for rank in range(plan.num_ranks):
        if global_ranks[rank] in silent:
            done, missing = _last_progress(plan, rank, known)
            marks[rank] = done + 1
            lines.append(_progress_line(plan, rank, done, missing, global_ranks))
    if global_ranks != tuple(range(plan.num_ranks)):
        lines.append(f"pipeline ranks 0 to {plan.num_ranks - 1} are {list(global_ranks)}")
    return "\n".join([*(f"  {line}" for line in lines), excerpt(plan, marks)])


def _last_progress(
    plan: Plan, silent: int, known: Mapping[int, int]
) -> tuple[int, tuple[int, int] | None]:
    """Return what is known of a silent rank from the positions of the others.

    Returns:
        the last position of its program whose result another rank has used, -1 for none; and the
        first later position whose result another rank waits for, with that pipeline rank.
    """
    position = {step: at for at, step in enumerate(plan.programs[silent])}
    done, waited = -1, list[tuple[int, int]]()
    for rank, at in known.items():
        program = plan.programs[rank]
        done = max([done, *_positions(plan, program[:at], position)])
        waited += [(need, rank) for need in _positions(plan, program[at : at + 1], position)]
    # The missing step itself may have finished, with its message lost.
    return done, min((w for w in waited if w[0] > done), default=None)


def _positions(
    plan: Plan, steps: Iterable[Instruction], position: Mapping[Instruction, int]
) -> list[int]:
    needs = (need for step in steps for need in plan.all_needs(step))
    return [position[need] for need in needs if need in position]


def _progress_line(
    plan: Plan,
    rank: int,
    done: int,
    missing: tuple[int, int] | None,
    global_ranks: tuple[int, ...],
    most: int = 12,
) -> str:
    program, name = plan.programs[rank], f"rank {global_ranks[rank]}"
    progress = f"has finished {program[done]}" if done >= 0 else "has sent nothing in this step"
    if missing is None:
        return f"{name} {progress}; no other rank waits for it"
    need, waiter = missing
    pending = [str(step) for step in program[done + 1 : need + 1]]
    if len(pending) > most:
        pending[most // 2 : -most // 2] = [".."]
    return (
        f"{name} {progress} but not {program[need]}, which rank {global_ranks[waiter]} waits for: "
        f"it is at one of {' '.join(pending)}"
    )
