"""Traced steps: rank 0 gets the times of all ranks, and training does not change."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.config.sections.monitor_sections import TraceSection
from pipemega.engine.engine import Engine
from pipemega.pipeline.plan.instructions import Kind
from pipemega.profiling.measured_costs import measured_costs
from pipemega.profiling.step_trace import Trace
from pipemega.profiling.step_tracer import Tracer
from pipemega.training import Trainer
from tests.ranks.pool import RankPool
from tests.sampling import some

NAP = 0.01


class Slow(nn.Module):
    """Linear layer that sleeps for `nap` seconds in forward and twice that in backward."""

    def __init__(self, nap: float = 0.0) -> None:
        super().__init__()
        self.linear, self.nap = nn.Linear(64, 64), nap

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.nap)
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(2 * self.nap))
        return y


def build(trace: Any = (), nap: float = 0.0, num_layers: int = 8, **changes: Any) -> Engine:
    net = PipelineModule(
        [LayerSpec(Slow, nap) for _ in range(num_layers)], loss_fn=nn.functional.mse_loss
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 6,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "monitor": {"trace": trace},
        **changes,
    }
    config["pipeline"] = {"partition": "uniform", **config.get("pipeline", {})}
    return pipemega.initialize(net, config)[0]


def batch(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return iter([torch.randn(2, 4, 64, generator=generator).unbind() for _ in range(6)])


def run(trace: Any, steps: int, changes: dict[str, Any]) -> tuple[list[float], list[str | None]]:
    """Return the losses, and the last trace after each step."""
    engine = build(trace, **changes)
    losses, traces = [], []
    for step in range(steps):
        losses.append(engine.train_batch(batch(step)))
        found = engine.last_trace
        traces.append(None if found is None else found.to_json())
    return losses, traces


LAYOUTS = {
    "1f1b": (2, {"mesh": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}}),
    "zb-v": (2, {"mesh": {"pipeline": 2}, "pipeline": {"schedule": "zb-v"}}),
    "zb-h1, 4 ranks": (4, {"mesh": {"pipeline": 4}, "pipeline": {"schedule": "zb-h1"}}),
    "post_validate": (
        2,
        {
            "mesh": {"pipeline": 2},
            "pipeline": {"schedule": "zb-h1", "optimizer_sync": "post_validate"},
        },
    ),
    "2 data ranks": (4, {"mesh": {"pipeline": 2, "data": 2}}),
    "no pipeline": (2, {"mesh": {"pipeline": 1, "data": 2}}),
}


@pytest.mark.parametrize("layout", some(LAYOUTS, 1, 4))
def test_configured_steps_are_traced_and_the_losses_do_not_change(
    pool: RankPool, layout: str
) -> None:
    world, changes = LAYOUTS[layout]
    results = pool.run(world, run, {"steps": [2], "every": 4, "memory": True}, 4, changes)
    plain = pool.run(world, run, [], 4, changes)
    assert [losses for losses, _ in results] == [losses for losses, _ in plain]
    assert all(trace is None for _, traces in plain for trace in traces)
    assert all(trace is None for _, traces in results[1:] for trace in traces)
    found = [None if text is None else Trace.from_json(text) for text in results[0][1]]
    assert [None if trace is None else trace.step for trace in found] == [None, 2, 2, 4]
    for trace in (found[1], found[3]):
        assert trace is not None
        check(trace)


def check(trace: Trace) -> None:
    """Each instruction has its times, and no result is used before it exists."""
    plan, ends = trace.plan, {}
    for rank in range(plan.num_ranks):
        for row in trace.rows(rank):
            assert row.begin <= row.ready <= row.end
            ends[row.step] = row.end
            if row.step.kind.is_message or plan.needs(row.step) is None:
                assert row.wait == 0.0
    assert set(ends) == set(plan.steps())
    assert min(trace.began) == 0.0
    assert trace.clock_error == 0.0
    for rank in range(plan.num_ranks):
        for row in trace.rows(rank):
            need = plan.needs(row.step)
            source = None if need is None else plan.compute_only().needs(row.step)
            if source is not None and plan.rank_of_stage[source.stage] != rank:
                assert ends[source] <= row.ready
    assert trace.timeline.makespan > 0
    for rank in range(plan.num_ranks):
        parts = trace.parts(rank)
        # The resolution of the clock, once for each number that was rounded.
        assert abs(sum(parts.values()) - trace.step_time(rank)) < 1e-9 * (len(ends) + 20)
        assert min(parts.values()) > -1e-6
        assert all(parts[name] > 0 for name in ("data", "compute", "gradient norm", "optimizer"))
        assert trace.timeline.busy(rank) < trace.step_time(rank) < trace.step_interval + 1e-9
    costs = measured_costs([trace])
    assert costs.num_stages == plan.num_stages
    if trace.memory is not None:
        # A linear layer keeps at least its input, [4, 64] floats.
        assert all(held >= 4 * 64 * 4 for held in costs.held_after_forward)
        assert all(0 < peak < 2**24 for peak in trace.timeline.peak)


def test_measured_times_match_the_sleeps(pool: RankPool) -> None:
    changes = {"mesh": {"pipeline": 2}, "nap": NAP, "num_layers": 2}
    text = pool.run(2, run, {"every": 2}, 2, changes)[0][1][1]
    trace = Trace.from_json(text)
    costs = measured_costs([trace])
    # A sleep is never too short, but may be longer on a busy machine.
    assert all(NAP <= time < 3 * NAP for time in costs.forward)
    assert all(2 * NAP <= time < 6 * NAP for time in costs.whole_backward)
    assert costs.message < NAP
    # 1F1B on two ranks: 6 micro-batches, and one more to fill and drain.
    assert 7 * 3 * NAP <= trace.timeline.makespan < 7 * 3 * NAP * 3
    assert trace.waited(0) >= 0.9 * 3 * NAP
    rank, row, need = trace.longest_waits(1)[0]
    assert need is not None
    assert need.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
    assert trace.plan.rank_of_stage[need.stage] != rank
    assert row.wait > 0.9 * NAP


def run_on_request() -> tuple[int | None, float | None]:
    engine = build(mesh={"pipeline": 2})
    engine.train_batch(batch(0))
    assert engine.last_timeline is None
    # What traces is loaded with the first request.
    assert engine.steps.tracer is None
    engine.trace_next_step()
    engine.train_batch(batch(1))
    engine.train_batch(batch(2))
    trace, timeline = engine.last_trace, engine.last_timeline
    return trace and trace.step, timeline and timeline.makespan


def test_trace_next_step_traces_the_next_step(pool: RankPool) -> None:
    (step, makespan), other = pool.run(2, run_on_request)
    assert step == 2
    assert makespan is not None
    assert math.isfinite(makespan)
    assert other == (None, None)


def run_with_clock_offset(ahead: int) -> str | None:
    """Run with different host names and with the clock of the second rank ahead."""
    engine = build(nap=NAP, mesh={"pipeline": 2}, num_layers=2)
    rank = engine.mesh.rank

    def clock() -> int:
        return time.perf_counter_ns() + ahead * rank

    steps, section = engine.steps, TraceSection(steps=(2,))
    tracer = Tracer(
        section,
        steps.mesh,
        steps.phases,
        lambda: steps.executor.plan,
        clock=clock,
        host=f"host {rank}",
    )
    steps.features.insert(0, tracer)
    engine.train_batch(batch(0))
    engine.train_batch(batch(1))
    return tracer.last_trace and tracer.last_trace.to_json()


@pytest.mark.parametrize("ahead", [-(10**15), 10**11])
def test_the_clocks_of_two_machines_are_synchronized(pool: RankPool, ahead: int) -> None:
    text, _ = pool.run(2, run_with_clock_offset, ahead)
    trace = Trace.from_json(text)
    assert 0 < trace.clock_error < NAP
    timeline = trace.timeline
    # F0@1 begins when F0@0 has ended, which took one nap from the start.
    assert NAP - trace.clock_error < timeline.start[1][0] < 3 * NAP + trace.clock_error
    assert 7 * 3 * NAP <= timeline.makespan < 7 * 3 * NAP * 3


def run_trainer(folder: str) -> list[str]:
    engine = build(
        [2],
        mesh={"pipeline": 2},
        checkpoint={"save": folder, "interval": 0},
        training={"train_steps": 3, "progress": False},
        steps_per_print=None,
    )
    trainer = Trainer(engine)
    data = map(batch, range(3))
    real = engine.train_batch
    engine.train_batch = lambda **_: real(next(data))  # type: ignore[method-assign, assignment, misc]
    for _ in range(3):
        trainer.train_step()
    engine.run.release()
    return sorted(path.name for path in Path(folder, "timelines").iterdir())


def test_the_trainer_writes_files_and_a_record_of_a_traced_step(
    pool: RankPool, tmp_path: Path
) -> None:
    names, _ = pool.run(2, run_trainer, str(tmp_path))
    assert {"step-2.html", "step-2.json", "step-2.trace.json"} <= set(names)
    trace = Trace.from_json((tmp_path / "timelines/step-2.json").read_text())
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    (line,) = [line for line in lines if line["kind"] == "timeline"]
    assert (line["step"], line["schedule"], line["consumed_samples"]) == (2, "1f1b", 48)
    assert line["makespan"] == pytest.approx(trace.timeline.makespan)
    assert line["bubble"] == pytest.approx(trace.timeline.bubble)
    assert line["busy"] == pytest.approx([trace.timeline.busy(rank) for rank in (0, 1)])
    picture = str(tmp_path / "timelines/step-2.png")
    assert line["picture"] == (picture if "step-2.png" in names else None)
    assert "measured: 1f1b, step 2" in (tmp_path / "timelines/step-2.html").read_text()
