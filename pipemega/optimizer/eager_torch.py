"""torch's optimizers without torch._dynamo, which a run without `torch.compile` does not need.

torch.optim imports it in the constructor and in the step, only to keep `torch.compile` out of them:
0.3 s of every process at start-up.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

# The attribute in which torch keeps the function that `torch._dynamo.disable` returned.
_DISABLED = "__dynamo_disable"


def build_eagerly(
    kind: type[Any], groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> Optimizer:
    """Return `kind(groups, **arguments)`, whose `step` does not import torch._dynamo either.

    The type, the hooks and the results are those of torch.
    """
    with without_dynamo([getattr(Optimizer.add_param_group, "__wrapped__", None)]):
        optimizer: Optimizer = kind([dict(group) for group in groups], **arguments)
    if kind.__module__.startswith("torch.optim") and not optimizer.defaults.get("differentiable"):
        # As torch decorates it, without the graph breaks: they only matter in a compiled function.
        step = Optimizer.profile_hook_step(torch.no_grad()(inspect.unwrap(kind.step)))
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


@contextmanager
def without_dynamo(functions: Iterable[Any]) -> Iterator[None]:
    """Context in which functions run as they are, if torch._dynamo is not imported yet.

    Args:
        functions: that `torch._disable_dynamo` decorates; read only if needed. None is skipped.
    """
    wanted = [] if "torch._dynamo" in sys.modules else functions
    eager = [f for f in wanted if f is not None and not hasattr(f, _DISABLED)]
    for function in eager:
        setattr(function, _DISABLED, function)
    try:
        yield
    finally:
        for function in eager:
            delattr(function, _DISABLED)
