"""The plans of a run whose number of micro-batches changes (`training.rampup_batch_size`)."""

from collections.abc import Sequence

from pipemega.distributed.mesh import Mesh, from_first
from pipemega.engine.plan_choice import PlanChooser
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds


class StepPlans:
    """Returns the plan of each step.

    Only two plans are kept, that of a full step and the current one: those of all sizes of a long
    ramp-up would need much memory.

    Args:
        mesh: of the run.
        plan: for train_batch_size.
        chooser: builds the plans of other steps, on rank 0; None: all steps are equal.
    """

    def __init__(self, mesh: Mesh, plan: Plan, chooser: PlanChooser | None = None) -> None:
        self._mesh, self._full, self._chooser = mesh, plan, chooser

    def check(self, bounds: Bounds, counts: Sequence[int]) -> None:
        """Validate the plans for all these numbers of micro-batches; collective.

        Raises:
            ConfigError, ScheduleError: the schedule does not support one of them; on every rank.
        """
        for count in counts:
            self._build(self._full, bounds, count)

    def of(self, current: Plan, bounds: Bounds, count: int) -> Plan:
        """Return the plan for `count` micro-batches; collective if it differs from the current one.

        Args:
            current: of the last step; a callback, as that of schedule `auto`, may have replaced it.
            bounds: of its stages, which may have moved since the last call.
        """
        full = self._full.num_microbatches
        if current.num_microbatches == full:
            self._full = current
        if count == current.num_microbatches or self._chooser is None:
            return current
        if count == full and self._full.rank_of_stage == current.rank_of_stage:
            return self._full
        return self._build(current, bounds, count)

    def _build(self, current: Plan, bounds: Bounds, count: int) -> Plan:
        chooser = self._chooser
        assert chooser is not None, "all steps have the same number of micro-batches"
        return from_first(self._mesh.world, lambda: chooser.plan_of_size(current, bounds, count))
