"""The engine of `deepspeed.initialize` for a PipelineModule, over pipemega's Engine."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipemega.compat.deepspeed.engine_checkpoints import EngineCheckpoints
from pipemega.compat.deepspeed.engine_settings import EngineSettings, missing_name
from pipemega.compat.deepspeed.parallel_grid import PipelineParallelGrid
from pipemega.compat.deepspeed.pipeline_data import BatchFn, ScriptBatches, training_loader_of
from pipemega.compat.deepspeed.pipeline_evaluation import PipelineEvaluation
from pipemega.compat.deepspeed.pipeline_module import DeepSpeedPipelineModule
from pipemega.compat.deepspeed.repeating_loader import RepeatingLoader
from pipemega.compat.deepspeed.schedule_adapter import given_schedule
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError

_ADVICE: Mapping[str, str] = {
    "no_sync": "train_batch() reduces the gradients once per step",
    "set_gradient_accumulation_boundary": "train_batch() runs all micro-batches of a step",
    "is_gradient_accumulation_boundary": "train_batch() runs all micro-batches of a step",
    "deepspeed_io": "give initialize() training_data, or engine.set_dataloader() a DataLoader",
    "save_16bit_model": "call save_checkpoint(); `pipemega hf export` reads its checkpoints",
    "save_fp16_model": "call save_checkpoint(); `pipemega hf export` reads its checkpoints",
    "total_loss": "train_batch() and eval_batch() return the loss",
    "fwd_outputs": "eval_batch(compute_loss=False) returns the outputs",
}


class PipelineEngine(EngineSettings, EngineCheckpoints):
    """Trains a PipelineModule with DeepSpeed's calls.

    Names that DeepSpeed's engine does not have are those of `pipemega.Engine` and of the module.

    Args:
        engine: trains the layers of `module`.
        module: of the user.
        training_data: a dataset; None: the caller passes iterators.
        collate_fn: list of samples -> micro-batch.

    Attributes:
        micro_batch_size: samples of a micro-batch.
        micro_batches: of a step of one data rank; `eval_batch` reads as many.
        grid, mpu: the place of this rank.
    """

    def __init__(
        self,
        engine: Engine,
        module: DeepSpeedPipelineModule,
        training_data: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.pipemega_engine, self.module = engine, module
        self.pipemega_config, self.mesh = engine.config, engine.mesh
        self.optimizer = engine.optimizer
        self.grid: PipelineParallelGrid = module.mpu()
        self.mpu = self.grid
        self.num_stages, self.stage_id = self.grid.pipe_parallel_size, self.grid.stage_id
        self.is_pipe_parallel = self.num_stages > 1
        self.is_data_parallel = self.mesh.data.size > 1
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.micro_batch_size = self.train_micro_batch_size_per_gpu()
        self.micro_batches = self.gradient_accumulation_steps()
        self._report_to_optimizer()
        self.batch_fn: BatchFn | None = None
        self.training_dataloader: Any = None
        self.data_iterator: Iterator[Any] | None = None
        self._evaluation = PipelineEvaluation(engine, module)
        self._dtype = _loss_dtype(module)
        if training_data is not None:
            loader = training_loader_of(training_data, engine.config, self.mesh, collate_fn)
            self.set_dataloader(RepeatingLoader(loader))

    def __getattr__(self, name: str) -> Any:
        if name in ("pipemega_engine", "module"):
            raise AttributeError(name)
        for owner in (self.pipemega_engine, self.module):
            if hasattr(owner, name):
                return getattr(owner, name)
        raise missing_name(name, _ADVICE)

    @property
    def global_steps(self) -> int:
        return self.pipemega_engine.global_steps

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler of the user or of the config; None: the learning rate is constant."""
        return given_schedule(self.pipemega_engine.lr_scheduler)

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self.pipemega_engine.set_lr_scheduler(lambda _: scheduler)

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    # Data

    def set_dataloader(self, loader: Any) -> None:
        """Read the micro-batches of the next steps from `loader`."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader, self.data_iterator = loader, iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read the micro-batches of the next steps from `iterator`."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader, self.data_iterator = None, iterator

    def set_batch_fn(self, fn: BatchFn) -> None:
        """Make (inputs, labels) of what the data yield with `fn`."""
        self.batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Forget the shapes of the tensors between stages: later micro-batches may have others."""
        self.pipemega_engine.reset_shapes()

    # Steps

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train one step; return the loss, averaged over the whole batch: a tensor of one element.

        Args:
            data_iter: yields micro-batches (inputs, labels), on the ranks of the first and the last
                stage; None: the data of `initialize` or `set_dataloader`.

        Raises:
            StopIteration: no data is left.
            RuntimeError: gradients are disabled.
            ConfigError: `micro_batches` has been changed.
        """
        if self.micro_batches != self.gradient_accumulation_steps():
            raise ConfigError(
                f"engine.micro_batches has been set to {self.micro_batches}, and a step has "
                f"{self.gradient_accumulation_steps()} micro-batches: set "
                "gradient_accumulation_steps in the config; for an evaluation, pass "
                "eval_batch(num_micro_batches=...), or set micro_batches back after it",
                on_every_rank=True,
            )
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "train_batch() is called under no_grad(): call it outside, or use eval_batch()"
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        loss = self.pipemega_engine.train_batch(self._micro_batches())
        self._report_to_optimizer()
        return torch.tensor(loss, dtype=self._dtype, device=self.device)

    def _micro_batches(self) -> ScriptBatches | None:
        receives = self.mesh.tensor.rank > 0 and self.batch_fn is not None
        if self.data_iterator is None and not receives:
            return None
        return ScriptBatches(self.data_iterator, self.batch_fn)

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run some micro-batches without gradients, on the ranks of all stages.

        Args:
            data_iter: as for `train_batch`; the training data keep their position.
            return_logits: return (loss, outputs): the outputs of the last layer for the last
                micro-batch, on the ranks of the last stage; None on others.
            compute_loss: False: the outputs of the last layer take the place of the loss.
            reduce_output: "avg": over the micro-batches and the data ranks. None: a list with one
                loss per micro-batch, on the ranks of the last stage; None on others.
            bcast_loss: has no effect: every rank gets an averaged loss.
            num_micro_batches: None: `micro_batches`.

        Raises:
            ConfigError: another `reduce_output`.
        """
        source = self.data_iterator
        self.data_iterator = data_iter
        try:
            micro_batches = self._micro_batches()
        finally:
            self.data_iterator = source
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        loss, outputs = self._evaluation(micro_batches, count, compute_loss, reduce_output)
        if isinstance(loss, float):
            loss = torch.tensor(loss, dtype=self._dtype, device=self.device)
        return (loss, outputs) if return_logits else loss

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse the calls of a loop without a pipeline.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "engine(x), forward, backward and step do not exist for a PipelineModule: "
            "train_batch(data_iter) does them for all micro-batches of a step, and "
            "eval_batch(data_iter) runs without gradients",
            on_every_rank=True,
        )

    forward = backward = step = __call__

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.eval()


def _loss_dtype(module: DeepSpeedPipelineModule) -> torch.dtype:
    """Return fp64 for a model in fp64, else fp32."""
    doubles = any(p.dtype == torch.float64 for p in module.parameters())
    return torch.float64 if doubles else torch.float32
