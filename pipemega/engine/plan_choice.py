"""The plan of the first step, its stages and, with schedule `auto`, the plan for measured costs.

Rank 0 chooses; the others receive the plan.  If the shapes of a micro-batch are known, from the
section `model`, an example or the training data, the layers are counted on the meta device as in
`pipemega plan`, and the choice is the same.  Otherwise the first choice is provisional: it is made
again when the first micro-batch has been read (`late_choice`).

Measured costs of stages, for schedule `auto`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from pipemega.config import Config
from pipemega.engine.run_setup import RunSetup
from pipemega.errors import ConfigError, PipelineError, PipemegaError, ScheduleError
from pipemega.models.build_model import ModelContext, sample_from
from pipemega.monitor import get_logger
from pipemega.pipeline.connections import message_order
from pipemega.pipeline.model.vocabulary_shard import vocabulary_split
from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.partition import Bounds, Cut
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.plan_selection import (
    best_plan_on,
    plan_is_provisional,
    plan_of_size,
    training_plan,
    validated,
    with_passes,
    with_section_vocabulary,
)
from pipemega.pipeline.schedules import AUTO, forward_only, splits_backward
from pipemega.pipeline.schedules.building_blocks import loop
from pipemega.pipeline.schedules.one_f_one_b import sequential_on
from pipemega.planning.meta_model import MetaModel, fit_queue_of_linears, may_limit
from pipemega.planning.prediction import Prediction, Rates, explain, measured_layers
from pipemega.planning.schedule_choice import ScheduleChooser, Stages, cut_wins, within_memory_limit
from pipemega.planning.stage_costs import Sample
from pipemega.profiling.tensor_meter import DeviceType, unmetered
from pipemega.random import preserve_rng

# Stages differ from the measured ones only if this part of a step is predicted to be saved: times
# vary by about as much, and those of the layers in other stages are known less well.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class MeasuredStages:
    """Measured costs of stages.

    Args:
        bounds, rank_of_stage: of the stages.
        split: I and W were measured, not only B.
        costs: in seconds and bytes.
        tried_others: a run had other stages too, and its steps were slower there.
    """

    bounds: Bounds
    rank_of_stage: tuple[int, ...]
    split: bool
    costs: CostModel
    tried_others: bool = False

    @property
    def stages(self) -> Stages:
        return Stages(self.bounds, self.rank_of_stage)


def is_worth_moving(best: Prediction, seconds: float) -> bool:
    """Return whether `best`, on other stages, is fast enough to leave the measured ones.

    Args:
        seconds: predicted for the best plan on the measured stages.
    """
    return best.timeline.makespan <= seconds * (1 - _LEAST_GAIN)


def stages_of(choice: Prediction) -> Stages:
    """Return the stages of a choice."""
    return Stages(choice.layout.bounds, choice.plan.rank_of_stage)


def split_was_measured(plan: Plan) -> bool:
    """Return whether a trace of `plan` has the times of I and W of each stage."""
    stages = {step.stage for step in plan.steps() if step.kind is Kind.BACKWARD_WEIGHT}
    return len(stages) == plan.num_stages


class ChosenPlan(NamedTuple):
    """A plan and its stages.

    Args:
        plan: lowered and validated.
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1; None: `stage_bounds` determines
            them, because pipeline.partition does not depend on the plan.
        seconds: predicted for a step; None: unknown.
        reason: why the model is cut so, for the log; None: nothing to say.
    """

    plan: Plan
    bounds: Bounds | None
    seconds: float | None = None
    reason: str | None = None


class PlanChooser:
    """Chooses plans and cuts; on rank 0.

    Args:
        setup: of the run; without an optimizer the cut is for evaluation.

    Attributes:
        shapes_follow: they are known once the first step has been read.
        is_provisional: a choice needed shapes that the first micro-batch is going to have.
    """

    def __init__(self, setup: RunSetup) -> None:
        self._config, self._mesh, self._net = setup.config, setup.mesh, setup.net
        self._trains, self._loader, self._example = setup.trains, setup.loader, setup.example
        waits = setup.trains and setup.mesh.pipeline.size > 1 and not setup.has_read
        self.shapes_follow = waits and next(self._samples(), None) is None
        self.is_provisional = False
        self._num_microbatches = setup.batch.num_microbatches
        self._model: MetaModel | None = None
        self._bounds: Bounds | None = None  # of the stages of the run
        self._failure: str | None = None  # of a stage on the meta device
        self._log = get_logger(setup.mesh.rank)
        self._order = message_order(setup.mesh.pipeline, setup.mesh.device)

    @property
    def counts_memory(self) -> bool:
        """Whether bytes are counted on the meta device, so that they need not be measured."""
        return self._model is not None

    def choose(self, pick: Callable[[], ChosenPlan]) -> ChosenPlan:
        """Return `pick()`, a choice of this chooser.

        Layers that run on the meta device one by one may fail there as a stage: then the choice is
        made without counts.
        """
        try:
            return pick()
        except PipelineError as error:
            if self._model is None:
                raise
            self._model, self._bounds, self._failure = None, None, str(error)
            self.__dict__.pop("_counted", None)
            return pick()

    def configured_plan(self, given: Plan | None) -> ChosenPlan:
        """Return the plan of a schedule that needs no measurement, and its stages.

        Args:
            given: replaces the configured one.

        Raises:
            ConfigError, ScheduleError: as `training_plan`; a limit of pipeline is set, and bytes
                cannot be counted; no cut keeps pipeline.memory_limit.
        """
        section, ranks = self._config.pipeline, self._mesh.pipeline.size
        count, layers = self._num_microbatches, len(self._net)
        if self.shapes_follow and plan_is_provisional(section, ranks, given):
            # Inputs and labels are read by the first and the last rank, as callers expect.
            bounds = section.partition
            stages = len(bounds) - 1 if isinstance(bounds, tuple) else ranks
            given = sequential_on(loop(ranks, max(1, stages // ranks)), count)
        plan = training_plan(section, ranks, count, layers, self._order, given, self._with_passes)
        if plan.num_stages == 1:
            return ChosenPlan(plan, None)
        limit = section.weight_queue_limit
        # "auto" does not change a plan that the caller has made, or the one that measures I and W.
        is_own = given is None and section.schedule != AUTO
        limits_queue = may_limit(plan, limit) and (is_own or limit != "auto")
        if section.partition == "auto" or limits_queue:
            self._model = self._counted
        if self._model is None:
            # The executor of a provisional plan has to run W, which the final plan may have.
            if limits_queue and not self.is_provisional and self._has_only_linears():
                device: DeviceType = "cuda" if self._mesh.device.type == "cuda" else "cpu"
                plan = self._validated(lower(fit_queue_of_linears(plan.compute_only(), device)))
            return ChosenPlan(plan, None)
        self._bounds, reason = self._cut(self._model, plan)
        if limits_queue:
            plan = self._within_queue_limit(self._model, plan)
        return ChosenPlan(plan, self._bounds, reason=reason)

    def _within_queue_limit(self, model: MetaModel, plan: Plan) -> Plan:
        """Return the lowered `plan` with queues of W within pipeline.weight_queue_limit."""
        limited = model.limit_weight_queue(plan.compute_only(), self._bounds)
        if limited == plan.compute_only():
            return plan
        if self._config.pipeline.weight_queue_limit == "auto":
            self._log.info(
                f"schedule {plan.name}: some W run earlier than in the schedule, or with their I, "
                f"so that the tensors stored for W need less memory; "
                f'"pipeline": {{"weight_queue_limit": null}} keeps the order of the schedule'
            )
        return self._validated(lower(limited))

    def _cut(self, model: MetaModel, plan: Plan) -> tuple[Bounds | None, str | None]:
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

    def first_plan(self, measured: MeasuredStages | None) -> ChosenPlan:
        """Return the first plan of schedule `auto`, with its predicted seconds if known.

        Args:
            measured: from an earlier run of this model.

        Raises:
            ConfigError, ScheduleError: as `configured_plan`, or no plan keeps the memory limit.
        """
        self._model = self._counted
        if self._model is None:
            first = self.configured_plan(None)
            if measured is None or measured.rank_of_stage != first.plan.rank_of_stage:
                return first
            best, costs = self.next_plan(first.plan, measured)
            return ChosenPlan(best, measured.bounds, simulate(best, costs).makespan)
        if measured is None:
            choice, seconds = self._choose(self._model, Rates()), None
        else:
            choice = self._best_known(self._model, measured)
            seconds = choice.timeline.makespan
        self._bounds = choice.layout.bounds
        return ChosenPlan(self.lowered(choice), self._bounds, seconds)

    def _best_known(self, model: MetaModel, measured: MeasuredStages) -> Prediction:
        """Return the best plan for measured costs; on the measured stages if others gain little."""
        allowed = self._allows(model, measured.stages)
        best = None
        if not (allowed and measured.tried_others):
            best = self.best_stages(measured)
            if not allowed or stages_of(best) == measured.stages:
                return best
        try:
            here = self._choose(model, self._rates(model, measured), measured.stages)
        except ScheduleError:  # no plan keeps the memory limit
            return best or self.best_stages(measured)
        if best is not None and is_worth_moving(best, here.timeline.makespan):
            return best
        return here

    def _allows(self, model: MetaModel, stages: Stages) -> bool:
        """Return whether the config allows the stages of an earlier run."""
        number, chunks = len(stages.rank_of_stage), self._config.pipeline.stages_per_rank
        fits = chunks is None or number == chunks * model.num_ranks
        return fits and model.has_labels(stages.rank_of_stage)

    def prefers(self, cut: Config) -> bool:
        """Return whether `cut`, the config with a cut vocabulary, has the shorter step."""
        model = self._counted
        if model is None:
            return False
        wins, why = cut_wins(model, cut, self._num_microbatches)
        self._log.info(
            f"pipeline.vocabulary auto: takes {'parallel' if wins else 'stage'!r}: {why}"
        )
        return wins

    def best_stages(self, measured: MeasuredStages) -> Prediction:
        """Return the best plan for measured costs, on any stages that the config allows.

        Raises:
            ScheduleError: no plan keeps the memory limit.
        """
        assert self._model is not None, "the layers were not counted"
        return self._choose(self._model, self._rates(self._model, measured))

    def lowered(self, choice: Prediction) -> Plan:
        """Return the plan of `choice`, proven for the transport of this run."""
        return self._validated(choice.plan)

    def plan_of_size(self, current: Plan, bounds: Bounds, num_microbatches: int) -> Plan:
        """Return the plan of a step of another size, lowered, on the stages of `current`.

        Args:
            bounds: of the stages; they may have moved.

        Raises:
            ConfigError, ScheduleError: there is none.
        """
        self._bounds = bounds
        plan = plan_of_size(self._config.pipeline, current, num_microbatches)
        if self._model is not None:
            plan = self._model.with_passes(plan, self._bounds)
            plan = self._model.limit_weight_queue(lower(plan), self._bounds)
            if plan_is_provisional(self._config.pipeline, plan.num_ranks):
                plan = within_memory_limit(self._model, self._config.pipeline, plan, bounds)
        return self._validated(lower(plan))

    def _validated(self, plan: Plan) -> Plan:
        """Return the lowered `plan` with its passes, proven for the transport of this run."""
        section = self._config.pipeline
        if section.vocabulary == "parallel" and not plan.has_vocabulary:
            plan = lower(with_section_vocabulary(plan, section, self._with_passes))
        return validated(plan, section, self._order)

    def _with_passes(self, plan: Plan) -> Plan:
        """Return `plan` with the passes of vocabulary parallelism; counts the model for it."""
        vocabulary_split(self._net)  # or an error on every rank
        model = self._model = self._counted
        return with_passes(plan) if model is None else model.with_passes(plan, self._bounds)

    def _choose(self, model: MetaModel, rates: Rates, stages: Stages | None = None) -> Prediction:
        section = self._config.pipeline
        costs = "measured" if rates.layers else "counted"
        where = "" if stages is None else " on these stages"
        self._log.info(f"schedule auto: rank 0 searches for the best plan{where}, by {costs} times")
        choice = ScheduleChooser(model, section, self._num_microbatches, rates, stages).choose()
        if choice.prediction.note is not None:
            self._log.info(choice.prediction.note)
        return choice.prediction

    def next_plan(
        self, current: Plan, measured: MeasuredStages, best: Prediction | None = None
    ) -> tuple[Plan, CostModel]:
        """Return the best plan on the stages of `current`, lowered, and the costs of its stages.

        It is `current` if that is faster than the plan found.

        Args:
            best: of `best_stages`; not searched again if it is on the stages of `current`.
        """
        if self._model is None:
            limit = self._config.pipeline.memory_limit
            stages = measured.rank_of_stage, measured.costs
            plan = best_plan_on(*stages, self._num_microbatches, limit)
            return self._validated(lower(plan)), measured.costs
        rates = self._rates(self._model, measured)
        if best is None or stages_of(best) != measured.stages:
            best = self._choose(self._model, rates, measured.stages)
        layout = self._model.layout(current, measured.bounds)
        costs = rates.cost_model(layout, current.num_ranks)
        if simulate(current, costs).makespan < best.timeline.makespan:
            return current, costs
        return self._validated(best.plan), best.costs

    def _rates(self, model: MetaModel, measured: MeasuredStages) -> Rates:
        counted = replace(model.layer_costs, instruction=model.instruction_seconds)
        split = measured.split
        return Rates(layers=measured_layers(counted, measured.bounds, measured.costs, split=split))

    @cached_property
    def _counted(self) -> MetaModel | None:
        """The model on the meta device; None if that is not possible.

        Raises:
            ConfigError: a limit of the section pipeline is set, and needs it.
        """
        section, mesh = self._config.pipeline, self._mesh
        why = self._failure or "the shapes of a micro-batch are unknown"
        tell = self._log.info if self._failure is None else self._log.warning
        for sample in self._samples() if self._failure is None else ():
            try:
                device: DeviceType = "cuda" if mesh.device.type == "cuda" else "cpu"
                with unmetered():
                    net = self._net.on_meta()
                    model = MetaModel(self._config, net, sample(), mesh.topology, device)
                    _ = model.layer_costs
                return model
            # A run that needs no counts has to start anyway.
            except PipemegaError as error:
                why, tell = str(error), self._log.warning
        if self.shapes_follow:
            self.is_provisional = True
            return None
        limits = {
            "weight_queue_limit": section.weight_queue_limit not in (None, "auto"),
            "memory_limit": section.memory_limit != "auto" and section.schedule != AUTO,
        }
        for key, is_set in limits.items():
            if is_set:
                raise ConfigError(
                    f"pipeline.{key} needs the bytes that each stage holds, and they cannot be "
                    f"counted: {why}; give initialize() layers that run on torch's meta device and "
                    f"example=(inputs, labels), or remove pipeline.{key}"
                )
        if section.schedule == AUTO:
            tell(
                f"schedule auto: the FLOPs and bytes of the layers cannot be counted ({why}): the "
                f"search is limited to pipeline.chunks {section.stages_per_rank or 1}"
            )
        elif section.weight_queue_limit == "auto" and self._splits_backward:
            tell(
                f"weight_queue_limit auto: the tensors stored for W cannot be counted ({why}): "
                f"schedule {section.schedule!r} stays as it is"
            )
        if section.partition == "auto":
            tell(
                f"partition auto: the times of the layers cannot be counted ({why}): stages get "
                "even numbers of parameters, as with pipeline.partition 'parameters'"
            )
        return None

    def _has_only_linears(self) -> bool:
        """Return whether all parameters of the model are those of nn.Linear."""
        try:
            with unmetered(), preserve_rng():
                layers = [
                    spec.build(self._mesh.tensor, torch.device("meta"))
                    for spec in self._net.on_meta().specs
                ]
        except ConfigError:  # a layer cannot be built there
            return False
        modules = (module for layer in layers for module in layer.modules())
        return all(
            isinstance(module, nn.Linear)
            for module in modules
            if next(module.parameters(recurse=False), None) is not None
        )

    @property
    def _splits_backward(self) -> bool:
        name = self._config.pipeline.schedule
        return isinstance(name, str) and name != AUTO and splits_backward(name)

    def _samples(self) -> Iterator[Callable[[], Sample]]:
        """Yield functions that return a micro-batch: example, of the config, the data, the model.

        That of the config comes before the data, as in `pipemega plan`: the cut is the same.
        """
        config, loader, example = self._config, self._loader, self._example
        if example is not None:
            yield lambda: example
        if config.model is not None:
            context = ModelContext.of(config, self._mesh.topology)
            yield lambda: Sample(*sample_from(context))
        if loader is not None and loader.is_map_style:
            yield lambda: Sample.like(*loader.peek())
        length, topology = self._net.sample_tokens, self._mesh.topology
        if length is not None:
            size = config.batch(topology.data).micro_batch_size
            tokens = torch.empty(size, length, dtype=torch.int64, device="meta")
            yield lambda: Sample(tokens, tokens)
