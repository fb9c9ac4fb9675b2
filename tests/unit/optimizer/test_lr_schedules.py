"""Learning rates against numbers computed by hand."""

import math
import re
from functools import partial

import pytest
import torch
from torch import nn

from pipemega.config import load
from pipemega.config.sections.scheduler_section import (
    PARAMS,
    DecayParams,
    RunLength,
    SchedulerSection,
    WsdParams,
)
from pipemega.errors import CheckpointError, ConfigError
from pipemega.optimizer import build_schedule

LOG = 1 / math.log(4)


def adam(lr=0.5, groups=1):
    return torch.optim.Adam([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr)


def build(optimizer, name, params, train_steps=None):
    config = {"train_micro_batch_size_per_gpu": 1, "scheduler": {"type": name, "params": params}}
    if train_steps is not None:
        config["training"] = {"train_steps": train_steps}
    section = load(config).scheduler
    return build_schedule(optimizer, section, RunLength(steps=train_steps))


def curve(name, params, steps, **more):
    schedule = build(adam(), name, params, **more)
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        schedule.end_step()
    return rates


CYCLE = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2}


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        # The first two rates are alike: DeepSpeed counts from -1.
        ("WarmupLR", {"warmup_num_steps": 4, "warmup_max_lr": 1.0},
         [0, 0, math.log(2) * LOG, math.log(3) * LOG, 1, 1, 1]),
        ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 0.1},
         [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]),  # up to the optimizer's own 0.5
        ("WarmupDecayLR", {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 1.0,
                           "warmup_type": "linear"},
         [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("WarmupCosineLR", {"total_num_steps": 6, "warmup_num_steps": 2, "cos_min_ratio": 0.2,
                            "warmup_type": "linear", "warmup_min_ratio": 0.5},
         [0, 0.25, 0.375, 0.5 * (0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2), 0.3,
          0.5 * (0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2), 0.1, 0.1]),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2},
         [0.1, 0.15, 0.2, 0.25]),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2,
                         "lr_range_test_step_rate": 3.0, "lr_range_test_staircase": True},
         [0.1, 0.1, 0.4, 0.4, 0.7]),
        ("OneCycle", CYCLE, [1, 2, 3, 2, 1, 1, 1]),
        ("OneCycle", {**CYCLE, "cycle_second_step_size": 4, "decay_step_size": 2,
                      "decay_lr_rate": 1.0},
         [1, 2, 3, 2.5, 2, 1.5, 1, 1 / 1.5, 1 / 2]),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
         [1, 1, 2, 2, 3, 2, 2, 1, 1]),
        ("constant", {}, [0.5, 0.5]),
        ("constant", {"max_lr": 1.0, "warmup_steps": 2, "warmup_init_lr": 0.2}, [0.2, 0.6, 1, 1]),
        ("linear", {"max_lr": 1.0, "min_lr": 0.2, "warmup_steps": 2, "decay_steps": 6},
         [0, 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", {"max_lr": 1.0, "decay_steps": 4},
         [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]),
        ("inverse-square-root", {"max_lr": 1.0, "min_lr": 0.6, "warmup_steps": 4,
                                 "decay_steps": 20},
         [0, 0.25, 0.5, 0.75, 1, math.sqrt(4 / 5), math.sqrt(4 / 6)]),
        ("WSD", {"max_lr": 1.0, "warmup_steps": 1, "decay_steps": 5, "wsd_decay_steps": 2,
                 "wsd_decay_style": "linear"}, [0, 1, 1, 1, 0.5, 0, 0]),
    ],
)  # fmt: skip
def test_the_curve_equals_the_one_computed_by_hand(name, params, expected):
    assert curve(name, params, len(expected)) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("style", "halfway"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * math.sqrt(0.5) - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_the_decay_of_wsd_goes_from_max_to_min_in_its_style(style, halfway):
    params = WsdParams(
        max_lr=3.0, min_lr=1.0, decay_steps=10, wsd_decay_steps=4, wsd_decay_style=style
    )
    assert [params.rate(step, 0.0) for step in (6, 8, 10)] == pytest.approx(
        [3, 1 + 2 * halfway, 1], rel=1e-12
    )


def test_one_cycle_moves_adams_beta1_opposite_to_the_rate():
    optimizer = adam()
    schedule = build(optimizer, "OneCycle", {**CYCLE, "decay_step_size": 2,
                                                      "decay_mom_rate": 0.1})  # fmt: skip
    seen = []
    for _ in range(7):
        seen.append(optimizer.param_groups[0]["betas"])
        schedule.end_step()
    # DeepSpeed's very first step has the smallest momentum, before the cycle begins.
    assert [beta1 for beta1, _ in seen] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.945, 0.99])
    assert {beta2 for _, beta2 in seen} == {0.99}


def test_one_cycle_keeps_the_betas_if_configured_so_or_if_there_are_none(caplog):
    optimizer = adam()
    build(optimizer, "OneCycle", {**CYCLE, "cycle_momentum": False})
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], momentum=0.9)
    build(sgd, "OneCycle", CYCLE)
    assert "betas" not in sgd.param_groups[0]
    assert "cycle_momentum has no effect" in caplog.text


@pytest.mark.parametrize(
    ("name", "params", "which"),
    [
        ("cosine", {"warmup_steps": 2}, "the first epoch has the learning rate 0"),
        ("WarmupLR", {"warmup_num_steps": 3}, "each of the first 2 epochs has the learning rate 0"),
        ("cosine", {"warmup_steps": 2, "warmup_init_lr": 1e-4}, None),
        ("cosine", {}, None),
    ],
)
def test_an_epoch_with_rate_0_causes_a_warning(caplog, name, params, which):
    section = load(
        {
            "train_batch_size": 1,
            "scheduler": {"type": name, "by": "epoch", "params": params},
            "training": {"epochs": 9},
        }
    ).scheduler
    build_schedule(adam(), section, RunLength(epochs=9))
    assert (which in caplog.text) if which else not caplog.text


def test_all_groups_get_the_rate_and_a_loaded_state_continues_the_curve():
    first = build(adam(groups=2), "cosine", {"decay_steps": 9})
    for _ in range(4):
        first.end_step()
    second = build(adam(groups=2), "cosine", {"decay_steps": 9})
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    assert second.get_last_lr() == pytest.approx(2 * [0.25 * (1 + math.cos(math.pi * 4 / 9))])


def test_the_length_of_the_run_is_the_default_of_the_decay():
    assert curve("linear", {}, 5, train_steps=4) == pytest.approx([0.5, 0.375, 0.25, 0.125, 0])
    assert curve("linear", {"decay_steps": 2}, 3, train_steps=4) == pytest.approx([0.5, 0.25, 0])
    assert curve("WarmupLR", {"warmup_num_steps": 2}, 4, train_steps=4)[-1] == 0.5


def test_a_schedule_by_epoch_advances_at_the_end_of_each_epoch():
    section = SchedulerSection(type="linear", params=DecayParams(), by="epoch")
    schedule = build_schedule(adam(), section, RunLength(steps=100, epochs=4))
    seen = []
    for _ in range(5):
        schedule.end_step()
        seen.append(schedule.get_last_lr()[0])
        schedule.end_epoch()
    assert seen == pytest.approx([0.5, 0.375, 0.25, 0.125, 0])
    assert schedule.state_dict() == {"epoch": 5}
    by_step = build(adam(), "linear", {"decay_steps": 4})
    by_step.end_epoch()
    assert by_step.get_last_lr() == [0.5]
    with pytest.raises(CheckpointError, match=r"counts epochs, and scheduler\.by is"):
        by_step.load_state_dict(schedule.state_dict())


def test_a_length_that_is_not_known_is_refused_if_the_schedule_needs_it():
    section = SchedulerSection(type="cosine", params=DecayParams())
    with pytest.raises(ConfigError) as caught:
        build_schedule(adam(), section, RunLength(epochs=3))
    assert str(caught.value) == (
        "scheduler.params.decay_steps is missing, and its default, the length of the run, is not "
        "known: training_data has no length, or initialize() did not get it. Set the key, or "
        'scheduler.by "epoch" and training.epochs'
    )
    assert caught.value.on_every_rank


def test_last_batch_iteration_starts_in_the_middle():
    params = {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert curve("WarmupLR", {**params, "last_batch_iteration": -1}, 3) == [0, 0, 0.25]
    assert curve("WarmupLR", {**params, "last_batch_iteration": 1}, 1) == [0.25]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmpLR", {}, "scheduler.type 'WarmpLR' is not known; did you mean 'WarmupLR'?"),
        ("WarmupLR", {"warmup_steps": 3}, "unknown key 'scheduler.params.warmup_steps'"),
        ("cosine", {"decay_step": 3}, "did you mean 'decay_steps'?"),
        ("OneCycle", {}, "scheduler.params.cycle_min_lr is missing"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps is missing"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps must be an integer >= 0, not -1"),
        ("WarmupLR", {"warmup_type": "exp"}, 'must be "log" or "linear", not "exp"'),
        ("linear", {"decay_steps": 3, "warmup_steps": 3},
         "decay_steps (3) must be above the length of the warm-up (3)"),
        ("WSD", {"decay_steps": 8, "warmup_steps": 3}, "wsd_decay_steps is missing"),
        ("WSD", {"decay_steps": 8, "warmup_steps": 3, "wsd_decay_steps": 6},
         "wsd_decay_steps (6) must be at most decay_steps minus the warm-up (5)"),
    ],
)  # fmt: skip
def test_invalid_parameters_of_a_schedule_are_refused_by_the_name_of_their_key(
    name, params, message
):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(adam(), name, params)


def test_the_case_of_the_name_of_a_schedule_is_ignored():
    assert curve("COSINE", {"decay_steps": 4}, 1) == curve("cosine", {"decay_steps": 4}, 1)


# Schedules in samples


def sample_section(name="cosine", params=None, **training):
    config = {
        "train_batch_size": 4,
        "scheduler": {"type": name, "params": params or {}},
        "training": training,
    }
    return load(config).scheduler


def test_a_schedule_in_samples_advances_by_the_samples_of_each_step():
    params = {"warmup_samples": 8, "decay_samples": 40, "min_lr": 0.01, "max_lr": 0.1}
    section = sample_section("cosine", params)
    assert section.by == "sample"
    schedule, formula, consumed = build_schedule(adam(), section), megatron("cosine"), 0
    for samples in (4, 4, 8, 12, 12, 16):
        assert schedule.get_last_lr() == [formula(consumed)]
        schedule.end_step(samples)
        schedule.end_epoch()
        consumed += samples
    assert schedule.state_dict() == {"sample": consumed}


def megatron(style, **more):
    params = {"max_lr": 0.1, "min_lr": 0.01, "warmup_steps": 8, "decay_steps": 40, **more}
    return partial(PARAMS[style](**params).rate, lr=0.0)


def test_train_samples_alone_make_a_schedule_of_megatron_count_samples():
    section = sample_section("Cosine", train_samples=42)
    assert section.by == "sample"
    length = RunLength(steps=10, samples=42)
    assert section.arguments(length)["decay_steps"] == 42
    assert sample_section("cosine", {"warmup_steps": 3}, train_samples=42).by == "step"
    assert sample_section("WarmupDecayLR", train_samples=42).by == "step"
    assert sample_section("cosine", train_steps=42).by == "step"


def test_wsd_takes_the_length_of_its_tail_in_samples():
    section = sample_section("WSD", {"wsd_decay_samples": 10, "max_lr": 0.1}, train_samples=50)
    rate = build_schedule(adam(), section, RunLength(samples=50))._rates[0]
    assert rate(40) == 0.1
    assert rate(45) == pytest.approx(0.1 * (2 * 0.5**0.5 - 1))


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (
            {"type": "cosine", "params": {"warmup_samples": 3, "decay_steps": 9}},
            "scheduler.by is 'sample', and scheduler.params.decay_steps is a length in steps: give "
            "decay_samples, or change scheduler.by; all lengths of a schedule have one unit",
        ),
        (
            {"type": "cosine", "by": "step", "params": {"decay_samples": 9}},
            "scheduler.by is 'step', and scheduler.params.decay_samples is a length in samples: "
            "give decay_steps",
        ),
        (
            {"type": "WarmupLR", "by": "sample"},
            "scheduler.by is 'sample', and WarmupLR does not count samples: set it to 'step', or "
            "use constant, linear, cosine, inverse-square-root, WSD",
        ),
        (
            {"by": "sample"},
            "scheduler.by is 'sample', and the schedule of initialize() does not count samples",
        ),
        (
            {"type": "linear", "by": "sample"},
            "scheduler.params.decay_steps is missing, and so is training.train_samples, its "
            "default: set one of them",
        ),
        (
            {"type": "linear", "params": {"warmup_samples": 9, "warmup_fraction": 0.1}},
            "scheduler.params.warmup_samples and scheduler.params.warmup_fraction are both given",
        ),
    ],
)
def test_lengths_of_two_units_are_refused(scheduler, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load({"train_batch_size": 4, "scheduler": scheduler})
