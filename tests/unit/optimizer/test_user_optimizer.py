"""Optimizers and schedulers that `initialize` gets as functions, in one process."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import pipemega
from pipemega.engine.engine import Engine
from pipemega.errors import CheckpointError, ConfigError
from pipemega.optimizer.lr_schedules import TorchSchedule
from pipemega.optimizer.post_validation import Backup
from tests.sampling import some
from tests.unit.optimizer.user_optimizers import Corrected, Factored, Lion, ParameterFree, Shampoo

SGD = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


def net() -> pipemega.PipelineModule:
    layers = [pipemega.LayerSpec(nn.Linear, 3, 3) for _ in range(2)]
    return pipemega.PipelineModule(layers, loss_fn=nn.functional.mse_loss)


def build(
    make: Any = Lion, make_schedule: Any = None, /, groups: Any = None, **config: Any
) -> Engine:
    torch.set_default_dtype(torch.float64)
    try:
        engine, *_ = pipemega.initialize(
            net(),
            {"train_batch_size": 2, **config},
            optimizer=make,
            lr_scheduler=make_schedule,
            model_parameters=groups,
        )
        return engine
    finally:
        torch.set_default_dtype(torch.float32)


def train(engine: Engine, steps: int) -> list[float]:
    """Train; return the rate of each step."""
    rates = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_steps)
        inputs = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        engine.train_batch(iter([(inputs, inputs.flip(1))]))
        assert engine.last_step is not None
        rates.append(engine.last_step.learning_rate)
    return rates


def parameters(engine: Engine) -> torch.Tensor:
    return torch.cat([p.reshape(-1) for p in engine.parameter_state().values()])


def drops(params: Any) -> Any:
    """Keeps the matrices only."""
    return Lion([{**g, "params": [p for p in g["params"] if p.dim() > 1]} for g in params])


def fails(params: Any) -> Any:
    raise KeyError("no such option")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda params: None, "optimizer must return a torch.optim.Optimizer, and it returns None: "
         "write optimizer=lambda params: AdamW(params, lr=1e-4)"),
        (lambda params: params, "and it returns a list"),
        (fails, "optimizer raised KeyError: 'no such option'"),
        (drops, "the optimizer Lion drops 2 of the 4 parameters that this rank has given it: "
         "'layers.0.bias', 'layers.1.bias'. A parameter that is not to be trained"),
        (lambda params: torch.optim.SGD([*params, {"params": [nn.Parameter(torch.ones(7))]}]),
         "the optimizer SGD holds 1 parameters that it was not given, such as of shape (7,): build "
         "it over the argument of the function"),
        (lambda params: SGD, "the optimizer SGD drops 4 of the 4 parameters"),
        (lambda params: torch.optim.LBFGS(params[0]["params"]),
         "LBFGS.step() needs a closure that evaluates the model again, which a pipeline cannot do"),
        (ParameterFree, "a parameter group of ParameterFree has no option 'lr'"),
    ],
)  # fmt: skip
def test_an_optimizer_that_the_engine_cannot_use_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(optimizer)
    assert message in str(caught.value)
    assert caught.value.on_every_rank


class NeedsOption(Lion):
    """Has an option without a default, as optimizers that treat matrices differently do."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        assert "is_matrix" in param_group
        super().add_param_group(param_group)


def test_an_option_without_a_default_is_accepted_if_all_groups_have_it() -> None:
    groups = [{"params": "bias", "is_matrix": False}, {"params": "weight", "is_matrix": True}]
    engine = build(
        lambda params: NeedsOption([{"is_matrix": False, **group} for group in params]),
        groups=groups,
    )
    assert [g["is_matrix"] for g in engine.optimizer.param_groups] == [False, False, True]


def test_an_option_that_the_optimizer_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build(Lion, groups=[{"params": "bias", "wight_decay": 0.0}])
    assert str(caught.value) == (
        "model_parameters[0] has the option 'wight_decay', which Lion does not have; did you mean "
        "'weight_decay'?"
    )


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
         "lr_scheduler returns a ReduceLROnPlateau, which needs a metric in each call of step()"),
        (lambda optimizer: None, "lr_scheduler must return a scheduler of torch.optim.lr_scheduler,"
         " or an object with its methods step, state_dict, load_state_dict, and it returns None: "
         "write lr_scheduler=lambda optimizer: CosineAnnealingLR("),
        (lambda optimizer: lr_scheduler.StepLR(SGD, 2), "lr_scheduler returns a StepLR over "
         "another optimizer (SGD) than the engine's (Lion), so it would change no learning rate"),
        (lambda optimizer: lr_scheduler.StepLR(optimizer), "lr_scheduler raised TypeError: "),
    ],
)  # fmt: skip
def test_a_scheduler_that_the_engine_cannot_use_is_refused(scheduler: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Lion, scheduler)
    assert message in str(caught.value)
    assert caught.value.on_every_rank


def test_arguments_without_an_optimizer_or_a_schedule_without_a_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="got lr_scheduler, and the run has no optimizer: give"):
        build(None, lambda optimizer: lr_scheduler.StepLR(optimizer, 2))
    with pytest.raises(ConfigError, match="got model_parameters, and the run has no optimizer"):
        build(None, groups=[{"params": "bias"}])
    with pytest.raises(ConfigError, match=r"scheduler.type is missing, and initialize\(\) got no"):
        build(Lion, scheduler={"by": "epoch"})


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_the_functions_replace_the_sections_of_the_config(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipemega")
    groups = [{"params": "bias", "weight_decay": 0.0}]
    engine, optimizer, _, schedule = pipemega.initialize(
        net(),
        {
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5}, "groups": groups},
            "scheduler": {"type": "WarmupLR", "by": "epoch"},
        },
        optimizer=lambda params: Lion(params, lr=0.25, weight_decay=0.1),
        lr_scheduler=lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
    )
    assert isinstance(optimizer, Lion)
    assert engine.optimizer is optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert isinstance(schedule, TorchSchedule)
    assert isinstance(schedule.scheduler, lr_scheduler.StepLR)
    assert engine.lr_scheduler is schedule
    assert "optimizer.type 'AdamW' is not used: initialize() got an optimizer" in caplog.text
    assert "scheduler.type 'WarmupLR' is not used: initialize() got an lr_scheduler" in caplog.text
    with pytest.raises(ConfigError, match=r"lr_scheduler.step\(\) is called by train_batch"):
        schedule.step()
    # By epoch, as the section says.
    schedule.end_step()
    assert schedule.get_last_lr() == [0.25, 0.25]
    schedule.end_epoch()
    assert schedule.get_last_lr() == pytest.approx([0.025, 0.025])


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Five samples: an epoch of batches of two ends with a batch of one."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.linspace(-1, 1, 3, dtype=torch.float64) * (index + 1)
        return inputs, inputs.flip(0)


@pytest.mark.parametrize("own", [True, False], ids=["torch's StepLR", "linear of the config"])
def test_a_schedule_by_epoch_changes_the_rate_at_the_end_of_epochs_and_resumes(
    own: bool, tmp_path: Path
) -> None:
    section = {"by": "epoch"} if own else {"type": "linear", "by": "epoch"}

    def start() -> Engine:
        engine = build(
            lion,
            (lambda o: lr_scheduler.StepLR(o, 1, 0.5)) if own else None,
            training={"epochs": 4},
            scheduler=section,
        )
        engine.set_training_data(Samples())
        return engine

    def rates(engine: Engine, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            engine.train_batch()
            seen.append(engine.last_step.learning_rate)
        return seen

    expected = [0.1, 0.05, 0.025, 0.0125] if own else [0.1, 0.075, 0.05, 0.025]
    expected = [rate for rate in expected for _ in range(3)]
    unbroken = start()
    assert rates(unbroken, 4) == pytest.approx(expected[:4])
    unbroken.save_checkpoint(tmp_path)
    resumed = start()
    resumed.load_checkpoint(tmp_path)
    assert rates(resumed, 8) == rates(unbroken, 8) == pytest.approx(expected[4:])
    assert torch.equal(parameters(resumed), parameters(unbroken))


def test_a_schedule_by_epoch_without_epochs_is_refused() -> None:
    engine = build(lion, SCHEDULERS["StepLR"], scheduler={"by": "epoch"})
    with pytest.raises(
        ConfigError, match="the run has no epochs, so the learning rate would never"
    ):
        train(engine, 1)


def lion(params: Any) -> Lion:
    return Lion(params, lr=0.1)


def test_schedules_of_torch_and_of_the_config_set_the_rates() -> None:
    engine = build(lion, lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)))
    assert train(engine, 3) == pytest.approx([0.1, 0.05, 0.1 / 3])
    engine = build(lion, scheduler={"type": "linear", "params": {"decay_steps": 4}})
    assert train(engine, 3) == pytest.approx([0.1, 0.075, 0.05])


# All chainable and closed forms, compositions, and those that change the momentum too.
SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 12),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)]
    ),
}


def momentum(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("of_config", [False, True], ids=["user's SGD", "SGD of the config"])
@pytest.mark.parametrize("name", some(SCHEDULERS, 0, 3, 6))
def test_a_resumed_run_with_a_torch_scheduler_equals_the_unbroken_run(
    name: str, of_config: bool, tmp_path: Path
) -> None:
    section = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}
    config = {"optimizer": section} if of_config else {}
    make = None if of_config else momentum
    unbroken = build(make, SCHEDULERS[name], **config)
    train(unbroken, 3)
    unbroken.save_checkpoint(tmp_path)
    resumed = build(make, SCHEDULERS[name], **config)
    train(resumed, 2)
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 4) == train(unbroken, 4)
    assert torch.equal(parameters(resumed), parameters(unbroken))


@pytest.mark.parametrize(
    "make", [Lion, Corrected, Factored, Shampoo, torch.optim.Adafactor, momentum]
)
def test_a_resumed_run_keeps_state_of_every_form(make: Any, tmp_path: Path) -> None:
    """Averages, Python numbers, lists, numbers in the group, matrices, a count of all steps."""
    unbroken = build(make)
    train(unbroken, 3)
    unbroken.save_checkpoint(tmp_path)
    resumed = build(make)
    train(resumed, 1)
    resumed.load_checkpoint(tmp_path)
    named = zip(
        *(list(e.steps.optimizer_step.masters.named.values()) for e in (unbroken, resumed)),
        strict=True,
    )
    for one, other in named:
        before, after = unbroken.optimizer.state[one], resumed.optimizer.state[other]
        assert {k: type(v) for k, v in after.items()} == {k: type(v) for k, v in before.items()}
    train(resumed, 3)
    train(unbroken, 3)
    assert torch.equal(parameters(resumed), parameters(unbroken))
    if make is Shampoo:
        assert resumed.optimizer.state["steps"] == 6
    if make is Corrected:
        assert resumed.optimizer.param_groups[0]["total"] == pytest.approx(0.06)


def test_an_option_that_the_user_has_changed_is_not_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipemega")
    engine = build(lambda params: Corrected(params, lr=0.1, beta=0.5))
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    engine = build(lambda params: Corrected(params, lr=0.2, beta=0.5))
    engine.load_checkpoint(tmp_path)
    assert engine.optimizer.param_groups[0]["lr"] == 0.2
    assert engine.optimizer.param_groups[0]["total"] == 0.2
    assert "parameter group 0: lr is 0.2, as the optimizer was built; the checkpoint has 0.1" in (
        caplog.text
    )
    # Without the optimizer state, its groups start anew too.
    engine = build(lambda params: Corrected(params, lr=0.1, beta=0.5))
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert engine.optimizer.param_groups[0]["total"] == 0.0


def test_loading_without_the_schedule_starts_the_schedule_anew(tmp_path: Path) -> None:
    engine = build(lion, SCHEDULERS["StepLR"])
    train(engine, 4)
    engine.save_checkpoint(tmp_path)
    engine = build(lion, SCHEDULERS["LinearLR"])
    first = engine.lr_scheduler.get_last_lr()
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert engine.lr_scheduler.get_last_lr() == first


@pytest.mark.parametrize(
    ("save", "load", "message"),
    [
        ((lion, "StepLR"), (lion, "LinearLR"), "the checkpoint has the state of the learning-rate "
         "schedule StepLR by step, and this run has LinearLR by step: restore it, or load without "
         "the schedule (checkpoint.load_lr_scheduler_states false)"),
        ((lion, "StepLR"), (lion, {"type": "linear", "params": {"decay_steps": 9}}),
         "the state of the learning-rate schedule StepLR, which initialize() got, and this run "
         "uses the config section 'scheduler': give initialize() the same lr_scheduler, or"),
        ((lion, {"type": "linear", "params": {"decay_steps": 9}}), (lion, "StepLR"),
         "the state of the learning-rate schedule of the config section 'scheduler', and this run"),
        ((lion, None), (momentum, None), "the state of the optimizer Lion, and this run uses SGD"),
        ((lion, None), (lambda params: Lion([{"params": []}, *params]), None),
         "the optimizer Lion has 2 parameter groups, and the run that saved the checkpoint had 1"),
    ],
)  # fmt: skip
def test_state_of_another_optimizer_or_schedule_is_refused(
    save: Any, load: Any, message: str, tmp_path: Path
) -> None:
    def make(optimizer: Any, schedule: Any) -> Engine:
        if isinstance(schedule, dict):
            return build(optimizer, scheduler=schedule)
        return build(optimizer, SCHEDULERS.get(schedule))

    engine = make(*save)
    train(engine, 1)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        make(*load).load_checkpoint(tmp_path)


class KeepsObject(Lion):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["made by"] = self


def test_state_that_a_checkpoint_cannot_contain_is_refused_by_its_name(tmp_path: Path) -> None:
    engine = build(KeepsObject)
    train(engine, 1)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(tmp_path)
    assert (
        "the optimizer keeps a KeepsObject as 'made by' of 'layers.0.weight', and a checkpoint can "
        "contain only tensors, numbers, text, and lists and dicts of them: "
    ) in str(caught.value)


class Wrapper(Lion):
    """Keeps state in an optimizer that it contains."""

    def state_dict(self) -> dict[str, Any]:
        return {"wrapped": super().state_dict()}


def test_an_optimizer_whose_state_a_checkpoint_would_not_contain_is_refused(tmp_path: Path) -> None:
    engine = build(Wrapper)
    train(engine, 1)
    with pytest.raises(CheckpointError, match=r"Wrapper has a state_dict\(\) of its own") as caught:
        engine.save_checkpoint(tmp_path)
    assert caught.value.on_every_rank
    # A run that is going to save ends at its start.
    with pytest.raises(CheckpointError, match=r"Train without checkpoints \(checkpoint.save null"):
        build(Wrapper, checkpoint={"save": str(tmp_path)})


class HoldsFunction(lr_scheduler.StepLR):
    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, 2)
        self.function = lambda: None


def test_a_scheduler_whose_state_cannot_be_saved_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="the state of the scheduler HoldsFunction cannot be sav"):
        build(lion, HoldsFunction)


@pytest.mark.parametrize("make", [Lion, Corrected, Factored])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_of_a_users_optimizer_are_fp32(make: Any, precision: str, tmp_path: Path) -> None:
    section = {precision: {"enabled": True, "auto_cast": True} if precision == "fp16" else
               {"enabled": True}}  # fmt: skip
    torch.manual_seed(0)
    engine, *_ = pipemega.initialize(
        net(), {"train_batch_size": 2, **section}, optimizer=lambda params: make(params, lr=1e-3)
    )
    batches = [(torch.randn(2, 3), torch.randn(2, 3).to(getattr(torch, {"bf16": "bfloat16",
               "fp16": "float16"}[precision]))) for _ in range(4)]  # fmt: skip
    masters = {p.dtype for group in engine.optimizer.param_groups for p in group["params"]}
    assert masters == {torch.float32}
    for batch in batches[:2]:
        engine.train_batch(iter([batch]))
    engine.save_checkpoint(tmp_path)
    again, *_ = pipemega.initialize(
        net(), {"train_batch_size": 2, **section}, optimizer=lambda params: make(params, lr=1e-3)
    )
    again.load_checkpoint(tmp_path)
    for batch in batches[2:]:
        assert again.train_batch(iter([batch])) == engine.train_batch(iter([batch]))
    assert torch.equal(parameters(again), parameters(engine))


def test_post_validation_restores_state_of_every_form() -> None:
    """Undo a step: lists and numbers are those of before, not the objects that the step changed."""
    weights = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]
    for kind in (Corrected, Factored, Shampoo):
        optimizer = kind([{"params": weights}])
        backup = Backup(optimizer, weights)
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
        backup.save()
        before = str(optimizer.state_dict())
        optimizer.step()
        assert str(optimizer.state_dict()) != before
        backup.restore()
        assert str(optimizer.state_dict()) == before


@pytest.mark.parametrize("by_user", [False, True])
def test_a_run_in_fp64_continues_in_fp32(tmp_path: Path, by_user: bool) -> None:
    """The averages stayed in fp64, and the fused kernel of the next step failed."""
    config: dict[str, Any] = {"train_batch_size": 2}
    arguments: dict[str, Any] = {}
    if by_user:
        arguments["optimizer"] = lambda params: torch.optim.Adam(params, lr=0.1)
    else:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.1}}
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            data = [(torch.ones(3), torch.zeros(3))] * 4
            engine, optimizer, *_ = pipemega.initialize(net(), config, data, **arguments)
            if dtype == torch.float32:
                engine.load_checkpoint(tmp_path)
            engine.train_batch()
        finally:
            torch.set_default_dtype(torch.float32)
        engine.save_checkpoint(tmp_path)
    averages = {state["exp_avg"].dtype for state in optimizer.state.values()}
    assert averages == {torch.float32}
