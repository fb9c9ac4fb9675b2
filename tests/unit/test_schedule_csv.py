"""That torch.distributed.pipelining reads the CSV of our plans as the steps they are."""

import csv

from torch.distributed.pipelining.schedules import _Action

from pipemega.pipeline.schedules import one_f_one_b
from tests.paper.plans import hand_made


def test_torch_reads_our_csv_as_the_same_steps():
    halves = hand_made("F0 I0 F1 W0 B1", "F0 I0 W0 F1 B1")
    for plan in (one_f_one_b(3, 5), halves):
        rows = list(csv.reader(plan.to_csv().splitlines()))
        assert len(rows) == plan.num_ranks
        for row, program in zip(rows, plan.programs, strict=True):
            read = [_Action.from_str(cell) for cell in row]
            assert [
                (a.stage_index, a.computation_type.value, a.microbatch_index) for a in read
            ] == [(step.stage, step.kind.value, step.microbatch) for step in program]
