"""Load options, changed models and changed configs when a checkpoint is loaded."""

import logging
import re
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipemega import LayerSpec, PipelineModule, initialize
from pipemega.checkpoint.async_save import BackgroundTask
from pipemega.checkpoint.differences import check_config_changes, config_changes
from pipemega.checkpoint.save_load import throughput
from pipemega.config import load
from pipemega.distributed.mesh import Axis
from pipemega.engine.engine import Engine
from pipemega.errors import CheckpointError, DataError
from pipemega.training import Trainer
from tests.ranks.checkpoint.checkpoint_runs import small_config, small_data

CONFIG = small_config(
    "AdamW",
    {"lr": 0.01, "weight_decay": 0.1},
    bf16={"enabled": False},
    scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
)


def net(outputs: int = 4, depth: int = 1) -> PipelineModule:
    layers = [LayerSpec(nn.Linear, 6, 8), *[LayerSpec(nn.Linear, 8, 8)] * depth]
    return PipelineModule([*layers, LayerSpec(nn.Linear, 8, outputs)], loss_fn=_loss)


def _loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean() + 0 * labels.sum()


def build(model: PipelineModule | None = None, **changed: Any) -> Engine:
    config = {**CONFIG, **changed}
    return initialize(model or net(), config)[0]


def train(engine: Engine, steps: int) -> float:
    return [engine.train_batch(small_data(engine, s)) for s in range(steps)][-1]


def lr(engine: Engine) -> float:
    assert engine.optimizer is not None
    return float(engine.optimizer.param_groups[0]["lr"])


def optimizer_of(**params: float) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, **params}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    engine = build()
    train(engine, 3)
    engine.save_checkpoint(tmp_path)
    return tmp_path


def moments(engine: Engine) -> dict[str, Any]:
    assert engine.steps.optimizer_step is not None
    entries = engine.steps.optimizer_step.state_dict()["parameters"]
    return {name: entry["exp_avg"].clone() for name, entry in entries.items() if "exp_avg" in entry}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_load_module_only_starts_a_new_run_with_the_stored_weights(saved):
    whole, alone = build(), build()
    whole.load_checkpoint(saved)
    alone.load_checkpoint(saved, load_module_only=True)
    assert same(alone.parameter_state(), whole.parameter_state())
    assert (alone.global_steps, alone.consumed_samples, moments(alone)) == (0, 0, {})
    assert lr(alone) == lr(build())


def test_without_optimizer_states_the_run_keeps_its_own(saved):
    engine = build()
    train(engine, 1)
    before = moments(engine)
    engine.load_checkpoint(saved, load_optimizer_states=False)
    assert same(moments(engine), before)
    assert engine.global_steps == 3
    assert lr(engine) == pytest.approx(0.01 * 3 / 10, rel=0.5)


def test_without_lr_scheduler_states_the_learning_rate_starts_anew(saved):
    engine, other = build(), build()
    engine.load_checkpoint(saved, load_lr_scheduler_states=False)
    other.load_checkpoint(saved)
    assert lr(engine) == lr(build())
    assert lr(other) > lr(engine)
    assert same(moments(engine), moments(other))


def test_another_optimizer_loads_only_without_optimizer_states(saved):
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine = build(optimizer=sgd)
    with pytest.raises(CheckpointError, match=r"optimizer state \(checkpoint.load_optimizer_st"):
        engine.load_checkpoint(saved)
    engine.load_checkpoint(saved, load_optimizer_states=False)
    assert engine.global_steps == 3
    train(engine, 1)


def test_a_changed_learning_rate_and_weight_decay_take_effect(saved, caplog):
    with caplog.at_level(logging.INFO):
        engine = build(optimizer=optimizer_of(lr=0.5, weight_decay=0.7))
        engine.load_checkpoint(saved)
    assert lr(engine) == pytest.approx(50 * _resumed_lr(saved))
    assert engine.optimizer is not None
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0.7
    assert "the new values take effect:\n  optimizer.params.lr: 0.01 -> 0.5\n" in caplog.text
    assert "  optimizer.params.weight_decay: 0.1 -> 0.7" in caplog.text


def _resumed_lr(saved: Path) -> float:
    engine = build()
    engine.load_checkpoint(saved)
    return lr(engine)


def test_another_model_is_refused_and_with_strict_false_loads_what_fits(saved, caplog):
    """Another head and one more layer: every difference is listed."""
    engine, before = build(net(5, depth=2)), build(net(5, depth=2))
    with pytest.raises(CheckpointError, match=r"has another model: .*load what fits \(check"):
        engine.load_checkpoint(saved)
    engine.load_checkpoint(saved, strict=False)
    found, fresh, source = engine.parameter_state(), before.parameter_state(), build()
    source.load_checkpoint(saved)
    wanted = source.parameter_state()
    for name in found:
        fits = name in wanted and wanted[name].shape == found[name].shape
        assert torch.equal(found[name], (wanted if fits else fresh)[name]), name
    lines = [
        "parameters/layers.3.weight [5, 8] is not in the checkpoint: unchanged",
        "parameters/layers.3.bias [5] is not in the checkpoint: unchanged",
        "layers.2.weight is [8, 8] in this run and [4, 8] in the checkpoint: unchanged",
        "parameters/layers.2.bias is [8] in this run and [4] in the checkpoint: unchanged",
    ]
    assert [line for line in lines if line not in caplog.text] == []
    assert set(moments(engine)) == {
        f"layers.{place}.{name}" for place in (0, 1) for name in ("weight", "bias")
    }
    train(engine, 1)
    smaller = build(net(4, depth=0))
    smaller.load_checkpoint(saved, load_module_only=True, strict=False)
    assert "parameters/layers.2.weight [4, 8] is only in the checkpoint: not loaded" in caplog.text


class Empty(nn.Linear):
    """A layer with a buffer without elements and a buffer without dims."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("number", torch.tensor(7.0))


def test_a_tensor_without_elements_is_not_reported_as_missing(tmp_path):
    model = PipelineModule([LayerSpec(Empty)], loss_fn=_loss)
    first, second = build(model), build(model)
    train(first, 1)
    dict(first.module.named_buffers())["0.layers.0.number"].fill_(8.0)
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    assert dict(second.module.named_buffers())["0.layers.0.number"] == 8.0


def test_a_save_logs_size_and_speed_and_applies_the_retention(tmp_path, caplog):
    engine = build(checkpoint={"keep_last": 2, "keep_every": 2})
    with caplog.at_level(logging.INFO):
        for step in range(7):
            engine.train_batch(small_data(engine, step))
            engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("global*")) == [
        f"global_step{step}" for step in (2, 4, 6, 7)
    ]
    for what in ("saved", "loaded"):
        line = rf"{what} {tmp_path}/global_step7: [\d.]+ [kM]B in [\d.]+ s, \d+ [kM]B/s"
        assert re.search(line, caplog.text)


@pytest.mark.parametrize(
    ("size", "seconds", "text"),
    [
        (123_000_000, 0.5, "123.0 MB in 0.50 s, 246 MB/s"),
        (1_200, 0.04, "1.2 kB in 0.04 s, 30 kB/s"),
        (200_000, 0.5, "0.2 MB in 0.50 s, 400 kB/s"),
    ],
)
def test_a_small_checkpoint_has_a_speed_above_0(size, seconds, text):
    assert throughput(size, seconds) == text


GPT = {
    "train_batch_size": 8,
    "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "training": {"train_steps": 10},
}


def changed(**sections: Any) -> list[Any]:
    now = {k: {**v, **sections.pop(k, {})} if isinstance(v, dict) else v for k, v in GPT.items()}
    return config_changes(load(GPT).to_dict(), load({**now, **sections}))


def test_the_changes_of_a_config_are_listed_sorted_with_both_values():
    found = changed(
        mesh={"tensor": 2},
        pipeline={"schedule": "gpipe"},
        training={"train_steps": 20},
        wandb={"enabled": True},
        checkpoint={"save": "runs/other", "load": "runs/mine"},
        model={"recompute": "full", "recompute_method": "block", "pad_vocab_size_to": 512},
    )
    text = check_config_changes(found, (), "runs/mine/global_step5")
    assert text == (
        "the config differs from the config saved in runs/mine/global_step5; "
        "the new values take effect:\n"
        "  mesh.tensor: 1 -> 2\n"
        "  model.pad_vocab_size_to: None -> 512\n"
        "  model.recompute: 'none' -> 'full'\n"
        "  model.recompute_method: None -> 'block'\n"
        "  pipeline.schedule: '1f1b' -> 'gpipe'\n"
        "  training.train_steps: 10 -> 20\n"
        "  wandb.enabled: False -> True"
    )
    assert check_config_changes(changed(), (), "here") is None


@pytest.mark.parametrize(
    ("sections", "kind", "key"),
    [
        ({"seed": 5}, "another order of the data", "seed"),
        ({"data": {"split": "9,1,0"}}, "another order of the data", "data.split"),
        ({"model": {"hidden_dropout": 0.5}}, "another model", "model.hidden_dropout"),
        ({"model": {"seq_length": 16}}, "another model", "model.seq_length"),
    ],
)
def test_a_change_of_model_or_data_is_refused_unless_it_is_allowed(sections, kind, key):
    found = changed(**sections)
    with pytest.raises(CheckpointError) as error:
        check_config_changes(found, (), "there")
    text = str(error.value)
    assert f"would continue with {kind}: {key}: " in text
    assert f'if the change is intended, set checkpoint.allow_changes ["{key}"]' in text
    for allowed in (key, key.split(".")[0]):
        assert f"  {key}: " in str(check_config_changes(found, (allowed,), "there"))


def test_a_key_that_the_stored_config_lacks_is_not_a_change():
    stored = load(GPT).to_dict()
    del stored["model"]["norm_epsilon"]
    assert config_changes(stored, load(GPT)) == []


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, name: str) -> None:
        self.fingerprint = name

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((6,), float(index)), torch.zeros(4)


@pytest.mark.parametrize(
    ("changed", "step"),
    [({}, 3), ({"load_module_only": True}, 0), ({"load_tag": "global_step2"}, 2)],
)
def test_a_trainer_saves_in_the_background_and_another_loads_by_its_config(
    tmp_path, monkeypatch, changed, step
):
    monkeypatch.chdir(tmp_path)
    training = {"train_steps": 3, "progress": False}
    saving = {"save": "saved", "async": True, "interval": 1, "keep_last": 2}
    config = {**CONFIG, "training": training, "checkpoint": saving}
    Trainer(initialize(net(), config, Numbers("same"))[0]).fit()
    tags = {path.name for path in Path("saved").iterdir() if path.is_dir()}
    assert tags == {"global_step2", "global_step3"}
    config["checkpoint"] = {"load": "saved", **changed}
    engine = initialize(net(), config, Numbers("same"))[0]
    Trainer(engine).monitor.close()
    assert engine.global_steps == step


def test_other_data_is_refused_unless_it_is_allowed(tmp_path):
    first = initialize(net(), CONFIG, Numbers("old"))[0]
    first.train_batch()
    first.save_checkpoint(tmp_path)
    other = initialize(net(), CONFIG, Numbers("new"))[0]
    with pytest.raises(DataError, match=r'in a run: checkpoint.allow_changes \["data"\]'):
        other.load_checkpoint(tmp_path)
    allowed = initialize(
        net(), {**CONFIG, "checkpoint": {"allow_changes": ["data"]}}, Numbers("new")
    )
    allowed[0].load_checkpoint(tmp_path)
    assert allowed[2] is not None
    assert allowed[2].consumed_samples == 16


def test_an_allowed_new_seed_orders_the_data_from_the_checkpoint_on(tmp_path):
    first = initialize(net(), CONFIG, Numbers("same"))[0]
    first.train_batch()
    first.save_checkpoint(tmp_path)
    config = {**CONFIG, "seed": 99, "checkpoint": {"allow_changes": ["seed"]}}
    engine, _, loader, _ = initialize(net(), config, Numbers("same"))
    engine.load_checkpoint(tmp_path)
    assert loader is not None
    assert (loader.state_dict()["seed"], loader.consumed_samples) == (99, 16)


def test_waiting_for_a_background_save_ends_at_the_timeout():
    background, hanging = BackgroundTask(Axis("world"), timedelta(seconds=0.1)), threading.Event()
    background.start(lambda axis: hanging.wait(30))
    with pytest.raises(CheckpointError, match=r"did not finish within another 0.1 s \(mesh.timeo"):
        background.wait()
    hanging.set()
    assert background.wait() is None
    assert background.wait() is None
