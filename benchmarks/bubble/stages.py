"""Stages that sleep instead of compute: forward, input half and weight half, each as long as told.

    y = w x           x [..., width]; w [width] is the stage's parameter

    forward sleeps F.  Backward is two nodes that sleep: on the way to x for I, on the way to w for
    W.  So whoever asks autograd for x alone sleeps I, for w alone W, for both I + W.  The first
    stage sleeps I too, though nobody wants its x: behind an embedding come layers that work.

There is as little else as can be: after a sleep every cache is cold, and what takes 1 µs takes 10.

Under pipemega's split the node of W is a job in its queue, as the weight gradient of a linear is.
"""

import ctypes
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipemega.pipeline.split_backward import WeightGradients

WIDTH = 8
_PR_SET_TIMERSLACK = 29


class Seconds(NamedTuple):
    """How long one stage sleeps for one micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float


class Nap(NamedTuple):
    """One sleep: which part (F, I or W) of which stage, and from when to when (monotonic clock)."""

    part: str
    stage: int
    start: float
    end: float


@dataclass
class Diary:
    """What the stages of one rank have slept, and what they held meanwhile.

    A micro-batch is held from its F to its W, by every system alike, as `share` of a unit.
    `pace` is what every sleep is multiplied by: a step to warm up need not take long.
    """

    pace: float = 1.0
    naps: list[Nap] = field(default_factory=list)
    held: float = 0.0
    peak: float = 0.0

    def nap(self, part: str, stage: int, seconds: float, share: float) -> None:
        if part == "F":
            self.held += share
            self.peak = max(self.peak, self.held)
        start = time.monotonic()
        time.sleep(seconds * self.pace)
        self.naps.append(Nap(part, stage, start, time.monotonic()))
        if part == "W":
            self.held -= share

    def clear(self) -> None:
        """A new step."""
        self.naps, self.held, self.peak = [], 0.0, 0.0


def sleep_precisely() -> None:
    """Asks the kernel to wake this thread on time, not up to 50 µs later; Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class _Sleeps(torch.autograd.Function):
    """Passes x on; backward sleeps first, also where nobody wants the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, nap: partial[None]) -> Tensor:
        ctx.nap = nap
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.nap()
        return gradients[0], None, None


class _TimesWeightLater(torch.autograd.Function):
    """h * weight, whose backward leaves the gradient of `weight` to the queue of a split."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: nn.Parameter, queue: WeightGradients, nap: partial[None]
    ) -> Tensor:
        ctx.save_for_backward(h)
        ctx.weight, ctx.queue, ctx.nap = weight, queue, nap
        return h * weight.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (h,) = ctx.saved_tensors
        weight, nap, dy = ctx.weight, ctx.nap, gradients[0]

        def gradient() -> Tensor:
            nap()
            return (dy * h).flatten(0, -2).sum(0)

        ctx.queue.take(weight, gradient)
        return dy * weight.detach(), None, None, None


class SleepingStage(nn.Module):
    """One stage, as above.

    Args:
        stage: its number along the model.
        seconds: how long it sleeps.
        share: the part of a rank's model that it is: 1 over the stages of a rank.
        diary: of this rank.
        width: of its input.
    """

    def __init__(
        self, stage: int, seconds: Seconds, share: float, diary: Diary, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.stage, self.seconds, self.share, self.diary = stage, seconds, share, diary
        self.weight = nn.Parameter(torch.full((width,), 1.0 + 0.01 * stage))
        # No parameter: it makes the node of I want a gradient, where x does not.
        self.anchor = torch.zeros((), requires_grad=True)
        # `split_backward.split` puts its own product here, with the queue in its keywords.
        self.product: Any = torch.mul

    def forward(self, x: Tensor) -> Tensor:
        self._nap("F", self.seconds.forward)()
        nap_of_input = self._nap("I", self.seconds.backward_input)
        nap_of_weight = self._nap("W", self.seconds.backward_weight)
        if isinstance(self.product, partial):
            h: Tensor = _Sleeps.apply(x, self.anchor, nap_of_input)
            queue = self.product.keywords["queue"]
            y: Tensor = _TimesWeightLater.apply(h, self.weight, queue, nap_of_weight)
            return y
        # Autograd takes the younger node first: I before W.
        weight: Tensor = _Sleeps.apply(self.weight, None, nap_of_weight)
        return weight * _Sleeps.apply(x, self.anchor, nap_of_input)

    def _nap(self, part: str, seconds: float) -> partial[None]:
        return partial(self.diary.nap, part, self.stage, seconds, self.share)


def loss_fn(y: Tensor, labels: Tensor) -> Tensor:
    """Of [1, WIDTH] against the same."""
    return nn.functional.mse_loss(y, labels)
