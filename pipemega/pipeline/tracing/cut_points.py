"""Divides the calls of a traced module into layers.

    calls     conv  bn  relu | conv  bn  relu  conv  bn  add  relu | pool  flatten  fc
    values    x     x   x      x h   x h x h   x h   x h x    x      x     x        x

A layer boundary may be between any two calls. What the later calls need of the earlier ones is the
message: one value, or a tuple of several. Inside a submodule that is small (a residual block) a
boundary needs no more values than the submodule itself takes or returns.

The layers of a traced module: graphs of calls, with the names of the module.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipemega.distributed.mesh import Axis
from pipemega.errors import PipelineError
from pipemega.pipeline.model.spec import LayerSpec
from pipemega.pipeline.tracing.module_source import BuiltSource, ModuleSource, copy_structure
from pipemega.pipeline.tracing.module_tracer import TRAINING, is_large


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """The calls of one layer.

    Args:
        graph: the graph of the layer; its placeholder is the message.
        name: the class of the submodule that contains the calls.
    """

    graph: fx.Graph
    name: str

    @property
    def targets(self) -> list[str]:
        """The names of submodules and tensors that the calls use."""
        used = (node for node in self.graph.nodes if node.op in ("call_module", "get_attr"))
        return list(dict.fromkeys(str(node.target) for node in used if node.target != TRAINING))


def cut_positions(graph: fx.Graph, module: nn.Module) -> list[int]:
    """Return the indices of the nodes at which layers after the first one start.

    Args:
        module: the traced module; each layer has parameters of it.
    """
    nodes = list(graph.nodes)
    crossing = _crossing_counts(nodes)
    allowed = [count > 0 and _is_call(node) for count, node in zip(crossing, nodes, strict=True)]
    for keep_whole in _without_cuts(nodes, crossing, module):
        for index in keep_whole:
            allowed[index] = False
    weighted = [index for index, node in enumerate(nodes) if _weight(node, module)]
    cuts = []
    for before, after in pairwise(weighted):
        # Where the fewest values cross; else calls without parameters follow those before them.
        candidates = [index for index in range(before + 1, after + 1) if allowed[index]]
        if candidates:
            cuts.append(min(candidates, key=lambda index: (crossing[index], -index)))
    return cuts


def split(
    graph: fx.Graph, cuts: Sequence[int], names: Sequence[str], unpack: Callable[..., Any] | None
) -> list[LayerGraph]:
    """Return the graphs of the layers.

    Args:
        cuts: indices of the nodes at which layers after the first one start.
        names: the names of the layers.
        unpack: called as unpack(inputs, number, name) for each argument of forward; None if the
            inputs are the only argument.
    """
    nodes = list(graph.nodes)
    bounds = [0, *cuts, len(nodes)]
    layers = []
    for (start, stop), name in zip(pairwise(bounds), names, strict=True):
        into = fx.Graph()
        message = into.placeholder("x")
        values: dict[fx.Node, fx.Node] = {}
        if start > 0:
            values |= _unpack_message(into, message, _crossing(nodes, start))

        def lookup(node: fx.Node, into: fx.Graph = into, values: Any = values) -> fx.Node:
            # Each layer reads parameters and buffers itself: they are no part of a message.
            if node not in values and node.op == "get_attr":
                values[node] = into.node_copy(node)
            return values[node]  # type: ignore[no-any-return]

        placeholders = 0
        for node in nodes[start:stop]:
            if node.op == "placeholder":
                values[node] = message
                if unpack is not None:
                    arguments = (message, placeholders, node.target)
                    values[node] = into.call_function(unpack, arguments)
                placeholders += 1
            elif _is_call(node):
                values[node] = into.node_copy(node, lookup)
            elif node.op == "output":
                into.output(fx.node.map_arg(node.args[0], lookup))
        if stop < len(nodes):
            sent = tuple(values[node] for node in _crossing(nodes, stop))
            into.output(sent[0] if len(sent) == 1 else sent)
        into.lint()
        layers.append(LayerGraph(into, name))
    return layers


def layer_names(graph: fx.Graph, cuts: Sequence[int], module: nn.Module) -> list[str]:
    """Return a name per layer: the class of the innermost submodule that contains its calls."""
    nodes = list(graph.nodes)
    names = []
    for start, stop in pairwise([0, *cuts, len(nodes)]):
        calls = [node for node in nodes[start:stop] if _is_call(node)]
        inside = [node for node in calls if _weight(node, module)] or calls
        stacks = [list(_module_stack(node).items()) for node in inside]
        common = [entries[0] for entries in zip(*stacks, strict=False) if len(set(entries)) == 1]
        # The first call names a layer whose calls are in different submodules.
        path = common[-1][1] if common else stacks[0][-1][1] if stacks and stacks[0] else ""
        names.append(type(module.get_submodule(path)).__name__)
    return names


def _unpack_message(
    into: fx.Graph, message: fx.Node, values: Sequence[fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    if len(values) == 1:
        yield values[0], message
        return
    for number, value in enumerate(values):
        yield value, into.call_function(getitem, (message, number))


def _is_call(node: fx.Node) -> bool:
    return node.op.startswith("call_")


def _crosses(node: fx.Node) -> bool:
    return node.op == "placeholder" or _is_call(node)


def _crossing(nodes: Sequence[fx.Node], index: int) -> list[fx.Node]:
    """Return the values from before node `index` that it or a later node uses."""
    later = set(nodes[index:])
    return [node for node in nodes[:index] if _crosses(node) and not later.isdisjoint(node.users)]


def _crossing_counts(nodes: Sequence[fx.Node]) -> list[int]:
    """Return for each node the number of earlier values that it or later nodes use."""
    place = {node: index for index, node in enumerate(nodes)}
    changes = [0] * (len(nodes) + 1)
    for index, node in enumerate(nodes):
        if _crosses(node) and node.users:
            changes[index + 1] += 1
            changes[max(place[user] for user in node.users) + 1] -= 1
    counts, count = [], 0
    for change in changes[:-1]:
        count += change
        counts.append(count)
    return counts


def _weight(node: fx.Node, module: nn.Module) -> int:
    """Return the elements of the parameters that a call uses."""
    used: dict[int, int] = {}
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        used |= {id(p): p.numel() for p in called.parameters()}
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and argument.target != TRAINING:
            tensor = attribute(module, str(argument.target))
            if isinstance(tensor, nn.Parameter):
                used[id(tensor)] = tensor.numel()
    return sum(used.values())


def attribute(module: nn.Module, target: str) -> Any:
    """Return the attribute `target` (a.b.c) of the module; None if it does not exist."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part, None)
    return value


def _without_cuts(
    nodes: Sequence[fx.Node], crossing: Sequence[int], module: nn.Module
) -> Iterator[Collection[int]]:
    """Yield indices of nodes at which no layer may start."""
    elements = sum(p.numel() for p in module.parameters())
    for call, (start, stop) in _calls_of_submodules(nodes).items():
        if is_large(module.get_submodule(call.partition("@")[0]), elements):
            continue
        most = max(crossing[start], crossing[stop])
        yield [index for index in range(start + 1, stop) if crossing[index] > most]
    # Running statistics must be in one layer.
    for start, stop in _uses_of_statistics(nodes, module).values():
        yield range(start + 1, stop)


def _calls_of_submodules(nodes: Sequence[fx.Node]) -> Mapping[str, tuple[int, int]]:
    """Return call of a submodule -> [start, stop) of its nodes."""
    spans: dict[str, tuple[int, int]] = {}
    for index, node in enumerate(nodes):
        for call in _module_stack(node) if _is_call(node) else ():
            spans[call] = (spans.get(call, (index, 0))[0], index + 1)
    return spans


def _module_stack(node: fx.Node) -> Mapping[str, str]:
    """Return call of each submodule around `node` -> name of the submodule; the outermost first."""
    stack = node.meta.get("nn_module_stack", {})
    return {call: name for call, (name, _) in stack.items()}


def _uses_of_statistics(
    nodes: Sequence[fx.Node], module: nn.Module
) -> Mapping[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for index, node in enumerate(nodes):
        if node.op == "call_module":
            for part in module.get_submodule(str(node.target)).modules():
                if getattr(part, "track_running_stats", False):
                    spans[id(part)] = (spans.get(id(part), (index, 0))[0], index + 1)
    return spans


def argument_of(inputs: Any, number: int, name: str) -> Any:
    """Return one argument of forward from the inputs of a micro-batch.

    Raises:
        PipelineError: the inputs are no tuple or dict with this argument.
    """
    if isinstance(inputs, Mapping):
        if name in inputs:
            return inputs[name]
        found = f"a dict with the keys {', '.join(map(str, inputs))}"
    elif isinstance(inputs, tuple | list):
        if number < len(inputs):
            return inputs[number]
        found = f"a {type(inputs).__name__} of {len(inputs)}"
    else:
        found = f"of type {type(inputs).__name__}"
    raise PipelineError(
        f"the module takes {name!r} as argument {number + 1}, but the inputs of the micro-batch "
        f"are {found}: give a tuple of all arguments, or a dict with their names"
    )


@dataclass(frozen=True, eq=False)
class ModuleParts:
    """The modules and tensors that the layers of one module use.

    Args:
        source: the source of the module.
        additions: target -> module or tensor that is not in the module.
    """

    source: ModuleSource
    additions: Mapping[str, Any]

    @cached_property
    def on_meta(self) -> "ModuleParts":
        """The parts of one copy of the module on the meta device."""
        return ModuleParts(self.source.on_meta(), self.additions)

    def of(self, targets: Sequence[str], device: torch.device | str | None) -> dict[str, Any]:
        """Return target -> module or tensor, on the meta device if `device` is."""
        module = self.source.module(device)
        on_meta = device is not None and torch.device(device).type == "meta"
        parts = {}
        for target in targets:
            part = self.additions.get(target)
            part = attribute(module, target) if part is None else part
            # A tensor that is neither parameter nor buffer, or that the trace has computed.
            built = isinstance(self.source, BuiltSource)
            if on_meta and not built and isinstance(part, Tensor) and not part.is_meta:
                part = part.to("meta")
            parts[target] = part
        return parts


class TracedSpec(LayerSpec):
    """One layer of a traced module.

    Args:
        parts: what the layers of the module use.
        layer: the calls of this layer.
        copied: submodules that an earlier layer uses too; this layer uses copies of them, which
            share their tensors.
    """

    def __init__(self, parts: ModuleParts, layer: LayerGraph, copied: Sequence[str]) -> None:
        super().__init__(fx.GraphModule)
        self.parts, self.layer, self.copied = parts, layer, copied
        # Class and arguments, which are the same for all layers, say nothing.
        self.equality_key = layer
        self._ties: dict[str, tuple[str, str]] = {}

    @property
    def already_built(self) -> bool:  # type: ignore[override]
        return isinstance(self.parts.source, BuiltSource)

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def ties(self) -> Mapping[str, tuple[str, str]]:
        return self._ties

    def tie(self, name: str, key: str) -> None:
        """Declare that other layers share the parameter `name`."""
        self._ties[name] = (key, key)

    def build(self, tensor: Axis, device: torch.device | str | None = None) -> nn.Module:
        parts = self.parts.of(self.layer.targets, device)
        for target in self.copied:
            parts[target] = copy_structure(parts[target])
        layer = _assemble(self.layer, parts, self.parts.source.structure)
        is_meta = device is None or torch.device(device).type == "meta"
        return layer if is_meta else layer.to(device)

    def on_meta(self) -> LayerSpec:
        spec = TracedSpec(self.parts.on_meta, self.layer, self.copied)
        spec._ties = self._ties
        return spec


def _assemble(layer: LayerGraph, parts: Mapping[str, Any], module: nn.Module) -> nn.Module:
    """Return a module with the calls of `layer` and the names of `module`."""
    built = fx.GraphModule({**parts, TRAINING: True}, layer.graph, layer.name)
    persistent = module.state_dict(keep_vars=True).keys()
    for target, part in parts.items():
        # GraphModule registers each tensor as a persistent buffer.
        if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
            owner, _, name = target.rpartition(".")
            if target not in persistent:
                built.get_submodule(owner)._non_persistent_buffers_set.add(name)
    return built
