"""A model with LoRA: its layers build themselves with adapters; all other weights are frozen."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipemega.config.lora import LoraSection
from pipemega.errors import ConfigError
from pipemega.lora.low_rank import A, B, add_adapter
from pipemega.lora.targets import Named, find_targets, find_trained
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.spec import LayerSpec


def add_lora(net: PipelineModule, section: LoraSection) -> PipelineModule:
    """Return `net` with adapters; the names of its own parameters do not change.

    A module that the user has built is changed itself, as peft changes it.

    Raises:
        ConfigError: `lora.targets`, `lora.train_also` or `lora.r` do not fit the model, or it is
            one of `from_module`; on every rank.
    """
    if net.origin is not None:
        raise ConfigError(
            "lora: the layers of PipelineModule.from_module cannot get adapters: give "
            "PipelineModule the list of the layers, or take a model of transformers "
            "(pipemega.from_pretrained)",
            on_every_rank=True,
        )
    targets = _by_position(find_targets(net, section))
    trained = _with_tied_copies(net, _by_position(find_trained(net, section)))
    factories: dict[tuple[Any, ...], _Factory] = {}

    def adapted(position: int, spec: LayerSpec) -> LayerSpec:
        names = targets.get(position, ()), trained.get(position, ())
        if spec.already_built:
            _adapt(net.meta_layers[position], *names, section)
            return spec
        new = copy.copy(spec)
        # Equal layers share their factory: the planner measures one of them.
        key = (spec.typename, *names)
        new.typename = factories.setdefault(key, _Factory(spec.typename, *names, section))
        if spec.equality_key is not None:
            new.equality_key = (spec.equality_key, *names)
        return new

    specs = [adapted(position, spec) for position, spec in enumerate(net.specs)]
    result = net.with_specs(specs, lambda position: _boundary(net, result, position))
    return result


class _Factory:
    """Builds a layer, adds its adapters, and freezes the rest.

    Args:
        typename: of the spec.
        targets: names of linears in the layer.
        trained: names of modules in the layer, or parameters of them, that are not frozen.
    """

    def __init__(
        self,
        typename: Callable[..., nn.Module],
        targets: tuple[str, ...],
        trained: tuple[str, ...],
        section: LoraSection,
    ) -> None:
        self._typename, self._names, self._section = typename, (targets, trained), section
        self.__name__ = getattr(typename, "__name__", type(typename).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        layer = self._typename(*args, **kwargs)
        _adapt(layer, *self._names, self._section)
        return layer


def _adapt(
    layer: nn.Module, targets: Iterable[str], trained: Iterable[str], section: LoraSection
) -> None:
    layer.requires_grad_(False)
    for name in targets:
        linear = layer.get_submodule(name)
        add_adapter(linear, section)
        for child in (A, B):
            linear.get_submodule(child).requires_grad_(True)
    for name in trained:
        layer.get_parameter(name).requires_grad_(True)


def _by_position(modules: Iterable[Named]) -> dict[int, tuple[str, ...]]:
    """Return position -> names in the layer."""
    found: dict[int, tuple[str, ...]] = {}
    for position, inner, *_ in modules:
        found[position] = (*found.get(position, ()), inner)
    return found


def _with_tied_copies(
    net: PipelineModule, modules: dict[int, tuple[str, ...]]
) -> dict[int, tuple[str, ...]]:
    """Return the parameters of the modules, by position; those of tied layers at all positions."""
    copies = {place: tied.places for tied in net.tied_parameters for place in tied.places}
    found: dict[int, tuple[str, ...]] = {}
    for position, inners in modules.items():
        for inner in inners:
            for last, _ in net.meta_layers[position].get_submodule(inner).named_parameters():
                place = position, f"{inner}.{last}" if inner else last
                for each, name in copies.get(place, (place,)):
                    found[each] = tuple(dict.fromkeys((*found.get(each, ()), name)))
    return found


def _boundary(net: PipelineModule, adapted: PipelineModule, position: int) -> Any:
    """Return the declared input of a layer; without a gradient if only frozen layers precede it."""
    before = adapted.meta_layers[:position]
    trains = any(p.requires_grad for layer in before for p in layer.parameters())

    def with_gradient(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad and trains)

    return pytree.tree_map_only(Tensor, with_gradient, net.boundary(position))
