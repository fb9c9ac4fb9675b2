"""Selects fused kernels once: NVIDIA apex if it is installed, else torch's kernels.

On public package indexes the name `apex` belongs to another project. NVIDIA's package has the
extension module `amp_C`, so this module is searched for, and another `apex` is never imported.

There is no multi-tensor norm to select: `optimizer.grad_norm` uses torch's norm, which adds in
fp64.
"""

import importlib.util
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

# On CPU torch's foreach is slower than a plain loop over tensors (docs/optimizer.md). torch's fused
# SGD fails where only some parameters have had a step (frozen parameters).
_FUSED_ON = {
    "Adam": ("cpu", "cuda"),
    "AdamW": ("cpu", "cuda"),
    "Adagrad": ("cpu",),
}
_APEX_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernels:
    """The implementations that this process uses.

    Args:
        device: the device of the kernels.
        adam: FusedAdam of apex; None if torch's optimizers are used.
        layer_norm, rms_norm: module classes, called as (shape, eps=...), with `weight` (and
            `bias`) as in torch.
        flex_attention: it can be compiled for CUDA devices: triton is installed.
        description: the line that the log shows about the kernels.
    """

    device: torch.device
    adam: type[torch.optim.Optimizer] | None = None
    layer_norm: type[nn.Module] = nn.LayerNorm
    rms_norm: type[nn.Module] = nn.RMSNorm
    flex_attention: bool = True
    description: str = field(default="", compare=False)

    @classmethod
    def detect(cls, device: torch.device | str) -> "Kernels":
        """Return the kernels that are installed for `device`."""
        device = torch.device(device)
        if device.type != "cuda":
            return cls(device, description="kernels: torch's fused optimizers and norms (CPU)")
        if importlib.util.find_spec("amp_C") is None or importlib.util.find_spec("apex") is None:
            kernels = cls(
                device,
                description="kernels: torch's fused optimizers and norms (NVIDIA apex not found)",
            )
        else:
            kernels = _from_apex(device)
        if not torch.utils._triton.has_triton():
            text = f"{kernels.description}; no triton: attention of packed documents uses a mask"
            kernels = replace(kernels, flex_attention=False, description=text)
        return kernels

    def takes_apex_adam(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether FusedAdam of apex supports these tensors."""
        return self.adam is not None and all(t.dtype in _APEX_DTYPES for t in tensors)

    def optimizer_arguments(
        self, optimizer: type[torch.optim.Optimizer], tensors: Iterable[torch.Tensor]
    ) -> dict[str, Any]:
        """Return `{"fused": True}` or `{"foreach": True}` if this optimizer is faster with it."""
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
        # An optional dependency; imported only if NVIDIA's extension was found.
        from apex.normalization import FusedLayerNorm, FusedRMSNorm
        from apex.optimizers import FusedAdam
    except ImportError as error:
        return Kernels(
            device,
            description="kernels: torch's fused optimizers and norms (NVIDIA apex is installed "
            f"but incomplete: {error})",
        )
    return Kernels(
        device,
        adam=FusedAdam,
        layer_norm=FusedLayerNorm,
        rms_norm=FusedRMSNorm,
        description="kernels: NVIDIA apex (FusedAdam, FusedLayerNorm, FusedRMSNorm), torch's "
        "fused kernels for the rest",
    )
