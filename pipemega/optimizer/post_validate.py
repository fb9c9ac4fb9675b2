"""Post-validation: an optimizer step that does not wait for the global gradient norm.

    train_batch   F F F F | B F B .. | after its last F: start the all-reduce of loss and weight
                          | after its last B: reduce gradients within tied, tensor and data groups
                          | start the all-reduce of the norm; save a backup; step as if the norm
                          | needed no clipping and no skip
    train_batch   F F F F ? B F B ..
                          the norm has arrived. If the assumption was right, continue; if not,
                          restore the backup, do the step that the norm requires, discard the
                          forwards and run them again

When a rank has run all its backwards, the last stage has run all its forwards. So the sums of loss
and weight, which the gradient factor depends on, have arrived, and only the norm is assumed.  The
result is bitwise that of the synchronous step ("fenced"): both call the same functions, and after
a wrong assumption they start from the same state.

If most steps are clipped, restoring costs more than waiting.  So a rank waits for the norm until
several steps in a row have needed neither clipping nor skipping.

Source: Qi et al. 2023, arXiv:2401.10241, section 4, "post-validation".  There each rank adds its
part to a prefix sum along the pipeline; here an asynchronous all-reduce overlaps the computation.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.host_memory import HostMemory
from pipemega.distributed.mesh import Mesh
from pipemega.optimizer.async_sums import AsyncSums, HostSums
from pipemega.optimizer.backup import Backup
from pipemega.optimizer.step import OptimizerStep
from pipemega.optimizer.step_outcome import Attempt, Decision, StepReport, decide

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _UnvalidatedStep:
    """A step that was taken before its gradient norm was known, and the state before it."""

    attempt: Attempt
    assumed: Decision
    sums: AsyncSums
    schedule: dict[str, Any]
    loss_scale: dict[str, Any]


class PostValidatedStep(OptimizerStep):
    """An `OptimizerStep` whose last step is final only after `settle`.

    Before that, parameters, optimizer state, learning rate and loss scale are those of a step
    without overflow and without clipping, and the gradients are kept: no backward may run.  Every
    rank calls `settle` between two steps, at the same point of its program.

    Args:
        *arguments, **settings: as for `OptimizerStep`.
        sync_after: after a clipped or skipped step, this many steps in a row without clipping or
            skipping wait for their norm.
    """

    def __init__(self, *arguments: Any, sync_after: int, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.rollbacks = 0
        """Steps so far that were undone and repeated."""
        self._sync_after = sync_after
        self._right_in_a_row = 0
        self._loss_sums: AsyncSums | None = None
        self._unvalidated: _UnvalidatedStep | None = None
        self._sums = HostSums(HostMemory(self._mesh.device), _separate_group(self._mesh))
        self._backup = self._new_backup()

    def _new_backup(self) -> Backup:
        masters = self.masters
        return Backup(self.optimizer, [*masters.gradient_tensors, *masters.named.values()])

    def replace_masters(self, *arguments: Any) -> None:
        assert self._unvalidated is None, "the previous step has not been settled"
        super().replace_masters(*arguments)
        self._backup = self._new_backup()

    def start_loss_sums(
        self, loss_sum: Tensor | float, weight_sum: Tensor | float, num_microbatches: int
    ) -> None:
        """Start the all-reduce of the next call's arguments; collective, after all forwards."""
        # Same length and order as the sums with the norm, so that the results are bitwise equal.
        local = self._stats_with(0.0, loss_sum, weight_sum, num_microbatches)
        self._loss_sums = self._sums.start("loss and weight", local)

    def __call__(
        self, loss_sum: Tensor | float, weight_sum: Tensor | float, num_microbatches: int
    ) -> StepReport:
        """Do one step; wait only for ranks that hold the same parameters.

        Returns:
            the report; `grad_norm` is nan if the step did not wait for it.

        Raises:
            NonFiniteError, LossScaleError: as in `OptimizerStep`, if the step waited for its norm;
                otherwise `settle` raises them.
        """
        assert self._unvalidated is None, "the previous step has not been settled"
        if self._loss_sums is None:
            self.start_loss_sums(loss_sum, weight_sum, num_microbatches)
        assert self._loss_sums is not None
        attempt, totals = self._reduce(), self._loss_sums.wait()
        self._loss_sums = None
        with self.phases("gradient norm"):
            stats = self._local_stats(loss_sum, weight_sum, num_microbatches)
        sums = self._sums.start(f"the gradient norm of step {self.steps}", stats)
        assumed = decide(attempt, totals.without_norm(), self._settings.clip)
        if self._right_in_a_row < self._sync_after or assumed.report.overflow:
            return self._wait_for_norm(attempt, assumed, sums)
        self._save_backup()
        schedule = {} if self.schedule is None else self.schedule.snapshot()
        self._unvalidated = _UnvalidatedStep(
            attempt, assumed, sums, schedule, self.loss_scale.state_dict()
        )
        self._execute(assumed, keep_gradients=True)
        return replace(assumed.report, grad_norm=math.nan, rollbacks=self.rollbacks)

    def _wait_for_norm(self, attempt: Attempt, assumed: Decision, sums: AsyncSums) -> StepReport:
        """Do the synchronous step; record whether the assumption would have been right."""
        with self.phases("gradient norm"):
            decision = decide(attempt, sums.wait(), self._settings.clip)
        self._count(right=decision.same_update(assumed))
        self._execute(decision)
        report = self._with_statistics(decision.report)
        return self._record(replace(report, rollbacks=self.rollbacks))

    def _sum_statistics(self, local: Tensor) -> list[float]:
        # By Gloo, as all sums of this class.
        return self._sums.start("the numbers for the log", local).sums()

    def _save_backup(self) -> None:
        before = self._backup.bytes
        self._backup.save()
        if self._backup.bytes != before:
            _log.info(
                "pipeline.optimizer_sync 'post_validate' allocates a backup of everything that a "
                "step changes: %.1f MiB on rank %d",
                self._backup.bytes / 2**20,
                self._mesh.rank,
            )

    def settle(self) -> bool:
        """Complete the last step: undo it, and repeat or skip it, if its norm requires this.

        Returns:
            False if the step was undone, and then repeated or skipped as its norm requires; True
            if parameters and state stay as they were.

        Raises:
            NonFiniteError, LossScaleError: what the synchronous step raises; on every rank.
        """
        step = self._unvalidated
        self.masters.wait()
        if step is None:
            return True
        with self.phases("gradient norm"):
            decision = self._decide(step)
        right = decision.same_update(step.assumed)
        self._unvalidated = None
        self._count(right=right)
        if right:
            self.gradients.zero()
        else:
            self.rollbacks += 1
            _log.info(
                "step %d ran before its gradient norm (%g) was known: it is undone and %s "
                "(rollback %d)",
                self.steps,
                decision.report.grad_norm,
                "skipped" if decision.report.skipped else "repeated with clipping",
                self.rollbacks,
            )
            self.wait_for_copies()
            self._backup.restore()
            self.masters.copy_to_model()
            # All-gathers in flight read the masters that the next lines update.
            self.masters.wait()
            self.skipped_steps = step.attempt.skipped_steps
            self.loss_scale.load_state_dict(step.loss_scale)
            if self.schedule is not None:
                self.schedule.restore(step.schedule)
            self._execute(decision)
            self.masters.wait()
        report = self._with_statistics(decision.report)
        self._record(replace(report, rollbacks=self.rollbacks))
        return right

    def _decide(self, step: _UnvalidatedStep) -> Decision:
        return decide(step.attempt, step.sums.wait(), self._settings.clip)

    def _count(self, *, right: bool) -> None:
        self._right_in_a_row = self._right_in_a_row + 1 if right else 0

    @property
    def last(self) -> StepReport | None:
        """Report of the last step; waits for its norm and changes nothing. Not collective."""
        step = self._unvalidated
        if step is None:
            return self._last
        decision = self._decide(step)
        wrong = not decision.same_update(step.assumed)
        return replace(decision.report, rollbacks=self.rollbacks + wrong)

    @property
    def skipped_so_far(self) -> int:
        """Skipped steps, the last step included; waits as `last` does."""
        step = self._unvalidated
        return self.skipped_steps if step is None else self._decide(step).report.skipped_steps


def _separate_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Create a group of all ranks for these sums, so that no pipeline message queues behind them.

    The backend is Gloo on every device: an NCCL all-reduce would occupy the GPU until the last
    rank joins it.
    """
    # The planner, on the meta device, has no other ranks.
    if mesh.world.size == 1 or mesh.device.type == "meta":
        return None
    what = f"rank {mesh.rank} in the creation of process group 'post-validation'"
    with named_collective(what, mesh.world.ranks):
        group = dist.new_group(list(mesh.world.ranks), timeout=mesh.timeout, backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    # Without the barrier, a rank that fails now would break connections that others still open.
    dist.barrier(group)
    return group
