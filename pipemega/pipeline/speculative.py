"""Speculative forwards: run a warm-up before the previous optimizer step is validated."""

from collections.abc import Callable

from pipemega.errors import PipemegaError
from pipemega.pipeline.buffers import BufferCopies
from pipemega.pipeline.execution_state import MicroBatches, Results
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.warmup import WarmupCut, warmup_cut
from pipemega.pipeline.recorder import NULL_RECORDER, Recorder


class SpeculativeRunner:
    """Runs plans, and validates the parameters between the warm-up and the first backward.

    Args:
        executor: of this pipeline rank.
        validate: returns whether the parameters that the warm-up used are final. If not, they are
            final when it returns, and the warm-up is run again. Returns the same on every rank; may
            raise a PipemegaError on every rank.
        before_rerun: called after a discarded warm-up and before its second run; collective, and
            may run other plans.
        forwards_done: called with the losses when the last forward of this rank has run.
    """

    def __init__(
        self,
        executor: Executor,
        validate: Callable[[], bool],
        before_rerun: Callable[[], None],
        forwards_done: Callable[[Results], None],
    ) -> None:
        self._executor, self._validate = executor, validate
        self._before_rerun, self._forwards_done = before_rerun, forwards_done
        self._plan: Plan | None = None
        self._cut: WarmupCut | None = None

    def run(
        self,
        plan: Plan,
        micro_batches: Callable[[], MicroBatches],
        recorder: Recorder = NULL_RECORDER,
    ) -> Results:
        """Run this rank's program of the lowered `plan` once.

        Args:
            micro_batches: returns the same ones at each call, except for `loss_factor`, which
                `validate` may change.
            recorder: times each instruction; if the warm-up is run again, its second run.
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
        self._forwards_done(executor.results)
        executor.work(program[last:])
        return executor.end()

    def _warmup_cut(self, plan: Plan) -> WarmupCut:
        if self._cut is None or self._plan is not plan:
            self._plan, self._cut = plan, warmup_cut(plan)
        return self._cut
