"""What goes wrong, and where: a fault is an action before the n-th call of something in a room.

A room names the method (or function) that is called there. With `step`, calls count from the
moment when so many steps are done: the save after step 4 comes while 4 steps are done.
"""

import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega.checkpoint.disk import LocalDisk
from pipemega.data.collate import stack_samples
from pipemega.training import Trainer
from tests.ranks.checkpoint_run import Sentences
from tests.ranks.faults import _BackwardHook

if TYPE_CHECKING:
    from tests.faults.training import Book

SPARK = "a spark flew"


@dataclass(frozen=True)
class Fault:
    """What happens where.

    Args:
        action: a name in `ACTIONS`.
        room: a name in `ROOMS`, "disk: <function of os>", "wandb: <method>", or a span of time:
            "start" (from the first moment of the process), "step" or "save" (from the beginning
            of the one after `step` steps).
        rank: on which rank; None for all.
        step: steps done before.
        skip: calls that go well first.
        fraction: of a step or a save: when in it; 1 is as long as the one before it took. Of the
            start: seconds.
    """

    action: str
    room: str
    rank: int | None = 0
    step: int = 0
    skip: int = 0
    fraction: float = 0.0

    def __str__(self) -> str:
        where = f"{self.action} in {self.room} on rank {self.rank}, step {self.step}"
        return f"{where}, call {self.skip}, fraction {self.fraction:.3f}"


class Readable(Sentences):
    """A data set and, below, a collate function before which something can happen."""

    def before(self) -> None:
        pass

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.before()
        return super().__getitem__(index)


class Stacked:
    def before(self) -> None:
        pass

    def __call__(self, samples: list[Any]) -> Any:
        self.before()
        return stack_samples(samples)


def _raise() -> None:
    raise ValueError(SPARK)


def _refuse() -> None:
    raise OSError(5, "Input/output error")


def _sleep() -> None:
    while True:
        time.sleep(1.0)


def _sleep_in_c() -> None:
    """Out of reach of Python's signal handlers."""
    dist.distributed_c10d._get_default_store().wait(["never written"], timedelta(hours=1))


def _nap() -> None:
    time.sleep(3.0)


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


ACTIONS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "refuse": _refuse,
    "kill": _signal(signal.SIGKILL),
    # As a node that swaps, or a container that is paused.
    "freeze": _signal(signal.SIGSTOP),
    "hang": _sleep,
    "hang in C": _sleep_in_c,
    "nap": _nap,
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGUSR1": _signal(signal.SIGUSR1),
    "SIGINT": _signal(signal.SIGINT),
}


class Owner(Protocol):
    """Gives the object and the name of its method in which a rank meets the room; None: nowhere."""

    def __call__(self, trainer: Trainer) -> tuple[Any, str] | None: ...


def _first_layer(trainer: Trainer) -> nn.Module:
    return next(
        module
        for name, module in trainer.engine.module.named_modules()
        if name.split(".")[-2:-1] == ["layers"]
    )


def _loss(trainer: Trainer) -> tuple[Any, str] | None:
    executor = trainer.engine._executor
    return None if executor._loss_fn is None else (executor, "_loss_fn")


def _loader(trainer: Trainer) -> Any:
    loader = trainer.engine.loader
    assert loader is not None
    return loader


ROOMS: dict[str, Owner] = {
    "layer forward": lambda t: (_first_layer(t), "forward"),
    "layer backward": lambda t: (_Backward(_first_layer(t)), "run"),
    "loss": _loss,
    "data set": lambda t: (_loader(t).dataset, "before"),
    "collate": lambda t: (_loader(t)._reader._collate, "before"),
    "gradient reduction": lambda t: (t.engine._step, "_reduce"),
    "all-reduce of the step": lambda t: (t.engine._step, "_shares"),
    "gathering of parameters": lambda t: (t.engine._step.targets, "publish"),
    "optimizer": lambda t: (t.engine.optimizer, "step"),
    "scheduler": lambda t: (t.engine.lr_scheduler, "step"),
    "monitor sink": lambda t: (t.monitor._sinks[-1], "write") if t.monitor._sinks else None,
    "checkpoint writer": lambda t: (LocalDisk, "create"),
}


class _Backward:
    """A method that is called whenever the gradient comes out of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        layer.register_forward_hook(
            lambda module, args, output: _BackwardHook.apply(output, lambda: self.run())
        )

    def run(self) -> None:
        pass


class Wandb:
    """As much of wandb as the monitor calls; as one object, it is its own run."""

    Error = RuntimeError
    id = "a run"

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode="online"))

    def login(self, **_: Any) -> bool:
        return True

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **_: Any) -> "Wandb":
        return self

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, point: Any) -> None:
        pass

    def finish(self) -> None:
        pass


class Trigger:
    """Acts once, when it is due."""

    def __init__(self, fault: Fault, book: "Book") -> None:
        self._fault, self._book = fault, book
        self._left, self._lock = fault.skip, threading.Lock()
        self._done = False

    def strike(self) -> None:
        # Not on the way from a rank's own memory: a killed rank must have written it.
        self._book.write(struck=time.monotonic(), what=str(self._fault))
        ACTIONS[self._fault.action]()

    def called(self, steps_done: int) -> None:
        with self._lock:
            if self._done or steps_done < self._fault.step:
                return
            self._left -= 1
            if self._left >= 0:
                return
            self._done = True
        self.strike()

    def after(self, seconds: float) -> None:
        """From a thread: while the rank is at whatever it is at."""
        timer = threading.Timer(seconds, self.strike)
        timer.daemon = True
        timer.start()


def plant_before(fault: Fault, book: "Book") -> None:
    """What happens, or begins, before there is an engine."""
    trigger = Trigger(fault, book)
    if fault.room == "start":
        trigger.after(fault.fraction)
    elif fault.room.startswith("wandb: "):
        stand_in = Wandb()
        _wrap(stand_in, fault.room.removeprefix("wandb: "), lambda: trigger.called(fault.step))
        sys.modules["wandb"] = cast(Any, stand_in)


def plant(fault: Fault, trainer: Trainer, book: "Book") -> None:
    """Lets `fault` happen in this rank's run."""
    trigger, engine = Trigger(fault, book), trainer.engine
    if fault.room in ("step", "save"):
        _plant_in_time(fault, trigger, trainer)
    elif fault.room.startswith("disk: "):
        _wrap(os, fault.room.removeprefix("disk: "), lambda: trigger.called(engine.global_steps))
    elif fault.room in ROOMS:
        owner = ROOMS[fault.room](trainer)
        if owner is not None:
            _wrap(*owner, lambda: trigger.called(engine.global_steps))


def _wrap(owner: Any, name: str, before: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def then(*args: Any, **kwargs: Any) -> Any:
        before()
        return real(*args, **kwargs)

    setattr(owner, name, then)


def _plant_in_time(fault: Fault, trigger: Trigger, trainer: Trainer) -> None:
    """At a part of the time that the step, or the save, before it took."""
    name = {"step": "train_step", "save": "save"}[fault.room]
    real, took = getattr(trainer, name), 0.02

    def timed(*args: Any) -> Any:
        nonlocal took
        if trainer.engine.global_steps == fault.step:
            # Of a save in the background the run waits for a small part only.
            trigger.after(fault.fraction * max(took, 0.05 if fault.room == "save" else 0.0))
        started = time.monotonic()
        result = real(*args)
        took = time.monotonic() - started
        return result

    setattr(trainer, name, timed)


def let_the_clock_jump(seed: int) -> None:
    """From now on the time of day is off by hours, by others each time that it is asked for."""
    chance, real = random.Random(seed), time.time
    time.time = lambda: real() + chance.choice([-30, -5, -0.01, 0, 0.01, 3, 20]) * 3600.0


def die_with_parent() -> None:
    """Nothing that a test starts outlives it: PR_SET_PDEATHSIG."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def poison(
    layer: nn.Module, microbatch: int, of: int, value: float, due: Callable[[], bool]
) -> None:
    """The gradient that leaves `layer` in the backward of one micro-batch is full of `value`.

    Micro-batches pass a stage in order, one forward each; also when the step is run once more, to
    find out where that came from.
    """
    passes = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal passes
        if not (due() and torch.is_grad_enabled()):
            return output
        mine, passes = passes % of == microbatch, passes + 1
        return _Poison.apply(output, value) if mine else output

    layer.register_forward_hook(hook)


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(grad, ctx.value), None
