"""Divides layers into stages if some layers are for one device only.  Imports no torch.

layers    cpu | cuda  -     -   | cuda cuda       "-" may be on any device
stages    cpu | cuda            | cuda
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from pipemega.errors import ConfigError

Devices = Sequence[str | None]


def partition_on_devices(
    costs: Sequence[float], layers: Devices, stages: Sequence[str], names: Sequence[str]
) -> list[int]:
    """Return the bounds with the lowest maximum cost of a stage, the most even ones of several.

    Args:
        costs: of each layer.
        layers: the device of each layer; None: any.
        stages: the device of each stage.
        names: of the layers.

    Raises:
        ConfigError: no cut puts each layer on its device.
    """
    until = [*accumulate(costs, initial=0.0)]
    # best[i]: (maximum, sum of squares, bounds) of the layers before i in the stages so far.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}
    for device in stages:
        following: dict[int, tuple[float, float, list[int]]] = {}
        for start, (most, squares, bounds) in best.items():
            for stop in range(start + 1, len(layers) + 1):
                if layers[stop - 1] not in (None, device):
                    break
                cost = until[stop] - until[start]
                found = max(most, cost), squares + cost * cost, [*bounds, stop]
                following[stop] = min(following.get(stop, found), found)
        best = following
    if len(layers) not in best:
        raise ConfigError(
            f"the layers cannot be cut into stages on these devices: the layers are on "
            f"{_runs(layers, names)}, and the stages on {', '.join(stages)}: give mesh.device a "
            f"device for each pipeline rank in the order of the layers, with at least one rank for "
            f"each change of device",
            on_every_rank=True,
        )
    return best[len(layers)][2]


def check_stage_devices(
    bounds: Sequence[int], layers: Devices, stages: Sequence[str], names: Sequence[str]
) -> None:
    """Check that no stage has a layer for another device.

    Args:
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
        layers, stages, names: as for `partition_on_devices`.

    Raises:
        ConfigError: a stage has layers for two devices, or its rank has another device.
    """
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        given = {layer: layers[layer] for layer in range(start, stop) if layers[layer] is not None}
        first = next(iter(given), None)
        other = next((layer for layer in given if given[layer] != given[first or start]), None)
        if first is not None and other is not None:
            raise ConfigError(
                f"stage {stage} has layers on two devices: layer {first} ({names[first]}) on "
                f"{given[first]!r} and layer {other} ({names[other]}) on {given[other]!r}; a stage "
                f"is on one device: start a stage at each change of device, with more pipeline "
                f"ranks (mesh.pipeline) or other bounds (pipeline.partition)",
                on_every_rank=True,
            )
        if first is not None and given[first] != stages[stage]:
            raise ConfigError(
                f"layer {first} ({names[first]}) is for device {given[first]!r}, and its pipeline "
                f"rank is on {stages[stage]!r}: change mesh.device (it may be a list, one device "
                f"for each pipeline rank), the bounds in pipeline.partition, or the LayerSpec",
                on_every_rank=True,
            )


def changes_of_device(layers: Devices) -> list[int]:
    """Return the layers whose device differs from that of the layer before."""
    return [layer for layer, (a, b) in enumerate(pairwise(layers), 1) if a != b]


def _runs(layers: Devices, names: Sequence[str]) -> str:
    """Return "cpu (layer 0, Embedding), cuda (layers 1 to 8), any (layer 9, Linear)"."""
    marks = [0, *changes_of_device(layers), len(layers)]
    shown = []
    for start, stop in pairwise(marks):
        which = f"layer {start}, {names[start]}"
        if stop > start + 1:
            which = f"layers {start} to {stop - 1}"
        shown.append(f"{layers[start] or 'any device'} ({which})")
    return ", ".join(shown)
