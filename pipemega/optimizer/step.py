"""The optimizer step, in the order of the code below.

    sum over tensor ranks the gradients of which each has a part    \\
    sum over the replicas of tied parameters                         >  gradients.py; zero.py
    sum over data ranks, to all or to the owners                    /
    one all-reduce over the world: norm, finiteness, loss, weight, micro-batches, stop votes
    skip, or: multiply once (mean, loss scale, weight, clipping), update the masters,
    copy them to the parameters, gather ZeRO slices         masters.py; zero.py
    set the gradients to zero

`post_validate.PostValidatedStep` calls the same methods in another order.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.exchanges import all_reduce
from pipemega.distributed.host_memory import CopyEvent
from pipemega.errors import ConfigError, NonFiniteError
from pipemega.monitor import StepPhases
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.optimizer.lr_schedules import LRSchedule
from pipemega.optimizer.masters import MasterParams
from pipemega.optimizer.mixed_precision import LossScale
from pipemega.optimizer.param_groups import SharedState, pack, unpack
from pipemega.optimizer.step_outcome import Attempt, Decision, GlobalStats, StepReport, decide
from pipemega.pipeline.recorder import step_clock

_log = logging.getLogger(__name__)

# Reports kept for `take_reports`; a loop that calls it after every step gets at most two.
_KEPT_REPORTS = 8


@dataclass(frozen=True)
class StepSettings:
    """The settings of an optimizer step.

    Args:
        clip: largest norm of the gradients; 0 for no clipping.
        skip_nonfinite: skip and count steps with inf or nan in a gradient; otherwise raise.
        log_params_norm, log_num_zeros: compute these numbers for the log, which needs one more
            all-reduce per step.
    """

    clip: float = 0.0
    skip_nonfinite: bool = False
    log_params_norm: bool = False
    log_num_zeros: bool = False


class OptimizerStep:
    """Updates the parameters from the gradients of a batch, which are in `gradients`.

    The buffer must hold, summed over the micro-batches i of this data rank, the gradients of

        loss_i * loss scale / num_microbatches

    where loss_i is the mean loss of the micro-batch (weight 1) or the sum over its tokens (weight:
    their number).  The step computes from it the gradients of sum(loss_i) / sum(weight_i) over all
    micro-batches of all data ranks; with the reduction "sum", times the number of data ranks.

    Args:
        optimizer: the optimizer over `masters.named`.
        masters: the strategy that reduces gradients and updates the model parameters.
        settings: clipping, steps that are skipped, numbers for the log.
        loss_scale: the loss scale of fp16. None without fp16: then a loss that is inf or nan counts
            as an overflow.
        schedule: advanced after each step that was not skipped, or by `end_epoch`; None keeps the
            learning rates.
        shared_state: saves what the optimizer keeps for groups; None: the options of the config
            apply after loading.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterParams,
        settings: StepSettings = StepSettings(),
        *,
        loss_scale: LossScale | None = None,
        schedule: LRSchedule | None = None,
        shared_state: SharedState | None = None,
    ) -> None:
        self.optimizer, self.schedule, self._settings = optimizer, schedule, settings
        self._shared_state = shared_state
        self._check_loss = loss_scale is None
        self.loss_scale = loss_scale if loss_scale is not None else LossScale()
        self.steps = 0
        """Calls so far, skipped steps included."""
        self.skipped_steps = 0
        self.phases = StepPhases(exact_clock=step_clock(masters.mesh.device))
        """Phases of the whole training step; the engine adds the phases before the optimizer."""
        self._copied: CopyEvent | None = None
        self._last: StepReport | None = None
        self._reports: deque[StepReport] = deque(maxlen=_KEPT_REPORTS)
        self._mesh, self._updating = masters.mesh, False
        self._use(masters)

    def _use(self, masters: MasterParams) -> None:
        self.masters = masters
        self._gradient_norms = masters.gradient_norms()
        self._statistics = masters.statistics(
            params_norm=self._settings.log_params_norm, num_zeros=self._settings.log_num_zeros
        )

    def refuse_other_steps(self) -> None:
        """Refuse later calls of `optimizer.step()` by others than this object."""
        self.optimizer.register_step_pre_hook(self._refuse_other_calls)

    def _refuse_other_calls(self, *_: Any) -> None:
        """Refuse `optimizer.step()` of a caller: it would update again, without gradients."""
        if not self._updating:
            raise ConfigError(
                "optimizer.step() is called by train_batch(), and a second call would change the "
                "parameters without gradients: remove it; train_batch() also zeroes the gradients "
                "and advances the learning rate"
            )

    @property
    def is_fenced(self) -> bool:
        """Whether each step is final when it returns, so that the ranks wait for each other."""
        return True

    @property
    def gradients(self) -> GradientBuffer:
        """The buffer with the summed gradients of a batch."""
        return self.masters.gradients

    def __call__(
        self,
        loss_sum: Tensor | float,
        weight_sum: Tensor | float,
        num_microbatches: int,
        *,
        samples: int = 0,
        stop: bool = False,
        extra: Tensor | None = None,
    ) -> StepReport:
        """Do one step; collective over the world.

        All ranks make the same decision, from the result of one all-reduce.

        Args:
            loss_sum: sum of loss_i over the micro-batches of this data rank, without the loss
                scale, on the ranks of the last stage that are first on the tensor axis; all other
                ranks pass 0 here and in the next two.
            weight_sum: sum of their weights.
            num_microbatches: number of these micro-batches.
            samples: samples of the step, on all data ranks, for the schedule.
            stop: this rank requests the end of the run; part of the all-reduce of the step.
            extra: numbers for the report, which are summed in the same all-reduce: [any] fp64, on
                the device, and of equal length on all ranks.

        Raises:
            NonFiniteError: a gradient is not finite, and such steps are not skipped.
            LossScaleError: fp16 overflowed at the smallest loss scale.
        """
        attempt = self._reduce(samples)
        with self.phases("gradient norm"):
            stats = self._local_stats(loss_sum, weight_sum, num_microbatches, stop, extra)
            if self._mesh.world.size > 1:
                all_reduce(stats, self._mesh.world)
            synchronize()
            decision = self._decide(attempt, self._global(stats.tolist()))
        self._execute(decision)
        return self._record(self._with_statistics(decision.report))

    @property
    def last(self) -> StepReport | None:
        """Report of the last step; None before the first."""
        return self._last

    @property
    def skipped_so_far(self) -> int:
        """Number of skipped steps, the last step included."""
        return self.skipped_steps

    def take_reports(self) -> list[StepReport]:
        """Return the reports of the steps that were decided since the last call, in order."""
        taken = list(self._reports)
        self._reports.clear()
        return taken

    def settle(self) -> bool:
        """Wait until the parameters are complete; True: the step was not undone."""
        self.masters.wait()
        return True

    def end_epoch(self) -> None:
        """Advance a schedule with `scheduler.by: "epoch"`; after `settle`, on every rank."""
        if self.schedule is not None:
            self.schedule.end_epoch()

    def _reduce(self, samples: int) -> Attempt:
        """Begin a step: reduce the gradients, and collect what its decision depends on."""
        with self.phases("gradient reduction"):
            factor = self.masters.reduce()
        if self._statistics is not None:
            self._statistics.count_zeros()
        self.steps += 1
        return Attempt(
            factor,
            self.loss_scale.scale,
            float(self.optimizer.param_groups[0]["lr"]),
            self.skipped_steps,
            samples,
            check_loss=self._check_loss,
        )

    def _local_stats(
        self,
        loss_sum: Tensor | float,
        weight_sum: Tensor | float,
        num_microbatches: int,
        stop: bool,
        extra: Tensor | None,
    ) -> Tensor:
        """Return this rank's part of the `GlobalStats`: [num_layers + 5 + extra] fp64."""
        norms = self._gradient_norms()
        return self._stats_with(norms, loss_sum, weight_sum, num_microbatches, stop, extra)

    def _stats_with(
        self,
        squared_norms: Tensor | float,
        loss_sum: Tensor | float,
        weight_sum: Tensor | float,
        num_microbatches: int,
        stop: bool,
        extra: Tensor | None,
    ) -> Tensor:
        size, more = self.masters.num_layers + 5, 0 if extra is None else len(extra)
        stats = torch.empty(size + more, dtype=torch.float64, device=self._mesh.device)
        stats[: size - 4] = squared_norms
        if extra is not None:
            stats[size:] = extra
        numbers = (loss_sum, weight_sum, num_microbatches, stop)
        for place, number in zip(stats[size - 4 : size], numbers, strict=True):
            # Not `stats[i] = number`: torch copies that from pageable memory, and the host waits.
            place.fill_(number.detach() if isinstance(number, Tensor) else number)
        return stats

    def _global(self, sums: Sequence[float]) -> GlobalStats:
        return GlobalStats.of(sums, self.masters.num_layers)

    def _decide(self, attempt: Attempt, stats: GlobalStats) -> Decision:
        return decide(attempt, stats, self._settings.clip)

    def _execute(self, decision: Decision, *, keep_gradients: bool = False) -> None:
        """Skip or update as decided, then set the gradients to zero unless they are kept.

        They are zero after an error too: a caller that catches it starts the next step from
        complete parameters and empty gradients.
        """
        report = decision.report
        try:
            if report.overflow and not self._settings.skip_nonfinite:
                raise NonFiniteError(
                    report.in_words(self.steps),
                    advice=(
                        f"{decision.nonfinite_ranks:g} of {self._mesh.world.size} ranks held a "
                        "gradient with inf or nan. Parameters and optimizer state are as after the "
                        "step before. Lower the learning rate or look for a division by 0 in the "
                        "model; training.on_nonfinite skips such steps, or rolls back to a "
                        "checkpoint"
                    ),
                    on_every_rank=True,
                )
            self.skipped_steps += report.skipped
            if not report.skipped:
                self._update(decision)
            elif not report.overflow:
                _log.warning(
                    "step %d is skipped: the batch has no token that counts (its weight is 0), so "
                    "its loss is nan",
                    self.steps,
                )
            if report.overflow or not report.skipped:
                self.loss_scale.update(report.overflow)
        finally:
            if not keep_gradients:
                self.gradients.zero()

    def _update(self, decision: Decision) -> None:
        with self.phases("optimizer"):
            self.masters.assign_grads(decision.factor)
            self.wait_for_copies()
            self._updating = True
            try:
                self.optimizer.step()
            finally:
                self._updating = False
            if self.schedule is not None:
                self.schedule.end_step(decision.samples)
            self.masters.release_grads()
        with self.phases("parameter gather"):
            self.masters.copy_to_model()

    def protect(self, copied: CopyEvent) -> None:
        """Let the next change of parameters and optimizer state wait for copies of them.

        Args:
            copied: occurs when the copies are complete.
        """
        self._copied = copied

    def wait_for_copies(self) -> None:
        """Wait until parameters, masters and optimizer state may change.

        The device waits for the copies of `protect`; the host for copies from offloaded masters.
        """
        if self._copied is not None:
            self._copied.wait()
            self._copied = None
        self.masters.wait_for_offload()

    def _with_statistics(self, report: StepReport) -> StepReport:
        """Add the numbers for the log to the report of a final step; collective over the world."""
        if self._statistics is None:
            return report
        with self.phases("gradient norm"):
            return self._statistics.add_to(report, self._sum_statistics(self._statistics.local()))

    def _sum_statistics(self, local: Tensor) -> list[float]:
        if self._mesh.world.size > 1:
            all_reduce(local, self._mesh.world)
        synchronize()
        return local.tolist()

    def _record(self, report: StepReport) -> StepReport:
        self._last = report
        self._reports.append(report)
        return report

    def replace_masters(
        self,
        masters: MasterParams,
        groups: Sequence[Mapping[str, Any]],
        packed: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Continue with other masters; optimizer, schedule and counters are the same objects.

        The previous masters are freed. With ZeRO collective over the data axis.

        Args:
            masters: their parameters have the values of the last step.
            groups: one mapping for each group of the optimizer, with the masters in it as "params".
            packed: the optimizer's state of these masters, in the form that `state_dict` returns;
                its tensors are used, not copied.
        """
        self._use(masters)
        optimizer: Any = self.optimizer
        shared = {key: v for key, v in optimizer.state.items() if not isinstance(key, Tensor)}
        optimizer.state = defaultdict(dict)
        for group, own in zip(groups, optimizer.param_groups, strict=True):
            own["params"] = list(group["params"])
        any_shape = self._shared_state is not None
        unpack(optimizer, masters, packed, any_shape=any_shape, copy=False)
        optimizer.state.update(shared)
        masters.sync_from_model()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on besides the parameters.

        Returns:
            "parameters": logical name -> {"master": ..., and the optimizer's state of it
            ("exp_avg", "step", ...)}: the tensors themselves, not copies; "loss_scale",
            "schedule", "shared": their states; "steps", "skipped_steps".  With ZeRO an entry has
            "span": (start, stop), and its tensors hold those elements of the flattened local
            parameter; (0, 0) for none.

        The settings of an optimizer of the config are not included: after loading, the settings in
        the config apply.
        """
        return {
            "parameters": pack(self.optimizer, self.masters),
            "loss_scale": self.loss_scale.state_dict(),
            "schedule": {} if self.schedule is None else self.schedule.state_dict(),
            "shared": {} if self._shared_state is None else self._shared_state.state_dict(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, copy: bool = True) -> None:
        """Load a `state_dict`, and copy the masters to the parameters.

        With ZeRO collective over the data axis.

        Args:
            copy: copy the tensors of the optimizer's state; otherwise the optimizer gets them.

        Raises:
            CheckpointError: a parameter of this rank is missing there, or has another shape.
        """
        # The caller may have loaded the parameters already: finish writes to them first.
        self.masters.wait()
        self.wait_for_copies()
        unpack(
            self.optimizer,
            self.masters,
            state["parameters"],
            any_shape=self._shared_state is not None,
            copy=copy,
        )
        self.masters.sync_from_model()
        self.loss_scale.load_state_dict(state["loss_scale"])
        # Earlier versions have not saved it.
        if self._shared_state is not None and state.get("shared"):
            self._shared_state.load_state_dict(state["shared"])
        if self.schedule is not None and state["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
        self.steps, self.skipped_steps = int(state["steps"]), int(state["skipped_steps"])
