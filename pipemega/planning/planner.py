"""Plans of a run that need more than the times of layers: bytes, searches, measured costs.

Schedule `auto`: the plan of the first step, its stages, and the plan for measured costs.  Others:
the queue of W within pipeline.weight_queue_limit, and the passes of vocabulary parallelism.

Measured costs of stages, for schedule `auto`.
"""

from dataclasses import dataclass, replace

from pipemega.config import Config
from pipemega.distributed.mesh import from_first
from pipemega.engine.plan_choice import ChosenPlan, PlanChooser
from pipemega.engine.run_setup import RunSetup
from pipemega.errors import ScheduleError
from pipemega.pipeline.model.vocabulary_shard import vocabulary_split
from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.partition import Bounds
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.plan_selection import (
    best_plan_on,
    plan_is_provisional,
    plan_of_size,
    validated,
    with_section_vocabulary,
)
from pipemega.pipeline.schedules import AUTO
from pipemega.pipeline.schedules.building_blocks import loop
from pipemega.pipeline.schedules.one_f_one_b import sequential_on
from pipemega.planning.meta_model import MetaModel, may_limit
from pipemega.planning.prediction import Prediction, Rates, measured_layers
from pipemega.planning.schedule_choice import (
    ScheduleChooser,
    Stages,
    cut_wins,
    with_cut_vocabulary,
    within_memory_limit,
)

# Stages differ from the measured ones only if this part of a step is predicted to be saved: times
# vary by about as much, and times of the layers in other stages are known less well.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class MeasuredStages:
    """Measured costs of stages.

    Args:
        bounds, rank_of_stage: the bounds of the stages and their pipeline ranks.
        split: I and W were measured, not only B.
        costs: the measured costs, in seconds and bytes.
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
        seconds: predicted seconds of a step with the best plan on the measured stages.
    """
    return best.timeline.makespan <= seconds * (1 - _LEAST_GAIN)


def stages_of(choice: Prediction) -> Stages:
    """Return the stages of a choice."""
    return Stages(choice.layout.bounds, choice.plan.rank_of_stage)


def split_was_measured(plan: Plan) -> bool:
    """Return whether a trace of `plan` has the times of I and W of each stage."""
    stages = {step.stage for step in plan.steps() if step.kind is Kind.BACKWARD_WEIGHT}
    return len(stages) == plan.num_stages


class Planner(PlanChooser):
    """Chooses plans and cuts with all costs of a model; see `PlanChooser`."""

    counts_with = MetaModel
    _model: MetaModel | None

    @property
    def counts_memory(self) -> bool:
        """Whether bytes are counted on the meta device, so that they need not be measured."""
        return self._model is not None

    def configured_plan(self, given: Plan | None) -> ChosenPlan:
        section, ranks = self._config.pipeline, self.mesh.pipeline.size
        if self.shapes_follow and plan_is_provisional(section, ranks, given):
            # Inputs and labels are read by the first and the last rank, as callers expect.
            bounds = section.partition
            stages = len(bounds) - 1 if isinstance(bounds, tuple) else ranks
            given = sequential_on(loop(ranks, max(1, stages // ranks)), self._num_microbatches)
        return super().configured_plan(given)

    def _with_stages(self, plan: Plan, given: Plan | None) -> ChosenPlan:
        limit = self._config.pipeline.weight_queue_limit
        # "auto" does not change a plan that the caller has made, or the one that measures I and W.
        is_own = given is None and self._config.pipeline.schedule != AUTO
        if not (may_limit(plan, limit) and (is_own or limit != "auto")):
            return super()._with_stages(plan, given)
        self._count()
        chosen = super()._with_stages(plan, given)
        if self._model is not None:
            plan = self._within_queue_limit(self._model, plan)
        return chosen._replace(plan=plan)

    def _within_queue_limit(self, model: MetaModel, plan: Plan) -> Plan:
        """Return the lowered `plan` with queues of W within pipeline.weight_queue_limit."""
        limited = model.limit_weight_queue(plan.compute_only(), self._bounds)
        if limited == plan.compute_only():
            return plan
        if self._config.pipeline.weight_queue_limit == "auto":
            self.log.info(
                f"schedule {plan.name}: some W run earlier than in the schedule, or with their I, "
                f"so that the tensors stored for W need less memory; "
                f'"pipeline": {{"weight_queue_limit": null}} keeps the order of the schedule'
            )
        return self._validated(lower(limited))

    def first_plan(self, measured: MeasuredStages | None) -> ChosenPlan:
        """Return the first plan of schedule `auto`, with its predicted seconds if known.

        Args:
            measured: stages measured in an earlier run of this model; None: there are none.

        Raises:
            ConfigError, ScheduleError: as `configured_plan`, or no plan keeps the memory limit.
        """
        self._count()
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
        self._count()
        if self._model is None:
            return False
        wins, why = cut_wins(self._model, cut, self._num_microbatches)
        self.log.info(f"pipeline.vocabulary auto: takes {'parallel' if wins else 'stage'!r}: {why}")
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
        vocabulary_split(self._net)  # or an error on every rank
        self._count()
        if self._model is None:
            return super()._with_passes(plan)
        return self._model.with_passes(plan, self._bounds)

    def _choose(self, model: MetaModel, rates: Rates, stages: Stages | None = None) -> Prediction:
        section = self._config.pipeline
        costs = "measured" if rates.layers else "counted"
        where = "" if stages is None else " on these stages"
        self.log.info(f"schedule auto: rank 0 searches for the best plan{where}, by {costs} times")
        choice = ScheduleChooser(model, section, self._num_microbatches, rates, stages).choose()
        if choice.prediction.note is not None:
            self.log.info(choice.prediction.note)
        return choice.prediction

    def next_plan(
        self, current: Plan, measured: MeasuredStages, best: Prediction | None = None
    ) -> tuple[Plan, CostModel]:
        """Return the best plan on the stages of `current`, lowered, and the costs of its stages.

        It is `current` if that is faster than the plan found.

        Args:
            best: the result of `best_stages`; not searched again if it has the stages of `current`.
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


def with_chosen_vocabulary(setup: RunSetup) -> RunSetup:
    """Return the setup with a cut vocabulary where schedule `auto` chooses it; collective.

    With iterators of the caller only on two ranks: other ranks need not have one.
    """
    mesh, cut = setup.mesh, with_cut_vocabulary(setup.config, setup.net)
    if cut is None or (setup.loader is None and mesh.pipeline.size > 2):
        return setup
    planner = Planner(setup)
    wins = from_first(mesh.world, lambda: planner.prefers(cut))
    return replace(setup, config=cut) if wins else setup
