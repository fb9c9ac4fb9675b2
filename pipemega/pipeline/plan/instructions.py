"""Instructions and plans, the data that describes a pipeline schedule.  No torch, no processes.

    rank         position along the pipeline axis of the mesh
    stage        position in the model, from 0; a rank may hold several stages
    micro-batch  index of a slice of the data rank's share of the global batch, from 0

Plans for thousands of ranks can be built, checked, simulated and drawn on a laptop.

The kinds of instructions, and the transfers of vocabulary parallelism.

With vocabulary parallelism every pipeline rank holds a shard of the embedding and of the output
head: rows of their weights. Its passes are instructions like F and B, and they exchange tensors
between all shards and one stage:

    transfer             from          to            after   used by
    embedding            each shard    first stage   E       F
    embedding gradient   first stage   each shard    B, I    G
    hidden               last stage    each shard    F       S
    partial              each shard    last stage    S       C
    normalizer           last stage    each shard    C       T
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Literal, NamedTuple

from pipemega.errors import ScheduleError

Direction = Literal[
    "activation",
    "gradient",
    # Vocabulary parallelism
    "embedding",
    "embedding gradient",
    "hidden",
    "partial",
    "normalizer",
]
"""The name of a channel: of a message between two stages, or of a transfer."""


class Kind(Enum):
    """Kind of an instruction; the value is its notation."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of the input and of the weights
    BACKWARD_INPUT = "I"  # gradient of the input; the previous stage waits for it
    BACKWARD_WEIGHT = "W"  # gradients of the weights; only the optimizer waits for them
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    # Vocabulary parallelism
    EMBED = "E"  # rows of the embedding that are in this shard
    EMBED_WEIGHT = "G"  # gradient of the embedding rows of this shard
    OUTPUT = "S"  # softmax over this shard, and its part of the gradient of hidden
    LOSS = "C"  # combines the parts of all shards: loss and gradient of hidden
    OUTPUT_WEIGHT = "T"  # gradient of the head rows of this shard
    SEND_EMBEDDING = "SE"
    RECV_EMBEDDING = "RE"
    SEND_EMBEDDING_GRADIENT = "SEG"
    RECV_EMBEDDING_GRADIENT = "REG"
    SEND_HIDDEN = "SH"
    RECV_HIDDEN = "RH"
    SEND_PARTIAL = "SP"
    RECV_PARTIAL = "RP"
    SEND_NORMALIZER = "SN"
    RECV_NORMALIZER = "RN"

    # Enum computes its hash in Python. Members are singletons, so the identity hash is enough; it
    # halves the time of functions on plans.
    __hash__ = object.__hash__

    @property
    def is_message(self) -> bool:
        return self in _MESSAGES

    @property
    def is_receive(self) -> bool:
        return self in _RECEIVES

    @property
    def is_vocabulary(self) -> bool:
        """Whether it belongs to vocabulary parallelism."""
        return self in _VOCABULARY

    @property
    def has_shard(self) -> bool:
        """Whether the number after @ is the number of a shard, which is a pipeline rank."""
        return self in _WITH_SHARD


class Transfer(NamedTuple):
    """A kind of message: between consecutive stages, or between the shards and one stage.

    Args:
        name: the name of its channels.
        send, receive: kinds of its messages.
        after: kinds of the steps whose result is sent.
        users: kinds of the steps that use the result.
        offset: the stage that receives minus the stage that sends; 0: it has shards.
        to_shards: from the stage to each shard; else from each shard to the stage.
        at_first: the stage is the first one; else the last.
        in_evaluation: an evaluation has it, too.
        proves: the transfer in the opposite direction whose result this one was computed from;
            after its arrival the memory of that message is free.
    """

    name: Direction
    send: Kind
    receive: Kind
    after: tuple[Kind, ...]
    users: tuple[Kind, ...]
    offset: int = 0
    to_shards: bool = False
    at_first: bool = False
    in_evaluation: bool = True
    proves: Direction | None = None


BETWEEN_STAGES = (
    Transfer(
        "activation",
        Kind.SEND_ACTIVATION,
        Kind.RECV_ACTIVATION,
        (Kind.FORWARD,),
        (Kind.FORWARD,),
        offset=+1,
    ),
    Transfer(
        "gradient",
        Kind.SEND_GRADIENT,
        Kind.RECV_GRADIENT,
        (Kind.BACKWARD, Kind.BACKWARD_INPUT),
        (Kind.BACKWARD, Kind.BACKWARD_INPUT),
        offset=-1,
        in_evaluation=False,
        proves="activation",
    ),
)
WITH_SHARDS = (
    Transfer(
        "embedding",
        Kind.SEND_EMBEDDING,
        Kind.RECV_EMBEDDING,
        (Kind.EMBED,),
        (Kind.FORWARD,),
        at_first=True,
    ),
    Transfer(
        "embedding gradient",
        Kind.SEND_EMBEDDING_GRADIENT,
        Kind.RECV_EMBEDDING_GRADIENT,
        (Kind.BACKWARD, Kind.BACKWARD_INPUT),
        (Kind.EMBED_WEIGHT,),
        to_shards=True,
        at_first=True,
        in_evaluation=False,
        proves="embedding",
    ),
    Transfer(
        "hidden",
        Kind.SEND_HIDDEN,
        Kind.RECV_HIDDEN,
        (Kind.FORWARD,),
        (Kind.OUTPUT,),
        to_shards=True,
    ),
    Transfer(
        "partial",
        Kind.SEND_PARTIAL,
        Kind.RECV_PARTIAL,
        (Kind.OUTPUT,),
        (Kind.LOSS,),
        proves="hidden",
    ),
    Transfer(
        "normalizer",
        Kind.SEND_NORMALIZER,
        Kind.RECV_NORMALIZER,
        (Kind.LOSS,),
        (Kind.OUTPUT_WEIGHT,),
        to_shards=True,
        in_evaluation=False,
        proves="partial",
    ),
)
TRANSFERS = (*BETWEEN_STAGES, *WITH_SHARDS)
TRANSFER_OF_SEND = {transfer.send: transfer for transfer in TRANSFERS}
TRANSFER_OF_RECEIVE = {transfer.receive: transfer for transfer in TRANSFERS}
TRANSFER_OF_NAME = {transfer.name: transfer for transfer in TRANSFERS}
VOCABULARY_PASSES = (
    Kind.EMBED,
    Kind.EMBED_WEIGHT,
    Kind.OUTPUT,
    Kind.LOSS,
    Kind.OUTPUT_WEIGHT,
)

_RECEIVES = frozenset(TRANSFER_OF_RECEIVE)
_MESSAGES = _RECEIVES | set(TRANSFER_OF_SEND)
_VOCABULARY = frozenset(
    {*VOCABULARY_PASSES, *(k for t in WITH_SHARDS for k in (t.send, t.receive))}
)
_WITH_SHARD = frozenset(
    {Kind.EMBED, Kind.EMBED_WEIGHT, Kind.OUTPUT, Kind.OUTPUT_WEIGHT}
    | {t.receive if t.to_shards else t.send for t in WITH_SHARDS}
)


# At most nine digits, since Python limits the length of the numbers that it parses.
_NOTATION = re.compile(f"({'|'.join(kind.value for kind in Kind)})([0-9]{{1,9}})@([0-9]{{1,9}})")
# The notation of compute steps in CSV files of torch.distributed.pipelining, which has F, B, I, W.
_TORCH_NOTATION = re.compile(
    f"([0-9]{{1,9}})({'|'.join(k.value for k in Kind if not k.is_message)})([0-9]{{1,9}})"
)


class Instruction(NamedTuple):
    """One instruction for one rank.  `F3@1` is the forward of micro-batch 3 at stage 1.

        F3@1    run stage 1 on micro-batch 3
        B3@1    run its whole backward; or in two halves, I3@1 and later W3@1
        SA3@1   send the output of stage 1 to stage 2
        RA3@1   post the receive of the input of stage 1, from stage 0
        SG3@1   send the gradient of the input of stage 1 to stage 0
        RG3@1   post the receive of the gradient of the output of stage 1, from stage 2

    In vocabulary parallelism E, S, T and G have the number of a shard, which is a pipeline rank:
    `S3@1` is the output pass of micro-batch 3 over the shard of rank 1. C has the last stage. A
    send to all shards, and a receive from all shards, has the number of the stage.

    Posting a receive does not wait; see `lowering` for what waits.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}@{self.stage}"

    @classmethod
    def parse(cls, text: str) -> "Instruction":
        """Return the instruction written as `text`.

        Raises:
            ScheduleError: `text` is not kind, micro-batch, @stage.
        """
        if (found := _NOTATION.fullmatch(text)) is None:
            raise ScheduleError(
                f"{text!r} is not an instruction: write kind, micro-batch, @ and stage, as in "
                f"F3@1; the kinds are {', '.join(kind.value for kind in Kind)}"
            )
        kind, microbatch, stage = found.groups()
        return cls(Kind(kind), int(stage), int(microbatch))


Program = tuple[Instruction, ...]


@dataclass(frozen=True)
class Plan:
    """The instructions of every pipeline rank in one training step, in order.

    Args:
        name: the name of the schedule.
        num_microbatches: number of micro-batches of the step.
        rank_of_stage: stage s is on pipeline rank rank_of_stage[s].
        programs: programs[r] are the instructions of pipeline rank r.

    A plan has only compute steps until `lowering.lower` adds the messages. A plan without any
    backward is an evaluation.
    """

    name: str
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    programs: tuple[Program, ...]

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        return len(self.programs)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on `rank` in the order of the model; their index is the chunk."""
        return tuple(s for s, owner in enumerate(self.rank_of_stage) if owner == rank)

    @cached_property
    def forward_only(self) -> bool:
        """Whether the plan has no backward, as in evaluation."""
        backward = {Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
        return not any(step.kind in backward for step in self.steps())

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the plan has I and W, not only B."""
        return any(step.kind is Kind.BACKWARD_INPUT for step in self.steps())

    @cached_property
    def is_lowered(self) -> bool:
        """Whether the plan has its messages."""
        return any(step.kind.is_message for step in self.steps())

    def steps(self) -> Iterator[Instruction]:
        """Yield all instructions, rank by rank."""
        return (step for program in self.programs for step in program)

    def compute_only(self) -> "Plan":
        """Return the plan without its messages."""
        if not self.is_lowered:
            return self
        programs = (tuple(s for s in p if not s.kind.is_message) for p in self.programs)
        return Plan(self.name, self.num_microbatches, self.rank_of_stage, tuple(programs))

    @cached_property
    def has_vocabulary(self) -> bool:
        """Whether the plan has the passes of vocabulary parallelism."""
        return any(step.kind.is_vocabulary for step in self.steps())

    def rank_of(self, step: Instruction) -> int:
        """Return the pipeline rank that runs `step`."""
        return step.stage if step.kind.has_shard else self.rank_of_stage[step.stage]

    def without_vocabulary(self) -> "Plan":
        """Return the compute steps of the stages alone."""
        if not self.has_vocabulary:
            return self
        programs = (tuple(s for s in p if not s.kind.is_vocabulary) for p in self.programs)
        return replace(self, programs=tuple(programs)).compute_only()

    def crosses(self, stage: int) -> bool:
        """Return whether `stage` and the next stage are on different ranks."""
        ranks = self.rank_of_stage
        return 0 <= stage < len(ranks) - 1 and ranks[stage] != ranks[stage + 1]

    def all_needs(self, step: Instruction) -> tuple[Instruction, ...]:
        """Return the instructions that must have run before `step` can.

        One is enough without vocabulary parallelism: a backward needs the backward of the next
        stage, which needed its forward, which needed the forward of this stage. In a lowered plan,
        a result from another rank is represented by its send. Posting a receive needs nothing.
        """
        kind, stage, microbatch = step
        if self.has_vocabulary and (found := self._vocabulary_needs(step)) is not None:
            return found
        if kind is Kind.FORWARD:
            if stage == 0:
                return ()
            sent = self.is_lowered and self.crosses(stage - 1)
            return (Instruction(Kind.SEND_ACTIVATION if sent else kind, stage - 1, microbatch),)
        if kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
            if stage == self.num_stages - 1:
                return (Instruction(Kind.FORWARD, stage, microbatch),)
            if self.is_lowered and self.crosses(stage):
                return (Instruction(Kind.SEND_GRADIENT, stage + 1, microbatch),)
            return (self._input_gradient_of(stage + 1, microbatch),)
        if kind is Kind.BACKWARD_WEIGHT:
            return (Instruction(Kind.BACKWARD_INPUT, stage, microbatch),)
        if kind is Kind.SEND_ACTIVATION:
            return (Instruction(Kind.FORWARD, stage, microbatch),)
        if kind is Kind.SEND_GRADIENT:
            return (self._input_gradient_of(stage, microbatch),)
        return ()

    def remote_need(self, step: Instruction) -> Instruction | None:
        """Return the first of `all_needs` that another rank runs, or None."""
        rank = self.rank_of(step)
        return next((need for need in self.all_needs(step) if self.rank_of(need) != rank), None)

    def needs(self, step: Instruction) -> Instruction | None:
        """Return the one of `all_needs`; of several the first that another rank runs, or None."""
        found = self.all_needs(step)
        return found[0] if len(found) == 1 else self.remote_need(step)

    def _vocabulary_needs(self, step: Instruction) -> tuple[Instruction, ...] | None:
        """Return what `step` needs by vocabulary parallelism; None: `all_needs` has the rule."""
        kind, stage, microbatch = step
        last = self.num_stages - 1
        if stage == last and kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return (Instruction(Kind.LOSS, last, microbatch),)
        for transfer in WITH_SHARDS:
            root = self.root_of(transfer)
            if kind in transfer.users and (transfer.to_shards or stage == root):
                if transfer.to_shards:
                    return (self._result(transfer, root, microbatch, stage),)
                shards = range(self.num_ranks)
                return tuple(self._result(transfer, s, microbatch, s) for s in shards)
            if kind is transfer.send:
                return (self._producer(transfer, stage, microbatch),)
        return None

    def root_of(self, transfer: Transfer) -> int:
        """Return the stage of a transfer, which exchanges tensors with the shards."""
        return 0 if transfer.at_first else self.num_stages - 1

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfers for which a run of this plan has channels."""
        return TRANSFERS if self.has_vocabulary else BETWEEN_STAGES

    def peers(self, transfer: Transfer, place: int, *, sends: bool) -> tuple[int, ...]:
        """Return the stages or shards on other ranks with which a stage or shard has messages.

        Args:
            place: the number of the stage or shard.
            sends: it sends; else it receives.
        """
        if self.forward_only and not transfer.in_evaluation:
            return ()
        if transfer.offset:
            other = place + (transfer.offset if sends else -transfer.offset)
            return (other,) if self.crosses(min(place, other)) else ()
        root = self.root_of(transfer)
        rank = self.rank_of_stage[root]
        if sends != transfer.to_shards:  # `place` is a shard
            return (root,) if place != rank else ()
        return tuple(s for s in range(self.num_ranks) if s != rank) if place == root else ()

    def _result(self, transfer: Transfer, source: int, microbatch: int, shard: int) -> Instruction:
        """Return what represents the result of the stage or shard `source` for its user."""
        if self.is_lowered and shard != self.rank_of_stage[self.root_of(transfer)]:
            return Instruction(transfer.send, source, microbatch)
        return self._producer(transfer, source, microbatch)

    def _producer(self, transfer: Transfer, source: int, microbatch: int) -> Instruction:
        if Kind.BACKWARD in transfer.after:
            return self._input_gradient_of(source, microbatch)
        return Instruction(transfer.after[0], source, microbatch)

    def _input_gradient_of(self, stage: int, microbatch: int) -> Instruction:
        half = Instruction(Kind.BACKWARD_INPUT, stage, microbatch)
        return half if half in self._input_halves else half._replace(kind=Kind.BACKWARD)

    @cached_property
    def _input_halves(self) -> frozenset[Instruction]:
        return frozenset(step for step in self.steps() if step.kind is Kind.BACKWARD_INPUT)

    # To and from files

    def to_json(self) -> str:
        """Return one line of JSON, with instructions as text: `"programs": [["F0@0", ...]]`."""
        return json.dumps(
            {
                "name": self.name,
                "num_microbatches": self.num_microbatches,
                "rank_of_stage": self.rank_of_stage,
                "programs": [list(map(str, program)) for program in self.programs],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan that `to_json` wrote; not yet validated (`validate.validate`).

        Raises:
            ScheduleError: not JSON, a missing or unknown key, or an invalid instruction.
        """
        try:
            written = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScheduleError(f"expected a plan in JSON: {error}") from error
        keys = ("name", "num_microbatches", "rank_of_stage", "programs")
        if not isinstance(written, Mapping) or set(written) != set(keys):
            found = sorted(written) if isinstance(written, Mapping) else type(written).__name__
            raise ScheduleError(f"a plan in JSON needs the keys {', '.join(keys)}, not {found}")
        name, num_microbatches, ranks, rows = (written[key] for key in keys)
        if not (isinstance(name, str) and _is_count(num_microbatches)):
            raise ScheduleError(
                "a plan in JSON needs a string as name, an integer as num_microbatches"
            )
        if not (isinstance(ranks, list) and all(map(_is_count, ranks))):
            raise ScheduleError("rank_of_stage of a plan in JSON must be a list of ranks")
        if not (isinstance(rows, list) and all(_is_row(row) for row in rows)):
            raise ScheduleError(
                "programs of a plan in JSON must have one list of instructions per rank"
            )
        programs = _read(rows, Instruction.parse)
        return cls(name, num_microbatches, tuple(ranks), programs)

    def to_csv(self) -> str:
        """Return the compute steps in the format of torch.distributed.pipelining.

        One row per rank, cells such as `1F3`: stage, kind, micro-batch. Without messages, since the
        reader adds its own. torch cannot run the passes of vocabulary parallelism.
        """
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows(
            [f"{s.stage}{s.kind.value}{s.microbatch}" for s in program]
            for program in self.compute_only().programs
        )
        return written.getvalue()

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> "Plan":
        """Return the plan in `text`, one row per rank; empty cells are skipped.

        Raises:
            ScheduleError: an invalid cell, a stage on two ranks, or a missing stage.
        """
        try:
            rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
        except csv.Error as error:
            raise ScheduleError(f"expected a plan in CSV: {error}") from error
        programs = _read([[cell for cell in row if cell] for row in rows], _parse_torch)
        rank_of_stage: dict[int, int] = {}
        for rank, program in enumerate(programs):
            for step in program:
                if step.kind.has_shard:
                    continue
                if rank_of_stage.setdefault(step.stage, rank) != rank:
                    raise ScheduleError(
                        f"stage {step.stage} of the plan in CSV is on rank "
                        f"{rank_of_stage[step.stage]} and on rank {rank}: give each stage one rank"
                    )
        if sorted(rank_of_stage) != list(range(len(rank_of_stage))) or not rank_of_stage:
            raise ScheduleError(
                f"the stages of the plan in CSV are {sorted(rank_of_stage)}: number them from 0 "
                f"without gaps"
            )
        num_microbatches = 1 + max(step.microbatch for program in programs for step in program)
        ranks = tuple(rank_of_stage[stage] for stage in range(len(rank_of_stage)))
        return cls(name, num_microbatches, ranks, programs)


def _is_count(value: object) -> bool:
    # In Python bool is an int, but true is not a valid number here.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_row(row: object) -> bool:
    return isinstance(row, list) and all(isinstance(cell, str) for cell in row)


def _parse_torch(text: str) -> Instruction:
    if (found := _TORCH_NOTATION.fullmatch(text)) is None:
        raise ScheduleError(
            f"{text!r} is not an instruction of a plan in CSV: write stage, kind, micro-batch, as "
            f"in 1F3; the kinds are F, B, I and W, and in vocabulary parallelism "
            f"{', '.join(kind.value for kind in VOCABULARY_PASSES)}"
        )
    stage, kind, microbatch = found.groups()
    return Instruction(Kind(kind), int(stage), int(microbatch))


def _read(rows: list[list[str]], parse: Callable[[str], Instruction]) -> tuple[Program, ...]:
    """Parse all cells; an error names the rank."""
    programs = []
    for rank, row in enumerate(rows):
        try:
            programs.append(tuple(map(parse, row)))
        except ScheduleError as error:
            raise ScheduleError(f"rank {rank}: {error}") from error
    return tuple(programs)
