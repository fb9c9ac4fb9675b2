"""Finds trainable modules and parameters that a plain function uses.

No stage owns them: they would not be trained, moved to the device of the rank, or saved.

    lambda x: model.head(x)                 a global or an enclosing variable
    def layer(x, weight=weight): ..         a default
    partial(attend, module)                 an argument
    [function, {"norm": module}]            a container in one of these
"""

import dis
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_SIZES = ("size", "dim", "numel")


def captured_names(value: Any) -> dict[str, str]:
    """Return name in the code -> class of each trainable module or tensor that `value` uses.

    Args:
        value: a function, a module, or a container of them.
    """
    found: dict[str, str] = {}
    _collect("", value, found, {})
    return found


def _collect(name: str, value: Any, found: dict[str, str], seen: dict[int, Any]) -> None:
    if isinstance(value, nn.Module):
        if any(p.requires_grad for p in value.parameters()):
            found[name] = type(value).__name__
    elif isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            found[name] = type(value).__name__
    elif id(value) not in seen:
        # Keep the value, so that no other one gets its id.
        seen[id(value)] = value
        for part_name, part in _parts(name, value):
            _collect(part_name, part, found, seen)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of what a function or a container uses."""
    if isinstance(value, partial):
        yield name, value.func
        yield from _parts(name or "an argument of partial", [*value.args, *value.keywords.values()])
    elif isinstance(value, MethodType):
        if isinstance(value.__self__, nn.Module):
            yield name, value.__self__
        elif isinstance(value.__func__, FunctionType):
            yield from _used_values(value.__func__, bound_to=value.__self__)
    elif isinstance(value, FunctionType):
        yield from _used_values(value)
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((name, part) for part in value)
    elif isinstance(call := getattr(type(value), "__call__", None), FunctionType):  # noqa: B004
        yield name, MethodType(call, value)


def _used_values(function: FunctionType, bound_to: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield each variable from outside of `function` that it uses, with its attributes."""
    variables: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            variables[name] = cell.cell_contents
    for chain, value in _loads(function.__code__, variables, function.__globals__, bound_to):
        # Do not search the functions of other files, such as those of torch.
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            yield chain, value
    defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
    yield "a default argument", defaults


def _loads(
    code: CodeType, variables: Mapping[str, Any], namespace: Mapping[str, Any], bound_to: Any
) -> Iterator[tuple[str, Any]]:
    """Yield (a.b.c, value) for each chain of attributes that `code` loads."""
    chain, value = "", None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            with suppress(Exception):
                below = getattr(value, step.argval)
                # weight.T and weight.t() use the weight, weight.shape does not.
                uses = isinstance(below, Tensor) or callable(below)
                if not (isinstance(value, Tensor) and uses) or step.argval in _SIZES:
                    chain, value = f"{chain}.{step.argval}", below
                continue
        if chain:
            yield chain, value
        chain, value = "", None
        if step.opname == "LOAD_GLOBAL" and step.argval in namespace:
            chain, value = step.argval, namespace[step.argval]
        elif step.opname == "LOAD_DEREF" and step.argval in variables:
            chain, value = step.argval, variables[step.argval]
        elif (
            bound_to is not None
            and step.opname.startswith("LOAD_FAST")
            and step.argval == code.co_varnames[0]
        ):
            chain, value = step.argval, bound_to
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loads(constant, variables, namespace, None)
