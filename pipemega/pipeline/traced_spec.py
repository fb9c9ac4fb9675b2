"""The layers of a traced module: graphs of calls, with the names of the module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipemega.distributed.mesh import Axis
from pipemega.pipeline.cut_points import LayerGraph, attribute
from pipemega.pipeline.module_source import BuiltSource, ModuleSource, copy_structure
from pipemega.pipeline.module_tracer import TRAINING
from pipemega.pipeline.spec import LayerSpec


@dataclass(frozen=True, eq=False)
class ModuleParts:
    """The modules and tensors that the layers of one module use.

    Args:
        source: of the module.
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
