"""The model as a description, and the stages of it that one rank builds.

layers      0  1  2 | 3  4  5 | 6  7  8      PipelineModule: nothing is built
bounds      0         3         6         9
stages      0         1         2            Stage: only the local ones are built
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipemega import random
from pipemega.errors import ConfigError, PipelineError
from pipemega.mesh import Axis
from pipemega.parameters import describe, initialize_parameters, shard_of
from pipemega.pipeline.recompute import recompute
from pipemega.pipeline.spec import Layer, LayerSpec, TiedLayerSpec, as_spec

Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
"""(output, labels) -> the mean loss of the micro-batch, or its (weighted sum, weight)."""


class PipelineModule:
    """A model as a list of layers, each fed with the output of the one before.

    It is a description: `pipemega.initialize` cuts it into stages for the mesh at hand, and each
    rank builds only its own. Parameters go by `layers.<position>.<name in the layer>` on every
    mesh; tied ones by their first position.

    Args:
        layers: LayerSpecs, TiedLayerSpecs, modules or plain functions. The first takes the inputs
            of a micro-batch; what goes from one to the next is any tree of tensors and constants.
        loss_fn: from (output of the last layer, labels) to a scalar, the mean over the micro-batch;
            or to a pair of scalars (sum, weight), whose ratio is averaged over all tokens of the
            global batch with `training.loss_reduction: "token"`. A LayerSpec is built first.
        boundary: what crosses from one stage to the next, as a tree of meta tensors, or a function
            from the position of the first layer behind the cut to such a tree; only for
            `pipeline.shapes: "declared"`.

    Raises:
        ConfigError: there is no layer, or something in the list is not one.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss_fn: Loss | LayerSpec | None = None,
        *,
        boundary: Any | Callable[[int], Any] = None,
    ) -> None:
        if not layers:
            raise ConfigError("a PipelineModule needs at least one layer")
        self.specs = tuple(as_spec(layer, position) for position, layer in enumerate(layers))
        self._loss_fn, self._boundary = loss_fn, boundary

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def layer_names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    def build_loss(self, tensor: Axis) -> Loss | None:
        return (
            self._loss_fn.build(tensor) if isinstance(self._loss_fn, LayerSpec) else self._loss_fn
        )

    def boundary(self, position: int) -> Any:
        """The message that enters layer `position`, where it was declared."""
        return self._boundary(position) if callable(self._boundary) else self._boundary

    def count_parameters(self) -> list[int]:
        """Trainable elements of each unsplit layer; tied copies count where they are."""
        return [
            sum(
                int(torch.Size(shard_of(p).shape).numel())
                for p in _sketch(spec).parameters()
                if p.requires_grad
            )
            for spec in self.specs
        ]

    def tied(self) -> dict[str, tuple[int, ...]]:
        """key -> the positions of the layers that share it, in order."""
        keys: dict[str, list[int]] = {}
        for position, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec):
                keys.setdefault(spec.key, []).append(position)
        return {key: tuple(positions) for key, positions in keys.items()}

    def check_ties(self) -> None:
        """Refuses tied parameters that cannot be one: missing, or of another shape.

        Raises:
            ConfigError: with key, positions and both shapes.
        """
        for key, (first, *others) in self.tied().items():
            shapes = {p: _tied_shapes(self.specs[p], key, p) for p in (first, *others)}
            for other in others:
                for name, shape in shapes[other].items():
                    if shapes[first].get(name) != shape:
                        raise ConfigError(
                            f"layers {first} and {other} are tied by key {key!r}, but {name} is "
                            f"{shapes[first].get(name)} in one and {shape} in the other"
                        )


def _sketch(spec: LayerSpec) -> nn.Module:
    """The layer on the meta device: shapes without memory, whole on one tensor rank."""
    return spec.build(Axis("tensor"), device="meta")


def _tied_shapes(spec: LayerSpec, key: str, position: int) -> dict[str, tuple[int, ...]]:
    assert isinstance(spec, TiedLayerSpec)
    parameters = dict(_sketch(spec).named_parameters())
    for name in spec.tied_weight_attr:
        if name not in parameters:
            raise ConfigError(
                f"layer {position} ({spec.name}), tied by key {key!r}, has no parameter {name!r}; "
                f"it has: {', '.join(parameters) or 'none'} (tied_weight_attr)"
            )
    return {name: shard_of(parameters[name]).shape for name in spec.tied_weight_attr}


class Watch(Protocol):
    """Looks at what goes into each layer of a stage, and at what comes out."""

    def enter(self, position: int, x: Any, draws: "Draws | None") -> None: ...

    def leave(self, position: int, y: Any, draws: "Draws | None") -> None: ...


class Draws(NamedTuple):
    """Which random numbers a forward pass may use: they depend on nothing else than these."""

    seed: int
    step: int
    microbatch: int  # within the global batch


@dataclass(frozen=True)
class Building:
    """What layers are built with.

    Args:
        tensor: the tensor axis, for the layers that ask for it.
        device: where they are built.
        seed: of the first parameters.
        seed_layers: seed the constructors as DeepSpeed does, with seed + position.
        checkpoint_interval: recompute in runs of so many layers; 0 is never.
    """

    tensor: Axis
    device: torch.device
    seed: int
    seed_layers: bool = False
    checkpoint_interval: int = 0


class Stage(nn.Module):
    """A contiguous run of layers: `layers.<position>` for each position from `start` to `stop` - 1.

    Args:
        net: the whole model's description.
        number: of the stage along the model, 0 first.
        start, stop: the run.
        building: how to build.

    Attributes:
        watch: set while a step is looked into; None otherwise.
    """

    def __init__(
        self, net: PipelineModule, number: int, start: int, stop: int, building: Building
    ) -> None:
        super().__init__()
        self.number, self.start, self.stop = number, start, stop
        self.watch: Watch | None = None
        self._building = building
        self._specs = net.specs[start:stop]
        self._first_of_key = {key: positions[0] for key, positions in net.tied().items()}
        self._before_each_layer: list[Callable[[int], None]] = []
        self.layers = nn.ModuleDict(
            {
                str(start + i): _build(spec, start + i, building)
                for i, spec in enumerate(self._specs)
            }
        )

    def logical_names(self) -> dict[str, nn.Parameter]:
        """Logical name -> local parameter; tied ones go by the first position in the model."""
        names = {}
        for name, parameter in self.named_parameters():
            _, position, inner = name.split(".", 2)
            spec = self._specs[int(position) - self.start]
            if isinstance(spec, TiedLayerSpec) and inner in spec.tied_weight_attr:
                name = f"layers.{self._first_of_key[spec.key]}.{inner}"
            names[name] = parameter
        return names

    def tied_names(self) -> dict[str, str]:
        """Logical name -> key, of the tied parameters that are here."""
        return {
            f"layers.{self._first_of_key[spec.key]}.{name}": spec.key
            for spec in self._specs
            if isinstance(spec, TiedLayerSpec)
            for name in spec.tied_weight_attr
        }

    def before_each_layer(self, hook: Callable[[int], None]) -> None:
        """Calls `hook` with the position of each layer before it runs, however it is called."""
        self._before_each_layer.append(hook)

    def forward(self, x: Any, draws: Draws | None = None) -> Any:
        """The output of the last layer.

        Args:
            draws: seeds each layer for dropout; None draws from torch's generator as it stands.

        Raises:
            PipelineError: a layer failed; names it. What it raised is the cause.
        """
        step = self._building.checkpoint_interval
        if step == 0 or not torch.is_grad_enabled():
            return self._run(x, self.start, self.stop, draws)
        for start in range(self.start, self.stop, step):
            stop = min(start + step, self.stop)
            x = recompute(self._run, x, start, stop, draws, restore_rng=draws is None)
        return x

    def _run(self, x: Any, start: int, stop: int, draws: Draws | None) -> Any:
        for position in range(start, stop):
            layer, spec = self.layers[str(position)], self._specs[position - self.start]
            if draws is not None:
                random.seed_layer(*draws, position, device=self._building.device)
            for hook in self._before_each_layer:
                hook(position)
            if self.watch is not None:
                self.watch.enter(position, x, draws)
            try:
                if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
                    x = spec.forward_fn(layer, x)
                else:
                    x = layer(x)
            except PipelineError:
                raise
            except Exception as error:
                # A checkpointed region ends its second run early with an exception of its own.
                if type(error).__module__.startswith("torch.utils.checkpoint"):
                    raise
                raise PipelineError(
                    f"layers.{position} ({spec.name}) failed: {type(error).__name__}: {error}"
                ) from error
            if self.watch is not None:
                self.watch.leave(position, x, draws)
        return x

    def name_of(self, position: int) -> str:
        """What the layer at `position` is called in messages."""
        return self._specs[position - self.start].name

    def extra_repr(self) -> str:
        return f"stage {self.number}, layers {self.start} to {self.stop - 1}"


def _build(spec: LayerSpec, position: int, building: Building) -> nn.Module:
    """One layer with its first parameters, the same on every mesh."""
    name = f"layers.{position}"
    seed = (
        building.seed + position
        if building.seed_layers
        else random.derive_seed(building.seed, name)
    )
    with random.preserve_rng(building.device):
        torch.manual_seed(seed)
        layer = spec.build(building.tensor, building.device)
    initialize_parameters(layer, name, building.seed)
    return layer


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    setattr(module.get_submodule(".".join(path)), last, parameter)


def build_stages(
    net: PipelineModule, bounds: Sequence[int], numbers: Sequence[int], building: Building
) -> Mapping[int, Stage]:
    """The stages `numbers` of `net`, cut at `bounds`.

    Tied layers of one stage share a parameter. Those of several stages on this rank share its
    numbers only: each stage sums up gradients of its own, as it would on a rank of its own, so
    that the placement of stages changes no bit of their sum.
    """
    stages = {n: Stage(net, n, bounds[n], bounds[n + 1], building) for n in numbers}
    holders: dict[str, tuple[Stage, nn.Module]] = {}
    for stage in stages.values():
        for position, layer in enumerate(stage.layers.values(), stage.start):
            spec = net.specs[position]
            if not isinstance(spec, TiedLayerSpec):
                continue
            home, holder = holders.setdefault(spec.key, (stage, layer))
            for name in spec.tied_weight_attr if holder is not layer else ():
                shared = holder.get_parameter(name)
                if home is not stage:
                    shared = describe(
                        nn.Parameter(shared.data, shared.requires_grad), shard_of(shared)
                    )
                _set_parameter(layer, name, shared)
    return stages
