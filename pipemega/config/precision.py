"""`fp16`, `bf16`, `data_types`: which dtype computes and which one adds up.  Floor 1."""

from typing import Literal

from pydantic import model_validator

from pipemega.config.keys import (
    Count,
    NotNegative,
    Positive,
    Section,
    Whole,
    honoured,
    ignored,
    refused,
)

Dtype = Literal["fp32", "fp16", "bf16"]
_MASTERS = "master weights and gradients are kept in fp32, so that small updates are not lost"


class Fp16Section(Section):
    """Weights and activations in fp16, masters in fp32, the loss scaled."""

    enabled: bool = honoured(False, "Train in fp16.")
    auto_cast: bool = honoured(False, "Cast the floating-point inputs of the model to fp16.")
    loss_scale: NotNegative = honoured(0.0, "A fixed loss scale; 0: a dynamic one.")
    initial_scale_power: Whole = honoured(
        16, "The dynamic scale begins at 2 to this power.", le=127
    )
    loss_scale_window: Count = honoured(1000, "Steps without overflow until the scale doubles.")
    hysteresis: Count = honoured(2, "Overflows until the scale is halved.")
    consecutive_hysteresis: bool = honoured(
        False, "Each step without overflow fills the hysteresis up again."
    )
    min_loss_scale: Positive = honoured(1.0, "An overflow at this scale ends the run.")
    fp16_master_weights_and_grads: bool = refused(
        False, "DeepSpeed: keep masters in fp16.", _MASTERS
    )

    @model_validator(mode="after")
    def _starts_above_the_minimum(self) -> "Fp16Section":
        start = 2.0**self.initial_scale_power
        if self.enabled and not self.loss_scale and start < self.min_loss_scale:
            raise ValueError(
                f"fp16.initial_scale_power {self.initial_scale_power} begins at {start:g}, below "
                f"fp16.min_loss_scale ({self.min_loss_scale:g}): raise the one or lower the other"
            )
        return self


class Bf16Section(Section):
    """Weights and activations in bf16, masters in fp32."""

    enabled: bool = honoured(False, "Train in bf16.")
    check_grad_overflow: bool = honoured(
        True,
        "Skip a step whose gradients are not finite, as fp16 does, unless "
        "training.on_nonfinite.policy says otherwise.",
    )
    immediate_grad_update: bool = ignored(
        False,
        "DeepSpeed: add to the fp32 gradient as soon as there is one.",
        "gradients are added up in fp32 as they come, always",
        agrees=[True],
    )
    bf16_master_weights_and_grads: bool = refused(
        False, "DeepSpeed: keep masters in bf16.", _MASTERS
    )
    bf16_optimizer_states: bool = refused(
        False, "DeepSpeed: keep the optimizer's state in bf16.", "the optimizer's state is fp32"
    )


class DataTypesSection(Section):
    """Dtypes beside those of `fp16` and `bf16`."""

    grad_accum_dtype: Dtype | None = honoured(
        None, "In which gradients are added up; null: fp32, or the parameters' own if wider."
    )
    param_dtype: Dtype | None = refused(
        None, "DeepSpeed: dtype of the parameters.", "it follows from fp16.enabled and bf16.enabled"
    )
    buffer_dtype: Dtype | None = refused(
        None, "DeepSpeed: dtype of the buffers.", "buffers keep the dtype that the model gives them"
    )
