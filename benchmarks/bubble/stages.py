"""Stages that sleep for given times instead of computing forward, input and weight gradients.

    y = w x           x [..., width]; w [width] is the parameter of the stage

    Forward sleeps F. Backward has two nodes that sleep: I before the gradient of x, W before the
    gradient of w. So autograd sleeps I for only x, W for only w, I + W for both gradients. The
    first stage also sleeps I, although its x needs no gradient: in a real model the first stage has
    layers after the embedding.

The stages do as little else as possible: after a sleep all caches are cold, and 1 µs becomes 10 µs.

With the split backward of pipemega, W is a job in the queue, like the weight gradient of a linear.
"""

import ctypes
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipemega.pipeline.split_backward import WeightGradQueue

WIDTH = 8
_PR_SET_TIMERSLACK = 29


class Seconds(NamedTuple):
    """Times that one stage sleeps for one micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float


class Sleep(NamedTuple):
    """One sleep: part (F, I or W), stage, start and end on the monotonic clock."""

    part: str
    stage: int
    start: float
    end: float


@dataclass
class SleepLog:
    """Log of the sleeps of the stages of one rank, and of the micro-batches that they held.

    A micro-batch counts from its F to its W, as `share` of a unit. Every sleep is multiplied by
    `scale`, to make warm-up steps short.
    """

    scale: float = 1.0
    sleeps: list[Sleep] = field(default_factory=list)
    held: float = 0.0
    peak: float = 0.0

    def sleep(self, part: str, stage: int, seconds: float, share: float) -> None:
        if part == "F":
            self.held += share
            self.peak = max(self.peak, self.held)
        start = time.monotonic()
        time.sleep(seconds * self.scale)
        self.sleeps.append(Sleep(part, stage, start, time.monotonic()))
        if part == "W":
            self.held -= share

    def clear(self) -> None:
        """Start a new step."""
        self.sleeps, self.held, self.peak = [], 0.0, 0.0


def sleep_precisely() -> None:
    """Make the kernel wake this thread on time instead of up to 50 µs later; Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class _SleepInBackward(torch.autograd.Function):
    """Pass x on; backward sleeps first, even if x needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, sleep: partial[None]) -> Tensor:
        ctx.sleep = sleep
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.sleep()
        return gradients[0], None, None


class _TimesWeightLater(torch.autograd.Function):
    """h * weight; its backward adds the gradient of `weight` to the queue."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: nn.Parameter, queue: WeightGradQueue, sleep: partial[None]
    ) -> Tensor:
        ctx.save_for_backward(h)
        ctx.weight, ctx.queue, ctx.sleep = weight, queue, sleep
        return h * weight.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (h,) = ctx.saved_tensors
        weight, sleep, dy = ctx.weight, ctx.sleep, gradients[0]

        def gradient() -> Tensor:
            sleep()
            return (dy * h).flatten(0, -2).sum(0)

        ctx.queue.add(weight, gradient)
        return dy * weight.detach(), None, None, None


class SleepingStage(nn.Module):
    """One stage, see above.

    Args:
        stage: its number in the model.
        seconds: times that it sleeps.
        share: fraction of the layers of its rank: 1 / the number of stages on the rank.
        log: the log of this rank.
        width: size of the last dim of its input.
    """

    def __init__(
        self, stage: int, seconds: Seconds, share: float, log: SleepLog, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.stage, self.seconds, self.share, self.log = stage, seconds, share, log
        self.weight = nn.Parameter(torch.full((width,), 1.0 + 0.01 * stage))
        # Not a parameter. It makes the node of I require a gradient, even if x does not.
        self.anchor = torch.zeros((), requires_grad=True)
        # `enable_split_backward` replaces it by a partial with the queue in its keywords.
        self.product: Any = nn.functional.linear

    def forward(self, x: Tensor) -> Tensor:
        self._sleep("F", self.seconds.forward)()
        sleep_input = self._sleep("I", self.seconds.backward_input)
        sleep_weight = self._sleep("W", self.seconds.backward_weight)
        if isinstance(self.product, partial):
            h: Tensor = _SleepInBackward.apply(x, self.anchor, sleep_input)
            queue = self.product.keywords["queue"]
            y: Tensor = _TimesWeightLater.apply(h, self.weight, queue, sleep_weight)
            return y
        # Autograd runs the node that was created last first: I before W.
        weight: Tensor = _SleepInBackward.apply(self.weight, None, sleep_weight)
        return weight * _SleepInBackward.apply(x, self.anchor, sleep_input)

    def _sleep(self, part: str, seconds: float) -> partial[None]:
        return partial(self.log.sleep, part, self.stage, seconds, self.share)


def loss_fn(y: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared error of two tensors [1, WIDTH]."""
    return nn.functional.mse_loss(y, labels)
