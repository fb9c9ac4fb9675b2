"""`eval_batch` of DeepSpeed: losses or outputs of micro-batches, averaged or one by one."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.compat.deepspeed.pipeline_module import DeepSpeedPipelineModule
from pipemega.distributed.exchanges import all_reduce
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError


class PipelineEvaluation:
    """Runs forwards of an engine.

    Args:
        engine: of the layers of `module`.
        module: has the loss function.
    """

    def __init__(self, engine: Engine, module: DeepSpeedPipelineModule) -> None:
        self._engine, self._module = engine, module
        grid = module.mpu()
        self._is_first, self._is_last = grid.is_first_stage, grid.is_last_stage

    def __call__(
        self,
        data: Iterator[Any] | None,
        count: int,
        compute_loss: bool,
        reduce_output: str | None,
    ) -> tuple[Any, Any]:
        """Return (loss, outputs of the last micro-batch); see `PipelineEngine.eval_batch`.

        The loss is a float if it is that of the engine.
        """
        if reduce_output is not None and str(reduce_output).lower() != "avg":
            raise ConfigError(
                f"eval_batch(reduce_output={reduce_output!r}): write 'avg', or None for a list "
                "with the loss of each micro-batch",
                on_every_rank=True,
            )
        if compute_loss and reduce_output is not None:
            return self._mean_loss(data, count)
        outputs, labels = self._forward(data, count)
        if outputs is None:
            return None, None
        results = self._losses(outputs, labels) if compute_loss else outputs
        if reduce_output is None:
            return results, outputs[-1]
        return self._mean(results), outputs[-1]

    def _mean_loss(self, data: Iterator[Any] | None, count: int) -> tuple[float, Any]:
        last: list[Any] = [None]

        def keep(output: Any, _: Any) -> None:
            last[0] = output

        source = iter(()) if data is None else data
        loss: float = self._engine.eval_batch(source, count, on_output=keep)
        return loss, pytree.tree_map_only(Tensor, Tensor.detach, last[0])

    def _forward(self, data: Iterator[Any] | None, count: int) -> tuple[list[Any] | None, Any]:
        """Return the outputs of the last layer and the labels of `count` micro-batches."""
        reads = self._is_first or self._is_last
        pairs = list(islice(data, count)) if reads and data is not None else [(None, None)] * count
        outputs = self._engine.infer([pair[0] for pair in pairs])
        return outputs, [pair[1] for pair in pairs]

    @torch.no_grad()
    def _losses(self, outputs: list[Any], labels: list[Any]) -> list[Any]:
        loss_fn = self._module.loss_fn
        if loss_fn is None:
            return outputs
        device = self._engine.mesh.device
        moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), labels)
        return [loss_fn(output, label) for output, label in zip(outputs, moved, strict=True)]

    def _mean(self, results: list[Any]) -> Any:
        """Return the mean of trees of tensors over the micro-batches and the data ranks."""
        data = self._engine.mesh.data

        def mean(*parts: Tensor) -> Tensor:
            total = torch.stack([part.detach() for part in parts]).sum(0) / (len(parts) * data.size)
            if data.size > 1:
                all_reduce(total, data)
            return total

        return pytree.tree_map(mean, *results)
