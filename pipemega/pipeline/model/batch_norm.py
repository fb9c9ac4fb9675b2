"""DeferredBatchNorm: BatchNorm for steps of several micro-batches and data ranks.

    forward, training    normalizes with the statistics of the micro-batch, and adds its sums
    end of the step      the sums of all data ranks become one update of the running statistics

So evaluation uses the statistics of whole mini-batches, as if the step had been one forward. A
recomputed forward adds nothing, and a skipped step changes nothing.

Source: the idea comes from torchgpipe (Kim et al. 2020, arXiv:2004.09910); the code is ours.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from pipemega.distributed.exchanges import all_reduce
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError

Deferral = bool | Literal["sync"]
"""Whether BatchNorm is converted; "sync": with statistics joined over the data ranks."""


class DeferredStatistics:
    """Base of layers with statistics that the engine updates once for each step that counts.

    Attributes:
        sums: what the forwards of the current step have added up on this rank: [..] fp64; the
            engine sums it over the data ranks.
        updates_statistics: whether `update` does anything.
    """

    updates_statistics = True

    # Empty between two steps, so that they need not move with the layer.
    step_buffers: tuple[str, ...] = ("sums",)

    sums: Tensor

    def counts(self) -> bool:
        """Return whether the values of a forward count now: not if backward recomputes it."""
        return are_counted() and torch._C._current_graph_task_id() == -1

    def update(self, sums: Tensor) -> None:
        """Update the statistics from the sums of a step, over all data ranks."""
        raise AssertionError(f"{type(self).__name__} has no update()")


class DeferredBatchNorm(_BatchNorm, DeferredStatistics):
    """BatchNorm over [batch, channels, ...], with running statistics of whole steps.

    In training x is normalized with the mean and the variance of the micro-batch. At the end of a
    step the engine updates the running statistics once, from all values of the step on all data
    ranks; their variance is unbiased, as in nn.BatchNorm. The statistics are fp32 or, for a model
    in fp64, fp64. Names and state_dict are the same as in nn.BatchNorm.

    Args:
        num_features, eps, momentum, affine: the arguments of nn.BatchNorm2d; with `momentum=None`
            the running statistics are the means over all steps.
        sync: join the statistics of a micro-batch over the data ranks, also in backward.

    Shape:
        x [batch, channels, ...]  ->  equal shape and dtype

    Raises:
        ValueError: a channel of the micro-batch has a single value.

    Attributes:
        axis: the data ranks; set when the stage is built.
        sums: [count, sum of each channel, sum of squares of each channel] of the current step on
            this rank, in fp64.
    """

    # They communicate, or read the state of autograd.
    uncompiled_methods = ("_normalize_joined", "_add_sums")

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        sync: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self._defer(sync)

    def _defer(self, sync: bool) -> None:
        self.sync, self.axis = sync, Axis("data")
        sums = torch.zeros(
            1 + 2 * self.num_features, dtype=torch.float64, device=self.running_mean.device
        )
        self.register_buffer("sums", sums, persistent=False)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected [batch, channels, ...], got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        mean, var = self.running_mean, self.running_var
        # torch's kernels take fp16 and bf16 only with weights in the dtype of the statistics.
        weight, bias = (None if p is None else p.to(mean.dtype) for p in (self.weight, self.bias))
        if not self.training:
            return F.batch_norm(input, mean, var, weight, bias, False, 0.0, self.eps)
        if self.sync and self.axis.size > 1 and not input.is_meta:
            return self._normalize_joined(input, weight, bias)
        # With momentum 1 the kernel writes the statistics of the micro-batch.
        mean, var = torch.zeros_like(mean), torch.ones_like(var)
        y = F.batch_norm(input, mean, var, weight, bias, True, 1.0, self.eps)
        self._add_sums(mean, var, input.numel() // input.shape[1])
        return y

    def _normalize_joined(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        y, mean, var = _JoinedBatchNorm.apply(input, weight, bias, self.eps, self.axis, _counts)  # type: ignore[no-untyped-call]
        self._add_sums(mean, var, input.numel() // input.shape[1])
        return y  # type: ignore[no-any-return]

    @torch.no_grad()
    def _add_sums(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Add the sums of a micro-batch with this mean and unbiased variance, if it counts."""
        if self.counts():
            biased = var.double() * ((count - 1) / count)
            self.sums += _sums(mean.double(), biased, count)

    @torch.no_grad()
    def update(self, sums: Tensor) -> None:
        """Update the running statistics once; without values they stay as they are.

        Args:
            sums: the sums of a step, over all data ranks; see the attribute `sums`.
        """
        count, mean, var = _moments(sums)
        var = var * (count / (count - 1).clamp_min(1))
        has_values = count > 0
        self.num_batches_tracked += has_values
        factor: Any = self.momentum
        if factor is None:
            factor = 1 / self.num_batches_tracked.double().clamp_min(1)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            wide = running.double()
            running.copy_(torch.where(has_values, wide + (new - wide) * factor, wide))


class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d):
    """nn.BatchNorm1d with deferred statistics."""

    _check_input_dim = nn.BatchNorm1d._check_input_dim


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d):
    """nn.BatchNorm2d with deferred statistics."""

    _check_input_dim = nn.BatchNorm2d._check_input_dim


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d):
    """nn.BatchNorm3d with deferred statistics."""

    _check_input_dim = nn.BatchNorm3d._check_input_dim


_CLASSES: dict[type[nn.Module], type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
    nn.SyncBatchNorm: DeferredBatchNorm,
}


def defer_batch_norms(module: nn.Module, deferral: Deferral) -> nn.Module:
    """Change the class of each BatchNorm with running statistics in `module`; return `module`.

    Names, parameters and hooks stay. A SyncBatchNorm joins its statistics over the data ranks.
    Subclasses of the user are not changed: they may compute something else.

    Raises:
        ConfigError: statistics shall be joined, and a BatchNorm has no running ones; on every rank.
    """
    for each in module.modules() if deferral else ():
        if isinstance(each, DeferredBatchNorm):
            each.sync = each.sync or deferral == "sync"
        elif type(each) not in _CLASSES:
            continue
        elif each.track_running_stats:
            is_sync = isinstance(each, nn.SyncBatchNorm)
            each.__class__ = _CLASSES[type(each)]
            assert isinstance(each, DeferredBatchNorm)
            each._defer(is_sync or deferral == "sync")
        elif deferral == "sync":
            raise ConfigError(
                f"deferred_batch_norm='sync' joins the statistics of layers with running ones, and "
                f"not the statistics of {each}: remove track_running_stats=False, or use "
                f"deferred_batch_norm=True",
                on_every_rank=True,
            )
    return module


def check_deferral(value: Any) -> Deferral:
    """Return the argument `deferred_batch_norm`.

    Raises:
        ConfigError: it is another value; on every rank.
    """
    if value not in (True, False, "sync"):
        raise ConfigError(
            f"PipelineModule(deferred_batch_norm=...) is True, False or 'sync' (statistics joined "
            f"over the data ranks), not {value!r}",
            on_every_rank=True,
        )
    return value  # type: ignore[no-any-return]


def deferred_batch_norms(modules: Iterable[nn.Module]) -> list[DeferredBatchNorm]:
    """Return the layers with deferred statistics in `modules`, each once."""
    found = [m for root in modules for m in root.modules() if isinstance(m, DeferredBatchNorm)]
    return list({id(m): m for m in found}.values())


def deferred_statistics(modules: Iterable[nn.Module]) -> list[DeferredStatistics]:
    """Return the layers in `modules` that the engine updates after a step, each once."""
    found = [m for root in modules for m in root.modules() if isinstance(m, DeferredStatistics)]
    return list({id(m): m for m in found if m.updates_statistics}.values())


def join_data_ranks(modules: Iterable[nn.Module], data: Axis) -> None:
    """Tell the layers with deferred statistics in `modules` their data ranks."""
    for layer in deferred_batch_norms(modules):
        layer.axis = data


# Whether the values of the current micro-batch count. Not local to a thread: on a GPU, autograd
# recomputes in threads of its own.
_counts = True


def are_counted() -> bool:
    """Return whether the current micro-batch counts: not one without samples."""
    return _counts


@contextmanager
def uncounted() -> Iterator[None]:
    """Context in which forwards, also recomputed ones, add no values to any statistics."""
    global _counts
    outer, _counts = _counts, False
    try:
        yield
    finally:
        _counts = outer


def _sums(mean: Tensor, biased_var: Tensor, count: int) -> Tensor:
    """Return [count, sums, sums of squares] of `count` values per channel, in fp64."""
    squares = biased_var + mean.square()
    return torch.cat([mean.new_full((1,), count), mean * count, squares * count])


def _moments(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance of `_sums`; 0 without values."""
    count = sums[0]
    mean, squares = (sums[1:] / count.clamp_min(1)).chunk(2)
    return count, mean, (squares - mean.square()).clamp_min(0)


class _JoinedBatchNorm(torch.autograd.Function):
    """Normalizes with the statistics of all data ranks; returns this rank's own ones too.

    forward    all-reduce of [count, sums, sums of squares]
    backward   all-reduce of [sums of dy, sums of dy x̂]
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        axis: Axis,
        counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, dims, count = _wide(x), _dims(x), x.numel() // x.shape[1]
        own_var, own_mean = torch.var_mean(wide, dims, correction=0)
        sums = _sums(own_mean.double(), own_var.double(), count) * counts
        all_reduce(sums, axis)
        total, mean, var = _moments(sums)
        _check_values(int(total) if x.device.type == "cpu" else None, x, axis)
        mean, inverse = mean.to(wide.dtype), (var + eps).rsqrt().to(wide.dtype)
        y = (wide - _column(mean, x)) * _column(inverse, x)
        if weight is not None:
            y = y * _column(weight, x)
        if bias is not None:
            y = y + _column(bias, x)
        ctx.axis = axis
        ctx.save_for_backward(x, weight, mean, inverse, total)
        unbiased = own_var * (count / max(1, count - 1))
        ctx.mark_non_differentiable(own_mean, unbiased)
        return y.to(x.dtype), own_mean, unbiased

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        dy, dims = _wide(gradients[0]), _dims(x)
        normalized = (_wide(x) - _column(mean, x)) * _column(inverse, x)
        own = torch.stack([dy.sum(dims), (dy * normalized).sum(dims)]).double()
        joined = own.clone()
        all_reduce(joined, ctx.axis)
        constant, slope = (joined / total.clamp_min(1)).to(dy.dtype)
        dx = dy - _column(constant, x) - normalized * _column(slope, x)
        scale = inverse if weight is None else inverse * weight
        dx = (dx * _column(scale, x)).to(x.dtype)
        dbias, dweight = own.to(mean.dtype)
        if weight is None:
            return dx, None, None, None, None, None
        return dx, dweight, dbias, None, None, None


def _check_values(total: int | None, x: Tensor, axis: Axis) -> None:
    """Raise ValueError if all data ranks together have a single value per channel."""
    if total == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size "
            f"{list(x.shape)} on one of {axis.size} data ranks"
        )


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _dims(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


def _column(values: Tensor, x: Tensor) -> Tensor:
    """Return a value per channel in a shape that broadcasts to the shape of x."""
    return values.view(1, -1, *(1 for _ in range(x.dim() - 2)))
