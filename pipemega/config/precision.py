"""`fp16`, `bf16`, `data_types`: dtypes of parameters, activations and gradients."""

from collections.abc import Iterator
from typing import Literal

from pipemega.config.key_kinds import Section, honoured, ignored, refused, rule
from pipemega.config.value_types import Auto, Count, NotNegative, Positive, Whole

Dtype = Literal["fp32", "fp16", "bf16"]
_MASTERS = (
    "master weights are always fp32, so that small updates are not lost; "
    "data_types.grad_accum_dtype sets the dtype of the gradients"
)


class Fp16Section(Section):
    """fp16 weights and activations, fp32 master weights, loss scaling."""

    enabled: bool = honoured(False, "Train in fp16.")
    auto_cast: bool = honoured(False, "Cast floating-point inputs of the model to fp16.")
    loss_scale: NotNegative = honoured(0.0, "Static loss scale; 0: dynamic loss scaling.")
    initial_scale_power: Whole = honoured(16, "log2 of the first dynamic loss scale.", le=127)
    loss_scale_window: Count = honoured(1000, "Steps without overflow until the scale doubles.")
    hysteresis: Count = honoured(2, "Overflows until the loss scale is halved.")
    consecutive_hysteresis: bool = honoured(False, "Reset hysteresis if a step does not overflow.")
    min_loss_scale: Positive = honoured(
        1.0, "Smallest loss scale; an overflow that would halve this scale ends the run."
    )
    fp16_master_weights_and_grads: bool = refused(
        False, "fp16 master weights and gradients.", _MASTERS
    )

    @rule("initial_scale_power", "min_loss_scale", "enabled", "loss_scale")
    def _starts_above_the_minimum(self) -> Iterator[str]:
        start = 2.0**self.initial_scale_power
        if self.enabled and not self.loss_scale and start < self.min_loss_scale:
            yield (
                f"fp16.initial_scale_power {self.initial_scale_power} means a loss scale of "
                f"{start:g}, below fp16.min_loss_scale ({self.min_loss_scale:g}): raise the first "
                "or lower the second"
            )


class Bf16Section(Section):
    """bf16 weights and activations, fp32 master weights."""

    enabled: bool = honoured(False, "Train in bf16.")
    check_grad_overflow: bool = honoured(
        True, "Skip steps with inf or nan gradients unless training.on_nonfinite.policy is set."
    )
    immediate_grad_update: bool = ignored(
        False,
        "DeepSpeed: add each gradient to its fp32 buffer as soon as it exists.",
        "gradients are always added to the gradient buffer immediately",
        agrees=[True],
    )
    bf16_master_weights_and_grads: bool = refused(
        False, "bf16 master weights and gradients.", _MASTERS
    )
    bf16_optimizer_states: bool = refused(
        False, "bf16 optimizer state.", "optimizer state is always fp32"
    )


class DataTypesSection(Section):
    """Dtypes other than those of `fp16` and `bf16`."""

    grad_accum_dtype: Dtype | None = honoured(
        None, "Dtype of accumulated gradients; null: fp32, or that of the parameters if wider."
    )
    param_dtype: Dtype | None = refused(
        None, "DeepSpeed: dtype of the parameters.", "it follows from fp16.enabled and bf16.enabled"
    )
    keep_in_fp32_modules: tuple[str, ...] | Auto | None = ignored(
        None,
        "DeepSpeed: buffers of these modules stay in fp32.",
        "buffers keep the dtype that the model gives them",
        agrees=["auto"],
    )
    buffer_dtype: Dtype | None = refused(
        None, "DeepSpeed: dtype of the buffers.", "buffers keep the dtype that the model gives them"
    )
