"""Traces a module with torch.fx; its submodules stay modules.

A module of torch.nn is one call of the graph. A module of the user is traced through, so that a
stage boundary may be inside it. If that is not possible, because its forward depends on values or
on `self.training`, or draws random numbers, the module is one call too.
"""

import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipemega.errors import ConfigError

TRAINING = "training"


@dataclass(frozen=True, eq=False)
class TracedModule:
    """The calls of a module.

    Args:
        graph: placeholders are the arguments of forward, targets are names in the module.
        additions: target -> tensor or module that the module itself does not have.
        opaque: name of a submodule that could not be traced -> the reason.
    """

    graph: fx.Graph
    additions: Mapping[str, Any] = field(default_factory=dict)
    opaque: Mapping[str, str] = field(default_factory=dict)


def trace(module: nn.Module, arguments: Sequence[str], name: str) -> TracedModule:
    """Trace `module.forward`.

    Args:
        arguments: the arguments of forward that are given; others have their defaults.
        name: of the module, for messages.

    Raises:
        ConfigError: names the line that cannot be traced, and what to do; the same on every rank.
    """
    tracer = _Tracer(arguments)
    rng_state = torch.get_rng_state()
    attributes = set(vars(module))
    try:
        with tracer.recorded_training():
            graph = tracer.trace(module)
        _check_random_numbers(rng_state)
        graph.lint()
        additions = {key: vars(module)[key] for key in vars(module).keys() - attributes}
    except Exception as error:
        raise ConfigError(
            f"from_module cannot trace {name}.forward: {_reason(error)}; move this code into a "
            f"submodule, which is then one call, or pass exec_seq=[...]: the names of the "
            f"submodules in the order of their calls",
            on_every_rank=True,
        ) from error
    finally:
        torch.set_rng_state(rng_state)
        for key in vars(module).keys() - attributes:
            delattr(module, key)
    return TracedModule(graph, additions, tracer.opaque)


class _NotTraceable(Exception):
    """The graph would not compute what the module computes."""


class _Tracer(fx.Tracer):
    """Traces through modules of the user where that gives the same results."""

    proxy_buffer_attributes = True

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__()
        self._arguments = arguments
        self._modes = _context_modes()
        self._opaque_modules: set[nn.Module] = set()
        self.opaque: dict[str, str] = {}

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        names = self._arguments
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in names]

        def forward(root: Any, *values: Any) -> Any:
            return root_fn(root, **dict(zip(names, values, strict=True)))

        return forward, [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self._opaque_modules:
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        nodes, calls = list(self.graph.nodes), dict(self.num_calls)
        stack, rng_state = dict(self.module_stack), torch.get_rng_state()
        try:
            result = super().call_module(m, forward, args, kwargs)
            _check_random_numbers(rng_state)
            return result
        except Exception as error:
            self.opaque[name] = _reason(error)
        for node in list(self.graph.nodes)[: len(nodes) - 1 : -1]:
            self.graph.erase_node(node)
        self.num_calls = calls
        self.module_stack.clear()
        self.module_stack.update(stack)
        torch.set_rng_state(rng_state)
        self._opaque_modules.add(m)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _context_modes() != self._modes:
            raise _NotTraceable(
                "it changes the gradient or autocast mode (torch.no_grad, torch.autocast), which a "
                "graph of calls does not contain"
            )
        return super().create_node(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        # Without the cache: it would return nodes that `call_module` has erased.
        return super().getattr(attr, attr_val, {})

    @contextmanager
    def recorded_training(self) -> Iterator[None]:
        """Record reads of `self.training` in the graph, so that train() and eval() work.

        torch.fx would insert the current value as a constant.
        """

        def read(module: nn.Module) -> Any:
            return self.create_proxy("get_attr", TRAINING, (), {})

        def write(module: nn.Module, mode: bool) -> None:
            vars(module)[TRAINING] = mode

        nn.Module.training = property(read, write)  # type: ignore[assignment]
        try:
            yield
        finally:
            del nn.Module.training


def _context_modes() -> tuple[bool, ...]:
    devices = ("cpu", "cuda")
    return (torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in devices))


def _check_random_numbers(before: Tensor) -> None:
    if not torch.equal(torch.get_rng_state(), before):
        raise _NotTraceable(
            "it draws random numbers whose shape does not depend on the input, so the graph would "
            "contain them as constants"
        )


def _reason(error: Exception) -> str:
    """Return file, line and code of the user's part of the traceback, and the message."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and frame.filename != __file__
    ]
    message = str(error).partition("\n")[0]
    if not frames:
        return message
    last = frames[-1]
    code = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"{last.filename}:{last.lineno}: {code!r}: {message}"
