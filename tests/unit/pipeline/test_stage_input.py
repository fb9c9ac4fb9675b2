"""Layers may change the input of their stage in place."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.errors import PipelineError
from pipemega.pipeline.messages import InputGuard, collect_gradients
from pipemega.pipeline.model.recompute import recompute


def test_a_received_tensor_may_be_changed_in_place_without_a_copy() -> None:
    """Before, torch raised "a leaf Variable that requires grad is being used in an in-place
    operation"."""
    leaf = torch.tensor([-1.0, 2.0], requires_grad=True)
    x, (gradient,) = collect_gradients(leaf)
    assert x.data_ptr() == leaf.data_ptr()
    x.mul_(3).relu_().sum().backward()
    assert x.tolist() == [0.0, 6.0]
    assert gradient.take().tolist() == [0.0, 3.0]
    assert leaf.grad is None


def test_inputs_without_a_gradient_and_unused_inputs_have_no_gradient_and_zeros() -> None:
    x, ids = torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.int64)
    tree, gradients = collect_gradients({"x": x, "ids": ids, "name": "a constant"})
    assert tree["name"] == "a constant"
    assert not tree["ids"].requires_grad
    assert [g.take().tolist() for g in gradients] == [[0.0, 0.0]]


def test_a_change_of_what_an_earlier_stage_of_the_rank_has_saved_is_an_error() -> None:
    weight = torch.ones(2, requires_grad=True)
    output = torch.tanh(weight)  # saves its output
    x, _ = collect_gradients(output)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class Counted:
    """A function that changes its input in place from a given call on."""

    def __init__(self, first: int) -> None:
        self.calls, self.first, self.inputs = 0, first, list[int]()

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.inputs.append(x.data_ptr())
        return x.add_(1) if self.calls >= self.first else x + 1


def test_the_input_of_a_function_that_changes_nothing_is_copied_in_the_first_call_only() -> None:
    guard, function, x = InputGuard(), Counted(first=99), torch.zeros(2)
    for _ in range(3):
        guard.bind("key")(function, x)
    assert [pointer == x.data_ptr() for pointer in function.inputs] == [False, True, True]
    assert not guard.copies


def test_the_input_of_a_function_that_changes_it_is_copied_in_each_call() -> None:
    guard, function, x = InputGuard(), Counted(first=1), torch.zeros(2)
    for _ in range(3):
        assert guard.bind("key")(function, x).tolist() == [1.0, 1.0]
    assert x.tolist() == [0.0, 0.0]
    assert guard.copies


def test_a_function_that_changes_its_input_only_in_later_calls_is_an_error() -> None:
    guard, function = InputGuard(), Counted(first=2)
    guard.bind("key")(function, torch.zeros(2))
    with pytest.raises(PipelineError, match="which it did not do in the first micro-batch"):
        guard.bind("key")(function, torch.zeros(2))


def test_in_inference_mode_the_input_is_always_copied() -> None:
    with torch.inference_mode():
        guard, x = InputGuard(), torch.zeros(2)
        for _ in range(2):
            guard.bind("key")(Counted(first=1), x)
        assert x.tolist() == [0.0, 0.0]


def test_a_change_of_the_input_of_a_checkpointed_region_is_an_error_in_backward() -> None:
    """Before, the recomputation used the changed values: the gradients were wrong. torch checks
    arguments that are tensors, but not the tensors in a tuple."""
    x = torch.ones(2, requires_grad=True).clone()
    y = recompute(lambda tree: (tree[0] * tree[0]).sin(), (x, None))
    x.mul_(2)
    with pytest.raises(PipelineError, match="input of a checkpointed region was changed in place"):
        y.sum().backward()


class LabelsInPlace(nn.Module):
    """Ignores padding by changing the labels, as many losses do."""

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        labels[labels == 0] = -100
        output.sub_(1.0).add_(1.0)
        return nn.functional.cross_entropy(output, labels)


@pytest.mark.parametrize("interval", [0, 1, 2])
def test_training_and_evaluation_do_not_change_the_data_of_the_caller(interval: int) -> None:
    config: dict[str, Any] = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"activation_checkpoint_interval": interval},
    }
    linear = LayerSpec(nn.Linear, 4, 4)
    layers = [nn.LeakyReLU(0.1, inplace=True), linear, nn.ReLU(inplace=True), linear]
    engine, *_ = pipemega.initialize(PipelineModule(layers, loss_fn=LabelsInPlace()), config)
    x, labels = torch.randn(2, 4), torch.tensor([0, 3])
    kept = x.clone(), labels.clone()
    for _ in range(2):
        engine.train_batch(iter([(x, labels)]))
        _, (output,) = engine.eval_batch([(x, labels)], 1, return_outputs=True)
        (expected,) = engine.infer([x])
        assert torch.equal(output, expected)
    assert torch.equal(x, kept[0])
    assert torch.equal(labels, kept[1])
