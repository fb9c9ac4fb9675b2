"""The plan of the first step and, with schedule `auto`, the plan for measured costs.

Rank 0 chooses; the others receive the plan.  If the shapes of a micro-batch are known, from the
training data or the section `model`, the stages are counted on the meta device as in
`pipemega plan`, and the choice is the same.
"""

from dataclasses import dataclass

from pipemega.config import Config
from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import Mesh
from pipemega.errors import ConfigError, PipelineError
from pipemega.models.build_model import ModelContext, sample_from
from pipemega.monitor import get_logger
from pipemega.pipeline.autoschedule import Placement
from pipemega.pipeline.connections import message_order
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.instructions import Kind, Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import simulate
from pipemega.pipeline.plan_selection import best_plan, plan_of_size, training_plan, validated
from pipemega.planning.layer_times import LayerTimes
from pipemega.planning.meta_model import MetaModel
from pipemega.planning.model_source import Sample
from pipemega.planning.prediction import Prediction
from pipemega.planning.rates import Rates
from pipemega.planning.schedule_choice import ScheduleChooser
from pipemega.profiling.meta_kernels import DeviceType


@dataclass(frozen=True)
class MeasuredStages:
    """Measured costs of the stages of one cut.

    Args:
        rank_of_stage: the cut.
        split: I and W were measured, not only B.
        costs: in seconds and bytes.
    """

    rank_of_stage: tuple[int, ...]
    split: bool
    costs: CostModel


class PlanChooser:
    """Chooses plans; on rank 0.

    Args:
        config, mesh: of the run.
        net: the model.
        num_microbatches: of a step.
        loader: of the training data; None if the caller passes iterators.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        net: PipelineModule,
        num_microbatches: int,
        loader: BatchLoader | None,
    ) -> None:
        self._config, self._mesh, self._net = config, mesh, net
        self._num_microbatches, self._loader = num_microbatches, loader
        self._model: MetaModel | None = None
        self._log = get_logger(mesh.rank)
        self._order = message_order(mesh.pipeline, mesh.device)

    @property
    def counts_memory(self) -> bool:
        """Whether bytes are counted on the meta device, so that they need not be measured."""
        return self._model is not None

    def configured_plan(self, given: Plan | None) -> Plan:
        """Return the plan of a schedule that needs no measurement, lowered and validated.

        Args:
            given: replaces the configured one.

        Raises:
            ConfigError, ScheduleError: as `training_plan`; pipeline.weight_queue_limit is set, and
                bytes cannot be counted.
        """
        section, ranks = self._config.pipeline, self._mesh.pipeline.size
        count, layers = self._num_microbatches, len(self._net)
        plan = training_plan(section, ranks, count, layers, self._order, given)
        if section.weight_queue_limit is None:
            return plan
        self._model = self._count()
        assert self._model is not None, "without counted bytes, _count raises an error"
        return self._validated(lower(self._model.limit_weight_queue(plan)))

    def first_plan(self, measured: MeasuredStages | None) -> tuple[Plan, float | None]:
        """Return the first plan of schedule `auto`, lowered, and its predicted seconds if known.

        Args:
            measured: from an earlier run of this model.

        Raises:
            ConfigError, ScheduleError: as `configured_plan`, or no plan keeps the memory limit.
        """
        self._model = self._count()
        if self._model is None:
            plan = self.configured_plan(None)
            if measured is None or measured.rank_of_stage != plan.rank_of_stage:
                return plan, None
            best, costs = self.next_plan(plan, measured)
            return best, simulate(best, costs).makespan
        rates = Rates() if measured is None else self._rates(self._model, measured)
        choice = self._choose(self._model, rates)
        predicted = choice.timeline.makespan if rates.known else None
        return self._validated(choice.plan), predicted

    def smaller_plan(self, full: Plan, num_microbatches: int) -> Plan:
        """Return the plan of a step with fewer micro-batches, lowered, on the stages of `full`.

        Raises:
            ConfigError, ScheduleError: there is none.
        """
        plan = plan_of_size(self._config.pipeline, full, num_microbatches)
        if self._config.pipeline.weight_queue_limit is not None:
            assert self._model is not None, "configured_plan has counted the bytes"
            plan = self._model.limit_weight_queue(lower(plan))
        return self._validated(lower(plan))

    def _validated(self, plan: Plan) -> Plan:
        """Return the lowered `plan`, proven for the transport of this run."""
        return validated(plan, self._config.pipeline, self._order)

    def _choose(
        self, model: MetaModel, rates: Rates, cuts: tuple[tuple[int, ...], ...] | None = None
    ) -> Prediction:
        section = self._config.pipeline
        choice = ScheduleChooser(model, section, self._num_microbatches, rates, cuts).choose()
        if choice.prediction.note is not None:
            self._log.info(choice.prediction.note)
        return choice.prediction

    def next_plan(self, current: Plan, measured: MeasuredStages) -> tuple[Plan, CostModel]:
        """Return the best plan on the stages of `current`, lowered, and the costs of its stages.

        It is `current` if that is faster than the plan found.
        """
        if self._model is None:
            placement = Placement(measured.rank_of_stage, measured.costs)
            limit = self._config.pipeline.memory_limit
            found = best_plan([placement], self._num_microbatches, limit)
            return self._validated(lower(found.plan)), measured.costs
        rates = self._rates(self._model, measured)
        best = self._choose(self._model, rates, (current.rank_of_stage,))
        costs = rates.cost_model(self._model.layout(current), current.num_ranks)
        if simulate(current, costs).makespan < best.timeline.makespan:
            return current, costs
        return self._validated(best.plan), best.costs

    def _rates(self, model: MetaModel, measured: MeasuredStages) -> Rates:
        layout = model.layout_of(measured.rank_of_stage, splits_backward=True)
        return Rates(layers=LayerTimes.of_stages(measured.costs, layout, split=measured.split))

    def _count(self) -> MetaModel | None:
        """Return the model on the meta device; None if that is not possible.

        Raises:
            ConfigError: pipeline.weight_queue_limit is set, and needs it.
        """
        config, mesh = self._config, self._mesh
        why = "the shapes of a micro-batch are unknown"
        failures = (ConfigError, PipelineError, RuntimeError, TypeError, StopIteration)
        try:
            if (sample := self._sample()) is not None:
                device: DeviceType = "cuda" if mesh.device.type == "cuda" else "cpu"
                model = MetaModel(config, self._net.on_meta(), sample, mesh.topology, device)
                model.layout_of(tuple(range(mesh.pipeline.size)), splits_backward=True)
                return model
        except failures as error:
            why = str(error)
        if config.pipeline.weight_queue_limit is not None:
            raise ConfigError(
                f"pipeline.weight_queue_limit needs the bytes that W holds at each stage, and they "
                f"cannot be counted: {why}; give initialize() a map-style training_data and layers "
                f"that run on torch's meta device, or remove pipeline.weight_queue_limit"
            )
        self._log.info(
            f"schedule auto: stages cannot be counted before the run ({why}): the search is "
            f"limited to {config.pipeline.stages_per_rank or 1} stages per rank"
        )
        return None

    def _sample(self) -> Sample | None:
        """Return a micro-batch of the training data, or one for the model of the config."""
        if self._loader is not None and self._loader.is_map_style:
            return Sample.like(*self._loader.peek())
        if self._config.model is not None:
            return Sample(*sample_from(ModelContext.of(self._config, self._mesh.topology)))
        return None


def split_was_measured(plan: Plan) -> bool:
    """Return whether a trace of `plan` has the times of I and W of each stage."""
    stages = {step.stage for step in plan.steps() if step.kind is Kind.BACKWARD_WEIGHT}
    return len(stages) == plan.num_stages
