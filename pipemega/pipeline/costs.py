"""What the steps of a plan cost in time and in memory, stage by stage.

Any one unit of time and any one unit of memory: seconds and bytes where they were measured, or
shares of a micro-batch's pass through one rank, as the papers count.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pipemega.errors import ScheduleError


@dataclass(frozen=True)
class CostModel:
    """Times and memory of each stage for one micro-batch.

    Args:
        forward: time of F, per stage.
        backward_input: time of I, per stage.
        backward_weight: time of W, per stage.
        backward: time of a whole B, per stage; None: I and W together.
        activation: memory that is taken when F starts, and held until the backward of the
            micro-batch ends, per stage; None: 1 unit each.
        kept: memory that is still held between I and W, per stage; None: all of `activation`.
            It may be more, since with activation checkpointing I creates what F let go.
        message: time from the end of a step to the start of the one on another rank that uses its
            result; nothing on the same rank.

    Raises:
        ScheduleError: a cost is negative or no number, or the stages are not equally many.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] | None = None
    activation: tuple[float, ...] | None = None
    kept: tuple[float, ...] | None = None
    message: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            costs = value if isinstance(value, tuple) else () if value is None else (value,)
            for stage, cost in enumerate(costs):
                if not (math.isfinite(cost) and cost >= 0):
                    where = f" of stage {stage}" if isinstance(value, tuple) else ""
                    raise ScheduleError(
                        f"the cost {field.name}{where} is {cost}: a time or size is a number from "
                        f"0 up"
                    )
            if isinstance(value, tuple) and len(value) != len(self.forward):
                raise ScheduleError(
                    f"the costs name {len(self.forward)} stages for forward and {len(value)} for "
                    f"{field.name}: give each stage one"
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
        activation: float = 1.0,
        kept: float | None = None,
        message: float = 0.0,
    ) -> "CostModel":
        """The same costs for every stage."""
        return cls(
            (forward,) * num_stages,
            (backward_input,) * num_stages,
            (backward_weight,) * num_stages,
            None if backward is None else (backward,) * num_stages,
            (activation,) * num_stages,
            None if kept is None else (kept,) * num_stages,
            message,
        )

    @classmethod
    def shared(
        cls,
        rank_of_stage: Sequence[int],
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        message: float = 0.0,
    ) -> "CostModel":
        """Costs of one *rank's* share of the model, which its stages divide among them evenly.

        So the work of a rank does not depend on how many chunks it is cut into, and schedules of
        different chunk counts compare directly; memory is 1 unit per micro-batch and rank.
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
        return self.activation if self.activation is not None else (1.0,) * self.num_stages

    @property
    def held_after_input(self) -> tuple[float, ...]:
        return self.kept if self.kept is not None else self.held_after_forward

    @property
    def whole_backward(self) -> tuple[float, ...]:
        """Time of B, per stage."""
        if self.backward is not None:
            return self.backward
        return tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))
