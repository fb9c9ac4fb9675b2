"""No code within a step reads a value from the device, which would make the host wait.

Tested without a GPU on torch's meta device: its tensors have no values, so that reading one
(`.item()`, `bool(tensor)`, a mask as an index) raises an error.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, IterableDataset

from pipemega import LayerSpec, PipelineModule
from pipemega.config import load
from pipemega.distributed.device_waits import StreamClock
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.distributed.topology import Topology
from pipemega.engine.engine import Engine
from pipemega.engine.initialize import initialize
from pipemega.errors import PipelineError
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.execution_state import MicroBatches, Results
from pipemega.pipeline.model.module import RngKey
from pipemega.pipeline.plan.instructions import Kind
from pipemega.pipeline.recorder import NULL_RECORDER, Recorder, make_recorder
from tests.optional_packages import needs_meta_collectives
from tests.sampling import some

VOCAB = 50  # padded inside, so that the padding is masked

GPT2 = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8}
LLAMA = {
    **GPT2,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "label_smoothing": 0.1,
    "embedding_norm": True,
    "qk_layernorm": True,
}


def build(net: PipelineModule, **changes: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **changes,
    }
    return initialize(net, config, mesh=Mesh.single("meta"))[0]


def run(
    engine: Engine,
    inputs: Any,
    labels: Any,
    recorder: Recorder = NULL_RECORDER,
    counted: tuple[int | None, ...] = (),
) -> Results:
    rng_keys = [RngKey(1, 0, place) for place in range(2)]
    batch = MicroBatches(
        [inputs] * 2, [labels] * 2, rng_keys=rng_keys, loss_factor=0.5, counted=counted
    )
    return engine.steps.executor.run(engine.plan, batch, recorder)


@pytest.mark.parametrize("dtype", some(["fp32", "bf16", "fp16"], 1, 2))
@pytest.mark.parametrize("recompute", some(["none", "selective", "full"], 1))
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["GPT-2", "Llama"])
@pytest.mark.parametrize("reduction", some(["token", "micro_batch"], 0))
def test_a_step_of_the_gpt_reads_no_value_before_the_optimizer_step(
    model: dict[str, Any], recompute: str, dtype: str, reduction: str
) -> None:
    config = {"train_batch_size": 2, "model": {**model, "recompute": recompute}}
    net = gpt(GPTConfig.of(load(config), VOCAB))
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    engine = build(net, training={"loss_reduction": reduction}, **precision)
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    results = run(engine, tokens, tokens)
    assert len(results.losses) == 2
    assert engine.steps.optimizer_step is not None
    # The optimizer step reads once.
    with pytest.raises(NotImplementedError, match="meta tensor"):
        engine.steps.optimizer_step(*results.losses.totals(engine.mesh))


@pytest.mark.parametrize("counted", [(), (16, 5), (0, None)])
@pytest.mark.parametrize("vocabulary", some(["stage", "parallel"], 1))
def test_labels_that_do_not_count_are_left_out_without_a_read(
    vocabulary: str, counted: tuple[int | None, ...]
) -> None:
    config = {"train_batch_size": 2, "model": LLAMA}
    net = gpt(GPTConfig.of(load(config), VOCAB))
    engine = build(net, pipeline={"vocabulary": vocabulary})
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    assert len(run(engine, tokens, tokens, counted=counted).losses) == 2


def test_the_labels_that_count_are_counted_before_they_are_copied_to_the_device() -> None:
    config = {"train_batch_size": 2, "model": GPT2}
    net = gpt(GPTConfig.of(load(config), VOCAB))
    engine = build(net)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    labels = tokens.masked_fill(torch.arange(8) < 3, -100)
    pairs = [(tokens, labels), (tokens, labels.to("meta"))]
    assert engine.steps.read(iter(pairs), None).counted == (10, None)
    whole = (torch.cat([tokens] * 2), torch.cat([labels, tokens]))
    data = engine.steps.read(None, whole)
    assert data.counted == (10, 16)
    step, _ = engine.steps.begin(data)
    assert engine.steps._micro_batches(step, keep_outputs=False).counted == (10, 16)


@pytest.mark.parametrize("traced", [False, True], ids=["not timed", "timed"])
@pytest.mark.parametrize("recompute", some(["none", "full"], 1))
@pytest.mark.parametrize("schedule", some(["zb-h1", "zb-v"], 1))
def test_split_backward_and_tracing_read_no_value(
    schedule: str, recompute: str, traced: bool
) -> None:
    config = {"train_batch_size": 2, "model": {**LLAMA, "recompute": recompute}}
    net = gpt(GPTConfig.of(load(config), VOCAB))
    engine = build(net, pipeline={"schedule": schedule})
    kinds = {step.kind for step in engine.plan.steps()}
    assert {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT} <= kinds
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    recorder = make_recorder(torch.device("meta"), record_memory=True) if traced else NULL_RECORDER
    assert len(run(engine, tokens, tokens, recorder).losses) == 2
    marks = recorder.marks()
    assert (marks is not None) == traced
    if marks is not None:
        assert len(marks.end) == len(engine.plan.programs[0])


class Event:
    """An event in a fake stream: the host may ask for its time only after the step."""

    finished = False
    recorded = 0

    def __init__(self, *, timing: bool) -> None:
        assert timing
        self.place = Event.recorded = Event.recorded + 1

    def query(self) -> bool:
        return Event.finished

    def synchronize(self) -> None:
        assert Event.finished, "the host waits for the device within a step"

    def elapsed_time(self, end: "Event") -> float:
        assert Event.finished
        return float(end.place - self.place)


def test_timers_and_tracing_do_not_wait_for_the_device_within_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def clock(*_: Any) -> StreamClock:
        return StreamClock(record=Event)

    for module in ("engine.engine_parts", "pipeline.recorder", "optimizer.step"):
        monkeypatch.setattr(f"pipemega.{module}.step_clock", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("synchronize"))
    config = {"train_batch_size": 2, "model": GPT2}
    engine = build(gpt(GPTConfig.of(load(config), VOCAB)), wall_clock_breakdown=True)
    assert engine.steps.optimizer_step is not None
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    recorder = make_recorder(torch.device("meta"))
    engine.steps.optimizer_step.phases.start(exact=True)
    with engine.timers("optimizer"), engine.steps.optimizer_step.phases("optimizer"):
        run(engine, tokens, tokens, recorder)
    assert Event.recorded > 10
    monkeypatch.setattr(Event, "finished", True)
    seconds = engine.timers.totals()
    assert set(seconds) == {"forward", "backward", "optimizer"}
    # One millisecond from event to event.
    assert seconds["optimizer"] > seconds["forward"] + seconds["backward"] >= 2 * 2 * 1e-3
    marks = recorder.marks()
    assert marks is not None
    assert list(marks.end) == sorted(marks.end)
    assert [phase.name for phase in engine.steps.optimizer_step.phases.stop()] == [
        "other",
        "optimizer",
        "other",
    ]


class ReadsValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum().item() > 0 else x


def test_a_layer_that_reads_a_value_fails_this_test() -> None:
    net = PipelineModule([LayerSpec(ReadsValue)], nn.functional.mse_loss)
    x = torch.empty(2, 4, device="meta")
    with pytest.raises(PipelineError, match="ReadsValue"):
        run(build(net), x, x)


def rows() -> Iterator[Any]:
    return ((torch.ones(2, 4), torch.ones(2, 4)) for _ in range(4))


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.ones(4), torch.ones(4)) for _ in range(16))


@pytest.fixture
def two_data_ranks() -> Iterator[Mesh]:
    """Data rank 0 of 2 on the meta device; a collective leaves its tensor as it is."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    both = dist.group.WORLD
    yield Mesh(
        Topology(1, 2, 1),
        Axis("pipeline"),
        Axis("data", (0, 1), 0, both),
        Axis("tensor"),
        Axis("world", (0, 1), 0, both),
        torch.device("meta"),
    )
    dist.destroy_process_group()


@needs_meta_collectives
@pytest.mark.filterwarnings("ignore:Set timeout is now only supported for either nccl or gloo")
@pytest.mark.parametrize("source", ["iterator", "iterable", "DataLoader"])
def test_the_ranks_agree_on_the_end_of_the_data_without_a_read(
    source: str, two_data_ranks: Mesh
) -> None:
    """The agreement was a number on the device, which the host read in every step."""
    data = {
        "iterator": None,
        "iterable": Rows(),
        "DataLoader": DataLoader(Rows(), batch_size=2, drop_last=True),
    }[source]
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4)], nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        # The fake group would return other data than that of this rank.
        "data": {"compare_every": 0},
    }
    engine = initialize(net, config, mesh=two_data_ranks, training_data=data)[0]
    given = rows() if data is None else None
    for _ in range(2):
        read = engine.steps.read(given, None)
        assert all(tensor.is_meta for tensor in (*read.inputs, *read.labels))
    if data is None:
        with pytest.raises(StopIteration, match="no micro-batch left"):
            engine.steps.read(given, None)
    else:
        assert engine.loader is not None
        engine.loader.close()
