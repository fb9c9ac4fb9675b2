"""Runs training steps; validates each one at once or, with post-validation, in the next one."""

from collections.abc import Callable

from pipemega.distributed.mesh import Mesh
from pipemega.engine.batch_reader import StepData
from pipemega.engine.loss import sum_losses
from pipemega.engine.step_callbacks import TrainStep
from pipemega.errors import PipemegaError
from pipemega.optimizer import OptimizerStep, PostValidatedStep, StepReport
from pipemega.optimizer.post_validation import SpeculativeRunner
from pipemega.pipeline.execution_state import MicroBatches, Results
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.model.module import RngKey
from pipemega.pipeline.plan.instructions import Plan


class StepRunner:
    """Runs the forwards, backwards and optimizer steps of one rank.

    Each step is final at once; only a `PostValidatedStep` is validated after the first forwards of
    the next step.

    Args:
        executor: runs the plans.
        step: the optimizer step.
        mesh: its data axis distributes the micro-batches.
        seed: of the RNG keys of micro-batches.
        on_rollback: called when the last step was undone, before the forwards run again.
        on_failure: called when the last step fails after it returned: it has inf or nan and must
            not be skipped. The error follows.
    """

    def __init__(
        self,
        executor: Executor,
        step: OptimizerStep,
        mesh: Mesh,
        seed: int,
        on_rollback: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._executor, self._step, self._mesh, self._seed = executor, step, mesh, seed
        self._on_failure = on_failure
        self._speculative: SpeculativeRunner | None = None
        if isinstance(step, PostValidatedStep):
            self._speculative = SpeculativeRunner(
                executor,
                self.settle,
                on_rollback,
                lambda results: step.start_loss_sums(*sum_losses(results, mesh)),
            )

    def new_step(
        self,
        number: int,
        plan: Plan,
        data: StepData,
        *,
        keep_outputs: bool = False,
    ) -> TrainStep:
        """Return step `number`, with the micro-batches of this rank."""
        count, axis = len(data.inputs), self._mesh.data
        # Keys have the index in the global batch: dropout is the same on every mesh.
        keys = [RngKey(self._seed, number - 1, m * axis.size + axis.rank) for m in range(count)]

        def micro_batches() -> MicroBatches:
            # Validating the previous step may change the loss scale.
            factor = self._step.loss_scale.scale / count
            return MicroBatches(
                data.inputs,
                data.labels,
                rng_keys=keys,
                loss_factor=factor,
                shares=data.shares,
                keep_outputs=keep_outputs,
                counted=data.counted,
            )

        return TrainStep(number, plan, micro_batches)

    def forward_backward(self, step: TrainStep) -> Results:
        """Run all forwards and backwards of a step."""
        self._step.stop_requested = step.should_stop
        if self._speculative is not None:
            return self._speculative.run(step.plan, step.micro_batches, step.recorder)
        return self._executor.run(step.plan, step.micro_batches(), step.recorder)

    def optimizer_step(self, results: Results, num_samples: int) -> StepReport:
        """Reduce the gradients and update the parameters, after a step of `num_samples`."""
        self._step.samples = num_samples
        return self._step(*sum_losses(results, self._mesh))

    def settle(self) -> bool:
        """Complete the last step; return False if this changed the parameters."""
        try:
            return self._step.settle()
        except PipemegaError as error:
            if self._speculative is not None and error.on_every_rank:
                self._on_failure()
            raise
