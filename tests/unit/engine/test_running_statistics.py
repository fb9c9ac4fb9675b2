"""The warning about layers with running statistics."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

import pipemega
from pipemega import LayerSpec, PipelineModule, load_config
from pipemega.config import Batch
from pipemega.engine.running_statistics import running_statistics_warning
from pipemega.errors import ConfigError

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def net() -> PipelineModule:
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    instance = LayerSpec(nn.InstanceNorm2d, 4, track_running_stats=True)
    fixed = LayerSpec(nn.BatchNorm2d, 4, track_running_stats=False)
    return PipelineModule([block, instance, fixed], loss_fn=nn.functional.mse_loss)


def warning(batch: Batch, checkpointing: bool = False, **config: Any) -> str | None:
    loaded = load_config({"train_batch_size": 4, "optimizer": SGD, **config})
    return running_statistics_warning(net(), loaded, batch, checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch": Batch(4, 2, 2, 1)}, "after each of the 2 micro-batches of a step"),
        ({"batch": Batch(4, 4, 1, 1), "checkpointing": True}, "again when activation checkpoint"),
        ({"batch": Batch(4, 2, 1, 2)}, "different running statistics on each of the 2 data ranks"),
        ({"batch": Batch(4, 4, 1, 1), "bf16": {"enabled": True}}, "may fail with bf16.enabled"),
    ],
)
def test_the_warning_names_the_layers_and_what_is_wrong_in_this_run(
    arguments: Any, words: str
) -> None:
    text = warning(**arguments)
    assert text is not None
    assert text.startswith("layers.0.1 (BatchNorm2d), layers.1 (InstanceNorm2d): BatchNorm2d ")
    assert words in text
    assert "set model.batch_norm to 'deferred' if the model type has this key, or give " in text
    assert "PipelineModule(..., deferred_batch_norm=True)" in text


def test_there_is_no_warning_if_nothing_is_wrong() -> None:
    assert warning(Batch(4, 4, 1, 1)) is None


def test_there_is_no_warning_without_training(caplog: pytest.LogCaptureFixture) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    pipemega.initialize(net(), config)
    assert "running statistics" not in caplog.text
    pipemega.initialize(net(), config, optimizer=torch.optim.SGD)
    assert "running statistics" in caplog.text


def test_the_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    pipemega.initialize(net(), {**config, "optimizer": SGD})
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([text for text in warnings if "running statistics" in text]) == 1


def test_a_sync_batch_norm_over_all_ranks_of_a_pipeline_is_refused() -> None:
    model = PipelineModule([nn.SyncBatchNorm(4)])
    config = load_config({"train_batch_size": 4, "optimizer": SGD})
    batch = Batch(4, 2, 2, 1, pipeline_size=2)
    with pytest.raises(ConfigError) as caught:
        running_statistics_warning(model, config, batch, checkpointing=False)
    assert str(caught.value).startswith("layers.0 (SyncBatchNorm): SyncBatchNorm communicates over")
    assert caught.value.on_every_rank


@pytest.mark.parametrize(
    ("params", "training", "noted"),
    [
        ({"lr": 0.1, "weight_decay": 0.1}, {}, True),
        ({"lr": 0.1}, {}, False),
        ({"lr": 0.1, "weight_decay": 0.1}, {"weight_decay_norms_and_biases": True}, False),
    ],
)
def test_a_note_says_that_norms_and_biases_are_decayed_if_the_config_does_not(
    params: Any, training: Any, noted: bool
) -> None:
    optimizer = {"type": "AdamW", "params": params}
    config = load_config({"train_batch_size": 4, "optimizer": optimizer, "training": training})
    notes = [note for note in config.notes if "also decays norms and biases" in note]
    assert len(notes) == noted
    if noted:
        assert "set training.weight_decay_norms_and_biases to false" in notes[0]
        assert "Megatron-LM does not" in notes[0]
