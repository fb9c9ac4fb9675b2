"""Queue of the weight gradients that W computes after I, or that B adds to the gradient buffer.

in I        the products of split_backward.py add jobs, each with x and dy of a layer
in W        `run` computes and adds the gradients, and frees x and dy
in waits    `run_part` runs some of the jobs before their W (`pipeline.fill_waits`):

    F or I      starts an exchange of tokens
                `fill_wait`: jobs of the oldest W, as `plan.fill_waits` has planned
                waits for the exchange
in B        with fused products `add` computes and adds at once, instead of autograd
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipemega.pipeline.execution_state import ComputeWrapper, ExecutionState, Handler
from pipemega.pipeline.plan.fill_waits import Filling, Waits, fill_waits
from pipemega.pipeline.plan.instructions import Instruction, Program


class Job(NamedTuple):
    """A queued weight gradient.

    Args:
        start: called before `gradient`, at the earliest one job before.
        gradient: returns the gradient; None: it has added it.
        is_summed: gradients of one weight are summed before they are added, as autograd does it.
    """

    weight: nn.Parameter
    start: Callable[[], object] | None
    gradient: Callable[[], Tensor | None]
    is_summed: bool


class _Progress(NamedTuple):
    """What has run of the jobs of a key.

    Args:
        run: number of jobs.
        sums: id of a weight with further jobs -> the sum of its gradients.
    """

    run: int
    sums: dict[int, Tensor]


class GradAccumulator(Protocol):
    """Accumulates gradients; implemented by `optimizer.gradients.GradientBuffer`."""

    def fuses(self, parameter: nn.Parameter, dy: Tensor) -> bool: ...

    def add_product(self, parameter: nn.Parameter, dy: Tensor, x: Tensor) -> None: ...

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None: ...


class GradReadyListener(Protocol):
    """Is notified of complete gradients; implemented by `optimizer.zero.BucketReadiness`."""

    def begin(self) -> None: ...

    def final_backward(
        self, parameters: Iterable[nn.Parameter], pending: Collection[int] | None
    ) -> AbstractContextManager[None]: ...

    def mark_ready(self, parameter: nn.Parameter) -> None: ...


class WeightGradQueue:
    """Queue of deferred weight gradients.

    Args:
        into: accumulates the gradients.
        fuses: the product of a linear's weight gradient adds to `into`, in a whole backward too.
    """

    def __init__(self, into: GradAccumulator, *, fuses: bool = False) -> None:
        self._into, self.fuses_products = into, fuses
        self._held: set[int] = set()
        self._queued: dict[Hashable, list[Job]] = defaultdict(list)
        self._progress: dict[Hashable, _Progress] = {}
        self._key: Hashable | None = None

    @contextmanager
    def defer(self, key: Hashable) -> Iterator[None]:
        """Queue weight gradients under `key` within this context, instead of computing them."""
        assert self._key is None, f"the input-gradient backward of {self._key} is not finished"
        self._key = key
        try:
            yield
        finally:
            self._key = None

    @contextmanager
    def record(self) -> Iterator[list[Job]]:
        """Yield the list of the jobs of this context, for `add_again`; none of them runs."""
        with self.defer(key := object()):
            yield self._queued[key]
        del self._queued[key]

    def add_again(self, jobs: Iterable[Job], *_: object) -> None:
        """Add recorded jobs, whose tensors have new values; also a hook of an autograd node."""
        for job in jobs:
            self.add(job.weight, job.gradient, job.start, is_summed=job.is_summed)

    @property
    def takes_gradients(self) -> bool:
        """Whether layers give their weight gradients to `add`; otherwise autograd adds them.

        If products are fused, also in a whole backward: all gradients of a weight are then added
        in the order in which B or W comes to them.
        """
        return self._key is not None or self.fuses_products

    def fuses(self, weight: nn.Parameter, dy: Tensor) -> bool:
        """Return whether `add_product` computes and adds the gradient of a linear with this dy."""
        return self.fuses_products and self._into.fuses(weight, dy)

    @torch.no_grad()
    def add_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor) -> None:
        """Add dyᵀ x to the gradient of `weight` [out, in], for dy [n, out] and x [n, in]."""
        self._into.add_product(weight, dy, x.to(dy.dtype))

    def hold(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take gradients of these parameters."""
        self._held.update(map(id, parameters))

    def holds(self, weight: Tensor) -> bool:
        """Return whether `hold` got this weight."""
        return id(weight) in self._held

    @torch.no_grad()
    def run(
        self,
        key: Hashable,
        done: Callable[[nn.Parameter], None] | None = None,
        share: float = 1.0,
    ) -> None:
        """Compute the weight gradients of `key`; each pair (x, dy) is freed after its use.

        Args:
            done: called with each weight after its last gradient was added.
            share: stop when this share of all jobs of `key` has run.
        """
        jobs = self._queued.pop(key, [])
        begun = self._progress.pop(key, None)
        run, sums = (0, {}) if begun is None else begun
        remaining = Counter(id(job.weight) for job in jobs)
        total = run + len(jobs)
        left = min(len(jobs), total - int(share * total + 1e-6))
        jobs.reverse()
        if len(jobs) > left:
            _start_last(jobs)
        while len(jobs) > left:
            job = jobs.pop()
            if len(jobs) > left:
                _start_last(jobs)  # overlaps with the product of `job`
            weight, gradient, number = job.weight, job.gradient(), id(job.weight)
            remaining[number] -= 1
            if job.is_summed and gradient is not None:
                if number in sums:
                    gradient = sums.pop(number) + gradient
                if remaining[number]:
                    sums[number] = gradient
                    continue
            del job
            if gradient is not None:
                self._into.add(weight, gradient)
            if done is not None and not remaining[number]:
                done(weight)
        if left:
            jobs.reverse()
            self._queued[key], self._progress[key] = jobs, _Progress(total - left, sums)

    def run_part(self, key: Hashable, share: float) -> None:
        """Run the next jobs of `key`, until this share of all its jobs has run."""
        self.run(key, share=share)

    def pending_weights(self, key: Hashable) -> set[int]:
        """Return the ids of the parameters with queued gradients under `key`."""
        return {id(job.weight) for job in self._queued.get(key, ())}

    def add_at_once(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that exists already, in I too; see `linear_cross_entropy`."""
        with torch.no_grad():
            self._into.add(weight, gradient)

    def add(
        self,
        weight: nn.Parameter,
        gradient: Callable[[], Tensor | None],
        start: Callable[[], object] | None = None,
        *,
        is_summed: bool = True,
    ) -> None:
        """Add `gradient()` to the gradient of `weight`: in `run` if within `defer`, else now.

        Args:
            start: starts the communication that `gradient` waits for.
            is_summed: see `Job`; only within `defer`.
        """
        if self._key is not None:
            is_summed = is_summed and not self.fuses_products
            self._queued[self._key].append(Job(weight, start, gradient, is_summed))
            return
        if start is not None:
            start()
        found = gradient()
        if found is not None:
            self.add_at_once(weight, found)


def _start_last(jobs: list[Job]) -> None:
    if (start := jobs[-1].start) is not None:
        start()


# Not local to a thread: on a GPU, autograd waits for exchanges in threads of its own.
_filler: Callable[[], None] | None = None


def fill_wait() -> None:
    """Use the time of an exchange that has started; called just before the wait for it."""
    if _filler is not None:
        _filler()


class WaitFiller(ComputeWrapper):
    """Runs jobs of queued W within the exchanges of F and I.

    Args:
        stages: stage -> its layers.
        layers: the exchanges of each layer of the model.
    """

    def __init__(
        self, stages: Mapping[int, Any], queue: WeightGradQueue, layers: Sequence[Waits]
    ) -> None:
        self._queue = queue
        self._waits = {
            number: Waits.sum(layers[stage.start : stage.stop]) for number, stage in stages.items()
        }
        self._program: Program = ()
        self._filled: dict[Instruction, Filling] = {}
        self._trains = False

    def begin(self, run: ExecutionState, program: Program) -> None:
        self._trains = run.train
        if program is not self._program:
            self._program, self._filled = program, fill_waits(program, self._waits)

    def run(self, handler: Handler, step: Instruction) -> None:
        global _filler
        filling = self._filled.get(step) if self._trains else None
        if filling is None:
            handler(step)
            return
        _filler = _Steps(self._queue, filling)
        try:
            handler(step)
        finally:
            _filler = None


class _Steps:
    """Runs an equal part of the work of a step in each of its exchanges."""

    def __init__(self, queue: WeightGradQueue, filling: Filling) -> None:
        self._queue, self._filling, self._exchange = queue, filling, 0

    def __call__(self) -> None:
        self._exchange += 1
        part = min(1.0, self._exchange / self._filling.exchanges)
        goals = self._filling.goals
        at = part * len(goals)
        for number, (step, before, after) in enumerate(goals):
            if number < at:
                share = before + min(1.0, at - number) * (after - before)
                self._queue.run_part((step.stage, step.microbatch), share)
