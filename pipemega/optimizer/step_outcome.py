"""Decides from globally reduced numbers whether a step is skipped or clipped: arithmetic only.

Numbers about each step for the log: norm of the parameters, zeros in the gradients.

    reduce the gradients          count_zeros()     this rank's part, on the device
    update the masters
                                  local()           with the squares of the updated masters
    one all-reduce over the world add_to(report)

As for the norm of the gradients, each element of a logical parameter counts once in the world, and
padding does not count, so that the numbers are equal to the numbers of the unsharded model.

Squared norms of the gradients by layer, without a number of kernels that grows with the layers.

    runs       | layer 0 | layer 1 | layer 1 |  ..    ranges of the flat buffers, one layer each
    squares    |   s0    |   s1    |   s2    |  ..    one multi-tensor kernel
    columns    | s0 s1 .. |                           first run of each layer
               | 0  s2 .. |                           second run, 0 where a layer has none
    sum        | s0 s1 + s2 .. |                      one addition per column

By layer, so that the sum does not depend on which rank holds which layers: on a CPU the norm is
bitwise the same for all schedules. (On a GPU the order of additions may depend on the alignment.)
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipemega.distributed.mesh import Axis, Mesh
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.parameters import replicas_of, shard_of

# The epsilon of torch.nn.utils.clip_grad_norm_, for the same clipping.
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class StepReport:
    """The results of one step; equal on all ranks.

    Args:
        loss: weighted mean over the whole batch; may be nan.
        grad_norm: norm of the gradients of all logical parameters, before clipping, without the
            loss scale.
        loss_scale: the scale of this step's gradients.
        learning_rate: learning rate of the first parameter group in this step.
        skipped: parameters and optimizer state are unchanged.
        overflow: a gradient was inf or nan, or the loss was (`Attempt.check_loss`).
        weight: number of tokens (or micro-batches) that the loss is the mean of.
        skipped_steps: number of steps skipped so far, including this one.
        rollbacks: number of steps so far, including this one, that ran before their norm was known
            and had to be undone and repeated (`post_validate`).
        stop_votes: number of ranks that requested the end of the run.
        params_norm: norm of all logical parameters, after the step; None: not computed
            (`monitor.log_params_norm`).
        num_zeros: elements of the gradients of all logical parameters that are 0, after the
            reduction; None: not counted (`monitor.log_num_zeros_in_grad`).
        extra: sums over all ranks of the numbers that the step was given with the losses.
        origin: where the first inf or nan arose; set by `Engine.take_reports` only.
    """

    loss: float
    grad_norm: float
    loss_scale: float
    learning_rate: float
    skipped: bool
    overflow: bool
    weight: float
    skipped_steps: int = 0
    rollbacks: int = 0
    stop_votes: float = 0.0
    params_norm: float | None = None
    num_zeros: int | None = None
    extra: tuple[float, ...] = ()
    origin: str = ""

    def in_words(self, step: int) -> str:
        """Describe a non-finite step: "loss is nan at step 12 (gradient norm nan)"."""
        if math.isfinite(self.loss):
            return f"the gradient norm is {self.grad_norm:g} at step {step} (loss {self.loss:g})"
        return f"loss is {self.loss:g} at step {step} (gradient norm {self.grad_norm:g})"


@dataclass(frozen=True)
class GlobalStats:
    """Sums over all ranks, from the one all-reduce of a step.

    Args:
        squared_norm: squared norm of the gradients of all logical parameters.
        nonfinite_ranks: number of ranks that hold inf or nan.
        loss: weighted sum of the losses of all micro-batches.
        weight: sum of their weights.
        num_microbatches: number of micro-batches of all data ranks.
        stop_votes: number of ranks that request a stop.
        extra: sums of further numbers, for the report.
    """

    squared_norm: float
    nonfinite_ranks: float
    loss: float
    weight: float
    num_microbatches: float
    stop_votes: float
    extra: tuple[float, ...] = ()

    @classmethod
    def of(cls, sums: Sequence[float], num_layers: int) -> "GlobalStats":
        """Read the sums.

        Args:
            sums: [squares per layer .., nonfinite_ranks, loss, weight, num_microbatches, votes,
                extra ..].
        """
        nonfinite_ranks, loss, weight, count, votes, *extra = sums[num_layers:]
        squares = sum(sums[:num_layers])
        return cls(squares, nonfinite_ranks, loss, weight, count, votes, tuple(extra))

    def without_norm(self) -> "GlobalStats":
        """Return these sums with a norm of 0, which neither clips nor overflows."""
        return replace(self, squared_norm=0.0, nonfinite_ranks=0.0)


@dataclass(frozen=True)
class Attempt:
    """A step after its reductions and before its decision.

    Args:
        factor: the reduced gradients still have to be multiplied by this.
        loss_scale, learning_rate, skipped_steps: the values after the reductions.
        samples: samples of the step, on all data ranks.
        check_loss: treat a loss that is not finite as an overflow.  False with fp16, where a sum
            of losses may exceed the dtype although the gradients are right.
    """

    factor: float
    loss_scale: float
    learning_rate: float
    skipped_steps: int
    samples: int = 0
    check_loss: bool = True


@dataclass(frozen=True)
class Decision:
    """What to do with the gradients: nothing if `report.skipped`, else an update.

    Args:
        factor: multiply the gradients by this before the update; includes clipping.
        nonfinite_ranks: number of ranks that hold inf or nan.
        samples: samples of the step, on all data ranks.
    """

    report: StepReport
    factor: float
    nonfinite_ranks: float
    samples: int

    def same_update(self, other: "Decision") -> bool:
        """Return whether both result in the same parameters and the same state."""
        mine, theirs = self.report, other.report
        return (self.factor, mine.skipped, mine.overflow) == (
            other.factor,
            theirs.skipped,
            theirs.overflow,
        )


def decide(attempt: Attempt, stats: GlobalStats, clip: float) -> Decision:
    """Decide whether to skip the step, and the factor of the gradients; equal on all ranks.

    Args:
        clip: largest norm of the gradients; 0 for no clipping.
    """
    factor, scale = attempt.factor, attempt.loss_scale
    if stats.weight > 0:
        factor *= stats.num_microbatches / stats.weight
    norm = math.sqrt(stats.squared_norm) * factor / scale
    overflow = stats.nonfinite_ranks > 0 or not math.isfinite(norm)
    if overflow and math.isfinite(norm):
        # Only a replica that is counted on another rank is not finite: the norm is still invalid.
        norm = math.inf
    loss = stats.loss / stats.weight if stats.weight else math.nan
    if attempt.check_loss and stats.weight and not math.isfinite(loss):
        # Cross entropy of a class whose logit is -inf: the loss is inf, its gradient is finite.
        overflow = True
    skipped = overflow or not stats.weight
    factor /= scale
    if clip > 0 and not skipped:
        factor *= min(1.0, clip / (norm + _CLIP_EPSILON))
    report = StepReport(
        loss=loss,
        grad_norm=norm,
        loss_scale=scale,
        learning_rate=attempt.learning_rate,
        skipped=skipped,
        overflow=overflow,
        weight=stats.weight,
        skipped_steps=attempt.skipped_steps + skipped,
        stop_votes=stats.stop_votes,
        extra=stats.extra,
    )
    return Decision(report, factor, stats.nonfinite_ranks, attempt.samples)


# Elements of a flat buffer that are converted to fp64 at a time on a CPU: they fit into the cache.
_NORM_BLOCK = 1 << 18


class GradientNorms:
    """Computes this rank's part of the squared norms, after the reductions.

    Each logical parameter counts once in the world: one replicated over the tensor ranks on the
    first of them, a tied one on its first holder, an expert on the first of the data ranks that
    have it, and all others on the first data rank only, or, with ZeRO, each slice on its owner.

    Args:
        gradients: the buffers; the same tensors in every step.
        mesh: its axes, and the device of the result.
        tied: logical name -> the ranks that hold it.
        num_layers: number of layers of the whole model.
    """

    def __init__(
        self, gradients: GradientBuffer, mesh: Mesh, tied: Mapping[str, Axis], num_layers: int
    ) -> None:
        runs, device = _runs(gradients, mesh, tied), mesh.device
        self._parts = [gradients.flats[run.dtype][run.start : run.stop] for run in runs]
        by_layer: list[list[int]] = [[] for _ in range(num_layers)]
        for number, run in enumerate(runs):
            if run.counted:
                by_layer[run.layer].append(number)
        depth = max(map(len, by_layer))
        # A zero follows the squares: it fills the columns.
        columns = [
            [numbers[row] if row < len(numbers) else len(runs) for numbers in by_layer]
            for row in range(depth)
        ]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device).view(
            depth, num_layers
        )
        self._total = torch.zeros(num_layers + 1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the squares.

        Returns:
            [num_layers + 1] fp64: the squares, by the position in the logical name, and 1 if this
            rank holds any inf or nan, else 0.  That flag includes replicas that are counted on
            other ranks, so that a replica with a wrong value is noticed.
        """
        total = self._total.clone()
        if not self._parts:
            return total
        squares = square_sums(self._parts)
        padded = torch.cat([squares, self._total[:1]])
        # One after the other: a sum over the columns could depend on their number.
        by_layer = total[:-1]
        for column in padded[self._columns].unbind():
            by_layer.add_(column)
        # Not `isfinite`, which takes four kernels; nan is not below inf either.
        total[-1] = ~(squares < math.inf).all()
        return total


class _Run(NamedTuple):
    """A range of a flat buffer that belongs to one layer, and whether this rank counts it.

    Ranges of different kinds are not merged: whether they are adjacent depends on the other layers
    of the rank, and the sum on what was merged.
    """

    dtype: torch.dtype
    start: int
    stop: int
    counted: bool
    layer: int
    kind: tuple[bool, bool, bool]  # sharded over tensor ranks, partial, of experts


def _runs(gradients: GradientBuffer, mesh: Mesh, tied: Mapping[str, Axis]) -> list[_Run]:
    """Return what this rank owns of the buffers, adjacent slots that count alike merged."""
    runs: list[_Run] = []
    layout = gradients.layout
    for dtype in gradients.flats:
        for slot in (slot for slot in gradients.slots if slot.dtype == dtype):
            start, stop = layout.owned(slot)
            if start == stop:
                continue
            shard = shard_of(slot.parameter)
            sliced = bool(layout.buckets)
            counted = is_counted(slot.name, slot.parameter, mesh, tied, sliced=sliced)
            kind = (shard.dim is not None, shard.partial_gradient, shard.is_expert)
            run = _Run(dtype, start, stop, counted, _layer_of(slot.name), kind)
            last = runs[-1] if runs else None
            if last and (last.dtype, last.stop, *last[3:]) == (dtype, start, *run[3:]):
                run = run._replace(start=runs.pop().start)
            runs.append(run)
    return runs


def is_counted(
    name: str, parameter: Tensor, mesh: Mesh, tied: Mapping[str, Axis], *, sliced: bool
) -> bool:
    """Return whether this rank counts its part of a parameter, so that each element counts once.

    Args:
        name: logical name.
        tied: logical name -> the ranks that hold a tied parameter.
        sliced: the part is a slice that no other data rank has (ZeRO).
    """
    shard = shard_of(parameter)
    return (
        (sliced or replicas_of(parameter, mesh).rank == 0)
        and (mesh.tensor.rank == 0 or shard.dim is not None)
        and (name not in tied or tied[name].rank == 0)
    )


def _layer_of(name: str) -> int:
    """Return the position in a logical name: layers.12.weight -> 12; 0 for any other name."""
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found.group(1)) if found else 0


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor: [tensors] fp64.

    Squares of fp32 numbers cannot overflow fp64: a sum is not finite only if an element is not.
    """
    # The squared magnitude of a complex number is the sum of the squares of its two parts.
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    if tensors[0].device.type == "cpu":
        # vector_norm with a dtype is ten times slower on a CPU (docs/optimizer.md).
        return torch.stack([_square_sum_on_cpu(tensor) for tensor in tensors])
    return _square_sums_on_device(tensors)


def _square_sums_on_device(tensors: Sequence[Tensor]) -> Tensor:
    norms: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        # A list of one dtype: CUDA then adds in fp64 in one kernel, without an fp64 copy.
        numbers = [n for n, tensor in enumerate(tensors) if tensor.dtype == dtype]
        found = torch._foreach_norm([tensors[n] for n in numbers], 2, dtype=torch.float64)
        norms.update(zip(numbers, found, strict=True))
    return torch.stack([norms[n] for n in range(len(tensors))]).square_()


def _square_sum_on_cpu(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for block in torch.split(tensor.reshape(-1), _NORM_BLOCK):
        block = block.double()
        total += torch.dot(block, block)
    return total


class CountedGradient(NamedTuple):
    """A gradient that this rank counts.

    Args:
        gradient: the elements of the gradient on this rank, in the gradient buffer.
        padding: number of these elements that are padding; their gradient is 0.
    """

    gradient: Tensor
    padding: int


class StepStatistics:
    """Computes the numbers; the same tensors in every step.

    Args:
        params: what this rank counts of the parameters, as the optimizer updates them; None: do not
            compute their norm.
        gradients: what it counts of the gradients; None: do not count zeros.
        device: the device of the result.
    """

    def __init__(
        self,
        params: Sequence[Tensor] | None,
        gradients: Sequence[CountedGradient] | None,
        device: torch.device,
    ) -> None:
        self._has_params, self._gradients = params is not None, gradients
        self._params: dict[torch.device, list[Tensor]] = {}
        for tensor in params or ():
            if tensor.numel():
                self._params.setdefault(tensor.device, []).append(tensor.detach())
        self._local = torch.zeros(2, dtype=torch.float64, device=device)

    @torch.no_grad()
    def count_zeros(self) -> None:
        """Count the zeros of the reduced gradients; before they are set to zero."""
        if self._gradients is None:
            return
        self._local[1] = 0.0
        for gradient, padding in self._gradients:
            zeros = gradient.numel() - padding - torch.count_nonzero(gradient)
            self._local[1] += zeros

    @torch.no_grad()
    def local(self) -> Tensor:
        """Return this rank's part: [squares of the parameters, zeros] fp64."""
        self._local[0] = 0.0
        for tensors in self._params.values():
            self._local[0] += square_sums(tensors).sum().to(self._local.device)
        return self._local.clone()

    def add_to(self, report: StepReport, sums: Sequence[float]) -> StepReport:
        """Return the report with the numbers, from the sums of `local` over all ranks."""
        squares, zeros = sums
        return replace(
            report,
            params_norm=math.sqrt(squares) if self._has_params else None,
            num_zeros=int(zeros) if self._gradients is not None else None,
        )
