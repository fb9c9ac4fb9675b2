"""The engine of a loop that runs forward and backward itself, in one process."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipemega.compat.deepspeed.data_parallel_engine import (
    DataParallelEngine,
    build_data_parallel,
)
from pipemega.config import load
from pipemega.errors import ConfigError, LossScaleError, NonFiniteError

SGD = {"type": "SGD", "params": {"lr": 0.125}}


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()


def build(module: nn.Module | None = None, **config: Any) -> DataParallelEngine:
    settings: dict[str, Any] = {"gradient_clipping": 0, "optimizer": SGD, **config}
    settings["train_micro_batch_size_per_gpu"] = 2
    module = module if module is not None else net()
    return DataParallelEngine(build_data_parallel(module, load(settings)))


def loss_of(output: Tensor) -> Tensor:
    return (output * output).mean()


def data(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 3, generator=generator, dtype=torch.float64)


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


def test_gradients_and_dropout_are_those_of_plain_torch_bit_for_bit() -> None:
    plain, ours = net(), net()
    loop = build(ours, gradient_accumulation_steps=4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.125)
    torch.manual_seed(9)
    for step in range(2):
        for m in range(4):
            (loss_of(plain(data(4 * step + m))) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(9)
    for step in range(2):
        for m in range(4):
            part = loop.backward(loss_of(loop(data(4 * step + m))))
            assert not part.requires_grad
            assert loop.is_gradient_accumulation_boundary() == (m == 3)
            loop.step()
    assert torch.equal(parameters(plain), parameters(ours))
    assert (loop.global_steps, loop.micro_steps, loop.global_samples) == (2, 8, 16)


def test_the_reported_loss_is_the_mean_over_the_micro_batches() -> None:
    loop = build(nn.Linear(1, 1), gradient_accumulation_steps=2)
    for value in (1.0, 5.0):
        loop.backward(loop.module(torch.ones(2, 1)).sum() * 0 + value)
        loop.step()
    assert loop.pipemega_engine.last_step is not None
    assert loop.pipemega_engine.last_step.loss == 3.0


def test_several_losses_of_a_micro_batch_add_up() -> None:
    once, twice = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    twice.load_state_dict(once.state_dict())
    for module in (once, twice):
        loop = build(module)
        output = loop(data(0))
        if module is once:
            loop.backward(output.sum() + loss_of(output))
        else:
            loop.backward(output.sum(), retain_graph=True)
            loop.backward(loss_of(output))
        loop.step()
        assert loop.pipemega_engine.last_step is not None
        results = loop.pipemega_engine.last_step.loss
    assert torch.allclose(parameters(once), parameters(twice), atol=1e-12)
    assert results == pytest.approx((output.sum() + loss_of(output)).item(), abs=1e-12)


def test_a_caller_may_divide_the_loss_itself() -> None:
    one, other = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    other.load_state_dict(one.state_dict())
    engines = [build(m, gradient_accumulation_steps=2) for m in (one, other)]
    for m in range(2):
        engines[0].backward(loss_of(engines[0](data(m))))
        half = loss_of(engines[1](data(m))) / 2
        engines[1].backward(half, scale_wrt_gas=False)
        for loop in engines:
            loop.step()
    assert torch.allclose(parameters(one), parameters(other), atol=1e-12)
    losses = [step.loss for loop in engines if (step := loop.pipemega_engine.last_step) is not None]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_a_caller_may_set_the_last_micro_batch_of_a_step() -> None:
    loop = build(gradient_accumulation_steps=4)
    for boundary in (False, True, True):
        loop.set_gradient_accumulation_boundary(boundary)
        loop.backward(loss_of(loop(data(0))))
        assert loop.is_gradient_accumulation_boundary() == boundary
        loop.step()
    assert (loop.global_steps, loop.global_samples) == (2, 6)


def test_discarded_gradients_have_no_effect() -> None:
    module = nn.Linear(3, 2).bfloat16()
    loop = build(module, gradient_accumulation_steps=2, bf16={"enabled": True})
    before = parameters(module)
    loop.backward(loop(data(0).bfloat16()).sum())
    loop.step()
    loop.zero_grad()
    loop.backward(loop(data(0).bfloat16()).sum() * 0)
    loop.step()
    assert torch.equal(parameters(module), before)
    assert loop.pipemega_engine.last_step is not None
    assert loop.pipemega_engine.last_step.loss == 0


def test_only_fp16_auto_cast_casts_inputs() -> None:
    class Dtype(nn.Linear):
        def forward(self, x: Any, mask: Any = None) -> Any:
            self.seen = x.dtype, mask.dtype
            return super().forward(x.to(self.weight.dtype))

    x = torch.ones(2, 3)
    for precision, expected in (
        ({"bf16": {"enabled": True}}, torch.float32),
        ({"fp16": {"enabled": True}}, torch.float32),
        ({"fp16": {"enabled": True, "auto_cast": True}}, torch.float16),
    ):
        module = Dtype(3, 2)
        build(module, **precision)(x, mask=x)
        assert module.seen == (expected, torch.float32)


def test_an_fp16_overflow_skips_the_step_and_lowers_the_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "min_loss_scale": 8}
    module = nn.Linear(3, 2)
    loop = build(module, fp16=fp16)
    before = parameters(module)
    loop.backward(loop(torch.ones(2, 3).half()).float().sum() * float("inf"))
    loop.step()
    assert (loop.pipemega_engine.global_steps, loop.pipemega_engine.skipped_steps) == (1, 1)
    assert torch.equal(parameters(module), before)
    loop.backward(loop(torch.ones(2, 3).half()).float().sum() * float("inf"))
    with pytest.raises(LossScaleError, match="overflowed at step 1 with the loss scale at fp16"):
        loop.step()


def test_inf_in_fp32_ends_the_run() -> None:
    loop = build()
    loop.backward(loss_of(loop(data(0))) * float("inf"))
    with pytest.raises(NonFiniteError, match="loss is inf at step 1"):
        loop.step()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.step(), "step() is called without gradients: call "
         "engine.backward(loss) before each engine.step(). loss.backward() alone does not apply"),
        (lambda e: e.backward(e(data(0))), "backward(loss) takes a scalar tensor, "
         "the mean loss of the micro-batch, and got of shape [2, 2]: reduce it"),
        (lambda e: e.backward(3.0), "and got 3.0: reduce it"),
        (lambda e: e.backward(data(0).sum()), "backward(loss): the loss has no gradient"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call(build())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"training": {"epochs": 2}}, "training.epochs is set, and the model is no pipeline: the "
         "loop reads the data"),
        ({"monitor": {"trace": {"every": 2}}}, "monitor.trace is set, and the model is no pipel"),
        ({"train_batch_size": 4, "training": {"rampup_batch_size": [2, 2, 8]}},
         "training.rampup_batch_size is set, and the model is no pipeline"),
        ({"lora": {"r": 2}}, "lora is set, and the model is no pip"),
    ],
)  # fmt: skip
def test_a_key_without_meaning_in_such_a_loop_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**config)
    assert message in str(caught.value)


def test_without_an_optimizer_the_engine_only_computes() -> None:
    loop = build(optimizer=None)
    assert loop(data(0)).shape == (2, 2)
    with pytest.raises(ConfigError, match="backward needs an optimizer: add the section"):
        loop.backward(loss_of(loop(data(0))))


def test_a_loaded_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    adam = {"type": "AdamW", "params": {"lr": 0.05}}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    states = []
    for resumes in (False, True):
        module = nn.Linear(3, 2).double()
        if not resumes:
            module.load_state_dict({k: torch.ones_like(v) for k, v in module.state_dict().items()})
        loop = build(module, optimizer=adam, scheduler=schedule)
        start = 0
        if resumes:
            _, client = loop.pipemega_engine.load_checkpoint(tmp_path)
            assert client == {"note": "two"}
            start = loop.pipemega_engine.global_steps
            assert start == 2
        for step in range(start, 4):
            loop.backward(loss_of(loop(data(step))))
            loop.step()
            if step == 1:
                loop.pipemega_engine.save_checkpoint(tmp_path, client_state={"note": "two"})
        states.append(parameters(module))
    assert torch.equal(states[0], states[1])


def test_records_count_the_time_of_forward_and_backward(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    loop = build(steps_per_print=1, monitor={"jsonl": str(file)})
    output = loop(data(0))
    time.sleep(0.2)
    loop.backward(loss_of(output))
    loop.step()
    loop.pipemega_engine.close()
    assert any(float(v) >= 0.2 for v in _numbers(file.read_text(), "seconds"))


def _numbers(text: str, key: str) -> list[float]:
    return [v for line in text.splitlines() for k, v in json.loads(line).items() if key in k]
