"""Rotary position embeddings (RoPE): rotate queries and keys by angles of their positions.

Source: Su et al. 2021, arXiv:2104.09864.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipemega.models.rope_frequencies import Frequencies, RopeScaling, frequencies

Table = tuple[Tensor, Tensor]
"""Cosines and sines, each [1 or batch, 1, sequence, dim]."""

# Rotations whose tables are kept; a model has one or two (fp32 and bf16).
_MOST_TABLES = 8


class Rotary(nn.Module):
    """Rotates pairs of channels by an angle proportional to the position.

    Args:
        dim: number of leading channels of a head to rotate; the others are unchanged.
        base: wavelength of the slowest pair, divided by 2 pi.
        scaling: of the angles, for sequences longer than those of pretraining.
    """

    def __init__(self, dim: int, base: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self._dim, self._base, self._scaling = dim, base, scaling
        self._frequencies = frequencies(dim, base, scaling)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotate q and k.

        Shape:
            q, k [batch, heads, sequence, head]; positions [batch, sequence], None for 0, 1, 2 ..
        """
        found = self._frequencies
        if self._scaling is not None and self._scaling.depends_on_length:
            found = frequencies(self._dim, self._base, self._scaling, _length(q, positions))
        rotation = _Rotation(found, q.dtype, q.device)
        if positions is None:
            cos, sin = _counted_table(rotation, q.shape[2])
        else:
            cos, sin = _given_table(rotation, positions)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, rest = x[..., : self._dim], x[..., self._dim :]
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
        return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)


def _length(q: Tensor, positions: Tensor | None) -> int:
    """Return the last position plus 1."""
    if positions is None or positions.is_meta:
        return q.shape[2]
    return int(positions.max()) + 1


@dataclass(frozen=True)
class _Rotation:
    """Everything but the positions that a table depends on."""

    frequencies: Frequencies
    dtype: torch.dtype
    device: torch.device

    def table(self, positions: Tensor) -> Table:
        """Return the table of `positions` [batch, sequence]."""
        values, factor = self.frequencies
        # In fp64: large positions times small frequencies lose precision in fp32.
        turns = torch.tensor(values, dtype=torch.float64, device=self.device)
        angles = positions.unsqueeze(-1) * turns  # [batch, sequence, dim / 2]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return self._of_pairs(cos), self._of_pairs(sin)

    def _of_pairs(self, table: Tensor) -> Tensor:
        return table.repeat(1, 1, 2).unsqueeze(1).to(self.dtype)

    @property
    def dim(self) -> int:
        return 2 * len(self.frequencies.values)

    def counted(self, length: int) -> Table:
        """Return the table of the positions 0 to length - 1."""
        return self.table(torch.arange(length, device=self.device).unsqueeze(0))


# The layers and micro-batches of a process share their tables. A compiled graph has its own,
# because its tensors must not outlive its run; the compiler computes equal expressions once.
_counted: dict[_Rotation, Table] = {}
_given: deque["_Given"] = deque(maxlen=1)


@dataclass(frozen=True, eq=False)
class _Given:
    """The table of the positions that a micro-batch has brought."""

    positions: "weakref.ref[Tensor]"
    version: int
    rotation: _Rotation
    table: Table


def _counted_table(rotation: _Rotation, length: int) -> Table:
    """Return the table of the positions 0 to length - 1."""
    if torch.compiler.is_compiling():
        return rotation.counted(length)
    if rotation.device.type == "meta":
        # One element: a planner that counts the tensors of a micro-batch must not count a table
        # that all micro-batches share.
        one = torch.empty((), dtype=rotation.dtype, device="meta")
        return (one.expand(1, 1, length, rotation.dim),) * 2
    known = _counted.get(rotation)
    if known is None or known[0].shape[2] < length:
        with _normal_tensors():
            # To a power of two: the sequence of `generate` grows by one token at a time.
            known = rotation.counted(1 << (length - 1).bit_length())
        _counted.pop(rotation, None)
        while len(_counted) >= _MOST_TABLES:
            _counted.pop(next(iter(_counted)))
        _counted[rotation] = known
    cos, sin = known
    return cos[:, :, :length], sin[:, :, :length]


def _given_table(rotation: _Rotation, positions: Tensor) -> Table:
    """Return the table of `positions`; it is kept for the other layers of the micro-batch."""
    # An inference tensor has no version, which would show a change in place.
    if torch.compiler.is_compiling() or positions.is_inference():
        return rotation.table(positions)
    version = positions._version
    for known in _given:
        same = known.positions() is positions and known.version == version
        if same and known.rotation == rotation:
            return known.table
    with _normal_tensors():
        table = rotation.table(positions)
    _given.append(_Given(weakref.ref(positions, _forget), version, rotation, table))
    return table


def _forget(positions: "weakref.ref[Tensor]") -> None:
    if _given and _given[0].positions is positions:
        _given.clear()


@contextmanager
def _normal_tensors() -> Iterator[None]:
    """Create tensors that training can use too, also within `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():
        yield
