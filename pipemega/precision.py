"""Which dtype computes, which one remembers, and by what the loss is scaled.

    without fp16 or bf16     parameters keep their dtype; no second copy
    bf16, fp16               parameters are cast to it, buffers stay as they are; the optimizer
                             works on fp32 master weights, gradients are summed up in fp32

fp16 has five bits of exponent: small gradients would vanish, so the loss is multiplied by a scale
before the backward pass and the gradients divided by it after.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.errors import ConfigError, LossScaleError
from pipemega.parameters import describe, shard_of

# How many changes of the scale an error message can look back on.
_HISTORY = 16


class LossScale(Protocol):
    """What the loss is multiplied by, and how that answers to an overflow."""

    @property
    def scale(self) -> float: ...

    def update(self, overflow: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StaticLossScale:
    """Always the same scale; 1 for every dtype but fp16."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = float(scale)

    @property
    def scale(self) -> float:
        return self._scale

    def update(self, overflow: bool) -> None:
        """An overflow costs the step and changes nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scale is the config's: there is nothing to restore."""


class DynamicLossScale:
    """As large a scale as goes without overflow, found by trying.

    Halved at an overflow, once `hysteresis` overflows have been spent; doubled each time `window`
    steps have passed since the last overflow.  The first overflow-free step after an overflow
    does not count, so that the scale first grows at the window + 1st step.

    Args:
        initial: the first scale; `fp16.initial_scale_power` is its logarithm to base 2.
        window: `fp16.loss_scale_window`.
        hysteresis: overflows until the scale goes down; refilled when the scale grows.
        consecutive_hysteresis: refill it at each step without overflow instead.
        minimum: `fp16.min_loss_scale`.

    Source: the semantics of DeepSpeed's fp16 keys, so that its configs mean the same here.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        minimum: float = 1.0,
    ) -> None:
        for key, value in (("loss_scale_window", window), ("hysteresis", hysteresis)):
            if value < 1:
                raise ConfigError(f"fp16.{key} is {value}: the smallest that makes sense is 1")
        if minimum <= 0:
            raise ConfigError(f"fp16.min_loss_scale is {minimum}: it must be above 0")
        if initial < minimum:
            raise ConfigError(
                f"fp16 starts at the loss scale {initial:g} (2 to the fp16.initial_scale_power), "
                f"which is below fp16.min_loss_scale ({minimum:g}): raise the first or lower the "
                "second"
            )
        self._scale = float(initial)
        self._window = window
        self._full_hysteresis = hysteresis
        self._consecutive = consecutive_hysteresis
        self._minimum = float(minimum)
        self._hysteresis = hysteresis
        self._step = 0
        self._last_overflow = -1
        self._history: deque[tuple[int, float]] = deque([(0, self._scale)], maxlen=_HISTORY)

    @property
    def scale(self) -> float:
        return self._scale

    def update(self, overflow: bool) -> None:
        """Takes note of one step; the new scale is for the next.

        Raises:
            LossScaleError: an overflow at the smallest scale allowed.
        """
        if overflow:
            self._shrink()
            self._last_overflow = self._step
        else:
            self._grow_when_due()
        self._step += 1

    def _shrink(self) -> None:
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return
        if self._scale <= self._minimum:
            raise LossScaleError(self._at_minimum(), on_every_rank=True)
        self._set(max(self._scale / 2, self._minimum))

    def _grow_when_due(self) -> None:
        quiet = self._step - self._last_overflow - 1
        due = quiet > 0 and quiet % self._window == 0
        if due or self._consecutive:
            self._hysteresis = self._full_hysteresis
        if due:
            self._set(self._scale * 2)

    def _set(self, scale: float) -> None:
        self._scale = scale
        self._history.append((self._step + 1, scale))

    def _at_minimum(self) -> str:
        path = ", ".join(f"{scale:g} from step {step}" for step, scale in self._history)
        return (
            f"fp16 gradients overflowed at step {self._step} with the loss scale at "
            f"fp16.min_loss_scale ({self._minimum:g}), so that no smaller scale can help; the "
            f"scale was {path}. The gradients themselves are not finite or beyond 65504: lower "
            "the learning rate, use bf16 in place of fp16, or lower fp16.min_loss_scale"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "hysteresis": self._hysteresis,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "history": [list(entry) for entry in self._history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scale = float(state["scale"])
        self._hysteresis = int(state["hysteresis"])
        self._step = int(state["step"])
        self._last_overflow = int(state["last_overflow"])
        history = ((int(step), float(scale)) for step, scale in state["history"])
        self._history = deque(history, maxlen=_HISTORY)


@dataclass(frozen=True)
class Precision:
    """The dtypes of one run.

    Args:
        compute_dtype: of parameters in forward and backward; None keeps what each has.
        grad_dtype: in which gradients are summed over micro-batches and data ranks; None for the
            dtype of the parameter, or fp32 where there are master weights.
        master_dtype: of the copy that the optimizer works on.
        cast: floating inputs of the model are cast to `compute_dtype`.
        skip_nonfinite: a step whose gradients hold inf or nan is skipped and counted; otherwise
            it ends the run.
    """

    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    master_dtype: torch.dtype = torch.float32
    cast: bool = True
    skip_nonfinite: bool = False

    @property
    def master(self) -> bool:
        """Whether the optimizer works on a copy of its own."""
        return self.compute_dtype is not None

    @property
    def accumulation_dtype(self) -> torch.dtype | None:
        """What a `GradientBuffer` is to sum in; None for the dtype of each parameter."""
        if self.grad_dtype is None and self.master:
            return self.master_dtype
        return self.grad_dtype

    def cast_parameters(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        part: Callable[[str, Tensor], Tensor] = lambda name, whole: whole,
    ) -> dict[str, nn.Parameter]:
        """Casts parameters in place; returns the masters of the trainable ones by logical name.

        The masters hold the values from before the cast, so that no bit of the first draw is
        lost.  Empty where the optimizer works on the parameters themselves.

        Args:
            part: (logical name, the whole) -> what of it the master is to hold.
        """
        masters: dict[str, nn.Parameter] = {}
        if self.compute_dtype is None:
            return masters
        for name, parameter in named_parameters:
            if not parameter.is_floating_point():
                continue
            whole = parameter.detach()
            # Assigned to .data: the Parameter stays the same object, with its shard on it.
            parameter.data = whole.to(self.compute_dtype)
            if parameter.requires_grad:
                kept = part(name, whole)
                # A copy even where no cast is needed: a master is never the parameter itself, and
                # a slice is not to keep the whole alive.
                copy = parameter.data_ptr() == whole.data_ptr() or kept.numel() < whole.numel()
                own = kept.to(self.master_dtype, copy=copy)
                masters[name] = describe(nn.Parameter(own), shard_of(parameter))
        return masters

    def cast_inputs(self, tree: Any) -> Any:
        """`tree` with its floating-point tensors in the dtype that computes; the rest as it is."""
        if self.compute_dtype is None or not self.cast:
            return tree
        dtype = self.compute_dtype
        return pytree.tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree
        )
