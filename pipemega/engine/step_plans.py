"""The plans of a run whose number of micro-batches changes (`training.rampup_batch_size`)."""

from collections.abc import Sequence

from pipemega.distributed.mesh import Mesh, from_first
from pipemega.engine.plan_choice import PlanChooser
from pipemega.pipeline.plan.instructions import Plan


class StepPlans:
    """Returns the plan of each step.

    Only the current plan is kept: the plans of all sizes of a long ramp-up would need much memory.

    Args:
        mesh: of the run.
        plan: for train_batch_size.
        chooser: builds the plans of smaller steps, on rank 0; None: all steps are equal.
    """

    def __init__(self, mesh: Mesh, plan: Plan, chooser: PlanChooser | None = None) -> None:
        self._mesh, self._full, self._chooser = mesh, plan, chooser

    def check(self, counts: Sequence[int]) -> None:
        """Validate the plans for all these numbers of micro-batches; collective.

        Raises:
            ConfigError, ScheduleError: the schedule does not support one of them; on every rank.
        """
        for count in counts:
            self._build(count)

    def of(self, current: Plan, count: int) -> Plan:
        """Return the plan for `count` micro-batches; collective if it differs from the current one.

        Args:
            current: of the last step; schedule `auto` may have replaced the first one.
        """
        if current.num_microbatches == self._full.num_microbatches:
            self._full = current
        if count == current.num_microbatches or self._chooser is None:
            return current
        return self._full if count == self._full.num_microbatches else self._build(count)

    def _build(self, count: int) -> Plan:
        chooser, full = self._chooser, self._full
        assert chooser is not None, "all steps have the same number of micro-batches"
        return from_first(self._mesh.world, lambda: chooser.smaller_plan(full, count))
