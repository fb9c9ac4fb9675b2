"""Epochs and data that an engine gets after `initialize`; steps on batches of the caller."""

from typing import Any

import pytest
import torch
from torch import nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.config import load
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError, DataError, NonFiniteError

DATA = [(torch.full((3,), float(index)), index % 2) for index in range(10)]


def engine_on(data: Any, **config: Any) -> Engine:
    net = PipelineModule([LayerSpec(nn.Linear, 3, 2)], loss_fn=nn.functional.cross_entropy)
    settings = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    }
    return pipemega.initialize(net, settings | config, data)[0]


def train(engine: Engine) -> list[float]:
    losses = []
    while not engine.is_complete:
        losses.append(engine.train_batch())
    return losses


def test_data_and_epochs_may_be_given_to_the_engine_or_to_initialize() -> None:
    expected = train(engine_on(DATA, training={"epochs": 2}))
    assert len(expected) == 6
    given = engine_on(DATA)
    given.set_epochs(2)
    assert given.total_steps == 6
    assert train(given) == expected
    later = engine_on(None)
    later.set_epochs(2)
    later.set_training_data(DATA)
    assert train(later) == expected
    assert (later.epoch, later.consumed_samples, later.step_samples) == (2, 20, 2)


def test_a_run_of_steps_counts_the_epochs_of_map_style_data() -> None:
    engine = engine_on(DATA, training={"train_steps": 6})
    epochs = []
    while not engine.is_complete:
        engine.train_batch()
        epochs.append(engine.epoch)
    # The third step has samples of two epochs.
    assert epochs == [0, 0, 1, 1, 2, 2]
    assert (engine.total_steps, engine.step_samples) == (6, 4)


def test_the_length_of_a_run_may_be_unknown() -> None:
    engine = engine_on(DATA)
    assert engine.total_steps is None
    assert not engine.is_complete


def test_an_evaluation_has_10_batches_without_epochs_and_all_data_with_them() -> None:
    assert engine_on(DATA).eval_batches == 10
    engine = engine_on(DATA, training={"epochs": 1})
    assert engine.eval_batches is None
    assert engine_on(DATA, training={"epochs": 1, "eval_steps": 3}).eval_batches == 3


@pytest.mark.parametrize(
    ("training", "epochs", "message"),
    [
        ({"train_steps": 5}, 2, r"epochs=2 is given, and training.train_steps is 5: both set"),
        ({"train_samples": 9}, 2, r"epochs=2 is given, and training.train_samples is 9: both set"),
        ({"epochs": 3}, 2, r"epochs=2 is given, and training.epochs is 3: both set the length of"),
        ({}, 0, r"epochs must be an integer of at least 1, not 0"),
        ({}, True, r"epochs must be an integer of at least 1, not True"),
        ({}, 1.5, r"epochs must be an integer of at least 1, not 1.5"),
    ],
)
def test_epochs_that_contradict_the_config_are_refused(
    training: dict[str, int], epochs: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_on(DATA, training=training).set_epochs(epochs)


def test_epochs_are_set_before_the_first_step() -> None:
    engine = engine_on(DATA)
    engine.train_batch()
    with pytest.raises(
        ConfigError, match=r"set_epochs\(2\) is called after a step: call it before"
    ):
        engine.set_epochs(2)


def test_steps_and_epochs_in_one_config_are_refused() -> None:
    message = r"training.train_steps \(5\) and training.epochs \(2\) both set the length of the run"
    with pytest.raises(ConfigError, match=message):
        load({"train_batch_size": 4, "training": {"train_steps": 5, "epochs": 2}})


def test_the_engine_gets_its_data_once() -> None:
    message = r"the engine has training data already \(list\): give it once, to initialize\(\), eng"
    with pytest.raises(ConfigError, match=message):
        engine_on(DATA).set_training_data(DATA)


def test_a_run_of_epochs_needs_data_that_the_engine_reads() -> None:
    engine = engine_on(None, training={"epochs": 2})
    with pytest.raises(ConfigError, match="of the engine, but it has none: give the data to init"):
        engine.train_batch()


def test_an_iterator_is_one_epoch() -> None:
    message = r"training.epochs is 2, but list_iterator is an iterator, which can be read only once"
    with pytest.raises(ConfigError, match=message):
        engine_on(iter(DATA), training={"epochs": 2})
    engine = engine_on(iter(DATA))
    with pytest.raises(ConfigError, match=message):
        engine.set_epochs(2)
    assert len(train(engine_on(iter(DATA), training={"epochs": 1}))) == 3


def test_data_with_another_fingerprint_are_refused_after_a_checkpoint(tmp_path: Any) -> None:
    first = engine_on(DATA)
    first.train_batch()
    first.save_checkpoint(tmp_path)
    engine = engine_on(None)
    engine.load_checkpoint(tmp_path)
    with pytest.raises(
        DataError, match="the data differs from the checkpoint's: list of 6 samples"
    ):
        engine.set_training_data(DATA[:6])


def test_a_schedule_takes_its_length_from_the_epochs() -> None:
    scheduler = {"type": "linear", "params": {"max_lr": 0.6, "min_lr": 0.0}}
    engine = engine_on(DATA, training={"epochs": 2}, scheduler=scheduler)
    rates = []
    while not engine.is_complete:
        engine.train_batch()
        assert engine.last_step is not None
        rates.append(engine.last_step.learning_rate)
    assert rates == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_evaluating_a_loader_that_repeats_needs_a_number_of_batches() -> None:
    engine = engine_on(DATA)
    message = (
        r"evaluate\(\) of a loader that repeats list has no end: give num_batches, or the data"
    )
    with pytest.raises(ConfigError, match=message):
        engine.evaluate(engine.loader)
    engine.evaluate(engine.loader, 2)


# Rollbacks


ROLLBACK = {"on_nonfinite": {"policy": "rollback"}}


class NanOnce(list[Any]):
    """Has nan in the sample that is read as number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(DATA)
        self.reads, self.at = 0, at

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        x, y = super().__getitem__(index)
        return (x * float("nan"), y) if self.reads == self.at else (x, y)


# The last step has two samples, and two micro-batches that read two samples each.
@pytest.mark.parametrize("at", [5, 23])
def test_a_rollback_keeps_the_position_in_the_epochs(tmp_path: Any, at: int) -> None:
    """A run whose last batch was rolled back went on with another epoch."""
    data = NanOnce(at)
    engine = engine_on(
        data, training={"epochs": 2, **ROLLBACK}, checkpoint={"save": str(tmp_path), "interval": 1}
    )
    train(engine)
    assert data.reads == 24
    assert (engine.epoch, engine.global_steps, engine.total_steps) == (2, 5, 6)
    engine.close()


def test_a_batch_of_the_caller_is_not_trained_again_after_a_rollback(tmp_path: Any) -> None:
    engine = engine_on(None, training=ROLLBACK, checkpoint={"save": str(tmp_path), "interval": 1})
    good = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
    engine.train_batch(batch=good)
    loss = engine.train_batch(batch=(good[0] * float("nan"), good[1]))
    assert loss != loss
    assert engine.global_steps == 1
    engine.train_batch(batch=good)
    assert engine.global_steps == 2
    engine.close()


def test_a_batch_with_nan_is_an_error_without_a_policy() -> None:
    with pytest.raises(NonFiniteError):
        engine_on(None).train_batch(
            batch=(torch.full((4, 3), float("nan")), torch.zeros(4, dtype=torch.int64))
        )


def test_an_evaluation_reads_one_global_batch_at_a_time() -> None:
    """All micro-batches of an evaluation were read before the first forward."""
    events: list[str] = []

    class Watched(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            events.append("read")
            return super().__getitem__(index)

    engine = engine_on(None)
    engine.evaluate(Watched(DATA), on_output=lambda *_: events.append("output"))
    batch = ["read"] * 4 + ["output"] * 2
    # In the last batch the second micro-batch only completes the step.
    assert events == [*batch, *batch, *["read"] * 4, "output"]


def test_each_evaluation_of_a_shuffled_loader_reads_the_same_samples() -> None:
    """The seed of its generator changed with each evaluation, so a resumed run had others."""
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(DATA, batch_size=2, shuffle=True, generator=generator)
    engine = engine_on(DATA)
    losses = {engine.evaluate(loader, 1) for _ in range(3)}
    assert len(losses) == 1
    assert generator.initial_seed() == 3


def test_an_evaluation_of_a_batch_without_samples_is_refused() -> None:
    batch = (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"eval_batch\(batch=...\): the batch has 0 samples"):
        engine_on(DATA).eval_batch(batch=batch)
