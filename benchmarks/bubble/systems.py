"""The compared systems: pipemega's executor with any plan, and torch.distributed.pipelining.

A system consists of a function that runs one step with sleeping stages, and the plan of this step.
The log of the sleeps is checked against the plan, and the plan is simulated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.bubble.plans import LIMITS
from benchmarks.bubble.stages import WIDTH, Seconds, SleepingStage, SleepLog, loss_fn
from pipemega.distributed.mesh import Axis
from pipemega.errors import ScheduleError
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.pipeline.execution_state import MicroBatches
from pipemega.pipeline.executor import Executor, RankStages
from pipemega.pipeline.model.module import BuildOptions, PipelineModule, RngKey, build_stages
from pipemega.pipeline.model.spec import LayerSpec
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import CostModel
from pipemega.pipeline.plan.validate import validate
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from pipemega.pipeline.split_backward import WeightGradQueue, enable_split_backward
from pipemega.pipeline.transport import Transport

TORCH_SCHEDULES: dict[str, tuple[type[Any], int, str]] = {
    # name -> class, stages per rank, placement
    "gpipe": (schedules.ScheduleGPipe, 1, "loop"),
    "1f1b": (schedules.Schedule1F1B, 1, "loop"),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2, "loop"),
    "looped-bfs": (schedules.ScheduleLoopedBFS, 2, "loop"),
    "interleaved-zb": (schedules.ScheduleInterleavedZeroBubble, 2, "loop"),
    "zb-v": (schedules.ScheduleZBVZeroBubble, 2, "v"),
}
if hasattr(schedules, "ScheduleDualPipeV"):  # not in torch 2.8
    TORCH_SCHEDULES["dualpipe-v"] = (schedules.ScheduleDualPipeV, 2, "v")


@dataclass(frozen=True)
class Task:
    """Sizes and costs of one table.

    Args:
        ranks, num_microbatches: number of pipeline ranks and of micro-batches.
        share: seconds of F, I and W in all stages of one rank together.
    """

    ranks: int
    num_microbatches: int
    share: Seconds

    @property
    def ideal(self) -> float:
        """Seconds of a step in which no rank waits."""
        return self.num_microbatches * sum(self.share)

    def costs(self, plan: Plan) -> CostModel:
        """Return the times that the stages of `plan` sleep; messages take no time."""
        return CostModel.from_rank_costs(plan.rank_of_stage, *self.share)


@dataclass(frozen=True)
class System:
    """One row of a table.

    Args:
        name: `pipemega:SCHEDULE` or `torch:SCHEDULE`.
        plan: the compute steps that it runs.
        costs: their times in this benchmark, for the simulation.
        step: runs the plan once on this rank.
        whole_backward: order in which a whole backward sleeps I and W.
    """

    name: str
    plan: Plan
    costs: CostModel
    step: Callable[[], None]
    whole_backward: str = "IW"

    def parts(self, rank: int) -> list[list[tuple[str, int]]]:
        """Return, for each step of `rank`, the (part, stage) of its sleeps in order."""
        return [
            [(part, step.stage) for part in self._parts(step)] for step in self.plan.programs[rank]
        ]

    def _parts(self, step: Instruction) -> str:
        if step.kind is Kind.BACKWARD:
            return self.whole_backward
        if self.costs.backward_input[step.stage] == 0.0 and step.kind is not Kind.FORWARD:
            # The first stage of torch does nothing in I and everything in W.
            return "" if step.kind is Kind.BACKWARD_INPUT else self.whole_backward
        return step.kind.value


def names(words: Sequence[str], files: Iterable[str] = ()) -> list[str]:
    """Return all systems, or those named in `words`: one (`torch:zb-v`) or a family (`torch:`).

    Args:
        files: names of the plans from files, which pipemega runs.
    """
    known = [f"pipemega:{name}" for name in (*SCHEDULES, *LIMITS, *files)]
    known += [f"torch:{name}" for name in TORCH_SCHEDULES]
    return [n for n in known if not words or n in words or f"{n.split(':')[0]}:" in words]


def build(
    name: str,
    task: Task,
    rank: int,
    group: dist.ProcessGroup,
    log: SleepLog,
    plans: Mapping[str, Plan],
) -> System:
    """Build one system on this rank; collective.

    Args:
        plans: name -> plan, for the systems of pipemega.

    Raises:
        ScheduleError: the schedule does not support these sizes.
    """
    family, _, schedule = name.partition(":")
    if family == "torch":
        return _torch(name, schedule, task, rank, log)
    return _pipemega(name, plans[schedule], task, rank, group, log)


# pipemega


def _pipemega(
    name: str, plan: Plan, task: Task, rank: int, group: dist.ProcessGroup, log: SleepLog
) -> System:
    plan = validate(lower(plan))
    share = [1.0 / len(plan.stages_of(owner)) for owner in plan.rank_of_stage]
    specs = [
        LayerSpec(SleepingStage, stage, _part(task, share[stage]), share[stage], log)
        for stage in range(plan.num_stages)
    ]
    net = PipelineModule(specs, loss_fn=loss_fn)
    bounds = range(plan.num_stages + 1)
    build_options = BuildOptions(Axis("tensor"), torch.device("cpu"), seed=0)
    stages = build_stages(net, bounds, plan.stages_of(rank), build_options)
    named = [pair for stage in stages.values() for pair in stage.named_parameters()]
    buffer = GradientBuffer(named)
    weights = None
    # As in `initialize`.
    if plan.splits_backward:
        weights = WeightGradQueue(buffer)
        enable_split_backward(stages.values(), weights)
    axis = Axis("pipeline", tuple(range(task.ranks)), rank, group)
    transport = Transport(axis, plan.rank_of_stage, torch.device("cpu"))
    executor = Executor(
        RankStages(rank, stages, plan.num_stages, loss_fn), transport, weight_queue=weights
    )
    inputs, labels = _data(task)
    count = task.num_microbatches
    batch = MicroBatches(
        inputs, labels, rng_keys=[RngKey(0, 0, m) for m in range(count)], loss_factor=1 / count
    )

    def step() -> None:
        executor.run(plan, batch)

    # Outside `defer`, the queue runs W immediately, before I.
    order = "IW" if weights is None else "WI"
    return System(name, plan.compute_only(), task.costs(plan), step, order)


def _part(task: Task, share: float) -> Seconds:
    return Seconds(*(seconds * share for seconds in task.share))


def _data(task: Task) -> tuple[list[Tensor], list[Tensor]]:
    inputs = [torch.full((1, WIDTH), 0.1 * m) for m in range(task.num_microbatches)]
    return inputs, [torch.ones(1, WIDTH) for _ in inputs]


# torch


def _torch(name: str, schedule_name: str, task: Task, rank: int, log: SleepLog) -> System:
    schedule_type, chunks, placement = TORCH_SCHEDULES[schedule_name]
    num_stages = chunks * task.ranks
    here = [rank] if chunks == 1 else [rank, rank + task.ranks]
    if placement == "v":
        here = [rank, num_stages - 1 - rank]
    stages = [
        PipelineStage(
            SleepingStage(stage, _part(task, 1 / chunks), 1 / chunks, log),
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
    """Return the compute steps of all ranks from the runtime of torch."""
    order = schedule.pipeline_order_with_comms
    rank_of_stage = schedule.stage_index_to_group_rank
    programs = tuple(
        tuple(
            Instruction(Kind(a.computation_type.value), a.stage_index, a.microbatch_index)
            for a in _flat(order[rank])
        )
        for rank in range(task.ranks)
    )
    ranks = tuple(rank_of_stage[stage] for stage in range(len(rank_of_stage)))
    return Plan(name, task.num_microbatches, ranks, programs)


def _flat(actions: Sequence[Any]) -> Iterator[Any]:
    """Yield compute actions, without messages and reductions; split combined F and B actions."""
    for action in actions:
        if action.sub_actions is not None:
            yield from _flat(action.sub_actions)
        elif action.computation_type.value in ("F", "I", "W", "B"):
            yield action


def _costs_of_torch(costs: CostModel) -> CostModel:
    """Return the costs for torch, whose first stage does nothing in I, and I + W in W."""
    inputs, weights = list(costs.backward_input), list(costs.backward_weight)
    inputs[0], weights[0] = 0.0, inputs[0] + weights[0]
    return CostModel(
        costs.forward, tuple(inputs), tuple(weights), activation=costs.held_after_forward
    )
