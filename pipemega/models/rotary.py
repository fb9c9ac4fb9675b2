"""Rotary position embeddings (RoPE): rotate queries and keys by angles of their positions.

Source: Su et al. 2021, arXiv:2104.09864.

Frequencies of rotary positions, also scaled for sequences longer than in pretraining.

    linear     frequency / factor                                        Chen et al. 2023
    dynamic    the base grows with the sequence, beyond the original     NTK-aware scaling
               length
    yarn       slow pairs / factor, fast pairs unchanged, a ramp         Peng et al. 2023,
               between; queries and keys times an attention factor       arXiv:2309.00071
    llama3     the same by wavelengths, with a smooth transition         Llama 3.1

The keys and the results are the same as in transformers' `ROPE_INIT_FUNCTIONS`, in fp64.
"""

import math
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipemega.config.sections.transformer_sections import RopeScalingSection
from pipemega.pipeline.model.recompute import outside_recomputation


class Frequencies(NamedTuple):
    """Radians per position of each pair of channels, and the factor of cosines and sines."""

    values: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of a model.

    Args:
        section: the keys of the scaling.
        max_length: the longest sequence, `model.max_position_embeddings`.
    """

    section: RopeScalingSection
    max_length: int

    @property
    def original(self) -> int:
        """The length of sequences before scaling."""
        return self.section.original_max_position_embeddings or self.max_length

    @property
    def depends_on_length(self) -> bool:
        return self.section.rope_type == "dynamic"


@lru_cache(maxsize=64)
def frequencies(
    dim: int, base: float, scaling: RopeScaling | None = None, length: int = 0
) -> Frequencies:
    """Return the frequencies of `dim` / 2 pairs of channels.

    Args:
        base: wavelength of the slowest pair, divided by 2 pi.
        length: length of the sequence; only "dynamic" depends on it.
    """
    kind = "default" if scaling is None else scaling.section.rope_type
    if scaling is None or kind == "default":
        return Frequencies(tuple(_plain(dim, base).tolist()))
    section, factor = scaling.section, scaling.section.factor
    if kind == "dynamic":
        assert factor is not None
        growth = factor * max(length, scaling.original) / scaling.original - (factor - 1)
        return Frequencies(tuple(_plain(dim, base * growth ** (dim / (dim - 2))).tolist()))
    if kind == "yarn":
        return _yarn(dim, base, scaling)
    assert factor is not None
    plain = _plain(dim, base)
    scaled = plain / factor if kind == "linear" else _llama3(plain, section, factor)
    return Frequencies(tuple(scaled.tolist()))


def _plain(dim: int, base: float) -> Tensor:
    # On the CPU, so that all devices have equal frequencies.
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    return base**-exponents


def _yarn(dim: int, base: float, scaling: RopeScaling) -> Frequencies:
    s, original = scaling.section, scaling.original
    factor = s.factor if s.factor is not None else scaling.max_length / original

    def pair_with(rotations: float) -> float:
        """Return the pair that turns so often within the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(s.beta_fast), pair_with(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    # As in transformers: no division by zero.
    ramp = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    plain = _plain(dim, base)
    values = plain / factor * ramp + plain * (1 - ramp)
    attention = s.attention_factor
    if attention is None and s.mscale and s.mscale_all_dim:
        attention = _mscale(factor, s.mscale) / _mscale(factor, s.mscale_all_dim)
    return Frequencies(tuple(values.tolist()), attention or _mscale(factor, 1.0))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(plain: Tensor, section: RopeScalingSection, factor: float) -> Tensor:
    low, high = section.low_freq_factor, section.high_freq_factor
    original = section.original_max_position_embeddings
    assert low is not None
    assert high is not None
    assert original is not None
    # 0: wavelengths above original / low; 1: wavelengths below original / high.
    smooth = ((original * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


Table = tuple[Tensor, Tensor]
"""Cosines and sines, each [1 or batch, 1, sequence, dim]."""

# Rotations whose tables are kept; a model has one or two (fp32 and bf16).
_MOST_TABLES = 8


class Rotary(nn.Module):
    """Rotates pairs of channels by an angle proportional to the position.

    Args:
        dim: number of leading channels of a head to rotate; the others are unchanged.
        base: wavelength of the slowest pair, divided by 2 pi.
        scaling: scaling of the angles, for sequences longer than in pretraining; None: none.
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
    with torch.inference_mode(False), torch.no_grad(), outside_recomputation():
        yield
