"""The optimizer step on several ranks against the step of the unsplit model in one process."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from pipemega.config.sections.optimizer_section import PARAMS
from pipemega.config.sections.scheduler_section import DecayParams, SchedulerSection
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.errors import CheckpointError, LossScaleError, NonFiniteError, PipelineError
from pipemega.kernels import Kernels
from pipemega.optimizer import (
    ModelParams,
    OptimizerStep,
    PlainMasterParams,
    StepSettings,
    ZeroMasterParams,
    build_optimizer,
    build_schedule,
    parameter_groups,
)
from pipemega.optimizer.gradients import DataReduction
from pipemega.optimizer.mixed_precision import DynamicLossScale, LossScale, Precision
from tests.ranks.logical_model import local_model, mesh_of, whole_gradient, whole_parameters

MESHES = [
    sizes for sizes in itertools.product((1, 2), repeat=3) if 2 <= math.prod(sizes) <= 4
]  # (pipeline, data, tensor)
CPU = Kernels.detect("cpu")
OPTIMIZERS = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    "Lamb": {"lr": 0.01, "weight_decay": 0.1},
}
ZERO = partial(ZeroMasterParams, reduce_bucket_size=64)
BF16 = Precision(torch.bfloat16, skip_nonfinite=True)
FP16 = Precision(torch.float16, skip_nonfinite=True)


def build_step(
    named, mesh, name="AdamW", precision=None, params=None, kind=PlainMasterParams, **settings
):
    """Build masters, optimizer and step as the engine does."""
    precision = precision or Precision()
    model = ModelParams(named, settings.pop("tied", {}), num_layers=3)
    rules = StepSettings(settings.pop("clip", 0.0), precision.skip_nonfinite)
    masters = kind(model, mesh, precision=precision, reduction=settings.pop("reduction", None))
    optimizer = build_optimizer(
        name,
        PARAMS[name](**(params or OPTIMIZERS[name])),
        parameter_groups(masters.named.items()),
        kernels=CPU,
        tensor=mesh.tensor,
        shard_axis=masters.shard_axis,
    )
    return OptimizerStep(optimizer, masters, rules, **settings)


def loss_of(mesh, *values):
    """Return `values` on the ranks that hold the loss, zeros on all others."""
    holds = mesh.pipeline.rank == mesh.pipeline.size - 1 and mesh.tensor.rank == 0
    return values if holds else tuple(0 for _ in values)


def train_and_compare_with_whole(sizes, name, clip, kind=PlainMasterParams):
    mesh = mesh_of(*sizes)
    model = local_model(mesh)
    step = build_step(model.named, mesh, name, tied=model.tied, clip=clip, kind=kind)
    whole = whole_parameters()
    reference = build_optimizer(
        name, PARAMS[name](**OPTIMIZERS[name]), parameter_groups(whole.items()), kernels=CPU
    )
    reports = []
    for number in range(3):
        for key, parameter in whole.items():
            each = [whole_gradient(key, d, number) for d in range(mesh.data.size)]
            parameter.grad = sum(each) / mesh.data.size
        norm = torch.nn.utils.clip_grad_norm_(whole.values(), clip or math.inf)
        reference.step()
        for key, parameter in model.named:
            gradient = whole_gradient(key, mesh.data.rank, number)
            step.gradients.add(parameter, model.contribution(key, gradient))
        # Two micro-batches of losses 2 and 4 on the first data rank, 3 and 5 on the second.
        report = step(*loss_of(mesh, 6.0 + 2 * mesh.data.rank, 2.0, 2))
        assert math.isclose(report.grad_norm, norm.item(), rel_tol=1e-12)
        assert report.loss == 3 + 0.5 * (mesh.data.size - 1)
        assert not report.skipped
        reports.append(report)
        for key, parameter in model.named:
            expected = model.local(key, whole[key].detach())
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-13)
    return reports


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_three_steps_on_any_mesh_equal_those_of_the_unsplit_model(pool, sizes, name, clip):
    reports = pool.run(math.prod(sizes), train_and_compare_with_whole, sizes, name, clip)
    # Bitwise equal on all ranks, otherwise they would diverge.
    assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 1), (1, 2, 2), (1, 3, 1), (1, 4, 1)], ids=str)
def test_zero_slices_are_updated_like_the_unsplit_model(pool, sizes, name, clip):
    reports = pool.run(math.prod(sizes), train_and_compare_with_whole, sizes, name, clip, ZERO)
    assert all(report == reports[0] for report in reports)


def step_with_token_weights(weights, reduction):
    mesh = mesh_of(1, len(weights), 1)
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    step = build_step([("w", weight)], mesh, "SGD", reduction=DataReduction(reduction))
    # Each token's loss is w times its value; micro-batches differ in how many tokens count.
    mine = weights[mesh.data.rank]
    tokens = [[1.0 + mesh.data.rank + i] * count for i, count in enumerate(mine)]
    losses = [sum((weight * value).sum() for value in values) for values in tokens if values]
    for loss in losses:
        (loss / len(mine)).backward()
    report = step(sum(losses, torch.zeros(())), float(sum(mine)), len(mine))
    return report, weight.tolist()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_each_token_has_the_same_weight_in_any_micro_batch_and_rank(pool, reduction):
    weights = [[3, 1], [0, 5]]
    results = pool.run(2, step_with_token_weights, weights, reduction)
    values = 3 * [1.0] + 1 * [2.0] + 5 * [3.0]
    mean = sum(values) / len(values)
    times = 2 if reduction == "sum" else 1
    for report, parameter in results:
        assert report.weight == 9
        assert report.loss == pytest.approx(3 * mean, rel=1e-12)
        assert report.grad_norm == pytest.approx(times * mean * math.sqrt(3), rel=1e-12)
        expected = 1 - 0.01 * (times * mean + 0.1)  # lr, and weight decay on 1
        assert parameter == pytest.approx(3 * [expected], rel=1e-12)


def overflow_on_one_rank(sizes, key, where, kind=PlainMasterParams):
    mesh = mesh_of(*sizes)
    model = local_model(mesh, torch.float32)
    step = build_step(
        model.named, mesh, precision=FP16, tied=model.tied, kind=kind,
        loss_scale=DynamicLossScale(2.0**8, hysteresis=1),
    )  # fmt: skip
    step.schedule = build_schedule(
        step.optimizer, SchedulerSection(type="linear", params=DecayParams(decay_steps=10))
    )
    reports = []
    for number in range(3):
        for name, parameter in model.named:
            gradient = whole_gradient(name, mesh.data.rank, number) * step.loss_scale.scale
            step.gradients.add(parameter, model.contribution(name, gradient))
        if number == 1:
            before = copy.deepcopy(
                (step.state_dict()["parameters"], step.schedule.state_dict(), model.named)
            )
            if mesh.rank == where:
                step.gradients.view(dict(model.named)[key]).view(-1)[0] = math.inf
        reports.append(step(*loss_of(mesh, 1.0, 1.0, 1)))
        if number == 1:
            after = (step.state_dict()["parameters"], step.schedule.state_dict(), model.named)
            assert_same(after, before)
            assert all(flat.count_nonzero() == 0 for flat in step.gradients.flats.values())
    return reports, step.skipped_steps, step.schedule.get_last_lr()


def assert_same(left, right):
    """Assert bitwise equality of nested values."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


@pytest.mark.parametrize(
    ("sizes", "key", "where", "kind"),
    [
        ((1, 2, 1), "layers.2.bias", 1, PlainMasterParams),
        ((2, 1, 1), "layers.0.norm", 0, PlainMasterParams),
        ((1, 1, 2), "layers.2.bias", 1, PlainMasterParams),  # a replica that another rank counts
        ((2, 1, 2), "layers.0.table", 3, PlainMasterParams),
        ((1, 2, 1), "layers.2.bias", 1, ZERO),  # in the slice of the other rank
        ((2, 2, 1), "layers.0.table", 3, ZERO),
        ((1, 2, 2), "layers.0.norm", 1, ZERO),
    ],
    ids=lambda value: "zero" if value is ZERO else getattr(value, "__name__", str(value)),
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_changes_nothing(
    pool, sizes, key, where, kind
):
    results = pool.run(math.prod(sizes), overflow_on_one_rank, sizes, key, where, kind)
    assert all(result == results[0] for result in results)
    reports, skipped, rate = results[0]
    assert [r.skipped for r in reports] == [r.overflow for r in reports] == [False, True, False]
    assert [r.loss_scale for r in reports] == [256, 256, 128]
    assert not math.isfinite(reports[1].grad_norm)
    assert skipped == 1
    assert rate == pytest.approx([0.01 * 0.8])  # two steps of the schedule, not three


def fp16_until_the_smallest_scale():
    mesh = mesh_of(1, 2, 1)
    weight = nn.Parameter(torch.ones(2))
    scaler = DynamicLossScale(2.0, hysteresis=1)
    step = build_step([("w", weight)], mesh, precision=FP16, loss_scale=scaler)
    for _ in range(2):
        if mesh.rank == 1:
            step.gradients.view(weight).fill_(math.nan)
        try:
            step(1.0, 1.0, 1)
        except LossScaleError as error:
            return str(error), step.gradients.view(weight).tolist(), weight.tolist()
    return None


def test_reaching_the_smallest_loss_scale_stops_all_ranks_with_the_same_history(pool):
    zero, one = pool.run(2, fp16_until_the_smallest_scale)
    assert zero == one
    assert "the scale was 2 from step 0, 1 from step 1" in zero[0]
    assert zero[1:] == ([0, 0], [1, 1])


def nan_in_fp32():
    mesh = mesh_of(1, 2, 1)
    weight = nn.Parameter(torch.ones(2))
    step = build_step([("w", weight)], mesh)
    if mesh.rank == 0:
        step.gradients.view(weight).fill_(math.nan)
    try:
        step(3.0, 1.0, 1)
    except PipelineError as error:
        return str(error), weight.tolist()
    return None


def test_a_nan_that_is_not_skipped_raises_the_same_error_on_all_ranks(pool):
    zero, one = pool.run(2, nan_in_fp32)
    assert zero == one
    message, parameter = zero
    assert "the gradient norm is nan at step 1 (loss 3). 2 of 2 ranks held a gradient" in message
    assert "training.on_nonfinite skips such steps, or rolls back to a checkpoint" in message
    assert parameter == [1, 1]


def single_step(dtype=torch.float64, **settings):
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    return weight, build_step([("w", weight)], Mesh.single(), **settings)


def test_a_batch_of_weight_zero_is_skipped_with_a_warning(caplog):
    weight, step = single_step()
    (weight * 0).sum().backward()
    report = step(0.0, 0.0, 4)
    assert report.skipped
    assert not report.overflow
    assert math.isnan(report.loss)
    assert weight.tolist() == [1, 1, 1]
    assert step.skipped_steps == 1
    assert "step 1 is skipped: the batch has no token that counts" in caplog.text


def test_a_nonfinite_loss_stops_or_skips_the_step_even_if_gradients_are_finite():
    weight, step = single_step()
    weight.sum().backward()
    with pytest.raises(NonFiniteError, match=r"loss is inf at step 1 \(gradient norm 1\.7"):
        step(torch.tensor(math.inf), 1.0, 1)
    assert weight.tolist() == [1, 1, 1]

    weight, step = single_step(torch.float32, precision=BF16)
    weight.sum().backward()
    report = step(torch.tensor(math.nan), 1.0, 1)
    assert report.skipped
    assert math.isnan(report.loss)
    assert weight.tolist() == [1, 1, 1]


def test_with_fp16_only_gradients_decide_whether_a_step_is_skipped():
    weight, step = single_step(loss_scale=LossScale(8.0))
    (8 * weight).sum().backward()
    report = step(torch.tensor(math.inf), 1.0, 1)
    assert not report.skipped
    assert (weight < 1).all()


def test_bf16_skips_a_step_with_nan_and_continues():
    weight, step = single_step(torch.float32, precision=BF16)
    (weight * math.nan).sum().backward()
    assert step(1.0, 1.0, 1).overflow
    assert weight.tolist() == [1, 1, 1]
    weight.sum().backward()
    assert not step(1.0, 1.0, 1).skipped
    assert (weight < 1).all()


def test_the_gradient_of_a_master_is_a_view_of_the_buffer():
    weight, step = single_step(torch.float32, precision=BF16)
    weight.sum().backward()
    step(1.0, 1.0, 1)
    (master,) = step.optimizer.param_groups[0]["params"]
    assert master.dtype == torch.float32
    assert master.grad is step.gradients.view(weight)
    assert torch.equal(weight, master.to(torch.bfloat16))


def test_updates_too_small_for_bf16_accumulate_in_the_masters():
    weight, step = single_step(torch.float32, precision=BF16, name="SGD", params={"lr": 0.01})
    for _ in range(100):
        (weight * 0.1).sum().backward()  # updates of 0.001; bf16 has no number between 0.9961 and 1
        step(1.0, 1.0, 1)
    (master,) = step.optimizer.param_groups[0]["params"]
    gradient = float(torch.tensor(0.1).bfloat16())
    assert master.tolist() == pytest.approx(3 * [1 - 100 * 0.01 * gradient], rel=1e-4)
    assert torch.equal(weight, master.to(torch.bfloat16))


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_may_be_summed_in_another_dtype_than_the_parameter(grad_dtype):
    weight, step = single_step(torch.float32, precision=Precision(grad_dtype=grad_dtype))
    for value in (1.0, 2.0):
        (weight * value).sum().backward()
    assert step.gradients.view(weight).dtype == grad_dtype
    assert step(1.0, 1.0, 1).grad_norm == pytest.approx(3 * math.sqrt(3))
    assert weight.dtype == torch.float32
    assert (weight < 1).all()


def test_the_loss_scale_does_not_change_the_parameters():
    results = []
    for scale in (1.0, 2.0**10):
        weight, step = single_step(
            torch.float32, precision=FP16, loss_scale=DynamicLossScale(scale), clip=0.5
        )
        for value in (1.0, 0.25):
            (weight * value * scale).sum().backward()
            report = step(1.0, 1.0, 1)
            assert report.loss_scale == scale
        results.append((weight.tolist(), report.grad_norm))
    assert results[0] == results[1]


def resume_from_state(sizes, name, precision):
    mesh = mesh_of(*sizes)

    def build():
        model = local_model(mesh, torch.float32)
        scaler = DynamicLossScale(4.0, window=2) if precision is FP16 else None
        step = build_step(
            model.named, mesh, name, precision, tied=model.tied, clip=0.5, loss_scale=scaler
        )
        step.schedule = build_schedule(
            step.optimizer, SchedulerSection(type="cosine", params=DecayParams(decay_steps=9))
        )
        return model, step

    def run(model, step, numbers):
        for number in numbers:
            for key, parameter in model.named:
                gradient = whole_gradient(key, mesh.data.rank, number) * step.loss_scale.scale
                step.gradients.add(parameter, model.contribution(key, gradient))
            step(*loss_of(mesh, 1.0, 1.0, 1))

    straight, straight_step = build()
    run(straight, straight_step, range(3))
    state = copy.deepcopy(straight_step.state_dict())
    held = {name: p.detach().clone() for name, p in straight.named}
    run(straight, straight_step, range(3, 6))

    resumed, resumed_step = build()
    with torch.no_grad():
        for key, parameter in resumed.named:
            parameter.copy_(held[key])
    resumed_step.load_state_dict(state)
    run(resumed, resumed_step, range(3, 6))
    assert_same(resumed_step.state_dict(), straight_step.state_dict())
    assert_same([p for _, p in resumed.named], [p for _, p in straight.named])
    return {key: sorted(entry) for key, entry in state["parameters"].items()}


@pytest.mark.parametrize("precision", [None, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_resumed_from_its_state_is_bitwise_the_same(pool, name, precision):
    stored = pool.run(4, resume_from_state, (2, 1, 2), name, precision)
    kept = {"SGD": ["momentum_buffer"]}.get(name, ["exp_avg", "exp_avg_sq", "step"])
    for entries in stored:
        for entry in entries.values():
            assert entry == (kept if precision is None else sorted([*kept, "master"]))
    assert set(stored[0]) == {"layers.0.table", "layers.0.norm", "layers.1.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries.pop("w"), "has no optimizer state for 'w'"),
        (lambda entries: entries["w"].pop("master"), "has no fp32 master weight of 'w'"),
        (
            lambda entries: entries["w"].update(exp_avg=torch.zeros(4)),
            r"checkpoint's exp_avg of 'w' has the shape \(4,\), and the parameter has \(3,\)",
        ),
    ],
)
def test_a_state_of_another_model_is_refused_by_name_and_changes_nothing(change, message):
    weight, step = single_step(torch.float32, precision=BF16)
    weight.sum().backward()
    step(1.0, 1.0, 1)
    before = copy.deepcopy(step.state_dict())
    state = copy.deepcopy(before)
    change(state["parameters"])
    with pytest.raises(CheckpointError, match=message):
        step.load_state_dict(state)
    assert_same(step.state_dict(), before)


def test_a_rank_without_trainable_parameters_can_step():
    step = build_step([], Mesh.single())
    report = step(2.0, 1.0, 1)
    assert (report.loss, report.grad_norm, report.skipped) == (2.0, 0.0, False)


def test_a_tied_parameter_on_one_rank_needs_no_group():
    weight = nn.Parameter(torch.ones(3))
    step = build_step([("w", weight)], Mesh.single(), tied={"w": Axis("tied")})
    weight.sum().backward()
    assert step(1.0, 1.0, 1).grad_norm == pytest.approx(math.sqrt(3))
