"""The engine ends on process groups with NCCL's order, and trains bitwise as on gloo."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from pipemega.errors import ScheduleError
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from tests.ranks.fault_tolerance.test_failures import messages
from tests.ranks.injected_faults import Fault, run_with
from tests.ranks.nccl_like import LAZY, SILENT, STRICT
from tests.ranks.nccl_like.engine_runs import (
    Case,
    generate_tokens,
    sleep_before_the_second_step,
    train_all,
    train_and_count_reduce_scatters,
)
from tests.ranks.optimizer import post_validate_runs
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import settings
from tests.sampling import some, some_cases


def case(
    model: str, pipeline: int, *, count: int = 8, steps: int = 2, depth: int = 10, **section: Any
) -> Case:
    """Return a case of one pipeline; `section` is the section pipeline of its config."""
    config = {"mesh": {"pipeline": pipeline}, "gradient_accumulation_steps": count}
    return Case(model, {**config, "pipeline": section}, depth, steps)


def assert_same_as_on_gloo(
    pool: RankPool, ranks: int, cases: Sequence[Case], backend: str = LAZY
) -> None:
    """Compare with 1f1b on gloo and the same mesh; there all schedules give the same bits."""
    plain = [each._replace(config={**each.config, "pipeline": {}}) for each in cases]
    references = list({repr(each): each for each in plain}.values())
    by_rank = pool.run(ranks, train_all, references, backend="gloo")
    expected = {repr(each): result for each, result in zip(references, by_rank[0], strict=True)}
    # Few in one world: each engine has process groups, and each of them has threads.
    for start in range(0, len(cases), 5):
        some = slice(start, start + 5)
        for results in pool.run(ranks, train_all, cases[some], backend=backend):
            for each, reference, result in zip(cases[some], plain[some], results, strict=True):
                assert result == expected[repr(reference)], each


HUNG_ON_FOUR = ("gpipe", "looped-bfs", "v-half", "v-min", "1f1b-v")
SOME = ("1f1b-v",)


@pytest.mark.parametrize(
    ("ranks", "names"),
    some_cases([(4, SOME), (4, HUNG_ON_FOUR), (4, SCHEDULES), (2, SCHEDULES)], 0),
)
def test_schedules_end_with_lazy_communicators_and_train_as_on_gloo(
    pool: RankPool, ranks: int, names: Iterable[str]
) -> None:
    """Interleaved schedules hung on two ranks, and gpipe and V schedules with lazy communicators.

    A searched plan replaces that of "auto" after six steps, with new process groups.
    """
    cases = [case("plain", ranks, schedule=name) for name in names]
    cases += [case("plain", ranks, steps=8, schedule="auto")]
    assert_same_as_on_gloo(pool, ranks, cases)


def test_declared_and_exchanged_headers_end_on_three_ranks(pool: RankPool) -> None:
    cases = [
        case("plain", 3, schedule=name, shapes=shapes)
        for shapes, name in (
            ("declared", "zb-v"),
            ("declared", "interleaved"),
            ("exchanged", "looped-bfs"),
            ("exchanged", "v-min"),
        )
    ]
    assert_same_as_on_gloo(pool, 3, cases)


def test_a_partial_step_with_smaller_micro_batches_ends_and_trains_as_on_gloo(
    pool: RankPool,
) -> None:
    cases = [
        Case(
            "gpt",
            {
                "mesh": {"pipeline": 2},
                "training": {"epochs": 1},
                "pipeline": {"schedule": name, "shapes": shapes},
            },
            steps=3,
        )
        for name, shapes in (("interleaved", "cached"), ("zb-v", "declared"))
    ]
    assert_same_as_on_gloo(pool, 2, cases)


@pytest.mark.parametrize("ranks", some([2, 3, 4], 0, 2))
def test_ties_of_some_pipeline_ranks_end(pool: RankPool, ranks: int) -> None:
    """The exchange of a tied parameter was the first operation of the pipeline's group."""
    gpt = Case("gpt", {"mesh": {"pipeline": ranks}, "train_batch_size": 16})
    assert_same_as_on_gloo(pool, ranks, [gpt, case("tied_thrice", ranks, depth=8)])


@pytest.mark.parametrize("sizes", some([{"pipeline": 2, "tensor": 2}, {"data": 2, "tensor": 2}], 0))
def test_tensor_and_sequence_parallelism_train_as_on_gloo(
    pool: RankPool, sizes: dict[str, int]
) -> None:
    config = {"mesh": {**sizes, "sequence_parallel": True}, "train_batch_size": 16}
    assert_same_as_on_gloo(pool, 4, [Case("gpt", config)])


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [{"pipeline": 4}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_the_passes_of_a_cut_vocabulary_end_and_train_as_on_gloo(
    pool: RankPool, sizes: dict[str, int]
) -> None:
    cases = [
        Case("gpt", {"mesh": sizes, "pipeline": {"schedule": name, "vocabulary": "parallel"}})
        for name in ("1f1b", "gpipe", "zb-h1")
    ]
    expected = pool.run(4, train_all, cases[:1], backend="gloo")[0]
    for results in pool.run(4, train_all, cases, backend=LAZY):
        assert results == expected * 3


def test_overlapped_zero_reduces_by_reduce_scatter_and_trains_as_on_gloo(pool: RankPool) -> None:
    zero = {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 50}
    cases = [
        Case("plain", {"mesh": {"pipeline": 2}, "zero_optimization": zero, "pipeline": section})
        for section in ({"schedule": "zb-h1"}, {"schedule": "zb-v"})
    ]
    expected = [pool.run(4, train_all, [each], backend="gloo")[0][0] for each in cases]
    for results, scatters in pool.run(4, train_and_count_reduce_scatters, cases, backend=LAZY):
        assert results == expected
        # Several buckets in each of two steps of both cases.
        assert scatters > 2 * 2 * 2


def test_post_validation_evaluation_and_checkpoints_give_the_state_of_gloo(
    pool: RankPool, tmp_path: Path
) -> None:
    config = settings(
        mesh={"pipeline": 2, "data": 2, "timeout_seconds": 20},
        pipeline={"schedule": "zb-h1"},
        gradient_clipping=0.05,
    )
    results = {}
    for backend in ("gloo", LAZY):
        sync = {"optimizer_sync": "post_validate", "optimizer_sync_after": 0}
        results[backend] = pool.run(
            4, train_and_load, config, sync, str(tmp_path / backend), backend=backend
        )
    for got, want in zip(results[LAZY], results["gloo"], strict=True):
        assert got["rollbacks"] == want["rollbacks"] > 0
        for key in ("loss", "eval", "reports", "saved"):
            assert got[key] == want[key], key
        assert got["state"].keys() == want["state"].keys()
        for name, value in want["state"].items():
            assert numpy.array_equal(got["state"][name], value), name


def train_and_load(config: Any, sync: Any, folder: str) -> dict[str, Any]:
    return post_validate_runs.train(config, sync, folder=folder)


def test_generated_tokens_are_those_of_gloo(pool: RankPool) -> None:
    config = {"mesh": {"pipeline": 2, "tensor": 2}, "pipeline": {"schedule": "interleaved"}}
    expected, *_ = pool.run(4, generate_tokens, config, backend="gloo")
    assert len(expected) == 6
    assert pool.run(4, generate_tokens, config, backend=LAZY) == [expected] * 4


@pytest.mark.parametrize("backend", [STRICT, SILENT])
def test_every_rank_reports_a_layer_that_raises(pool: RankPool, backend: str) -> None:
    config = settings(
        mesh={"pipeline": 4, "timeout_seconds": 3}, pipeline={"partition": [0, 2, 3, 4, 7]}
    )
    # The first call is the warm-up.
    fault = Fault("raise", 1, 2, call=4)
    raised = messages(pool, 4, run_with, fault, config, backend=backend)
    cause = "forward of micro-batch 2 at stage 1 (F2@1): layers.2 (Block) failed: ValueError: "
    assert raised[1].startswith(f"PipelineError: {cause}")
    for rank in (0, 2, 3):
        assert raised[rank].startswith(f"PeerError: rank 1 failed first: {cause}")


def test_a_rank_that_does_not_come_is_named_by_all(pool: RankPool) -> None:
    config = settings(mesh={"pipeline": 4, "timeout_seconds": 0.8})
    for message in messages(pool, 4, sleep_before_the_second_step, 2, config, backend=STRICT):
        assert message.startswith("PeerError: no response from rank 2: killed, crashed, hang")
        assert "mesh.timeout_seconds" in message


# Sweep


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    ranks = RankPool(8)
    yield ranks
    ranks.close()


def all_schedules(pipeline: int, count: int, shapes: str) -> Iterator[Case]:
    """Return each schedule that fits these sizes, with two and three stages per rank."""
    for name, family in SCHEDULES.items():
        for chunks in (2, 3) if family.chunks is None else ("auto",):
            try:
                build_plan(name, pipeline, count, None if chunks == "auto" else chunks)
            except ScheduleError:
                continue
            section = {"schedule": name, "chunks": chunks, "shapes": shapes}
            yield case("plain", pipeline, count=count, depth=26, **section)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", [STRICT, LAZY])
@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize(
    ("count", "shapes"), [(1, "cached"), (5, "declared"), (8, "cached"), (12, "exchanged")]
)
def test_every_schedule_with_every_number_of_stages_ends(
    pool: RankPool, eight_ranks: RankPool, backend: str, ranks: int, count: int, shapes: str
) -> None:
    cases = list(all_schedules(ranks, count, shapes))
    assert cases
    assert_same_as_on_gloo(eight_ranks if ranks > 4 else pool, ranks, cases, backend)
