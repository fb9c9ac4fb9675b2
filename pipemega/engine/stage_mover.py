"""Moves the stages of a running engine to another cut of the model, without a restart.

    state of the old stages   parameters, masters, optimizer state, buffers by logical name
    new stages                built as at the start of a run
    exchange                  each rank gets the state of its new layers (`state_exchange`)
    optimizer step            the same object, with the same optimizer, schedule and counters,
                              over the masters of the new stages

The result is the same, bit for bit, as if a run loaded a checkpoint of the step under the new cut.
The old stages are freed before the exchange, so a rank needs little more memory than for both sets
of parameters and masters.

Moves the state of layers between ranks: what a checkpoint contains of them, without files.

    1. between pipeline ranks     the whole tensors of a layer that is to be on another rank,
                                  from the same data and tensor rank
    2. between data ranks         only with ZeRO: the slices of each parameter, because the new
                                  buckets begin and end elsewhere

Both use the logical names of parameters. A rank keeps what it has already, and frees what it has
sent.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from pipemega.distributed.exchanges import Key, Piece, TensorInfo, exchange
from pipemega.distributed.mesh import Axis, gather_objects
from pipemega.engine.run_setup import ExecutorBuilder, RunSetup, declared_headers
from pipemega.errors import ConfigError
from pipemega.monitor import get_logger
from pipemega.optimizer import MasterParams, OptimizerStep
from pipemega.optimizer.build_step import build_masters
from pipemega.optimizer.param_groups import pack
from pipemega.optimizer.user_optimizer import GivenGroups
from pipemega.parameters import shard_of
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.model.stages import LocalModel
from pipemega.pipeline.plan.instructions import Plan
from pipemega.printing import show_bytes
from pipemega.random import preserve_all_rng

State = dict[str, dict[str, Any]]
"""Logical name -> {"parameter", "master", "exp_avg", "buffer", ..: tensor or plain value}.

"span": the flat range of the parameter that the slices of ZeRO hold.
"""
Span = tuple[int, int]
_Described = dict[str, dict[str, Any]]  # a `State` with `TensorInfo`s for the tensors


class Moved(NamedTuple):
    """The state of this rank after a move, and the bytes that all ranks of the axis have sent."""

    state: State
    sent: int


def state_of(model: LocalModel, step: OptimizerStep) -> State:
    """Return the state of the local layers: the tensors themselves, not copies."""
    entries = pack(step.optimizer, step.masters)
    state: State = {}
    for name, parameter in model.parameters.items():
        entry = state[name] = dict(entries.get(name, {}))
        if "master" not in entry:
            entry["parameter"] = parameter.detach()
    return state | {name: {"buffer": b} for name, b in model.persistent_buffers.items()}


def between_pipeline_ranks(
    state: State, names: Iterable[str], axis: Axis, device: torch.device
) -> Moved:
    """Return the state of `names`, from the ranks that have it; collective over the axis.

    Args:
        state: the state on this rank; emptied.
        names: the names that this rank is to have. A name that no rank has is left out.
        axis: the pipeline axis.
        device: the device of the tensors that are not on the host.
    """
    mine = _described(state, device)
    ranks: list[tuple[_Described, list[str]]] = gather_objects((mine, sorted(names)), axis)
    described = [held for held, _ in ranks]
    pieces: list[Piece] = []
    wanted: dict[Key, TensorInfo] = {}
    found: State = {}
    for target, (_, needed) in enumerate(ranks):
        for name in needed:
            source = _source(name, target, described)
            if source is None:
                continue
            if target == axis.rank:
                found[name] = dict(state[name] if source == target else described[source][name])
            if source == target:
                continue
            for kind, info in described[source][name].items():
                if not isinstance(info, TensorInfo):
                    continue
                size = _nbytes(info)
                pieces.append(Piece((name, kind), source, target, 0, 0, size, info.device))
                if target == axis.rank:
                    wanted[name, kind] = info
    sending = {piece.key for piece in pieces if piece.source == axis.rank}
    held: dict[Key, Tensor] = {
        (name, kind): value.contiguous()
        for name, entry in state.items()
        for kind, value in entry.items()
        if (name, kind) in sending
    }
    state.clear()
    received = exchange(pieces, held, wanted, axis, device)
    for name, kind in wanted:
        found[name][kind] = received[name, kind]
    return Moved(found, sum(piece.size for piece in pieces))


def between_data_ranks(
    state: State, spans: Mapping[str, Span], axis: Axis, device: torch.device
) -> Moved:
    """Return the state with other slices of the parameters; collective over the axis.

    State that is not per element, such as the number of steps, comes from the rank that has the
    first element of the parameter, as in a checkpoint.

    Args:
        state: the state on this rank, with other spans; its slices are removed.
        spans: logical name -> the range of the parameter that this rank is to hold.
        axis: the data axis.
        device: the device of the tensors that are not on the host.
    """
    mine = _described({name: state[name] for name in spans}, device)
    ranks: list[tuple[_Described, Mapping[str, Span]]] = gather_objects((mine, spans), axis)
    pieces: list[Piece] = []
    wanted: dict[Key, TensorInfo] = {}
    found: State = dict(state)
    held: dict[Key, Tensor] = {}
    for name, span in spans.items():
        entries = [held_by[name] for held_by, _ in ranks]
        targets = [new[name] for _, new in ranks]
        old = [entry["span"] for entry in entries]
        first = next((r for r, (start, stop) in enumerate(old) if start == 0 < stop), 0)
        entry = state.pop(name)
        found[name] = {"span": span}
        for kind, info in entries[first].items():
            if kind == "span":
                continue
            if not isinstance(info, TensorInfo):
                found[name][kind] = info
                continue
            key = (name, kind)
            if kind == "parameter":  # frozen, or not sliced: whole on every rank
                found[name][kind] = entry[kind]
                continue
            start, stop = old[first]
            sliced = info.shape == (stop - start,) and kind != "step"
            new = list(_sliced_pieces(key, info, old, targets) if sliced else ())
            if not sliced:
                size = _nbytes(info)
                whole = Piece(key, first, 0, 0, 0, size, info.device)
                new = [whole._replace(target=rank) for rank in range(axis.size)]
            pieces += new
            shape = (span[1] - span[0],) if sliced else info.shape
            wanted[key] = info._replace(shape=shape)
            if any(piece.source == axis.rank for piece in new):
                held[key] = entry[kind].contiguous()
    received = exchange(pieces, held, wanted, axis, device)
    for (name, kind), tensor in received.items():
        found[name][kind] = tensor
    return Moved(found, sum(piece.size for piece in pieces if piece.source != piece.target))


def _sliced_pieces(
    key: Key, info: TensorInfo, old: Iterable[Span], new: Iterable[Span]
) -> Iterator[Piece]:
    """Yield what each rank needs of the slices that the ranks have."""
    size = info.dtype.itemsize
    sources = list(enumerate(old))
    for target, (start, stop) in enumerate(new):
        for source, (low, high) in sources:
            first, last = max(start, low), min(stop, high)
            if first < last:
                read, write = (first - low) * size, (first - start) * size
                yield Piece(key, source, target, read, write, (last - first) * size, info.device)


def _source(name: str, target: int, described: list[_Described]) -> int | None:
    """Return the rank from which `target` gets a name: itself, or the first that has it."""
    if name in described[target]:
        return target
    return next((rank for rank, held in enumerate(described) if name in held), None)


def _described(state: State, device: torch.device) -> _Described:
    def described(value: Any) -> Any:
        return TensorInfo.of(value, device) if isinstance(value, Tensor) else value

    return {
        name: {kind: described(value) for kind, value in entry.items()}
        for name, entry in state.items()
    }


def _nbytes(info: TensorInfo) -> int:
    return prod(info.shape) * info.dtype.itemsize


@dataclass(frozen=True)
class _Snapshot:
    """What the caller may have changed since the stages were built.

    Args:
        modules: name -> identities of a module, its hooks and parameters, and its settings.
        groups: number of groups of the optimizer.
    """

    modules: Mapping[str, tuple[Any, ...]]
    groups: int


class BuiltModules:
    """The modules that the user has built, before stages are made of them: other stages may follow.

    Args:
        net: the whole model.
    """

    def __init__(self, net: PipelineModule) -> None:
        layers = [net.meta_layers[p] for p in range(len(net)) if net.has_built_tensors(p)]
        modules = {id(m): m for layer in layers for m in layer.modules()}.values()
        parameters = {id(p): p for layer in layers for p in layer.parameters()}.values()
        self._attributes = [(m, dict(vars(m)), _entries(vars(m).items())) for m in modules]
        self._parameters = [(p, p.data, p.grad, dict(_grad_hooks(p))) for p in parameters]

    def restore(self) -> None:
        """Remove everything that an engine has attached; the parameters have their first values."""
        for module, attributes, entries in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
            for key, before in entries.items():
                # The same dict: the handle of a hook refers to it.
                attributes[key].clear()
                attributes[key].update(before)
        for parameter, data, grad, hooks in self._parameters:
            parameter.data, parameter.grad = data, grad
            current = _grad_hooks(parameter)
            current.clear()
            current.update(hooks)


def _entries(attributes: Iterable[tuple[str, Any]]) -> dict[str, dict[Any, Any]]:
    return {key: dict(value) for key, value in attributes if isinstance(value, dict)}


def _grad_hooks(parameter: Tensor) -> dict[int, Any]:
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


class StageMover:
    """Moves the stages of one engine; `move` may be called several times.

    Args:
        setup: the setup of the run.
        executors: builds the executor of the new stages.
    """

    def __init__(self, setup: RunSetup, executors: ExecutorBuilder) -> None:
        self._setup, self._mesh, self._executors = setup, setup.mesh, executors
        self._snapshot: _Snapshot | None = None

    def watch(self, model: LocalModel, step: OptimizerStep) -> None:
        """Remember the hooks and modules that the caller may change; when the engine is built."""
        self._snapshot = _Snapshot(_modules(model), len(step.optimizer.param_groups))

    def obstacle(
        self,
        model: LocalModel,
        step: OptimizerStep,
        bounds: Sequence[int],
        *,
        is_first: bool = False,
    ) -> str:
        """Return why the stages must stay, as a clause; "" if they can move. Collective.

        Args:
            is_first: the move is before the first step, with `BuiltModules`.
        """
        found = (
            self._obstacle_of_model(bounds, moves_built=is_first)
            or self._obstacle_of_optimizer(step)
            or self._change_by_caller(model, step)
        )
        return next(filter(None, gather_objects(found, self._mesh.world)), "")

    def _obstacle_of_model(self, bounds: Sequence[int], *, moves_built: bool) -> str:
        net = self._setup.net
        built = next((p for p in range(len(net)) if net.has_built_tensors(p)), None)
        if built is not None and not moves_built:
            return (
                f"layer {built} ({net.layer_names[built]}) is a module that was built before "
                "initialize(); give a LayerSpec, or from_module() a function that builds it"
            )
        if self._setup.config.pipeline.shapes == "declared":
            try:
                declared_headers(net, bounds)
            except ConfigError as error:
                return str(error)
        return ""

    def _obstacle_of_optimizer(self, step: OptimizerStep) -> str:
        arguments, optimizer = self._setup.arguments, step.optimizer
        if isinstance(arguments.groups, GivenGroups):
            return "the optimizer or its groups were built over the parameters of the model"
        if arguments.optimizer is None:
            return ""
        name = type(optimizer).__name__
        if type(optimizer).state_dict is not Optimizer.state_dict:
            return f"{name} has a state_dict() of its own, so it may keep state elsewhere"
        masters = {id(master) for master in step.masters.named.values()}
        others = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
        for key, value in others.items():
            if any(id(leaf) in masters for leaf in pytree.tree_leaves(value)):
                return f"{name}.{key} refers to parameters of this rank"
        return ""

    def _change_by_caller(self, model: LocalModel, step: OptimizerStep) -> str:
        before = self._snapshot
        assert before is not None, "watch() was not called"
        groups = step.optimizer.param_groups
        held = sorted(id(p) for group in groups for p in group["params"])
        if held != sorted(map(id, step.masters.named.values())) or len(groups) != before.groups:
            return "the groups of the optimizer were changed after initialize()"
        if step.masters.frozen.names or step.masters.frozen.have_changed:
            return "parameters were frozen after initialize()"
        now = _modules(model)
        for name in [*now, *before.modules]:
            if now.get(name) != before.modules.get(name):
                return f"the module {name}, its hooks or settings were changed after initialize()"
        return ""

    def move(
        self,
        model: LocalModel,
        step: OptimizerStep,
        plan: Plan,
        bounds: Sequence[int],
        built: BuiltModules | None = None,
    ) -> tuple[LocalModel, Executor]:
        """Move the stages; the parameters and modules of `model` are empty afterwards. Collective.

        Args:
            model: the current stages, after `step.settle()`.
            plan: the plan of the next steps, lowered; `bounds` gives its stages.
            bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
            built: the modules as the user built them; only before the first step, else None.

        Returns:
            the new stages, and what runs plans with them.

        Raises:
            PipelineError: a rank is lost or does not respond in time.
        """
        started = time.perf_counter()
        with preserve_all_rng():
            state = state_of(model, step)
            _free(model, step.masters)
            if built is not None:
                built.restore()
            place = plan.rank_of_stage
            moved = self._setup.build_stages(bounds, place)
            sent = self._fill(moved, step, state)
            executor = self._executors.build(moved, plan, step)
        self.watch(moved, step)
        total = sum(gather_objects(sent, self._mesh.world))
        get_logger(self._mesh.rank).info(
            f"moved the stages: layers {describe_cut(bounds, place)}; {show_bytes(total)} of "
            f"parameters and optimizer state in {time.perf_counter() - started:.2f} s"
        )
        return moved, executor

    @torch.no_grad()
    def _fill(self, model: LocalModel, step: OptimizerStep, state: State) -> int:
        """Give new stages their state; return the bytes that this rank counts of the exchange."""
        setup, mesh = self._setup, self._mesh
        buffers = model.persistent_buffers
        names = [*model.parameters, *buffers]
        state, between_pipeline = between_pipeline_ranks(state, names, mesh.pipeline, mesh.device)
        # The function of a user may divide the parameters into groups of its own.
        masters, optimizer = build_masters(setup.config, mesh, model, setup.arguments)
        between_data = 0
        if masters.spans is not None:
            # Copies of tied parameters have a span too, but no state.
            spans = {name: masters.spans[name] for name in masters.named}
            experts = {n: s for n, s in spans.items() if shard_of(model.parameters[n]).is_expert}
            dense = {name: span for name, span in spans.items() if name not in experts}
            for part, axis in ((dense, mesh.data), (experts, mesh.replica)):
                if not part:
                    continue
                state, moved = between_data_ranks(state, part, axis, mesh.device)
                between_data += moved if axis.rank == 0 else 0
        for name, buffer in buffers.items():
            if name in state:
                buffer.copy_(state[name]["buffer"])
        for name, parameter in model.parameters.items():
            # The value is freed as soon as it is copied.
            value = state[name].pop("parameter", None)
            if value is not None:
                parameter.copy_(value)
        step.replace_masters(masters, optimizer.param_groups, state)
        return between_data + (between_pipeline if mesh.pipeline.rank == 0 else 0)


def describe_cut(bounds: Sequence[int], rank_of_stage: Sequence[int]) -> str:
    """Return the layers of each pipeline rank, as "0-3 | 4-7" or, with chunks, "0, 6-7 | 1-5"."""
    ranges = [
        f"{start}-{stop - 1}" if stop > start + 1 else str(start)
        for start, stop in itertools.pairwise(bounds)
    ]
    return " | ".join(
        ", ".join(each for each, on in zip(ranges, rank_of_stage, strict=True) if on == rank)
        for rank in sorted(set(rank_of_stage))
    )


def _free(model: LocalModel, masters: MasterParams) -> None:
    """Free the gradients, and take the values from the parameters: only the state has them."""
    for slot in masters.gradients.slots:
        slot.parameter.grad = None
    # Hooks of the parameters and of the stages still refer to both objects.
    vars(masters.gradients).clear()
    vars(masters).clear()
    copies = itertools.chain.from_iterable(model.copies.values())
    for parameter in (*model.parameters.values(), *copies):
        # Other objects may refer to the parameter.
        parameter.data = parameter.data.new_empty(0)


def _modules(model: LocalModel) -> dict[str, tuple[Any, ...]]:
    return {
        f"stage {stage.number}{'.' * bool(name)}{name}": tuple(_identities(module))
        for stage in model.stages.values()
        for name, module in stage.named_modules()
    }


def _step_buffers(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the buffers that are empty between two steps."""
    return getattr(module, "step_buffers", ())


def _identities(module: nn.Module) -> Iterator[Any]:
    """Yield what a new module in place of this one would not have."""
    yield id(module)
    yield id(vars(module).get("forward"))
    if type(module).__module__.startswith("torch.nn."):
        # Such as the probability of a dropout. Other modules may change theirs in a forward.
        for key, value in vars(module).items():
            # The executor sets `training` in each run.
            if isinstance(value, bool | int | float | str) and key != "training":
                yield key, value
    for name in sorted(module._non_persistent_buffers_set.difference(_step_buffers(module))):
        # No checkpoint has it: a new module would have its first value.
        buffer = getattr(module, name)
        yield id(buffer), None if buffer is None else buffer._version
    for name in _HOOKS:
        yield tuple(map(id, getattr(module, name).values()))
    for parameter in module.parameters(recurse=False):
        yield id(parameter), parameter.requires_grad
        yield tuple(_hook_ids(parameter))


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _hook_ids(parameter: Tensor) -> Iterator[int]:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        yield from map(id, (getattr(parameter, name, None) or {}).values())
