"""`deepspeed.ops.adam`: DeepSpeed's Adam classes as torch's Adam."""

from collections.abc import Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
    """torch's Adam with DeepSpeed's arguments; it decays as AdamW unless `adam_w_mode` is False.

    Args:
        bias_correction: must be True.
        set_grad_none, fp32_optimizer_states: have no effect: the engine owns the gradients.

    Raises:
        ValueError: bias_correction is False.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **_: Any,
    ) -> None:
        if not bias_correction:
            raise ValueError("FusedAdam(bias_correction=False) is not supported: remove it")
        super().__init__(
            params,
            lr=lr,
            betas=(betas[0], betas[1]),
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` with the order of arguments of DeepSpeed's CPU optimizer."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            bias_correction,
            betas,
            eps,
            adam_w_mode=adamw_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
