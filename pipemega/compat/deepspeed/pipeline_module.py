"""DeepSpeed's PipelineModule: builds the layers of this rank's stage when it is constructed.

DeepSpeed's LayerSpec and TiedLayerSpec, and layers that a PipelineModule has built from them.

`deepspeed.utils.RepeatingLoader`.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from pipemega.compat.deepspeed.activation_checkpoints import check_checkpoint_function, checkpoint
from pipemega.compat.deepspeed.process_topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
    init_distributed,
)
from pipemega.compat.deepspeed.small_calls import set_random_seed
from pipemega.distributed.mesh import Axis, on_all_ranks
from pipemega.errors import ConfigError, PipemegaError
from pipemega.parameters import Shard, attach_shard, shard_of
from pipemega.pipeline.microbatch_loss import Loss, check_loss
from pipemega.pipeline.model.module import BuildOptions, PipelineModule, Stage, build_stages
from pipemega.pipeline.model.spec import Function, LayerSpec, TiedLayerSpec, as_specs
from pipemega.pipeline.model.stages import stage_bounds
from pipemega.pipeline.tracing.module_source import copy_structure
from pipemega.random import preserve_all_rng

_ONE_RANK = Axis("tensor")


class PipeLayerSpec(LayerSpec):
    """`deepspeed.pipe.LayerSpec`: the class of a layer and its arguments.

    A constructor that needs real tensors, such as one that loads weights, works: it runs on the
    ranks that have the layer, and on the others only to learn the shapes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An argument of the layer here, as all others.
        device = {"device": kwargs.pop("device")} if "device" in kwargs else {}
        super().__init__(*args, **kwargs)
        self.kwargs |= device

    @property
    def module_args(self) -> tuple[Any, ...]:
        return self.args

    @property
    def module_kwargs(self) -> dict[str, Any]:
        return self.kwargs

    def build(
        self,
        tensor: Axis | None = None,
        device: torch.device | str | None = None,
        log: bool = False,
    ) -> nn.Module:
        """Build the layer; without arguments as `spec.build()` of DeepSpeed."""
        tensor = tensor if isinstance(tensor, Axis) else _ONE_RANK
        if device is None or torch.device(device).type != "meta":
            return super().build(tensor, device)
        mark_tensor_shards(self._structure, tensor)
        return self._structure

    @cached_property
    def _structure(self) -> nn.Module:
        """The layer on the meta device."""
        with preserve_all_rng():
            try:
                with warnings.catch_warnings():
                    # Loaded weights do not fit into tensors without values.
                    warnings.simplefilter("ignore")
                    built = super().build(_ONE_RANK, "meta")
            except PipemegaError:
                built = super().build(_ONE_RANK, "cpu")
        structure = copy_structure(built, "meta")
        for name, parameter in built.named_parameters():
            vars(structure.get_parameter(name)).update(vars(parameter))
        return structure


class PipeTiedLayerSpec(PipeLayerSpec, TiedLayerSpec):
    """`deepspeed.pipe.TiedLayerSpec`: a layer that shares weights with others of the same key.

    Args:
        tied_weight_attr: names of attributes of the layer, such as "weight", "linear.weight" or a
            property that returns a parameter.
    """

    @cached_property
    def _tied_names(self) -> dict[str, tuple[str, str]]:
        return {self._name_of(attr): (self.key, attr) for attr in self.tied_weight_attr}

    @property
    def ties(self) -> Mapping[str, tuple[str, str]]:
        return self._tied_names

    def _name_of(self, attr: str) -> str:
        """Return the name of the parameter that attribute `attr` of the layer is."""
        value: Any = self._structure
        parameters = dict(self._structure.named_parameters(remove_duplicate=False))
        try:
            for part in attr.split("."):
                value = getattr(value, part)
        except AttributeError:
            value = None
        for name, parameter in parameters.items():
            if parameter is value:
                return name
        found = "does not exist" if value is None else f"is of type {type(value).__name__}"
        raise ConfigError(
            f"TiedLayerSpec({self.key!r}, {self.name}): tied_weight_attr {attr!r} {found}, and "
            f"must be a parameter of the layer, which has: {', '.join(parameters) or 'none'}",
            on_every_rank=True,
        )


class _WrappedSpec(LayerSpec):
    """The layer of `spec`, which a subclass builds in another way."""

    def __init__(self, spec: LayerSpec, typename: Callable[..., nn.Module]) -> None:
        super().__init__(typename)
        self._spec = spec
        self.forward_fn = spec.forward_fn

    @property
    def ties(self) -> Mapping[str, tuple[str, str]]:
        return self._spec.ties

    @property
    def name(self) -> str:
        return self._spec.name


class SeededLayerSpec(_WrappedSpec):
    """A layer whose constructor runs with a seed of its own.

    Args:
        spec: the spec of the layer.
        seed_fn: function that is called with `seed` first; None: seed torch, numpy and `random`.
    """

    def __init__(self, spec: LayerSpec, seed: int, seed_fn: Callable[[int], Any] | None) -> None:
        super().__init__(spec, spec.typename)
        self.args, self.kwargs, self._seed = spec.args, spec.kwargs, seed
        self._seed_fn = seed_fn if seed_fn is not None else set_random_seed

    def build(self, tensor: Axis, device: torch.device | str | None = None) -> nn.Module:
        if device is not None and torch.device(device).type == "meta":
            return self._spec.build(tensor, device)
        with preserve_all_rng():
            self._seed_fn(self._seed)
            return self._spec.build(tensor, device)


class BuiltLayerSpec(_WrappedSpec):
    """A layer that the PipelineModule has built; it is used directly, not copied."""

    already_built = True

    def __init__(self, layer: nn.Module, spec: LayerSpec) -> None:
        super().__init__(spec, type(layer))
        self.layer = layer

    def build(self, tensor: Axis, device: torch.device | str | None = None) -> nn.Module:
        if device is not None and torch.device(device).type != "meta":
            return self.layer.to(device)
        return self.layer

    def on_meta(self) -> LayerSpec:
        copied = copy_structure(self.layer, "meta")
        for name, parameter in copied.named_parameters():
            attach_shard(parameter, shard_of(self.layer.get_parameter(name)))
        return BuiltLayerSpec(copied, self._spec)


def layers_as_specs(layers: Iterable[Any]) -> tuple[LayerSpec, ...]:
    """Return the list of layers of DeepSpeed's PipelineModule as specs.

    Raises:
        ConfigError: an entry is no layer; the same on every rank.
    """
    entries = list(layers)
    for position, layer in enumerate(entries):
        if isinstance(layer, nn.Module) and hasattr(layer, "_layer_specs"):
            raise ConfigError(
                f"layers[{position}] is a PipelineModule: put its layers in the list instead",
                on_every_rank=True,
            )
    return as_specs(entries)


def mark_tensor_shards(layer: nn.Module, axis: Axis) -> None:
    """Attach shards to parameters that Megatron's parallel layers have marked as cut.

    They have the attributes `tensor_model_parallel` (older: `model_parallel`) and `partition_dim`.
    """
    for parameter in layer.parameters():
        cut = getattr(
            parameter, "tensor_model_parallel", getattr(parameter, "model_parallel", False)
        )
        if not cut or axis.size == 1:
            continue
        dim = max(int(getattr(parameter, "partition_dim", 0)), 0)
        size = parameter.shape[dim]
        shape = [*parameter.shape]
        shape[dim] = size * axis.size
        start = axis.rank * size
        attach_shard(parameter, Shard(tuple(shape), dim, ((start, start + size),)))


_PARTITIONS = ("parameters", "best", "uniform")


class DeepSpeedPipelineModule(nn.Module):
    """A model as a list of layers; each rank has the layers of its stage.  Collective.

    `deepspeed.pipe.PipelineModule`. The layers of the stage are submodules with the name of their
    position: "0", "1", ... The initial values do not depend on the number of stages: a constructor
    runs with a seed that depends on the position of the layer, and on `torch.initial_seed()` or
    `base_seed`.

    Args:
        layers: LayerSpecs, TiedLayerSpecs, modules and functions.
        num_stages: stages of the pipeline; the other ranks are data ranks.
        topology: the topology of the ranks, instead of `num_stages`.
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


class RepeatingLoader:
    """Starts a loader again when it ends.

    Args:
        loader: an iterable with at least one batch.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
