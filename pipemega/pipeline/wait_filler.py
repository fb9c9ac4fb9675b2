"""Runs parts of queued W while an exchange of tokens is on its way: `pipeline.fill_waits`.

F or I      starts an exchange
            `fill_wait`: jobs of the oldest W, as `plan.fill_waits` has planned
            waits for the exchange
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipemega.pipeline.execution_state import ComputeWrapper, ExecutionState, Handler
from pipemega.pipeline.plan.fill_waits import Filling, Waits, fill_waits
from pipemega.pipeline.plan.instructions import Instruction, Program
from pipemega.pipeline.weight_queue import WeightGradQueue

# Not local to a thread: on a GPU, autograd waits for exchanges in threads of its own.
_filler: Callable[[], None] | None = None


def fill_wait() -> None:
    """Use the time of an exchange that has started; called just before the wait for it."""
    if _filler is not None:
        _filler()


class WaitFiller(ComputeWrapper):
    """Runs jobs of queued W within the exchanges of F and I.

    Args:
        stages: stage -> its layers.
        layers: the exchanges of each layer of the model.
    """

    def __init__(
        self, stages: Mapping[int, Any], queue: WeightGradQueue, layers: Sequence[Waits]
    ) -> None:
        self._queue = queue
        self._waits = {
            number: Waits.sum(layers[stage.start : stage.stop]) for number, stage in stages.items()
        }
        self._program: Program = ()
        self._filled: dict[Instruction, Filling] = {}
        self._trains = False

    def begin(self, run: ExecutionState, program: Program) -> None:
        self._trains = run.train
        if program is not self._program:
            self._program, self._filled = program, fill_waits(program, self._waits)

    def run(self, handler: Handler, step: Instruction) -> None:
        global _filler
        filling = self._filled.get(step) if self._trains else None
        if filling is None:
            handler(step)
            return
        _filler = _Steps(self._queue, filling)
        try:
            handler(step)
        finally:
            _filler = None


class _Steps:
    """Runs an equal part of the work of a step in each of its exchanges."""

    def __init__(self, queue: WeightGradQueue, filling: Filling) -> None:
        self._queue, self._filling, self._exchange = queue, filling, 0

    def __call__(self) -> None:
        self._exchange += 1
        part = min(1.0, self._exchange / self._filling.exchanges)
        goals = self._filling.goals
        at = part * len(goals)
        for number, (step, before, after) in enumerate(goals):
            if number < at:
                share = before + min(1.0, at - number) * (after - before)
                self._queue.run_part((step.stage, step.microbatch), share)
