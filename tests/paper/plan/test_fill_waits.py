"""W within the exchanges of F and I: the plan, its order and its simulation."""

import dataclasses

import pytest

from pipemega.pipeline.plan.fill_waits import Waits, delay_weights, fill_waits, filled_shares
from pipemega.pipeline.plan.instructions import Instruction, Kind
from pipemega.pipeline.plan.simulate import CostModel, simulate
from pipemega.pipeline.plan.validate import validate
from pipemega.pipeline.schedules import SCHEDULES, build_plan, splits_backward

SPLIT = [name for name in SCHEDULES if splits_backward(name)]
# Two exchanges of 0.1 s in F and in I; W takes 1 s.
WAITS = Waits(0.2, 0.2, 2, 2, 1.0)


def program_of(text: str) -> tuple[Instruction, ...]:
    return tuple(map(Instruction.parse, text.split()))


def test_each_w_moves_to_the_place_of_the_next_one():
    plan = build_plan("zb-h1", 1, 3)
    plan = dataclasses.replace(
        plan, programs=(program_of("F0@0 I0@0 W0@0 F1@0 I1@0 W1@0 F2@0 I2@0 W2@0"),)
    )
    (program,) = delay_weights(plan).programs
    assert " ".join(map(str, program)) == "F0@0 I0@0 F1@0 I1@0 W0@0 F2@0 I2@0 W1@0 W2@0"


def test_the_next_w_runs_in_the_exchanges_as_far_as_it_fits():
    program = program_of("F0@0 I0@0 F1@0 I1@0 W0@0 F2@0 I2@0 W1@0 W2@0")
    filled = fill_waits(program, {0: WAITS})
    assert {str(step): [(str(w), before, after) for w, before, after in filling.goals]
            for step, filling in filled.items()} == {
        "F1@0": [("W0@0", 0.0, 0.2)],
        "I1@0": [("W0@0", 0.2, 0.4)],
        "F2@0": [("W1@0", 0.0, 0.2)],
        "I2@0": [("W1@0", 0.2, 0.4)],
    }  # fmt: skip
    assert all(filling.exchanges == 2 for filling in filled.values())


def test_several_w_fit_into_long_exchanges():
    program = program_of("I0@0 I1@0 F2@0 W0@0 W1@0")
    (filling,) = fill_waits(program, {0: WAITS._replace(forward=1.5, backward=0.0)}).values()
    assert [(str(w), after) for w, _, after in filling.goals] == [("W0@0", 1.0), ("W1@0", 0.5)]


def test_stages_without_exchanges_are_not_filled():
    program = program_of("I0@1 F1@0 W0@1 I1@0 W1@0")
    waits = {0: Waits(0.0, 0.0, 0, 0, 1.0), 1: WAITS}
    assert fill_waits(program, waits) == {}


@pytest.mark.parametrize(
    ("name", "ranks"), [("zb-h1", 1), *((name, ranks) for name in SPLIT for ranks in (2, 4))]
)
def test_parts_of_w_come_after_their_i_before_their_w_and_in_order(name, ranks):
    plan = delay_weights(build_plan(name, ranks, 2 * ranks + 2))
    validate(plan)
    waits = dict.fromkeys(range(plan.num_stages), WAITS)
    for program in plan.programs:
        place = {step: at for at, step in enumerate(program)}
        weights = [step for step in program if step.kind is Kind.BACKWARD_WEIGHT]
        filled, run = fill_waits(program, waits), dict.fromkeys(weights, 0.0)
        last = 0
        for step, filling in filled.items():
            for weight, before, after in filling.goals:
                assert (
                    place[weight._replace(kind=Kind.BACKWARD_INPUT)] < place[step] < place[weight]
                )
                assert run[weight] == before < after <= 1
                run[weight] = after
                assert weights.index(weight) >= last
                last = weights.index(weight)
        assert filled


@pytest.mark.parametrize("name", SPLIT)
def test_the_simulated_step_is_shorter_by_what_runs_in_exchanges(name):
    plan = delay_weights(build_plan(name, 4, 12))
    stages = plan.num_stages
    costs = CostModel.uniform(stages)
    filled = dataclasses.replace(costs, waits=(WAITS,) * stages)
    before, after = simulate(plan, costs), simulate(plan, filled)
    assert after.makespan < before.makespan
    for rank, program in enumerate(plan.programs):
        shares = filled_shares(fill_waits(program, dict.fromkeys(range(stages), WAITS)))
        assert before.busy(rank) - after.busy(rank) == pytest.approx(sum(shares.values()))
