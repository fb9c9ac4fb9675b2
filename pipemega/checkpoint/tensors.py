"""The tensors of a checkpoint, and their names.

parameters/<logical name>             the master weight if there is one, else the parameter
buffers/<logical name>                running statistics and other buffers, of the first data rank
optimizer/<kind>/<logical name>       exp_avg, exp_avg_sq, step, momentum_buffer, ...
optimizer/value:<kind>/<logical name> state that is no tensor, as bytes

A rank's shard of a logical tensor, and its chunks, which a checkpoint stores.

Checkpoints store logical tensors: under the names of the unsharded model, without padding, as if
one process had written them. Three values describe the relation between a rank and one tensor:

    shard         the segments of the logical tensor that the local tensor consists of
    span          the flat range of the local tensor that this rank holds (ZeRO); None: all
    write_range   the flat range of the local tensor that this rank, and no other, writes

A flat range is split into a few rectangular chunks, and each of these, at the segment bounds, into
chunks of the logical tensor. Padding is in none of them. `dcp_storage` writes and reads the chunks;
this module does not import torch.distributed.checkpoint, which loads sympy and much of torch.

Options of loading: which parts of a checkpoint are loaded.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.checkpoint.manifest import CollectiveIO
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.errors import CheckpointError
from pipemega.optimizer import OptimizerStep
from pipemega.optimizer.param_groups import decode, encode
from pipemega.parameters import Shard, shard_of
from pipemega.pipeline.model.stages import LocalModel

LARGEST_CHUNK = 32 << 20
"""Bytes of the largest stored chunk: a rank that needs a part of a tensor reads little more."""

Range = tuple[int, int]
Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes along each dim."""
LocalChunks = dict[torch.Size, Tensor]
"""Offsets of a chunk in the logical tensor -> its view of the local tensor."""
TensorIndex = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""name -> (logical shape, dtype) of each tensor in a checkpoint."""


@dataclass(eq=False)
class TensorShard:
    """This rank's shard of one logical tensor.

    Args:
        local: the local data; loading writes into it. With a span, flat.
        shard: which part of the logical tensor the local tensor is.
        write_range: the flat range of the local tensor that this rank writes.
        shape: shape of the whole local tensor; None: the shape of `local`.
        span: the flat range of the local tensor that `local` holds; None: the whole tensor.
    """

    local: Tensor
    shard: Shard
    write_range: Range = (0, 0)
    shape: tuple[int, ...] | None = None
    span: Range | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.local.shape) if self.shape is None else self.shape

    @property
    def numel(self) -> int:
        """Elements of the whole local tensor."""
        return prod(self.local_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole local tensor."""
        return self.numel * self.local.element_size()

    def size(self) -> torch.Size:
        """Shape of the logical tensor."""
        return torch.Size(self.shard.shape)

    @property
    def outgoing(self) -> "OutgoingShard":
        """The chunks that this rank writes, of at most `LARGEST_CHUNK` bytes."""
        largest = LARGEST_CHUNK // self.local.element_size()
        ranges = split_range(*self.write_range, self._row, largest)
        return OutgoingShard(self.size(), self._chunks(ranges))

    @cached_property
    def incoming(self) -> LocalChunks:
        """The chunks that this rank reads."""
        return self._chunks([self.span or (0, self.numel)])

    def row_start(self, byte: int) -> int:
        """Return the first element of the row that contains `byte`; the end if it is past it."""
        if byte >= self.nbytes:
            return self.numel
        return max(0, byte) // self.local.element_size() // self._row * self._row

    @property
    def _row(self) -> int:
        return max(1, prod(self.local_shape[1:]))

    def _chunks(self, ranges: Iterable[Range]) -> LocalChunks:
        found: LocalChunks = {}
        for start, stop in ranges:
            for offsets, sizes in chunks_of_range(self.local_shape, start, stop):
                part = self._view(offsets, sizes)
                for logical_offsets, logical_part in self._in_logical(offsets, part):
                    found[torch.Size(logical_offsets)] = logical_part
        return found

    def _view(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return the view of `local` for a chunk of the local tensor."""
        if self.span is None:
            part = self.local
            for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, start, length)
            return part
        # A chunk of a flat range is contiguous.
        start = 0
        for offset, length in zip(offsets, self.local_shape, strict=True):
            start = start * length + offset
        return self.local.narrow(0, start - self.span[0], prod(sizes)).view(sizes)

    def _in_logical(
        self, offsets: tuple[int, ...], part: Tensor
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Split a local chunk at the segments of the shard; yield offsets in the logical tensor."""
        dim, rows = self.shard.dim, self.shard.rows
        if rows is not None:
            offsets = (offsets[0] + rows[0], *offsets[1:])
        if dim is None:
            yield offsets, part
            return
        low, high = offsets[dim], offsets[dim] + part.shape[dim]
        for start, length, offset in self.shard.segments:
            first, last = max(low, offset), min(high, offset + length)
            if first < last:
                logical = (*offsets[:dim], start + first - offset, *offsets[dim + 1 :])
                yield logical, part.narrow(dim, first - low, last - first)


@dataclass(eq=False)
class OutgoingShard:
    """The chunks of a logical tensor of `shape` that this rank writes: views, or copies."""

    shape: torch.Size
    chunks: LocalChunks


def chunks_of_range(shape: Sequence[int], start: int, stop: int) -> list[Chunk]:
    """Split elements [start, stop) of a row-major tensor into at most 2 * dims - 1 chunks.

    shape [4, 5], elements 3 to 17          . . . a a
                                            b b b b b
    a: offsets (0, 3), sizes [1, 2]         b b b b b
    b: offsets (1, 0), sizes [2, 5]         c c c . .
    c: offsets (3, 0), sizes [1, 3]
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    rest = tuple(shape[1:])
    row = prod(rest)

    def within_row(number: int, low: int, high: int) -> list[Chunk]:
        chunks = chunks_of_range(rest, low, high)
        return [((number, *offsets), (1, *sizes)) for offsets, sizes in chunks]

    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return within_row(first, start - first * row, stop - first * row)
    begin, end = -(-start // row), stop // row
    found = within_row(first, start - first * row, row) if first < begin else []
    if begin < end:
        found.append(((begin, *(0 for _ in rest)), (end - begin, *rest)))
    return found + (within_row(last, 0, stop - end * row) if last == end else [])


def split_range(start: int, stop: int, row: int, largest: int) -> Iterator[Range]:
    """Split [start, stop) into ranges of at most `largest` elements, between rows if rows fit."""
    step = max(1, largest // row * row or largest)
    while start < stop:
        end = min(stop, start // step * step + step)
        yield start, end
        start = end


def assign_writes(shards: Iterable[TensorShard], axis: Axis) -> None:
    """Set the write ranges so that the ranks of `axis` write equal bytes, up to one row.

    Args:
        shards: tensors that all these ranks hold; the same on each rank, in the same order.
    """
    shards = list(shards)
    total = sum(shard.nbytes for shard in shards)
    low, high = (total * rank // axis.size for rank in (axis.rank, axis.rank + 1))
    for shard in shards:
        shard.write_range = (shard.row_start(low), shard.row_start(high))
        low, high = low - shard.nbytes, high - shard.nbytes


@dataclass(frozen=True)
class LoadOptions:
    """Which parts of a checkpoint are loaded; the other parts of the run stay unchanged.

    Args:
        module_only: load parameters and buffers only: the run starts at step 0.
        optimizer_states: load the optimizer state of each parameter.
        lr_scheduler_states: load the position of the learning-rate schedule.
        strict: refuse a checkpoint of another model; if False, load what fits and log the rest.
        verify: before loading, compare the checksum of every file, and not only its size.
        allow_changes: config keys, or sections, that may differ from the checkpoint's even
            though they change the model or the order of the data.
    """

    module_only: bool = False
    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    strict: bool = True
    verify: bool = True
    allow_changes: tuple[str, ...] = ()

    @property
    def loads_optimizer(self) -> bool:
        return self.optimizer_states and not self.module_only

    @property
    def loads_schedule(self) -> bool:
        return self.lr_scheduler_states and not self.module_only


# Prefix of the kind of state that is no tensor.
_VALUE = "value:"
# Optimizers with the same state: each can load the state of the other.
_SAME_STATE = {"AdamW": "Adam", "FusedAdam": "Adam"}


def logical_tensors(
    model: LocalModel, step: OptimizerStep | None, mesh: Mesh
) -> dict[str, TensorShard]:
    """Return this rank's shards of all tensors of the run: views, no copies."""
    shards = model_tensors(model, step, mesh)
    # All data ranks hold these; each of them writes a part.
    replicated = {k: s for k, s in shards.items() if k.startswith("parameters/") and s.span is None}
    for name, entry in _optimizer_entries(step).items():
        for kind in entry.keys() - {"master", "span"}:
            key, local = f"optimizer/{kind}/{name}", entry[kind]
            if not isinstance(local, Tensor):
                key = f"optimizer/{_VALUE}{kind}/{name}"
                shards[key] = _value_shard(model, mesh, name, entry, kind)
                continue
            shard = _tensor_shard(model, mesh, name, local, _span_of(entry, kind, local))
            _check_shape(kind, name, shard, entry, shard_of(model.parameters[name]))
            shards[key] = shard
            if "span" not in entry:
                replicated[key] = shard
            elif shard.span is None and (entry["span"][0] != 0 or entry["span"][1] == 0):
                # A scalar, such as `step`: the data rank with the first element writes it.
                shard.write_range = (0, 0)
    # Sorted, because the order must be the same on all ranks.
    written: dict[bool, list[TensorShard]] = {False: [], True: []}
    for key, shard in sorted(replicated.items()):
        if shard.write_range != (0, 0):
            written[shard_of(model.parameters[_split_key(key)[2]]).is_expert].append(shard)
    assign_writes(written[False], mesh.data)
    assign_writes(written[True], mesh.replica)
    return shards


def model_tensors(
    model: LocalModel, step: OptimizerStep | None, mesh: Mesh
) -> dict[str, TensorShard]:
    """Return this rank's shards of parameters and buffers."""
    entries = _optimizer_entries(step)
    shards: dict[str, TensorShard] = {}
    for name, parameter in model.parameters.items():
        entry = entries.get(name, {})
        weight = entry.get("master", parameter.detach())
        span = _span_of(entry, "master", weight) if "master" in entry else None
        shards[f"parameters/{name}"] = _tensor_shard(model, mesh, name, weight, span)
    for name, buffer in model.persistent_buffers.items():
        shard = TensorShard(buffer, Shard(tuple(buffer.shape)))
        shard.write_range = (0, shard.numel if mesh.is_first_replica else 0)
        shards[f"buffers/{name}"] = shard
    return shards


def names_in_run(
    shards: Mapping[str, TensorShard], model: LocalModel, ranks: CollectiveIO
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return the keys of all ranks with shapes, and further names of shared parameters; collective.

    Other programs may store a shared parameter under each of its names.
    """
    in_run: dict[str, tuple[int, ...]] = {}
    others = {f"layers.{position}.{name}" for one in model.ties for position, name in one.places}
    mine = {key: tuple(shard.size()) for key, shard in shards.items()}
    for keys, names in ranks.all_gather((mine, model.other_names)):
        in_run |= keys
        others |= names
    return in_run, others


def match_imported(
    stored: TensorIndex, in_run: Iterable[str], others: Collection[str], model: LocalModel
) -> tuple[TensorIndex, dict[str, str]]:
    """Match imported weights: other programs store tied layers once, or in all their places.

    They may also not say which tensors are buffers.

    Returns:
        the index as if the run had saved it; and key of the run -> stored key, where they differ.

    Args:
        in_run, others: see `names_in_run`.
    """
    first_of = {position: tied.places[0][0] for tied in model.ties for position, _ in tied.places}
    matched: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    renamed: dict[str, str] = {}
    for key in sorted(in_run):
        group, _, name = key.partition("/")
        _, position, inner = name.split(".", 2)
        first = f"layers.{first_of.get(int(position), position)}.{inner}"
        found = (f"{g}/{n}" for n in (name, first) for g in (group, "parameters", "buffers"))
        source = next((candidate for candidate in found if candidate in stored), None)
        if source is not None:
            matched[key] = stored[source]
            if source != key:
                renamed[key] = source
    used = {*matched, *renamed.values()}
    left = {k: v for k, v in stored.items() if k not in used and k.split("/")[1] not in others}
    return {**matched, **left}, renamed


def optimizer_tensors_to_load(
    stored: TensorIndex, model: LocalModel, step: OptimizerStep, mesh: Mesh
) -> dict[str, TensorShard]:
    """Return tensors to read the optimizer state into: the current ones if they fit, else new ones.

    An optimizer has no state before its first step, so the shapes come from the checkpoint.
    """
    shards, entries, numbers = {}, _optimizer_entries(step), _numbers(stored)
    for key, (shape, dtype) in stored.items():
        group, kind, name = _split_key(key)
        if group != "optimizer" or name not in entries:
            continue
        parameter, span = model.parameters[name], entries[name].get("span")
        is_value = kind.startswith(_VALUE)
        per_element = shape == shard_of(parameter).shape and kind not in numbers and not is_value
        local_shape: tuple[int, ...] = shape
        if per_element:
            # The parameter's shape includes its padding.
            local_shape = tuple(parameter.shape) if span is None else (span[1] - span[0],)
        span = span if per_element else None
        current = entries[name].get(kind)
        if per_element and _fits(current, local_shape, dtype, parameter.device):
            shards[key] = shard = _tensor_shard(model, mesh, name, current, span)
            # Padding is not stored, and starts at zero.
            if sum(part.numel() for part in shard.incoming.values()) == current.numel():
                continue
        local = torch.zeros(local_shape, dtype=dtype, device=parameter.device)
        if is_value:
            shards[key] = TensorShard(local, Shard(shape))
            continue
        shards[key] = _tensor_shard(model, mesh, name, local, span)
    return shards


def _numbers(stored: TensorIndex) -> set[str]:
    """Return the kinds of state that are one number for a whole parameter, such as "step"."""
    kinds = {"step"}
    for key, (shape, _) in stored.items():
        group, kind, _ = _split_key(key)
        # For a parameter without dims, all state looks so.
        if group == "optimizer" and shape == () and stored.get(parameter_key(key), ((), None))[0]:
            kinds.add(kind)
    return kinds


def _fits(
    current: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> TypeGuard[Tensor]:
    """Return whether stored state can be read into the optimizer's current one."""
    return (
        type(current) is Tensor
        and current.shape == shape
        and current.dtype == dtype
        and current.device == device
    )


@torch.no_grad()
def restore(
    shards: Mapping[str, TensorShard],
    state: Mapping[str, Any],
    buffers: Mapping[str, Tensor],
    model: LocalModel,
    step: OptimizerStep | None,
    options: LoadOptions,
) -> None:
    """Copy what was read into the buffers and the optimizer step that do not share its memory.

    Args:
        shards: the tensors that were read.
        state: what `step_state` returned when the checkpoint was saved.
        buffers: what `rank_buffers` returned when the checkpoint was saved.
    """
    for name, buffer in model.persistent_buffers.items():
        if name in buffers:
            buffer.copy_(buffers[name])
    if step is None:
        return
    current = step.state_dict()
    entries = {name: dict(entry) for name, entry in current["parameters"].items()}
    for name, entry in entries.items():
        if options.loads_optimizer and f"parameters/{name}" in shards:
            # State that is not in the checkpoint starts anew.
            for kind in entry.keys() - {"master", "span"}:
                del entry[kind]
    for key, shard in shards.items():
        group, kind, name = _split_key(key)
        if group == "optimizer" and kind.startswith(_VALUE):
            entries[name][kind.removeprefix(_VALUE)] = _decoded(shard.local)
        elif group == "optimizer":
            entries[name][kind] = shard.local
    # The master weights were read in place.
    step.load_state_dict(
        {**current, **_step_state_to_load(state, current, options), "parameters": entries},
        copy=False,
    )


def _step_state_to_load(
    state: Mapping[str, Any], current: Mapping[str, Any], options: LoadOptions
) -> dict[str, Any]:
    """Return the entries of `state` to load; without a stored loss scale the current one stays."""
    if options.module_only:
        return {}
    loaded = {key: value for key, value in state.items() if key in current}
    if not options.loads_schedule:
        loaded.pop("schedule", None)
    if not options.loads_optimizer:
        loaded.pop("shared", None)
    loaded["loss_scale"] = loaded.get("loss_scale") or current["loss_scale"]
    return loaded


def step_state(step: OptimizerStep | None) -> dict[str, Any]:
    """Return the state of the optimizer step without tensors, and the kind of its optimizer."""
    if step is None:
        return {}
    state = step.state_dict()
    del state["parameters"]
    return {"optimizer": _optimizer_kind(step), **state}


def rank_buffers(model: LocalModel, mesh: Mesh) -> dict[str, Tensor]:
    """Return the buffers of a rank that does not write `buffers/...`; {} on the others.

    Data ranks see different samples, so their running statistics differ.
    """
    return {} if mesh.is_first_replica else model.persistent_buffers


def check_optimizer(state: Mapping[str, Any], step: OptimizerStep) -> None:
    """Refuse the state of an optimizer of another kind.

    Raises:
        CheckpointError: the kinds differ; the message names both.
    """
    stored, current = state.get("optimizer"), _optimizer_kind(step)
    if stored is not None and stored != current:
        raise CheckpointError(
            f"the checkpoint contains the state of the optimizer {stored}, and this run uses "
            f"{current}, whose state is different: restore optimizer.type, or the optimizer that "
            f"initialize() got, or load without the optimizer state "
            f"(checkpoint.load_optimizer_states false)"
        )


def parameter_key(key: str) -> str:
    """Return the key of the parameter that an optimizer key belongs to; other keys unchanged."""
    group, _, name = _split_key(key)
    return f"parameters/{name}" if group == "optimizer" else key


def _split_key(key: str) -> tuple[str, str, str]:
    """Return the group, the kind (of optimizer state, else empty) and the logical name."""
    group, _, rest = key.partition("/")
    if group != "optimizer":
        return group, "", rest
    kind, _, name = rest.partition("/")
    return group, kind, name


def _optimizer_entries(step: OptimizerStep | None) -> Mapping[str, Mapping[str, Any]]:
    """Return logical name -> the optimizer's state of it, for trainable parameters."""
    return step.state_dict()["parameters"] if step is not None else {}


def _value_shard(
    model: LocalModel, mesh: Mesh, name: str, entry: Mapping[str, Any], kind: str
) -> TensorShard:
    """Return state that is no tensor as bytes [n], which one rank writes."""
    value = entry[kind]
    try:
        data = encode(value)
    except ValueError as error:
        raise CheckpointError(
            f"the optimizer keeps a {type(value).__name__} as {kind!r} of '{name}', and a "
            f"checkpoint can contain only tensors, numbers, text, and lists and dicts of them: "
            f"{error}"
        ) from error
    local = torch.tensor(list(data), dtype=torch.uint8, device=mesh.device)
    start, stop = entry.get("span", (mesh.data.rank, mesh.data.rank + 1))
    has_first_element = start == 0 and stop > 0 and _has_first_row(model, name)
    writes = has_first_element and _is_owner(model, name) and mesh.tensor.rank == 0
    return TensorShard(local, Shard((len(data),)), (0, len(data) if writes else 0))


def _decoded(data: Tensor) -> Any:
    """Return the value of `_encoded`; its tensors are on the device of `data`."""
    value = decode(bytes(data.tolist()))
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(data.device), value)


def _check_shape(
    kind: str, name: str, state: TensorShard, entry: Mapping[str, Any], parameter: Shard
) -> None:
    """Refuse state of a part of a parameter that is neither per element nor one number.

    Each rank would have other values of it, and a checkpoint has one.

    Raises:
        CheckpointError: the state cannot be stored; the message gives its shape and a way out.
    """
    sliced = "span" in entry and state.span is None
    sharded = not parameter.is_whole and state.shard is not parameter
    if state.local.dim() > 0 and kind != "step" and (sliced or sharded):
        raise CheckpointError(
            f"the optimizer keeps a tensor of shape {tuple(state.local.shape)} as {kind!r} of "
            f"'{name}', of which this rank has only a part: only one number, or state of the "
            "shape of the part, can be saved. Set zero_optimization.stage to 0 and mesh.tensor to "
            "1, or use an optimizer that keeps state per element"
        )


def _span_of(entry: Mapping[str, Any], kind: str, value: Tensor) -> Range | None:
    """Return the flat range of the local tensor that `value` holds, if ZeRO has sharded it."""
    if "span" not in entry or kind == "step" or value.dim() != 1:
        return None
    start, stop = entry["span"]
    return (start, stop) if value.numel() == stop - start else None


def _tensor_shard(
    model: LocalModel, mesh: Mesh, name: str, local: Tensor, span: Range | None = None
) -> TensorShard:
    """Return the shard for `local`: the parameter `name`, or optimizer state of it."""
    parameter = model.parameters[name]
    shard, shape = shard_of(parameter), tuple(parameter.shape)
    first = True
    if span is None and local.shape != parameter.shape:
        # State of the whole parameter, equal on every rank.
        first = _has_first_row(model, name)
        shard, shape = Shard(tuple(local.shape)), tuple(local.shape)
    result = TensorShard(local, shard, shape=shape, span=span)
    if first and _is_owner(model, name) and (shard.dim is not None or mesh.tensor.rank == 0):
        result.write_range = span if span is not None else (0, result.numel)
    return result


def _is_owner(model: LocalModel, name: str) -> bool:
    """Return whether this rank is the first of the pipeline ranks that hold a parameter."""
    return name not in model.tied or model.tied[name].rank == 0


def _has_first_row(model: LocalModel, name: str) -> bool:
    """Return whether this rank has the first rows of a parameter, or all of them."""
    rows = shard_of(model.parameters[name]).rows
    return rows is None or rows[0] == 0


def _optimizer_kind(step: OptimizerStep) -> str:
    """Return the name of the optimizer's class; one name for all classes with the same state."""
    name = type(step.optimizer).__name__
    return _SAME_STATE.get(name, name)
