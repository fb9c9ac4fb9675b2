"""`engine(x)`, `engine.backward(loss)`, `engine.step()`: training of a module over data ranks.

forward    the module, and whatever the caller computes from its outputs
backward   gradients of loss * loss scale / gradient_accumulation_steps are summed
step       after the last micro-batch of a step: reduce, clip, update, as in train_batch
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from pipemega.compat.deepspeed.deepspeed_engine import Collate, DeepSpeedEngine, schedule_maker
from pipemega.compat.deepspeed.process_topology import CONFIG_CHANGES
from pipemega.compat.deepspeed.virtual_modules import ENGINE_ADVICE
from pipemega.config import Config, load
from pipemega.distributed.mesh import Mesh
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import build_engine
from pipemega.engine.run.batch_reader import StepData
from pipemega.engine.run.run_arguments import build_mesh_of, optimizer_arguments
from pipemega.engine.run_setup import RunSetup
from pipemega.errors import ConfigError, StopTraining
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.monitor import get_logger
from pipemega.optimizer import OptimizerStep
from pipemega.optimizer.build_step import precision_of
from pipemega.optimizer.lr_schedules import SchedulerMaker
from pipemega.optimizer.user_optimizer import (
    GivenGroups,
    GivenOptimizer,
    OptimizerMaker,
    as_optimizer,
    freeze_others,
)
from pipemega.pipeline.execution_state import Results
from pipemega.pipeline.model.module import PipelineModule


class DataParallelEngine(DeepSpeedEngine, nn.Module):
    """Trains a module whose forward and backward the script runs.

        loss = loss_fn(engine(x), y)
        engine.backward(loss)
        engine.step()

    Every micro-batch ends with `step()`; every `gradient_accumulation_steps`-th call reduces the
    gradients over the data ranks and updates the parameters, with the optimizer step that
    pipelines have. Attributes that the engine does not have are looked up in the module. Random
    numbers come from torch's generators, which the engine neither seeds nor restores.

    Args:
        engine: has one layer, the module, and reads no data.
        collate_fn: the default `collate_fn` of `deepspeed_io`.

    Attributes:
        module: the module that was given to `initialize`.
        training_dataloader: the loader of the training data given to `initialize`; None if no data
            was given.
    """

    _advice = ENGINE_ADVICE["DataParallelEngine"]

    def __init__(self, engine: Engine, collate_fn: Collate | None = None) -> None:
        nn.Module.__init__(self)
        self._use(engine)
        self._steps, self._failures = engine.steps, failure_reporter()
        (stage,) = engine.steps.model.stages.values()
        self.module = stage.layers["0"]
        self._micro_steps = 0
        # Set by the caller; None: every gradient_accumulation_steps-th micro-batch ends a step.
        self._at_boundary: bool | None = None
        self._results = Results()
        self._microbatch = 0  # of the step
        self._started: float | None = None  # the first forward of the step
        if self.optimizer is not None:
            # torch's `zero_grad` clears the gradients of the masters, but not the gradient buffer.
            vars(self.optimizer)["zero_grad"] = self.zero_grad
            self._report_to_optimizer()
        self.training_dataloader: DataLoader[Any] | None = None
        self.collate_fn = collate_fn
        self._without_sync = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "module" and hasattr(self.module, name):
                return getattr(self.module, name)
        raise self._missing(name)

    # A micro-batch

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; its error ends the other ranks too.

        With `fp16.auto_cast`, floating-point `inputs` are cast to fp16. Not collective.
        """
        steps, config = self._steps, self.pipemega_config
        if self._started is None and torch.is_grad_enabled():
            self._started = time.perf_counter()
        with self._failures.propagate_errors("forward"), steps.timers("forward"):
            if config.fp16.enabled:
                inputs = precision_of(config).cast_inputs(inputs)
            if steps.profiler is None or not torch.is_grad_enabled():
                return self.module(*inputs, **kwargs)
            with steps.profiler.forward(steps.global_steps + 1):
                return self.module(*inputs, **kwargs)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
    ) -> Tensor:
        """Add the gradients of the mean loss of a micro-batch; not collective.

        Args:
            loss: scalar. Several losses of one micro-batch add up.
            retain_graph: keep the graph for another backward through it.
            scale_wrt_gas: divide by `gradient_accumulation_steps`.
            allreduce_gradients: False is refused: `step` reduces.
            release_loss: has no effect.

        Returns:
            the loss, divided as its gradients are; detached.

        Raises:
            ConfigError: there is no optimizer.
            PipemegaError: the loss is no scalar, or has no gradient.
        """
        if not allreduce_gradients:
            raise ConfigError(
                "backward(allreduce_gradients=False): step() reduces the gradients once per step; "
                "remove the argument, and the reduction of the script"
            )
        with self._failures.propagate_errors("backward"), self._steps.timers("backward"):
            divisor = self.gradient_accumulation_steps() if scale_wrt_gas else 1
            torch.autograd.backward(self._scaled(loss, divisor), retain_graph=retain_graph)
            return loss.detach() / divisor

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss from which the script runs `backward()` itself."""
        return self._scaled(loss, self.gradient_accumulation_steps())

    def _scaled(self, loss: Tensor, divisor: int) -> Tensor:
        """Return loss * loss scale / divisor; record the loss for the mean of the step."""
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
        # Relative to the mean over the micro-batches, which the step reports.
        of_mean = self.gradient_accumulation_steps() / divisor
        weight = torch.ones((), device=loss.device)
        self._results.losses.add(self._microbatch, loss.double() * of_mean, weight)
        # In fp16 the scale itself may be inf.
        whole = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return whole * (step.loss_scale.scale / divisor)

    def _optimizer_step(self, caller: str) -> OptimizerStep:
        self._steps.check_training(caller)
        assert self._steps.optimizer_step is not None
        return self._steps.optimizer_step

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; after the last of a step, update the parameters.

        Collective then: all ranks must run equally many steps.

        Args:
            lr_kwargs: None, or {"increment": samples of the step}, as Megatron's schedulers get it.

        Raises:
            ConfigError: there was no backward; or as the message says.
            StopTraining, NonFiniteError, LossScaleError, PipelineError: as `Engine.train_batch`.
        """
        if lr_kwargs and dict(lr_kwargs) != {"increment": self.train_batch_size()}:
            raise ConfigError(
                f"step(lr_kwargs={dict(lr_kwargs)}): a scheduler's step() gets no argument, or the "
                f"{self.train_batch_size()} samples of the step; remove lr_kwargs"
            )
        if self._without_sync:
            raise ConfigError("step() is called within no_sync(): call it after the block")
        run = self.pipemega_engine.run
        with self._failures.propagate_errors("step"):
            self._optimizer_step("step")
            if self._results.losses.of(self._microbatch) is None:
                raise ConfigError(
                    "step() is called without gradients: call engine.backward(loss) before each "
                    "engine.step(). loss.backward() alone does not apply the loss scale and the "
                    "division by gradient_accumulation_steps; engine.scale(loss).backward() does"
                )
            ends = self.is_gradient_accumulation_boundary()
            self._microbatch += 1
            if ends:
                started, self._started = self._started, None
                run.train_step(self._update, has_next=False, started=started)
        self._micro_steps += 1
        if ends and run.stopped:
            raise StopTraining(run.stopped)
        self._report_to_optimizer()

    def _update(self) -> tuple[float, None]:
        steps, results = self._steps, self._results
        self._results, self._microbatch = Results(), 0
        count = len(results.losses)
        steps.phases.start(exact=False)
        samples = count * steps.batch.micro_batch_size * steps.mesh.data.size
        step, _ = steps.begin(StepData([None] * count, [], samples))
        report = steps.finish(step, results, self.pipemega_engine.run.should_stop)
        # The caller may read the parameters at any time.
        steps.settle()
        return report.loss, None

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the parameters."""
        if self._at_boundary is not None:
            return self._at_boundary
        return (self._micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Let each next `step()` update the parameters, or not."""
        self._at_boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a block without reductions; they happen in `step` only, so it changes nothing."""
        if self._without_sync:
            raise ConfigError("no_sync() is called within no_sync()")
        self._without_sync = True
        try:
            yield
        finally:
            self._without_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this step so far, as `optimizer.zero_grad()` does.

        `step` does it after each update.
        """
        if self._steps.optimizer_step is not None:
            self._steps.optimizer_step.gradients.zero()
        self._results = Results()

    @property
    def global_samples(self) -> int:
        return self.pipemega_engine.consumed_samples

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self._micro_steps

    @property
    def data_parallel_group(self) -> Any:
        """The process group of all ranks."""
        return self.mesh.world.group

    # Data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a loader of the micro-batches of this rank; it repeats nothing.

        The order comes from torch's DistributedSampler: for another order in each epoch call
        `loader.sampler.set_epoch(epoch)`.

        Args:
            batch_size: None: the micro-batch size.
            route: "train" shuffles; "eval" and "predict" do not.
            num_local_io_workers: None: `data.num_workers`.
        """
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = self._sampler(dataset, shuffle=route == "train")
        return self._loader(
            dataset,
            data_sampler,
            collate_fn or self.collate_fn,
            batch_size=batch_size,
            workers=num_local_io_workers,
            pin_memory=pin_memory,
        )

    # The module

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the state_dict of the module, with parameters in the dtype of the forward."""
        state = self.module.state_dict()
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        return {k: v for k, v in state.items() if not (exclude_frozen_parameters and k in frozen)}

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `module_state_dict` to a file with torch.save, on rank 0."""
        if self.mesh.rank == 0:
            folder = Path(save_dir)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.module_state_dict(exclude_frozen_parameters), folder / save_filename)
        return True

    save_fp16_model = save_16bit_model

    def compile(self, backend: Any = "inductor", compile_kwargs: Any = None, **others: Any) -> None:
        """Compile the module, as `torch.nn.Module.compile`."""
        if others:
            raise ConfigError(f"compile() has no argument {next(iter(others))!r} here: remove it")
        self.module.compile(backend=backend, **(compile_kwargs or {}))


def initialize_data_parallel(
    model: nn.Module,
    config: Any,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    collate_fn: Collate | None = None,
) -> tuple[DataParallelEngine, Optimizer | None, DataLoader[Any] | None, Any]:
    """Build the engine of a module that is no pipeline; see `initialize`.  Collective.

    Raises:
        ConfigError: an argument or the config is not supported; says what to use.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"initialize() takes an nn.Module or a PipelineModule as model, not a "
            f"{type(model).__name__}",
            on_every_rank=True,
        )
    _refuse_model_parallel(mpu)
    # The groups of an optimizer decide about weight decay.
    own_groups = ["training.weight_decay_norms_and_biases=true"] if optimizer is not None else []
    settings = load(config, [*CONFIG_CHANGES, *own_groups], adopt=True)
    if settings.mesh.expert > 1:
        raise ConfigError(
            f"mesh.expert is {settings.mesh.expert}, and the model is an nn.Module in a loop of "
            "the script, which decides what each data rank runs: set mesh.expert to 1, or write "
            "the model as a PipelineModule",
            on_every_rank=True,
        )
    mesh = build_mesh_of(settings)
    names = {id(p): f"layers.0.{name}" for name, p in model.named_parameters()}
    trainable = [p for p in model.parameters() if p.requires_grad]
    with failure_reporter().propagate_errors("initialize"):
        given, groups = _given(settings, optimizer, model_parameters, trainable, names)
    if groups is not None:
        named = {names[id(p)]: p for p in model.parameters()}
        freeze_others(named, groups, get_logger(mesh.rank))
    built = build_data_parallel(
        model,
        settings,
        mesh=mesh,
        optimizer=given,
        lr_scheduler=schedule_maker(lr_scheduler, settings.batch(mesh.data.size).train_batch_size),
        model_parameters=groups if given is None else None,
    )
    engine = DataParallelEngine(built, collate_fn)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _refuse_model_parallel(mpu: Any) -> None:
    """Refuse ranks that hold parts of the model that the script has cut itself."""
    for name in ("model", "tensor_model", "pipeline_model", "pipe", "slice"):
        size = getattr(mpu, f"get_{name}_parallel_world_size", lambda: 1)()
        if size > 1:
            raise ConfigError(
                f"initialize(mpu=...) has a {name} parallel size of {size}, and the model is an "
                "nn.Module, which the engine does not shard: write the model as a PipelineModule, "
                "with pipemega.tensor_parallel's layers or a model of `pipemega.hf`, and set "
                "mesh.tensor and mesh.pipeline",
                on_every_rank=True,
            )


def _given(
    config: Config,
    optimizer: Any,
    parameters: Any,
    trainable: list[nn.Parameter],
    names: Mapping[int, str],
) -> tuple[GivenOptimizer | None, GivenGroups | None]:
    """Return the optimizer of the caller, and the groups of parameters; None if not given.

    Args:
        optimizer: an optimizer over parameters of the model, or a function of `parameters`.
        parameters: parameters of the model, or groups of parameters; None: `trainable`.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    if parameters is not None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if optimizer is not None:
        made = as_optimizer(optimizer, trainable if parameters is None else parameters)
        given = GivenOptimizer(made, names)
        return given, given.groups
    if parameters is None or config.optimizer is None:
        return None, None
    return None, GivenGroups(parameters, names)


def build_data_parallel(
    module: nn.Module,
    config: Config,
    *,
    mesh: Mesh | None = None,
    optimizer: OptimizerMaker | GivenOptimizer | None = None,
    lr_scheduler: SchedulerMaker | None = None,
    model_parameters: Sequence[Mapping[str, Any]] | GivenGroups | None = None,
) -> Engine:
    """Build the engine of a `DataParallelEngine` that trains `module`.  Collective.

    The arguments are as for `initialize`. A parameter `x` has the logical name `layers.0.x`.

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
    if config.compile.enabled == "auto":
        # As with DeepSpeed, the module is compiled by `compile()`.
        section = config.compile.model_copy(update={"enabled": False})
        config = config.model_copy(update={"compile": section})
    setup = RunSetup(config, mesh, PipelineModule([module]), arguments)
    return build_engine(setup, in_loop=True)


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
