"""Split backward changes no result, whatever a layer does with its own gradients."""

import pytest
import torch

from tests.ranks.pipeline import foreign_backward as runs
from tests.ranks.pipeline.message_kinds import REFUSED, RIGHT

KINDS = [kind for kind in runs.LAYERS if kind not in {"penalty", *RIGHT, *REFUSED}]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_layer_gets_the_gradients_of_plain_torch(schedule):
    """W added what torch.autograd.grad computes within a layer; a replaced forward, and hooks
    that torch calls after it has accumulated a gradient, had no effect; attributes of the names
    `lookup` and `product` were replaced; weight_norm and functional_call failed in W."""
    for kind, distance in runs.compared(KINDS, schedule).items():
        assert distance == pytest.approx(0, abs=1e-10), kind


def test_layers_in_two_stages_get_the_gradients_of_plain_torch(pool):
    for found in pool.run(2, runs.compared, KINDS, "zb-v"):
        for kind, distance in found.items():
            assert distance == pytest.approx(0, abs=1e-10), kind


def test_recomputed_layers_get_the_gradients_of_plain_torch():
    # torch.func.grad refuses recomputation; the others have an effect in each of two forwards.
    left_out = ("inner backward", "spectral_norm", "transforms")
    kinds = [kind for kind in KINDS if kind not in left_out]
    found = runs.compared(kinds, "zb-h1", {"activation_checkpoint_interval": 1})
    for kind, distance in found.items():
        assert distance == pytest.approx(0, abs=1e-10), kind


def test_a_gradient_of_a_gradient_needs_a_whole_backward():
    assert runs.compared(["penalty"], "1f1b")["penalty"] < 1e-10
    assert runs.compared(["whole penalty"], "zb-h1")["whole penalty"] < 1e-10
    error = runs.compared(["penalty"], "zb-h1")["penalty"]
    assert "layers.2 (Penalty) failed" in error
    assert "create_graph=True" in error
    assert "set split_backward = False on the class of the layer" in error
    assert "'1f1b'" in error


def test_a_weight_that_a_layer_uses_several_times_has_the_same_bits_under_all_schedules(pool):
    """Its gradients were added one by one in W, and as one sum by autograd: 6e-8 in fp32."""
    schedules = ["1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved"]
    for first, *others in pool.run(2, runs.bits, "twice", schedules):
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(other[1][name], value) for name, value in first[1].items())
