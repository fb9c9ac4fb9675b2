"""Counts the FLOPs of the forward of each module, and measures its time, in running steps.

The first forward of a layer is counted, operation by operation; the later ones are timed, because
counting takes time. Recomputation in backward is neither counted nor timed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipemega.layer_costs.tensor_meter import operation_flops
from pipemega.monitor.timers import Interval, StepClock
from pipemega.parameters import shard_of
from pipemega.pipeline.model.module import RngKey
from pipemega.tensor_parallel.deferred_logits import DeferredLogits, without_output


@dataclass(frozen=True)
class ProfiledLayer:
    """A layer, which runs once per micro-batch.

    Args:
        name: the name of the layer; empty for a whole model.
        kind: its class, or the name of its function.
        level: 0 for a whole model, 1 for its children.
        forward_flops: input -> FLOPs of the forward; None: count the operations in the layer.
    """

    module: nn.Module
    name: str
    kind: str
    level: int
    forward_flops: Callable[[Any], float] | None = None


@dataclass(frozen=True)
class ModuleCost:
    """Costs of one module, on one rank, for one micro-batch.

    Args:
        name, kind, level: as in `ProfiledLayer`.
        parameters: number of elements of the unsharded module.
        flops: FLOPs of the forward, by torch's formulas for matrix products, convolutions and
            attention.
        seconds: seconds of the forward.
        timed_flops: FLOPs computed within `seconds`. 0 for a head that returns `DeferredLogits`:
            the loss computes `flops`. More than `flops` for a shard of a head: S also computes a
            product of the backward.
    """

    name: str
    kind: str
    level: int
    parameters: int
    flops: float
    seconds: float
    timed_flops: float

    def __add__(self, other: "ModuleCost") -> "ModuleCost":
        """Return the cost of a layer of which `other` is a part on another rank, or a shard."""
        return replace(
            other,
            flops=self.flops + other.flops,
            seconds=self.seconds + other.seconds,
            timed_flops=self.timed_flops + other.timed_flops,
        )


@dataclass
class _Record:
    """Measurements of a module within one layer."""

    timed_flops: float = 0.0
    loss_flops: float = 0.0
    # By the formula of the layer, if it has one.
    forward_flops: float | None = None
    counted: list[Interval] = field(default_factory=list)
    timed: list[Interval] = field(default_factory=list)

    @property
    def flops(self) -> float:
        """FLOPs of the forward."""
        known = self.forward_flops
        return self.timed_flops + self.loss_flops if known is None else known


class ModuleProfiler:
    """Profiles layers and their modules between `start` and `stop`.

    A `LayerObserver` of stages, or the `ShardObserver` of a shard of the vocabulary.

    Args:
        layers: position -> layer.
        clock: the clock of the work on the device.
        deepest: deepest level of modules; -1: all of them.
    """

    def __init__(
        self, layers: Mapping[int, ProfiledLayer], clock: StepClock, deepest: int = -1
    ) -> None:
        self._layers, self._clock, self._deepest = layers, clock, deepest
        self._handles: list[Any] = []
        self._records: dict[int, dict[nn.Module, _Record]] = {}
        self._counted: set[int] = set()  # positions of the layers whose FLOPs are known
        self._timed = Counter[int]()  # number of timed runs of each layer
        self._position = -1  # of the layer that runs now
        # What runs now, from the layer inwards, and the instants of the starts.
        self._stack: list[tuple[_Record, Any]] = []
        self._meter: _FlopMeter | None = None

    def start(self) -> None:
        """Measure all forwards from now on."""
        self._records = {position: {} for position in self._layers}
        self._counted.clear()
        self._timed.clear()
        inner = dict.fromkeys(
            module for layer in self._layers.values() for _, module, _ in self._inner_modules(layer)
        )
        self._handles = []
        for module in inner:
            enter, leave = partial(self._enter, module), partial(self._leave, module)
            self._handles += [
                module.register_forward_pre_hook(lambda *_, enter=enter: enter()),
                module.register_forward_hook(without_output(leave), always_call=True),
            ]

    def _inner_modules(self, layer: ProfiledLayer) -> Iterator[tuple[str, nn.Module, int]]:
        """Yield (name, module, level) of the modules in a layer."""
        for name, module in layer.module.named_modules():
            level = layer.level + name.count(".") + 1
            omitted = not name or getattr(type(module), "is_placeholder", False)
            if not omitted and (self._deepest < 0 or level <= self._deepest):
                yield name, module, level

    def restart_times(self) -> bool:
        """Discard the times so far; return whether all layers were counted before."""
        self._timed.clear()
        for records in self._records.values():
            for record in records.values():
                record.counted.clear()
                record.timed.clear()
        return self._counted == self._layers.keys()

    def stop(self) -> list[ModuleCost]:
        """Stop measuring; return the costs of each layer, followed by the costs of its modules.

        Waits for the device.
        """
        for handle in self._handles:
            handle.remove()
        return [
            cost
            for position, layer in self._layers.items()
            for cost in self._costs(position, layer)
        ]

    # The layers

    reads_outputs = False

    @contextmanager
    def measure(self, position: int, x: Any) -> Iterator[None]:
        """Measure a layer that runs in the block."""
        self.enter(position, x, None)
        try:
            yield
        except BaseException:
            self.failed(position)
            raise
        self.leave(position, None, None)

    def enter(self, position: int, x: Any, rng_key: RngKey | None) -> None:
        """Handle the start of a layer."""
        if torch.is_grad_enabled() and not _is_in_backward():
            self._position = position
            if position in self._counted:
                self._timed[position] += 1
            else:
                self._counted.add(position)
                self._meter = _FlopMeter(self._count)
                self._meter.__enter__()  # type: ignore[no-untyped-call]
            layer = self._layers[position]
            record = self._push(layer.module)
            if self._meter is not None and layer.forward_flops is not None:
                record.forward_flops = layer.forward_flops(x)

    def leave(self, position: int, y: Any, rng_key: RngKey | None) -> None:
        """Handle the end of a layer."""
        if self._meter is not None and isinstance(y, DeferredLogits):
            self._count_head(position, y)
        if self._stack:
            self._pop()
        self._stop_counting()

    def failed(self, position: int) -> None:
        """Handle an error in a layer."""
        self._stack.clear()
        self._stop_counting()

    def _stop_counting(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._meter = None

    # Modules, and the layer as the first of them

    def _enter(self, module: nn.Module) -> None:
        if self._stack:
            self._push(module)

    def _leave(self, module: nn.Module) -> None:
        if self._stack and self._stack[-1][0] is self._records[self._position].get(module):
            self._pop()

    def _push(self, module: nn.Module) -> _Record:
        record = self._records[self._position].setdefault(module, _Record())
        self._stack.append((record, self._clock.now()))
        return record

    def _pop(self) -> None:
        record, started = self._stack.pop()
        intervals = record.timed if self._meter is None else record.counted
        intervals.append((started, self._clock.now()))

    def _count(self, flops: float) -> None:
        for record, _ in self._stack:
            record.timed_flops += flops

    def _count_head(self, position: int, output: DeferredLogits) -> None:
        """Count the product of a head that the loss computes, in the head and what contains it."""
        flops = 2.0 * output.hidden.numel() * len(output.weight)
        for module, record in self._records[position].items():
            if any(output.is_of(inner) for inner in module.modules()):
                record.loss_flops += flops

    # Results

    def _costs(self, position: int, layer: ProfiledLayer) -> Iterator[ModuleCost]:
        modules = [("", layer.module, layer.level), *self._inner_modules(layer)]
        for name, module, level in modules:
            flops, seconds, timed_flops = self._sums(position, module)
            elements = sum(torch.Size(shard_of(p).shape).numel() for p in module.parameters())
            yield ModuleCost(
                ".".join(part for part in (layer.name, name) if part),
                type(module).__name__ if name else layer.kind,
                level,
                elements,
                flops,
                seconds,
                timed_flops,
            )

    def _sums(self, position: int, module: nn.Module) -> tuple[float, float, float]:
        """Return FLOPs, seconds, and FLOPs within them, per micro-batch."""
        record = self._records[position].get(module)
        if record is not None:
            return record.flops, self._seconds(record, self._timed[position]), record.timed_flops
        # A container such as nn.ModuleList does not run itself.
        sums = [self._sums(position, child) for child in module.children()]
        flops, seconds, timed_flops = (sum(parts) for parts in zip((0, 0, 0), *sums, strict=True))
        return flops, seconds, timed_flops

    def _seconds(self, record: _Record, runs: int) -> float:
        intervals = record.timed if runs else record.counted
        return sum(self._clock.durations(intervals)) * 1e-9 / max(1, runs)


class _FlopMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that calls `count` with the FLOPs of each operation."""

    def __init__(self, count: Callable[[float], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        flops = operation_flops(func, args, kwargs, result)
        # Placeholders of modules on other ranks compute shapes on the meta device.
        if flops and not any(isinstance(x, Tensor) and x.is_meta for x in args):
            self._count(flops)
        return result


def _is_in_backward() -> bool:
    """Return whether autograd runs a backward, whose forwards are recomputations."""
    return torch._C._current_graph_task_id() != -1
