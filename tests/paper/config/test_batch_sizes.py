"""The samples of each step: train_batch_size, or `training.rampup_batch_size`."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pipemega.cli import main
from pipemega.config import load
from pipemega.config.batch import RAMPUP, BatchSizes
from pipemega.errors import ConfigError


def megatron_size(rampup: tuple[int, int, int], full: int, consumed: int) -> int:
    """Megatron's rule, from its class RampupBatchsizeNumMicroBatches."""
    start, increment, samples = rampup
    if consumed > samples:
        return full
    samples_per_increment = samples / ((full - start) // increment)
    return start + int(consumed / samples_per_increment) * increment


def random_rampups(count: int) -> list[tuple[tuple[int, int, int], int]]:
    numbers = random.Random(5)
    found = []
    for _ in range(count):
        start, increment = numbers.randint(1, 40), numbers.randint(1, 40)
        full = start + increment * numbers.randint(1, 60)
        found.append(((start, increment, numbers.randint(1, 3000)), full))
    return found


def test_the_sizes_of_a_ramp_up_are_those_of_megatron_at_every_sample() -> None:
    for rampup, full in random_rampups(60):
        sizes = BatchSizes.of(rampup, full)
        for consumed in range(rampup[2] + 3):
            expected = megatron_size(rampup, full, consumed)
            assert sizes.at(consumed) == expected, (rampup, full, consumed)


def test_steps_and_samples_of_a_run_are_those_of_its_loop() -> None:
    for rampup, full in random_rampups(40):
        sizes, consumed, steps = BatchSizes.of(rampup, full), 0, 0
        while consumed <= rampup[2] + 3 * full:
            assert sizes.samples_of(steps) == consumed
            assert sizes.steps_within(consumed) == steps
            after = consumed + sizes.at(consumed)
            assert sizes.steps_within(after - 1) == steps
            consumed, steps = after, steps + 1


def test_the_ramp_up_reads_as_drawn() -> None:
    sizes = BatchSizes.of((2, 2, 12), 6)
    assert sizes.phases == ((0, 2), (6, 4), (12, 6))
    assert (sizes.sizes, sizes.changes) == ((2, 4, 6), True)


def test_a_ramp_up_that_starts_at_the_full_size_is_none() -> None:
    sizes = BatchSizes.of((6, 2, 12), 6)
    assert (sizes.phases, sizes.changes) == (((0, 6),), False)


def test_bloom_176b_takes_the_steps_that_its_launch_script_states() -> None:
    """192 16 9_765_625 up to 2048, 220 million samples: 116 increments."""
    sizes = BatchSizes.of((192, 16, 9_765_625), 2048)
    assert len(sizes.phases) == 117
    steps = consumed = 0
    while consumed <= 9_765_625:
        consumed, steps = consumed + megatron_size((192, 16, 9_765_625), 2048, consumed), steps + 1
    assert sizes.steps_within(220_000_000) == steps + (220_000_000 - consumed) // 2048


def config(rampup: list[int] | None, **changes: Any) -> dict[str, Any]:
    base = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "mesh": {"data": 2}}
    training = {"rampup_batch_size": rampup, **changes.pop("training", {})}
    return {**base, "training": training, **changes}


@pytest.mark.parametrize(
    ("rampup", "message"),
    [
        (
            [32, 4, 100],
            "training.rampup_batch_size [32, 4, 100] starts with 32 samples, more than "
            "train_batch_size (16): lower the number of samples of the first steps",
        ),
        (
            [4, 8, 100],
            "training.rampup_batch_size [4, 8, 100]: train_batch_size minus the first size "
            "(16 - 4 = 12) must be a multiple of the increment (8); the nearest train_batch_size "
            "that fit are 12 and 20",
        ),
        (
            [6, 2, 100],
            "training.rampup_batch_size [6, 2, 100]: the first size (6) must be a multiple of "
            "train_micro_batch_size_per_gpu * mesh.data (2 * 2 = 4); the nearest that fit are 4 "
            "and 8",
        ),
        (
            [4, 6, 100],
            "training.rampup_batch_size [4, 6, 100]: the increment (6) must be a multiple of "
            "train_micro_batch_size_per_gpu * mesh.data (2 * 2 = 4); the nearest that fit are 4 "
            "and 8",
        ),
        ([4, 4], "training.rampup_batch_size"),
        ([4, 4, 0], "training.rampup_batch_size"),
    ],
)
def test_a_ramp_up_that_does_not_fit_is_refused_with_the_nearest_sizes(
    rampup: list[int], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(config(rampup))
    assert message in str(error.value)


def test_all_errors_of_a_ramp_up_are_listed_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(config([3, 4, 60])))
    assert main(["check", str(file)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "run.json has 2 errors:" in lines[0]
    assert all("training.rampup_batch_size [3, 4, 60]: " in line for line in lines[1:])


def test_a_profile_of_a_step_after_the_last_sample_is_warned_of() -> None:
    profiler = {"enabled": True, "profile_step": 6}
    found = load(config([4, 4, 24], training={"train_samples": 59}, flops_profiler=profiler))
    assert any("step (training.train_samples are 5 steps): no" in line for line in found.warnings)


def test_the_lengths_of_a_schedule_in_samples_are_named_so() -> None:
    schedule = {"type": "cosine", "params": {"warmup_samples": 50}}
    with pytest.raises(ConfigError, match=r"params.decay_samples \(40\) must be above the length"):
        load(config(None, training={"train_samples": 40}, scheduler=schedule))


def test_the_ramp_up_is_checked_for_the_data_ranks_of_the_run() -> None:
    found = load(config([4, 4, 100], mesh={"data": "auto"}))
    assert found.batch_sizes(2).changes
    with pytest.raises(ConfigError, match=r"the first size \(4\) must be a multiple of"):
        found.batch_sizes(4)


def test_a_config_has_one_length() -> None:
    both = {"train_samples": 10, "train_steps": 5}
    with pytest.raises(ConfigError) as error:
        load(config(None, training=both))
    assert (
        "training.train_steps (5) and training.train_samples (10) both set the length of the run: "
        "keep one"
    ) in str(error.value)
    with pytest.raises(ConfigError, match="all set the length of the run: keep one"):
        load(config(None, training={**both, "epochs": 2}))


def test_the_length_of_a_run_is_known_in_steps_and_samples() -> None:
    def length(**training: Any) -> tuple[int | None, ...]:
        found = load(config([4, 4, 24], training=training))
        return found.batch_sizes(2).run_length(found.training)

    # Steps of 4, 4, 8, 12, 16, 16 ... samples.
    assert length(train_samples=59) == (5, None, 59)
    assert length(train_steps=6) == (6, None, 60)
    assert length(epochs=3) == (None, 3, None)


@pytest.mark.parametrize(
    ("rampup", "source"),
    [(None, "the train_batch_size (16)"), ([4, 4, 24], f"the first size of {RAMPUP} (4)")],
)
def test_a_run_in_samples_has_a_step(rampup: list[int] | None, source: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(config(rampup, training={"train_samples": 3}))
    assert (
        f"training.train_samples (3) is less than the samples of the first step, {source}, so the "
        "run would train nothing"
    ) in str(error.value)


def test_the_kill_switch_is_no_url() -> None:
    with pytest.raises(ConfigError, match="kill_switch_path 's3://b/stop' is a URL: give a path"):
        load(config(None, training={"kill_switch_path": "s3://b/stop"}))
