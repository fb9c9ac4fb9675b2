"""`engine(x)`, `engine.backward(loss)`, `engine.step()`: training of a module over data ranks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from pipemega.compat.deepspeed.deepspeed_engine import Collate, DeepSpeedEngine, schedule_maker
from pipemega.compat.deepspeed.loop_engine import LoopEngine, initialize_loop
from pipemega.compat.deepspeed.process_topology import CONFIG_CHANGES
from pipemega.config import Config, load
from pipemega.engine.run.run_arguments import build_mesh_of
from pipemega.errors import ConfigError
from pipemega.fault_tolerance.error_propagation import failure_reporter
from pipemega.monitor import get_logger
from pipemega.optimizer.user_optimizer import (
    GivenGroups,
    GivenOptimizer,
    as_optimizer,
    freeze_others,
)

_PIPELINE = "the script calls forward, backward and step; a PipelineModule has train_batch()"
_ADVICE = dict.fromkeys(("train_batch", "eval_batch", "set_dataloader", "set_batch_fn"), _PIPELINE)


class DataParallelEngine(DeepSpeedEngine, nn.Module):
    """Trains a module whose forward and backward the script runs.

        loss = loss_fn(engine(x), y)
        engine.backward(loss)
        engine.step()

    Every micro-batch ends with `step()`; every `gradient_accumulation_steps`-th call reduces the
    gradients over the data ranks and updates the parameters, with the optimizer step that
    pipelines have. Attributes that the engine does not have are those of the module.

    Args:
        loop: does the work.
        collate_fn: of `deepspeed_io`.

    Attributes:
        module: as given to `initialize`.
        training_dataloader: of the training data of `initialize`; None without.
    """

    _advice = _ADVICE

    def __init__(self, loop: LoopEngine, collate_fn: Collate | None = None) -> None:
        nn.Module.__init__(self)
        self._use(loop.engine)
        self.loop, self.module = loop, loop.layer
        if self.optimizer is not None:
            # That of torch discards the gradients of the masters, and not those of the buffer.
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
        """Call the module; with `fp16.auto_cast`, floating-point `inputs` are cast to fp16."""
        return self.loop.run_forward(*inputs, **kwargs)

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
            retain_graph: for another backward through the same graph.
            scale_wrt_gas: divide by `gradient_accumulation_steps`.
            allreduce_gradients: False is refused: `step` reduces.
            release_loss: has no effect.

        Returns:
            the loss, divided as its gradients are.
        """
        if not allreduce_gradients:
            raise ConfigError(
                "backward(allreduce_gradients=False): step() reduces the gradients once per step; "
                "remove the argument, and the reduction of the script"
            )
        return self.loop.run_backward(loss, retain_graph=retain_graph, mean=scale_wrt_gas)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss from which the script runs `backward()` itself."""
        return self.loop.scale(loss)

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
        self.loop.end_micro_batch()
        self._report_to_optimizer()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the parameters."""
        return self.loop.ends_step

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Let each next `step()` update the parameters, or not."""
        self.loop.at_boundary = is_boundary

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
        self.loop.discard_gradients()

    @property
    def global_samples(self) -> int:
        return self.pipemega_engine.consumed_samples

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self.loop.micro_steps

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

        The order is that of torch's DistributedSampler: for another order in each epoch call
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
    mesh = build_mesh_of(settings)
    names = {id(p): f"layers.0.{name}" for name, p in model.named_parameters()}
    trainable = [p for p in model.parameters() if p.requires_grad]
    with failure_reporter().propagate_errors("initialize"):
        given, groups = _given(settings, optimizer, model_parameters, trainable, names)
    if groups is not None:
        named = {names[id(p)]: p for p in model.parameters()}
        freeze_others(named, groups, get_logger(mesh.rank))
    loop = initialize_loop(
        model,
        settings,
        mesh=mesh,
        optimizer=given,
        lr_scheduler=schedule_maker(lr_scheduler, settings.batch(mesh.data.size).train_batch_size),
        model_parameters=groups if given is None else None,
    )
    engine = DataParallelEngine(loop, collate_fn)
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
    """Return the optimizer of the caller, and the groups of parameters; None for what is not.

    Args:
        optimizer: one over parameters of the model, or a function of `parameters`.
        parameters: of the model, or groups of them; None: `trainable`.
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
