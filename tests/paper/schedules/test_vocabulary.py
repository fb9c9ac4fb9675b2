"""Vocabulary parallelism as a transformation of plans: complete, free of deadlocks and fast."""

from collections import Counter
from dataclasses import replace

import pytest

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.channels import channels, connections
from pipemega.pipeline.plan.instructions import (
    TRANSFERS,
    VOCABULARY_PASSES,
    WITH_SHARDS,
    Instruction,
    Kind,
    Plan,
)
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan.simulate import CostModel, VocabularyCosts, simulate
from pipemega.pipeline.plan.validate import validate, validate_messages
from pipemega.pipeline.schedules import SCHEDULES, build_plan, forward_only
from pipemega.pipeline.schedules.vocabulary_passes import with_vocabulary
from pipemega.pipeline.visualize.text import draw_text


def costs_of(plan: Plan, blocks: float, head: float) -> CostModel:
    """Return costs in forwards of a block; the head has the products of `head` blocks."""
    stages, ranks = plan.num_stages, plan.num_ranks
    share = blocks / stages
    passes = VocabularyCosts(0.01, 0.01, 2 * head / ranks, 0.01, head / ranks, kept=0.1)
    each = (share,) * stages
    return CostModel(each, each, each, message=0.05, vocabulary=passes)


def with_passes(name: str, ranks: int, count: int, head: float = 10.7) -> tuple[Plan, CostModel]:
    plan = build_plan(name, ranks, count, SCHEDULES[name].default_chunks)
    costs = costs_of(plan, 8.0, head)
    return with_vocabulary(plan, costs), costs


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gets_every_pass_once_and_runs_over_gloo_and_nccl(
    name: str, ranks: int
) -> None:
    plan, _ = with_passes(name, ranks, 8)
    lowered = lower(validate(plan))
    for order in ("tags", "queues"):
        for shapes in ("cached", "exchanged"):
            validate_messages(lowered, order, shapes)
    count = Counter(step.kind for step in plan.steps() if step.kind in VOCABULARY_PASSES)
    expected = dict.fromkeys(VOCABULARY_PASSES, ranks * 8) | {Kind.LOSS: 8}
    assert count == expected
    evaluation = with_vocabulary(forward_only(plan.rank_of_stage, 8), costs_of(plan, 8.0, 10.7))
    validate_messages(lower(evaluation), "queues", "exchanged")
    assert not {Kind.OUTPUT_WEIGHT, Kind.EMBED_WEIGHT} & {step.kind for step in evaluation.steps()}


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved", "v-half"])
def test_every_stage_and_weight_keeps_the_order_of_its_microbatches(name: str) -> None:
    plan, _ = with_passes(name, 4, 8)
    base = build_plan(name, 4, 8, SCHEDULES[name].default_chunks)

    def orders(of: Plan, kind: Kind) -> dict[int, list[int]]:
        steps = [step for step in of.steps() if step.kind is kind]
        return {
            place: [step.microbatch for step in steps if step.stage == place]
            for place in {step.stage for step in steps}
        }

    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        assert orders(plan, kind) == orders(base, kind)
    for kind in VOCABULARY_PASSES:
        assert all(order == list(range(8)) for order in orders(plan, kind).values())


def test_a_head_of_11_of_19_blocks_costs_1f1b_at_most_a_tenth_of_the_ideal_time() -> None:
    plan, costs = with_passes("1f1b", 4, 16)
    timeline = simulate(plan, costs)
    ideal = 16 * 3 * (8 + 10.7) / 4
    # The best cut without it has the head alone on the last rank.
    without = 16 * 3 * 10.7
    assert timeline.makespan < 1.1 * ideal
    assert without / timeline.makespan > 2.0
    assert max(timeline.peak) <= 4 + 3  # at most two more micro-batches ahead, and the softmax


def test_two_ranks_read_as_drawn() -> None:
    plan = build_plan("1f1b", 2, 3, 1)
    costs = replace(CostModel.uniform(2), vocabulary=VocabularyCosts(1.0, 1.0, 1.0, 1.0, 1.0))
    drawn = draw_text(simulate(with_vocabulary(plan, costs), costs)).splitlines()
    assert drawn == [
        "rank 0   E0 E1 F0 E2 S0 F1 T0 .. B0 -- S1 F2 T1 G0 B1 -- S2 G1 T2 .. .. B2 -- G2",
        "rank 1   E0 E1 E2 F0 S0 C0 B0 -- F1 S1 T0 C1 B1 -- F2 S2 G0 C2 T1 B2 -- T2 G1 G2",
    ]


def test_a_limit_of_memory_keeps_forwards_from_moving_ahead() -> None:
    plan = build_plan("1f1b", 4, 16, 1)
    costs = costs_of(plan, 16.0, 10.7)
    free, limited = with_vocabulary(plan, costs), with_vocabulary(plan, costs, memory_limit=4.5)
    peaks = [max(simulate(each, costs).peak) for each in (free, limited)]
    assert peaks[1] <= 4.5 < peaks[0]


def test_json_and_csv_keep_the_passes() -> None:
    plan, _ = with_passes("zb-h1", 2, 4)
    assert Plan.from_json(lower(plan).to_json()) == lower(plan)
    assert Plan.from_csv(plan.to_csv(), plan.name) == plan


def test_five_transfers_connect_every_other_rank_with_the_first_and_the_last_stage() -> None:
    loop = (0, 1, 2, 3)
    with_shards = set(channels(loop, TRANSFERS)) - set(channels(loop))
    assert len(with_shards) == len(WITH_SHARDS) * 3
    assert {rank for c in with_shards for rank in c.ranks(loop)} == {0, 1, 2, 3}
    for group in range(8):
        links = [c for c in connections(loop, TRANSFERS) if c.group == group]
        pairs = [frozenset((c.source, c.target)) for c in links]
        assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("S2@1", "S2@1 occurs 0 times instead of once"),
        ("C1@1", "C1@1 occurs 0 times instead of once"),
        ("T0@0", "T0@0 occurs 0 times instead of once"),
    ],
)
def test_a_missing_pass_is_an_error(left_out: str, message: str) -> None:
    plan, _ = with_passes("1f1b", 2, 3)
    missing = Instruction.parse(left_out)
    programs = tuple(tuple(s for s in program if s != missing) for program in plan.programs)
    with pytest.raises(ScheduleError, match=message):
        validate(replace(plan, programs=programs))


def test_a_pass_on_the_rank_of_another_shard_is_an_error() -> None:
    plan, _ = with_passes("1f1b", 2, 3)
    moved = Instruction.parse("S0@1")
    programs = tuple(tuple(s for s in program if s != moved) for program in plan.programs)
    with pytest.raises(ScheduleError, match="S0@1 is on rank 0, but it is for the shard of rank 1"):
        validate(replace(plan, programs=((*programs[0], moved), programs[1])))


def test_the_loss_before_an_output_pass_is_a_deadlock() -> None:
    plan, _ = with_passes("1f1b", 2, 2)
    loss = Instruction.parse("C0@1")
    programs = tuple(tuple(s for s in program if s != loss) for program in plan.programs)
    with pytest.raises(ScheduleError, match="deadlocks"):
        validate(replace(plan, programs=(programs[0], (loss, *programs[1]))))
