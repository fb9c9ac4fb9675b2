"""PipelineModule, the description of a model as layers, and Stage, a run of built layers.

layers      0  1  2 | 3  4  5 | 6  7  8      PipelineModule: no layer is built
bounds      0         3         6         9
stages      0         1         2            Stage: each rank builds only its own stages

Finds the parameters that several layers share, and checks them.

Copies of module buffers, which a forward may change.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pipemega import random
from pipemega.config.unknown_keys import refuse_arguments
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, PipelineError
from pipemega.lazy_imports import load_name
from pipemega.parameters import attach_shard, initialize_parameters, shard_of
from pipemega.pipeline.messages import InputGuard
from pipemega.pipeline.microbatch_loss import Loss, check_loss
from pipemega.pipeline.model.batch_norm import Deferral, check_deferral, defer_batch_norms
from pipemega.pipeline.model.recompute import ActivationCheckpoints, recompute
from pipemega.pipeline.model.spec import Layer, LayerSpec, as_specs, remedy

_TRACER = "pipemega.pipeline.tracing.from_module:trace_layers"


class LayersOfModule(Protocol):
    """The layers of a module given to `from_module`, and their names in it."""

    specs: list[LayerSpec]
    splits: tuple[int, ...]  # positions of the layers at which the user starts a stage

    def prepare(self, positions: Collection[int], seed: int) -> None: ...

    def state_names(self) -> dict[str, str]: ...


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
        specs, layers: specs and layers of the whole model; `layers` are built, on any device.

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


class PipelineModule:
    """A model as a list of layers; the output of each layer is the input of the next.

    This is only a description: `pipemega.initialize` partitions it into stages for the mesh, and
    each rank builds its own stages. On every mesh a parameter has the logical name
    `layers.<position>.<name in the layer>`; a tied parameter has the position of its first layer.

    Args:
        layers: LayerSpecs, TiedLayerSpecs, modules or plain functions. The first layer takes the
            inputs of a micro-batch; outputs are any tree of tensors and constants.
        loss_fn: maps (output of the last layer, labels) to a scalar, the mean over the
            micro-batch; or to a `WeightedLoss`, which `training.loss_reduction: "token"` averages
            over all tokens of the global batch. May be a LayerSpec.
        boundary: the message between two stages as a tree of meta tensors, or a function that
            returns this tree for the position of the first layer of the later stage; used only by
            `pipeline.shapes: "declared"`.
        deferred_batch_norm: convert each BatchNorm to a DeferredBatchNorm; "sync": which joins its
            statistics over the data ranks.
        unsupported: refused; for DeepSpeed's arguments the error names the config key to use.

    Raises:
        ConfigError: the list is empty, an entry is not a layer, or a function uses a trainable
            module; the same on every rank.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        loss_fn: Loss | LayerSpec | None = None,
        *,
        boundary: Any | Callable[[int], Any] = None,
        deferred_batch_norm: Deferral = False,
        **unsupported: Any,
    ) -> None:
        known = ("layers", "loss_fn", "boundary", "deferred_batch_norm")
        refuse_arguments("PipelineModule()", unsupported, known)
        self.specs = as_specs(layers)
        self.deferred_batch_norm = check_deferral(deferred_batch_norm)
        check_loss(loss_fn)
        self._loss_fn, self._boundary = loss_fn, boundary

    @classmethod
    def from_module(
        cls,
        module_or_factory: nn.Module | Callable[[], nn.Module],
        example_inputs: Any = None,
        exec_seq: Sequence[Any] | None = None,
        loss_fn: Loss | LayerSpec | None = None,
        deferred_batch_norm: Deferral = False,
    ) -> "PipelineModule":
        """Return a pipeline of one module, whose forward torch.fx traces and cuts into layers.

        Args:
            module_or_factory: the module; or a class or function without arguments that builds it.
                A factory is called on every rank, which keeps only the parameters of its stages;
                they are initialized equally on every mesh.
            example_inputs: the inputs of a micro-batch: the argument of forward, a tuple of its
                arguments, or a dict by their names. The layers are compared with the module on
                them. None: the arguments without a default are given, and nothing is compared.
            exec_seq: names of submodules in the order of their calls, instead of a trace;
                (function, "front") and (function, "behind") belong to the next and the last name,
                a function alone is a layer, and at `pipemega.SPLIT` a stage starts.
            loss_fn, deferred_batch_norm: the arguments of `PipelineModule`.

        Raises:
            ConfigError: the forward cannot be traced (names the line), a name does not exist, ...;
                the same on every rank.
        """
        origin: LayersOfModule = load_name(_TRACER)(module_or_factory, example_inputs, exec_seq)
        net = cls(origin.specs, loss_fn, deferred_batch_norm=deferred_batch_norm)
        net.origin = origin
        return net

    checkpoints: ActivationCheckpoints | None = None  # of the model, unless the config sets them

    vocabulary: Any = None  # how embedding and head are cut: a `vocabulary_shard.VocabularySplit`
    sample_tokens: int | None = None  # tokens per sample, if the model takes token ids

    origin: LayersOfModule | None = None  # the layers of a module given to `from_module`

    def on_meta(self) -> "PipelineModule":
        """Return a copy for the meta device; modules that the user built are copied, not used."""
        return self.with_specs(spec.on_meta() for spec in self.specs)

    def with_specs(
        self,
        specs: Iterable[LayerSpec],
        boundary: Callable[[int], Any] | None = None,
        loss_fn: LayerSpec | None = None,
    ) -> "PipelineModule":
        """Return a copy with other layers, and another `boundary` or loss if it is given."""
        copied = copy.copy(self)
        for cached in ("meta_layers", "tied_parameters"):
            vars(copied).pop(cached, None)
        copied.specs = tuple(specs)
        if boundary is not None:
            copied._boundary = boundary
        copied._loss_fn = loss_fn or self._loss_fn
        return copied

    def module_name(self, logical: str) -> str:
        """Return the name of `layers.<position>...` in the model that this one was made from."""
        return logical if self.origin is None else logical.split(".", 2)[2]

    def state_names(self) -> dict[str, str] | None:
        """Return name in the original model's state_dict -> logical name; None: it has none."""
        return None if self.origin is None else self.origin.state_names()

    def other_names(self, name: str) -> tuple[str, ...]:
        """Return the other names of tensor `name` in the original model, which ties them."""
        return ()

    def recomputes(self, start: int, stop: int) -> bool:
        """Return whether activation checkpointing applies to the layers start to stop - 1."""
        return True

    def is_output_head(self, position: int, inner: str) -> bool:
        """Return whether module `inner` of a layer is the output head of the original model."""
        return False

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def layer_names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    def checkpoint_metadata(self) -> dict[str, Any]:
        """Return JSON values that describe the model; checkpoints contain them as "model"."""
        return {}

    def build_loss(self, tensor: Axis) -> Loss | None:
        """Return the loss function; build it on the tensor axis if it is a `LayerSpec`."""
        loss = self._loss_fn
        if not isinstance(loss, LayerSpec):
            return loss
        built = loss.build(tensor)
        check_loss(built)
        return built

    def boundary(self, position: int) -> Any:
        """Return the declared input of layer `position`, the first layer of a stage."""
        return self._boundary(position) if callable(self._boundary) else self._boundary

    @cached_property
    def meta_layers(self) -> tuple[nn.Module, ...]:
        """The unsharded layers on the meta device; modules that the user built as they are."""
        with _disable_current_modes():  # a mode that counts the tensors of a run
            layers = (spec.build(Axis("tensor"), device="meta") for spec in self.specs)
            return tuple(defer_batch_norms(layer, self.deferred_batch_norm) for layer in layers)

    def count_parameters(self, *, trainable: bool = False) -> list[int]:
        """Return the (trainable) elements of each unsharded layer; each tied copy counts."""
        return [
            sum(_elements(p) for p in layer.parameters() if p.requires_grad or not trainable)
            for layer in self.meta_layers
        ]

    def count_used_parameters(self) -> list[int]:
        """Return the elements of each unsharded layer that a token uses; see `Experts`."""
        counts = self.count_parameters()
        for position, layer in enumerate(self.meta_layers):
            experts: list[Any] = [m for m in layer.modules() if hasattr(m, "used_share")]
            for module in experts:
                (used, of), sizes = module.used_share, map(_elements, module.parameters())
                counts[position] -= sum(n - n * used // of for n in sizes)
        return counts

    def num_parameters(self, *, trainable: bool = False) -> int:
        """Return the (trainable) elements of the unsharded model; tied copies count once."""
        elements: dict[Any, int] = {}
        for position, (spec, layer) in enumerate(zip(self.specs, self.meta_layers, strict=True)):
            for name, parameter in layer.named_parameters():
                if parameter.requires_grad or not trainable:
                    identity = spec.ties.get(name, (position, name))
                    elements[identity] = _elements(parameter)
        return sum(elements.values())

    def has_built_tensors(self, position: int) -> bool:
        """Return whether the user built tensors of this layer, so that they may differ by rank."""
        layer = self.meta_layers[position]
        return not all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))

    @cached_property
    def tied_parameters(self) -> tuple[TiedParameter, ...]:
        """The parameters that several layers share, in the order of their keys."""
        return find_tied_parameters(self.specs)


def _elements(parameter: Tensor) -> int:
    return torch.Size(shard_of(parameter).shape).numel()


class LayerObserver(Protocol):
    """Observes the input and the output of each layer of a stage."""

    reads_outputs: bool  # needs logits as the output of a head, not `DeferredLogits`

    def enter(self, position: int, x: Any, rng_key: "RngKey | None") -> None: ...

    def leave(self, position: int, y: Any, rng_key: "RngKey | None") -> None: ...

    def failed(self, position: int) -> None: ...  # called instead of `leave` after an error


class RngKey(NamedTuple):
    """Seeds the dropout of one forward, together with the position of the layer."""

    seed: int
    step: int
    microbatch: int  # within the global batch


@dataclass(frozen=True)
class BuildOptions:
    """How layers are built.

    Args:
        tensor: the tensor axis, for layers with a `TENSOR_AXIS` argument.
        device: device of the parameters.
        seed: seed of the initial parameters.
        seed_layers: seed the constructors with seed + position, as DeepSpeed does.
        checkpoint_interval: layers per activation checkpoint; 0: the checkpoints of the model, if
            it has any.
        expert: the expert axis, for layers with an `EXPERT_AXIS` argument.
    """

    tensor: Axis
    device: torch.device
    seed: int
    seed_layers: bool = False
    checkpoint_interval: int = 0
    expert: Axis = field(default_factory=partial(Axis, "expert"))


class Stage(nn.Module):
    """A contiguous run of layers: `layers.<position>` for each position from `start` to `stop` - 1.

    Args:
        net: the whole model.
        number: the stage number, from 0.
        start, stop: positions of the first layer and after the last.

    Attributes:
        observer: an object that is called around each layer; None by default.
        input_guard: keeps inputs that are used again from being changed in place.
    """

    def __init__(
        self, net: PipelineModule, number: int, start: int, stop: int, options: BuildOptions
    ) -> None:
        super().__init__()
        self.number, self.start, self.stop = number, start, stop
        self.observer: LayerObserver | None = None
        self.input_guard = InputGuard()
        self._options = options
        self._specs = net.specs[start:stop]
        self._tied_names = {
            f"layers.{position}.{name}": tied.logical_name
            for tied in net.tied_parameters
            for position, name in tied.places
        }
        self._layer_hooks: list[Callable[[int], None]] = []
        checkpoints, interval = net.checkpoints, options.checkpoint_interval
        if interval:
            checkpoints = ActivationCheckpoints(start, stop, interval)
        segments = checkpoints.segments(start, stop) if checkpoints is not None else []
        self._segments = [(a, b, cut and net.recomputes(a, b)) for a, b, cut in segments]
        layers = {
            str(p): build_layer(spec, p, options) for p, spec in enumerate(self._specs, start)
        }
        self.layers = nn.ModuleDict(layers)
        defer_batch_norms(self.layers, net.deferred_batch_norm)

    @property
    def last_layer(self) -> nn.Module:
        return list(self.layers.values())[-1]

    def logical_names(self) -> dict[str, nn.Parameter]:
        """Return logical name -> local parameter."""
        named = self.named_parameters()
        return {self._tied_names.get(name, name): parameter for name, parameter in named}

    def register_layer_hook(self, hook: Callable[[int], None]) -> None:
        """Call `hook` with the position of each layer before the layer runs, also in recompute."""
        self._layer_hooks.append(hook)

    def forward(self, x: Any, rng_key: RngKey | None = None) -> Any:
        """Return the output of the last layer.

        Args:
            rng_key: seeds each layer for dropout; None uses the current torch generator.

        Raises:
            PipelineError: a layer failed; names the layer, with its exception as the cause.
        """
        segments = self._segments if torch.is_grad_enabled() else []
        for start, stop, recomputed in segments or [(self.start, self.stop, False)]:
            run: Callable[..., Any] = self._run
            # The first stage gets the data of the caller, which it must not change.
            if recomputed or (self.number == 0 and start == self.start):
                guard = self.input_guard.bind((start, stop, self.training))
                run = partial(self._run_guarded, guard)
            if recomputed:
                x = recompute(run, x, start, stop, rng_key, restore_rng=rng_key is None)
            else:
                x = run(x, start, stop, rng_key)
        return x

    def _run_guarded(
        self, guard: Callable[..., Any], x: Any, start: int, stop: int, rng_key: RngKey | None
    ) -> Any:
        """Run layers that may change x in place, but keep x as it is."""
        return guard(lambda x: self._run(x, start, stop, rng_key), x)

    def _run(self, x: Any, start: int, stop: int, rng_key: RngKey | None) -> Any:
        layers = self.layers
        for position in range(start, stop):
            layer, spec = layers[str(position)], self._specs[position - self.start]
            if rng_key is not None:
                random.seed_layer(*rng_key, position, device=self._options.device)
            for hook in self._layer_hooks:
                hook(position)
            if self.observer is not None:
                self.observer.enter(position, x, rng_key)
            try:
                x = layer(x) if spec.forward_fn is None else spec.forward_fn(layer, x)
            except Exception as error:
                if self.observer is not None:
                    self.observer.failed(position)
                # torch.utils.checkpoint stops a recomputation early by an internal exception.
                stops_early = type(error).__module__.startswith("torch.utils.checkpoint")
                if stops_early or isinstance(error, PipelineError):
                    raise
                raise PipelineError(
                    f"layers.{position} ({spec.name}) failed: {type(error).__name__}: {error}"
                    f"{remedy(layer, position, x, error)}"
                ) from error
            if self.observer is not None:
                self.observer.leave(position, x, rng_key)
        return x

    def name_of(self, position: int) -> str:
        """Return the name of the layer at `position` for messages."""
        return self._specs[position - self.start].name

    def extra_repr(self) -> str:
        return f"stage {self.number}, layers {self.start} to {self.stop - 1}"


def build_layer(spec: LayerSpec, position: int, options: BuildOptions) -> nn.Module:
    """Build one layer and initialize its parameters, equally on every mesh."""
    name = f"layers.{position}"
    seed = random.derive_seed(options.seed, name)
    if options.seed_layers:
        seed = options.seed + position
    # Errors of its exchanges name the layer, also in backward.
    expert = replace(options.expert, name=f"experts of {name}")
    with random.preserve_rng(options.device):
        random.seed_torch(seed, options.device)
        layer = spec.on_expert_axis(expert).build(options.tensor, options.device)
    for parameter in layer.parameters():
        if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
            # It has gaps or overlaps; collectives and fused optimizers walk the whole memory.
            parameter.data = parameter.data.contiguous()
    initialize_parameters(layer, name, options.seed)
    return layer


def build_stages(
    net: PipelineModule, bounds: Sequence[int], numbers: Sequence[int], options: BuildOptions
) -> Mapping[int, Stage]:
    """Build the stages `numbers` of `net`; stage s is layers bounds[s] to bounds[s + 1] - 1.

    Tied layers share their parameters as `share_tied_parameters` says.
    """
    if net.origin is not None and options.device.type != "meta":
        local = [p for n in numbers for p in range(bounds[n], bounds[n + 1])]
        net.origin.prepare(local, options.seed)
    stages = {n: Stage(net, n, bounds[n], bounds[n + 1], options) for n in numbers}
    layers = {
        stage.start + i: (number, layer)
        for number, stage in stages.items()
        for i, layer in enumerate(stage.layers.values())
    }
    share_tied_parameters(net.tied_parameters, layers)
    return stages


def _buffers_of(*trees: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return (module, name, buffer) of each buffer of the modules and their submodules."""
    return [
        (module, name, buffer)
        for tree in trees
        for module in tree.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


class BufferCopies:
    """Copies of the current buffers of modules, for example running statistics.

    Args:
        modules: the root modules; submodules are included.
    """

    @torch.no_grad()
    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._copies = [(*found, found[2].clone()) for found in _buffers_of(*modules)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffer tensors, also where they were replaced, and their values."""
        for module, name, buffer, value in self._copies:
            module._buffers[name] = buffer.copy_(value)


@contextmanager
def keep_buffers(root: nn.Module) -> Iterator[None]:
    """Let forwards in this block change copies of the buffers of `root`.

    The buffers themselves are not restored but never changed: autograd may have saved them in the
    forwards of other micro-batches.
    """
    kept = _buffers_of(root)
    for module, name, buffer in kept:
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer
