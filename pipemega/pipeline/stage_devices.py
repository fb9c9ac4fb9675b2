"""Puts stages on the devices that the `LayerSpec`s of a model ask for.

    LayerSpec(nn.Embedding, ..., device="cpu")     stage 0      "mesh": {"device": ["cpu",
    LayerSpec(Block, ...)                          stage 1                          "cuda",
    LayerSpec(Head, ...)                           stage 2                          "cuda"]}

Both forms say the same. If the config has no `mesh.device`, the list follows from the layers;
otherwise the layers have to agree with it.
"""

import re
from collections.abc import Sequence

from pipemega.config import Config
from pipemega.config.mixed_devices import errors_of_mixed_devices
from pipemega.config.pipeline import PipelineSection
from pipemega.errors import ConfigError
from pipemega.pipeline.module import PipelineModule
from pipemega.pipeline.plan.device_cut import (
    changes_of_device,
    check_stage_devices,
    partition_on_devices,
)
from pipemega.pipeline.plan.partition import explicit, partition_at
from pipemega.pipeline.plan_selection import first_plan


def with_stage_devices(
    config: Config,
    net: PipelineModule,
    num_microbatches: int,
    auto_device: str,
    rank_of_stage: Sequence[int] | None = None,
) -> Config:
    """Return `config` with the devices and bounds that the layers of `net` need.

    If no layer has a device, it is returned unchanged.

    Args:
        num_microbatches: of a step.
        auto_device: what mesh.device "auto" means here.
        rank_of_stage: of a plan that replaces pipeline.schedule.

    Raises:
        ConfigError: a stage would have two devices, a layer is on another device than its rank,
            or a key needs equal devices; on every rank.
    """
    layers = [spec.device for spec in net.specs]
    if not any(layers):
        return config
    section, mesh = config.pipeline, config.mesh
    if rank_of_stage is None:
        if section.schedule == "auto" and {*layers} - {None} == {auto_device}:
            return config
        rank_of_stage = _rank_of_stage(config, num_microbatches, len(net))
    cut = _Cut(net, section, layers, rank_of_stage)
    if isinstance(mesh.device, tuple):
        devices: Sequence[str] = mesh.device
    elif mesh.device == "auto":
        devices = cut.devices(mesh.pipeline, auto_device)
    else:
        devices = [mesh.device] * mesh.pipeline
    bounds = cut.bounds([devices[rank] for rank in rank_of_stage])
    if len(set(devices)) == 1:
        return config
    update = {
        "mesh": mesh.model_copy(update={"device": tuple(devices)}),
        "pipeline": section.model_copy(update={"partition": tuple(bounds)}),
    }
    # With the device list, but still with the user's partition.
    for error in errors_of_mixed_devices(config.model_copy(update={"mesh": update["mesh"]})):
        raise ConfigError(error, on_every_rank=True)
    return config.model_copy(update=update)


class _Cut:
    """The stages of a model some of whose layers have devices."""

    def __init__(
        self,
        net: PipelineModule,
        section: PipelineSection,
        layers: Sequence[str | None],
        rank_of_stage: Sequence[int],
    ) -> None:
        self._net, self._section, self._layers = net, section, layers
        self._ranks = rank_of_stage

    def devices(self, num_ranks: int, auto_device: str) -> list[str]:
        """Return the device of each rank, where a layer without one is on `auto_device`."""
        layers = [device or auto_device for device in self._layers]
        if len(set(layers)) == 1:
            return layers[:1] * num_ranks
        if len(self._ranks) != num_ranks:
            raise ConfigError(
                f"layers are on {' and '.join(map(repr, sorted(set(layers))))}, and pipeline "
                f"schedule {self._section.schedule!r} has {len(self._ranks)} stages on {num_ranks} "
                f'ranks: give the device of each pipeline rank, as in "mesh": {{"device": ["cpu", '
                f'"cuda"]}}, or use a schedule with one stage per rank',
                on_every_rank=True,
            )
        if isinstance(self._section.partition, tuple):
            bounds = explicit(self._section.partition, len(layers), num_ranks)
        else:
            changes = changes_of_device(layers)
            bounds = partition_at(self._costs(), changes, num_ranks)
        stages = [layers[start] for start in bounds[:-1]]
        check_stage_devices(bounds, layers, stages, self._net.layer_names)
        return [stages[self._ranks.index(rank)] for rank in range(num_ranks)]

    def bounds(self, stages: Sequence[str]) -> list[int]:
        """Return the bounds of stages on these devices."""
        names, partition = self._net.layer_names, self._section.partition
        if isinstance(partition, tuple):
            bounds = explicit(partition, len(names), len(stages))
        elif len(set(stages)) > 1:
            return partition_on_devices(self._costs(), self._layers, stages, names)
        else:
            bounds, stages = [0, len(names)], stages[:1]
        check_stage_devices(bounds, self._layers, stages, names)
        return bounds

    def _costs(self) -> Sequence[float]:
        """Return the cost of each layer by pipeline.partition; "auto" takes the parameters.

        The times of "auto" are those of one kind of device.
        """
        method, net = self._section.partition, self._net
        if method == "uniform":
            return [1] * len(net)
        if isinstance(method, str) and method.startswith("type:"):
            pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
            return [int(pattern.search(name) is not None) for name in net.layer_names]
        return net.count_parameters()


def _rank_of_stage(config: Config, num_microbatches: int, num_layers: int) -> Sequence[int]:
    plan = first_plan(config.pipeline, config.mesh.pipeline, num_microbatches, num_layers)
    return plan.rank_of_stage
