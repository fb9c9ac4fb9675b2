"""The engine of a loop that runs forward and backward itself, on data ranks only.

run_forward      the module, and whatever the caller computes from its outputs
run_backward     gradients of loss * loss scale / gradient_accumulation_steps are summed
end_micro_batch  after the last micro-batch of a step: reduce, clip, update, as in train_batch
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.config import Config
from pipemega.distributed.mesh import Mesh
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import build_engine
from pipemega.engine.run.batch_reader import StepData
from pipemega.engine.run.run_arguments import build_mesh_of, optimizer_arguments
from pipemega.engine.run_setup import RunSetup
from pipemega.errors import ConfigError, StopTraining
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.optimizer import OptimizerStep
from pipemega.optimizer.build_step import precision_of
from pipemega.optimizer.lr_schedules import SchedulerMaker
from pipemega.optimizer.user_optimizer import GivenGroups, GivenOptimizer, OptimizerMaker
from pipemega.pipeline.execution_state import Results
from pipemega.pipeline.model.module import PipelineModule


class LoopEngine:
    """Trains one module; the caller computes the losses.

    Random numbers are those of torch's generators, which the engine neither seeds nor restores.

    Args:
        engine: has one layer, the module, and reads no data.

    Attributes:
        engine: as given; saves, loads and records.
        micro_steps: micro-batches that were ended so far.
        at_boundary: whether the current micro-batch is the last of its step; None: every
            `gradient_accumulation_steps`-th is. Set by the caller.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self._steps, self._failures = engine, engine.steps, failure_reporter()
        self.micro_steps = 0
        self.at_boundary: bool | None = None
        self._results = Results()
        self._microbatch = 0  # of the step
        self._started: float | None = None  # the first forward of the step

    @property
    def layer(self) -> nn.Module:
        """The module that is trained."""
        (stage,) = self._steps.model.stages.values()
        return stage.layers["0"]

    @property
    def ends_step(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        if self.at_boundary is not None:
            return self.at_boundary
        return (self.micro_steps + 1) % self.engine.batch.num_microbatches == 0

    def run_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; its error ends the other ranks too.

        With `fp16.auto_cast`, floating-point tensors in `args` are cast to fp16. Not collective.
        """
        steps, config = self._steps, self.engine.config
        if self._started is None and torch.is_grad_enabled():
            self._started = time.perf_counter()
        with self._failures.propagate_errors("forward"), steps.timers("forward"):
            if config.fp16.enabled:
                args = precision_of(config).cast_inputs(args)
            if steps.profiler is None or not torch.is_grad_enabled():
                return self.layer(*args, **kwargs)
            with steps.profiler.forward(steps.global_steps + 1):
                return self.layer(*args, **kwargs)

    def run_backward(
        self, loss: Tensor, *, retain_graph: bool = False, mean: bool = True
    ) -> Tensor:
        """Add the gradients of a loss; not collective.

        Args:
            loss: scalar, the mean over the micro-batch. Several losses of one micro-batch add up.
            retain_graph: keep the graph, for another backward through it.
            mean: average over the micro-batches of the step; False: add them up.

        Returns:
            the part of the loss of the step, detached.

        Raises:
            ConfigError: there is no optimizer.
            PipemegaError: the loss is no scalar, or has no gradient.
        """
        with self._failures.propagate_errors("backward"), self._steps.timers("backward"):
            scaled = self.scale(loss, mean=mean)
            torch.autograd.backward(scaled, retain_graph=retain_graph)
            return loss.detach() / self._divisor(mean)

    def scale(self, loss: Tensor, *, mean: bool = True) -> Tensor:
        """Return the loss that the caller's `backward()` starts from; see `run_backward`."""
        step = self._optimizer_step("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ConfigError(
                f"backward(loss) takes a scalar tensor, the mean loss of the micro-batch, and got "
                f"{shape}: reduce it, for example with .mean()"
            )
        if not loss.requires_grad:
            raise ConfigError(
                "backward(loss): the loss has no gradient: it was computed under no_grad, detached "
                "or rounded, or the model has no trainable parameter"
            )
        divisor = self._divisor(mean)
        # Relative to the mean over the micro-batches, which the step reports.
        of_mean = self.engine.batch.num_microbatches / divisor
        weight = torch.ones((), device=loss.device)
        self._results.losses.add(self._microbatch, loss.double() * of_mean, weight)
        # In fp16 the scale itself may be inf.
        whole = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return whole * (step.loss_scale.scale / divisor)

    def _optimizer_step(self, caller: str) -> OptimizerStep:
        self._steps.check_training(caller)
        assert self._steps.optimizer_step is not None
        return self._steps.optimizer_step

    def _divisor(self, mean: bool) -> int:
        return self.engine.batch.num_microbatches if mean else 1

    def discard_gradients(self) -> None:
        """Set the gradients of the micro-batches of this step so far to zero; not collective."""
        if self._steps.optimizer_step is not None:
            self._steps.optimizer_step.gradients.zero()
        self._results = Results()

    def end_micro_batch(self) -> bool:
        """End a micro-batch; if it is the last of its step, update the parameters.

        Collective then: all data ranks call it equally often.

        Returns:
            whether this was the last micro-batch of a step.

        Raises:
            ConfigError: there was no backward since the last call; or there is no optimizer.
            StopTraining, NonFiniteError, LossScaleError, PipelineError: as `train_batch`.
        """
        run = self.engine.run
        with self._failures.propagate_errors("step"):
            self._optimizer_step("step")
            if self._results.losses.of(self._microbatch) is None:
                raise ConfigError(
                    "step() is called without gradients: call engine.backward(loss) before each "
                    "engine.step(). loss.backward() alone does not apply the loss scale and the "
                    "division by gradient_accumulation_steps; engine.scale(loss).backward() does"
                )
            ends = self.ends_step
            self._microbatch += 1
            if ends:
                started, self._started = self._started, None
                run.train_step(self._update, has_next=False, started=started)
        self.micro_steps += 1
        if ends and run.stopped:
            raise StopTraining(run.stopped)
        return ends

    def _update(self) -> tuple[float, None]:
        steps, results = self._steps, self._results
        self._results, self._microbatch = Results(), 0
        count = len(results.losses)
        steps.phases.start(exact=False)
        samples = count * steps.batch.micro_batch_size * steps.mesh.data.size
        step, _ = steps.begin(StepData([None] * count, [], samples))
        report = steps.finish(step, results, self.engine.run.should_stop)
        # The caller may read the parameters at any time.
        steps.settle()
        return report.loss, None


def initialize_loop(
    module: nn.Module,
    config: Config,
    *,
    mesh: Mesh | None = None,
    optimizer: OptimizerMaker | GivenOptimizer | None = None,
    lr_scheduler: SchedulerMaker | None = None,
    model_parameters: Sequence[Mapping[str, Any]] | GivenGroups | None = None,
) -> LoopEngine:
    """Build the engine of a loop that runs the forward and backward of `module`.  Collective.

    The arguments are those of `initialize`. A parameter `x` has the logical name `layers.0.x`.

    Raises:
        ConfigError, MeshError: as `initialize`; or a key has no meaning in such a loop.
    """
    arguments = optimizer_arguments(optimizer, lr_scheduler, model_parameters)
    mesh = mesh or build_mesh_of(config)
    for axis in (mesh.pipeline, mesh.tensor):
        if axis.size > 1:
            raise ConfigError(
                f"mesh.{axis.name} is {axis.size}, and {type(module).__name__} is no pipeline, so "
                f"each rank needs all of it: set mesh.{axis.name} to 1, or write the model as a "
                "PipelineModule of its layers",
                on_every_rank=True,
            )
    _check_keys(config)
    setup = RunSetup(config, mesh, PipelineModule([module]), arguments)
    return LoopEngine(build_engine(setup, in_loop=True))


def _check_keys(config: Config) -> None:
    """Refuse keys that need the data or the instructions of the engine.

    Raises:
        ConfigError: names the key; on every rank.
    """
    trace, training = config.monitor.trace, config.training
    reasons = {
        "training.epochs": training.epochs is not None
        and "the loop reads the data, so the engine cannot count passes over them",
        "training.rampup_batch_size": training.rampup_batch_size is not None
        and "the loop decides how many micro-batches a step has",
        "monitor.trace": (trace.steps or trace.every)
        and "the loop runs forward and backward, so there are no instructions to trace",
        "lora": config.lora is not None and "add the adapters to the module, for example with peft",
    }
    for key, reason in reasons.items():
        if reason:
            raise ConfigError(
                f"{key} is set, and the model is no pipeline: {reason}; remove the key",
                on_every_rank=True,
            )
