"""Optimizers and groups that were built over the parameters of the model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipemega.compat.deepspeed.data_parallel_engine import (
    DataParallelEngine,
    build_data_parallel,
)
from pipemega.config import Config, load
from pipemega.errors import ConfigError
from pipemega.optimizer.user_optimizer import GivenGroups, GivenOptimizer
from tests.unit.optimizer.user_optimizers import Lion


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def names_of(module: nn.Module) -> dict[int, str]:
    return {id(p): f"layers.0.{name}" for name, p in module.named_parameters()}


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Biases without weight decay and with an option that only they have."""
    named = dict(module.named_parameters())
    return [
        {"params": [p for n, p in named.items() if "weight" in n]},
        {"params": [p for n, p in named.items() if "bias" in n], "weight_decay": 0.0, "tag": "b"},
    ]


def trained(module: nn.Module, config: Config, **given: Any) -> DataParallelEngine:
    return DataParallelEngine(build_data_parallel(module, config, **given))


def train(
    module: nn.Module, loop: DataParallelEngine | None, optimizer: Any, schedule: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, y = (torch.randn(2, n, generator=generator, dtype=torch.float64) for n in (3, 2))
        if loop is None:
            nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        else:
            loop.backward(nn.functional.mse_loss(loop(x), y))
            loop.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop, Lion])
def test_an_optimizer_over_the_parameters_of_the_model_trains_as_in_plain_torch(kind: Any) -> None:
    plain, ours = model(), model()
    results = []
    for module in (plain, ours):
        optimizer = kind(groups_of(module), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.5**s, lambda s: 1.0])
        loop = None
        if module is ours:
            loop = trained(
                module,
                load({"train_batch_size": 2, "gradient_clipping": 0}),
                optimizer=GivenOptimizer(optimizer, names_of(module)),
                lr_scheduler=lambda _, schedule=schedule: schedule,
            )
            assert loop.optimizer is optimizer
        train(module, loop, optimizer, schedule)
        results.append([group["lr"] for group in optimizer.param_groups])
    assert results[0] == results[1] == [0.05 / 8, 0.05]
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_masters_of_a_half_precision_model_take_the_place_of_its_parameters() -> None:
    module = model().float()
    optimizer = torch.optim.AdamW(groups_of(module), lr=0.05)
    loop = trained(
        module,
        load({"train_batch_size": 2, "bf16": {"enabled": True}}),
        optimizer=GivenOptimizer(optimizer, names_of(module)),
    )
    held = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    assert held == [[(4, 3), (2, 4)], [(4,), (2,)]]
    assert {p.dtype for g in optimizer.param_groups for p in g["params"]} == {torch.float32}
    assert optimizer.param_groups[1]["tag"] == "b"
    loop.backward(loop(torch.ones(2, 3, dtype=torch.bfloat16)).float().sum())
    loop.step()
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_a_copy_of_an_optimizer_leaves_it_as_it_is() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the original ran"))
    other = nn.Parameter(torch.ones(3))
    given = GivenOptimizer(optimizer, names_of(module))
    twin = given.copied([{**given.groups.of({})[0], "params": [other]}])
    other.grad = torch.ones(3)
    twin.step()
    assert float(other.detach().sum()) < 3
    assert not optimizer.state
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_groups_of_a_config_optimizer_have_their_own_options() -> None:
    module = model()
    loop = trained(
        module,
        load(
            {
                "train_batch_size": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "weight_decay": 0.5}},
            }
        ),
        model_parameters=GivenGroups(groups_of(module), names_of(module)),
    )
    assert loop.optimizer is not None
    assert [g["weight_decay"] for g in loop.optimizer.param_groups] == [0.5, 0.0]
    assert [g["lr"] for g in loop.optimizer.param_groups] == [0.25, 0.25]


def test_parameters_without_groups_are_one_group() -> None:
    module = model()
    groups = GivenGroups(module.parameters(), names_of(module))
    assert len(groups) == 1
    assert groups.names == {f"layers.0.{name}" for name, _ in module.named_parameters()}
    tensors: dict[str, Tensor] = {"layers.0.2.bias": torch.ones(1)}
    assert groups.of(tensors) == [{"params": [tensors["layers.0.2.bias"]]}]


def with_state(module: nn.Module) -> GivenOptimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return GivenOptimizer(optimizer, names_of(module))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_state, "the optimizer SGD has the state of 4 parameters already, which the engine "
         "cannot take over: give an optimizer that has made no step"),
        (lambda m: GivenGroups([nn.Parameter(torch.ones(7))], names_of(m)), "parameter group 0 "
         "holds a parameter of shape (7,) that is not one of the model: build the groups"),
        (lambda m: GivenGroups([{"params": [], "lr": 1}, 3], {}), "parameter group 1 must be a "  # type: ignore[list-item]
         "dict with the key 'params', and is a int"),
    ],
)  # fmt: skip
def test_what_cannot_be_mapped_to_the_model_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(model())
    assert message in str(caught.value)


def test_given_groups_exclude_the_key_that_makes_groups() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    config = {"train_batch_size": 2, "training": {"weight_decay_norms_and_biases": False}}
    with pytest.raises(ConfigError, match=r"training\.weight_decay_norms_and_biases is false, and"):
        build_data_parallel(
            module, load(config), optimizer=GivenOptimizer(optimizer, names_of(module))
        )
