"""Detects loss spikes, for the log; training does not change."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Number of losses needed before a spike is detected.
_MIN_LOSSES = 20
# Standard deviation / median absolute deviation of a normal distribution.
_SIGMA_PER_MAD = 1.4826
# Least deviation, as a share of the median: an almost constant loss must not make noise a spike.
_MIN_RELATIVE_DEVIATION = 1e-3


@dataclass(frozen=True)
class Spike:
    """A loss above the bound, which is `median` + factor * `deviation`."""

    loss: float
    median: float
    deviation: float
    bound: float


class SpikeDetector:
    """Compares each loss with the previous ones.

    By median and median absolute deviation, which earlier spikes hardly change, unlike mean and
    standard deviation.

    Args:
        window: number of previous losses; 0 disables detection.
        factor: a spike is more than this many deviations above the median.
    """

    def __init__(self, window: int, factor: float) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=window)
        self._min_losses = min(_MIN_LOSSES, window)
        self._in_spike = False

    def add(self, loss: float) -> Spike | None:
        """Add a loss; return the spike that starts with it, None also within a spike."""
        if not math.isfinite(loss) or not self._losses.maxlen:
            return None
        spike = self._spike(loss) if len(self._losses) >= self._min_losses else None
        starts, self._in_spike = spike is not None and not self._in_spike, spike is not None
        self._losses.append(loss)
        return spike if starts else None

    def _spike(self, loss: float) -> Spike | None:
        median = statistics.median(self._losses)
        mad = statistics.median(abs(other - median) for other in self._losses)
        deviation = max(_SIGMA_PER_MAD * mad, _MIN_RELATIVE_DEVIATION * abs(median))
        bound = median + self._factor * deviation
        return Spike(loss, median, deviation, bound) if loss > bound else None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "in_spike": self._in_spike}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the losses of an earlier run; if the window is smaller, the latest of them."""
        self._losses.clear()
        self._losses.extend(state["losses"])
        self._in_spike = bool(state["in_spike"])
