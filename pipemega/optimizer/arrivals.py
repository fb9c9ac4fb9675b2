"""Which gradients are final while the last backwards still run: buckets leave as they fill.

The plan says which backward of a stage is its last: under schedules with halves the last W, so
that no bucket leaves after an I whose weights' gradients are still to come. Within that one

    B    autograd tells of each parameter when it has added up all that it brings
    W    parameters without a weight half got their gradient in I; each other is final when the
         last of its jobs has run

and after it all parameters of the stage are final, those that nothing used among them. Buckets
leave in one order on all data ranks; what has not left by then leaves at the end of the step.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from pipemega.gradients import GradientBuffer
from pipemega.optimizer.traffic import Scatter


class BucketArrivals:
    """Counts the gradients that each bucket still waits for, and sends it when there is none.

    Args:
        gradients: laid out in buckets.
        scatter: takes the buckets.
        hooks: listen to autograd within a last B. Only where it brings all gradients: one that
            comes through a weight half may come behind what autograd told.
    """

    def __init__(self, gradients: GradientBuffer, scatter: Scatter, *, hooks: bool) -> None:
        self._gradients, self._scatter = gradients, scatter
        self._early = [bucket for bucket in gradients.layout.buckets if not bucket.late]
        self._missing: list[set[int]] = []
        self._bucket_of = {
            id(slot.parameter): bucket.number for bucket in self._early for slot in bucket.slots
        }
        self._listening = False
        self._hooks = hooks
        if hooks:
            for bucket in self._early:
                for slot in bucket.slots:
                    # Behind the buffer's own hook, which was there first.
                    slot.parameter.register_post_accumulate_grad_hook(self._told)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """A new step: nothing has arrived."""
        # A gradient that was replaced is to come back before it is added to.
        self._gradients.attach()
        self._missing = [{id(slot.parameter) for slot in bucket.slots} for bucket in self._early]

    @contextmanager
    def last_of(
        self, parameters: Iterable[nn.Parameter], waiting: Collection[int] | None
    ) -> Iterator[None]:
        """Within, a stage gets its last gradients.

        Args:
            parameters: of the stage.
            waiting: ids of those whose weight half is to come within; None in a whole backward.
        """
        parameters = list(parameters)
        if waiting is not None:
            for parameter in parameters:
                if id(parameter) not in waiting:
                    self.arrived(parameter)
        self._listening = self._hooks and waiting is None
        try:
            yield
        finally:
            self._listening = False
        for parameter in parameters:
            self.arrived(parameter)

    def arrived(self, parameter: Tensor) -> None:
        """The gradient of `parameter` is final on this rank."""
        number = self._bucket_of.get(id(parameter))
        if number is None:
            return
        self._missing[number].discard(id(parameter))
        while self._next_is_full():
            self._scatter.start_next()

    def _next_is_full(self) -> bool:
        number = self._scatter.started
        return number < len(self._early) and not self._missing[number]

    def _told(self, parameter: Tensor) -> None:
        if self._listening:
            self.arrived(parameter)
