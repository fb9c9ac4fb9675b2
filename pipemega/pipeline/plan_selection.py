"""Selects the plan of the training steps from `pipeline.schedule`; imports no torch.

a name          the schedule of that name
{"file": ...}   the plan in that file
"auto"          with `pipeline.costs`: the best plan for these costs; without: see
                `planning.schedule_choice`, or, if the shapes of the data are unknown, a well-known
                plan until the stages are measured
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipemega.config.sections.pipeline_sections import CostsSection, PipelineSection, PlanFile
from pipemega.cuda_settings import hardware_queues, loads_lazily
from pipemega.errors import ConfigError, ScheduleError
from pipemega.lazy_imports import deferred
from pipemega.pipeline.plan.channels import (
    Hardware,
    MessageOrder,
    connections_per_rank,
)
from pipemega.pipeline.plan.fill_waits import delay_weights
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import CostModel, VocabularyCosts
from pipemega.pipeline.plan.validate import validate_messages
from pipemega.pipeline.schedules import build_plan, forward_only
from pipemega.pipeline.schedules.building_blocks import loop_and_v
from pipemega.pipeline.schedules.vocabulary_passes import with_vocabulary

# torch has 32 streams, which it hands out in turn; some are for collectives and copies.
_OTHER_STREAMS = 4
_STREAMS = 32 - _OTHER_STREAMS

# Only schedule "auto" searches.
autoschedule: Any = deferred("pipemega.pipeline.autoschedule")


def plan_is_provisional(section: PipelineSection, pp_size: int, given: Plan | None = None) -> bool:
    """Return whether the first plan is replaced once its steps were measured."""
    measured = section.schedule == "auto" and not isinstance(section.costs, CostsSection)
    return measured and given is None and pp_size > 1


def training_plan(
    section: PipelineSection,
    pp_size: int,
    num_microbatches: int,
    num_layers: int,
    order: MessageOrder,
    given: Plan | None = None,
    add_passes: Callable[[Plan], Plan] | None = None,
) -> Plan:
    """Return the plan of the first training step, lowered and validated for the transport.

    Args:
        order: how the backend separates the messages between two ranks.
        given: the plan that the caller of `initialize` passed; it replaces the configured one.
        add_passes: see `with_section_vocabulary`.

    Raises:
        ConfigError: a file cannot be read or has other sizes; more stages than layers.
        ScheduleError: the schedule does not support these sizes, no plan fits the memory limit, or
            the plan is invalid.
    """
    if given is None:
        plan = first_plan(section, pp_size, num_microbatches, num_layers)
    else:
        origin = f"the plan {given.name!r} given to initialize()"
        plan = check_sizes(given, origin, pp_size, num_microbatches)
    if section.fill_waits:
        plan = delay_weights(plan)
    if plan.num_stages > num_layers:
        raise ConfigError(
            f"the plan {plan.name!r} has {plan.num_stages} stages, and the model has {num_layers} "
            "layers: a stage needs at least one"
        )
    plan = with_section_vocabulary(plan, section, add_passes or with_passes)
    return validated(lower(plan), section, order)


def with_section_vocabulary(
    plan: Plan, section: PipelineSection, add_passes: Callable[[Plan], Plan]
) -> Plan:
    """Return the compute steps of `plan`, with the passes of pipeline.vocabulary "parallel".

    Args:
        add_passes: returns the compute steps of a plan with the passes; with counted costs it is
            `MetaModel.with_passes`. No result depends on the order of the passes.

    Raises:
        ConfigError: the plan has the passes, and the section does not ask for them.
    """
    if plan.has_vocabulary and section.vocabulary != "parallel":
        raise ConfigError(
            f"the plan {plan.name!r} has passes of vocabulary parallelism (E, S, C, T, G): set "
            "pipeline.vocabulary to 'parallel'"
        )
    if plan.has_vocabulary or plan.num_ranks == 1 or section.vocabulary != "parallel":
        return plan
    return add_passes(plan)


def with_passes(plan: Plan) -> Plan:
    """Return the compute steps of `plan` with the passes, for costs that are not counted.

    The head is taken to be as large as all other layers.
    """
    stages, head = plan.num_stages, 1 / plan.num_ranks
    costs = CostModel.uniform(stages, 1 / stages, 1 / stages, 1 / stages)
    passes = VocabularyCosts(output=2 * head, output_weight=head)
    return with_vocabulary(plan, replace(costs, vocabulary=passes))


def evaluation_plan(training: Plan, num_microbatches: int) -> Plan:
    """Return the lowered plan of an evaluation with the stages of a training step."""
    plan = forward_only(training.rank_of_stage, num_microbatches)
    if training.has_vocabulary:
        plan = with_vocabulary(plan, CostModel.uniform(plan.num_stages))
    return lower(plan)


def warmup_plan(training: Plan) -> Plan:
    """Return the lowered plan of one micro-batch that passes the stages one after another.

    No message is on its way while an instruction runs: it was received by its last user.
    """
    backward = [Kind.BACKWARD]
    if training.splits_backward:
        backward = [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
    stages = range(training.num_stages)
    order = [Instruction(Kind.FORWARD, stage, 0) for stage in stages]
    order += [Instruction(kind, stage, 0) for stage in reversed(stages) for kind in backward]
    place = training.rank_of_stage
    programs = (tuple(s for s in order if place[s.stage] == r) for r in range(training.num_ranks))
    plan = Plan("warm-up", 1, place, tuple(programs))
    return lower(with_passes(plan) if training.has_vocabulary else plan, ahead=0)


def validated(plan: Plan, section: PipelineSection, order: MessageOrder) -> Plan:
    """Return the lowered `plan` unchanged if the transport can carry it, and its evaluation too.

    Raises:
        ScheduleError: the plan is invalid, or some of its messages would never arrive.
    """
    discards = section.optimizer_sync == "post_validate"
    loads = section.shapes == "exchanged" or not section.warm_up
    hardware = _hardware(plan, loads)
    # A partial step at the end of an epoch sends headers, as evaluation does.
    for shapes in sorted({section.shapes, "exchanged"}):
        validate_messages(plan, order, shapes, discards=discards, hardware=hardware)
    evaluation = evaluation_plan(plan, plan.num_microbatches)
    validate_messages(evaluation, order, section.shapes, discards=discards, hardware=hardware)
    return plan


def _hardware(plan: Plan, loads: bool) -> Hardware:
    """Return what the connections of a rank share on a GPU, with the variables of this job.

    Args:
        loads: a step has kernels that no warm-up has loaded (`pipeline.kernel_warmup`).
    """
    used = max(connections_per_rank(plan.rank_of_stage, plan.transfers))
    queues = hardware_queues()
    return Hardware(
        queues=queues if min(used, _STREAMS) + _OTHER_STREAMS > queues else None,
        streams=_STREAMS if used > _STREAMS else None,
        loads=loads and loads_lazily(),
    )


def first_plan(
    section: PipelineSection, pp_size: int, num_microbatches: int, num_layers: int
) -> Plan:
    """Return the plan of the first training step, compute steps only.

    Raises:
        ConfigError: the file cannot be read or has other sizes.
        ScheduleError: the schedule does not support these sizes, or no plan fits the memory limit.
    """
    if isinstance(section.schedule, PlanFile):
        return _read_plan(section.schedule.file, pp_size, num_microbatches)
    if section.schedule != "auto":
        return build_plan(section.schedule, pp_size, num_microbatches, section.stages_per_rank)
    if isinstance(section.costs, CostsSection):
        placements = _placements(section, section.costs, pp_size, num_layers)
        return best_plan(placements, num_microbatches, section.memory_limit)
    if pp_size == 1:
        # One rank never waits: all schedules are equally fast.
        chunks = section.stages_per_rank or 1
        return build_plan("1f1b" if chunks == 1 else "interleaved", 1, num_microbatches, chunks)
    return measurement_plan(pp_size, num_microbatches, section.stages_per_rank or 1)


def measurement_plan(pp_size: int, num_microbatches: int, chunks: int) -> Plan:
    """Return a well-known plan to measure the stages with, with I and W instead of each B.

    It is 1F1B for one stage per rank, 1F1B with V placement for two (the placement with the best
    plans at the memory of 1F1B) and interleaved 1F1B for more.
    """
    name = {1: "1f1b", 2: "1f1b-v"}.get(chunks, "interleaved")
    return _with_split_backward(build_plan(name, pp_size, num_microbatches, chunks))


def plan_of_size(section: PipelineSection, current: Plan, num_microbatches: int) -> Plan:
    """Return the plan of a step of `training.rampup_batch_size`, compute steps only.

    Args:
        current: the plan of a step of another size; the new plan has the same stages.

    Raises:
        ConfigError: the plan is read from a file, for one number of micro-batches.
        ScheduleError: the schedule does not support this number.
    """
    ranks, stages = current.num_ranks, current.num_stages
    try:
        if isinstance(section.schedule, PlanFile):
            raise ConfigError(
                f"the plan in pipeline.schedule.file {section.schedule.file!r} is for "
                f"{current.num_microbatches}: name a schedule"
            )
        if section.schedule == "auto" and isinstance(section.costs, CostsSection):
            placements = _placements(section, section.costs, ranks, stages)
            same = [p for p in placements if p.rank_of_stage == current.rank_of_stage]
            if same:
                return best_plan(same, num_microbatches, section.memory_limit)
        plan = first_plan(section, ranks, num_microbatches, stages)
        if plan.rank_of_stage == current.rank_of_stage:
            return delay_weights(plan) if section.fill_waits else plan
        # Schedule `auto` has chosen other stages for the full steps, or a callback has moved them.
        equal = (1.0,) * stages
        costs = CostModel(equal, equal, equal)
        return best_plan_on(current.rank_of_stage, costs, num_microbatches, "auto")
    except (ConfigError, ScheduleError) as error:
        raise type(error)(
            f"training.rampup_batch_size has steps of {num_microbatches} micro-batches, but {error}"
        ) from error


def best_plan(placements: Sequence[Any], num_microbatches: int, memory_limit: float | str) -> Plan:
    """Return the plan with the shortest makespan on one of `placements` within the memory limit.

    Args:
        memory_limit: limit of the activations in the unit of the costs; "auto": `limit_of_1f1b`.

    Raises:
        ScheduleError: no plan fits the limit; names the smallest limit that fits.
    """
    if isinstance(memory_limit, str):
        memory_limit = autoschedule.limit_of_1f1b(placements, num_microbatches)
    plan: Plan = autoschedule.find_plan(placements, num_microbatches, memory_limit).plan
    return plan


def best_plan_on(
    rank_of_stage: tuple[int, ...], costs: CostModel, num_microbatches: int, limit: float | str
) -> Plan:
    """Return `best_plan` on these stages."""
    placement = autoschedule.Placement(rank_of_stage, costs)
    return best_plan([placement], num_microbatches, limit)


def _placements(
    section: PipelineSection, costs: CostsSection, pp_size: int, num_layers: int
) -> list[Any]:
    """Return the placements to search, with the costs of their stages."""
    if (stages := costs.num_stages) is not None:
        if stages % pp_size or section.stages_per_rank not in (None, stages // pp_size):
            per_rank = section.stages_per_rank
            times = " times any number" if per_rank is None else f" * pipeline.chunks ({per_rank})"
            raise ConfigError(
                f"pipeline.costs has {stages} numbers for each of F, I and W, and the stages are "
                f"mesh.pipeline ({pp_size}){times}: write one number for each stage"
            )
        per_stage = _per_stage(costs, [1.0] * stages)
        return list(autoschedule.placements_of_stage_costs(pp_size, per_stage))
    found = []
    chunks = section.stages_per_rank
    for count in (chunks,) if chunks else autoschedule.chunk_counts(pp_size, num_layers):
        if pp_size * count > max(num_layers, pp_size):
            continue
        share = [1.0 / count] * (pp_size * count)
        for place in loop_and_v(pp_size, count):
            found.append(autoschedule.Placement(place, _per_stage(costs, share)))
    if not found:
        raise ConfigError(
            f"mesh.pipeline ({pp_size}) * pipeline.chunks ({section.stages_per_rank}) = "
            f"{pp_size * (section.stages_per_rank or 1)} stages, and the model has {num_layers} "
            "layers: a stage needs at least one"
        )
    return found


def _per_stage(costs: CostsSection, share: Sequence[float]) -> CostModel:
    """Return the costs of each stage; one number for all stages is multiplied by `share`."""

    def each(value: float | tuple[float, ...]) -> tuple[float, ...]:
        return value if isinstance(value, tuple) else tuple(value * part for part in share)

    return CostModel(
        each(costs.forward),
        each(costs.backward_input),
        each(costs.backward_weight),
        None if costs.backward is None else each(costs.backward),
        each(1.0 if costs.activation is None else costs.activation),
        None if costs.kept is None else each(costs.kept),
        costs.message,
    )


def _with_split_backward(plan: Plan) -> Plan:
    """Replace each B of the plan by I and then W."""
    halves = {Kind.BACKWARD: (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)}
    programs = (
        tuple(s._replace(kind=kind) for s in program for kind in halves.get(s.kind, (s.kind,)))
        for program in plan.programs
    )
    return replace(plan, programs=tuple(programs))


def _read_plan(file: str, pp_size: int, num_microbatches: int) -> Plan:
    path, origin = Path(file), f"pipeline.schedule.file {file!r}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{origin} cannot be read: {why}") from error
    try:
        read = Plan.from_json if text.lstrip().startswith("{") else Plan.from_csv
        plan = read(text)
    except ScheduleError as error:
        raise ScheduleError(f"{origin}: {error}") from error
    return check_sizes(replace(plan, name=path.name), origin, pp_size, num_microbatches)


def check_sizes(plan: Plan, origin: str, pp_size: int, num_microbatches: int) -> Plan:
    """Return the compute steps of a user's plan, if its sizes fit the mesh and the batch.

    Args:
        origin: names the plan in messages.

    Raises:
        ConfigError: it has other sizes or no backward.
    """
    if plan.num_ranks != pp_size:
        raise ConfigError(
            f"{origin} is a plan for {plan.num_ranks} pipeline ranks, and mesh.pipeline is "
            f"{pp_size}: make them equal"
        )
    if plan.num_microbatches != num_microbatches:
        raise ConfigError(
            f"{origin} is a plan for {plan.num_microbatches} micro-batches, and "
            f"gradient_accumulation_steps is {num_microbatches}: make them equal"
        )
    if plan.forward_only:
        raise ConfigError(f"{origin} has no backward (B, or I and W), so it cannot train")
    return plan.compute_only()
