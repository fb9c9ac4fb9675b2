"""Whatever goes wrong, on whichever rank: all ranks end, soon, and each of them says why."""

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import pipemega
from pipemega import LayerSpec, PipelineModule
from pipemega.checkpoint.manifest import Written
from pipemega.engine import Engine
from pipemega.errors import DataError, PipelineError
from tests.ranks.faults import ACTIONS, Fault, plant, run_with
from tests.ranks.pool import RankPool, RanksFailed
from tests.ranks.training_run import build, data, settings

# Words, Positions, three Blocks, FinalNorm, VocabParallelHead.
CUT_IN_4 = [0, 2, 3, 4, 7]
CUT_IN_2 = [0, 3, 7]

SPARK = "ValueError: a spark flew"


def messages(
    pool: RankPool, world_size: int, function: Callable[..., Any], *args: Any
) -> list[str]:
    """What each rank raised, as "Class: text"; every rank must have raised."""
    with pytest.raises(RanksFailed) as caught:
        pool.run(world_size, function, *args, timeout=30.0)
    errors = caught.value.errors
    assert sorted(errors) == list(range(world_size)), "a rank went on as if nothing had happened"
    return [errors[rank][0] for rank in range(world_size)]


def assert_told_by_all(told: list[str], failed: int, cause: str) -> None:
    """Rank `failed` raised `cause` ("Class: text"), and all others say so."""
    assert told[failed].startswith(cause)
    text = cause.split(": ", 1)[1]
    for rank, message in enumerate(told):
        if rank != failed:
            assert message.startswith(f"PeerError: rank {failed} failed first: ")
            assert text in message


# A layer raises on one rank


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("rank", "position"), [(0, 1), (1, 2), (3, 5)])
def test_a_layer_that_raises_in_forward_is_told_by_every_stage(
    pool: RankPool, schedule: str, rank: int, position: int
) -> None:
    config = settings(mesh={"pipeline": 4}, pipeline={"schedule": schedule, "partition": CUT_IN_4})
    told = messages(pool, 4, run_with, Fault("raise", rank, position, call=3), config)
    name = {1: "Positions", 2: "Block", 5: "FinalNorm"}[position]
    assert_told_by_all(
        told,
        rank,
        f"PipelineError: forward of micro-batch 2 at stage {rank} (F2@{rank}): "
        f"layers.{position} ({name}) failed: {SPARK}",
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("rank", "position"), [(0, 1), (1, 2), (3, 5)])
def test_a_layer_that_raises_in_backward_is_told_by_every_stage(
    pool: RankPool, schedule: str, rank: int, position: int
) -> None:
    config = settings(mesh={"pipeline": 4}, pipeline={"schedule": schedule, "partition": CUT_IN_4})
    fault = Fault("raise in backward", rank, position, call=3)
    told = messages(pool, 4, run_with, fault, config)
    cause = f"PipelineError: backward of micro-batch 2 at stage {rank} (B2@{rank}): {SPARK}"
    assert_told_by_all(told, rank, cause)


@pytest.mark.parametrize("what", ["raise", "raise in backward"])
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"data": 2}])
def test_a_rank_that_raises_beside_a_tensor_or_data_peer_is_told_by_all(
    pool: RankPool, what: str, mesh: dict[str, int]
) -> None:
    config = settings(mesh={"pipeline": 2, **mesh}, pipeline={"partition": CUT_IN_2})
    told = messages(pool, 4, run_with, Fault(what, 3, 4, call=2), config)
    way = "backward" if what.endswith("backward") else "forward"
    assert told[3].startswith(f"PipelineError: {way} of micro-batch 1 at stage 1")
    assert_told_by_all(told, 3, told[3])


def test_a_layer_that_raises_only_when_it_is_recomputed_is_named(pool: RankPool) -> None:
    config = settings(
        mesh={"pipeline": 2},
        pipeline={"partition": CUT_IN_2, "activation_checkpoint_interval": 2, "schedule": "gpipe"},
    )
    # 12 micro-batches go forward first.
    told = messages(pool, 2, run_with, Fault("raise", 1, 4, call=14), config)
    assert_told_by_all(
        told,
        1,
        "PipelineError: backward of micro-batch 1 at stage 1 (B1@1): "
        f"layers.4 (Block) failed: {SPARK}",
    )


def test_tied_ranks_without_a_pipeline_neighbour_between_them_end_too(pool: RankPool) -> None:
    config = settings(
        mesh={"pipeline": 4},
        pipeline={"partition": CUT_IN_4},
        model={"untie_embeddings_and_output_weights": False},
    )
    told = messages(pool, 4, fail_in_the_optimizer, 1, config)
    assert_told_by_all(told, 1, "ArithmeticError: an optimizer of glass")


def fail_in_the_optimizer(rank: int, config: dict[str, Any]) -> None:
    engine = build(config)
    if engine.mesh.rank == rank:

        def break_it(*_: Any) -> None:
            raise ArithmeticError("an optimizer of glass")

        assert engine.optimizer is not None
        engine.optimizer.register_step_pre_hook(break_it)
    for step in range(2):
        engine.train_batch(data(engine, step))


# A rank is gone, or silent


@pytest.mark.parametrize(
    ("mesh", "killed"),
    [({"pipeline": 4}, 2), ({"pipeline": 2, "tensor": 2}, 1), ({"data": 4}, 0)],
    ids=["a stage", "a tensor rank", "a data rank"],
)
def test_a_killed_rank_is_named_by_all_others(
    pool: RankPool, mesh: dict[str, int], killed: int
) -> None:
    config = settings(mesh=mesh)
    told = messages(pool, 4, run_with_any, Fault("kill", killed, -1, call=2), config)
    for rank, message in enumerate(told):
        if rank == killed:
            assert message == "died"
        else:
            assert message.startswith(f"PeerError: no sign of life from rank {killed}: killed")


def run_with_any(fault: Fault, config: dict[str, Any]) -> None:
    """A fault in whatever layer the rank has last."""
    engine = build(config)
    if engine.mesh.rank == fault.rank:
        positions = [
            int(n.split(".")[-1]) for n, _ in engine.module.named_modules() if _is_layer(n)
        ]
        plant(engine, fault._replace(position=max(positions)))
    engine.train_batch(data(engine, 0))


def _is_layer(name: str) -> bool:
    return name.split(".")[-2:-1] == ["layers"]


def test_a_rank_that_hangs_is_missed_after_mesh_timeout_seconds(pool: RankPool) -> None:
    config = settings(mesh={"pipeline": 2, "tensor": 2, "timeout_seconds": 1})
    told = messages(pool, 4, run_with_any, Fault("hang", 2, -1, call=2), config)
    for message in told:
        assert message.startswith("PeerError: no sign of life from rank 2: killed, crashed, hang")
        assert "mesh.timeout_seconds" in message


def test_an_interrupt_on_one_rank_ends_all(pool: RankPool) -> None:
    config = settings(mesh={"pipeline": 2}, pipeline={"partition": CUT_IN_2})
    told = messages(pool, 2, run_with, Fault("interrupt", 1, 4, call=2), config)
    assert told[1].startswith("KeyboardInterrupt")
    assert told[0].startswith("PeerError: rank 1 failed first: train_batch: KeyboardInterrupt")


# Building


class Glass(nn.Linear):
    """Can be drawn up (on the meta device), but not built."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        if self.weight.device.type != "meta":
            raise MemoryError("no room for glass")


def build_glass_on_the_last_stage() -> None:
    layers = [LayerSpec(nn.Linear, 4, 4), torch.tanh, LayerSpec(nn.Linear, 4, 4)]
    net = PipelineModule([*layers, LayerSpec(Glass, 4)], loss_fn=nn.functional.mse_loss)
    pipemega.initialize(net, small_config(mesh={"pipeline": 2, "data": 2}))


def test_a_layer_that_cannot_be_built_on_one_stage_ends_the_ranks_of_the_other(
    pool: RankPool,
) -> None:
    told = messages(pool, 4, build_glass_on_the_last_stage)
    assert any(told[rank].startswith("ConfigError: LayerSpec(Glass, 4)") for rank in (2, 3))
    for message in told:
        assert "LayerSpec(Glass, 4) could not be built: MemoryError: no room for glass" in message


def small_config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **changes,
    }


def test_more_stages_than_layers_is_refused_by_every_rank(pool: RankPool) -> None:
    told = messages(pool, 4, train_small, "nothing", {"mesh": {"pipeline": 4}})
    assert len(set(told)) == 1
    assert told[0].startswith("ConfigError: ")
    assert "4 stages" in told[0]
    assert "3 layers" in told[0]


def test_a_world_that_does_not_fit_the_mesh_is_refused_by_every_rank(pool: RankPool) -> None:
    told = messages(pool, 4, train_small, "nothing", {"mesh": {"pipeline": 3}})
    assert len(set(told)) == 1
    assert told[0].startswith(
        "MeshError: 4 ranks were started, and one copy of the model takes mesh.pipeline * "
        "mesh.tensor = 3 * 1 = 3: start a multiple of 3 ranks"
    )


def test_heads_that_the_tensor_ranks_cannot_share_are_refused_by_every_rank(
    pool: RankPool,
) -> None:
    model = {"num_attention_heads": 3, "num_query_groups": 3, "hidden_size": 18}
    told = messages(pool, 4, run_with_any, None, settings(mesh={"tensor": 4}, model=model))
    assert len(set(told)) == 1
    assert told[0].startswith("ConfigError: model.num_attention_heads (3) must be a multiple of")


# What a model or its data gives


class Moody(nn.Module):
    """Changes what it gives at the third micro-batch."""

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
    "triple": lambda y, t: (y.sum(), torch.tensor(1.0), torch.tensor(1.0)),
    "detached": lambda y, t: y.sum().detach(),
    "raises": lambda y, t: y @ t,
    "missing": None,
}


def small_engine(case: str, changes: dict[str, Any]) -> Engine:
    first: Any = LayerSpec(Moody, case) if case in MOODS else LayerSpec(nn.Linear, 4, 4)
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
    told = messages(pool, 2, train_small, change, config)
    assert_told_by_all(told, 0, told[0])
    assert "the output of stage 0 changed at micro-batch 2, and stage 1 cannot" in told[0]
    assert f"{words}" in told[0]
    assert "set pipeline.shapes to 'exchanged'" in told[0]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("vector", "its loss is [2]: reduce it, with .mean() for one"),
        ("a number", "its loss is float: reduce it"),
        ("triple", "its loss is tuple: reduce it"),
        ("detached", "the loss has no gradient"),
        ("raises", "loss_fn failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("missing", "training needs a loss_fn; give one to PipelineModule"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_told_by_every_rank(
    pool: RankPool, case: str, words: str
) -> None:
    told = messages(pool, 2, train_small, case, TWO_STAGES)
    assert_told_by_all(told, 1, told[1])
    assert told[1].startswith("PipelineError: forward of micro-batch 0 at stage 1 (F0@1): ")
    assert words in told[1]


def test_a_microbatch_that_is_no_pair_is_told_by_every_rank(pool: RankPool) -> None:
    told = messages(pool, 2, train_small, "no pair", TWO_STAGES)
    text = "micro-batch 0 is a Tensor, and must be a pair (inputs, labels)"
    assert all(text in message for message in told)
    assert any(message.startswith(f"DataError: {text}") for message in told)


def test_training_without_an_optimizer_names_the_section(pool: RankPool) -> None:
    told = messages(pool, 2, train_small, "nothing", {**TWO_STAGES, "optimizer": None})
    assert set(told) == {"ConfigError: train_batch needs an optimizer: add the section 'optimizer'"}


def test_a_loss_of_nan_is_an_error_of_every_rank_after_which_training_can_go_on(
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


def test_a_loss_of_nan_in_bf16_is_shown_and_the_step_skipped(pool: RankPool) -> None:
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
def test_data_that_ends_in_mid_batch_is_an_error_of_every_rank_after_which_training_can_go_on(
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


def test_data_that_ends_between_two_batches_stops_every_rank_alike(pool: RankPool) -> None:
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


class Scratched(torch.utils.data.Dataset[Any]):
    """Cannot be read on one rank."""

    def __init__(self, readable: bool) -> None:
        self.readable = readable

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if not self.readable:
            raise OSError("the disc is scratched")
        return torch.ones(4), torch.ones(4)


def train_on_scratched_data() -> None:
    rank = torch.distributed.get_rank()
    net = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, loss_fn=nn.functional.mse_loss)
    config = small_config(mesh={"pipeline": 2, "data": 2})
    engine, *_ = pipemega.initialize(net, config, Scratched(readable=rank != 1))
    engine.train_batch()


def test_a_sample_that_one_data_rank_cannot_read_is_told_by_all(pool: RankPool) -> None:
    told = messages(pool, 4, train_on_scratched_data)
    assert told[1].startswith("DataError: sample ")
    assert told[1].endswith("of Scratched could not be read: OSError: the disc is scratched")
    assert_told_by_all(told, 1, told[1])


def test_a_token_beyond_the_vocabulary_is_named_by_all(pool: RankPool) -> None:
    config = settings(mesh={"pipeline": 2, "tensor": 2})
    told = messages(pool, 4, train_on_foreign_tokens, config)
    for message in told:
        assert "token id 77" in message
        assert "50" in message


def train_on_foreign_tokens(config: dict[str, Any]) -> None:
    engine = build(config)
    batches = [(tokens.clone(), labels) for tokens, labels in data(engine, 0)]
    batches[2][0][1, 3] = 77
    engine.train_batch(iter(batches))


# Outside the engine


@pytest.mark.parametrize("when", ["between steps", "at the end", "exit"])
def test_a_script_that_fails_on_one_rank_outside_the_engine_ends_the_others(
    pool: RankPool, when: str
) -> None:
    codes, texts = zip(*pool.run(2, script, when), strict=True)
    words = "SystemExit: 3" if when == "exit" else "KeyError: 'lost'"
    assert codes == ((1, 3) if when == "exit" else (1, 1))
    assert f"error: rank 0: rank 1 failed first: the script: {words}" in texts[0]
    assert texts[1] == "" if when == "exit" else f"error: rank 1: {words}" in texts[1]
    assert ("Traceback" in texts[1]) == (when != "exit")
    assert "Traceback" not in texts[0]


def script(when: str) -> tuple[Any, str]:
    """The exit code and what was written to stderr."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text), pytest.raises(SystemExit) as ended:
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


def test_an_error_while_loading_or_saving_on_one_rank_reaches_all(
    pool: RankPool, tmp_path: Any
) -> None:
    told = messages(pool, 2, save_where_one_rank_cannot, str(tmp_path))
    for message in told:
        assert "CheckpointError" in message
        assert "No space left" in message
    told = messages(pool, 2, load_what_is_not_there, str(tmp_path / "nowhere"))
    for message in told:
        assert message.startswith("CheckpointError: ")
        assert "nowhere" in message


def save_where_one_rank_cannot(folder: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    save_where_rank_1_does(refuse, folder)


def save_where_rank_1_does(action: Callable[..., None], folder: str) -> None:
    """Saves a checkpoint; rank 1 runs `action` in place of writing."""
    engine = small_engine("nothing", TWO_STAGES)
    real = Written.write
    with mock.patch.object(Written, "write", action if engine.mesh.rank == 1 else real):
        engine.save_checkpoint(folder)


def load_what_is_not_there(folder: str) -> None:
    small_engine("nothing", TWO_STAGES).load_checkpoint(folder)


def test_a_rank_killed_while_a_checkpoint_is_saved_is_named(pool: RankPool, tmp_path: Any) -> None:
    told = messages(pool, 2, save_until_killed, str(tmp_path))
    assert told[1] == "died"
    assert told[0].startswith("PeerError: no sign of life from rank 1: killed")


def save_until_killed(folder: str) -> None:
    save_where_rank_1_does(lambda *_: ACTIONS["kill"](), folder)
