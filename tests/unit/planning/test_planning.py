"""The counting behind `plan`: bytes, FLOPs, optimizer state, sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.config import load
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from pipemega.layer_costs.tensor_meter import DeviceKernels, TensorMeter
from pipemega.planning.estimate import Request, estimate
from pipemega.planning.report import step_summary
from pipemega.printing import (
    parse_bytes,
    show_bytes,
    show_count,
    show_duration,
    show_percent,
    show_time,
    three,
)
from pipemega.tensor_parallel.collectives import (
    gather_sequence,
    reduce_from_tensor,
    reduce_scatter_sequence,
)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_counts_once_and_until_it_is_freed(device: str) -> None:
    existing = torch.empty(100, device=device)
    with TensorMeter([existing]) as meter:
        x = torch.empty(10, 10, device=device)
        y = x.t().flatten()[:3]  # a view of a copy
        assert meter.now == 2 * 400
        del x
        assert meter.now == 400
        existing.view(10, 10).add_(1)
        assert meter.now == 400
        del y
        assert (meter.now, meter.peak) == (0, 800)
        meter.reset_peak()
        assert meter.peak == 0


def test_flops_are_counted_as_in_the_monitor() -> None:
    with TensorMeter() as meter, DeviceKernels("cuda"):
        torch.empty(8, 16, device="meta") @ torch.empty(16, 4, device="meta")
        assert meter.flops == 2 * 8 * 16 * 4
        q = torch.empty(2, 4, 32, 16, dtype=torch.bfloat16, device="meta")
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        # Two products of 32 x 16 x 32 per head, half of each masked.
        assert meter.flops == 2 * 8 * 16 * 4 + 2 * 4 * (2 * 2 * 32 * 16 * 32) / 2


def test_products_in_place_count_as_others() -> None:
    """The weight gradient of a head cut over the ranks had no FLOPs."""
    x, y, z = (torch.empty(size, device="meta") for size in ((3, 8, 16), (3, 16, 4), (3, 8, 4)))
    with TensorMeter() as meter:
        z[0].addmm_(x[0], y[0])
        assert meter.flops == 2 * 8 * 16 * 4
        z.baddbmm_(x, y)
        assert meter.flops == 4 * 2 * 8 * 16 * 4
        z.add_(z)
    assert meter.flops == 4 * 2 * 8 * 16 * 4


def saved_bytes(device: Any, function: Any, x: Tensor) -> int:
    """Return the bytes saved for backward, without `x` and the output."""
    with TensorMeter([x]) as meter, DeviceKernels(device):
        y = function(x)
        size = meter.now - y.nbytes
        del y
        return size


def attention(qkv: Tensor) -> Tensor:
    q, k, v = (part.movedim(2, 1) for part in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_fused_attention_saves_no_scores() -> None:
    qkv = torch.empty(2, 64, 3, 4, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    logsumexp = 2 * 4 * 64 * 4
    assert saved_bytes("cuda", attention, qkv) - logsumexp <= 64
    assert saved_bytes("cpu", attention, qkv) - logsumexp <= 64
    assert saved_bytes("cuda", attention, qkv.detach().float().requires_grad_()) - logsumexp <= 64


def test_dropout_saves_one_byte_per_element_on_cuda_and_one_number_on_cpu() -> None:
    x = torch.empty(8, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert saved_bytes("cuda", lambda x: F.dropout(x, 0.1), x) == 64
    assert saved_bytes("cpu", lambda x: F.dropout(x, 0.1), x) == 128
    assert saved_bytes("cuda", lambda x: F.dropout(x, 0.0) * 1, x) == 0


def test_rms_norm_saves_one_number_per_row_on_cuda() -> None:
    norm = nn.RMSNorm(16, device="meta", dtype=torch.bfloat16)
    x = torch.empty(8, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert saved_bytes("cuda", norm, x) == 8 * 4
    assert saved_bytes("cpu", norm, x) > 8 * 16 * 4


def test_a_tensor_axis_without_a_group_returns_shapes_on_the_meta_device() -> None:
    axis = Axis("tensor", (0, 1, 2, 3), 1)
    x = torch.empty(2, 8, 4, device="meta", requires_grad=True)
    assert gather_sequence(x, axis).shape == (2, 32, 4)
    assert reduce_scatter_sequence(x, axis).shape == (2, 2, 4)
    summed = reduce_from_tensor(x, axis)
    summed.sum().backward()
    assert summed.shape == x.shape
    assert x.grad is not None


MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 256,
}


def plan(**changes: Any) -> Any:
    """Return the report and the footprint of pipeline rank 0."""
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "mesh": {"pipeline": 2},
        "model": MODEL,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    report = estimate(Request(load({**config, **changes})))
    return report, report.prediction.memory[0].footprint


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [("AdamW", 2), ("Adagrad", 1), ("SGD", 0), ("Lamb", 2), ("RMSprop", 1), ("Adadelta", 2)],
)
def test_optimizer_state_is_counted_from_a_step_of_the_optimizer(kind: str, numbers: int) -> None:
    for mesh in ({"pipeline": 2}, {"pipeline": 2, "tensor": 2}):
        optimizer = {"type": kind, "params": {"lr": 0.1}}
        report, footprint = plan(optimizer=optimizer, mesh=mesh)
        assert footprint.exact
        assert report.notes == ()
        # In addition each parameter has a step counter.
        counted = footprint.optimizer - 4 * numbers * footprint.parameters
        assert 0 <= counted <= 4 * 64


def test_zero_divides_only_masters_and_optimizer_state_by_the_data_ranks() -> None:
    parts: dict[int, Any] = {}
    for data in (1, 2, 4):
        report, parts[data] = plan(
            bf16={"enabled": True},
            zero_optimization={"stage": 1, "reduce_bucket_size": 4000},
            mesh={"pipeline": 2, "data": data},
            # The embedding and half of the blocks on the first rank.
            pipeline={"partition": "parameters"},
        )
    for data in (2, 4):
        for part in ("masters", "optimizer"):
            exact = getattr(parts[1], part) / data
            # Slices are equal and may be padded.
            assert 0 <= getattr(parts[data], part) - exact < 0.1 * exact
        for part in ("weights", "gradients"):
            whole = getattr(parts[1], part)
            assert 0 <= getattr(parts[data], part) - whole < 0.1 * whole
    assert any("2 + 4 + 12: weight + gradient + optimizer" in note for note in report.notes)


@pytest.mark.parametrize("half", [False, True])
def test_an_offloaded_optimizer_takes_host_memory_instead_of_device_memory(half: bool) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}}
    changes = {"bf16": {"enabled": half}}
    _, on_device = plan(**changes)
    _, offloaded = plan(zero_optimization=zero, **changes)
    assert (offloaded.masters, offloaded.optimizer) == (0, 0)
    # The state, fp32 masters and their gradients with padding, and 16-bit parameters.
    exact = on_device.optimizer + (2 * 4 + 2 * half) * offloaded.parameters
    assert 0 <= offloaded.host - exact < 0.05 * exact
    assert offloaded.total == on_device.weights + on_device.gradients
    on_a_cpu, _ = plan(zero_optimization=zero, mesh={"pipeline": 2, "device": "cpu"}, **changes)
    assert on_a_cpu.prediction.memory[0].footprint.host == 0


@pytest.mark.parametrize("half", [False, True])
def test_a_background_save_takes_the_memory_of_the_share_of_each_rank(half: bool) -> None:
    per_rank = {}
    for data, stage in ((1, 0), (2, 0), (2, 1)):
        zero = {"stage": stage, "reduce_bucket_size": 4000}
        mesh = {"pipeline": 2, "data": data}
        changes = {"bf16": {"enabled": half}, "mesh": mesh, "zero_optimization": zero}
        changes["pipeline"] = {"partition": "parameters"}
        report, found = plan(checkpoint={"async": True}, **changes)
        per_rank[data, stage] = found.staging
        assert "for the copy of a checkpoint (checkpoint.async)" in step_summary(report)["host"]
        assert plan(**changes)[1].staging == 0
        assert found.staging == pytest.approx(per_rank[1, 0] / data, rel=0.05)
    # Parameters or masters in fp32, and the state of Adam.
    _, alone = plan(bf16={"enabled": half}, pipeline={"partition": "parameters"})
    assert per_rank[1, 0] == 4 * alone.parameters + alone.optimizer


def test_optimizer_state_that_cannot_be_counted_is_noted_as_an_estimate() -> None:
    report, footprint = plan(optimizer={"type": "Adafactor", "params": {"lr": 0.1}})
    assert not footprint.exact
    (note,) = report.notes
    assert note.startswith("the optimizer state of Adafactor is an estimate: its step reads")


def test_assumptions_are_noted() -> None:
    report, footprint = plan(optimizer=None, pipeline={"partition": "profile"})
    assert footprint.optimizer == 0
    profile, optimizer = report.notes
    assert profile.startswith("pipeline.partition 'profile' measures the layers when the run")
    assert optimizer.startswith("the config has no section 'optimizer'")


def test_tensor_ranks_divide_activations_and_sequence_parallelism_divides_the_rest() -> None:
    held = {}
    for name, mesh in {
        "1": {"pipeline": 2},
        "2": {"pipeline": 2, "tensor": 2},
        "2 sp": {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
    }.items():
        report, _ = plan(mesh=mesh)
        held[name] = report.prediction.layout.costs[0].held
    assert held["2 sp"] < held["2"] < held["1"]
    assert held["2 sp"] < 0.6 * held["1"], "all activations but tokens and masks are divided"


def test_planning_does_not_change_the_random_state_of_the_caller() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plan()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("79.5 GiB", int(79.5 * 2**30)),
        ("H100-80GB", 80 * 10**9),
        ("512mb", 512 * 10**6),
    ],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_an_invalid_size_is_rejected_with_examples() -> None:
    with pytest.raises(ConfigError, match=r"'80' is not a size: write 80GB, 79.2GiB, or a device"):
        parse_bytes("80")


def test_sizes_are_formatted_with_three_digits() -> None:
    assert [show_bytes(n) for n in (12, 8_388_608, 1.5e12)] == ["12 B", "8.39 MB", "1.50 TB"]
    assert [show_time(t) for t in (0.0123, 3.5, 120)] == ["12.3 ms", "3.50 s", "120 s"]
    assert [show_count(n) for n in (999, 1_315_723_264)] == ["999", "1.32 B"]
    assert [three(n) for n in (0, 0.081234, 9.996, 99.95, 1234.5)] == [
        "0", "0.0812", "10.0", "100", "1,234"
    ]  # fmt: skip
    assert [show_duration(t) for t in (5, 90, 7300, 1e6)] == [
        "5.00 seconds", "1.50 minutes", "2.03 hours", "11.6 days"
    ]  # fmt: skip
    assert show_percent(0.0333) == "3.33%"
