"""Mixed precision: dtypes of parameters, masters and gradients, and loss scaling.

    without fp16 or bf16     parameters keep their dtype; no masters
    bf16, fp16               parameters are cast to it, buffers are not; the optimizer updates
                             fp32 master weights, and gradients are summed in fp32

fp16 has five exponent bits: small gradients would become zero, so the loss is multiplied by a scale
before the backward pass, and the gradients are divided by it afterwards.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.errors import LossScaleError
from pipemega.parameters import attach_shard, is_kept_fp32, shard_of

# Number of changes of the scale that an error message shows.
_HISTORY = 16


class LossScale:
    """A constant factor of the loss; 1 for every dtype but fp16."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = float(scale)

    def update(self, overflow: bool) -> None:
        """Do nothing: an overflow does not change the scale."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the scale comes from the config."""


class DynamicLossScale(LossScale):
    """Adjusts the scale to the largest one without overflow.

    The scale is halved at an overflow once `hysteresis` overflows have occurred, and doubled each
    time `window` steps have passed since the last overflow.  The first step without overflow
    after an overflow does not count, so the scale first grows at step window + 1.

    Args:
        initial: the first scale; 2 ** `fp16.initial_scale_power`.
        window: `fp16.loss_scale_window`.
        hysteresis: number of overflows until the scale shrinks; reset when the scale grows.
        consecutive_hysteresis: reset it at each step without overflow instead.
        minimum: `fp16.min_loss_scale`.

    Source: the semantics of DeepSpeed's fp16 keys; config.precision validates them.
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
        super().__init__(initial)
        self._window, self._minimum = window, float(minimum)
        self._full_hysteresis, self._consecutive = hysteresis, consecutive_hysteresis
        self._hysteresis = hysteresis
        self._step, self._last_overflow = 0, -1
        self._history: deque[tuple[int, float]] = deque([(0, self.scale)], maxlen=_HISTORY)

    def update(self, overflow: bool) -> None:
        """Record the result of one step; the new scale applies to the next.

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
        if self.scale <= self._minimum:
            path = ", ".join(f"{scale:g} from step {step}" for step, scale in self._history)
            raise LossScaleError(
                f"fp16 gradients overflowed at step {self._step} with the loss scale at "
                f"fp16.min_loss_scale ({self._minimum:g}), so it cannot be lowered further; the "
                f"scale was {path}. The gradients are not finite, or exceed "
                f"{torch.finfo(torch.float16).max / self._minimum:g} without the scale: "
                "lower the learning rate, use bf16 instead of fp16, or lower fp16.min_loss_scale",
                on_every_rank=True,
            )
        self._set(max(self.scale / 2, self._minimum))

    def _grow_when_due(self) -> None:
        quiet = self._step - self._last_overflow - 1
        due = quiet > 0 and quiet % self._window == 0
        if due or self._consecutive:
            self._hysteresis = self._full_hysteresis
        if due:
            self._set(self.scale * 2)

    def _set(self, scale: float) -> None:
        self.scale = scale
        self._history.append((self._step + 1, scale))

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "hysteresis": self._hysteresis,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "history": [list(entry) for entry in self._history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self._hysteresis = int(state["hysteresis"])
        self._step = int(state["step"])
        self._last_overflow = int(state["last_overflow"])
        self._history.clear()
        self._history.extend((int(step), float(scale)) for step, scale in state["history"])


@dataclass(frozen=True)
class Precision:
    """The dtypes of one run.

    Args:
        compute_dtype: dtype of parameters in forward and backward; None: each parameter keeps its
            dtype.
        grad_dtype: dtype of sums of gradients over micro-batches and data ranks; None for the
            dtype of the parameter, or fp32 with master weights.
        master_dtype: dtype of the master weights.
        cast: cast floating-point inputs of the model to `compute_dtype`.
        skip_nonfinite: skip and count a step whose gradients hold inf or nan; otherwise it ends
            the run.
    """

    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    master_dtype: torch.dtype = torch.float32
    cast: bool = True
    skip_nonfinite: bool = False

    @property
    def master(self) -> bool:
        """Whether the optimizer updates master weights."""
        return self.compute_dtype is not None

    @property
    def accumulation_dtype(self) -> torch.dtype | None:
        """The dtype of the `GradientBuffer`; None for the dtype of each parameter."""
        if self.grad_dtype is None and self.master:
            return self.master_dtype
        return self.grad_dtype

    def param_dtype_of(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of a parameter in forward and backward."""
        if self.compute_dtype is None or not parameter.is_floating_point():
            return parameter.dtype
        return torch.float32 if is_kept_fp32(parameter, self.compute_dtype) else self.compute_dtype

    def master_dtype_of(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of what the optimizer updates for a parameter."""
        cast = self.master and parameter.is_floating_point()
        return self.master_dtype if cast else parameter.dtype

    def cast_parameters(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        part: Callable[[str, Tensor], Tensor] = lambda name, whole: whole,
    ) -> dict[str, nn.Parameter]:
        """Cast parameters in place; return logical name -> master of the trainable ones.

        The masters have the values from before the cast, so that no bit of the initial values is
        lost.  Empty if the optimizer updates the parameters themselves.

        Args:
            part: (logical name, all values) -> the values that the master is to hold; if they are
                in other memory and in the master's dtype, that memory becomes the master.
        """
        masters: dict[str, nn.Parameter] = {}
        if self.compute_dtype is None:
            return masters
        for name, parameter in named_parameters:
            if not parameter.is_floating_point():
                continue
            whole = parameter.detach()
            # Assigned to .data: the Parameter stays the same object and keeps its Shard.
            parameter.data = whole.to(self.param_dtype_of(parameter))
            if parameter.requires_grad:
                kept = part(name, whole)
                # Copy even if no cast is needed: a master is never the parameter itself, and a
                # slice must not keep the memory of the whole.
                copy = _shares_memory(kept, parameter) or (
                    _shares_memory(kept, whole) and kept.numel() < whole.numel()
                )
                own = kept.to(self.master_dtype, copy=copy)
                masters[name] = attach_shard(nn.Parameter(own), shard_of(parameter))
        return masters

    def cast_inputs(self, tree: Any) -> Any:
        """Return `tree` with its floating-point tensors cast to `compute_dtype`."""
        if self.compute_dtype is None or not self.cast:
            return tree
        dtype = self.compute_dtype
        return pytree.tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree
        )


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
