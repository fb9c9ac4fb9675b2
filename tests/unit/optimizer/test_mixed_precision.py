"""Dtypes, master weights and loss scales."""

import re

import pytest
import torch
from torch import nn

from pipemega.config import load
from pipemega.errors import ConfigError, LossScaleError
from pipemega.optimizer.gradients import GradientBuffer
from pipemega.optimizer.mixed_precision import DynamicLossScale, LossScale, Precision
from pipemega.parameters import Shard, attach_shard, shard_of

BF16 = Precision(torch.bfloat16)


def scales(scaler, overflows):
    """Return the scale after each step; in `overflows` an x is an overflow, a dot none."""
    seen = []
    for step in overflows:
        scaler.update(step == "x")
        seen.append(scaler.scale)
    return seen


@pytest.mark.parametrize(
    ("settings", "overflows", "expected"),
    [
        # The window starts at the step after the last overflow, or after the first step.
        ({"window": 2, "hysteresis": 1}, ".....", [16, 16, 32, 32, 64]),
        ({"window": 2, "hysteresis": 1}, "x...x", [8, 8, 8, 16, 8]),
        # An overflow restarts the window.
        ({"window": 3, "hysteresis": 1}, "..x....", [16, 16, 8, 8, 8, 8, 16]),
        # Hysteresis: the first overflow changes nothing; all others do until the scale grows.
        ({"window": 9, "hysteresis": 2}, "x.x.x", [16, 16, 8, 8, 4]),
        ({"window": 2, "hysteresis": 2}, "xx...xx", [16, 8, 8, 8, 16, 16, 8]),
        # Consecutive hysteresis: each step without overflow resets it.
        ({"window": 9, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx",
         [16, 16, 16, 16, 16, 8]),
        # Never below the minimum.
        ({"window": 9, "hysteresis": 1, "minimum": 6.0}, "xx", [8, 6]),
    ],
)  # fmt: skip
def test_the_dynamic_loss_scale_moves_as_deepspeeds_does(settings, overflows, expected):
    assert scales(DynamicLossScale(16.0, **settings), overflows) == expected


def test_an_overflow_at_the_minimum_raises_with_the_history_and_advice():
    scaler = DynamicLossScale(4.0, window=100, hysteresis=1)
    with pytest.raises(LossScaleError) as raised:
        scales(scaler, ".x.xx")
    message = str(raised.value)
    assert "overflowed at step 4 with the loss scale at fp16.min_loss_scale (1)" in message
    assert "4 from step 0, 2 from step 2, 1 from step 4" in message
    assert "not finite, or exceed 65504 without the scale" in message
    assert "use bf16 instead of fp16" in message


def test_the_error_at_the_minimum_names_the_largest_gradient_at_that_scale():
    scaler = DynamicLossScale(32.0, window=100, hysteresis=1, minimum=32.0)
    with pytest.raises(LossScaleError, match="not finite, or exceed 2047 without the scale"):
        scales(scaler, "x")


def test_a_dynamic_loss_scale_resumes_from_its_state():
    settings = {"window": 2, "hysteresis": 2}
    whole, first = DynamicLossScale(64.0, **settings), DynamicLossScale(64.0, **settings)
    overflows = "x..x.x....x.x"
    expected = scales(whole, overflows)
    scales(first, overflows[:6])
    second = DynamicLossScale(2.0, **settings)
    second.load_state_dict(first.state_dict())
    assert scales(second, overflows[6:]) == expected[6:]
    assert second.state_dict() == whole.state_dict()


def test_a_static_loss_scale_is_constant():
    assert scales(LossScale(128), ".x.") == [128, 128, 128]
    assert LossScale().scale == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_scale_window": 0}, "fp16.loss_scale_window must be an integer >= 1, not 0"),
        ({"hysteresis": 0}, "fp16.hysteresis must be an integer >= 1, not 0"),
        ({"min_loss_scale": 0.0}, "fp16.min_loss_scale must be a number > 0, not 0.0"),
        ({"initial_scale_power": 1, "min_loss_scale": 4}, "below fp16.min_loss_scale (4): "),
    ],
)
def test_invalid_loss_scale_settings_are_refused_by_their_key(settings, message):
    config = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, **settings}}
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(config)


def test_masters_hold_the_values_from_before_the_cast_and_the_shard():
    weight = attach_shard(nn.Parameter(torch.randn(4, 3)), Shard((8, 3), dim=0, ranges=((4, 8),)))
    before = weight.detach().clone()
    masters = BF16.cast_parameters([("layers.0.weight", weight)])
    master = masters["layers.0.weight"]
    assert weight.dtype == torch.bfloat16
    assert master.dtype == torch.float32
    assert torch.equal(master, before)
    assert not torch.equal(weight.float(), before)
    assert shard_of(master) == shard_of(weight) == Shard((8, 3), dim=0, ranges=((4, 8),))


def test_only_trainable_parameters_get_masters_and_buffers_are_not_cast():
    norm = nn.BatchNorm1d(3)
    norm.bias.requires_grad_(False)
    masters = BF16.cast_parameters(norm.named_parameters())
    assert set(masters) == {"weight"}
    assert norm.bias.dtype == torch.bfloat16
    assert norm.running_mean.dtype == torch.float32


def test_a_parameter_of_the_compute_dtype_still_gets_a_separate_master():
    weight = nn.Parameter(torch.zeros(2))
    master = Precision(torch.float32).cast_parameters([("w", weight)])["w"]
    with torch.no_grad():
        master.fill_(1)
    assert weight.tolist() == [0, 0]


def test_without_a_compute_dtype_nothing_is_cast():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    inputs = torch.zeros(2, dtype=torch.float64)
    assert Precision().cast_parameters([("w", weight)]) == {}
    assert weight.dtype == torch.float64
    assert Precision().cast_inputs(inputs) is inputs
    assert Precision().accumulation_dtype is None


def test_only_floating_point_inputs_are_cast():
    tokens = torch.arange(3)
    cast = BF16.cast_inputs({"x": torch.ones(2), "rest": (tokens, None, 7)})
    assert cast["x"].dtype == torch.bfloat16
    assert cast["rest"][0] is tokens
    assert cast["rest"][1:] == (None, 7)
    uncast = torch.ones(2)
    assert Precision(torch.float16, cast=False).cast_inputs(uncast) is uncast


def test_many_small_bf16_gradients_do_not_get_lost_in_the_sum():
    # In bf16, with 8 bits of mantissa, 1 + 2**-9 is rounded to 1: the sum would not grow.
    weight = nn.Parameter(torch.zeros(4))
    BF16.cast_parameters([("w", weight)])
    buffer = GradientBuffer([("w", weight)], dtype=BF16.accumulation_dtype)
    for gradient in [1.0] + 512 * [2.0**-9]:
        (weight * gradient).sum().backward()
    assert weight.grad is None
    assert buffer.view(weight).dtype == torch.float32
    assert buffer.view(weight).tolist() == 4 * [2.0]
