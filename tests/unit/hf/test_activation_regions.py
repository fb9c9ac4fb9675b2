"""Dropout of activations that are replicated, sharded, or slices of the sequence."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

from pipemega.distributed.mesh import Axis
from pipemega.hf.activation_regions import ActivationRegions, Region


def masks(rank: int, regions: list[Region], size: int = 2) -> list[Tensor]:
    """Return the masks that a rank draws in these regions, one after the other."""
    axis = Axis("tensor", tuple(range(size)), rank)
    tracked = ActivationRegions(axis, sequence_parallel=False, has_dropout=True)
    torch.manual_seed(5)
    found = []
    with tracked.during_forward(training=True):
        for region in regions:
            tracked.current = region
            found.append(F.dropout(torch.ones(1, 8, 32), 0.5))
    return found


def test_masks_of_sharded_heads_differ_and_all_others_are_equal():
    order = [Region.REPLICATED, Region.SHARDED, Region.REPLICATED]
    (before, sharded, after), (before1, sharded1, after1) = masks(0, order), masks(1, order)
    assert torch.equal(before, before1)
    assert not torch.equal(sharded, sharded1)
    assert torch.equal(after, after1)
    # One rank draws the same masks for what several ranks replicate.
    alone = masks(0, order, size=1)
    assert torch.equal(alone[0], before)
    assert torch.equal(alone[2], after)


def test_slices_of_the_sequence_have_slices_of_one_mask():
    slices = [masks(rank, [Region.SEQUENCE])[0] for rank in range(2)]
    torch.manual_seed(5)
    whole = F.dropout(torch.ones(1, 16, 32), 0.5)
    assert torch.equal(torch.cat(slices, 1), whole)


def test_dropout_in_attention_kernels_differs_between_ranks():
    outputs = []
    for rank in range(2):
        axis = Axis("tensor", (0, 1), rank)
        tracked = ActivationRegions(axis, sequence_parallel=False, has_dropout=True)
        torch.manual_seed(5)
        with tracked.during_forward(training=True):
            tracked.current = Region.SHARDED
            x = torch.ones(1, 2, 8, 8)
            outputs.append(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    assert not torch.equal(*outputs)


def test_nothing_is_intercepted_in_evaluation():
    tracked = ActivationRegions(Axis("tensor", (0, 1), 0), False, has_dropout=True)
    with tracked.during_forward(training=False) as mode:
        assert mode is None
