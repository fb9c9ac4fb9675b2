"""What a loss_fn may return."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipemega
from pipemega import LayerSpec, PipelineModule, WeightedLoss
from pipemega.errors import PipelineError
from pipemega.pipeline.microbatch_loss import microbatch_loss, weighted_loss

LOSS = torch.tensor(6.0, requires_grad=True)


@pytest.mark.parametrize(
    ("returned", "weight"),
    [
        (LOSS, 1),
        (LOSS.reshape(1), 1),
        (WeightedLoss(LOSS, torch.tensor(3.0)), 3),
        (WeightedLoss(LOSS, 1.5), 1.5),
        ((LOSS, 3), 3),
        ((LOSS, torch.tensor(3)), 3),
    ],
)
def test_a_loss_has_weight_1_or_the_weight_that_loss_fn_returned(
    returned: Any, weight: float
) -> None:
    loss, got = microbatch_loss(lambda output, labels: returned, None, None, 1.0, train=True)
    assert loss.item() == 6.0
    assert got.item() == weight


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ((LOSS, torch.tensor(0.5)), "loss_fn returned (float32 [], float32 [])"),
        ((LOSS, {"accuracy": 0.5}), "loss_fn returned (float32 [], dict)"),
        ((LOSS, 0.5), "loss_fn returned (float32 [], float)"),
        ((LOSS, True), "loss_fn returned (float32 [], bool)"),
        ((LOSS, torch.tensor(True)), "loss_fn returned (float32 [], bool [])"),
        ((LOSS, LOSS, LOSS), "loss_fn returned (float32 [], float32 [], float32 [])"),
    ],
)
def test_a_pair_that_may_be_no_sum_and_weight_is_refused(returned: Any, words: str) -> None:
    """(loss, auxiliary value) was taken as (sum, weight): the gradients had a wrong factor."""
    with pytest.raises(PipelineError) as caught:
        weighted_loss(returned)
    assert words in str(caught.value)
    assert "return the mean loss alone; or, to average over tokens, pipemega.WeightedLoss" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([LOSS, 3], "its loss is list"),
        ({"loss": LOSS}, "its loss is dict"),
        (WeightedLoss(LOSS, torch.ones(2)), "its weight is float32 [2]"),
        ((torch.ones(2), 3), "its loss is float32 [2]"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(returned: Any, words: str) -> None:
    with pytest.raises(PipelineError, match="loss_fn must return a scalar tensor") as caught:
        weighted_loss(returned)
    assert words in str(caught.value)


@pytest.mark.parametrize("reduction", ["token", "micro_batch"])
@pytest.mark.parametrize("as_pair", [True, False])
def test_weighted_losses_are_averaged_by_training_loss_reduction(
    reduction: str, as_pair: bool
) -> None:
    def loss_fn(output: Tensor, labels: Tensor) -> Any:
        total, count = (output[labels > 0]).sum(), int((labels > 0).sum())
        return (total, count) if as_pair else WeightedLoss(total, count)

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "training": {"loss_reduction": reduction},
    }
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4)], loss_fn=loss_fn)
    engine, *_ = pipemega.initialize(net, config)
    x, labels = torch.ones(1, 4), [torch.tensor([[1, 0, 0, 0]]), torch.tensor([[1, 1, 1, 0]])]
    with torch.no_grad():
        y = engine.module[0](x)[0]
    means = y[0].item(), y[:3].mean().item()
    expected = (means[0] + 3 * means[1]) / 4 if reduction == "token" else sum(means) / 2
    assert engine.train_batch(iter([(x, part) for part in labels])) == pytest.approx(expected)


def test_a_micro_batch_without_samples_has_no_loss_and_no_gradient() -> None:
    """Its loss was multiplied by 0: with no label that counts it was nan, and so was the step."""
    outputs = torch.tensor([[1.0, -torch.inf]], requires_grad=True)
    labels = torch.tensor([-100])
    loss, weight = microbatch_loss(nn.functional.cross_entropy, outputs, labels, 0.0, train=True)
    assert (loss.item(), weight.item()) == (0.0, 0.0)
    loss.backward()
    assert torch.equal(outputs.grad, torch.zeros(1, 2))


def test_an_epoch_may_end_with_a_sample_whose_label_does_not_count() -> None:
    samples = [(torch.randn(4), 1 if index != 8 else -100) for index in range(10)]
    net = PipelineModule([LayerSpec(nn.Linear, 4, 3)], nn.functional.cross_entropy)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "training": {"epochs": 1},
    }
    engine, *_ = pipemega.initialize(net, config, NotShuffled(samples))
    # The second step has one micro-batch with samples 8 and 9, and three without samples.
    losses = [engine.train_batch(), engine.train_batch()]
    assert engine.is_complete
    assert all(math.isfinite(loss) for loss in losses)


class NotShuffled(list[Any]):
    already_shuffled = True
