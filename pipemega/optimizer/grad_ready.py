"""Start the reduce-scatter of a bucket during the backward pass, once its gradients are final.

The plan says which backward of a stage is its final one: in schedules with a split backward the
last W, so that no bucket is sent after an I whose weight gradients are still missing.  In a final

    B    autograd reports each parameter when its gradient is complete
    W    parameters without a weight half got their gradient in I; each other one is final when its
         last job has run

and after it all parameters of the stage are final, unused ones included.  Buckets are sent in the
same order on all data ranks; those that are not sent by then are sent at the end of the step.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from pipemega.optimizer.gradients import GradientBuffer
from pipemega.optimizer.zero_comm import ReduceScatter
from pipemega.parameters import after_autograd


class BucketReadiness:
    """Tracks the gradients that each bucket still waits for; sends it when none is left.

    Args:
        gradients: laid out in buckets.
        reduce_scatter: sends the buckets.
        hooks: use autograd hooks within a final B.  Only valid if autograd brings all gradients: a
            weight half may add to a gradient after autograd has reported it.
    """

    def __init__(
        self, gradients: GradientBuffer, reduce_scatter: ReduceScatter, *, hooks: bool
    ) -> None:
        self._gradients, self._reduce_scatter = gradients, reduce_scatter
        self._early = [bucket for bucket in gradients.layout.buckets if not bucket.late]
        self._missing: list[set[int]] = []
        self._bucket_of = {
            id(slot.parameter): bucket.number for bucket in self._early for slot in bucket.slots
        }
        self._hooks_active = False
        self._hooks = hooks
        if hooks:
            for bucket in self._early:
                for slot in bucket.slots:
                    # Runs after the hook of the gradient buffer, which was registered first.
                    after_autograd(slot.parameter, self._on_autograd)

    def begin(self) -> None:
        """Begin a step: no gradient is final."""
        # Views that were replaced must be restored before anything is added to them.
        self._gradients.restore_views()
        self._missing = [{id(slot.parameter) for slot in bucket.slots} for bucket in self._early]

    @contextmanager
    def final_backward(
        self, parameters: Iterable[nn.Parameter], pending: Collection[int] | None
    ) -> Iterator[None]:
        """Return the context in which the final backward of a stage runs.

        Args:
            parameters: of the stage.
            pending: ids of those whose weight half runs within; None in a whole backward.
        """
        parameters = list(parameters)
        if pending is not None:
            for parameter in parameters:
                if id(parameter) not in pending:
                    self.mark_ready(parameter)
        self._hooks_active = self._hooks and pending is None
        try:
            yield
        finally:
            self._hooks_active = False
        for parameter in parameters:
            self.mark_ready(parameter)

    def mark_ready(self, parameter: Tensor) -> None:
        """Record that the gradient of `parameter` is final; send the buckets that are complete."""
        number = self._bucket_of.get(id(parameter))
        if number is None:
            return
        self._missing[number].discard(id(parameter))
        while self._next_is_complete():
            self._reduce_scatter.start_next()

    def _next_is_complete(self) -> bool:
        number = self._reduce_scatter.started
        return number < len(self._early) and not self._missing[number]

    def _on_autograd(self, parameter: Tensor) -> None:
        if self._hooks_active:
            self.mark_ready(parameter)
