"""Costs of the steps of a plan in time and memory, per stage.

Times have any one unit and memory any one unit: measured seconds and bytes, or multiples of the
cost of one micro-batch on one rank, as in the papers.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.kinds import VOCABULARY_PASSES, Kind


@dataclass(frozen=True)
class VocabularyCosts:
    """Costs of the passes of vocabulary parallelism for one micro-batch, equal on all ranks.

    Args:
        embed, embed_weight, output, loss, output_weight: times of E, G, S, C and T.
        kept: memory of a rank between S and T.

    Raises:
        ScheduleError: a cost is negative or not finite.
    """

    embed: float = 0.0
    embed_weight: float = 0.0
    output: float = 0.0
    loss: float = 0.0
    output_weight: float = 0.0
    kept: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(f"vocabulary.{field.name}", getattr(self, field.name))

    def scaled(self, factor: float) -> "VocabularyCosts":
        """Return the same memory with all times multiplied by `factor`."""
        times = {f.name: factor * getattr(self, f.name) for f in fields(self) if f.name != "kept"}
        return replace(self, **times)

    @property
    def times(self) -> Mapping[Kind, float]:
        times = (self.embed, self.embed_weight, self.output, self.loss, self.output_weight)
        return dict(zip(VOCABULARY_PASSES, times, strict=True))


def _check(name: str, cost: float) -> None:
    if not (math.isfinite(cost) and cost >= 0):
        raise ScheduleError(f"the cost {name} is {cost}: give a finite number, at least 0")


@dataclass(frozen=True)
class CostModel:
    """Times and memory of each stage for one micro-batch.

    Args:
        forward: time of F, per stage.
        backward_input: time of I, per stage.
        backward_weight: time of W, per stage.
        backward: time of B, per stage; None: the sum of I and W.
        activation: memory from the start of F to the end of B or W, per stage; None: 1 each.
        kept: memory between I and W, per stage; None: the same as `activation`. It can be higher:
            with activation checkpointing, I recomputes what F released.
        message: time from the end of a step to the start of the step on another rank that uses its
            result; 0 between steps of the same rank.
        vocabulary: of the passes of vocabulary parallelism, if the plan has them.

    Raises:
        ScheduleError: a cost is negative or not finite, or the numbers of stages differ.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] | None = None
    activation: tuple[float, ...] | None = None
    kept: tuple[float, ...] | None = None
    message: float = 0.0
    vocabulary: VocabularyCosts = VocabularyCosts()

    def __post_init__(self) -> None:
        _check("message", self.message)
        for field in fields(self):
            value = getattr(self, field.name)
            for stage, cost in enumerate(value if isinstance(value, tuple) else ()):
                _check(f"{field.name} of stage {stage}", cost)
            if isinstance(value, tuple) and len(value) != len(self.forward):
                raise ScheduleError(
                    f"the costs have {len(self.forward)} stages for forward and {len(value)} for "
                    f"{field.name}: give the same number"
                )

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        *,
        backward: float | None = None,
        kept: float | None = None,
        message: float = 0.0,
    ) -> "CostModel":
        """Return the same costs for every stage; the unit of memory is its `activation`."""
        return cls(
            (forward,) * num_stages,
            (backward_input,) * num_stages,
            (backward_weight,) * num_stages,
            None if backward is None else (backward,) * num_stages,
            (1.0,) * num_stages,
            None if kept is None else (kept,) * num_stages,
            message,
        )

    @classmethod
    def from_rank_costs(
        cls,
        rank_of_stage: Sequence[int],
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        message: float = 0.0,
    ) -> "CostModel":
        """Return costs for a rank whose stages together have the given times.

        The work of a rank is divided evenly among its stages, so schedules with different numbers
        of chunks compare directly. Memory is 1 unit per micro-batch and rank.
        """
        stages_on = Counter(rank_of_stage)
        share = [1.0 / stages_on[rank] for rank in rank_of_stage]
        return cls(
            tuple(forward * part for part in share),
            tuple(backward_input * part for part in share),
            tuple(backward_weight * part for part in share),
            activation=tuple(share),
            message=message,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def held_after_forward(self) -> tuple[float, ...]:
        """Memory between F and backward, per stage."""
        return self.activation if self.activation is not None else (1.0,) * self.num_stages

    @property
    def held_after_input(self) -> tuple[float, ...]:
        """Memory between I and W, per stage."""
        return self.kept if self.kept is not None else self.held_after_forward

    @property
    def whole_backward(self) -> tuple[float, ...]:
        """Time of B, per stage."""
        if self.backward is not None:
            return self.backward
        return tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))
