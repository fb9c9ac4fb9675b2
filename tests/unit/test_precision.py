"""Dtypes, master weights and loss scales."""

import re

import pytest
import torch
from torch import nn

from pipemega.errors import ConfigError, LossScaleError
from pipemega.gradients import GradientBuffer
from pipemega.parameters import Shard, describe, shard_of
from pipemega.precision import DynamicLossScale, Precision, StaticLossScale

BF16 = Precision(torch.bfloat16)


def scales(scaler, overflows):
    """The scale after each step; `overflows` reads like "..x." with x for an overflow."""
    seen = []
    for step in overflows:
        scaler.update(step == "x")
        seen.append(scaler.scale)
    return seen


@pytest.mark.parametrize(
    ("settings", "overflows", "expected"),
    [
        # The window counts from the step after the last overflow; the very first step is one.
        ({"window": 2, "hysteresis": 1}, ".....", [16, 16, 32, 32, 64]),
        ({"window": 2, "hysteresis": 1}, "x...x", [8, 8, 8, 16, 8]),
        # An overflow starts the window anew.
        ({"window": 3, "hysteresis": 1}, "..x....", [16, 16, 8, 8, 8, 8, 16]),
        # Hysteresis: the first overflow is free, and after that none is until the scale grew.
        ({"window": 9, "hysteresis": 2}, "x.x.x", [16, 16, 8, 8, 4]),
        ({"window": 2, "hysteresis": 2}, "xx...xx", [16, 8, 8, 8, 16, 16, 8]),
        # Consecutive hysteresis: each good step makes the next overflow free again.
        ({"window": 9, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx",
         [16, 16, 16, 16, 16, 8]),
        # The minimum holds.
        ({"window": 9, "hysteresis": 1, "minimum": 6.0}, "xx", [8, 6]),
    ],
)  # fmt: skip
def test_the_dynamic_loss_scale_moves_as_deepspeeds_does(settings, overflows, expected):
    assert scales(DynamicLossScale(16.0, **settings), overflows) == expected


def test_overflowing_at_the_minimum_ends_with_the_history_and_the_way_out():
    scaler = DynamicLossScale(4.0, window=100, hysteresis=1)
    with pytest.raises(LossScaleError) as raised:
        scales(scaler, ".x.xx")
    message = str(raised.value)
    assert "overflowed at step 4 with the loss scale at fp16.min_loss_scale (1)" in message
    assert "4 from step 0, 2 from step 2, 1 from step 4" in message
    assert "use bf16 in place of fp16" in message


def test_a_dynamic_loss_scale_goes_on_from_its_state():
    settings = {"window": 2, "hysteresis": 2}
    whole, first = DynamicLossScale(64.0, **settings), DynamicLossScale(64.0, **settings)
    story = "x..x.x....x.x"
    expected = scales(whole, story)
    scales(first, story[:6])
    second = DynamicLossScale(2.0, **settings)
    second.load_state_dict(first.state_dict())
    assert scales(second, story[6:]) == expected[6:]
    assert second.state_dict() == whole.state_dict()


def test_a_static_loss_scale_stays():
    assert scales(StaticLossScale(128), ".x.") == [128, 128, 128]
    assert StaticLossScale().scale == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "fp16.loss_scale_window is 0: the smallest that makes sense is 1"),
        ({"hysteresis": 0}, "fp16.hysteresis is 0"),
        ({"minimum": 0.0}, "fp16.min_loss_scale is 0.0: it must be above 0"),
        ({"initial": 2.0, "minimum": 4.0}, "which is below fp16.min_loss_scale (4): raise"),
    ],
)
def test_loss_scale_settings_that_cannot_be_are_refused_by_their_key(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        DynamicLossScale(**settings)


def test_masters_hold_the_numbers_from_before_the_cast_and_know_their_shard():
    weight = describe(nn.Parameter(torch.randn(4, 3)), Shard((8, 3), dim=0, ranges=((4, 8),)))
    before = weight.detach().clone()
    masters = BF16.cast_parameters([("layers.0.weight", weight)])
    master = masters["layers.0.weight"]
    assert weight.dtype == torch.bfloat16
    assert master.dtype == torch.float32
    assert torch.equal(master, before)
    assert not torch.equal(weight.float(), before)
    assert shard_of(master) == shard_of(weight) == Shard((8, 3), dim=0, ranges=((4, 8),))


def test_only_trainable_parameters_get_masters_and_buffers_stay_as_they_are():
    norm = nn.BatchNorm1d(3)
    norm.bias.requires_grad_(False)
    masters = BF16.cast_parameters(norm.named_parameters())
    assert set(masters) == {"weight"}
    assert norm.bias.dtype == torch.bfloat16
    assert norm.running_mean.dtype == torch.float32


def test_a_parameter_that_has_the_dtype_already_does_not_become_its_own_master():
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


def test_floating_inputs_are_cast_and_all_else_passes_through():
    tokens = torch.arange(3)
    cast = BF16.cast_inputs({"x": torch.ones(2), "rest": (tokens, None, 7)})
    assert cast["x"].dtype == torch.bfloat16
    assert cast["rest"][0] is tokens
    assert cast["rest"][1:] == (None, 7)
    uncast = torch.ones(2)
    assert Precision(torch.float16, cast=False).cast_inputs(uncast) is uncast


def test_many_small_bf16_gradients_do_not_get_lost_in_the_sum():
    # In bf16, with 8 bits of mantissa, 1 + 2**-9 is 1 again: the sum would stand still at once.
    weight = nn.Parameter(torch.zeros(4))
    BF16.cast_parameters([("w", weight)])
    buffer = GradientBuffer([("w", weight)], dtype=BF16.accumulation_dtype)
    for gradient in [1.0] + 512 * [2.0**-9]:
        (weight * gradient).sum().backward()
    assert weight.grad is None
    assert buffer.view(weight).dtype == torch.float32
    assert buffer.view(weight).tolist() == 4 * [2.0]
