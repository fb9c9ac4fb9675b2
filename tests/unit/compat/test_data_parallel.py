"""`deepspeed.initialize` of a module that is no pipeline, in one process; scripts as users write.

The oracle is the same loop in plain torch.
"""

import argparse
import copy
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipemega.compat.deepspeed as deepspeed
from pipemega.errors import CheckpointError, ConfigError

CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.25,
}
ADAM = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}}


class Net(nn.Module):
    """Tied weights, a buffer and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(9, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.hidden(self.embedding(tokens)))) * self.scale
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def describe(self) -> str:
        return "a small net"


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 9, (4, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train_plain(model: nn.Module, optimizer: Any, schedule: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        for m in range(2):
            loss = model(*batch(2 * step + m))
            (loss / 2).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    return losses


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for number in range(2 * first, 2 * last):
        tokens, labels = batch(number)
        loss = engine(tokens, labels=labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


def test_a_script_with_an_optimizer_in_the_json_trains_as_plain_torch() -> None:
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args([])
    plain, model = Net(), Net()
    config = {**CONFIG, "optimizer": ADAM, "fp16": {"enabled": False}}
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=filter(lambda p: p.requires_grad, model.parameters()),
        config=config,
    )
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1)
    expected = train_plain(plain, theirs, None, 3)
    assert train(engine, 0, 3) == pytest.approx(expected, abs=1e-10)
    assert difference(plain, model) < 1e-10
    assert (loader, schedule) == (None, None)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert engine.module is model
    assert engine.describe() == "a small net"
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (3, 24, 6)
    assert engine.train_batch_size() == 8
    assert engine.train_micro_batch_size_per_gpu() == 4
    assert engine.gradient_accumulation_steps() == 2
    assert engine.get_lr() == [0.05]
    assert engine.get_mom() == [(0.9, 0.999)]
    assert engine.was_step_applied()
    assert engine.get_global_grad_norm() > 0
    assert engine.zero_optimization_stage() == 0


@pytest.mark.parametrize("how", ["object", "function"])
def test_an_optimizer_and_a_scheduler_of_the_script_train_as_plain_torch(how: str) -> None:
    plain, model = Net(), Net()

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        named = dict(net.named_parameters())
        flat = [p for p in named.values() if p.dim() == 1]
        return [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.5},
            {"params": flat, "weight_decay": 0.0, "lr": 0.2},
        ]

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    theirs = torch.optim.AdamW(groups(plain), lr=0.1)
    expected = train_plain(plain, theirs, scheduler(theirs), 3)
    if how == "object":
        own = torch.optim.AdamW(groups(model), lr=0.1)
        given = {"optimizer": own, "lr_scheduler": scheduler(own)}
    else:
        given = {
            "optimizer": lambda params: torch.optim.AdamW(params, lr=0.1),
            "lr_scheduler": scheduler,
            "model_parameters": groups(model),
        }
    engine, optimizer, _, schedule = deepspeed.initialize(model=model, config=CONFIG, **given)
    assert train(engine, 0, 3) == pytest.approx(expected, abs=1e-10)
    assert difference(plain, model) < 1e-10
    assert engine.get_lr() == schedule.get_last_lr() == [0.1 / 4, 0.2 / 4]
    if how == "object":
        assert optimizer is own
        assert schedule is given["lr_scheduler"]


class SampleSchedule:
    """As in Megatron: counts samples, and is no scheduler of torch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.samples = optimizer, 0

    def step(self, increment: int) -> None:
        self.samples += increment
        self.optimizer.param_groups[0]["lr"] = 1 / self.samples

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


def test_a_scheduler_whose_step_takes_samples_gets_those_of_the_step() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SampleSchedule(optimizer)
    engine, *_, returned = deepspeed.initialize(
        model=model, config=CONFIG, optimizer=optimizer, lr_scheduler=schedule
    )
    train(engine, 0, 2)
    assert returned is schedule
    assert schedule.samples == 16
    assert engine.get_lr() == [1 / 16]


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_the_zero_grad_of_the_optimizer_discards_gradients(precision: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, config={**CONFIG, **precision, "optimizer": sgd}
    )
    before = copy.deepcopy(model)
    inputs = torch.ones(4, 3, dtype=model.weight.dtype)
    engine.backward(engine(inputs).float().sum())
    engine.step()
    optimizer.zero_grad()
    engine.backward(engine(inputs).float().sum() * 0)
    engine.step()
    assert engine.global_steps == 1
    assert difference(before, model) == 0


def test_a_scheduler_that_the_script_steps_changes_the_rate() -> None:
    model = Net()
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, optimizer=own)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5)
    for step in range(2):
        train(engine, step, step + 1)
        schedule.step()
    assert engine.get_lr() == [0.25]
    assert engine.pipemega_engine.last_step.learning_rate == 0.5


def test_two_models_that_train_against_each_other_train_as_in_plain_torch() -> None:
    """As in a GAN: the loss of one gives the other gradients too, which are discarded."""

    def models() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(4)
        return nn.Linear(3, 3).double(), nn.Linear(3, 1).double()

    def train_both(maker: nn.Module, judge: nn.Module, update: Any) -> None:
        for step in range(3):
            noise = torch.full((4, 3), step + 1.0, dtype=torch.float64)
            made = maker(noise)
            judge.zero_grad()
            update(1, judge(made.detach()).square().mean(), judge(noise).cos().mean())
            maker.zero_grad()
            update(0, judge(made).sin().mean())

    plain = models()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in plain]

    def update_plain(which: int, *losses: Tensor) -> None:
        for loss in losses:
            loss.backward()
        optimizers[which].step()

    train_both(*plain, update_plain)
    ours = models()
    config = {"train_batch_size": 4, "gradient_clipping": 0}
    engines = [
        deepspeed.initialize(
            model=model, config=config, optimizer=torch.optim.Adam(model.parameters(), lr=0.05)
        )[0]
        for model in ours
    ]

    def update(which: int, *losses: Tensor) -> None:
        for loss in losses:
            engines[which].backward(loss)
        engines[which].step()

    train_both(*ours, update)
    for one, other in zip(plain, ours, strict=True):
        assert difference(one, other) < 1e-10


def test_parameters_outside_of_the_groups_are_not_trained() -> None:
    model = Net()
    before = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        config={**CONFIG, "optimizer": ADAM},
        model_parameters=model.hidden.parameters(),
    )
    train(engine, 0, 1)
    assert torch.equal(model.embedding.weight, before.embedding.weight)
    assert not torch.equal(model.hidden.weight, before.hidden.weight)


def test_a_checkpoint_continues_the_run_bit_for_bit(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "optimizer": ADAM,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    }
    whole, *_ = deepspeed.initialize(model=Net(), config=config)
    assert whole.load_checkpoint(str(tmp_path)) == (None, None)
    losses = train(whole, 0, 2)
    assert whole.save_checkpoint(str(tmp_path), tag=7, client_state={"epoch": 3}) is True
    losses += train(whole, 2, 4)
    resumed, *_ = deepspeed.initialize(model=Net(), config=config)
    path, client = resumed.load_checkpoint(str(tmp_path))
    assert path.endswith("7")
    assert client == {"epoch": 3}
    assert resumed.global_steps == 2
    assert train(resumed, 2, 4) == losses[4:]
    assert difference(whole.module, resumed.module) == 0
    weights, *_ = deepspeed.initialize(model=Net(), config=config)
    weights.load_checkpoint(str(tmp_path), load_module_only=True)
    assert weights.global_steps == 0
    with pytest.raises(CheckpointError, match="other is missing; complete checkpoints there: 7"):
        weights.load_checkpoint(str(tmp_path), tag="other")


def test_a_checkpoint_of_deepspeed_gives_the_weights(tmp_path: Path) -> None:
    """Its file has tied parameters under each of their names."""
    torch.manual_seed(8)
    saved = Net()
    nn.init.normal_(saved.hidden.weight)
    (tmp_path / "global_step3").mkdir()
    file = {"module": saved.state_dict(), "global_steps": 3, "dp_world_size": 1, "epoch": 4}
    torch.save(file, tmp_path / "global_step3/mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("global_step3")
    engine, *_ = deepspeed.initialize(model=Net(), config=CONFIG)
    path, client = engine.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step3")
    assert client == {"epoch": 4}
    assert difference(engine.module, saved) == 0


def test_the_fp32_weights_of_a_checkpoint_are_read_in_one_process(tmp_path: Path) -> None:
    zero_to_fp32 = importlib.import_module("pipemega.compat.deepspeed.utils.zero_to_fp32")
    model = Net().float()
    engine, *_ = deepspeed.initialize(
        model=model, config={**CONFIG, "bf16": {"enabled": True}, "optimizer": ADAM}
    )
    engine.backward(engine(*batch(0)))
    engine.step()
    engine.backward(engine(*batch(1)))
    engine.step()
    engine.save_checkpoint(tmp_path / "ours")
    theirs = tmp_path / "theirs/global_step1"
    theirs.mkdir(parents=True)
    # Only the first name of a shared parameter has a master in DeepSpeed's files.
    state = {**model.state_dict(), "head.weight": torch.zeros(9, 4)}
    file = {"module": state, "shared_params": {"head.weight": "embedding.weight"}}
    torch.save(file, theirs / "mp_rank_00_model_states.pt")
    masters = engine.pipemega_engine.parameter_state()
    for folder in (tmp_path / "ours", theirs):
        read = zero_to_fp32.load_state_dict_from_zero_checkpoint(Net().float(), folder)
        assert torch.equal(read.head.weight.bfloat16(), model.head.weight)
        assert {p.dtype for p in read.parameters()} == {torch.float32}
        exact = torch.equal(read.hidden.weight, masters["layers.0.hidden.weight"])
        assert exact == (folder != theirs)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(theirs, tmp_path / "out")
    state = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert state.keys() == Net().state_dict().keys()


def test_deepspeeds_optimizer_and_scheduler_classes_are_taken() -> None:
    model = Net()
    optimizer = deepspeed.ops.adam.FusedAdam(model.parameters(), lr=0.1)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(
        optimizer, warmup_max_lr=0.5, warmup_num_steps=2, warmup_type="linear"
    )
    engine, *_, returned = deepspeed.initialize(
        model=model, config=CONFIG, optimizer=optimizer, lr_scheduler=schedule
    )
    before = copy.deepcopy(model)
    train(engine, 0, 3)
    assert returned is schedule
    # The first two steps of DeepSpeed's schedule have the rate 0.
    assert engine.get_lr() == [0.5]
    assert difference(before, model) > 0


def test_the_weights_of_a_module_are_saved_as_torch_saves_them(tmp_path: Path) -> None:
    model = Net()
    model.hidden.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "bf16": {"enabled": True}})
    assert engine.save_16bit_model(str(tmp_path / "new"), "weights.bin")
    state = torch.load(tmp_path / "new/weights.bin", weights_only=True)
    assert state.keys() == Net().state_dict().keys()
    assert state["hidden.weight"].dtype == torch.bfloat16
    assert "hidden.weight" not in engine.module_state_dict(exclude_frozen_parameters=True)
    assert next(iter(engine.state_dict())).startswith("module.")


def test_the_dataloader_yields_micro_batches_and_repeats_nothing() -> None:
    data = [(torch.tensor([i]), i) for i in range(10)]
    engine, _, loader, _ = deepspeed.initialize(model=Net(), config=CONFIG, training_data=data)
    assert engine.training_dataloader is loader
    assert len(loader) == 3
    assert [len(x) for x, _ in loader] == [4, 4, 2]
    seen = [int(i) for _, y in loader for i in y]
    assert sorted(seen) == list(range(10))
    assert seen != sorted(seen)
    loader.sampler.set_epoch(1)
    assert [int(i) for _, y in loader for i in y] != seen
    plain = engine.deepspeed_io(data, batch_size=5, route="eval")
    assert [int(i) for _, y in plain for i in y] == list(range(10))
    own = engine.deepspeed_io(data, collate_fn=len, data_sampler=range(3))
    assert list(own) == [3]


def test_evaluation_and_discarded_gradients_do_not_count() -> None:
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "optimizer": ADAM})
    before = copy.deepcopy(model)
    engine.backward(engine(*batch(0)))
    engine.step()
    engine.zero_grad()
    engine.eval()
    assert not model.training
    with torch.no_grad():
        engine(batch(0)[0])
    engine.train()
    with engine.no_sync():
        engine.backward(engine(*batch(1)) * 0)
    assert engine.is_gradient_accumulation_boundary()
    engine.step()
    # Only the weight decay.
    for new, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.allclose(new, old * (1 - 0.05 * 0.1), atol=1e-15)


def test_without_an_optimizer_the_engine_computes_outputs() -> None:
    engine, optimizer, *_ = deepspeed.initialize(model=Net(), config=CONFIG)
    assert optimizer is None
    assert engine(batch(0)[0]).shape == (4, 5, 9)
    assert engine.get_lr() == []


class Grid:
    """What Megatron's mpu has."""

    def get_model_parallel_world_size(self) -> int:
        return 2


def raises(call: Any) -> str:
    with pytest.raises((ConfigError, AttributeError)) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 3}, "initialize() takes an nn.Module or a PipelineModule as model, not a int"),
        ({"mpu": Grid()}, "initialize(mpu=...) has a model parallel size of 2, and the model is an "
         "nn.Module, which the engine does not shard: write the model as a PipelineModule"),
        ({"optimizer": 3}, "initialize(optimizer=...) takes a torch.optim.Optimizer, or a function "
         "of the parameters that returns one, not a int"),
        ({"optimizer": lambda parameters: None},
         "optimizer must return a torch.optim.Optimizer, and it returns None"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1)},
         "parameter group 0 holds a parameter of shape (2,) that is not one of the model"),
        ({"config": {**CONFIG, "zero_optimization": {"stage": 3}}}, "zero_optimization.stage"),
        ({"config": {**CONFIG, "mesh": {"pipeline": 2}}}, "mesh"),
        ({"config": {**CONFIG, "mesh": {"expert": 2}}},
         "mesh.expert is 2, and the model is an nn.Module in a loop of the script"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_with_what_to_use(given: Any, message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        deepspeed.initialize(**{"model": Net(), "config": CONFIG, **given})
    assert type(caught.value).__module__ == "pipemega.errors"


def test_a_call_that_does_not_exist_here_says_what_to_use() -> None:
    engine, *_ = deepspeed.initialize(model=Net(), config={**CONFIG, "optimizer": ADAM})
    loss = engine(*batch(0))
    for call, message in (
        (lambda: engine.train_batch(iter([])), "has no 'train_batch': the script calls forward"),
        (lambda: engine.set_train_batch_size(4), "set train_batch_size in the config"),
        (lambda: engine.allreduce_gradients(), "the engine reduces the gradients"),
        (lambda: engine.no_such_name, "docs/coming_from.md lists the names that exist"),
        (lambda: engine.backward(loss, allreduce_gradients=False), "step() reduces the gradients"),
        (lambda: engine.step(lr_kwargs={"epoch": 3}), "or the 8 samples of the step; remove"),
        (lambda: engine.load_checkpoint("x", custom_load_fn=print), "custom_load_fn=...) is not"),
        (lambda: deepspeed.init_inference(engine), "serve the model with vLLM or transformers"),
        (lambda: deepspeed.zero.Init(), "ZeRO stage 3), which does not exist here"),
        (lambda: engine.optimizer.step(), "optimizer.step() is called by"),
    ):
        assert message in raises(call)
    with engine.no_sync():
        assert "call it after the block" in raises(engine.step)


def test_what_scripts_ask_an_engine_and_its_optimizer_has_an_answer() -> None:
    """As DeepSpeed-Chat and Megatron-DeepSpeed ask."""
    fp16 = {"enabled": True, "initial_scale_power": 4}
    config = {**CONFIG, "optimizer": ADAM, "fp16": fp16, "gradient_accumulation_steps": 1}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(4, 1), config=config)
    assert optimizer.cur_scale == 1.0
    for factor, overflow in ((1.0, False), (float("inf"), True)):
        engine.backward(engine(torch.ones(8, 4, dtype=torch.half)).float().mean() * factor)
        engine.step(lr_kwargs={"increment": 8})
        assert optimizer.overflow is overflow
    assert optimizer.cur_scale == optimizer.loss_scale == engine.cur_scale > 1.0
    engine.tput_timer.update_epoch_count()
    assert engine.get_additional_losses() is None
    assert not engine.zero_optimization_partition_weights()
    assert (engine.has_moe_layers, engine.is_model_parallel) == (False, False)


def test_names_for_experts_and_stage_3_are_refused_where_they_are_called() -> None:
    """Scripts import them at the top, also those that never call them."""
    experts = "mixture-of-experts layers do not exist"
    for call, message in (
        (lambda: deepspeed.moe.layer.MoE(hidden_size=4), experts),
        (
            lambda: deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer({}),
            f"{experts}; pass the parameter groups to initialize() as they are",
        ),
        (
            lambda: deepspeed.utils.set_z3_leaf_modules(Net(), [nn.Linear]),
            "parameters are whole on each rank; remove the call",
        ),
    ):
        assert message in raises(call)
    assert not isinstance(Net(), deepspeed.moe.layer.MoE)


def test_blocks_for_zero_stage_3_do_nothing_at_lower_stages() -> None:
    with deepspeed.zero.Init(enabled=False):
        model = Net()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.hidden.bias.data.fill_(1)
    assert model.hidden.bias.sum().item() == 4


def test_a_key_of_the_script_in_the_config_is_accepted_and_a_typo_is_not() -> None:
    keys = {**CONFIG, "optimizer": ADAM, "log_settings": {"dir": "logs"}}
    engine, *_ = deepspeed.initialize(model=Net(), config=keys)
    assert engine.train_batch_size() == 8
    with pytest.raises(ConfigError, match="did you mean 'zero_optimization'"):
        deepspeed.initialize(model=Net(), config={**keys, "zero_optimisation": {"stage": 1}})
