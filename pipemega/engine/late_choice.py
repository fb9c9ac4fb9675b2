"""Plan and stages of a run whose shapes become known with its first micro-batch.

    initialize          shapes unknown: a provisional plan, stages with even numbers of parameters
    first train_batch   reads its micro-batches; rank 0 counts the layers for the first one and
                        chooses plan and stages, as for data given to `initialize`
                        the stages move, with their state (`stage_mover`); then the step begins

The caller must not have a hold on the stages by then; otherwise they stay where they are.
"""

import pickle
from dataclasses import replace
from typing import Any

from pipemega.distributed.mesh import gather_objects
from pipemega.engine.batch_reader import StepData
from pipemega.engine.first_plan import FirstPlan, first_plan
from pipemega.engine.run_setup import RunSetup
from pipemega.engine.stage_mover import BuiltModules
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds
from pipemega.planning.stage_costs import Sample


class LateChoice:
    """Chooses plan and stages again; once.

    Args:
        setup: of the run.
        given: the plan of the caller; replaces pipeline.schedule.

    Attributes:
        built: the modules that the user has built, as they were before the first stages.
    """

    def __init__(self, setup: RunSetup, given: Plan | None) -> None:
        self._setup, self._given = setup, given
        self.built = BuiltModules(setup.net)

    def of(self, data: StepData) -> FirstPlan:
        """Return the plan and the stages for the micro-batches of the first step; collective.

        Raises:
            ConfigError, ScheduleError: as `first_plan`.
        """
        read = gather_objects(_shapes(data), self._setup.mesh.pipeline)
        inputs = next((pair[0] for pair in read if pair is not None), None)
        ranks = {rank: pair[1] for rank, pair in enumerate(read) if pair is not None}
        labels = ranks.get(max(ranks, default=0))
        sample: Sample | None = None
        if ranks:
            # The first rank may read inputs only.
            with_labels = frozenset(r for r in ranks if repr(ranks[r]) == repr(labels))
            sample = Sample(inputs, labels, with_labels)
        self._setup = replace(self._setup, example=sample, has_read=True)
        return first_plan(self._setup, self._given)

    def on(self, plan: Plan, bounds: Bounds) -> FirstPlan:
        """Return the best plan on the stages of `plan`; collective, after `of`."""
        setup, changes = self._setup, dict[str, Any](partition=bounds)
        example = setup.example
        if setup.config.pipeline.schedule == "auto":
            changes["chunks"] = plan.num_stages // plan.num_ranks
            # No other placement.
            last = frozenset([plan.rank_of_stage[-1]])
            example = example and replace(example, label_ranks=last)
        section = setup.config.pipeline.model_copy(update=changes)
        config = setup.config.model_copy(update={"pipeline": section})
        return first_plan(replace(setup, config=config, example=example), self._given)


def _shapes(data: StepData) -> tuple[Any, Any] | None:
    """Return the first micro-batch that this rank has read, without values."""
    if data.pairs is None:
        return None
    sample = Sample.like(*data.pairs[0])
    try:
        pickle.dumps(sample)
    except Exception:  # an object of the user
        return None
    return sample.inputs, sample.labels
