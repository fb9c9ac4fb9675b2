"""Updates the running statistics of DeferredBatchNorms, once for each step that is not skipped."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipemega.distributed.device_collectives import all_reduce
from pipemega.distributed.mesh import Axis
from pipemega.optimizer import StepReport
from pipemega.pipeline.deferred_batch_norm import deferred_batch_norms
from pipemega.pipeline.local_model import LocalModel


class BatchNormUpdates:
    """The updates of the layers on one rank.

    With `pipeline.optimizer_sync: "post_validate"` the report of a step arrives after forwards of
    the next one, so the sums of both steps are separate.

    Args:
        model: has the layers.
        data: ranks with copies of the layers.
    """

    def __init__(self, model: LocalModel, data: Axis) -> None:
        self._layers, self._data = deferred_batch_norms(model.stages.values()), data
        # Of the steps without a final report, oldest first.
        self._sums: deque[list[Tensor]] = deque()

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Context of a step: if it fails, a later step does not use its sums."""
        try:
            yield
        except BaseException:
            self._sums.clear()
            self._clear_layers()
            raise

    def _clear_layers(self) -> None:
        for layer in self._layers:
            layer.sums.zero_()

    def end_step(self) -> None:
        """Take the sums of a step, after its last forward.  Collective over the data ranks."""
        if not self._layers:
            return
        sums = torch.cat([layer.sums for layer in self._layers])
        self._clear_layers()
        if self._data.size > 1:
            all_reduce(sums, self._data)
        self._sums.append(list(torch.split(sums, [layer.sums.numel() for layer in self._layers])))

    def on_report(self, report: StepReport) -> None:
        """Update the running statistics, unless the oldest step without a report was skipped."""
        if not self._sums:
            return
        for layer, sums in zip(self._layers, self._sums.popleft(), strict=True):
            if not report.skipped:
                layer.update(sums)
