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
result is bitwise equal to the result of the synchronous step ("fenced"): both call the same
functions, and after a wrong assumption they start from the same state.

If most steps are clipped, restoring costs more than waiting.  So a rank waits for the norm until
several steps in a row have needed neither clipping nor skipping.

Source: Qi et al. 2023, arXiv:2401.10241, section 4, "post-validation".  There each rank adds its
part to a prefix sum along the pipeline; here an asynchronous all-reduce overlaps the computation.

Sums over all ranks that run beside the work of the device and of the main thread.

    device        .. forwards | copy | backwards ..
    thread                      wait for the copy | all-reduce over gloo |
    main thread   starts all of these ..                     wait() before the sums are used

gloo needs the numbers on the host.  A thread waits for their copy, because the main thread must
continue to start work on the device.

A backup of everything that an optimizer step changes, to undo the step bit for bit.

Speculative forwards: run a warm-up before the previous optimizer step is validated.
"""

import copy
import logging
import math
import queue
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from pipemega.distributed.comm_errors import named_collective
from pipemega.distributed.exchanges import recorded
from pipemega.distributed.host_memory import HostCopy, HostMemory
from pipemega.distributed.mesh import Mesh
from pipemega.distributed.process_groups import device_thread
from pipemega.errors import PipemegaError
from pipemega.optimizer.param_groups import options_of
from pipemega.optimizer.step import OptimizerStep
from pipemega.optimizer.step_outcome import Attempt, Decision, StepReport
from pipemega.pipeline.execution_state import MicroBatches, Results
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.model.module import BufferCopies
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.lowering import WarmupCut, warmup_cut
from pipemega.pipeline.recorder import NULL_RECORDER, Recorder

_Jobs = queue.SimpleQueue[Callable[[], None] | None]


class AsyncSums:
    """One sum, which may still be on its way.

    Args:
        name: what is summed, for error messages.
        finish: returns the sums on the host as soon as they are there.
    """

    def __init__(self, name: str, finish: Callable[[], Tensor]) -> None:
        self._name, self._finish = name, finish
        self._sums: list[float] | None = None

    def sums(self) -> list[float]:
        """Return the sums over all ranks; block until every rank has contributed.

        Raises:
            PipelineError: the all-reduce failed or timed out.
        """
        if self._sums is None:
            with named_collective(f"{self._name}: the all-reduce over all ranks"):
                self._sums = self._finish().tolist()
        return self._sums


class HostSums:
    """Starts sums over all ranks; every rank starts the same ones in the same order.

    Args:
        memory: host memory for copies from the device of the numbers.
        group: the process group of all ranks, with the backend gloo; None with one rank.
    """

    def __init__(self, memory: HostMemory, group: dist.ProcessGroup | None) -> None:
        self._memory, self._group = memory, group
        self._jobs: _Jobs | None = None

    def start(self, name: str, local: Tensor) -> AsyncSums:
        """Start one sum.

        Args:
            name: what is summed, for error messages.
            local: this rank's contribution; only read.
        """
        copy = HostCopy(self._memory, local)
        group = self._group
        if group is None:
            return AsyncSums(name, copy.wait)
        # In order: after a sum that waits in the thread, no other may start before it.
        if self._jobs is None and copy.is_complete:
            sums = copy.wait()
            start = partial(dist.all_reduce, sums, group=group, async_op=True)
            work = recorded("all_reduce", sums.nbytes, group, start, on_host=True)
            return AsyncSums(name, lambda: _completed(work, sums))
        result: Future[Tensor] = Future()
        self._queue().put(lambda: _all_reduce_into(result, copy, group))
        return AsyncSums(name, result.result)

    def _queue(self) -> _Jobs:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon: a rank that is gone must not keep this process from ending.
            device_thread(_run, "sums", self._jobs).start()
            weakref.finalize(self, self._jobs.put, None)
        return self._jobs


def _completed(work: dist.Work | None, sums: Tensor) -> Tensor:
    assert work is not None
    work.wait()
    return sums


def _all_reduce_into(result: Future[Tensor], copy: HostCopy, group: dist.ProcessGroup) -> None:
    try:
        sums = copy.wait()
        run = partial(dist.all_reduce, sums, group=group)
        recorded("all_reduce", sums.nbytes, group, run, on_host=True)
        result.set_result(sums)
    # AsyncSums.wait raises it in the main thread.
    except BaseException as error:
        result.set_exception(error)


def _run(jobs: _Jobs) -> None:
    """Run jobs in their order until None."""
    while (job := jobs.get()) is not None:
        job()


class Backup:
    """Copies of an optimizer's state and of other tensors, as they are before a step.

    The copies are allocated once, and again only if the optimizer's state has other tensors: after
    its first step and after a checkpoint was loaded.

    Args:
        optimizer: its state tensors and the settings of its parameter groups are saved.
        tensors: other tensors that the step changes: its parameters and the gradients.
    """

    def __init__(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._others = [tensor.detach() for tensor in tensors]
        self._saved: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._state: dict[Any, dict[str, Any]] = {}
        self._settings: list[dict[str, Any]] = []

    @property
    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies)

    @torch.no_grad()
    def save(self) -> None:
        """Copy everything; replaces the previous copies."""
        optimizer = self._optimizer
        self._state = {p: _copied(entry) for p, entry in optimizer.state.items()}
        self._settings = [_copied(options_of(group)) for group in optimizer.param_groups]
        leaves = pytree.tree_leaves([*self._state.values(), *self._settings])
        saved = [*self._others, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        if [id(tensor) for tensor in saved] != [id(tensor) for tensor in self._saved]:
            self._copies = [torch.empty_like(tensor) for tensor in saved]
        self._saved = saved
        if saved:
            torch._foreach_copy_(self._copies, saved)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies of the last `save` back into the same tensors."""
        if self._saved:
            torch._foreach_copy_(self._saved, self._copies)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)


def _copied(tree: dict[str, Any]) -> dict[str, Any]:
    """Copy lists, dicts and other values, which a step may change; keep the tensors."""
    copied: dict[str, Any] = pytree.tree_map(
        lambda leaf: leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf), tree
    )
    return copied


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

    Before that, parameters, optimizer state, learning rate and loss scale have the values after a
    step without overflow and without clipping, and the gradients are kept: no backward may run.
    Every rank calls `settle` between two steps, at the same point of its program.

    Args:
        *arguments, **settings: the arguments of `OptimizerStep`.
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

    @property
    def is_fenced(self) -> bool:
        return False

    def start_loss_sums(
        self,
        loss_sum: Tensor | float,
        weight_sum: Tensor | float,
        num_microbatches: int,
        stop: bool = False,
        extra: Tensor | None = None,
    ) -> None:
        """Start the all-reduce of the next call's arguments; collective, after all forwards."""
        # Same length and order as the sums with the norm, so that the results are bitwise equal.
        local = self._stats_with(0.0, loss_sum, weight_sum, num_microbatches, stop, extra)
        self._loss_sums = self._sums.start("loss and weight", local)

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
        """Do one step; wait only for ranks that hold the same parameters.

        Returns:
            the report; `grad_norm` is nan if the step did not wait for it.

        Raises:
            NonFiniteError, LossScaleError: the errors of `OptimizerStep`, if the step waited for
                its norm; otherwise `settle` raises them.
        """
        assert self._unvalidated is None, "the previous step has not been settled"
        if self._loss_sums is None:
            self.start_loss_sums(loss_sum, weight_sum, num_microbatches, stop, extra)
        assert self._loss_sums is not None
        attempt, totals = self._reduce(samples), self._global(self._loss_sums.sums())
        self._loss_sums = None
        with self.phases("gradient norm"):
            stats = self._local_stats(loss_sum, weight_sum, num_microbatches, stop, extra)
        sums = self._sums.start(f"the gradient norm of step {self.steps}", stats)
        assumed = self._decide(attempt, totals.without_norm())
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
            decision = self._decide(attempt, self._global(sums.sums()))
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
            decision = self._decision(step)
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

    def _decision(self, step: _UnvalidatedStep) -> Decision:
        return self._decide(step.attempt, self._global(step.sums.sums()))

    def _count(self, *, right: bool) -> None:
        self._right_in_a_row = self._right_in_a_row + 1 if right else 0

    @property
    def last(self) -> StepReport | None:
        """Report of the last step; waits for its norm and changes nothing. Not collective."""
        step = self._unvalidated
        if step is None:
            return self._last
        decision = self._decision(step)
        wrong = not decision.same_update(step.assumed)
        return replace(decision.report, rollbacks=self.rollbacks + wrong)

    @property
    def skipped_so_far(self) -> int:
        """Skipped steps, the last step included; waits as `last` does."""
        step = self._unvalidated
        return self.skipped_steps if step is None else self._decision(step).report.skipped_steps


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


class SpeculativeRunner:
    """Runs plans, and validates the parameters between the warm-up and the first backward.

    Args:
        executor: the executor of this pipeline rank.
        validate: returns whether the parameters that the warm-up used are final. If not, they are
            final when it returns, and the warm-up is run again. Returns the same on every rank; may
            raise a PipemegaError on every rank.
        before_rerun: called after a discarded warm-up and before its second run; collective, and
            may run other plans.
    """

    def __init__(
        self,
        executor: Executor,
        validate: Callable[[], bool],
        before_rerun: Callable[[], object],
    ) -> None:
        self._executor, self._validate, self._before_rerun = executor, validate, before_rerun
        self._plan: Plan | None = None
        self._cut: WarmupCut | None = None

    def run(
        self,
        plan: Plan,
        micro_batches: Callable[[], MicroBatches],
        recorder: Recorder = NULL_RECORDER,
        forwards_done: Callable[[Results], object] = lambda results: None,
    ) -> Results:
        """Run this rank's program of the lowered `plan` once.

        Args:
            micro_batches: returns the micro-batches; equal at each call, except for `loss_factor`,
                which `validate` may change.
            recorder: times each instruction; if the warm-up is run again, its second run.
            forwards_done: called with the losses when the last forward of this rank has run.
        """
        cut, executor = self._warmup_cut(plan), self._executor
        rank = executor.rank
        program, stop, last = cut.plan.programs[rank], cut.stop[rank], cut.last_forward[rank]
        buffers = BufferCopies(executor.stages.values())
        executor.begin(cut.plan, micro_batches(), recorder)
        executor.work(program[:stop])
        try:
            is_valid = self._validate()
        except PipemegaError as error:
            if not error.on_every_rank:
                raise  # a rank is lost, and its messages will not arrive
            executor.discard(cut.unread[rank])
            buffers.restore()
            raise
        if not is_valid:
            executor.discard(cut.unread[rank])
            buffers.restore()
            self._before_rerun()
            executor.begin(cut.plan, micro_batches(), recorder)
            executor.work(program[:stop])
        executor.work(program[stop:last])
        forwards_done(executor.results)
        executor.work(program[last:])
        return executor.end()

    def _warmup_cut(self, plan: Plan) -> WarmupCut:
        if self._cut is None or self._plan is not plan:
            self._plan, self._cut = plan, warmup_cut(plan)
        return self._cut
