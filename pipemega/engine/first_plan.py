"""The plan of the first step and its stages, and what changes them later."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import from_first
from pipemega.engine.plan_choice import PlanChooser
from pipemega.engine.run_setup import RunSetup
from pipemega.engine.schedule_tuner import ScheduleTuner, first_tuned_plan
from pipemega.engine.step_plans import StepPlans
from pipemega.errors import ConfigError
from pipemega.monitor import get_logger
from pipemega.pipeline.model.stages import stage_bounds
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds
from pipemega.pipeline.plan_selection import plan_is_provisional
from pipemega.planning.schedule_choice import with_cut_vocabulary


class FirstPlan(NamedTuple):
    """The plan of the first step, its stages, and what changes them later.

    Args:
        plan: lowered and validated.
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
        plans: of steps with different numbers of micro-batches.
        tuner: replaces the plan of schedule `auto` after measurements; None: it stays.
        is_provisional: the shapes of the first micro-batch may change plan and stages.
    """

    plan: Plan
    bounds: Bounds
    plans: StepPlans
    tuner: ScheduleTuner | None
    is_provisional: bool = False


def with_chosen_vocabulary(setup: RunSetup, given: Plan | None) -> RunSetup:
    """Return the setup with a cut vocabulary where schedule `auto` chooses it; collective.

    With iterators of the caller only on two ranks: other ranks need not have one.

    Args:
        given: as for `first_plan`.
    """
    mesh = setup.mesh
    if not plan_is_provisional(setup.config.pipeline, mesh.pipeline.size, given):
        return setup
    cut = with_cut_vocabulary(setup.config, setup.net)
    if cut is None or (setup.loader is None and mesh.pipeline.size > 2):
        return setup
    chooser = PlanChooser(setup)
    wins = from_first(mesh.world, lambda: chooser.prefers(cut))
    return replace(setup, config=cut) if wins else setup


def first_plan(setup: RunSetup, given: Plan | None) -> FirstPlan:
    """Choose the plan of the first step and its stages; collective.

    Args:
        given: the plan of the caller; replaces pipeline.schedule.

    Raises:
        ConfigError, ScheduleError: there is no such plan, or the model cannot be cut so.
    """
    config, mesh, batch = setup.config, setup.mesh, setup.batch
    log, sizes = get_logger(mesh.rank), config.batch_sizes(mesh.data.size)
    if sizes.changes and given is not None:
        raise _plan_in_a_ramp_up(given)
    staged, chooser = setup.staged_net, PlanChooser(setup)
    is_auto = plan_is_provisional(config.pipeline, mesh.pipeline.size, given)
    # The passes of a cut vocabulary are not measured, so the plan of the first step stays.
    is_tuned = is_auto and not setup.cuts_vocabulary and not chooser.shapes_follow
    cache: Path | None = None
    if is_tuned:
        chosen, cache = first_tuned_plan(chooser, mesh, _cost_key(setup), log)
    elif is_auto:
        chosen = from_first(mesh.world, lambda: chooser.choose(lambda: chooser.first_plan(None)))
    else:
        chosen = from_first(
            mesh.world, lambda: chooser.choose(lambda: chooser.configured_plan(given))
        )
    is_provisional = from_first(mesh.world, lambda: chooser.is_provisional)
    if is_provisional:
        log.info(_FOLLOWS)
    plan = chosen.plan
    if chosen.reason is not None:
        log.info(chosen.reason)
    # What "auto" means if the layers cannot be counted.
    by = "parameters" if config.pipeline.partition == "auto" else config.pipeline.partition
    bounds = chosen.bounds or stage_bounds(
        staged, by, plan.num_stages, mesh, setup.build_options, lambda: _micro_batch(setup.loader)
    )
    tuner: ScheduleTuner | None = None
    if is_tuned:
        tuner = ScheduleTuner(mesh, plan, bounds, chosen.seconds, chooser, cache, log)
    plans = StepPlans(mesh, plan, chooser if sizes.changes else None)
    if not (is_auto and is_provisional):
        plans.check(bounds, [size // batch.samples_per_slice for size in sizes.sizes[:-1]])
    return FirstPlan(plan, bounds, plans, tuner, is_provisional)


_FOLLOWS = (
    "the shapes of a micro-batch are not known yet: the first train_batch() chooses plan and "
    "stages, and moves the layers; with initialize(example=(inputs, labels)) they need not move"
)


def _plan_in_a_ramp_up(plan: Plan) -> ConfigError:
    return ConfigError(
        f"training.rampup_batch_size changes the number of micro-batches, and the plan "
        f"{plan.name!r} given to initialize() is for {plan.num_microbatches}: name a schedule in "
        "pipeline.schedule",
        on_every_rank=True,
    )


def _micro_batch(loader: BatchLoader | None) -> tuple[Any, Any]:
    """Return the micro-batch that partition "profile" measures; the loader does not consume it."""
    if loader is None or not loader.is_map_style:
        raise ConfigError(
            "pipeline.partition 'profile' measures the layers with a micro-batch, and there is "
            "none: give initialize() a map-style training_data, or use 'parameters'"
        )
    return loader.peek()


def _cost_key(setup: RunSetup) -> dict[str, Any]:
    """Return everything that the cost of a micro-batch on a layer depends on."""
    config, net = setup.config, setup.net
    sections = ["model", "activation_checkpointing", "fp16", "bf16", "data_types"]
    if config.compile.enabled:
        sections.append("compile")
    whole = config.to_dict()
    return {
        "layers": net.layer_names,
        "parameters": net.count_parameters(),
        "partition": config.pipeline.partition,
        "checkpoint_interval": config.pipeline.activation_checkpoint_interval,
        "mesh": str(setup.mesh.topology),
        "sequence_parallel": config.mesh.sequence_parallel,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        **{name: whole.get(name) for name in sections},
    }
