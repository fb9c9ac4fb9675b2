"""The plan of the first step and its stages, for a schedule with known costs.

Rank 0 chooses; the others receive the plan.  If the shapes of a micro-batch are known, from the
section `model`, an example or the training data, the layers are counted on the meta device as in
`pipemega plan`, and the choice is the same.  Otherwise the first choice is provisional: it is made
again when the first micro-batch has been read (`LateChoice`).

Plans that need more than the times of layers come from the planner, a leaf (`plan_chooser`).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from pipemega.config.sections.pipeline_sections import PlanFile
from pipemega.distributed.mesh import from_first
from pipemega.engine.run_setup import RunSetup
from pipemega.engine.train_step import StepFeature
from pipemega.errors import ConfigError, PipelineError, PipemegaError
from pipemega.layer_costs.counted_model import CountedModel, explain
from pipemega.layer_costs.stage_costs import Sample
from pipemega.layer_costs.tensor_meter import DeviceType, unmetered
from pipemega.lazy_imports import load_name
from pipemega.models.build_model import ModelContext, sample_from
from pipemega.monitor import get_logger
from pipemega.pipeline.connections import message_order
from pipemega.pipeline.plan.fill_waits import Waits
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.partition import Bounds, Cut
from pipemega.pipeline.plan_selection import (
    plan_is_provisional,
    plan_of_size,
    training_plan,
    validated,
    with_passes,
)
from pipemega.pipeline.schedules import AUTO, forward_only, splits_backward

# Schedule `auto`; other plans that need more than the times of layers: see `plan_chooser`.
_TUNED_PLANS = "pipemega.planning.schedule_tuner:TunedPlans"
_CHOSEN_VOCABULARY = "pipemega.planning.planner:with_chosen_vocabulary"
_PLANNER = "pipemega.planning.planner:Planner"


class ChosenPlan(NamedTuple):
    """A plan and its stages.

    Args:
        plan: the plan, lowered and validated.
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1; None: `stage_bounds` determines
            them, because pipeline.partition does not depend on the plan.
        seconds: predicted seconds of a step; None: unknown.
        reason: why the model is cut so, for the log; None: nothing to say.
        waits: with pipeline.fill_waits, the exchanges of each layer.
    """

    plan: Plan
    bounds: Bounds | None
    seconds: float | None = None
    reason: str | None = None
    waits: tuple[Waits, ...] = ()


class PlanChooser:
    """Chooses plans and cuts by the times of layers.

    Args:
        setup: what the engine is built from; without an optimizer the cut is for evaluation.

    Attributes:
        mesh: the device mesh of the run.
        log: the logger of this rank.
        shapes_follow: the shapes of a micro-batch are known once the first step has been read.
        is_provisional: on rank 0, a choice needed shapes that the first micro-batch is going to
            have.
    """

    counts_with: type[CountedModel] = CountedModel

    def __init__(self, setup: RunSetup) -> None:
        self._config, self.mesh, self._net = setup.config, setup.mesh, setup.net
        self._trains, self._loader, self._example = setup.trains, setup.loader, setup.example
        waits = setup.trains and setup.mesh.pipeline.size > 1 and not setup.has_read
        self.shapes_follow = waits and next(self._samples(), None) is None
        self.is_provisional = False
        self._num_microbatches = setup.batch.num_microbatches
        self._model: CountedModel | None = None
        self._has_counted = False
        self._bounds: Bounds | None = None  # of the stages of the run
        self._failure: str | None = None  # of a stage on the meta device
        self.log = get_logger(setup.mesh.rank)
        self._order = message_order(setup.mesh.pipeline, setup.mesh.device)

    def first(self, given: Plan | None) -> ChosenPlan:
        """Return the plan of the first step and its stages; collective.

        Args:
            given: the plan of the caller; replaces pipeline.schedule.

        Raises:
            ConfigError, ScheduleError: as `configured_plan`.
        """
        return self._from_first(lambda: self._with_waits(self.configured_plan(given)))

    def _with_waits(self, chosen: ChosenPlan) -> ChosenPlan:
        if not (self._config.pipeline.fill_waits and self._trains):
            return chosen
        self._count()
        assert self._model is not None
        return chosen._replace(waits=self._model.waits)

    def tuner(self, first: ChosenPlan, bounds: Bounds) -> StepFeature | None:
        """Return what replaces the first plan after measurements; None: the plan stays.

        Args:
            bounds: the bounds of the stages of the plan.
        """
        return None

    def _from_first(self, pick: Callable[[], ChosenPlan]) -> ChosenPlan:
        """Return `pick()` of rank 0; collective.

        Layers that run on the meta device one by one may fail there as a stage: then the choice is
        made without counts.
        """

        def choose() -> ChosenPlan:
            try:
                return pick()
            except PipelineError as error:
                if self._model is None:
                    raise
                self._model, self._bounds, self._failure = None, None, str(error)
                self._has_counted = False
                return pick()

        return from_first(self.mesh.world, choose)

    def configured_plan(self, given: Plan | None) -> ChosenPlan:
        """Return the plan of a schedule that needs no measurement, and its stages.

        Args:
            given: replaces the configured one.

        Raises:
            ConfigError, ScheduleError: as `training_plan`; a limit of pipeline is set, and bytes
                cannot be counted; no cut keeps pipeline.memory_limit.
        """
        section, ranks = self._config.pipeline, self.mesh.pipeline.size
        count, layers = self._num_microbatches, len(self._net)
        plan = training_plan(section, ranks, count, layers, self._order, given, self._with_passes)
        if plan.num_stages == 1:
            return ChosenPlan(plan, None)
        return self._with_stages(plan, given)

    def _with_stages(self, plan: Plan, given: Plan | None) -> ChosenPlan:
        """Return the configured plan and its stages, by the times of layers if it needs them."""
        if self._config.pipeline.partition == "auto":
            self._count()
        reason = None
        if self._model is not None:
            self._bounds, reason = self._cut(self._model, plan)
        return ChosenPlan(plan, self._bounds, reason=reason)

    def _with_passes(self, plan: Plan) -> Plan:
        """Return `plan` with the passes of vocabulary parallelism."""
        return with_passes(plan)

    def _cut(self, model: CountedModel, plan: Plan) -> tuple[Bounds | None, str | None]:
        """Return the bounds of the stages of `plan`, and why they are chosen.

        None if pipeline.partition is "profile", which measures on all ranks.
        """
        if not model.cuts_by_time:
            known = self._config.pipeline.partition != "profile"
            return (model.even_bounds(plan.num_stages) if known else None), None
        if not self._trains:
            plan = forward_only(plan.rank_of_stage, plan.num_microbatches)
        plan = plan.without_vocabulary()
        cut = model.cut(plan)
        even = Cut.of(model.even_bounds(plan.num_stages), plan, model.layer_costs)
        return cut.bounds, explain(cut, even)

    def plan_of_size(self, current: Plan, bounds: Bounds, num_microbatches: int) -> Plan:
        """Return the plan of a step of another size, lowered, on the stages of `current`.

        Args:
            bounds: the bounds of the stages; they may have moved.

        Raises:
            ConfigError, ScheduleError: there is none.
        """
        plan = plan_of_size(self._config.pipeline, current, num_microbatches)
        return validated(lower(plan), self._config.pipeline, self._order)

    @property
    def _device(self) -> DeviceType:
        """The device whose kernels are counted."""
        return "cuda" if self.mesh.device.type == "cuda" else "cpu"

    def _count(self) -> None:
        """Count the model on the meta device, once; `_model` is None if that is not possible.

        Raises:
            ConfigError: a limit of the section pipeline is set, and needs it.
        """
        if self._has_counted:
            return
        self._has_counted, section = True, self._config.pipeline
        limit, name = section.weight_queue_limit, section.schedule
        why = self._failure or "the shapes of a micro-batch are unknown"
        tell = self.log.info if self._failure is None else self.log.warning
        for sample in self._samples() if self._failure is None else ():
            try:
                with unmetered():
                    of_run = self._config, self._net.on_meta(), sample(), self.mesh.topology
                    model = self.counts_with(*of_run, self._device)
                    _ = model.layer_costs
                self._model = model
                return
            # A run that needs no counts has to start anyway.
            except PipemegaError as error:
                why, tell = str(error), self.log.warning
        if self.shapes_follow and not section.fill_waits:
            self.is_provisional = True
            return
        limits = {
            "weight_queue_limit": limit not in (None, "auto"),
            "memory_limit": section.memory_limit != "auto" and name != AUTO,
            "fill_waits": section.fill_waits,
        }
        for key, is_set in limits.items():
            if is_set:
                raise ConfigError(
                    f"pipeline.{key} needs the bytes and times of each stage, and they cannot be "
                    f"counted: {why}; give initialize() layers that run on torch's meta device and "
                    f"example=(inputs, labels), or remove pipeline.{key}"
                )
        if name == AUTO:
            tell(
                f"schedule auto: the FLOPs and bytes of the layers cannot be counted ({why}): the "
                f"search is limited to pipeline.chunks {section.stages_per_rank or 1}"
            )
        elif limit == "auto" and isinstance(name, str) and splits_backward(name):
            tell(
                f"weight_queue_limit auto: the tensors stored for W cannot be counted ({why}): "
                f"schedule {name!r} stays as it is"
            )
        if section.partition == "auto":
            tell(
                f"partition auto: the times of the layers cannot be counted ({why}): stages get "
                "even numbers of parameters, as with pipeline.partition 'parameters'"
            )

    def _samples(self) -> Iterator[Callable[[], Sample]]:
        """Yield functions that return a micro-batch: example, of the config, the data, the model.

        The micro-batch from the config comes before the data, as in `pipemega plan`, so the cut is
        the same.
        """
        config, loader, example = self._config, self._loader, self._example
        if example is not None:
            yield lambda: example
        if config.model is not None:
            context = ModelContext.of(config, self.mesh.topology)
            yield lambda: Sample(*sample_from(context))
        if loader is not None and loader.is_map_style:
            yield lambda: Sample.like(*loader.peek())
        length, topology = self._net.sample_tokens, self.mesh.topology
        if length is not None:
            size = config.batch(topology.data).micro_batch_size
            tokens = torch.empty(size, length, dtype=torch.int64, device="meta")
            yield lambda: Sample(tokens, tokens)


def plan_chooser(setup: RunSetup, given: Plan | None = None) -> PlanChooser:
    """Return what chooses the plans of a run: the planner, if times of layers are not enough.

    Args:
        given: the plan of the caller; replaces pipeline.schedule.
    """
    section = setup.config.pipeline
    kind: type[PlanChooser] = PlanChooser
    if plan_is_provisional(section, setup.mesh.pipeline.size, given):
        kind = load_name(_TUNED_PLANS)
    elif setup.cuts_vocabulary or _may_queue_weights(section.schedule, given):
        kind = load_name(_PLANNER)
    return kind(setup)


def with_chosen_vocabulary(setup: RunSetup, given: Plan | None) -> RunSetup:
    """Return the setup with a cut vocabulary where schedule `auto` chooses it; collective.

    Args:
        given: the plan of the caller; replaces pipeline.schedule.
    """
    if not plan_is_provisional(setup.config.pipeline, setup.mesh.pipeline.size, given):
        return setup
    chosen: RunSetup = load_name(_CHOSEN_VOCABULARY)(setup)
    return chosen


def _may_queue_weights(schedule: str | PlanFile, given: Plan | None) -> bool:
    """Return whether the plan may have W, whose bytes pipeline.weight_queue_limit restricts."""
    if given is not None:
        return given.splits_backward
    return isinstance(schedule, PlanFile) or schedule == AUTO or splits_backward(schedule)
