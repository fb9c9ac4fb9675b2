"""Frequencies of rotary positions, also scaled for sequences longer than those of pretraining.

    linear     frequency / factor                                        Chen et al. 2023
    dynamic    the base grows with the sequence, beyond the original     NTK-aware scaling
               length
    yarn       slow pairs / factor, fast pairs unchanged, a ramp         Peng et al. 2023,
               between; queries and keys times an attention factor       arXiv:2309.00071
    llama3     the same by wavelengths, with a smooth transition         Llama 3.1

The keys and the results are those of transformers' `ROPE_INIT_FUNCTIONS`, in fp64.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipemega.config.rope_scaling import RopeScalingSection


class Frequencies(NamedTuple):
    """Radians per position of each pair of channels, and the factor of cosines and sines."""

    values: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of a model.

    Args:
        section: its keys.
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
        length: of the sequence; only "dynamic" depends on it.
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
