"""Reads `exec_seq`: the submodules of a module in the order of their calls, written by the user.

["conv1", "bn1", "relu", "layer1", SPLIT, "layer2", (lambda x: x.flatten(1), "behind"), "fc"]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import fx, nn

from pipemega.config.name_suggestions import did_you_mean
from pipemega.errors import ConfigError
from pipemega.pipeline.captured_modules import captured_names
from pipemega.pipeline.module_tracer import TracedModule
from pipemega.pipeline.spec import Function


class _Split:
    """The type of `SPLIT`."""

    def __repr__(self) -> str:
        return "SPLIT"


SPLIT: Final = _Split()
"""Entry of `exec_seq`: a stage starts here."""

_FRONT, _BEHIND = "front", "behind"


@dataclass(eq=False)
class LayerSequence:
    """The layers of an `exec_seq`.

    Args:
        traced: the calls in the order of the sequence.
        cuts: indices of the nodes at which layers after the first one start.
        names: of the layers.
        splits: positions of the layers at which the user starts a stage.
    """

    traced: TracedModule
    cuts: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Entry:
    """One layer: a submodule or a function, with functions before and after it."""

    name: str
    calls: list[Any]


def read_sequence(exec_seq: Sequence[Any], module: nn.Module) -> LayerSequence:
    """Return the layers of `exec_seq`.

    Raises:
        ConfigError: an entry is no submodule, function or SPLIT; a function has nothing to be
            in front of or behind; trainable parameters are left out; the same on every rank.
    """
    if isinstance(exec_seq, str) or not isinstance(exec_seq, Sequence):
        raise _error(f"exec_seq is {exec_seq!r}: give a list of names of submodules")
    entries, splits = _entries(exec_seq, module)
    _check_complete(entries, module)
    graph = fx.Graph()
    additions: dict[str, Any] = {}
    value = graph.placeholder("x")
    cuts: list[int] = []
    names: list[str] = []
    count = 1
    for entry in entries:
        if names:
            cuts.append(count)
        names.append(entry.name)
        for call in entry.calls:
            target = call
            if not isinstance(call, str):
                target = f"function_{len(additions)}"
                additions[target] = Function(call)
            value = graph.call_module(target, (value,))
            count += 1
    graph.output(value)
    return LayerSequence(TracedModule(graph, additions), cuts, names, splits)


def _entries(exec_seq: Sequence[Any], module: nn.Module) -> tuple[list[_Entry], list[int]]:
    entries: list[_Entry] = []
    splits: list[int] = []
    in_front: list[Any] = []
    for number, item in enumerate(exec_seq):
        where = f"exec_seq[{number}]"
        if isinstance(item, _Split):
            if not entries or in_front or len(entries) in splits:
                raise _error(f"{where}: SPLIT must be between two layers")
            splits.append(len(entries))
        elif isinstance(item, str):
            found = list(_expanded(item, module, where))
            found[0].calls[:0] = in_front
            in_front = []
            entries += found
        elif isinstance(item, tuple) and len(item) == 2 and item[1] in (_FRONT, _BEHIND):
            _check_function(item[0], where)
            if item[1] == _FRONT:
                in_front.append(item[0])
            elif entries and len(entries) not in splits:
                entries[-1].calls.append(item[0])
            else:
                raise _error(f"{where}: 'behind' needs a layer before it")
        elif callable(item) and not isinstance(item, nn.Module | type):
            _check_function(item, where)
            entries.append(_Entry(getattr(item, "__name__", "function"), [*in_front, item]))
            in_front = []
        else:
            raise _error(
                f"{where} is {item!r}: an entry is the name of a submodule, a function, (function, "
                f"'front'), (function, 'behind') or SPLIT"
            )
    if in_front:
        raise _error("exec_seq ends with a 'front' function, and no layer follows: write 'behind'")
    if len(entries) in splits:
        raise _error(f"exec_seq[{len(exec_seq) - 1}]: SPLIT must be between two layers")
    if not entries:
        raise _error("exec_seq is empty: give the names of submodules in the order of their calls")
    return entries, splits


def _expanded(name: str, module: nn.Module, where: str) -> Iterator[_Entry]:
    """Yield the layers of a submodule: the children of a Sequential or ModuleList, or itself."""
    known = {path: part for path, part in module.named_modules(remove_duplicate=False) if path}
    if name not in known:
        raise _error(
            f"{where}: {type(module).__name__} has no submodule {name!r}{did_you_mean(name, known)}"
        )
    part = known[name]
    if type(part) in (nn.Sequential, nn.ModuleList) and len(part):
        for child, _ in part.named_children():
            yield from _expanded(f"{name}.{child}", module, where)
    else:
        yield _Entry(type(part).__name__, [name])


def _check_function(function: Any, where: str) -> None:
    if not callable(function):
        raise _error(f"{where}: {function!r} is not a function")
    captured: dict[str, str] = captured_names(function)
    if captured:
        used = ", ".join(f"{name} ({kind})" for name, kind in captured.items())
        raise _error(
            f"{where} is a function that uses {used}, whose parameters no layer contains: make it "
            f"a submodule and write its name"
        )


def _check_complete(entries: Sequence[_Entry], module: nn.Module) -> None:
    called = [call for entry in entries for call in entry.calls if isinstance(call, str)]
    covered = {id(p) for name in called for p in module.get_submodule(name).parameters()}
    missing = [
        name for name, p in module.named_parameters() if p.requires_grad and id(p) not in covered
    ]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise _error(
            f"exec_seq leaves out trainable parameters of {type(module).__name__}: "
            f"{', '.join(missing[:8])}{more}: add the names of their submodules, or set "
            f"requires_grad=False if the module does not use them"
        )


def _error(message: str) -> ConfigError:
    return ConfigError(message, on_every_rank=True)
