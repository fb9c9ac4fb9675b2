"""Small runs with a fault on one rank, and the injection of the fault."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipemega.engine.engine import Engine
from tests.ranks.training_runs import build, data


class Fault(NamedTuple):
    """A fault on rank `rank`, at the `call`-th call of its layer `position`."""

    what: str  # "raise", "raise in backward", "kill", "hang", "interrupt"
    rank: int
    position: int
    call: int = 1


def run_with(fault: Fault, config: Mapping[str, Any]) -> None:
    """Run two steps of a small GPT, with a fault in the first."""
    engine = build(config)
    if engine.mesh.rank == fault.rank:
        inject(engine, fault)
    for step in range(2):
        engine.train_batch(data(engine, step))


def inject(engine: Engine, fault: Fault) -> None:
    """Inject `fault` into this rank's layer at `position`."""
    layer = next(
        module
        for name, module in engine.module.named_modules()
        if name.endswith(f"layers.{fault.position}")
    )
    calls = iter(range(1, 1000))
    action = ACTIONS[fault.what.removesuffix(" in backward")]

    def act_when_due(*_: Any) -> None:
        if next(calls) == fault.call:
            action()

    if fault.what.endswith("in backward"):
        layer.register_forward_hook(
            lambda module, args, output: _BackwardHook.apply(output, act_when_due)
        )
    else:
        layer.register_forward_pre_hook(act_when_due)


def _raise() -> None:
    raise ValueError("injected error")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    time.sleep(5.0)


ACTIONS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "kill": _kill,
    "hang": _hang,
    "interrupt": _interrupt,
}


class _BackwardHook(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.action()
        return grad, None
