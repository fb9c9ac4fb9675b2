"""DeepSpeed's PipelineModule: builds the layers of this rank's stage when it is constructed."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from pipemega.compat.deepspeed.activation_checkpoints import check_checkpoint_function, checkpoint
from pipemega.compat.deepspeed.launch_calls import init_distributed
from pipemega.compat.deepspeed.layer_specs import (
    BuiltLayerSpec,
    SeededLayerSpec,
    layers_as_specs,
    mark_tensor_shards,
)
from pipemega.compat.deepspeed.parallel_grid import PipelineParallelGrid
from pipemega.compat.deepspeed.process_topology import PipeDataParallelTopology, ProcessTopology
from pipemega.distributed.mesh import Axis, on_all_ranks
from pipemega.errors import ConfigError
from pipemega.pipeline.microbatch_loss import Loss, check_loss
from pipemega.pipeline.model.module import BuildOptions, PipelineModule, Stage, build_stages
from pipemega.pipeline.model.spec import Function, LayerSpec
from pipemega.pipeline.model.stages import stage_bounds

_PARTITIONS = ("parameters", "best", "uniform")


class DeepSpeedPipelineModule(nn.Module):
    """A model as a list of layers, of which this rank has those of its stage.  Collective.

    `deepspeed.pipe.PipelineModule`. The layers of the stage are submodules with the name of their
    position: "0", "1", ... The initial values do not depend on the number of stages: a constructor
    runs with a seed that depends on the position of the layer, and on `torch.initial_seed()` or
    `base_seed`.

    Args:
        layers: LayerSpecs, TiedLayerSpecs, modules and functions.
        num_stages: stages of the pipeline; the other ranks are data ranks.
        topology: in place of `num_stages`.
        loss_fn: maps (output of the last layer, labels) to a scalar, the mean over the
            micro-batch; None: the output of the last layer is the loss.
        seed_layers: seed the constructor of layer i with `base_seed` + i, by `seed_fn` if given.
        partition_method: "parameters", "uniform" or "type:REGEX".
        activation_checkpoint_interval: recompute in groups of this many layers; 0: off.
        activation_checkpoint_func: one of `deepspeed.checkpointing`, or torch's `checkpoint`.
        checkpointable_layers: class names; only groups of these layers are recomputed. None: all.
        dynamic_shape: the shapes of the tensors between stages may differ between micro-batches.

    Raises:
        ConfigError: an argument is not supported, the number of ranks does not fit, or a layer
            cannot be built; on every rank.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Loss | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        check_checkpoint_function(activation_checkpoint_func)
        init_distributed()
        self.loss_fn = loss_fn
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.dynamic_shape = dynamic_shape
        self._topo = topology if topology is not None else _topology(num_stages)
        self.num_stages = max(1, self._topo.get_dim("pipe"))
        self._grid = PipelineParallelGrid(self._topo)
        self.global_rank, self.world_size = self._grid.global_rank, self._grid.world_size
        self.stage_id = self._grid.stage_id
        self._layer_specs: list[Any] = list(layers)
        self._num_layers = len(self._layer_specs)
        # The specs of all layers; not an attribute that a subclass may use too.
        self._pipemega_specs = layers_as_specs(self._layer_specs)
        self.parts: list[int] = []
        self._local_start, self._local_stop = 0, self._num_layers
        on_all_ranks(self._grid.mesh.world, partial(self._partition_layers, partition_method))
        self.forward_funcs: list[Callable[[Any], Any]] = []
        stage = on_all_ranks(self._grid.mesh.world, self._build)
        self._register(stage)

    # Partition; a subclass may override `_partition_layers`, and call `_set_bounds` in it.

    def _partition_layers(self, method: str | Sequence[int] = "uniform") -> None:
        """Set `parts`, the bounds of the stages, and the layers of this one."""
        if isinstance(method, str):
            kind, colon, pattern = method.partition(":")
            method = f"{kind.lower()}{colon}{pattern}"
            if kind.lower() not in (*_PARTITIONS, "type"):
                raise ConfigError(
                    f"PipelineModule(partition_method={method!r}): the methods are 'parameters', "
                    "'uniform' and 'type:REGEX'; for 'profile' use pipemega.PipelineModule and set "
                    "pipeline.partition in the config",
                    on_every_rank=True,
                )
        net = PipelineModule(self._pipemega_specs)
        options = BuildOptions(self._grid.mesh.tensor, self._grid.mesh.device, seed=0)
        mesh = self._grid.mesh
        parts = stage_bounds(net, method, self.num_stages, mesh, options, _no_sample)
        self.parts = list(parts)
        self._set_bounds(parts[self.stage_id], parts[self.stage_id + 1])

    def _set_bounds(self, start: int, stop: int) -> None:
        self._local_start, self._local_stop = start, stop

    def _count_layer_params(self) -> list[int]:
        """Return the trainable elements of each layer."""
        return PipelineModule(self._pipemega_specs).count_parameters(trainable=True)

    def _find_layer_type(self, layername: str) -> list[int]:
        """Return the positions of the layers whose class name matches."""
        pattern = re.compile(layername, re.IGNORECASE)
        return [i for i, spec in enumerate(self._pipemega_specs) if pattern.search(spec.name)]

    # Layers

    def _build(self) -> Stage:
        """Build the layers of this stage."""
        if len(self.parts) != self.num_stages + 1:
            raise ConfigError(
                f"_partition_layers() must set self.parts to {self.num_stages + 1} bounds, and it "
                f"is {self.parts}"
            )
        if self.parts[self.stage_id : self.stage_id + 2] != [self._local_start, self._local_stop]:
            raise ConfigError(
                f"self.parts gives stage {self.stage_id} the layers "
                f"{self.parts[self.stage_id : self.stage_id + 2]}, and _set_bounds() got "
                f"[{self._local_start}, {self._local_stop}]: give both the same bounds"
            )
        specs: list[LayerSpec] = list(self._pipemega_specs)
        if self.seed_layers:
            for position in range(self._local_start, self._local_stop):
                seed = self.base_seed + position
                specs[position] = SeededLayerSpec(specs[position], seed, self.seed_fn)
        mesh, seed = self._grid.mesh, torch.initial_seed()
        options = BuildOptions(mesh.tensor, mesh.device, seed=seed)
        stages = build_stages(PipelineModule(specs), self.parts, [self.stage_id], options)
        return stages[self.stage_id]

    def _register(self, stage: Stage) -> None:
        """Make the layers of the stage submodules, and functions of the forward."""
        for position, layer in enumerate(stage.layers.values(), stage.start):
            spec = self._pipemega_specs[position]
            mark_tensor_shards(layer, self._grid.mesh.tensor)
            if isinstance(layer, Function):
                self.forward_funcs.append(layer.function)
                continue
            # A module that is in the list twice has one name.
            if all(layer is not child for child in self.children()):
                self.add_module(str(position), layer)
            forward = layer if spec.forward_fn is None else partial(spec.forward_fn, layer)
            self.forward_funcs.append(forward)

    @property
    def tied_modules(self) -> nn.ModuleDict:
        """Key of each TiedLayerSpec of this stage -> its first layer."""
        found: dict[str, nn.Module] = {}
        for position in range(self._local_start, self._local_stop):
            key = getattr(self._pipemega_specs[position], "key", None)
            if key is not None and key not in found:
                found[key] = self.get_submodule(str(position))
        return nn.ModuleDict(found)

    def network(self) -> "DeepSpeedNetwork":
        """Return the description of the whole model, with the layers that this rank has built."""
        specs: list[LayerSpec] = list(self._pipemega_specs)
        built = dict(self.named_children())
        for position in range(self._local_start, self._local_stop):
            if str(position) in built:
                specs[position] = BuiltLayerSpec(built[str(position)], specs[position])
        return DeepSpeedNetwork(specs, self)

    def forward(self, forward_input: Any) -> Any:
        """Return the output of the layers of this stage."""
        for function in self.forward_funcs:
            forward_input = function(forward_input)
        return forward_input

    # What scripts ask for

    def topology(self) -> ProcessTopology:
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        return self._grid

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of a layer."""
        stages = range(self.num_stages)
        return next(s for s in stages if self.parts[s] <= layer_idx < self.parts[s + 1])

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set the interval of activation checkpoints; before `initialize`."""
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> None:
        """DeepSpeed: further losses to report. There are none here."""

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse torch.compile of the layers.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "PipelineModule.compile() is not supported: set compile.enabled in the config, which "
            "compiles each layer",
            on_every_rank=True,
        )


class DeepSpeedNetwork(PipelineModule):
    """The model of a DeepSpeedPipelineModule for `pipemega.initialize`.

    The loss function is that which the module has when the loss is computed.
    """

    def __init__(self, specs: Iterable[LayerSpec], module: DeepSpeedPipelineModule) -> None:
        super().__init__(specs)
        if isinstance(module.loss_fn, nn.Module | type) or not callable(module.loss_fn):
            # A function may use the module itself: its layers are trained.
            check_loss(module.loss_fn)
        self._module = module

    def build_loss(self, tensor: Axis) -> Loss:
        module = self._module

        def loss(output: Any, labels: Any) -> Any:
            return output if module.loss_fn is None else module.loss_fn(output, labels)

        return loss

    def recomputes(self, start: int, stop: int) -> bool:
        names = self._module.checkpointable_layers
        return names is None or all(spec.name in names for spec in self.specs[start:stop])


def _topology(num_stages: int | None) -> ProcessTopology:
    if num_stages is None:
        raise ConfigError(
            "PipelineModule() needs num_stages= or topology=, as in num_stages=2",
            on_every_rank=True,
        )
    world = dist.get_world_size()
    if num_stages < 1 or world % num_stages:
        raise ConfigError(
            f"num_stages ({num_stages}) must divide the number of ranks ({world}): start a "
            f"multiple of {num_stages} ranks (torchrun --nproc_per_node), or change num_stages",
            on_every_rank=True,
        )
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=world // num_stages)


def _no_sample() -> NoReturn:
    raise ConfigError("a PipelineModule has no micro-batch to measure its layers with")
