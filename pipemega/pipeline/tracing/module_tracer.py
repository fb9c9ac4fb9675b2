"""Traces a module with torch.fx; its submodules stay modules.

A module of torch.nn is one call of the graph. A module of the user is traced through, so that a
stage boundary may be inside it. If that is not possible, because its forward depends on values or
on `self.training`, or draws random numbers, the module is one call too.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import setitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipemega.errors import ConfigError, PipelineError
from pipemega.pipeline.model.batch_norm import DeferredBatchNorm
from pipemega.pipeline.tracing.module_source import copy_structure

TRAINING = "training"

_CONSTRUCTORS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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


def trace(
    module: nn.Module, arguments: Sequence[str], examples: Sequence[Any] | None
) -> TracedModule:
    """Trace `module.forward`.

    Args:
        arguments: the arguments of forward that are given; others have their defaults.
        examples: their values; decide conditions on shapes. None: unknown.

    Raises:
        ConfigError: names the line that cannot be traced, and what to do; the same on every rank.
    """
    try:
        tracer = _Tracer(module, arguments, examples, training=True)
        graph, additions = tracer.record()
        if tracer.read_mode is not None:
            evaluated, _ = _Tracer(module, arguments, examples, training=False).record()
            if graph.python_code("self").src != evaluated.python_code("self").src:
                raise _NotTraceable(f"{tracer.read_mode}: train() and eval() make different calls")
    except Exception as error:
        shapes = "" if examples else ", or give example_inputs if it depends on shapes only"
        raise ConfigError(
            f"from_module cannot trace {type(module).__name__}.forward: {_reason(error)}; move "
            f"this code into a submodule, which is then one call{shapes}; or pass exec_seq=[...]: "
            f"the names of the submodules in the order of their calls",
            on_every_rank=True,
        ) from error
    return TracedModule(graph, additions, tracer.opaque)


class _NotTraceable(Exception):
    """The graph would not compute what the module computes."""


class _Tracer(fx.Tracer):
    """Traces through modules of the user where that gives the same results.

    Args:
        root, arguments, examples: see `trace`.
        training: decides conditions on `self.training` in the root and in large submodules.

    Attributes:
        opaque: name of a submodule that could not be traced -> the reason.
        read_mode: where a condition on `self.training` was decided; None: nowhere.
    """

    proxy_buffer_attributes = True

    def __init__(
        self,
        root: nn.Module,
        arguments: Sequence[str],
        examples: Sequence[Any] | None,
        *,
        training: bool,
    ) -> None:
        super().__init__()
        self._module, self._arguments, self._training = root, arguments, training
        self._shapes = None if examples is None else _Shapes(root, examples)
        self._modes = _context_modes()
        self._elements = sum(p.numel() for p in root.parameters())
        self._open: list[nn.Module] = []
        self.opaque: dict[str, str] = {}
        self.read_mode: str | None = None
        self._opaque_modules: set[nn.Module] = set()

    def record(self) -> tuple[fx.Graph, dict[str, Any]]:
        """Return the graph of the root, and name -> constant that the trace has computed."""
        rng_state, before = torch.get_rng_state(), set(vars(self._module))
        with _unchanged(self._module):
            try:
                with self._recorded_training(), self._recorded_constructors():
                    graph = self.trace(self._module)
                _check_random_numbers(rng_state)
                new = vars(self._module).keys() - before
                # torch.fx puts constants into the module.
                return graph, {key: vars(self._module)[key] for key in new}
            finally:
                torch.set_rng_state(rng_state)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        names = self._arguments
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in names]

        def forward(root: Any, *values: Any) -> Any:
            return root_fn(root, **dict(zip(names, values, strict=True)))

        return forward, [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self._opaque_modules or has_hooks(m) or isinstance(m, DeferredBatchNorm):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._shapes is not None and self._shapes.evaluating:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        nodes, calls = list(self.graph.nodes), dict(self.num_calls)
        stack, rng_state = dict(self.module_stack), torch.get_rng_state()
        self._open.append(m)
        try:
            with _unchanged(m):
                result = super().call_module(m, forward, args, kwargs)
                _check_random_numbers(rng_state)
            return result
        except Exception as error:
            self.opaque[name] = _reason(error)
        finally:
            self._open.pop()
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

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._shapes is not None and self._shapes.evaluating:
            return attr_val
        # Without the cache: it would return nodes that `call_module` has erased.
        return super().getattr(attr, attr_val, {})

    def to_bool(self, obj: fx.Proxy) -> bool:
        # A small submodule becomes one call instead, which needs no assumption.
        if all(is_large(module, self._elements) for module in self._open):
            where = _line(traceback.extract_stack())
            if obj.node.target == TRAINING:
                self.read_mode = self.read_mode or where
                return self._training
            value = None if self._shapes is None else self._shapes.value(obj.node)
            if isinstance(value, bool):
                self.create_proxy("call_function", check_condition, (obj, value, where), {})
                return value
        return super().to_bool(obj)

    @contextmanager
    def _recorded_training(self) -> Iterator[None]:
        """Record reads of `self.training` in the graph, so that train() and eval() work.

        torch.fx would insert the current value as a constant.
        """

        def read(module: nn.Module) -> Any:
            if self._shapes is not None and self._shapes.evaluating:
                return False
            return self.create_proxy("get_attr", TRAINING, (), {})

        def write(module: nn.Module, mode: bool) -> None:
            vars(module)[TRAINING] = mode

        nn.Module.training = property(read, write)  # type: ignore[assignment]
        try:
            yield
        finally:
            del nn.Module.training

    @contextmanager
    def _recorded_constructors(self) -> Iterator[None]:
        """Record functions such as torch.ones(rows, columns) whose sizes are values of the graph.

        They have no tensor among their arguments, so torch.fx does not see them.
        """
        originals = {name: getattr(torch, name) for name in _CONSTRUCTORS}

        def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if any(isinstance(value, fx.Proxy) for value in pytree.tree_leaves((args, kwargs))):
                    return self.create_proxy("call_function", function, args, kwargs)
                return function(*args, **kwargs)

            return call

        for name, function in originals.items():
            setattr(torch, name, recorded(function))
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(torch, name, function)


class _Value(fx.Proxy):
    """A value of the graph; `value[index] = other` is a call too."""

    def __setitem__(self, index: Any, other: Any) -> None:
        self.tracer.create_proxy("call_function", setitem, (self, index, other), {})


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Undo what the body assigns to attributes of the modules in `module`.

    Raises:
        _NotTraceable: an attribute had another value before, so each call would change it.
    """
    before = []
    for path, part in module.named_modules():
        tensors = (vars(part).get(name, {}) for name in ("_parameters", "_buffers"))
        before += [(path, at, dict(at)) for at in (vars(part), *tensors)]
    changed = None
    try:
        yield
    finally:
        for path, at, old in before:
            for key in [key for key in at if key not in old]:
                del at[key]
            for key in [key for key in old if at.get(key, before) is not old[key]]:
                at[key] = old[key]
                changed = ".".join(filter(None, ("self", path, key)))
    if changed is not None:
        raise _NotTraceable(f"it assigns {changed}, which a graph of calls does not contain")


def has_hooks(module: nn.Module) -> bool:
    """Return whether functions of the user run before or after forward or backward."""
    return any(hooks for name, hooks in vars(module).items() if name in _HOOKS)


class _Shapes:
    """Computes values of a graph on the meta device.

    Args:
        module: the traced module.
        examples: the values of the placeholders, in order.

    Attributes:
        evaluating: modules are called for their results, not to be recorded.
    """

    def __init__(self, module: nn.Module, examples: Sequence[Any]) -> None:
        self._module = copy_structure(module, "meta")
        self._examples = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), list(examples))
        self._values: dict[fx.Node, Any] = {}
        self.evaluating = False

    def value(self, node: fx.Node) -> Any:
        """Return the value of `node`; None if it is unknown without the values of tensors."""
        self.evaluating = True
        try:
            with torch.no_grad():
                return self._value(node)
        # Any operation may need values or have no kernel for the meta device.
        except Exception:
            return None
        finally:
            self.evaluating = False

    def _value(self, node: fx.Node) -> Any:
        if node not in self._values:
            if node.op == "placeholder":
                number = [n for n in node.graph.nodes if n.op == "placeholder"].index(node)
                self._values[node] = self._examples[number]
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
                run = fx.Interpreter(self._module, garbage_collect_values=False, graph=node.graph)
                self._values[node] = getattr(run, node.op)(node.target, args, kwargs)
        return self._values[node]


def check_condition(value: Any, expected: bool, where: str) -> None:
    """Raise PipelineError if a condition that decided the trace has another value."""
    if bool(value) != expected:
        raise PipelineError(
            f"{where}: this condition was {expected} for the example inputs of from_module, which "
            f"decided the calls of the layers, and is {not expected} for this micro-batch: use "
            f"inputs with the shapes of the example, or move this code into a submodule"
        )


def is_large(module: nn.Module, elements: int) -> bool:
    """Return whether a submodule has so many of `elements` parameters that it should be cut.

    Else the largest stage would be much larger than the others.
    """
    return sum(p.numel() for p in module.parameters()) > elements / 4


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
    where = _line(traceback.extract_tb(error.__traceback__))
    message = str(error).partition("\n")[0]
    return f"{where}: {message}" if where else message


def _line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line that is neither in torch nor in this file."""
    others = (__file__, contextlib.__file__)
    for frame in reversed(frames):
        if "/torch/" not in frame.filename and frame.filename not in others:
            return f"{frame.filename}:{frame.lineno}: {frame.line!r}"
    return ""
