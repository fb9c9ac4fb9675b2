"""The engine on one GPU, compared with the CPU, and without synchronization during a step.

Tests for bitwise equality use the math kernel of attention: the backward of the fused kernels has
no fixed order of additions.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipemega.engine.engine import Engine
from pipemega.errors import NonFiniteError
from pipemega.profiling.measured_costs import measured_costs
from tests.gpu.devices import ONE_DEVICE, one_gpu, only_on_a_gpu
from tests.ranks.training_runs import build, data, settings, train

pytestmark = [
    *one_gpu,
    # From the backward thread at its first matrix product.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

RECOMPUTE = ["none", "selective", "full"]
# Heads of 16 channels, which the fused kernels support.
WIDER: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 128}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def on(device: str, **changes: Any) -> dict[str, Any]:
    return settings(mesh={"device": device}, **changes)


def test_fp32_training_gives_the_losses_and_gradients_of_the_cpu() -> None:
    ours, theirs = (
        train(on(device, model=NO_DROPOUT), "float32", steps=5) for device in (ONE_DEVICE, "cpu")
    )
    for key in ("loss", "norm", "eval"):
        assert ours[key] == pytest.approx(theirs[key], rel=5e-4), key
    for name, gradient in theirs["gradients"][0].items():
        numpy.testing.assert_allclose(ours["gradients"][0][name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("position", ["learned_absolute", "rope"])
def test_the_loss_decreases_in_16_bit_precision(dtype: str, position: str) -> None:
    model = {**WIDER, **NO_DROPOUT, "position_embedding_type": position}
    engine = build(on(ONE_DEVICE, model=model, **{dtype: {"enabled": True}}))
    losses = [engine.train_batch(data(engine, 0)) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.dtype != torch.float32 for p in engine.module.parameters())


def test_the_norms_of_queries_and_keys_train_in_bf16_with_grouped_heads() -> None:
    model = {**WIDER, **NO_DROPOUT, "qk_layernorm": True, "embedding_norm": True}
    model |= {"num_query_groups": 2, "position_embedding_type": "rope", "squared_relu": True}
    engine = build(on(ONE_DEVICE, model=model, bf16={"enabled": True}))
    losses = [engine.train_batch(data(engine, 0)) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


def test_the_flops_profile_has_the_flops_of_the_cpu_and_times_of_the_stream() -> None:
    profiles = []
    for device in (ONE_DEVICE, "cpu"):
        section = {"enabled": True, "profile_step": 2}
        engine = build(on(device, model={**WIDER, **NO_DROPOUT}, flops_profiler=section))
        for step in range(2):
            engine.train_batch(data(engine, step))
        assert engine.steps.profiler is not None
        profile = engine.steps.profiler.profile
        assert profile is not None
        profiles.append(profile)
    ours, theirs = profiles
    assert [cost.flops for _, cost in ours.modules] == [cost.flops for _, cost in theirs.modules]
    (rank,) = ours.ranks
    assert all(cost.seconds > 0 for cost in rank.modules)
    assert 0 < rank.seconds["forward"] + rank.seconds["backward"] < rank.step


def test_an_fp16_overflow_skips_the_step_and_halves_the_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}
    engine = build(on(ONE_DEVICE, fp16=fp16))
    before = engine.parameter_state()
    for step in range(3):
        engine.train_batch(data(engine, step))
        report = engine.last_step
        assert report is not None
        assert (report.skipped, report.overflow) == (True, True)
        assert report.loss_scale == 2.0 ** (32 - step)
    after = engine.parameter_state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert engine.skipped_steps == 3


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_dropout_gives_bitwise_equal_gradients(recompute: str) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        kept, again, other = (
            train(on(ONE_DEVICE, model={**model, "recompute": mode}), "float32", steps=2)
            for mode, model in (("none", DROPOUT), (recompute, DROPOUT), ("none", NO_DROPOUT))
        )
    assert kept["loss"] == again["loss"]
    assert kept["loss"] != other["loss"]
    for first, second in zip(kept["gradients"], again["gradients"], strict=True):
        for name in first:
            numpy.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_dropout_of_fused_attention_uses_the_same_mask(recompute: str) -> None:
    kept, again = (
        train(
            on(ONE_DEVICE, model={**WIDER, **DROPOUT, "recompute": mode}, bf16={"enabled": True}),
            "float32",
            steps=1,
        )
        for mode in ("none", recompute)
    )
    assert again["loss"] == pytest.approx(kept["loss"], rel=1e-6)
    for name, gradient in kept["gradients"][0].items():
        # A different mask would change a gradient by about its own norm.
        difference = numpy.linalg.norm(again["gradients"][0][name] - gradient)
        assert difference <= 0.02 * numpy.linalg.norm(gradient), name


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_is_bitwise_equal(dtype: str, background: bool, tmp_path: Path) -> None:
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    config = on(ONE_DEVICE, model=DROPOUT, checkpoint={"async": background}, **precision)
    with sdpa_kernel(SDPBackend.MATH):
        first = build(config)
        for step in range(2):
            first.train_batch(data(first, step))
        first.save_checkpoint(tmp_path)
        drawn = torch.rand(3, device=ONE_DEVICE)
        losses = [first.train_batch(data(first, step)) for step in (2, 3)]
        first.finish_saving()

        second = build(config)
        second.load_checkpoint(tmp_path)
        assert torch.equal(torch.rand(3, device=ONE_DEVICE), drawn)
        assert [second.train_batch(data(second, step)) for step in (2, 3)] == losses
    ours, theirs = second.parameter_state(), first.parameter_state()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Make torch raise an error at a synchronization with the GPU."""
    if ONE_DEVICE != "cuda":
        yield
        return
    with warnings.catch_warnings():
        # torch warns that this mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@only_on_a_gpu
def test_a_synchronization_raises_in_sync_debug_mode() -> None:
    number = torch.ones((), device=ONE_DEVICE)
    with no_synchronization(), pytest.raises(RuntimeError, match="synchroniz"):
        number.item()


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_host_synchronizes_with_the_gpu_only_at_the_end_of_a_step(
    dtype: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    model = {**WIDER, **DROPOUT, "recompute": recompute}
    engine: Engine = build(on(ONE_DEVICE, model=model, **precision))
    # The first step allocates workspaces, handles and the optimizer state.
    engine.train_batch(data(engine, 0))
    run, results = engine.steps.executor.run, []

    def run_without_synchronization(*args: Any) -> Any:
        with no_synchronization():
            results.append(run(*args))
        return results[-1]

    monkeypatch.setattr(engine.steps.executor, "run", run_without_synchronization)
    engine.train_batch(data(engine, 1))
    assert len(results) == 1
    assert len(results[0].losses) == engine.batch.num_microbatches


@pytest.mark.parametrize("schedule", ["sequential", "zb-h1"])
def test_instruction_times_are_measured_without_synchronization(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = {"trace": {"steps": [2], "memory": True}}
    engine = build(on(ONE_DEVICE, pipeline={"schedule": schedule}, model=WIDER, monitor=monitor))
    engine.train_batch(data(engine, 0))
    run = engine.steps.executor.run

    def run_without_synchronization(*args: Any) -> Any:
        with no_synchronization():
            return run(*args)

    monkeypatch.setattr(engine.steps.executor, "run", run_without_synchronization)
    engine.train_batch(data(engine, 1))
    trace = engine.last_trace
    assert trace is not None
    assert trace.memory is not None
    rows = list(trace.rows(0))
    assert len(rows) == len(engine.plan.programs[0])
    assert all(row.begin <= row.ready <= row.end for row in rows)
    costs = measured_costs([trace])
    assert all(time > 0 for time in (*costs.forward, *costs.whole_backward))
    assert all(held > 0 for held in costs.held_after_forward)


def test_the_busy_time_of_a_rank_is_measured_without_synchronization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build(on(ONE_DEVICE, model=WIDER))
    run = engine.steps.executor.run

    def run_without_synchronization(*args: Any) -> Any:
        with no_synchronization():
            return run(*args)

    engine.train_batch(data(engine, 0))
    monkeypatch.setattr(engine.steps.executor, "run", run_without_synchronization)
    started = time.perf_counter()
    engine.train_batch(data(engine, 1))
    engine.train_batch(data(engine, 2))
    assert 0 < engine.work_seconds < time.perf_counter() - started


def test_nan_origin_and_replica_check_run_on_the_device() -> None:
    engine = build(on(ONE_DEVICE, model=WIDER))
    engine.check_replicas()
    weight = engine.steps.model.parameters["layers.3.mlp.up.weight"]
    weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"layer 3 'layers.3' \(Block\): output has") as caught:
        engine.train_batch(data(engine, 0))
    assert "its parameter 'mlp.up.weight' has 1 nan" in str(caught.value)
