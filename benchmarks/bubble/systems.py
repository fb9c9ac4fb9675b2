"""What is compared: pipemega's executor under any plan, and torch.distributed.pipelining.

Each system is one step over sleeping stages, and the plan that it says it runs: the plan is what
the diary is held against, and what is simulated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.bubble.plans import LIMITS
from benchmarks.bubble.stages import WIDTH, Diary, Seconds, SleepingStage, loss_fn
from pipemega.errors import ScheduleError
from pipemega.gradients import GradientBuffer
from pipemega.mesh import Axis
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.executor import Executor, MicroBatches
from pipemega.pipeline.instructions import Instruction, Kind, Plan
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.module import Building, Draws, PipelineModule, build_stages
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from pipemega.pipeline.spec import LayerSpec
from pipemega.pipeline.split_backward import WeightGradients, split
from pipemega.pipeline.transport import Transport
from pipemega.pipeline.validate import validate

TORCH_SCHEDULES: dict[str, tuple[type[Any], int, str]] = {
    # name -> class, stages on a rank, placement
    "gpipe": (schedules.ScheduleGPipe, 1, "loop"),
    "1f1b": (schedules.Schedule1F1B, 1, "loop"),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2, "loop"),
    "looped-bfs": (schedules.ScheduleLoopedBFS, 2, "loop"),
    "interleaved-zb": (schedules.ScheduleInterleavedZeroBubble, 2, "loop"),
    "zb-v": (schedules.ScheduleZBVZeroBubble, 2, "v"),
    "dualpipe-v": (schedules.ScheduleDualPipeV, 2, "v"),
}


@dataclass(frozen=True)
class Task:
    """What one table is about.

    Args:
        ranks, num_microbatches: of the pipeline.
        share: seconds of F, I and W of one rank's whole share of the model.
    """

    ranks: int
    num_microbatches: int
    share: Seconds

    @property
    def ideal(self) -> float:
        """Seconds of a step in which no rank ever waits."""
        return self.num_microbatches * sum(self.share)

    def costs(self, plan: Plan) -> CostModel:
        """As the stages of `plan` sleep, a message taking no time."""
        return CostModel.shared(plan.rank_of_stage, *self.share)


@dataclass(frozen=True)
class System:
    """One row of a table.

    Args:
        name: `pipemega:SCHEDULE` or `torch:SCHEDULE`.
        plan: the compute steps that it runs.
        costs: what they cost here, for the simulation.
        step: runs it once on this rank.
        whole_backward: in which order a whole backward sleeps its halves.
    """

    name: str
    plan: Plan
    costs: CostModel
    step: Callable[[], None]
    whole_backward: str = "IW"

    def parts(self, rank: int) -> list[list[tuple[str, int]]]:
        """(part, stage) of the sleeps that each step of `rank` has, in order."""
        return [
            [(part, step.stage) for part in self._parts(step)] for step in self.plan.programs[rank]
        ]

    def _parts(self, step: Instruction) -> str:
        if step.kind is Kind.BACKWARD:
            return self.whole_backward
        if self.costs.backward_input[step.stage] == 0.0 and step.kind is not Kind.FORWARD:
            # torch's first stage: nothing in I, all in W.
            return "" if step.kind is Kind.BACKWARD_INPUT else self.whole_backward
        return step.kind.value


def names(words: Sequence[str], files: Iterable[str] = ()) -> list[str]:
    """All systems, or those that `words` name: one (`torch:zb-v`) or all of a kind (`torch:`).

    Args:
        files: names of plans from files, which belong to pipemega.
    """
    known = [f"pipemega:{name}" for name in (*SCHEDULES, *LIMITS, *files)]
    known += [f"torch:{name}" for name in TORCH_SCHEDULES]
    return [n for n in known if not words or n in words or f"{n.split(':')[0]}:" in words]


def build(
    name: str,
    task: Task,
    rank: int,
    group: dist.ProcessGroup,
    diary: Diary,
    plans: Mapping[str, Plan],
) -> System:
    """One system on this rank; collective.

    Args:
        plans: of pipemega, by name.

    Raises:
        ScheduleError: the schedule cannot take these sizes.
    """
    family, _, schedule = name.partition(":")
    if family == "torch":
        return _torch(name, schedule, task, rank, diary)
    return _ours(name, plans[schedule], task, rank, group, diary)


# pipemega


def _ours(
    name: str, plan: Plan, task: Task, rank: int, group: dist.ProcessGroup, diary: Diary
) -> System:
    plan = validate(lower(plan))
    share = [1.0 / len(plan.stages_of(home)) for home in plan.rank_of_stage]
    specs = [
        LayerSpec(SleepingStage, stage, _part(task, share[stage]), share[stage], diary)
        for stage in range(plan.num_stages)
    ]
    net = PipelineModule(specs, loss_fn=loss_fn)
    bounds = range(plan.num_stages + 1)
    building = Building(Axis("tensor"), torch.device("cpu"), seed=0)
    stages = build_stages(net, bounds, plan.stages_of(rank), building)
    named = [pair for stage in stages.values() for pair in stage.named_parameters()]
    buffer = GradientBuffer(named)
    weights = None
    # As `initialize` does it.
    if any(step.kind is Kind.BACKWARD_INPUT for step in plan.steps()):
        weights = WeightGradients(buffer)
        split(stages.values(), weights)
    axis = Axis("pipeline", tuple(range(task.ranks)), rank, group)
    transport = Transport(axis, plan.rank_of_stage, torch.device("cpu"))
    executor = Executor(rank, stages, plan.num_stages, transport, loss_fn, weights=weights)
    inputs, labels = _data(task)
    count = task.num_microbatches
    batch = MicroBatches(
        inputs, labels, draws=[Draws(0, 0, m) for m in range(count)], loss_factor=1 / count
    )

    def step() -> None:
        executor.run(plan, batch)

    # The queue of a split runs W at once, on the way to I.
    order = "IW" if weights is None else "WI"
    return System(name, plan.compute_only(), task.costs(plan), step, order)


def _part(task: Task, share: float) -> Seconds:
    return Seconds(*(seconds * share for seconds in task.share))


def _data(task: Task) -> tuple[list[Tensor], list[Tensor]]:
    inputs = [torch.full((1, WIDTH), 0.1 * m) for m in range(task.num_microbatches)]
    return inputs, [torch.ones(1, WIDTH) for _ in inputs]


# torch


def _torch(name: str, schedule_name: str, task: Task, rank: int, diary: Diary) -> System:
    schedule_type, chunks, placement = TORCH_SCHEDULES[schedule_name]
    num_stages = chunks * task.ranks
    here = [rank] if chunks == 1 else [rank, rank + task.ranks]
    if placement == "v":
        here = [rank, num_stages - 1 - rank]
    stages = [
        PipelineStage(
            SleepingStage(stage, _part(task, 1 / chunks), 1 / chunks, diary),
            stage,
            num_stages,
            torch.device("cpu"),
        )
        for stage in here
    ]
    try:
        schedule = schedule_type(
            stages[0] if chunks == 1 else stages, task.num_microbatches, loss_fn=loss_fn
        )
    except ValueError as error:
        raise ScheduleError(f"torch: {error}") from error
    plan = (
        _plan_of_torch(name, schedule, task)
        if chunks > 1
        else build_plan(schedule_name, task.ranks, task.num_microbatches)
    )
    whole_inputs, whole_labels = (torch.cat(parts) for parts in _data(task))

    def step() -> None:
        arguments = [whole_inputs] if 0 in here else []
        target = whole_labels if num_stages - 1 in here else None
        losses: list[Tensor] | None = [] if target is not None else None
        schedule.step(*arguments, target=target, losses=losses, return_outputs=False)

    return System(name, plan, _costs_of_torch(task.costs(plan)), step)


def _plan_of_torch(name: str, schedule: Any, task: Task) -> Plan:
    """The compute steps that torch's runtime will take, on all ranks."""
    order = schedule.pipeline_order_with_comms
    homes = schedule.stage_index_to_group_rank
    programs = tuple(
        tuple(
            Instruction(Kind(a.computation_type.value), a.stage_index, a.microbatch_index)
            for a in _flat(order[rank])
        )
        for rank in range(task.ranks)
    )
    ranks = tuple(homes[stage] for stage in range(len(homes)))
    return Plan(name, task.num_microbatches, ranks, programs)


def _flat(actions: Sequence[Any]) -> Iterator[Any]:
    """Without messages and reductions; a forward and a backward in one as the two."""
    for action in actions:
        if action.sub_actions is not None:
            yield from _flat(action.sub_actions)
        elif action.computation_type.value in ("F", "I", "W", "B"):
            yield action


def _costs_of_torch(costs: CostModel) -> CostModel:
    """Its first stage puts all of its backward off: nothing in I, I + W in W."""
    inputs, weights = list(costs.backward_input), list(costs.backward_weight)
    inputs[0], weights[0] = 0.0, inputs[0] + weights[0]
    return CostModel(
        costs.forward, tuple(inputs), tuple(weights), activation=costs.held_after_forward
    )
