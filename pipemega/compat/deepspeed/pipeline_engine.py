"""The engine of `deepspeed.initialize` for a PipelineModule, over pipemega's Engine.

Micro-batches of a DeepSpeed script, as the engine reads them.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from pipemega.compat.deepspeed.deepspeed_engine import Collate, DeepSpeedEngine
from pipemega.compat.deepspeed.pipeline_module import DeepSpeedPipelineModule, RepeatingLoader
from pipemega.compat.deepspeed.process_topology import PipelineParallelGrid
from pipemega.compat.deepspeed.virtual_modules import ENGINE_ADVICE
from pipemega.distributed.exchanges import all_reduce
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError

BatchFn = Callable[[Any], Any]


class ScriptBatches:
    """Iterator over (inputs, labels), from an iterator of the user; lists become tuples.

    Args:
        source: yields (inputs, labels), or values that `batch_fn` turns into such a pair. None:
            `batch_fn` gets None, as on tensor ranks that receive their data from another rank.
        batch_fn: the function given to `set_batch_fn`; None if it was not called.

    Attributes:
        inputs_may_differ: DeepSpeed uses the inputs of the first stage only, so the inputs of
            other stages may be random. The labels must agree: they show that the samples are
            the same.
    """

    inputs_may_differ = True

    def __init__(self, source: Iterator[Any] | None, batch_fn: BatchFn | None) -> None:
        self._source, self._batch_fn = source, batch_fn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = None if self._source is None else next(self._source)
        if self._batch_fn is not None:
            batch = self._batch_fn(batch)
        if not isinstance(batch, tuple | list) or not batch:
            return batch  # the engine names its type
        # Without a loss_fn there may be no labels.
        inputs, labels = batch[0], batch[1] if len(batch) > 1 else None
        return _tupled(inputs), _tupled(labels)


def _tupled(part: Any) -> Any:
    """Return a list of tensors, which torch's DataLoader makes of a tuple, as a tuple."""
    return tuple(part) if isinstance(part, list) else part


class PipelineEngine(DeepSpeedEngine):
    """Trains a PipelineModule with DeepSpeed's calls.

    Other attributes are looked up in `pipemega.Engine` and then in the module.

    Args:
        engine: trains the layers of `module`.
        module: the user's module.
        training_data: a dataset; None: the caller passes iterators.
        collate_fn: list of samples -> micro-batch.

    Attributes:
        micro_batch_size: samples of a micro-batch.
        micro_batches: number of micro-batches of a step on each data rank; also the default number
            of `eval_batch`.
        grid, mpu: the position of this rank in the mesh.
    """

    _advice = ENGINE_ADVICE["PipelineEngine"]

    def __init__(
        self,
        engine: Engine,
        module: DeepSpeedPipelineModule,
        training_data: Any = None,
        collate_fn: Collate | None = None,
    ) -> None:
        self._use(engine)
        self.module = module
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
        self._dtype = _loss_dtype(module)
        if training_data is not None:
            self.set_dataloader(RepeatingLoader(self._training_loader(training_data, collate_fn)))

    def __getattr__(self, name: str) -> Any:
        if name in ("pipemega_engine", "module"):
            raise AttributeError(name)
        for owner in (self.pipemega_engine, self.module):
            if hasattr(owner, name):
                return getattr(owner, name)
        raise self._missing(name)

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    # Data

    def _training_loader(self, dataset: Any, collate_fn: Collate | None) -> DataLoader[Any]:
        """Return DeepSpeed's loader of training data: in order, every data-th sample of each rank.

        Raises:
            ConfigError: the data has no length.
        """
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"initialize(training_data=...) is a {type(dataset).__name__} without a length: "
                "pass an iterator over micro-batches to train_batch(data_iter) instead",
                on_every_rank=True,
            )
        return self._loader(dataset, self._sampler(dataset, shuffle=False), collate_fn)

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
        if reduce_output is not None and str(reduce_output).lower() != "avg":
            raise ConfigError(
                f"eval_batch(reduce_output={reduce_output!r}): write 'avg', or None for a list "
                "with the loss of each micro-batch",
                on_every_rank=True,
            )
        source = self.data_iterator
        self.data_iterator = data_iter
        try:
            data = self._micro_batches()
        finally:
            self.data_iterator = source
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        if compute_loss and reduce_output is not None:
            loss, outputs = self._mean_loss(data, count)
        else:
            loss, outputs = self._results(data, count, compute_loss)
            if loss is not None and reduce_output is not None:
                loss = self._mean(loss)
        return (loss, outputs) if return_logits else loss

    def _mean_loss(self, data: Iterator[Any] | None, count: int) -> tuple[Tensor, Any]:
        """Return the mean loss of `count` micro-batches, and the outputs of the last one."""
        last: list[Any] = [None]

        def keep(output: Any, _: Any) -> None:
            last[0] = output

        source = iter(()) if data is None else data
        loss = self.pipemega_engine.eval_batch(source, count, on_output=keep)
        outputs = pytree.tree_map_only(Tensor, Tensor.detach, last[0])
        return torch.tensor(loss, dtype=self._dtype, device=self.device), outputs

    @torch.no_grad()
    def _results(self, data: Iterator[Any] | None, count: int, compute_loss: bool) -> Any:
        """Return losses or outputs of `count` micro-batches, and the outputs of the last one.

        Returns (None, None) on ranks that are not on the last stage.
        """
        reads = self.is_first_stage() or self.is_last_stage()
        pairs = list(islice(data, count)) if reads and data is not None else [(None, None)] * count
        outputs = self.pipemega_engine.infer([pair[0] for pair in pairs])
        if outputs is None:
            return None, None
        loss_fn = self.module.loss_fn
        if loss_fn is None or not compute_loss:
            return outputs, outputs[-1]
        labels = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.to(self.device), [pair[1] for pair in pairs]
        )
        losses = [loss_fn(output, label) for output, label in zip(outputs, labels, strict=True)]
        return losses, outputs[-1]

    def _mean(self, results: list[Any]) -> Any:
        """Return the mean of trees of tensors over the micro-batches and the data ranks."""
        data = self.mesh.data

        def mean(*parts: Tensor) -> Tensor:
            total = torch.stack([part.detach() for part in parts]).sum(0) / (len(parts) * data.size)
            if data.size > 1:
                all_reduce(total, data)
            return total

        return pytree.tree_map(mean, *results)

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
