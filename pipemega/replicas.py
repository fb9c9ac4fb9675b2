"""Whether what must be equal on several ranks is: every copy of a parameter, bit by bit.

    data ranks       each parameter
    tensor ranks     those that each of them holds whole
    pipeline ranks   tied ones, on all that hold a copy

Copies never meet again once training has begun: each rank takes the same step on its own.  One bit
that a fault of the machine, or a race in somebody's kernel, has changed stays changed.  So each
rank makes a number of 64 bits from each parameter, and the numbers are compared.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.errors import ReplicaError
from pipemega.mesh import Axis, Mesh
from pipemega.parameters import shard_of
from pipemega.pipeline.build import LocalModel
from pipemega.ties import copy_from_first

_T = TypeVar("_T")

# Elements that are widened to 64 bits at a time: on a CPU few enough to stay in its cache.
_BLOCK = 1 << 16
_DEVICE_BLOCK = 1 << 24
# 2**64 divided by the golden ratio, as int64: multiples of it are spread evenly.
# Source: Knuth, The Art of Computer Programming, volume 3, section 6.4.
_NOISE = -7046029254386353131
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# How many of those that differ are looked at closely.
_SHOWN = 3


def check_replicas(model: LocalModel, mesh: Mesh) -> None:
    """Compares all copies of all parameters; collective.

    Raises:
        ReplicaError: some differ; on every rank, with the name of the first, which ranks hold
            which value, and in how many elements they differ.
    """
    names = sorted(model.parameters)
    hashes = hash_tensors([model.parameters[name] for name in names], mesh.device)
    whole = [name for name in names if shard_of(model.parameters[name]).dim is None]
    suspects = [
        *_differing(names, hashes, mesh.data),
        *_differing(whole, hashes[[names.index(name) for name in whole]], mesh.tensor),
        *_differing_ties(names, hashes, model.tied),
    ]
    if _most(len(suspects), mesh) == 0:
        return
    _raise(sorted(set(suspects)), model, mesh)


@torch.no_grad()
def hash_tensors(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """A number for each tensor that any changed bit changes: [tensors] int64.

    The bits of each element as an integer, times an odd number of its own, summed modulo 2**64,
    block by block, and the sum of the blocks before times an odd number. One flipped bit changes
    that by an odd number times a power of 2, which is never 0; several changes cancel out only by
    a chance of about 1 in 2**64.
    """
    step = _BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    # Odd numbers that look like noise, so that neighbours have nothing in common.
    weights = (torch.arange(1, step + 1, device=device) * _NOISE) | 1
    sums = [torch.zeros(0, dtype=torch.int64, device=device)]
    for tensor in tensors:
        bits = _bits(tensor)
        total = torch.zeros(1, dtype=torch.int64, device=device)
        for start in range(0, bits.numel(), step):
            block = bits[start : start + step]
            total = total * _NOISE + (block * weights[: block.numel()]).sum()
        sums.append(total)
    return torch.cat(sums)


def _differing(names: list[str], hashes: Tensor, axis: Axis) -> list[str]:
    """Those whose hashes are not the same on all ranks of `axis`: alike on all of them."""
    if axis.size == 1 or not names:
        return []
    all_of_them = [torch.empty_like(hashes) for _ in axis.ranks]
    dist.all_gather(all_of_them, hashes, group=axis.group)
    same = torch.stack([other == all_of_them[0] for other in all_of_them]).all(dim=0).tolist()
    return [name for name, is_same in zip(names, same, strict=True) if not is_same]


def _differing_ties(names: list[str], hashes: Tensor, tied: dict[str, Axis]) -> list[str]:
    """Those of which this rank has another value than the first holder."""
    found = []
    for name in sorted(tied):
        own = hashes[names.index(name)]
        first = own.clone()
        copy_from_first(first, tied[name])
        if bool(first != own):
            found.append(name)
    return found


def _most(count: int, mesh: Mesh) -> int:
    """The largest of all ranks' counts."""
    if mesh.world.size == 1:
        return count
    counts = torch.tensor(count, device=mesh.device)
    dist.all_reduce(counts, dist.ReduceOp.MAX, group=mesh.world.group)
    return int(counts.item())


def _raise(suspects: list[str], model: LocalModel, mesh: Mesh) -> None:
    """Looks at the first of them closely, and says who holds what; collective."""
    named = sorted({name for names in _from_all(suspects, mesh) for name in names})
    texts = [_describe(name, model.parameters.get(name), mesh) for name in named[:_SHOWN]]
    more = f"; and {len(named) - _SHOWN} more parameters" if len(named) > _SHOWN else ""
    raise ReplicaError(
        f"{'; '.join(texts)}{more}. Copies of a parameter are equal unless memory, a processor or "
        "a kernel is at fault: go on from a checkpoint of before, without the machine that stands "
        "alone",
        on_every_rank=True,
    )


class _Holding(NamedTuple):
    """What one rank holds of a parameter: equal `part`s must have equal hashes."""

    part: str
    hash: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _describe(name: str, parameter: Tensor | None, mesh: Mesh) -> str:
    """Who holds which value of `name`; every rank of the world calls it."""
    held = dict(enumerate(_from_all(_holding(parameter, mesh), mesh)))
    for part in sorted({holding.part for holding in held.values() if holding}):
        by_hash: dict[int, list[int]] = {}
        for rank, holding in held.items():
            if holding and holding.part == part:
                by_hash.setdefault(holding.hash, []).append(rank)
        if len(by_hash) > 1:
            # The value of most ranks first.
            most, *others = sorted(by_hash.values(), key=lambda ranks: (-len(ranks), ranks))
            apart = _apart(parameter, held[most[0]], most[0], mesh)
            differ = " and ".join(f"{_ranks(ranks)} in {apart[ranks[0]]}" for ranks in others)
            return f"parameter {name}{part} is not what it is on {_ranks(most)}: on {differ}"
    return f"parameter {name} is not the same on all ranks"


def _holding(parameter: Tensor | None, mesh: Mesh) -> _Holding | None:
    if parameter is None:
        return None
    whole = shard_of(parameter).dim is None or mesh.tensor.size == 1
    part = "" if whole else f" (its part on tensor rank {mesh.tensor.rank})"
    number = int(hash_tensors([parameter], parameter.device).item())
    return _Holding(part, number, tuple(parameter.shape), parameter.dtype)


@torch.no_grad()
def _apart(
    parameter: Tensor | None, holding: _Holding | None, source: int, mesh: Mesh
) -> list[str]:
    """How far each rank is from what `source` holds, in words; of no meaning for other parts."""
    assert holding is not None
    theirs = torch.empty(holding.shape, dtype=holding.dtype, device=mesh.device)
    if parameter is not None and mesh.rank == source:
        theirs.copy_(parameter)
    dist.broadcast(theirs, src=source, group=mesh.world.group)
    text = ""
    if parameter is not None and parameter.shape == theirs.shape:
        mine = parameter.detach().to(mesh.device)
        count = int((_bits(mine) != _bits(theirs)).sum())
        most = (mine.double() - theirs.double()).abs().max().item()
        text = f"{count} of {mine.numel()} elements, by up to {most:.3g}"
    return _from_all(text, mesh)


def _from_all(value: _T, mesh: Mesh) -> list[_T]:
    values: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(values, value, group=mesh.world.group)
    return values


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers of their size: [elements]."""
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
