"""Forwards without backwards: losses and outputs of micro-batches, and of a whole data set."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pipemega.data.loader import BatchLoader
from pipemega.distributed.mesh import Mesh
from pipemega.engine.run.batch_reader import BatchReader, StepData
from pipemega.errors import ConfigError
from pipemega.pipeline.execution_state import MicroBatches, Results
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.kernel_warmup import KernelWarmup
from pipemega.pipeline.microbatch_loss import mean_over_ranks
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan_selection import evaluation_plan
from pipemega.random import preserve_rng

OnOutput = Callable[[Any, Any], object]
"""Takes the (outputs, labels) of a micro-batch."""


class Evaluator:
    """Runs forwards on the stages of one rank; every method is collective.

    Args:
        mesh: the device mesh of the run.
        executor: runs the forwards.
        reader: reads the data.
        plan: a plan of the training steps; gives the stages.
        warmup: runs micro-batches with new shapes before messages are posted.
    """

    def __init__(
        self,
        mesh: Mesh,
        executor: Executor,
        reader: BatchReader,
        plan: Plan,
        warmup: KernelWarmup | None = None,
    ) -> None:
        self._mesh, self._executor, self._reader = mesh, executor, reader
        self._plan, self._warmup = plan, warmup
        self._is_last = mesh.pipeline.rank == plan.rank_of_stage[-1]

    def batch(
        self, data: StepData, *, keep_outputs: bool = False, on_output: OnOutput | None = None
    ) -> tuple[float, list[Any] | None]:
        """Return (loss, outputs) of some micro-batches.

        Returns:
            the mean by weight over all data ranks; the outputs in the order of micro-batches, and
            None on other stages' ranks.
        """
        results = self._forward(data, keep_outputs, on_output)
        loss, weight, _ = results.losses.totals(self._mesh)
        return mean_over_ranks(loss, weight, self._mesh), self.kept(results)

    def outputs(self, data: StepData) -> list[Any] | None:
        """Return the outputs of some micro-batches, as `batch`."""
        return self.kept(self._forward(data, True, None))

    def kept(self, results: Results) -> list[Any] | None:
        """Return the outputs in the order of micro-batches; None on other stages' ranks."""
        outputs = results.outputs
        return [outputs[m] for m in sorted(outputs)] if self._is_last else None

    def over(
        self,
        loader: BatchLoader,
        num_batches: int | None,
        on_output: OnOutput | None,
        on_batch: Callable[[int], object] | None = None,
    ) -> float:
        """Return the mean loss of the next `num_batches` global batches of `loader`; None: all.

        Args:
            on_batch: called with the number of samples of each batch.

        Raises:
            ConfigError: `loader` never ends.
            StopIteration: it ended before `num_batches`.
        """
        if num_batches is None and loader.repeats:
            raise ConfigError(
                f"evaluate() of a loader that repeats {loader.name} has no end: give num_batches, "
                "or the dataset itself",
                on_every_rank=True,
            )
        sums: tuple[Tensor | float, Tensor | float] = 0.0, 0.0
        done = 0
        while done != num_batches:
            try:
                data = self._reader.evaluation_step(loader)
            except StopIteration:
                if num_batches is not None or done == 0:
                    raise
                break
            results = self._forward(data, False, on_output)
            loss, weight, _ = results.losses.totals(self._mesh)
            sums, done = (sums[0] + loss, sums[1] + weight), done + 1
            if on_batch is not None:
                on_batch(data.num_samples)
        return mean_over_ranks(*sums, self._mesh)

    def _forward(self, data: StepData, keep_outputs: bool, on_output: OnOutput | None) -> Results:
        if not data.inputs:  # only other data ranks have samples
            return Results()
        plan = evaluation_plan(self._plan, len(data.inputs))
        batch = MicroBatches(
            data.inputs,
            data.labels,
            shares=data.shares,
            keep_outputs=keep_outputs,
            on_output=on_output,
            counted=data.counted,
        )
        warmup, shape = self._warmup, (data.shares, data.num_samples)
        if warmup is not None and warmup.is_due(self._plan, *shape, trains=False):
            warmup.run(self._plan, batch, data.num_samples)
        with preserve_rng(self._mesh.device):
            return self._executor.run(plan, batch)
