"""`pipeline`: how the layers are shared out, and in which order the stages run.  Floor 1."""

import re
from itertools import pairwise
from typing import Any, Literal

from pydantic import field_validator, model_validator

from pipemega.config.keys import (
    Auto,
    Count,
    Name,
    NotNegative,
    Positive,
    Section,
    Whole,
    honoured,
    ignored,
    own,
)
from pipemega.config.nearest import did_you_mean, nearest

Schedule = Literal[
    "sequential", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb",
    "zb-v", "v-half", "v-min", "1f1b-v", "dualpipe-v", "auto",
]  # fmt: skip
_ALIASES = {"f-then-b": "gpipe"}
# Stages per rank, for the schedules that take one number alone.
FIXED_CHUNKS = {
    "sequential": 1, "gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-h2": 1,
    "zb-v": 2, "dualpipe-v": 2, "v-half": 2, "v-min": 2, "1f1b-v": 2,
}  # fmt: skip
_PARTITIONS = ("parameters", "best", "uniform", "profile")


class PlanFile(Section):
    """A plan of one's own, in place of a schedule's name: proven before it runs."""

    file: Name = own(
        ...,
        "CSV (a row per pipeline rank, steps as torch.distributed.pipelining writes them: `0F3`, "
        "`1I2`) or JSON (as `python -m pipemega schedule --format json` writes it).",
    )


Costs = NotNegative | tuple[NotNegative, ...]


class CostsSection(Section):
    """What the steps cost for one micro-batch: one rank's share of the model, or stage by stage."""

    forward: Costs = own(
        ...,
        "Time of F, in any one unit: a number for the share of one rank, which its stages divide "
        "evenly, or a list with one number for each stage.",
    )
    backward_input: Costs = own(..., "Time of I, likewise.")
    backward_weight: Costs = own(..., "Time of W, likewise.")
    backward: Costs | None = own(None, "Time of a whole B; null: I and W together.")
    activation: Costs | None = own(
        None, "Memory from F on, in any one unit; null: 1 for the share of one rank."
    )
    kept: Costs | None = own(None, "Memory between I and W; null: all of `activation`.")
    message: NotNegative = own(0.0, "Time of a message between two ranks.")

    @model_validator(mode="after")
    def _one_number_for_each_stage(self) -> "CostsSection":
        lists = {
            name: len(value)
            for name in type(self).model_fields
            if isinstance(value := getattr(self, name), tuple)
        }
        numbers = [n for n in _TIMES if n not in lists]
        if lists and numbers:
            listed = next(iter(lists))
            raise ValueError(
                f"pipeline.costs.{listed} has one number for each stage, and "
                f"pipeline.costs.{numbers[0]} is one number for the share of a rank: write "
                "forward, backward_input and backward_weight the same way"
            )
        if len(set(lists.values())) > 1:
            told = ", ".join(f"{count} in {name}" for name, count in lists.items())
            raise ValueError(f"pipeline.costs speaks of different numbers of stages: {told}")
        if not lists and not any(getattr(self, name) for name in _TIMES):
            raise ValueError("pipeline.costs has no step that takes time: give forward, ... > 0")
        return self

    @property
    def num_stages(self) -> int | None:
        """That the lists speak of; None where the numbers are for the share of a rank."""
        return len(self.forward) if isinstance(self.forward, tuple) else None


_TIMES = ("forward", "backward_input", "backward_weight")


class PipelineSection(Section):
    """How the layers are shared out over the pipeline ranks, and in which order they run."""

    stages: Count | Auto = honoured(
        "auto",
        "Pipeline ranks, for configs that have no `mesh`: the same as `mesh.pipeline`, and no "
        "other number.",
    )
    partition: Literal["parameters", "best", "uniform", "profile"] | str | tuple[Whole, ...] = (
        honoured(
            "parameters",
            'What is shared out evenly: `"parameters"` (`"best"` is the same), `"uniform"` '
            '(layers), `"profile"` (measured time), `"type:REGEX"` (layers whose class matches); '
            "or the bounds themselves, such as [0, 5, 9, 14].",
        )
    )
    seed_layers: bool = honoured(
        False, "Draw each layer's random numbers from a seed of its own, whatever the stage."
    )
    activation_checkpoint_interval: Whole = honoured(
        0, "Layers that keep only their input and are computed again backward; 0: none."
    )
    pipe_partitioned: bool | None = ignored(
        None,
        "DeepSpeed: cut what crosses a stage over the tensor ranks.",
        "what crosses a stage is sent whole; with mesh.sequence_parallel it is cut already",
        agrees=[False],
    )
    grad_partitioned: bool | None = ignored(
        None,
        "DeepSpeed: cut the gradients that cross a stage over the tensor ranks.",
        "what crosses a stage is sent whole; with mesh.sequence_parallel it is cut already",
        agrees=[False],
    )
    use_reentrant: bool | None = ignored(
        None,
        "DeepSpeed: which of torch's two checkpoint functions runs.",
        "recomputation is our own, of one kind",
    )
    schedule: Schedule | PlanFile = own(
        "1f1b",
        'Order of forwards and backwards; `"f-then-b"` is another name for `"gpipe"`; `"auto"` '
        "makes the best plan for `costs` and `memory_limit`; an object names the file of a plan.",
    )
    chunks: Count | Auto = own(
        "auto",
        'Stages on each rank: any number for `interleaved` and `looped-bfs`, where `"auto"` is 2; '
        'for schedule `"auto"` any number, and `"auto"` tries several; for the others `"auto"` is '
        "the one that they take.",
    )
    costs: CostsSection | Auto | None = own(
        None,
        'For schedule `"auto"`: what F, I and W of the stages cost. `"auto"`, and null there: '
        "measured in the first steps, which run a plain schedule; then the best plan takes over.",
    )
    memory_limit: Positive | Auto = own(
        "auto",
        'For schedule `"auto"`: what the activations of a rank may take, in bytes (in the unit of '
        '`costs.activation` where costs are given). `"auto"`: what 1F1B takes on its fullest rank.',
    )
    shapes: Literal["cached", "declared", "exchanged"] = own(
        "cached",
        "How a stage learns the shapes that it receives: exchanged once and then checked, declared "
        "by the model, or exchanged each time.",
    )
    optimizer_sync: Literal["fenced", "post_validate"] = own(
        "fenced",
        'When a rank steps: `"fenced"`, when all ranks have the gradient norm; `"post_validate"`, '
        "at once, to take the step back if the norm says so (docs/optimizer.md).",
    )
    optimizer_sync_after: Whole = own(
        10,
        "With `post_validate`: steps in a row without clipping or overflow before a rank steps "
        "without waiting; 0: always.",
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        name = raw.get("schedule")
        if name is None and raw.get("costs") is not None:
            return raw | {"schedule": "auto"}
        if isinstance(name, str) and name in _ALIASES:
            return raw | {"schedule": _ALIASES[name]}
        return raw

    @field_validator("partition")
    @classmethod
    def _a_known_partition(cls, partition: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(partition, tuple):
            rising = all(a < b for a, b in pairwise(partition))
            if len(partition) < 2 or partition[0] != 0 or not rising:
                raise ValueError(
                    f"pipeline.partition {list(partition)} must begin with 0 and rise, one more "
                    "number than there are stages: stage i has the layers from number i up to, "
                    "and without, number i + 1"
                )
        elif partition.startswith("type:"):
            _check_pattern(partition.removeprefix("type:"))
        elif partition not in _PARTITIONS:
            raise ValueError(
                "pipeline.partition must be 'parameters', 'best', 'uniform', 'profile', "
                f"'type:REGEX' or a list of bounds, not {partition!r}{_suggested(partition)}"
            )
        return partition

    @model_validator(mode="after")
    def _chunks_that_the_schedule_takes(self) -> "PipelineSection":
        takes = FIXED_CHUNKS.get(str(self.schedule))
        if takes is not None and self.chunks not in ("auto", takes):
            stages = "one stage" if takes == 1 else f"{takes} stages"
            others = ", or use pipeline.schedule 'interleaved'" if takes == 1 else ""
            raise ValueError(
                f"pipeline.chunks is {self.chunks}, and schedule {self.schedule!r} runs {stages} "
                f"per rank: set it to {takes}{others}"
            )
        return self

    @model_validator(mode="after")
    def _costs_where_they_are_read(self) -> "PipelineSection":
        if self.schedule == "auto":
            return self
        if isinstance(self.schedule, PlanFile):
            why = f"{self.schedule.file!r} is a plan already"
        else:
            why = f"{self.schedule!r} is the same plan for all costs"
        for key, default in (("costs", None), ("memory_limit", "auto")):
            if getattr(self, key) != default:
                raise ValueError(
                    f"pipeline.{key} is for pipeline.schedule 'auto', and {why}: leave "
                    f"pipeline.{key} out, or set pipeline.schedule to 'auto'"
                )
        return self

    @model_validator(mode="after")
    def _as_many_bounds_as_stages(self) -> "PipelineSection":
        if self.stages != "auto" and self.stages_per_rank is not None:
            check_bounds(self.partition, self.stages * self.stages_per_rank)
        return self

    @property
    def stages_per_rank(self) -> int | None:
        """The chunks, with "auto" resolved; None where only the plan will say."""
        if self.chunks != "auto":
            return self.chunks
        if self.schedule == "auto" or isinstance(self.schedule, PlanFile):
            return None
        return FIXED_CHUNKS.get(self.schedule, 2)


def _suggested(partition: str) -> str:
    return did_you_mean(partition, _PARTITIONS) if nearest(partition, _PARTITIONS) else ""


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"pipeline.partition 'type:{pattern}' is no regular expression: {error}"
        ) from None
    if not pattern:
        raise ValueError("pipeline.partition 'type:' needs a regular expression after the colon")


def check_bounds(partition: str | tuple[int, ...], num_stages: int) -> None:
    """Raises ValueError if explicit bounds are for another number of stages."""
    if isinstance(partition, tuple) and len(partition) != num_stages + 1:
        raise ValueError(
            f"pipeline.partition has {len(partition)} bounds, for {len(partition) - 1} stages, and "
            f"there are {num_stages}: write {num_stages + 1} numbers"
        )
