"""A pipeline from one module of the user: traced by torch.fx, or as a list of its submodules.

Reads `exec_seq`: the submodules of a module in the order of their calls, written by the user.

["conv1", "bn1", "relu", "layer1", SPLIT, "layer2", (lambda x: x.flatten(1), "behind"), "fc"]
"""

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipemega.config.name_suggestions import did_you_mean
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, short_cause
from pipemega.pipeline.model.spec import Function, LayerSpec, captured_names
from pipemega.pipeline.tracing.cut_points import (
    LayerGraph,
    ModuleParts,
    TracedSpec,
    argument_of,
    attribute,
    cut_positions,
    layer_names,
    split,
)
from pipemega.pipeline.tracing.module_source import BuiltSource, FactorySource, ModuleSource
from pipemega.pipeline.tracing.module_tracer import TracedModule, has_hooks, is_large, trace
from pipemega.random import preserve_all_rng


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
        names: names of the layers.
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


log = logging.getLogger(__name__)


class ModuleLayers:
    """The layers of one module, and their names in it.

    Args:
        source: the source of the module.
        layers: the calls of each layer.
        additions: target -> module or tensor that is not in the module.
        splits: positions of the layers at which the user starts a stage.

    Attributes:
        specs: the specs of the layers.
    """

    def __init__(
        self,
        source: ModuleSource,
        layers: Sequence[LayerGraph],
        additions: Mapping[str, Any],
        splits: Sequence[int],
    ) -> None:
        self.splits = tuple(splits)
        self._source = source
        self._names = _canonical_names(source.structure)
        self.specs = _specs(ModuleParts(source, additions), layers)
        self._parameters: list[set[str]] = []
        self._positions = self._tie_layers()

    def prepare(self, positions: Collection[int], seed: int) -> None:
        """Build the parameters of the layers at `positions`, if a factory builds the module."""
        self._source.prepare(set[str]().union(*(self._parameters[p] for p in positions)), seed)

    def logical_name(self, name: str) -> str:
        """Return the logical name of a parameter or persistent buffer of the module.

        Raises:
            ConfigError: the module does not have it, or no layer uses it.
        """
        name = self._names.get(name, name)
        if name not in self._positions:
            raise ConfigError(f"no layer of {self._source.name} has a tensor {name!r}")
        return self._positions[name]

    def state_names(self) -> dict[str, str]:
        """Return name in the module's state_dict -> logical name.

        Tied parameters have all their names. Tensors that no layer uses are left out.
        """
        state = self._source.structure.state_dict(keep_vars=True)
        canonical = {name: self._names.get(name, name) for name in state}
        return {n: self._positions[c] for n, c in canonical.items() if c in self._positions}

    def _tie_layers(self) -> dict[str, str]:
        """Tie the parameters that several layers use; return name in the module -> logical name."""
        places: dict[str, list[tuple[int, str]]] = {}
        shared: dict[str, set[int]] = {}
        for position, spec in enumerate(self.specs):
            layer = spec.build(Axis("tensor"), device="meta")
            parameters = [name for name, _ in layer.named_parameters(remove_duplicate=False)]
            buffers = [name for name, _ in layer.named_buffers(remove_duplicate=False)]
            for name in [*parameters, *buffers]:
                places.setdefault(self._names.get(name, name), []).append((position, name))
            self._parameters.append({self._names[name] for name in parameters})
            for name in self._parameters[-1]:
                shared.setdefault(name, set()).add(position)
        for name in (name for name, positions in shared.items() if len(positions) > 1):
            for position, local in places[name]:
                self.specs[position].tie(local, name)
        return {name: f"layers.{at[0][0]}.{at[0][1]}" for name, at in places.items()}


def trace_layers(
    module_or_factory: nn.Module | Callable[[], nn.Module],
    example_inputs: Any,
    exec_seq: Sequence[Any] | None,
) -> ModuleLayers:
    """Return the layers of a module; see `PipelineModule.from_module`."""
    source = _source(module_or_factory)
    module = source.structure
    if has_hooks(module):
        raise ConfigError(
            f"from_module: {type(module).__name__} has hooks of its own forward or backward, which "
            f"no layer would call: remove them, or make it a submodule of another module",
            on_every_rank=True,
        )
    splits: Sequence[int] = ()
    keywords: Callable[[Any], dict[str, Any]] | None = None
    if exec_seq is not None:
        sequence = read_sequence(exec_seq, module)
        traced, splits = sequence.traced, sequence.splits
        layers = split(traced.graph, sequence.cuts, sequence.names, None)
    else:
        arguments, unpack = _arguments(module, example_inputs)

        def keywords(inputs: Any) -> dict[str, Any]:
            at = enumerate(arguments)
            return {name: unpack(inputs, n, name) if unpack else inputs for n, name in at}

        examples = None if example_inputs is None else [*keywords(example_inputs).values()]
        traced = trace(module, arguments, examples)
        cuts = cut_positions(traced.graph, module)
        names = layer_names(traced.graph, cuts, module)
        layers = split(traced.graph, cuts, names, unpack)
        _log_uncut(traced, module)
    result = ModuleLayers(source, layers, traced.additions, splits)
    if example_inputs is not None:
        _compare(result.specs, source, example_inputs, keywords)
    return result


def _source(module_or_factory: Any) -> ModuleSource:
    if isinstance(module_or_factory, nn.Module):
        return BuiltSource(module_or_factory)
    if callable(module_or_factory):
        return FactorySource(module_or_factory)
    raise ConfigError(
        f"from_module takes an nn.Module or a function that builds one, not "
        f"{type(module_or_factory).__name__}; a list of layers is PipelineModule([...])",
        on_every_rank=True,
    )


def _specs(parts: ModuleParts, layers: Sequence[LayerGraph]) -> tuple[TracedSpec, ...]:
    """Return the specs; a submodule that an earlier layer has is copied."""
    structure, seen = parts.source.structure, set[int]()
    specs = []
    for layer in layers:
        copied, here = [], set[int]()
        for target in layer.targets:
            part = attribute(structure, target)
            modules = set(map(id, part.modules())) if isinstance(part, nn.Module) else set()
            if not seen.isdisjoint(modules):
                copied.append(target)
            here |= modules
        seen |= here
        specs.append(TracedSpec(parts, layer, copied))
    return tuple(specs)


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Return each name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    names = {}
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        names[name] = first.setdefault(id(tensor), name)
    return names


def _arguments(
    module: nn.Module, example_inputs: Any
) -> tuple[list[str], Callable[..., Any] | None]:
    """Return the arguments of forward that the inputs give, and how to find them.

    Without example inputs: the arguments without a default.
    """
    parameters = list(inspect.signature(module.forward).parameters.values())
    variadic = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    named = [p for p in parameters if p not in variadic]
    required = [p.name for p in named if p.default is p.empty]
    known = [p.name for p in named]
    by_name = isinstance(example_inputs, Mapping) and (
        len(known) > 1
        or [*example_inputs] == known
        or (bool(variadic) and any(name in example_inputs for name in known))
    )
    # A list may be the only argument itself.
    in_order = isinstance(example_inputs, tuple | list) and len(known) > 1
    in_order = in_order or (isinstance(example_inputs, tuple) and len(example_inputs) == 1)
    if by_name:
        given = list(example_inputs)
    elif in_order:
        given = known[: len(example_inputs)]
        if len(given) < len(example_inputs):
            given += [f"argument {len(given) + 1}"]
    else:
        given = required or known[:1]
    unknown = [argument for argument in given if argument not in known]
    missing = [argument for argument in required if argument not in given]
    if unknown or missing or not given:
        problem = f"has no {unknown[0]!r}" if unknown else f"needs {', '.join(missing) or 'inputs'}"
        raise ConfigError(
            f"from_module: forward of {type(module).__name__} {problem}; its arguments are "
            f"({', '.join(map(str, parameters))}): give example_inputs as a tuple of its arguments "
            f"or a dict with their names; *args and **kwargs cannot be traced, but a module with "
            f"named arguments around this one can",
            on_every_rank=True,
        )
    return given, argument_of if by_name or in_order or len(given) > 1 else None


def _log_uncut(traced: TracedModule, module: nn.Module) -> None:
    """Log the large submodules that are one call because they could not be traced."""
    elements = sum(p.numel() for p in module.parameters())
    for name, reason in traced.opaque.items():
        if is_large(module.get_submodule(name), elements):
            log.info(f"from_module: {name} cannot be cut, because it cannot be traced: {reason}")


def _compare(
    specs: Sequence[LayerSpec],
    source: ModuleSource,
    example_inputs: Any,
    keywords: Callable[[Any], dict[str, Any]] | None,
) -> None:
    """Run module and layers on the example inputs; without dropout, and on meta for a factory.

    Raises:
        ConfigError: the results differ; the same on every rank.
    """
    module = source.structure
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    inputs = pytree.tree_map_only(Tensor, lambda t: t.detach().to(device).clone(), example_inputs)
    layers = [spec.build(Axis("tensor"), device="meta").eval() for spec in specs]
    modes = {part: part.training for part in module.modules()}
    try:
        module.eval()
        with torch.no_grad():
            copied = pytree.tree_map_only(Tensor, torch.clone, inputs)
            with preserve_all_rng():
                want = module(**keywords(copied)) if keywords else _call(module, copied)
            got = inputs
            with preserve_all_rng():
                for layer in layers:
                    # As in a message: tensors that share memory become separate ones.
                    got = layer(pytree.tree_map_only(Tensor, torch.clone, got))
    except Exception as error:
        on_meta, hint = "", ""
        if device.type == "meta":
            on_meta = " on the meta device"
            hint = "; if it cannot run there, pass a built module or no example_inputs"
        raise ConfigError(
            f"from_module: {source.name} fails on the example inputs{on_meta}: "
            f"{type(error).__name__}: {short_cause(error)}{hint}",
            on_every_rank=True,
        ) from error
    finally:
        for part, mode in modes.items():
            part.training = mode
    _check_equal(want, got, type(module).__name__)


def _call(module: nn.Module, inputs: Any) -> Any:
    several = len(inspect.signature(module.forward).parameters) > 1
    if several and isinstance(inputs, Mapping):
        return module(**inputs)
    if several and isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)


def _check_equal(want: Any, got: Any, name: str) -> None:
    wanted, structure = pytree.tree_flatten(want)
    found, other = pytree.tree_flatten(got)
    problem = None
    if structure != other:
        problem = f"the structure {other} instead of {structure}"
    for mine, theirs in zip(found, wanted, strict=False):
        if problem is not None or not isinstance(theirs, Tensor):
            continue
        if not isinstance(mine, Tensor) or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            problem = f"{_described(mine)} instead of {_described(theirs)}"
        elif not theirs.is_meta and not torch.allclose(mine, theirs, equal_nan=True):
            problem = f"values that differ by up to {float((mine - theirs).abs().max()):.3g}"
    if problem is not None:
        raise ConfigError(
            f"from_module: on the example inputs the layers do not return what {name}.forward "
            f"returns, but {problem}: check exec_seq, or move code that depends on the type of a "
            f"value into a submodule",
            on_every_rank=True,
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
