"""PipelineModule, the description of a model as layers, and Stage, a run of built layers.

layers      0  1  2 | 3  4  5 | 6  7  8      PipelineModule: no layer is built
bounds      0         3         6         9
stages      0         1         2            Stage: each rank builds only its own stages
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pipemega import random
from pipemega.distributed.mesh import Axis
from pipemega.errors import PipelineError
from pipemega.parameters import initialize_parameters, shard_of
from pipemega.pipeline.deepspeed_arguments import refuse_arguments
from pipemega.pipeline.deferred_batch_norm import Deferral, check_deferral, defer_batch_norms
from pipemega.pipeline.from_module import ModuleLayers, trace_layers
from pipemega.pipeline.microbatch_loss import Loss, check_loss
from pipemega.pipeline.recompute import ActivationCheckpoints, recompute
from pipemega.pipeline.spec import Layer, LayerSpec, as_specs, remedy
from pipemega.pipeline.stage_input import InputGuard
from pipemega.pipeline.tied_layers import TiedParameter, find_tied_parameters, share_tied_parameters


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
            loss_fn, deferred_batch_norm: as for `PipelineModule`.

        Raises:
            ConfigError: the forward cannot be traced (names the line), a name does not exist, ...;
                the same on every rank.
        """
        origin = trace_layers(module_or_factory, example_inputs, exec_seq)
        net = cls(origin.specs, loss_fn, deferred_batch_norm=deferred_batch_norm)
        net.origin = origin
        return net

    checkpoints: ActivationCheckpoints | None = None  # of the model, unless the config sets them

    vocabulary: Any = None  # how embedding and head are cut: a `vocabulary_shard.VocabularySplit`
    sample_tokens: int | None = None  # of [samples, tokens], if the model takes token ids

    origin: ModuleLayers | None = None  # the layers of a module given to `from_module`

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
        checkpoint_interval: layers per activation checkpoint; 0: those of the model, if any.
    """

    tensor: Axis
    device: torch.device
    seed: int
    seed_layers: bool = False
    checkpoint_interval: int = 0


class Stage(nn.Module):
    """A contiguous run of layers: `layers.<position>` for each position from `start` to `stop` - 1.

    Args:
        net: the whole model.
        number: the stage number, from 0.
        start, stop: positions of the first layer and after the last.

    Attributes:
        observer: is called around each layer; None by default.
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
    with random.preserve_rng(options.device):
        random.seed_torch(seed, options.device)
        layer = spec.build(options.tensor, options.device)
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
