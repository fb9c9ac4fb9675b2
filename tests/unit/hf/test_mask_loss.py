"""The loss of SAM, against its formulas written with loops."""

import math

import pytest
import torch

from pipemega.errors import DataError
from pipemega.hf.tasks import mask_loss

GENERATOR = torch.Generator().manual_seed(0)


def random_output(batch=2, prompts=3, masks=3, size=4):
    logits = torch.randn(batch, prompts, masks, size, size, generator=GENERATOR).double()
    return logits, torch.rand(batch, prompts, masks, generator=GENERATOR).double()


def loss_of_one_mask(logits, target):
    focal = common = total = 0.0
    for x, t in zip(logits.flatten().tolist(), target.flatten().tolist(), strict=True):
        p = 1 / (1 + math.exp(-x))
        right, weight = (p, 0.25) if t else (1 - p, 0.75)
        focal += -weight * (1 - right) ** 2 * math.log(right)
        common += p * t
        total += p + t
    return 20 * focal / logits.numel() + 1 - (2 * common + 1) / (total + 1)


def overlap(logits, target):
    inside, wanted = logits > 0, target > 0
    return ((inside & wanted).sum() / max(1, (inside | wanted).sum())).item()


def test_the_loss_is_that_of_the_best_mask_and_of_all_predicted_overlaps():
    logits, scores = random_output()
    labels = torch.randint(2, (2, 3, 4, 4), generator=GENERATOR)
    expected = 0.0
    for b in range(2):
        for p in range(3):
            masks = [loss_of_one_mask(logits[b, p, m], labels[b, p]) for m in range(3)]
            errors = [
                (scores[b, p, m].item() - overlap(logits[b, p, m], labels[b, p])) ** 2
                for m in range(3)
            ]
            expected += min(masks) + sum(errors) / 3
    loss = mask_loss((logits, scores), labels)
    assert loss.weight == 6
    assert loss.sum.item() == pytest.approx(expected, rel=1e-6)


def test_only_the_best_mask_of_a_prompt_is_trained():
    logits, scores = random_output(batch=1, prompts=1)
    labels = torch.ones(1, 1, 4, 4)
    logits[0, 0, 1] = 3.0
    logits.requires_grad_()
    mask_loss((logits, scores), labels).sum.backward()
    trained = [bool(logits.grad[0, 0, m].any()) for m in range(3)]
    assert trained == [False, True, False]


def test_logits_are_interpolated_to_the_size_of_the_labels():
    logits, scores = random_output()
    logits[:] = 2.0
    small = mask_loss((logits, scores), torch.ones(2, 3, 4, 4))
    large = mask_loss((logits, scores), torch.ones(2, 3, 8, 8))
    # The dice loss counts the pixels, so that its added 1 weighs less.
    assert large.sum.item() == pytest.approx(small.sum.item(), rel=2e-2)


def test_an_empty_mask_has_a_finite_loss():
    logits, scores = random_output()
    assert mask_loss((logits - 50, scores), torch.zeros(2, 3, 4, 4)).sum.isfinite()


def test_labels_of_another_number_of_prompts_are_refused():
    with pytest.raises(DataError, match=r"\[2, 3, \.\.\.\], not \[2, 1, 4, 4\]"):
        mask_loss(random_output(), torch.ones(2, 1, 4, 4))
