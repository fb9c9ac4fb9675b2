"""The step without the fence: no rank waits for the global norm and the overflow flag.

    train_batch   F F F F | B F B .. | after its last F: starts to sum up loss and weight
                          | reductions with those that hold the same parameters
                          | starts to sum up the norm; keeps a copy; steps as if it will not clip
    train_batch   F F F F ? B F B ..
                          the norm is here: as assumed, go on; or else put the copy back, do what
                          the norm says, throw the forwards away and run them again

A rank that has run all its backwards knows that the last stage has run all its forwards: so loss
and weight, which the factor of the gradients is made of, have arrived by then, and only the norm is
guessed at.  What is done in the end is what the fenced step does, to the last bit: the same
functions decide and carry out, after a guess that was wrong on everything as it was before.

Where gradients are clipped in every other step, guessing costs more than waiting.  So a rank waits
for the norm until some steps in a row have needed neither clipping nor skipping.

Source: Qi et al. 2023, arXiv:2401.10241, section 4, "post-validation".  There each rank adds its
part to a prefix that runs along the pipeline; here an all-reduce runs beside the work.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.errors import PipelineError
from pipemega.meetings import brief
from pipemega.mesh import Mesh
from pipemega.optimizer.backup import Backup
from pipemega.optimizer.decision import Attempt, Decision, StepReport, World, decide
from pipemega.optimizer.step import OptimizerStep

_log = logging.getLogger(__name__)


class _Sums:
    """An all-reduce over the world that runs while its ranks do other things.

    Args:
        name: what is summed up, for messages.
        shares: what this rank adds; the host reads it from the device.
        group: all ranks; None alone.
    """

    def __init__(self, name: str, shares: Tensor, group: dist.ProcessGroup | None) -> None:
        self._name = name
        self._shares = shares.cpu()
        self._work = (
            None if group is None else dist.all_reduce(self._shares, group=group, async_op=True)
        )
        self._world: World | None = None

    def wait(self) -> World:
        """The sums of all ranks, as soon as the last has added its share.

        Raises:
            PipelineError: it has not in time, or is gone.
        """
        if self._world is None:
            if self._work is not None:
                try:
                    self._work.wait()
                except RuntimeError as error:
                    raise PipelineError(
                        f"{self._name}: the sum over all ranks did not get through: "
                        f"{brief(str(error))}"
                    ) from error
            self._world = World.of(self._shares.tolist())
        return self._world


@dataclass(frozen=True)
class _Guessed:
    """A step that was carried out before its norm was known."""

    attempt: Attempt
    guess: Decision
    sums: _Sums
    schedule: dict[str, Any]
    loss_scale: dict[str, Any]


class PostValidatedStep(OptimizerStep):
    """An `OptimizerStep` whose last step stands only once `settle` has said so.

    Until then parameters, optimizer state, learning rate and loss scale are as if the step neither
    overflowed nor clipped, and the gradients are kept: no backward may run.  Every rank calls
    `settle` between two steps, at the same place of its work.

    Args:
        as before, and
        quiet_steps: steps in a row without clipping or skipping before one is guessed.
    """

    def __init__(self, *arguments: Any, quiet_steps: int = 10, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.rollbacks = 0
        """Steps so far that were taken back and done again."""
        self._quiet_steps = quiet_steps
        self._quiet = 0
        self._totals: _Sums | None = None
        self._guessed: _Guessed | None = None
        self._group = _group_beside_the_others(self._mesh)
        self._backup = Backup(
            self.optimizer, [*self.targets.gradient_tensors, *self.targets.named.values()]
        )

    def forwards_done(
        self, loss_sum: Tensor | float, weight_sum: Tensor | float, num_microbatches: int
    ) -> None:
        """Starts to sum up what the next call is given; every rank calls it, after its forwards."""
        # Of the length and order of the later sums, so that no bit differs between the two.
        shares = torch.zeros(self._num_layers + 5, dtype=torch.float64)
        shares[-4] = loss_sum.detach() if isinstance(loss_sum, Tensor) else loss_sum
        shares[-3], shares[-2], shares[-1] = weight_sum, num_microbatches, self.asks()
        self._totals = _Sums("loss and weight", shares, self._group)

    def __call__(
        self, loss_sum: Tensor | float, weight_sum: Tensor | float, num_microbatches: int
    ) -> StepReport:
        """One step, which waits for no rank that does not hold the same parameters.

        Returns:
            the report; of a guessed step with nan for the norm.

        Raises:
            as before, of a step that was not guessed.
        """
        assert self._guessed is None, "the step before has not been settled"
        if self._totals is None:
            self.forwards_done(loss_sum, weight_sum, num_microbatches)
        assert self._totals is not None
        attempt, totals = self._attempt(), self._totals.wait()
        self._totals = None
        shares = self._shares(loss_sum, weight_sum, num_microbatches)
        sums = _Sums(f"the gradient norm of step {self.steps}", shares, self._group)
        guess = decide(attempt, totals.without_norm(), self._clip)
        if self._quiet < self._quiet_steps or guess.report.overflow:
            return self._wait_for(attempt, guess, sums)
        self._keep(
            _Guessed(attempt, guess, sums, self._schedule_state(), self.loss_scale.state_dict())
        )
        self._do(guess)
        return replace(guess.report, grad_norm=math.nan, rollbacks=self.rollbacks)

    def _wait_for(self, attempt: Attempt, guess: Decision, sums: _Sums) -> StepReport:
        """The fenced step, with a note of whether a guess would have been right."""
        decision = decide(attempt, sums.wait(), self._clip)
        self._count(right=decision.does_as(guess))
        self._carry_out(decision)
        return self._note(self._counted(decision.report))

    def _keep(self, guessed: _Guessed) -> None:
        before = self._backup.bytes
        self._backup.keep()
        if self._backup.bytes != before:
            _log.info(
                "pipeline.optimizer_sync 'post_validate' keeps a copy of what a step changes: "
                "%.1f MiB on rank %d",
                self._backup.bytes / 2**20,
                self._mesh.rank,
            )
        self._guessed = guessed

    def settle(self) -> bool:
        """Makes parameters and state final.

        Returns:
            whether they stand as they were; False after a step that was taken back and done
            again, or not, as the norm said.

        Raises:
            PipelineError, LossScaleError: those of the fenced step, on every rank.
        """
        guessed = self._guessed
        self.targets.wait()
        if guessed is None:
            return True
        decision = self._verdict(guessed)
        right = decision.does_as(guessed.guess)
        self._guessed = None
        self._count(right=right)
        if right:
            self.gradients.zero()
        else:
            self.rollbacks += 1
            _log.info(
                "step %d did not wait for the gradient norm, which is %g: it is taken back and %s "
                "(rollback %d)",
                self.steps,
                decision.report.grad_norm,
                "skipped" if decision.report.skipped else "clipped",
                self.rollbacks,
            )
            self._take_back(guessed)
            self._carry_out(decision)
            self.targets.wait()
        self._note(self._counted(decision.report))
        return right

    def _verdict(self, guessed: _Guessed) -> Decision:
        return decide(guessed.attempt, guessed.sums.wait(), self._clip)

    def _take_back(self, guessed: _Guessed) -> None:
        self._backup.restore()
        self.targets.publish()
        self.skipped_steps = guessed.attempt.skipped_steps
        self.loss_scale.load_state_dict(guessed.loss_scale)
        if self.schedule is not None:
            self.schedule.load_state_dict(guessed.schedule)

    def _schedule_state(self) -> dict[str, Any]:
        return {} if self.schedule is None else self.schedule.state_dict()

    def _count(self, *, right: bool) -> None:
        self._quiet = self._quiet + 1 if right else 0

    def _counted(self, report: StepReport) -> StepReport:
        return replace(report, rollbacks=self.rollbacks)

    @property
    def last(self) -> StepReport | None:
        """Of the last step; waits for its norm, and changes nothing: any rank may ask alone."""
        guessed = self._guessed
        if guessed is None:
            return self._last
        decision = self._verdict(guessed)
        undone = not decision.does_as(guessed.guess)
        return replace(decision.report, rollbacks=self.rollbacks + undone)

    @property
    def skipped_so_far(self) -> int:
        """Waits as `last` does."""
        guessed = self._guessed
        return (
            self.skipped_steps if guessed is None else self._verdict(guessed).report.skipped_steps
        )


def _group_beside_the_others(mesh: Mesh) -> dist.ProcessGroup | None:
    """All ranks in a group of their own, so that no message of the pipeline queues behind a sum.

    Gloo on every device: in NCCL a sum would hold processors of the GPU until the last rank is in.
    """
    if mesh.world.size == 1:
        return None
    group = dist.new_group(list(mesh.world.ranks), timeout=mesh.timeout, backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    # A rank that failed right behind this would break the connections that others still make.
    dist.barrier(group)
    return group
