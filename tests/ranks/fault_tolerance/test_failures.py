"""After a failure on any rank all ranks end within seconds, and each reports the cause."""

import atexit
import contextlib
import io
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.checkpoint.manifest import ChecksumWriter
from pipemega.engine.engine import Engine
from pipemega.errors import DataError, PipelineError
from tests.ranks.error_logs import find_logs, read_entries
from tests.ranks.injected_faults import ACTIONS, Fault, inject, run_with
from tests.ranks.pool import RankPool, RanksFailed
from tests.ranks.training_runs import build, data, settings
from tests.sampling import some_cases

# TokenEmbedding, Positions, three Blocks, FinalNorm, VocabParallelHead.
CUT_IN_4 = [0, 2, 3, 4, 7]
CUT_IN_2 = [0, 3, 7]

INJECTED = "ValueError: injected error"


def messages(
    pool: RankPool,
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str | None = None,
) -> list[str]:
    """Return the error of each rank, as "Class: text"; every rank must raise one."""
    with pytest.raises(RanksFailed) as caught:
        pool.run(world_size, function, *args, timeout=30.0, backend=backend)
    errors = caught.value.errors
    assert sorted(errors) == list(range(world_size)), "a rank did not raise"
    return [errors[rank][0] for rank in range(world_size)]


def assert_reported_by_all(raised: list[str], failed: int, cause: str) -> None:
    """Check that rank `failed` raised `cause` ("Class: text") and all others report it."""
    assert raised[failed].startswith(cause)
    text = cause.split(": ", 1)[1]
    for rank, message in enumerate(raised):
        if rank != failed:
            assert message.startswith(f"PeerError: rank {failed} failed first: ")
            assert text in message


# A layer raises on one rank


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("rank", "position"), [(0, 1), (1, 2), (3, 5)])
def test_a_layer_that_raises_in_forward_is_reported_by_every_stage(
    pool: RankPool, schedule: str, rank: int, position: int
) -> None:
    config = settings(mesh={"pipeline": 4}, pipeline={"schedule": schedule, "partition": CUT_IN_4})
    raised = messages(pool, 4, run_with, Fault("raise", rank, position, call=3), config)
    name = {1: "Positions", 2: "Block", 5: "FinalNorm"}[position]
    assert_reported_by_all(
        raised,
        rank,
        f"PipelineError: forward of micro-batch 2 at stage {rank} (F2@{rank}): "
        f"layers.{position} ({name}) failed: {INJECTED}",
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("rank", "position"), [(0, 1), (1, 2), (3, 5)])
def test_a_layer_that_raises_in_backward_is_reported_by_every_stage(
    pool: RankPool, schedule: str, rank: int, position: int
) -> None:
    config = settings(mesh={"pipeline": 4}, pipeline={"schedule": schedule, "partition": CUT_IN_4})
    fault = Fault("raise in backward", rank, position, call=3)
    raised = messages(pool, 4, run_with, fault, config)
    cause = f"PipelineError: backward of micro-batch 2 at stage {rank} (B2@{rank}): {INJECTED}"
    assert_reported_by_all(raised, rank, cause)


@pytest.mark.parametrize("what", ["raise", "raise in backward"])
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"data": 2}])
def test_an_error_on_a_tensor_or_data_rank_is_reported_by_all(
    pool: RankPool, what: str, mesh: dict[str, int]
) -> None:
    config = settings(mesh={"pipeline": 2, **mesh}, pipeline={"partition": CUT_IN_2})
    raised = messages(pool, 4, run_with, Fault(what, 3, 4, call=2), config)
    way = "backward" if what.endswith("backward") else "forward"
    assert raised[3].startswith(f"PipelineError: {way} of micro-batch 1 at stage 1")
    assert_reported_by_all(raised, 3, raised[3])


def test_a_layer_that_raises_in_its_recomputation_is_named(pool: RankPool) -> None:
    config = settings(
        mesh={"pipeline": 2},
        pipeline={"partition": CUT_IN_2, "activation_checkpoint_interval": 2, "schedule": "gpipe"},
    )
    # 12 micro-batches go forward first.
    raised = messages(pool, 2, run_with, Fault("raise", 1, 4, call=14), config)
    assert_reported_by_all(
        raised,
        1,
        "PipelineError: backward of micro-batch 1 at stage 1 (B1@1): "
        f"layers.4 (Block) failed: {INJECTED}",
    )


def test_ranks_that_share_only_a_tied_parameter_end_too(pool: RankPool) -> None:
    config = settings(
        mesh={"pipeline": 4},
        pipeline={"partition": CUT_IN_4},
        model={"untie_embeddings_and_output_weights": False},
    )
    raised = messages(pool, 4, fail_in_the_optimizer, 1, config)
    assert_reported_by_all(raised, 1, "ArithmeticError: an optimizer of glass")


def fail_in_the_optimizer(rank: int, config: dict[str, Any]) -> None:
    engine = build(config)
    if engine.mesh.rank == rank:

        def break_it(*_: Any) -> None:
            raise ArithmeticError("an optimizer of glass")

        assert engine.optimizer is not None
        engine.optimizer.register_step_pre_hook(break_it)
    for step in range(2):
        engine.train_batch(data(engine, step))


# A rank is killed or hangs


@pytest.mark.parametrize(
    ("mesh", "killed"),
    some_cases([({"pipeline": 4}, 2), ({"pipeline": 2, "tensor": 2}, 1), ({"data": 4}, 0)], 1),
    ids=["a stage", "a tensor rank", "a data rank"],
)
def test_all_other_ranks_name_a_killed_rank(
    pool: RankPool, mesh: dict[str, int], killed: int
) -> None:
    config = settings(mesh=mesh)
    raised = messages(pool, 4, run_with_any, Fault("kill", killed, -1, call=2), config)
    for rank, message in enumerate(raised):
        if rank == killed:
            assert message == "died"
        else:
            assert message.startswith(f"PeerError: no response from rank {killed}: killed")


def run_with_any(fault: Fault, config: dict[str, Any]) -> None:
    """Run with a fault in the last layer of the rank."""
    engine = build(config)
    if engine.mesh.rank == fault.rank:
        positions = [
            int(n.split(".")[-1]) for n, _ in engine.module.named_modules() if _is_layer(n)
        ]
        inject(engine, fault._replace(position=max(positions)))
    engine.train_batch(data(engine, 0))


def _is_layer(name: str) -> bool:
    return name.split(".")[-2:-1] == ["layers"]


def test_a_hanging_rank_is_named_after_mesh_timeout_seconds(pool: RankPool) -> None:
    config = settings(mesh={"pipeline": 2, "tensor": 2, "timeout_seconds": 1})
    raised = messages(pool, 4, run_with_any, Fault("hang", 2, -1, call=2), config)
    for message in raised:
        assert message.startswith("PeerError: no response from rank 2: killed, crashed, hang")
        assert "mesh.timeout_seconds" in message


def test_an_interrupt_on_one_rank_ends_all_ranks(pool: RankPool) -> None:
    config = settings(mesh={"pipeline": 2}, pipeline={"partition": CUT_IN_2})
    raised = messages(pool, 2, run_with, Fault("interrupt", 1, 4, call=2), config)
    assert raised[1].startswith("KeyboardInterrupt")
    assert raised[0].startswith("PeerError: rank 1 failed first: train_batch: KeyboardInterrupt")


# Building


class Unbuildable(nn.Linear):
    """Can be built on the meta device only."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        if self.weight.device.type != "meta":
            raise MemoryError("out of memory")


def build_unbuildable_layer_on_the_last_stage() -> None:
    layers = [LayerSpec(nn.Linear, 4, 4), torch.tanh, LayerSpec(nn.Linear, 4, 4)]
    net = PipelineModule([*layers, LayerSpec(Unbuildable, 4)], loss_fn=nn.functional.mse_loss)
    pipemega.initialize(net, small_config(mesh={"pipeline": 2, "data": 2}))


def test_a_layer_that_cannot_be_built_on_one_stage_ends_all_ranks(
    pool: RankPool,
) -> None:
    raised = messages(pool, 4, build_unbuildable_layer_on_the_last_stage)
    assert any(raised[rank].startswith("ConfigError: LayerSpec(Unbuildable, 4)") for rank in (2, 3))
    for message in raised:
        assert "LayerSpec(Unbuildable, 4) could not be built: MemoryError: out of memory" in message


def small_config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **changes,
    }


def test_more_stages_than_layers_is_refused_by_every_rank(pool: RankPool) -> None:
    raised = messages(pool, 4, train_small, "nothing", {"mesh": {"pipeline": 4}})
    assert len(set(raised)) == 1
    assert raised[0].startswith("ConfigError: ")
    assert "4 stages" in raised[0]
    assert "3 layers" in raised[0]


def test_a_world_that_does_not_fit_the_mesh_is_refused_by_every_rank(pool: RankPool) -> None:
    raised = messages(pool, 4, train_small, "nothing", {"mesh": {"pipeline": 3}})
    assert len(set(raised)) == 1
    assert raised[0].startswith(
        "MeshError: 4 ranks were started, and one copy of the model takes mesh.pipeline * "
        "mesh.tensor = 3 * 1 = 3: start a multiple of 3 ranks"
    )


def test_heads_that_do_not_divide_by_the_tensor_ranks_are_refused_by_every_rank(
    pool: RankPool,
) -> None:
    model = {"num_attention_heads": 3, "num_query_groups": 3, "hidden_size": 18}
    raised = messages(pool, 4, run_with_any, None, settings(mesh={"tensor": 4}, model=model))
    assert len(set(raised)) == 1
    assert raised[0].startswith("ConfigError: model.num_attention_heads (3) must be a multiple of")


# Outputs of a model, and its data


class ChangingOutput(nn.Module):
    """Changes the form of its output at the third micro-batch."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.linear, self.change, self.calls = nn.Linear(4, 4), change, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.linear(x)
        if self.calls != 3:
            return y
        return {"shape": y[:1], "tree": (y, y), "dtype": y.double(), "nan": y * math.nan}[
            self.change
        ]


def unpack(x: Any) -> Tensor:
    return x[0] if isinstance(x, tuple) else x


LOSSES: dict[str, Any] = {
    "vector": lambda y, t: (y - t).mean(1),
    "a number": lambda y, t: 1.0,
    "pair": lambda y, t: (y.sum(), torch.tensor(1.0)),
    "detached": lambda y, t: y.sum().detach(),
    "raises": lambda y, t: y @ t,
}


def small_engine(case: str, changes: dict[str, Any]) -> Engine:
    first: Any = LayerSpec(ChangingOutput, case) if case in MOODS else LayerSpec(nn.Linear, 4, 4)
    layers = [first, unpack, LayerSpec(nn.Linear, 4, 4)]
    loss_fn = LOSSES.get(case, nn.functional.mse_loss)
    net = PipelineModule(layers, loss_fn=loss_fn)
    engine, *_ = pipemega.initialize(net, small_config(**changes))
    return engine


MOODS = ("shape", "tree", "dtype", "nan")


def pairs(count: int) -> Iterator[Any]:
    for _ in range(count):
        yield torch.ones(2, 4), torch.ones(2, 4)


def train_small(case: str, changes: dict[str, Any]) -> None:
    engine = small_engine(case, changes)
    for _ in range(2):
        engine.train_batch(iter([torch.ones(2)] * 4) if case == "no pair" else pairs(4))


TWO_STAGES = {"mesh": {"pipeline": 2}, "pipeline": {"partition": [0, 1, 3]}}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape", "output was float32 [2, 4] with gradient and is now float32 [1, 4]"),
        ("dtype", "output was float32 [2, 4] with gradient and is now float64 [2, 4]"),
        ("tree", "the structure was * and is now (*, *)"),
    ],
)
def test_an_output_that_changes_between_microbatches_is_named_by_sender_and_receiver(
    pool: RankPool, schedule: str, change: str, words: str
) -> None:
    config = {**TWO_STAGES, "pipeline": {"partition": [0, 1, 3], "schedule": schedule}}
    raised = messages(pool, 2, train_small, change, config)
    assert_reported_by_all(raised, 0, raised[0])
    assert "the output of stage 0 changed at micro-batch 2, and stage 1 cannot" in raised[0]
    assert f"{words}" in raised[0]
    assert "set pipeline.shapes to 'exchanged'" in raised[0]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("vector", "its loss is float32 [2]: reduce it, for example with .mean()"),
        ("a number", "its loss is float: reduce it"),
        ("pair", "loss_fn returned (float32 [], float32 []), which does not say whether"),
        ("detached", "the loss has no gradient"),
        ("raises", "loss_fn failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_every_rank_reports_a_loss_without_a_gradient(
    pool: RankPool, case: str, words: str
) -> None:
    raised = messages(pool, 2, train_small, case, TWO_STAGES)
    assert_reported_by_all(raised, 1, raised[1])
    assert raised[1].startswith("PipelineError: forward of micro-batch 0 at stage 1 (F0@1): ")
    assert words in raised[1]


def test_every_rank_reports_a_microbatch_that_is_not_a_pair(pool: RankPool) -> None:
    raised = messages(pool, 2, train_small, "no pair", TWO_STAGES)
    text = "micro-batch 0 is a Tensor, and must be a pair (inputs, labels)"
    assert all(text in message for message in raised)
    assert any(message.startswith(f"DataError: {text}") for message in raised)


def test_training_without_an_optimizer_names_the_section(pool: RankPool) -> None:
    config = {**TWO_STAGES, "optimizer": None}
    raised = messages(pool, 2, train_small, "nothing", config)
    assert set(raised) == {
        "ConfigError: train_batch needs an optimizer: add the section 'optimizer', or give "
        "initialize(optimizer=...)"
    }


def test_every_rank_raises_an_error_for_a_nan_loss_and_can_continue(
    pool: RankPool,
) -> None:
    for message, losses in pool.run(2, train_past_nan, {**TWO_STAGES}):
        assert message.startswith("loss is nan at step 1 (gradient norm nan): ")
        assert "2 of 2 ranks held a gradient with inf or nan" in message
        assert "Lower the learning rate" in message
        assert all(math.isfinite(loss) for loss in losses)


def train_past_nan(changes: dict[str, Any]) -> tuple[str, list[float]]:
    engine = small_engine("nan", changes)
    with pytest.raises(PipelineError) as caught:
        engine.train_batch(pairs(4))
    return str(caught.value), [engine.train_batch(pairs(4)) for _ in range(2)]


def test_with_bf16_a_step_with_a_nan_loss_is_skipped(pool: RankPool) -> None:
    bf16 = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    for losses, skipped in pool.run(2, train_over_nan, {**TWO_STAGES, **bf16}):
        assert [math.isnan(loss) for loss in losses] == [True, False]
        assert skipped == 1


def train_over_nan(changes: dict[str, Any]) -> tuple[list[float], int]:
    engine = small_engine("nan", changes)
    batches = [[(x.bfloat16(), y.bfloat16()) for x, y in pairs(4)] for _ in range(2)]
    return [engine.train_batch(iter(batch)) for batch in batches], engine.skipped_steps


# Data


@pytest.mark.parametrize("left", [1, 3])
def test_every_rank_raises_an_error_if_data_ends_within_a_batch_and_can_continue(
    pool: RankPool, left: int
) -> None:
    for message, loss in pool.run(4, train_past_the_end, left):
        assert message.startswith("the data ended within a batch: 4 micro-batches are needed")
        assert f"had {left} left" in message
        assert math.isfinite(loss)


def train_past_the_end(left: int) -> tuple[str, float]:
    engine = small_engine("nothing", {**TWO_STAGES, "mesh": {"pipeline": 2, "data": 2}})
    # One data rank has enough.
    batches = pairs(8 if engine.mesh.data.rank == 0 else 4 + left)
    engine.train_batch(batches)
    with pytest.raises(DataError) as caught:
        engine.train_batch(batches)
    return str(caught.value), engine.train_batch(pairs(4))


def test_data_that_ends_between_two_batches_stops_every_rank(pool: RankPool) -> None:
    assert pool.run(2, count_batches) == [2, 2]


def count_batches() -> int:
    engine = small_engine("nothing", TWO_STAGES)
    batches = pairs(8)
    for count in range(10):
        try:
            engine.train_batch(batches)
        except StopIteration:
            return count
    raise AssertionError("it never ended")


class UnreadableDataset(torch.utils.data.Dataset[Any]):
    """Cannot be read on one rank."""

    def __init__(self, readable: bool) -> None:
        self.readable = readable

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if not self.readable:
            raise OSError("read error")
        return torch.ones(4), torch.ones(4)


def train_on_unreadable_data() -> None:
    rank = torch.distributed.get_rank()
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, loss_fn=nn.functional.mse_loss)
    config = small_config(mesh={"pipeline": 2, "data": 2})
    engine, *_ = pipemega.initialize(net, config, UnreadableDataset(readable=rank != 1))
    engine.train_batch()


def test_all_ranks_report_a_sample_that_one_data_rank_cannot_read(pool: RankPool) -> None:
    raised = messages(pool, 4, train_on_unreadable_data)
    assert raised[1].startswith("DataError: sample ")
    assert raised[1].endswith("of UnreadableDataset could not be read: OSError: read error")
    assert_reported_by_all(raised, 1, raised[1])


def test_all_ranks_name_a_token_beyond_the_vocabulary(pool: RankPool) -> None:
    config = settings(mesh={"pipeline": 2, "tensor": 2})
    raised = messages(pool, 4, train_on_tokens_beyond_the_vocabulary, config)
    for message in raised:
        assert "token id 77" in message
        assert "50" in message


def train_on_tokens_beyond_the_vocabulary(config: dict[str, Any]) -> None:
    engine = build(config)
    batches = [(tokens.clone(), labels) for tokens, labels in data(engine, 0)]
    batches[2][0][1, 3] = 77
    engine.train_batch(iter(batches))


# Outside the engine


@pytest.mark.parametrize("when", ["between steps", "at the end", "exit"])
def test_a_script_that_fails_on_one_rank_outside_the_engine_ends_the_others(
    pool: RankPool, when: str, tmp_path: Path
) -> None:
    codes, texts = zip(*pool.run(2, script, when, str(tmp_path)), strict=True)
    assert codes == ((1, 3) if when == "exit" else (1, 1))
    if when == "exit":
        # The script has printed what it wants to; the other rank prints why it ends, too.
        assert texts[0].startswith("error: rank 1: the script: SystemExit: 3; ")
        assert texts[1] == ""
    else:
        assert texts[0] == ""
        assert re.search(r"^error: rank 1: KeyError: 'lost'; ", texts[1], re.MULTILINE)
        assert "Traceback" in texts[1]
    details = read_entries("".join(path.read_text() for path in find_logs(tmp_path)))
    words = "SystemExit: 3" if when == "exit" else "KeyError: 'lost'"
    assert details[0].startswith(f"rank 1 failed first: the script: {words}")
    assert sorted(details) == [0, 1]


def script(when: str, folder: str) -> tuple[Any, str]:
    """Return the exit code and the output on stderr."""
    text = io.StringIO()
    with (
        contextlib.redirect_stderr(text),
        mock.patch.object(tempfile, "tempdir", folder),
        mock.patch.object(atexit, "register"),
        pytest.raises(SystemExit) as ended,
    ):
        body_of_the_script(when)
    lines = [line for line in text.getvalue().splitlines() if not line.startswith("[pipemega]")]
    return ended.value.code, "\n".join(lines)


def body_of_the_script(when: str) -> None:
    with pipemega.run():
        engine = small_engine("nothing", TWO_STAGES)
        failing = engine.mesh.rank == 1
        for step in range(2):
            engine.train_batch(pairs(4))
            if failing and step == 0 and when == "between steps":
                raise KeyError("lost")
            if failing and step == 0 and when == "exit":
                raise SystemExit(3)
        if failing and when == "at the end":
            raise KeyError("lost")


def test_an_error_in_loading_or_saving_on_one_rank_is_raised_on_all(
    pool: RankPool, tmp_path: Any
) -> None:
    raised = messages(pool, 2, save_where_one_rank_cannot, str(tmp_path))
    for message in raised:
        assert "CheckpointError" in message
        assert "No space left" in message
    raised = messages(pool, 2, load_a_missing_checkpoint, str(tmp_path / "nowhere"))
    for message in raised:
        assert message.startswith("CheckpointError: ")
        assert "nowhere" in message


def save_where_one_rank_cannot(folder: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    save_where_rank_1_does(refuse, folder)


def save_where_rank_1_does(action: Callable[..., None], folder: str) -> None:
    """Save a checkpoint; rank 1 calls `action` instead of writing."""
    engine = small_engine("nothing", TWO_STAGES)
    real = ChecksumWriter.write
    with mock.patch.object(ChecksumWriter, "write", action if engine.mesh.rank == 1 else real):
        engine.save_checkpoint(folder)


def load_a_missing_checkpoint(folder: str) -> None:
    small_engine("nothing", TWO_STAGES).load_checkpoint(folder)


def test_a_rank_killed_while_a_checkpoint_is_saved_is_named(pool: RankPool, tmp_path: Any) -> None:
    raised = messages(pool, 2, save_until_killed, str(tmp_path))
    assert raised[1] == "died"
    assert raised[0].startswith("PeerError: no response from rank 1: killed")


def save_until_killed(folder: str) -> None:
    save_where_rank_1_does(lambda *_: ACTIONS["kill"](), folder)
