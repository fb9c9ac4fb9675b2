"""Check that all replicas of each parameter are bitwise equal.

    data ranks       all parameters; experts: the data ranks with the same ones
    tensor ranks     parameters that are not sharded
    pipeline ranks   tied parameters, on the ranks that hold a copy

Replicas on equal devices are not synchronized during training: each rank computes the same step. A
bit that a hardware fault or a race in a kernel has flipped stays flipped. So each rank computes a
64-bit hash of each parameter, and the hashes are compared.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.distributed.device_waits import synchronize
from pipemega.distributed.exchanges import all_gather, all_reduce, broadcast, broadcast_tied
from pipemega.distributed.mesh import Axis, Mesh, gather_objects
from pipemega.errors import ReplicaError
from pipemega.parameters import Shard, shard_of
from pipemega.pipeline.model.stages import LocalModel

# Elements that are converted to 64 bits at a time: on a CPU few enough to stay in its cache.
_BLOCK = 1 << 16
_DEVICE_BLOCK = 1 << 24
# 2**64 divided by the golden ratio, as int64: its multiples are spread evenly.
# Source: Knuth, The Art of Computer Programming, volume 3, section 6.4.
_MULTIPLIER = -7046029254386353131
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# How many of the parameters that differ are described.
_MOST_DESCRIBED = 3


def check_replicas(model: LocalModel, mesh: Mesh) -> None:
    """Compare all replicas of all parameters; collective.

    Raises:
        ReplicaError: some differ; on every rank, with the names of the parameters, which ranks hold
            which value, and in how many elements they differ.
    """
    names = sorted(model.parameters)
    hashes = hash_tensors([model.parameters[name] for name in names], mesh.device)

    def differing_over(axis: Axis, compared: Callable[[Shard], bool]) -> list[str]:
        kept = [n for n, name in enumerate(names) if compared(shard_of(model.parameters[name]))]
        return _differing([names[n] for n in kept], hashes[kept], axis)

    differing = [
        *differing_over(mesh.data, lambda shard: not shard.is_expert),
        *differing_over(mesh.replica, lambda shard: shard.is_expert),
        *differing_over(mesh.tensor, lambda shard: shard.dim is None),
        *_differing_tied(names, hashes, model.tied),
    ]
    most = torch.tensor(len(differing), device=mesh.device)
    if mesh.world.size > 1:
        all_reduce(most, mesh.world, dist.ReduceOp.MAX)
    synchronize()
    if most.item() > 0:
        _raise(sorted(set(differing)), model, mesh)


@torch.no_grad()
def hash_tensors(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a hash of each tensor that changes with any bit: [tensors] int64.

    Within a block: the sum modulo 2**64 of each element's bits, as an integer, times an odd number
    that depends on the position. Between blocks: the hash so far times an odd number, plus the
    block's sum. One flipped bit changes the hash by an odd number times a power of 2, which is
    never 0; several flipped bits cancel out with a probability of about 1 in 2**64.
    """
    step = _BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    # Odd numbers that look random, so that neighbours differ in many bits.
    weights = (torch.arange(1, step + 1, device=device) * _MULTIPLIER) | 1
    sums = [torch.zeros(0, dtype=torch.int64, device=device)]
    for tensor in tensors:
        bits = _bits(tensor)
        total = torch.zeros(1, dtype=torch.int64, device=device)
        for start in range(0, bits.numel(), step):
            block = bits[start : start + step]
            total = total * _MULTIPLIER + (block * weights[: block.numel()]).sum()
        sums.append(total)
    return torch.cat(sums)


def _differing(names: list[str], hashes: Tensor, axis: Axis) -> list[str]:
    """Return the names whose hashes differ within `axis`; the same list on all its ranks."""
    if axis.size == 1 or not names:
        return []
    gathered = [torch.empty_like(hashes) for _ in axis.ranks]
    all_gather(gathered, hashes, axis)
    synchronize()
    same = torch.stack([other == gathered[0] for other in gathered]).all(dim=0).tolist()
    return [name for name, is_same in zip(names, same, strict=True) if not is_same]


def _differing_tied(names: list[str], hashes: Tensor, tied: dict[str, Axis]) -> list[str]:
    """Return the tied parameters whose hash differs from the hash of the first holder."""
    found = []
    for name in sorted(tied):
        own = hashes[names.index(name)]
        first = own.clone()
        broadcast_tied(first, tied[name])
        if bool(first != own):
            found.append(name)
    return found


def _raise(differing: list[str], model: LocalModel, mesh: Mesh) -> None:
    """Raise a ReplicaError that describes the first parameters that differ; collective."""
    named = sorted({name for names in gather_objects(differing, mesh.world) for name in names})
    texts = [_describe(name, model.parameters.get(name), mesh) for name in named[:_MOST_DESCRIBED]]
    others = len(named) - _MOST_DESCRIBED
    more = f"; and {others} more parameters" if others > 0 else ""
    raise ReplicaError(
        f"{'; '.join(texts)}{more}. Replicas are always equal unless memory, a processor or a "
        "kernel is faulty: resume from an earlier checkpoint and exclude the outlier node",
        on_every_rank=True,
    )


class _Replica(NamedTuple):
    """The replica of a parameter on one rank; replicas with the same `part` must be equal."""

    part: str
    hash: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _describe(name: str, parameter: Tensor | None, mesh: Mesh) -> str:
    """Return which ranks hold which value of `name`; collective over all ranks."""
    replicas = dict(enumerate(gather_objects(_replica_of(parameter, mesh), mesh.world)))
    for part in sorted({replica.part for replica in replicas.values() if replica}):
        by_hash: dict[int, list[int]] = {}
        for rank, replica in replicas.items():
            if replica and replica.part == part:
                by_hash.setdefault(replica.hash, []).append(rank)
        if len(by_hash) > 1:
            # The value of the most ranks first.
            majority, *others = sorted(by_hash.values(), key=lambda ranks: (-len(ranks), ranks))
            differences = _differences(parameter, replicas[majority[0]], majority[0], mesh)
            differ = " and ".join(f"{_ranks(ranks)} in {differences[ranks[0]]}" for ranks in others)
            return f"parameter {name}{part} differs from {_ranks(majority)}: on {differ}"
    return f"parameter {name} differs between ranks"


def _replica_of(parameter: Tensor | None, mesh: Mesh) -> _Replica | None:
    if parameter is None:
        return None
    shard, parts = shard_of(parameter), []
    if shard.dim is not None and mesh.tensor.size > 1:
        parts.append(f"its shard on tensor rank {mesh.tensor.rank}")
    if shard.rows is not None:
        parts.append(f"experts {shard.rows[0]} to {shard.rows[1] - 1}")
    part = f" ({', '.join(parts)})" if parts else ""
    number = int(hash_tensors([parameter], parameter.device).item())
    return _Replica(part, number, tuple(parameter.shape), parameter.dtype)


@torch.no_grad()
def _differences(
    parameter: Tensor | None, replica: _Replica | None, source: int, mesh: Mesh
) -> list[str]:
    """Return, for each rank, text on how its replica differs from the replica of rank `source`.

    The text of a rank that holds another part has no meaning.
    """
    assert replica is not None
    reference = torch.empty(replica.shape, dtype=replica.dtype, device=mesh.device)
    if parameter is not None and mesh.rank == source:
        reference.copy_(parameter)
    # As real numbers: gloo in torch 2.8 does not send complex ones.
    sent = torch.view_as_real(reference) if reference.is_complex() else reference
    broadcast(sent, source, mesh.world)
    synchronize()
    text = ""
    if parameter is not None and parameter.shape == reference.shape:
        mine = parameter.detach().to(mesh.device)
        differs = (_bits(mine) != _bits(reference)).view(mine.numel(), -1)
        wide = torch.complex128 if mine.is_complex() else torch.float64
        count, most = int(differs.any(1).sum()), (mine.to(wide) - reference.to(wide)).abs().max()
        text = f"{count} of {mine.numel()} elements, by up to {most.item():.3g}"
    return gather_objects(text, mesh.world)


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements, two of a complex one, as integers of their width: [elements]."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().contiguous().view(-1).view(_INTEGERS[real.element_size()])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
