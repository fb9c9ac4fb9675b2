"""Metrics of an evaluation, in one process."""

import math

import pytest
import torch
import torch.nn.functional as F

from pipemega import WeightedLoss
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.errors import ConfigError, DataError, PipelineError, PipemegaError
from pipemega.tensor_parallel import ColumnParallelLinear, VocabParallelHead
from pipemega.training import Accuracy, Loss, Metric, MixupAccuracy, Perplexity
from pipemega.training.metrics import MetricSet, checked_metrics


def values_of(metrics, *batches):
    """Return the metrics of some (outputs, labels)."""
    made = MetricSet(checked_metrics(metrics), Mesh.single(), last=0, shard=None)
    made.reset()
    for outputs, labels in batches:
        made.update(outputs, labels)
    return made.compute()


def value_of(metric, *batches):
    return values_of({"metric": metric}, *batches)["metric"]


def classified(samples=50, classes=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, classes, generator=generator)
    return logits, torch.randint(classes, (samples,), generator=generator)


@pytest.mark.parametrize("k", [1, 3, 5, 10])
def test_accuracy_is_the_share_of_labels_within_the_k_largest_logits(k):
    batches = [classified(50, seed=1), classified(7, seed=2)]
    right = [(x.topk(k).indices == y.unsqueeze(1)).any(1) for x, y in batches]
    assert value_of(Accuracy(k), *batches) == torch.cat(right).double().mean().item()


def test_accuracy_counts_tokens_and_leaves_out_ignored_ones():
    logits, labels = classified(12)
    expected = (logits.argmax(-1) == labels)[:9].double().mean().item()
    labels[9:] = -100
    assert value_of(Accuracy(), (logits.view(3, 4, 10), labels.view(3, 4))) == expected
    assert math.isnan(value_of(Accuracy(), (logits, torch.full((12,), -100))))


def test_accuracy_of_images_has_its_classes_in_dim_1():
    logits, labels = torch.randn(2, 5, 3, 3), torch.randint(5, (2, 3, 3))
    expected = (logits.argmax(1) == labels).double().mean().item()
    assert value_of(Accuracy(dim=1), (logits, labels)) == expected


@pytest.mark.parametrize(
    ("logits", "label", "k", "right"),
    [
        ([1.0, 1.0, 1.0], 0, 1, True),  # of equal logits the first one
        ([1.0, 1.0, 1.0], 1, 1, False),
        ([1.0, 1.0, 1.0], 1, 2, True),
        ([math.nan, 1.0, 0.0], 1, 1, False),  # nan is larger than all numbers, as in topk
        ([math.nan, math.nan, math.nan], 0, 2, False),
        ([-math.inf, -math.inf, 0.0], 2, 1, True),
        ([0.0, 1.0, 2.0], 7, 3, False),  # there is no such class
    ],
)
def test_accuracy_of_ties_and_of_numbers_that_are_not_finite(logits, label, k, right):
    assert value_of(Accuracy(k), (torch.tensor([logits]), torch.tensor([label]))) == right


def test_loss_and_perplexity_are_those_of_all_samples_together():
    (x1, y1), (x2, y2) = batches = [classified(50, seed=1), classified(7, seed=2)]
    y2[3:] = -100
    expected = F.cross_entropy(torch.cat([x1, x2]).double(), torch.cat([y1, y2])).item()
    assert value_of(Loss(), *batches) == pytest.approx(expected, rel=1e-12)
    assert value_of(Perplexity(), *batches) == pytest.approx(math.exp(expected), rel=1e-12)
    assert value_of(Perplexity(), (torch.tensor([[0.0, 1e4]]), torch.tensor([0]))) == math.inf


def test_a_loss_function_is_averaged_over_samples_or_by_its_weights():
    batches = [(torch.ones(4, 3), torch.zeros(4, 3)), (torch.zeros(1, 3), torch.ones(1, 3) * 5)]
    assert value_of(Loss(F.l1_loss), *batches) == pytest.approx((4 * 1 + 1 * 5) / 5)

    def weighted(outputs, labels):
        return WeightedLoss((outputs - labels).abs().sum(), labels.sum())

    assert value_of(Loss(weighted), *batches) == pytest.approx((12 + 15) / 15)


class Largest(Metric):
    """A metric of the user's: its value is computed from three sums."""

    def sums(self, outputs, labels):
        return outputs["x"].sum(), 2.0, outputs["x"].numel()

    def value(self, total, twos, count):
        return total / count + twos


def test_a_metric_of_the_user_gets_outputs_and_labels_of_any_structure():
    batches = [({"x": torch.ones(2)}, (None, "name")), ({"x": torch.full((2,), 3.0)}, None)]
    assert value_of(Largest(), *batches) == 2.0 + 4.0


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (
            torch.tensor(3.0), torch.tensor([1]),
            "the metrics top1 need the outputs of the model, and no rank has them: the last layer "
            "returns a scalar. Return the outputs from the last layer, and compute the loss in "
            "PipelineModule(loss_fn=...)",
        ),
        (None, torch.tensor([1]), "no rank has them: the last layer returns no tensor"),
        (
            (torch.ones(2, 3),), torch.tensor([1, 2]),
            "metric 'top1': Accuracy(k=2) takes a tensor of logits and a tensor of labels, and the "
            "last layer and the data give tuple and Tensor: write a Metric",
        ),
        (
            torch.ones(2, 3), torch.ones(2, 3),
            "metric 'top1': Accuracy(k=2) takes logits [..., classes] and class indices [...], and "
            "got outputs [2, 3] with labels [2, 3] of torch.float32: use Accuracy(dim=1)",
        ),
        (torch.ones(2, 1), torch.tensor([0, 0]), "the outputs have 1 classes: choose k up to 1"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit_a_metric_are_refused(outputs, labels, message):
    with pytest.raises(DataError) as caught:
        values_of({"top1": Accuracy(2)}, (outputs, labels))
    assert message in str(caught.value)


def test_an_error_of_a_users_metric_has_its_name():
    class Fails(Metric):
        def sums(self, outputs, labels):
            return outputs["missing"]

    with pytest.raises(PipelineError, match="metric 'mine' failed: KeyError: 'missing'"):
        values_of({"mine": Fails()}, ({"x": torch.ones(2)}, None))
    labels = torch.tensor(1.0)
    with pytest.raises(DataError, match=r"metric 'l': .*return a WeightedLoss\(sum, weight\)"):
        values_of({"l": Loss(lambda x, y: (x - y).mean())}, (torch.ones(1), labels))


@pytest.mark.parametrize(
    ("sums", "value", "message"),
    [
        ((torch.ones(2), 1.0), 1.0, "sums() returns tensors of the shapes [2], []: return scalars"),
        (None, 1.0, "metric 'mine' failed: TypeError: "),
        ((1.0, 2.0), None, "metric 'mine' failed: TypeError: "),
    ],
)
def test_sums_and_values_that_are_no_numbers_are_refused_by_name(sums, value, message):
    class Wrong(Metric):
        def sums(self, outputs, labels):
            return sums

        def value(self, *sums):
            return value

    with pytest.raises(PipemegaError, match="metric 'mine'") as caught:
        values_of({"mine": Wrong()}, (torch.ones(2), None))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([Accuracy()], "metrics is a list: give a dict of names"),
        ({"loss": Accuracy()}, "'loss' cannot be the name of a metric"),
        ({"a b": Accuracy()}, "'a b' cannot be the name of a metric"),
        ({3: Accuracy()}, "3 cannot be the name of a metric"),
        ({"top1": Accuracy}, "metric 'top1' is the class Accuracy: write Accuracy()"),
        ({"top1": len}, "metric 'top1' is a builtin_function_or_method: give a pipemega.training."),
    ],
)
def test_metrics_that_are_not_valid_are_refused(metrics, message):
    with pytest.raises(ConfigError) as caught:
        checked_metrics(metrics)
    assert message in str(caught.value)
    assert caught.value.on_every_rank


def test_layers_declare_that_their_output_is_a_shard():
    axis = Axis("tensor", ranks=(0, 1), rank=1)
    shard = ColumnParallelLinear(4, 6, axis=axis).output_shard
    assert shard is not None
    assert (shard.size, shard.local_range(torch.ones(2, 3))) == (6, (3, 6))
    assert ColumnParallelLinear(4, 6, axis=axis, gather_output=True).output_shard is None
    head = VocabParallelHead(50, 4, axis=axis, divisible_by=8)
    assert head.output_shard.local_range(head(torch.ones(2, 4))) == (32, 50)


def test_metrics_of_torchmetrics_work():
    classification = pytest.importorskip(
        "torchmetrics.classification", reason="torchmetrics is not installed"
    )
    from torchmetrics import MetricCollection

    top1 = classification.MulticlassAccuracy(10, average="micro")
    metrics = {
        "top1": top1,
        "per_class": classification.MulticlassAccuracy(10, average=None),
        "both": MetricCollection(
            {
                "f1": classification.MulticlassF1Score(10),
                "auroc": classification.MulticlassAUROC(10),
            }
        ),
        "own": Accuracy(),
    }
    batches = [classified(50, seed=1), classified(7, seed=2)]
    values = values_of(metrics, *batches)
    assert values["top1"] == pytest.approx(values["own"], abs=1e-6)
    assert {f"per_class/{i}" for i in range(10)} <= set(values)
    assert {"both/f1", "both/auroc"} <= set(values)


def test_mixup_accuracy_is_the_share_of_the_predicted_class() -> None:
    outputs = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    shares = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.2, 0.8]])
    metric = MixupAccuracy()
    right, count = metric.sums(outputs, shares)
    assert float(right) == pytest.approx(0.7 + 0.2)
    assert metric.value(float(right), float(count)) == pytest.approx(0.45)
    # As Colossal-AI's: the accuracies for both classes, weighted.
    both = 0.7 * Accuracy().sums(outputs[:1], torch.tensor([0]))[0]
    assert float(both) == pytest.approx(0.7)
    assert [float(x) for x in metric.sums(outputs, torch.tensor([0, 2]))] == [1, 2]
    with pytest.raises(
        DataError, match=r"of the same shape .*outputs \[2, 3\] with labels \[2, 2\]"
    ):
        metric.sums(outputs, shares[:, :2])
