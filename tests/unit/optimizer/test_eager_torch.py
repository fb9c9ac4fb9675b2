"""torch's optimizers, built without torch._dynamo, are those of torch."""

import pytest
import torch

from pipemega.optimizer.optimizers import build_eagerly

KINDS = ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam"]


@pytest.mark.parametrize("name", KINDS)
def test_steps_and_hooks_are_those_of_torch(name: str) -> None:
    kind = getattr(torch.optim, name)
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2)]
    ours = build_eagerly(kind, [{"params": weights[:1]}], {"lr": 0.1})
    theirs = kind([{"params": weights[1:]}], lr=0.1)
    assert type(ours) is kind
    calls: list[str] = []
    ours.register_step_pre_hook(lambda *_: calls.append("before"))
    ours.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(3):
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.5 + step)
        ours.step()
        theirs.step()
    assert torch.equal(weights[0], weights[1])
    assert calls == ["before", "after"] * 3
    assert weights[0].requires_grad


def test_a_differentiable_optimizer_keeps_its_own_step() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = build_eagerly(
        torch.optim.SGD, [{"params": [weight]}], {"lr": 0.1, "differentiable": True}
    )
    assert "step" not in vars(optimizer)
