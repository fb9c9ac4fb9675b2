"""torch.distributed.pipelining parses the CSV of a plan."""

import csv

from torch.distributed.pipelining.schedules import _Action

from pipemega.pipeline.schedules.one_f_one_b import one_f_one_b
from tests.paper.hand_made_plans import hand_made


def test_torch_parses_the_csv_of_a_plan_to_the_same_steps():
    split_backward = hand_made("F0 I0 F1 W0 B1", "F0 I0 W0 F1 B1")
    for plan in (one_f_one_b(3, 5), split_backward):
        rows = list(csv.reader(plan.to_csv().splitlines()))
        assert len(rows) == plan.num_ranks
        for row, program in zip(rows, plan.programs, strict=True):
            read = [str(_Action.from_str(cell)) for cell in row]
            assert read == [f"{s.stage}{s.kind.value}{s.microbatch}" for s in program]
