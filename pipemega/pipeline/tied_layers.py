"""Finds the parameters that several layers share, and checks them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pipemega.errors import ConfigError
from pipemega.parameters import attach_shard, shard_of
from pipemega.pipeline.spec import LayerSpec


@dataclass(frozen=True)
class TiedParameter:
    """A parameter with copies in several layers.

    Args:
        key: the key of a `TiedLayerSpec`, or the name of the parameter in a traced module.
        places: (position of the layer, name in the layer) of each copy, by position.
    """

    key: str
    places: tuple[tuple[int, str], ...]

    @property
    def logical_name(self) -> str:
        position, name = self.places[0]
        return f"layers.{position}.{name}"


def find_tied_parameters(specs: Sequence[LayerSpec]) -> tuple[TiedParameter, ...]:
    """Return the tied parameters in the order of their keys, which is the same on every rank."""
    places: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for position, spec in enumerate(specs):
        for name, tie in spec.ties.items():
            places.setdefault(tie, []).append((position, name))
    return tuple(TiedParameter(key, tuple(found)) for (key, _), found in sorted(places.items()))


def check_tied_layers(specs: Sequence[LayerSpec], layers: Sequence[nn.Module]) -> None:
    """Check that tied parameters exist and have equal shapes, and that no others are shared.

    Args:
        specs, layers: of the whole model; `layers` are built, on any device.

    Raises:
        ConfigError: names the key or the parameter, the positions and both shapes; the same on
            every rank.
    """
    _check_shared_parameters(specs, layers)
    for tied in find_tied_parameters(specs):
        first, first_name = tied.places[0]
        shape = _tied_shape(specs, layers, tied.key, first, first_name)
        for other, name in tied.places[1:]:
            other_shape = _tied_shape(specs, layers, tied.key, other, name)
            if other_shape != shape:
                raise ConfigError(
                    f"layers {first} and {other} are tied by key {tied.key!r}, but {name} is "
                    f"{shape} in one and {other_shape} in the other",
                    on_every_rank=True,
                )


def _tied_shape(
    specs: Sequence[LayerSpec], layers: Sequence[nn.Module], key: str, position: int, name: str
) -> tuple[int, ...]:
    parameters = dict(layers[position].named_parameters(remove_duplicate=False))
    if name not in parameters:
        raise ConfigError(
            f"layer {position} ({specs[position].name}), tied by key {key!r}, has no parameter "
            f"{name!r}; it has: {', '.join(parameters) or 'none'}. Give the name of a parameter as "
            f"tied_weight_attr, equal in both layers; pipemega.compat.deepspeed.pipe.TiedLayerSpec "
            f"also takes a property, for parameters of different names",
            on_every_rank=True,
        )
    return shard_of(parameters[name]).shape


def _check_shared_parameters(specs: Sequence[LayerSpec], layers: Sequence[nn.Module]) -> None:
    """Refuse one parameter in several layers: stages would train separate copies of it."""
    first_with: dict[int, int] = {}
    for position, (spec, layer) in enumerate(zip(specs, layers, strict=True)):
        for name, parameter in layer.named_parameters():
            if name in spec.ties:
                continue
            first = first_with.setdefault(id(parameter), position)
            if first != position and parameter.requires_grad:
                raise ConfigError(
                    f"layers {first} ({specs[first].name}) and {position} ({spec.name}) "
                    f"share the parameter {name!r}, and two stages would train separate copies "
                    f"of it: write TiedLayerSpec(key, ...) at both positions, or layers that "
                    f"contain only the parameters they use",
                    on_every_rank=True,
                )


def share_tied_parameters(
    tied_parameters: Sequence[TiedParameter], layers: Mapping[int, tuple[int, nn.Module]]
) -> None:
    """Let the tied layers on this rank share their parameters.

    In one stage they share the parameter. In different stages they have separate parameters with
    shared storage: each stage accumulates its own gradient, as it would on a separate rank, so the
    placement of stages does not change the sum.

    Args:
        layers: position of a local layer -> (number of its stage, layer).
    """
    for tied in tied_parameters:
        here = [place for place in tied.places if place[0] in layers]
        in_stage: dict[int, nn.Parameter] = {}
        for position, name in here:
            (first, first_name), (stage, layer) = here[0], layers[position]
            first_stage, first_layer = layers[first]
            if stage not in in_stage:
                shared = first_layer.get_parameter(first_name)
                if stage != first_stage:
                    copy = nn.Parameter(shared.data, shared.requires_grad)
                    shared = attach_shard(copy, shard_of(shared))
                in_stage[stage] = shared
            if (position, name) != here[0]:
                _set_parameter(layer, name, in_stage[stage])


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    setattr(module.get_submodule(".".join(path)), last, parameter)
