"""Which fused kernel runs: NVIDIA apex where it is installed, else torch's own.  Chosen once.

The name `apex` on public package indexes belongs to another project.  NVIDIA's brings the
extension module `amp_C`, so that is what is looked for, and a package that only bears the name
is never imported.

A multi-tensor norm is not among the choices: gradients lie in flat buffers, so one kernel takes
the norm of them all, and in fp64.
"""

import importlib.util
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

# On CPU torch's foreach is no gain: a plain loop over tensors is faster (docs/optimizer.md).
_FUSED_ON = {
    "Adam": ("cpu", "cuda"),
    "AdamW": ("cpu", "cuda"),
    "SGD": ("cpu", "cuda"),
    "Adagrad": ("cpu",),
}
_APEX_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernels:
    """The implementations that this process uses.

    Args:
        device: what they are for.
        adam: apex's FusedAdam; None where torch's optimizers are used.
        layer_norm, rms_norm: module classes called as (shape, eps=...), with `weight` (and
            `bias`) like torch's.
        description: one line for the log.
    """

    device: torch.device
    adam: type[torch.optim.Optimizer] | None = None
    layer_norm: type[nn.Module] = nn.LayerNorm
    rms_norm: type[nn.Module] = nn.RMSNorm
    description: str = field(default="", compare=False)

    @classmethod
    def detect(cls, device: torch.device | str) -> "Kernels":
        """What is installed for `device`."""
        device = torch.device(device)
        if device.type != "cuda":
            return cls(device, description="kernels: torch's fused optimizers and norms (CPU)")
        if importlib.util.find_spec("amp_C") is None or importlib.util.find_spec("apex") is None:
            return cls(
                device,
                description="kernels: torch's fused optimizers and norms (NVIDIA apex not found)",
            )
        return _from_apex(device)

    def takes_apex_adam(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether apex's FusedAdam can work on these."""
        return self.adam is not None and all(t.dtype in _APEX_DTYPES for t in tensors)

    def optimizer_arguments(
        self, optimizer: type[torch.optim.Optimizer], tensors: Iterable[torch.Tensor]
    ) -> dict[str, Any]:
        """`{"fused": True}` or `{"foreach": True}` where this torch optimizer gains by it here."""
        known = inspect.signature(optimizer).parameters
        fused_on = _FUSED_ON.get(optimizer.__name__, ())
        floating = all(t.is_floating_point() for t in tensors)
        if "fused" in known and self.device.type in fused_on and floating:
            return {"fused": True}
        if "foreach" in known and self.device.type == "cuda":
            return {"foreach": True}
        return {}


def _from_apex(device: torch.device) -> Kernels:
    try:
        # An optional dependency: imported here, and only where NVIDIA's extension was found.
        from apex.normalization import FusedLayerNorm, FusedRMSNorm
        from apex.optimizers import FusedAdam
    except ImportError as error:
        return Kernels(
            device,
            description="kernels: torch's fused optimizers and norms (NVIDIA apex is there but "
            f"incomplete: {error})",
        )
    return Kernels(
        device,
        adam=FusedAdam,
        layer_norm=FusedLayerNorm,
        rms_norm=FusedRMSNorm,
        description="kernels: NVIDIA apex (FusedAdam, FusedLayerNorm, FusedRMSNorm), torch's "
        "fused ones for the rest",
    )
