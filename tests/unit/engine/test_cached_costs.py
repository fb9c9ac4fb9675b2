"""Costs of an earlier run in the user's cache."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from pipemega.pipeline.plan.simulate import CostModel
from pipemega.planning import schedule_tuner
from pipemega.planning.planner import MeasuredStages


def test_cached_costs_are_those_that_were_written(tmp_path: Path) -> None:
    """The costs of the vocabulary became a dict, and the next run ended with an AttributeError."""
    written = MeasuredStages((0, 2, 4), (0, 1), True, CostModel.uniform(2), tried_others=True)
    values, file = asdict(written), tmp_path / "costs.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    assert schedule_tuner._cached(file) == written
    del values["costs"]["vocabulary"], values["tried_others"]  # an earlier version
    file.write_text(json.dumps(values), encoding="utf-8")
    assert schedule_tuner._cached(file) == replace(written, tried_others=False)
