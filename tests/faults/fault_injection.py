"""Fault injection: an action before the n-th call of a method or function.

A place names that method. With `step`, calls are counted from the time when that many steps are
done: the save after step 4 runs while 4 steps are done.
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

from pipemega.data.sample_reader import stack_samples
from pipemega.engine.step_runner import StepRunner
from pipemega.storage.filesystem import LocalStorage
from pipemega.tensor_parallel.deferred_logits import takes_deferred_logits
from pipemega.training import Trainer
from tests.ranks.checkpoint.checkpoint_runs import Sentences
from tests.ranks.injected_faults import _BackwardHook

if TYPE_CHECKING:
    from tests.faults.training import EventLog

INJECTED = "injected error"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        action: a name in `ACTIONS`.
        place: a name in `PLACES`, "disk: <function of os>", "wandb: <method>", or a period:
            "start" (from the start of the process), "step" or "save" (from the start of the one
            after `step` steps).
        rank: the rank; None for all ranks.
        step: steps done before the fault.
        skip: calls before the fault.
        fraction: time of the fault in the step or save, in units of the duration of the previous
            one; for "start" in seconds.
    """

    action: str
    place: str
    rank: int | None = 0
    step: int = 0
    skip: int = 0
    fraction: float = 0.0

    def __str__(self) -> str:
        where = f"{self.action} in {self.place} on rank {self.rank}, step {self.step}"
        return f"{where}, call {self.skip}, fraction {self.fraction:.3f}"


class HookedDataset(Sentences):
    """A dataset with a method to inject faults before."""

    def before(self) -> None:
        pass

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.before()
        return super().__getitem__(index)


class HookedCollate:
    def before(self) -> None:
        pass

    def __call__(self, samples: list[Any]) -> Any:
        self.before()
        return stack_samples(samples)


def _raise() -> None:
    raise ValueError(INJECTED)


def _refuse() -> None:
    raise OSError(5, "Input/output error")


def _sleep() -> None:
    while True:
        time.sleep(1.0)


def _sleep_in_c() -> None:
    """Block in C++, where Python runs no signal handler."""
    dist.distributed_c10d._get_default_store().wait(["never written"], timedelta(hours=1))


def _nap() -> None:
    time.sleep(3.0)


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


ACTIONS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "refuse": _refuse,
    "kill": _signal(signal.SIGKILL),
    # Like a node that swaps, or a paused container.
    "freeze": _signal(signal.SIGSTOP),
    "hang": _sleep,
    "hang in C": _sleep_in_c,
    "nap": _nap,
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGUSR1": _signal(signal.SIGUSR1),
    "SIGINT": _signal(signal.SIGINT),
}


class Owner(Protocol):
    """Returns the object and the name of its method; None if this rank has none."""

    def __call__(self, trainer: Trainer) -> tuple[Any, str] | None: ...


def _first_layer(trainer: Trainer) -> nn.Module:
    return next(
        module
        for name, module in trainer.engine.module.named_modules()
        if name.split(".")[-2:-1] == ["layers"]
    )


def _loss(trainer: Trainer) -> tuple[Any, str] | None:
    model = trainer.engine.steps.executor._model
    return None if model.loss_fn is None else (model, "loss_fn")


def _loader(trainer: Trainer) -> Any:
    loader = trainer.engine.loader
    assert loader is not None
    return loader


PLACES: dict[str, Owner] = {
    "layer forward": lambda t: (_first_layer(t), "forward"),
    "layer backward": lambda t: (_Backward(_first_layer(t)), "run"),
    "loss": _loss,
    "data set": lambda t: (_loader(t).dataset, "before"),
    "collate": lambda t: (_loader(t)._reader._collate, "before"),
    "gradient reduction": lambda t: (t.engine.steps.optimizer_step.masters, "reduce"),
    "all-reduce of the step": lambda t: (t.engine.steps.optimizer_step, "_local_stats"),
    "gathering of parameters": lambda t: (t.engine.steps.optimizer_step.masters, "copy_to_model"),
    "optimizer": lambda t: (t.engine.optimizer, "step"),
    "scheduler": lambda t: (t.engine.lr_scheduler, "end_step"),
    "monitor sink": lambda t: (t.monitor._sinks[-1], "write") if t.monitor._sinks else None,
    "checkpoint writer": lambda t: (LocalStorage, "create"),
}


class _Backward:
    """Its method `run` is called when backward computes the gradient of a layer's input."""

    def __init__(self, layer: nn.Module) -> None:
        layer.register_forward_hook(
            lambda module, args, output: _BackwardHook.apply(output, lambda: self.run())
        )

    def run(self) -> None:
        pass


class Wandb:
    """A fake of the wandb package and of its run."""

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

    def log(self, point: Any, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


class Trigger:
    """Injects a fault once."""

    def __init__(self, fault: Fault, log: "EventLog") -> None:
        self._fault, self._book = fault, log
        self._left, self._lock = fault.skip, threading.Lock()
        self._done = False

    def inject(self) -> None:
        # Before the action: a killed rank cannot write it later.
        self._book.write(injected=time.monotonic(), what=str(self._fault))
        ACTIONS[self._fault.action]()

    def called(self, steps_done: int) -> None:
        with self._lock:
            if self._done or steps_done < self._fault.step:
                return
            self._left -= 1
            if self._left >= 0:
                return
            self._done = True
        self.inject()

    def after(self, seconds: float) -> None:
        """Inject from a thread, whatever the rank is doing."""
        timer = threading.Timer(seconds, self.inject)
        timer.daemon = True
        timer.start()


def inject_before_start(fault: Fault, log: "EventLog") -> None:
    """Inject faults that occur, or whose time starts, before the engine exists."""
    trigger = Trigger(fault, log)
    if fault.place == "start":
        trigger.after(fault.fraction)
    elif fault.place.startswith("wandb: "):
        fake = Wandb()
        _wrap(fake, fault.place.removeprefix("wandb: "), lambda: trigger.called(fault.step))
        sys.modules["wandb"] = cast(Any, fake)


def inject(fault: Fault, trainer: Trainer, log: "EventLog") -> None:
    """Inject `fault` into this rank's run."""
    trigger, engine = Trigger(fault, log), trainer.engine
    if fault.place in ("step", "save"):
        _inject_at_time(fault, trigger, trainer)
    elif fault.place.startswith("disk: "):
        _wrap(os, fault.place.removeprefix("disk: "), lambda: trigger.called(engine.global_steps))
    elif fault.place in PLACES:
        owner = PLACES[fault.place](trainer)
        if owner is not None:
            _wrap(*owner, lambda: trigger.called(engine.global_steps))


def _wrap(owner: Any, name: str, before: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def then(*args: Any, **kwargs: Any) -> Any:
        before()
        return real(*args, **kwargs)

    # A loss that takes the input of the head must still do so.
    vars(then).update(takes_deferred_logits=takes_deferred_logits(real))
    setattr(owner, name, then)


def _inject_at_time(fault: Fault, trigger: Trigger, trainer: Trainer) -> None:
    """Inject at a fraction of the duration of the previous step or save."""
    # A step without the checkpoint that may follow it.
    owners: dict[str, tuple[Any, str]] = {
        "step": (StepRunner, "train"),
        "save": (trainer.engine.run, "save"),
    }
    owner, name = owners[fault.place]
    real, took = getattr(owner, name), 0.02

    def timed(*args: Any, **options: Any) -> Any:
        nonlocal took
        if trainer.engine.global_steps == fault.step:
            # The run waits only for a small part of a background save.
            trigger.after(fault.fraction * max(took, 0.05 if fault.place == "save" else 0.0))
        started = time.monotonic()
        result = real(*args, **options)
        took = time.monotonic() - started
        return result

    setattr(owner, name, timed)


def make_clock_jump(seed: int) -> None:
    """Make time.time() wrong by hours, differently at each call."""
    rng, real = random.Random(seed), time.time
    time.time = lambda: real() + rng.choice([-30, -5, -0.01, 0, 0.01, 3, 20]) * 3600.0


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def fill_gradient(
    layer: nn.Module, microbatch: int, of: int, value: float, due: Callable[[], bool]
) -> None:
    """Fill the gradient of the output of `layer` with `value` in one micro-batch.

    Micro-batches run in order, one forward each; also when the step is run again to find the origin
    of the value.
    """
    passes = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal passes
        if not (due() and torch.is_grad_enabled()):
            return output
        mine, passes = passes % of == microbatch, passes + 1
        return _FillGradient.apply(output, value) if mine else output

    layer.register_forward_hook(hook)


class _FillGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(grad, ctx.value), None
