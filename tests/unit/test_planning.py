"""The arithmetic under `plan`: what is counted, and as what."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.config import load
from pipemega.errors import ConfigError
from pipemega.mesh import Axis
from pipemega.planning.kernels import KernelsOf
from pipemega.planning.meter import Meter
from pipemega.planning.quantities import parse_bytes, show_bytes, show_count, show_time
from pipemega.planning.report import Request, draw_up
from pipemega.tensor_parallel.collectives import (
    gather_sequence,
    reduce_from_tensor,
    reduce_scatter_sequence,
)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_counts_once_and_as_long_as_it_lives(device: str) -> None:
    there = torch.empty(100, device=device)
    with Meter([there]) as meter:
        x = torch.empty(10, 10, device=device)
        y = x.t().flatten()[:3]  # a view of a copy
        assert meter.now == 2 * 400
        del x
        assert meter.now == 400
        there.view(10, 10).add_(1)
        assert meter.now == 400
        del y
        assert (meter.now, meter.peak) == (0, 800)
        meter.restart()
        assert meter.peak == 0


def test_arithmetic_is_counted_as_the_monitor_counts_it() -> None:
    with Meter() as meter, KernelsOf("cuda"):
        torch.empty(8, 16, device="meta") @ torch.empty(16, 4, device="meta")
        assert meter.flops == 2 * 8 * 16 * 4
        q = torch.empty(2, 4, 32, 16, dtype=torch.bfloat16, device="meta")
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        # Two products of 32 x 16 x 32 per head, half of each masked.
        assert meter.flops == 2 * 8 * 16 * 4 + 2 * 4 * (2 * 2 * 32 * 16 * 32) / 2


def kept(device: Any, function: Any, x: Tensor) -> int:
    """Bytes that live for backward beside `x`, without the output."""
    with Meter([x]) as meter, KernelsOf(device):
        y = function(x)
        size = meter.now - y.nbytes
        del y
        return size


def attention(qkv: Tensor) -> Tensor:
    q, k, v = (part.movedim(2, 1) for part in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_fused_attention_keeps_no_scores_on_either_device() -> None:
    qkv = torch.empty(2, 64, 3, 4, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    logsumexp = 2 * 4 * 64 * 4
    assert kept("cuda", attention, qkv) - logsumexp <= 64
    assert kept("cpu", attention, qkv) - logsumexp <= 64
    assert kept("cuda", attention, qkv.detach().float().requires_grad_()) - logsumexp <= 64


def test_dropout_keeps_a_byte_an_element_on_cuda_and_a_number_on_a_cpu() -> None:
    x = torch.empty(8, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert kept("cuda", lambda x: F.dropout(x, 0.1), x) == 64
    assert kept("cpu", lambda x: F.dropout(x, 0.1), x) == 128
    assert kept("cuda", lambda x: F.dropout(x, 0.0) * 1, x) == 0


def test_rms_norm_keeps_a_number_a_row_on_cuda() -> None:
    norm = nn.RMSNorm(16, device="meta", dtype=torch.bfloat16)
    x = torch.empty(8, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert kept("cuda", norm, x) == 8 * 4
    assert kept("cpu", norm, x) > 8 * 16 * 4


def test_a_tensor_axis_on_paper_gives_shapes_and_asks_nobody() -> None:
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


def memory(**changes: Any) -> Any:
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "mesh": {"pipeline": 2},
        "model": MODEL,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    report = draw_up(Request(load({**config, **changes})))
    return report, report.outcome.memory[0].footprint


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [("AdamW", 2), ("Adagrad", 1), ("SGD", 0), ("Lamb", 2), ("RMSprop", 1), ("Adadelta", 2)],
)
def test_the_optimizers_state_is_that_of_its_own_step(kind: str, numbers: int) -> None:
    for mesh in ({"pipeline": 2}, {"pipeline": 2, "tensor": 2}):
        optimizer = {"type": kind, "params": {"lr": 0.1}}
        report, footprint = memory(optimizer=optimizer, mesh=mesh)
        assert footprint.exact
        assert report.notes == ()
        # Beside them a count of steps for each parameter.
        counted = footprint.optimizer - 4 * numbers * footprint.parameters
        assert 0 <= counted <= 4 * 64


def test_zero_divides_masters_and_state_by_the_data_ranks_and_the_rest_by_nothing() -> None:
    parts: dict[int, Any] = {}
    for data in (1, 2, 4):
        report, parts[data] = memory(
            bf16={"enabled": True},
            zero_optimization={"stage": 1, "reduce_bucket_size": 4000},
            mesh={"pipeline": 2, "data": data},
        )
    for data in (2, 4):
        for part in ("masters", "optimizer"):
            exact = getattr(parts[1], part) / data
            # Equal slices, padding in them.
            assert 0 <= getattr(parts[data], part) - exact < 0.1 * exact
        for part in ("weights", "gradients"):
            whole = getattr(parts[1], part)
            assert 0 <= getattr(parts[data], part) - whole < 0.1 * whole
    assert any("2 + 4 + 12 bytes a parameter" in note for note in report.notes)


@pytest.mark.parametrize("half", [False, True])
def test_what_lies_on_the_host_takes_up_no_device(half: bool) -> None:
    there = {"offload_optimizer": {"device": "cpu"}}
    changes = {"bf16": {"enabled": half}}
    _, kept = memory(**changes)
    _, moved = memory(zero_optimization=there, **changes)
    assert (moved.masters, moved.optimizer) == (0, 0)
    # Masters, or weights to step on, gradients brought there, and the state.
    assert moved.host == kept.optimizer + 2 * 4 * moved.parameters
    assert moved.total == kept.weights + kept.gradients
    on_a_cpu, _ = memory(zero_optimization=there, mesh={"pipeline": 2, "device": "cpu"}, **changes)
    assert on_a_cpu.outcome.memory[0].footprint.host == 0


def test_a_state_that_could_not_be_counted_is_called_estimated() -> None:
    report, footprint = memory(optimizer={"type": "Adafactor", "params": {"lr": 0.1}})
    assert not footprint.exact
    assert report.notes == ("the state of Adafactor is estimated: its step asks for numbers",)


def test_what_a_plan_assumes_is_said() -> None:
    report, footprint = memory(optimizer=None, pipeline={"partition": "profile"})
    assert footprint.optimizer == 0
    profile, optimizer = report.notes
    assert profile.startswith("pipeline.partition 'profile' measures the layers when the run")
    assert optimizer.startswith("the config has no section 'optimizer'")


def test_more_tensor_ranks_divide_what_is_cut_and_sequence_parallelism_the_rest() -> None:
    held = {}
    for name, mesh in {
        "1": {"pipeline": 2},
        "2": {"pipeline": 2, "tensor": 2},
        "2 sp": {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
    }.items():
        report, _ = memory(mesh=mesh)
        held[name] = report.outcome.layout.costs[0].held
    assert held["2 sp"] < held["2"] < held["1"]
    assert held["2 sp"] < 0.6 * held["1"], "all but tokens and masks of them is cut"


def test_planning_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    memory()
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
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_size_that_is_none_is_refused_with_examples() -> None:
    with pytest.raises(ConfigError, match=r"'80' is no size: write 80GB, 79.2GiB, or a device"):
        parse_bytes("80")


def test_sizes_are_shown_with_three_digits() -> None:
    assert [show_bytes(n) for n in (12, 8_388_608, 1.5e12)] == ["12 B", "8.39 MB", "1.50 TB"]
    assert [show_time(t) for t in (0.0123, 3.5, 120)] == ["12.3 ms", "3.50 s", "120 s"]
    assert [show_count(n) for n in (999, 1_315_723_264)] == ["999", "1.32 B"]
