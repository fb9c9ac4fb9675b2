"""Tests of the cut between the warm-up and the rest of a plan."""

from collections import Counter

import pytest
from hypothesis import given

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan
from pipemega.pipeline.plan.lowering import WarmupCut, lower, warmup_cut
from pipemega.pipeline.plan.validate import validate
from pipemega.pipeline.schedules import SCHEDULES, build_plan
from tests.paper.hand_made_plans import hand_made, valid_plans


def heads_of(cut: WarmupCut) -> list[tuple[Instruction, ...]]:
    return [program[:stop] for program, stop in zip(cut.plan.programs, cut.stop, strict=True)]


def words(program: tuple[Instruction, ...], *kinds: Kind) -> str:
    return " ".join(f"{s.kind.value}{s.microbatch}" for s in program if s.kind in kinds)


def check(plan: Plan) -> WarmupCut:
    """The rules of every cut; `plan` is lowered."""
    cut = warmup_cut(plan)
    validate(cut.plan)
    assert cut.plan.compute_only() == plan.compute_only()
    heads = heads_of(cut)
    ran = {step for head in heads for step in head if step.kind is Kind.FORWARD}
    for rank, (head, program) in enumerate(zip(heads, cut.plan.programs, strict=True)):
        assert not any(
            "BACKWARD" in step.kind.name or "GRADIENT" in step.kind.name for step in head
        )
        # Nothing in it waits for what comes behind a cut.
        for step in head:
            if step.kind is Kind.FORWARD and step.stage > 0:
                assert step._replace(stage=step.stage - 1) in ran
        assert not any(step.kind is Kind.FORWARD for step in program[cut.last_forward[rank] :])
        assert cut.last_forward[rank] >= cut.stop[rank]
    sent = Counter(
        Instruction(Kind.RECV_ACTIVATION, step.stage + 1, step.microbatch)
        for head in heads
        for step in head
        if step.kind is Kind.SEND_ACTIVATION
    )
    taken = Counter(
        step
        for steps in (*heads, *cut.unread)
        for step in steps
        if step.kind is Kind.RECV_ACTIVATION
    )
    assert taken == sent
    return cut


def test_1f1b_on_three_ranks_is_cut_as_drawn() -> None:
    cut = check(lower(build_plan("1f1b", 3, 4)))
    heads = heads_of(cut)
    assert [words(head, Kind.FORWARD) for head in heads] == ["F0 F1 F2", "F0 F1", "F0"]
    assert [words(head, Kind.RECV_ACTIVATION) for head in heads] == ["", "RA0 RA1", "RA0"]
    # The first rank has sent one micro-batch more than the second has used, and so on.
    assert [words(unread, Kind.RECV_ACTIVATION) for unread in cut.unread] == ["", "RA2", "RA1"]


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize("pp_size", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_cut_at_its_first_backward(
    name: str, pp_size: int, num_microbatches: int
) -> None:
    plan = build_plan(name, pp_size, num_microbatches)
    for program, head in zip(plan.programs, heads_of(check(lower(plan))), strict=True):
        first = next(at for at, step in enumerate(program) if step.kind is not Kind.FORWARD)
        assert sum(step.kind is Kind.FORWARD for step in head) == first


@given(valid_plans())
def test_any_plan_can_be_cut(plan: Plan) -> None:
    check(lower(plan))


def test_a_warm_up_that_needs_another_ranks_backward_is_cut_before_that() -> None:
    plan = hand_made("F0 B0 F1 B1", "F0 B0 F1 B1")
    late = hand_made("F0@0 F1@0 F0@2 B0@2 F1@2 B1@2 B0@0 B1@0", "F0@1 F1@1 B0@1 B1@1",
                     rank_of_stage=(0, 1, 0))  # fmt: skip
    assert [words(head, Kind.FORWARD) for head in heads_of(check(lower(plan)))] == ["F0", "F0"]
    heads = heads_of(check(lower(late)))
    assert [words(head, Kind.FORWARD) for head in heads] == ["F0 F1 F0", "F0 F1"]
    # Stage 2 on a rank of its own, which is given micro-batch 1 only behind a first backward.
    plan = hand_made(
        "F0@0 F1@0 B0@0 B1@0", "F0@1 F0@3 B0@3 F1@1 F1@3 B1@3 B0@1 B1@1", "F0@2 F1@2 B0@2 B1@2",
        rank_of_stage=(0, 1, 2, 1),
    )  # fmt: skip
    heads = heads_of(check(lower(plan)))
    assert [words(head, Kind.FORWARD) for head in heads] == ["F0 F1", "F0 F0", "F0"]
