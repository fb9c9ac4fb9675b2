"""A loss that jumps out of what it was of late: worth a warning, never more."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Fewer losses than these say nothing about what is usual.
_ENOUGH = 20
# Of a normal distribution, the standard deviation over the median absolute deviation.
_SIGMA_PER_MAD = 1.4826
# Losses that hardly move would make a spike of any noise: this share of them is noise.
_NOISE = 1e-3


@dataclass(frozen=True)
class Spike:
    """A loss beyond the bound, which was `median` + factor * `deviation`."""

    loss: float
    median: float
    deviation: float
    bound: float


class SpikeDetector:
    """Compares each loss with those before it.

    Median and median absolute deviation instead of mean and standard deviation: the spikes that are
    among the losses before hardly change them.

    Args:
        window: losses that are looked back on; 0: nothing is a spike.
        factor: deviations above the median.
    """

    def __init__(self, window: int, factor: float) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=window)
        self._enough = min(_ENOUGH, window)
        self._in_spike = False

    def see(self, loss: float) -> Spike | None:
        """The spike that begins with this loss; None in the middle of one too."""
        if not math.isfinite(loss) or not self._losses.maxlen:
            return None
        spike = self._spike(loss) if len(self._losses) >= self._enough else None
        begins, self._in_spike = spike is not None and not self._in_spike, spike is not None
        self._losses.append(loss)
        return spike if begins else None

    def _spike(self, loss: float) -> Spike | None:
        median = statistics.median(self._losses)
        mad = statistics.median(abs(other - median) for other in self._losses)
        deviation = max(_SIGMA_PER_MAD * mad, _NOISE * abs(median))
        bound = median + self._factor * deviation
        return Spike(loss, median, deviation, bound) if loss > bound else None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "in_spike": self._in_spike}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the losses of an earlier run, or as many of them as fit."""
        self._losses.clear()
        self._losses.extend(state["losses"])
        self._in_spike = bool(state["in_spike"])
