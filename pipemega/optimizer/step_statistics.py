"""Numbers about each step for the log: norm of the parameters, zeros in the gradients.

    reduce the gradients          count_zeros()     this rank's part, on the device
    update the masters
                                  local()           with the squares of the updated masters
    one all-reduce over the world add_to(report)

As for the norm of the gradients, each element of a logical parameter counts once in the world, and
padding does not count, so that the numbers are those of the unsharded model.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipemega.optimizer.grad_norm import square_sums
from pipemega.optimizer.step_outcome import StepReport


class CountedGradient(NamedTuple):
    """A gradient that this rank counts.

    Args:
        gradient: its elements on this rank, in the gradient buffer.
        padding: number of them that are padding; their gradient is 0.
    """

    gradient: Tensor
    padding: int


class StepStatistics:
    """Computes the numbers; the same tensors in every step.

    Args:
        params: what this rank counts of the parameters, as the optimizer updates them; None: do not
            compute their norm.
        gradients: what it counts of the gradients; None: do not count zeros.
        device: of the result.
    """

    def __init__(
        self,
        params: Sequence[Tensor] | None,
        gradients: Sequence[CountedGradient] | None,
        device: torch.device,
    ) -> None:
        self._has_params, self._gradients = params is not None, gradients
        self._params: dict[torch.device, list[Tensor]] = {}
        for tensor in params or ():
            if tensor.numel():
                self._params.setdefault(tensor.device, []).append(tensor.detach())
        self._local = torch.zeros(2, dtype=torch.float64, device=device)

    @torch.no_grad()
    def count_zeros(self) -> None:
        """Count the zeros of the reduced gradients; before they are set to zero."""
        if self._gradients is None:
            return
        self._local[1] = 0.0
        for gradient, padding in self._gradients:
            zeros = gradient.numel() - padding - torch.count_nonzero(gradient)
            self._local[1] += zeros

    @torch.no_grad()
    def local(self) -> Tensor:
        """Return this rank's part: [squares of the parameters, zeros] fp64."""
        self._local[0] = 0.0
        for tensors in self._params.values():
            self._local[0] += square_sums(tensors).sum().to(self._local.device)
        return self._local.clone()

    def add_to(self, report: StepReport, sums: Sequence[float]) -> StepReport:
        """Return the report with the numbers, from the sums of `local` over all ranks."""
        squares, zeros = sums
        return replace(
            report,
            params_norm=math.sqrt(squares) if self._has_params else None,
            num_zeros=int(zeros) if self._gradients is not None else None,
        )
