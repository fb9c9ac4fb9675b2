"""Which plan the training steps run, from the config; on paper.

a name          the schedule of that name
{"file": ...}   the plan that is written there
"auto"          with costs: the best plan for them; without: a plain one to measure the stages
                with, after which `best_plan` makes the best for what was measured
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipemega.config.pipeline import CostsSection, PipelineSection, PlanFile
from pipemega.errors import ConfigError, ScheduleError
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Instruction, Kind, Plan
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.schedules import build_plan
from pipemega.pipeline.schedules.placement import loop, v
from pipemega.pipeline.synthesis import Layout, Synthesis, layouts_of_stages, synthesize
from pipemega.pipeline.validate import validate

# Chunk counts that are tried where the user names none.
_CHUNKS = (1, 2, 4)


def plan_is_open(section: PipelineSection, pp_size: int, given: Plan | None = None) -> bool:
    """Whether the first plan is there to be replaced, by the best for what its steps took."""
    measured = section.schedule == "auto" and not isinstance(section.costs, CostsSection)
    return measured and given is None and pp_size > 1


def training_plan(
    section: PipelineSection,
    pp_size: int,
    num_microbatches: int,
    num_layers: int,
    given: Plan | None = None,
) -> Plan:
    """The plan of the first training step, with its messages, proven.

    Args:
        given: by the caller of `initialize`, in place of what the config says.

    Raises:
        ConfigError: a file cannot be read, or is for other sizes; more stages than layers.
        ScheduleError: the schedule cannot take these sizes, no plan keeps the memory limit, or the
            plan breaks a rule.
    """
    if given is None:
        plan = first_plan(section, pp_size, num_microbatches, num_layers)
    else:
        origin = f"the plan {given.name!r} given to initialize()"
        plan = check_sizes(given, origin, pp_size, num_microbatches)
    if plan.num_stages > num_layers:
        raise ConfigError(
            f"the plan {plan.name!r} has {plan.num_stages} stages, and the model has {num_layers} "
            "layers: a stage needs one at least"
        )
    return validate(lower(plan))


def first_plan(
    section: PipelineSection, pp_size: int, num_microbatches: int, num_layers: int
) -> Plan:
    """The plan of the first training step.

    Raises:
        ConfigError: the file cannot be read, or is for other sizes.
        ScheduleError: the schedule cannot take these sizes, or no plan keeps the memory limit.
    """
    if isinstance(section.schedule, PlanFile):
        return _read(section.schedule.file, pp_size, num_microbatches)
    if section.schedule != "auto":
        return build_plan(section.schedule, pp_size, num_microbatches, section.stages_per_rank)
    if isinstance(section.costs, CostsSection):
        layouts = _layouts(section, section.costs, pp_size, num_layers)
        return best_plan(layouts, num_microbatches, section.memory_limit).plan
    if pp_size == 1:
        # Nobody waits for anybody: there is nothing to choose.
        chunks = section.stages_per_rank or 1
        return build_plan("1f1b" if chunks == 1 else "interleaved", 1, num_microbatches, chunks)
    chunks = section.stages_per_rank or (2 if num_layers >= 2 * pp_size else 1)
    return plain(pp_size, num_microbatches, chunks)


def plain(pp_size: int, num_microbatches: int, chunks: int) -> Plan:
    """A well-known plan to measure stages with: each backward in halves, W right behind I.

    One stage a rank runs 1F1B, two lie in a v, which has the best plans of all at the memory of
    1F1B; more run interleaved.
    """
    name = {1: "1f1b", 2: "1f1b-v"}.get(chunks, "interleaved")
    return _halved(build_plan(name, pp_size, num_microbatches, chunks))


def best_plan(
    layouts: Sequence[Layout], num_microbatches: int, memory_limit: float | str
) -> Synthesis:
    """The best plan, by makespan, on one of `layouts` whose activations keep the limit.

    Args:
        memory_limit: in the unit of the costs; "auto": `usual_memory` of each.

    Raises:
        ScheduleError: no plan keeps the limit; says the least that would do.
    """
    if not isinstance(memory_limit, str):
        return synthesize(layouts, num_microbatches, memory_limit)
    limit = max(usual_memory(layout, num_microbatches) for layout in layouts)
    return synthesize(layouts, num_microbatches, limit)


def usual_memory(layout: Layout, num_microbatches: int) -> float:
    """What 1F1B takes on its fullest rank: as many micro-batches as there are ranks.

    W may need a little more than F left, output gradients beside inputs: that counts as taken, up
    to a tenth. With activation checkpointing it needs many times as much, and that does not.
    """
    held = [0.0] * layout.num_ranks
    costs = layout.costs
    for rank, activation, kept in zip(
        layout.rank_of_stage, costs.held_after_forward, costs.held_after_input, strict=True
    ):
        held[rank] += min(max(activation, kept), 1.1 * activation)
    return max(held) * min(num_microbatches, layout.num_ranks)


def _layouts(
    section: PipelineSection, costs: CostsSection, pp_size: int, num_layers: int
) -> list[Layout]:
    """Where the stages may lie, and what they cost there."""
    if (stages := costs.num_stages) is not None:
        if stages % pp_size or section.stages_per_rank not in (None, stages // pp_size):
            per_rank = section.stages_per_rank
            times = " times any number" if per_rank is None else f" * pipeline.chunks ({per_rank})"
            raise ConfigError(
                f"pipeline.costs has {stages} numbers for each step, and the stages are "
                f"mesh.pipeline ({pp_size}){times}: write one number for each stage"
            )
        return layouts_of_stages(pp_size, _per_stage(costs, [1.0] * stages))
    found = []
    for count in [section.stages_per_rank] if section.stages_per_rank else _CHUNKS:
        if pp_size * count > max(num_layers, pp_size):
            continue
        share = [1.0 / count] * (pp_size * count)
        for place in dict.fromkeys((loop(pp_size, count), v(pp_size, count))):
            found.append(Layout(place, _per_stage(costs, share)))
    if not found:
        raise ConfigError(
            f"mesh.pipeline ({pp_size}) * pipeline.chunks ({section.stages_per_rank}) = "
            f"{pp_size * (section.stages_per_rank or 1)} stages, and the model has {num_layers} "
            "layers: a stage needs one at least"
        )
    return found


def _per_stage(costs: CostsSection, share: Sequence[float]) -> CostModel:
    """Costs of each stage, which has the given share of its rank where one number is for all."""

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


def _halved(plan: Plan) -> Plan:
    """The same plan with I and W, one after the other, in place of each B."""
    programs = []
    for program in plan.programs:
        steps: list[Instruction] = []
        for step in program:
            if step.kind is Kind.BACKWARD:
                steps += [
                    step._replace(kind=k) for k in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
                ]
            else:
                steps.append(step)
        programs.append(tuple(steps))
    return replace(plan, programs=tuple(programs))


def _read(file: str, pp_size: int, num_microbatches: int) -> Plan:
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"pipeline.schedule.file {file!r} cannot be read: {why}") from error
    try:
        read = Plan.from_json if text.lstrip().startswith("{") else Plan.from_csv
        plan = read(text)
    except ScheduleError as error:
        raise ScheduleError(f"pipeline.schedule.file {file!r}: {error}") from error
    return check_sizes(
        replace(plan, name=path.name), f"pipeline.schedule.file {file!r}", pp_size, num_microbatches
    )


def check_sizes(plan: Plan, origin: str, pp_size: int, num_microbatches: int) -> Plan:
    """Returns a plan that somebody brought, if it can train on this mesh with this batch.

    Args:
        origin: what messages call it.

    Raises:
        ConfigError: it is for other sizes, or trains nothing.
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
        raise ConfigError(
            f"{origin} is a plan without a backward (B, or I and W), which trains nothing"
        )
    return plan.compute_only()
