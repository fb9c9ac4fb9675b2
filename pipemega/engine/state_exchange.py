"""Moves the state of layers between ranks: what a checkpoint contains of them, without files.

    1. between pipeline ranks     the whole tensors of a layer that is to be on another rank,
                                  from the same data and tensor rank
    2. between data ranks         only with ZeRO: the slices of each parameter, because the new
                                  buckets begin and end elsewhere

Both use the logical names of parameters. A rank keeps what it has already, and frees what it has
sent.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipemega.distributed.byte_exchange import Key, Piece, TensorInfo, exchange
from pipemega.distributed.mesh import Axis, gather_objects
from pipemega.optimizer import OptimizerStep
from pipemega.optimizer.param_groups import pack
from pipemega.pipeline.model.stages import LocalModel

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
        state: of this rank; emptied.
        names: that this rank is to have. A name that no rank has is left out.
        axis: the pipeline axis.
        device: of the tensors that are not on the host.
    """
    mine = _described(state)
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
        state: of this rank, with other spans; its slices are removed.
        spans: logical name -> the range of the parameter that this rank is to hold.
        axis: the data axis.
        device: of the tensors that are not on the host.
    """
    mine = _described({name: state[name] for name in spans})
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


def _described(state: State) -> _Described:
    return {
        name: {k: TensorInfo.of(v) if isinstance(v, Tensor) else v for k, v in entry.items()}
        for name, entry in state.items()
    }


def _nbytes(info: TensorInfo) -> int:
    return prod(info.shape) * info.dtype.itemsize
