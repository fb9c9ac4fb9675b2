"""The words that a pipeline schedule is written in.  No torch, no processes, no clock.

    rank         position along the pipeline axis of the mesh
    stage        position in the model, 0 first; one rank may hold several
    micro-batch  which slice of the data rank's share of the global batch, 0 first

A plan can be made, checked, timed and drawn on a laptop, for a thousand ranks that do not exist.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from pipemega.errors import ScheduleError


class Kind(Enum):
    """What an instruction does, and the letters it is written with."""

    FORWARD = "F"
    BACKWARD = "B"  # both halves at once: gradients of the input and of the weights
    BACKWARD_INPUT = "I"  # the first half; the stage before waits for this one only
    BACKWARD_WEIGHT = "W"  # the second half; nobody waits for it but the optimizer
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"

    # Members are singletons, and Enum's own hash is written in Python: plans are dictionaries'
    # work, and this halves the time that they take.
    __hash__ = object.__hash__

    @property
    def is_message(self) -> bool:
        return self in _MESSAGES


_MESSAGES = frozenset(
    {Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT}
)
# Nine digits at most: more micro-batches there are not, and Python reads no number of any length.
_WRITTEN = re.compile(r"(F|B|I|W|SA|RA|SG|RG)([0-9]{1,9})@([0-9]{1,9})")
# How torch.distributed.pipelining writes the same four steps in its CSV files.
_WRITTEN_BY_TORCH = re.compile(r"([0-9]{1,9})(F|B|I|W)([0-9]{1,9})")


class Instruction(NamedTuple):
    """One thing for one rank to do.  `F3@1` is the forward of micro-batch 3 at stage 1.

        F3@1    run stage 1 on micro-batch 3
        B3@1    its whole backward; or I3@1, later W3@1, its two halves
        SA3@1   send the output of stage 1, towards stage 2
        RA3@1   post the receive of the input of stage 1, from stage 0
        SG3@1   send the gradient of the input of stage 1, towards stage 0
        RG3@1   post the receive of the gradient of the output of stage 1, from stage 2

    Posting a receive waits for nothing; `lowering` says who waits, and where.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}@{self.stage}"

    @classmethod
    def parse(cls, text: str) -> "Instruction":
        """The instruction that is written as `text`.

        Raises:
            ScheduleError: it is not written as kind, micro-batch, @stage.
        """
        if (found := _WRITTEN.fullmatch(text)) is None:
            raise ScheduleError(
                f"{text!r} is no instruction: write kind, micro-batch, @ and stage, as in F3@1; "
                f"the kinds are {', '.join(kind.value for kind in Kind)}"
            )
        kind, microbatch, stage = found.groups()
        return cls(Kind(kind), int(stage), int(microbatch))


Program = tuple[Instruction, ...]


@dataclass(frozen=True)
class Plan:
    """What every pipeline rank does in one step, in order.

    Args:
        name: of the schedule.
        num_microbatches: how many micro-batches go through the pipeline.
        rank_of_stage: stage s lives on pipeline rank rank_of_stage[s].
        programs: programs[r] is what pipeline rank r does.

    A plan of compute steps alone says what is computed; a lowered one (`lowering.lower`) has the
    messages too. A plan without any backward is an evaluation.
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
        """The stages on `rank`, in the order of the model; the position in it is the chunk."""
        return tuple(s for s, home in enumerate(self.rank_of_stage) if home == rank)

    @cached_property
    def forward_only(self) -> bool:
        """Whether nothing runs backward, as in evaluation."""
        backward = {Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
        return not any(step.kind in backward for step in self.steps())

    @cached_property
    def is_lowered(self) -> bool:
        """Whether the messages are written out."""
        return any(step.kind.is_message for step in self.steps())

    def steps(self) -> Iterator[Instruction]:
        """Every instruction, rank after rank."""
        return (step for program in self.programs for step in program)

    def compute_only(self) -> "Plan":
        """The same plan without its messages."""
        if not self.is_lowered:
            return self
        programs = (tuple(s for s in p if not s.kind.is_message) for p in self.programs)
        return Plan(self.name, self.num_microbatches, self.rank_of_stage, tuple(programs))

    def crosses(self, stage: int) -> bool:
        """Whether the boundary between `stage` and the next lies between two ranks."""
        return (
            0 <= stage < self.num_stages - 1
            and self.rank_of_stage[stage] != self.rank_of_stage[stage + 1]
        )

    def needs(self, step: Instruction) -> Instruction | None:
        """The one instruction that must have run before `step` can, if there is one.

        One is enough: a backward needs the backward of the next stage, which needed its forward,
        which needed the forward of this one. In a lowered plan, what comes from another rank is
        needed in the shape of its send. Posting a receive needs nothing.
        """
        kind, stage, microbatch = step
        if kind is Kind.FORWARD:
            if stage == 0:
                return None
            sent = self.is_lowered and self.crosses(stage - 1)
            return Instruction(Kind.SEND_ACTIVATION if sent else kind, stage - 1, microbatch)
        if kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
            if stage == self.num_stages - 1:
                return Instruction(Kind.FORWARD, stage, microbatch)
            if self.is_lowered and self.crosses(stage):
                return Instruction(Kind.SEND_GRADIENT, stage + 1, microbatch)
            return self._gives_input_gradient(stage + 1, microbatch)
        if kind is Kind.BACKWARD_WEIGHT:
            return Instruction(Kind.BACKWARD_INPUT, stage, microbatch)
        if kind is Kind.SEND_ACTIVATION:
            return Instruction(Kind.FORWARD, stage, microbatch)
        if kind is Kind.SEND_GRADIENT:
            return self._gives_input_gradient(stage, microbatch)
        return None

    def _gives_input_gradient(self, stage: int, microbatch: int) -> Instruction:
        half = Instruction(Kind.BACKWARD_INPUT, stage, microbatch)
        return half if half in self._input_halves else half._replace(kind=Kind.BACKWARD)

    @cached_property
    def _input_halves(self) -> frozenset[Instruction]:
        return frozenset(step for step in self.steps() if step.kind is Kind.BACKWARD_INPUT)

    # To and from files

    def to_json(self) -> str:
        """One line of JSON, each instruction as it is written: `"programs": [["F0@0", ...]]`."""
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
        """The plan that `to_json` wrote; well-formed, not yet proven (`validate.validate`).

        Raises:
            ScheduleError: not JSON, a key is missing or unknown, or an instruction is none.
        """
        try:
            written = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScheduleError(f"a plan in JSON was expected: {error}") from error
        keys = ("name", "num_microbatches", "rank_of_stage", "programs")
        if not isinstance(written, Mapping) or set(written) != set(keys):
            found = sorted(written) if isinstance(written, Mapping) else type(written).__name__
            raise ScheduleError(f"a plan in JSON has the keys {', '.join(keys)}, not {found}")
        name, num_microbatches, ranks, rows = (written[key] for key in keys)
        if not (isinstance(name, str) and _is_count(num_microbatches)):
            raise ScheduleError("a plan in JSON has a string as name, a number of micro-batches")
        if not (isinstance(ranks, list) and all(map(_is_count, ranks))):
            raise ScheduleError("rank_of_stage of a plan in JSON is a list of ranks")
        if not (isinstance(rows, list) and all(_is_row(row) for row in rows)):
            raise ScheduleError("programs of a plan in JSON is one list of instructions per rank")
        programs = _read(rows, Instruction.parse)
        return cls(name, num_microbatches, tuple(ranks), programs)

    def to_csv(self) -> str:
        """The compute steps as torch.distributed.pipelining writes them: a row per rank, `1F3`.

        That is stage, kind, micro-batch. Messages are left out: whoever reads it adds its own.
        """
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows(
            [f"{s.stage}{s.kind.value}{s.microbatch}" for s in program]
            for program in self.compute_only().programs
        )
        return written.getvalue()

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> "Plan":
        """The plan in `text`, one row per rank; empty cells are skipped.

        Raises:
            ScheduleError: a cell is no step, a stage is on two ranks or on none.
        """
        try:
            rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
        except csv.Error as error:
            raise ScheduleError(f"a plan in CSV was expected: {error}") from error
        programs = _read([[cell for cell in row if cell] for row in rows], _parse_torch)
        homes: dict[int, int] = {}
        for rank, program in enumerate(programs):
            for step in program:
                if homes.setdefault(step.stage, rank) != rank:
                    raise ScheduleError(
                        f"stage {step.stage} of the plan in CSV is on rank {homes[step.stage]} and "
                        f"on rank {rank}: a stage lives on one rank"
                    )
        if sorted(homes) != list(range(len(homes))) or not homes:
            raise ScheduleError(
                f"the stages of the plan in CSV are {sorted(homes)}: number them from 0 and "
                f"leave none out"
            )
        num_microbatches = 1 + max(step.microbatch for program in programs for step in program)
        ranks = tuple(homes[stage] for stage in range(len(homes)))
        return cls(name, num_microbatches, ranks, programs)


def _is_count(value: object) -> bool:
    # bool is an int to Python, and true is no number of anything.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_row(row: object) -> bool:
    return isinstance(row, list) and all(isinstance(cell, str) for cell in row)


def _parse_torch(text: str) -> Instruction:
    if (found := _WRITTEN_BY_TORCH.fullmatch(text)) is None:
        raise ScheduleError(
            f"{text!r} is no step of a plan in CSV: write stage, kind, micro-batch, as in 1F3; "
            f"the kinds are F, B, I and W"
        )
    stage, kind, microbatch = found.groups()
    return Instruction(Kind(kind), int(stage), int(microbatch))


def _read(
    rows: Sequence[Sequence[str]], parse: Callable[[str], Instruction]
) -> tuple[Program, ...]:
    """Every cell parsed; an error says on which rank it stands."""
    programs = []
    for rank, row in enumerate(rows):
        try:
            programs.append(tuple(map(parse, row)))
        except ScheduleError as error:
            raise ScheduleError(f"rank {rank}: {error}") from error
    return tuple(programs)
