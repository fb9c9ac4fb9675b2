"""A step whose forwards begin before the last optimizer step is known to stand."""

from collections.abc import Callable

from pipemega.errors import PipemegaError
from pipemega.pipeline.buffers import BufferCopies
from pipemega.pipeline.executor import Executor, MicroBatches, Results
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.recorder import OFF, Recorder
from pipemega.pipeline.warm_up import WarmUp, warm_up


class RunAhead:
    """Runs plans with an executor, with a question between warm-up and first backward.

    Args:
        executor: of this pipeline rank.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._of: Plan | None = None
        self._cut: WarmUp | None = None

    def run(
        self,
        plan: Plan,
        batch: Callable[[], MicroBatches],
        stands: Callable[[], bool],
        forwards_done: Callable[[Results], None],
        recorder: Recorder = OFF,
        undone: Callable[[], None] = lambda: None,
    ) -> Results:
        """Runs this rank's program of the lowered `plan` once.

        Args:
            batch: the same each time, but for the loss factor, which the answer may change.
            stands: whether the parameters that the warm-up ran with are the right ones; if not
                they are by then, and the warm-up is run again.  It must answer alike on every
                rank, and may raise an error of ours on every rank.
            forwards_done: told as soon as all forwards have run for good, with their losses.
            recorder: times each instruction; of a warm-up that is run again, the second time.
            undone: called between a warm-up that was thrown away and its second run, on every
                rank alike; it may run plans of its own.
        """
        cut, executor = self._cut_of(plan), self._executor
        rank = executor.rank
        program, stop, last = cut.plan.programs[rank], cut.stop[rank], cut.last_forward[rank]
        buffers = BufferCopies(executor.stages.values())
        executor.begin(cut.plan, batch(), recorder)
        executor.work(program[:stop])
        try:
            again = not stands()
        except PipemegaError as error:
            if not error.on_every_rank:
                raise  # some rank is lost, and with it its messages
            executor.throw_away(cut.unread[rank])
            buffers.restore()
            raise
        if again:
            executor.throw_away(cut.unread[rank])
            buffers.restore()
            undone()
            executor.begin(cut.plan, batch(), recorder)
            executor.work(program[:stop])
        executor.work(program[stop:last])
        forwards_done(executor.results)
        executor.work(program[last:])
        return executor.end()

    def _cut_of(self, plan: Plan) -> WarmUp:
        if self._cut is None or self._of is not plan:
            self._of, self._cut = plan, warm_up(plan)
        return self._cut
