"""The optimizer step, written once, in the order in which everything below stands.

    sum over tensor ranks what each saw a part of          \\
    sum over the copies of tied parameters                  >  gradients.py; zero.py
    sum over data ranks, to all or to the owners           /
    one all-reduce over the world: norm, finiteness, loss, weight, micro-batches
    skip, or: one multiplication (mean, loss scale, weight, clipping), the step on the masters,
    masters to parameters, slices to all data ranks          targets.py; zero.py
    gradients to zero

Its parts are methods of their own: `post_validate` steps before the all-reduce has answered.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pipemega.errors import NonFiniteError
from pipemega.gradients import GradientBuffer
from pipemega.optimizer.decision import Attempt, Decision, StepReport, World, decide
from pipemega.optimizer.lr_schedules import LRSchedule
from pipemega.optimizer.state import pack, unpack
from pipemega.optimizer.targets import Targets
from pipemega.precision import LossScale, StaticLossScale

_log = logging.getLogger(__name__)

# Reports kept for whoever asks for them all; a loop that asks after every step finds two at most.
_KEPT_REPORTS = 8


class OptimizerStep:
    """Takes the gradients that a batch has left in `gradients` to the next parameters.

    The buffer must hold, summed over the micro-batches i of this data rank, the gradients of

        loss_i * loss scale / num_microbatches

    where loss_i is the mean loss of the micro-batch (its weight is 1) or the sum over its tokens
    (its weight is their number).  The step makes of that the gradients of
    sum(loss_i) / sum(weight_i) over all micro-batches of all data ranks; with the reduction "sum"
    that times the number of data ranks.

    Args:
        optimizer: over `targets.named`.
        targets: where gradients come from and numbers go to.
        loss_scale: None without fp16; then a loss with inf or nan counts as gradients do.
        schedule: stepped after each step that was not skipped; None keeps the rates.
        num_layers: of the unsplit model: more than any position in a logical name.
        clip: largest norm of the gradients; 0 for no clipping.
        skip_nonfinite: skip and count steps with inf or nan in a gradient; otherwise raise.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        targets: Targets,
        *,
        loss_scale: LossScale | None = None,
        schedule: LRSchedule | None = None,
        num_layers: int = 1,
        clip: float = 0.0,
        skip_nonfinite: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.targets = targets
        self.schedule = schedule
        self._heeds_loss = loss_scale is None
        self.loss_scale: LossScale = loss_scale if loss_scale is not None else StaticLossScale()
        self.steps = 0
        """Calls so far, skipped ones included."""
        self.skipped_steps = 0
        self.asks: Callable[[], bool] = lambda: False
        """A question to this rank alone, put in each step; `StepReport.votes` counts who said yes.

        As late in the step as can be, and in a sum that is made anyway: so it costs nothing.
        """
        self._last: StepReport | None = None
        self._reports: deque[StepReport] = deque(maxlen=_KEPT_REPORTS)
        self._mesh = targets.mesh
        self._num_layers = num_layers
        self._clip = clip
        self._skip_nonfinite = skip_nonfinite

    @property
    def gradients(self) -> GradientBuffer:
        """Where a batch leaves its gradients."""
        return self.targets.gradients

    def __call__(
        self, loss_sum: Tensor | float, weight_sum: Tensor | float, num_microbatches: int
    ) -> StepReport:
        """One step; every rank of the world calls it.  One all-reduce and one read decide for all.

        Args:
            loss_sum: sum of loss_i over the micro-batches of this data rank, without the loss
                scale.  The ranks of the last stage that are first on the tensor axis give it; all
                others give 0 here and in the next two.
            weight_sum: sum of their weights.
            num_microbatches: how many they were.

        Raises:
            NonFiniteError: a gradient is not finite, and such steps are not skipped.
            LossScaleError: fp16 overflowed at the smallest loss scale.
        """
        attempt = self._attempt()
        shares = self._shares(loss_sum, weight_sum, num_microbatches)
        if self._mesh.world.size > 1:
            dist.all_reduce(shares, group=self._mesh.world.group)
        decision = decide(attempt, World.of(shares.tolist()), self._clip)
        self._carry_out(decision)
        return self._note(decision.report)

    @property
    def last(self) -> StepReport | None:
        """Of the last step; None before the first."""
        return self._last

    @property
    def skipped_so_far(self) -> int:
        """`skipped_steps` with all that was asked for."""
        return self.skipped_steps

    def take_reports(self) -> list[StepReport]:
        """Of the steps that were decided since the last call, in order."""
        taken = list(self._reports)
        self._reports.clear()
        return taken

    def settle(self) -> bool:
        """Makes parameters and state final; True, since here no step is taken back."""
        self.targets.wait()
        return True

    def _note(self, report: StepReport) -> StepReport:
        self._last = report
        self._reports.append(report)
        return report

    def _attempt(self) -> Attempt:
        """Begins a step: its gradients become those of logical parameters, but for a factor."""
        factor = self._reduce()
        self.steps += 1
        rate = float(self.optimizer.param_groups[0]["lr"])
        return Attempt(
            factor, self.loss_scale.scale, rate, self.skipped_steps, heeds_loss=self._heeds_loss
        )

    def _reduce(self) -> float:
        """Gradients of logical parameters, but for the factor that is returned."""
        return self.targets.reduce()

    def _shares(
        self, loss_sum: Tensor | float, weight_sum: Tensor | float, num_microbatches: int
    ) -> Tensor:
        """What this rank adds to the `World`: [num_layers + 5] fp64, on the device."""
        shares = torch.empty(self._num_layers + 5, dtype=torch.float64, device=self._mesh.device)
        shares[:-4] = self.targets.squared_norms(self._num_layers)
        shares[-4] = loss_sum.detach() if isinstance(loss_sum, Tensor) else loss_sum
        shares[-3], shares[-2], shares[-1] = weight_sum, num_microbatches, self.asks()
        return shares

    def _carry_out(self, decision: Decision) -> None:
        """Does it, and forgets the gradients.

        After an error too: whoever catches it starts from whole parameters and no gradients.
        """
        try:
            self._do(decision)
        finally:
            self.gradients.zero()

    def _do(self, decision: Decision) -> None:
        report = decision.report
        if report.overflow and not self._skip_nonfinite:
            raise self._not_finite(decision)
        if not report.skipped:
            self._step(decision.factor)
        else:
            self.skipped_steps += 1
            if not report.overflow:
                _log.warning(
                    "step %d is skipped: the batch has no token that counts (its weight is 0), so "
                    "its loss is nan",
                    self.steps,
                )
        if report.overflow or not report.skipped:
            self.loss_scale.update(report.overflow)

    def _not_finite(self, decision: Decision) -> NonFiniteError:
        return NonFiniteError(
            decision.report.in_words(self.steps),
            advice=(
                f"{decision.nonfinite_ranks:g} of {self._mesh.world.size} ranks held a gradient "
                "with inf or nan. Parameters and optimizer state are those of the step before. "
                "Lower the learning rate or look for a division by 0 in the model; "
                "training.on_nonfinite skips such steps, or goes back to a checkpoint"
            ),
            on_every_rank=True,
        )

    def _step(self, factor: float) -> None:
        self.targets.lend(factor)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.targets.take_back()
        self.targets.publish()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on besides the parameters and their masters' cast.

        Returns:
            "parameters": logical name -> {"master": ..., and what the optimizer keeps for it
            ("exp_avg", "step", ...)}: tensors as they are, not copies; "loss_scale", "schedule":
            their states; "steps", "skipped_steps".  With ZeRO an entry has "span": (start, stop),
            and its tensors hold those elements of the flattened local parameter; (0, 0) for none.

        The optimizer's settings are left out: those are the config's, also on resuming.
        """
        return {
            "parameters": pack(self.optimizer, self.targets),
            "loss_scale": self.loss_scale.state_dict(),
            "schedule": {} if self.schedule is None else self.schedule.state_dict(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a `state_dict`, copying its tensors; the parameters follow their masters.

        With ZeRO collective over the data axis.

        Raises:
            CheckpointError: a parameter of this rank is missing there, or of another shape.
        """
        # The parameters may have been read into before: nothing may be on its way to them.
        self.targets.wait()
        unpack(self.optimizer, self.targets, state["parameters"])
        self.targets.follow()
        self.loss_scale.load_state_dict(state["loss_scale"])
        if self.schedule is not None and state["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
        self.steps, self.skipped_steps = int(state["steps"]), int(state["skipped_steps"])
