"""Trains with `comms_logger`; test_comms_logger.py checks the rows and the log."""

import logging
from typing import Any

from pipemega.profiling.communication import CommsLogger
from tests.ranks import training_runs


def run(config: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Train; return the rows of the recorded step, the losses and the lines of the table."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipemega").addHandler(handler)
    try:
        engine = training_runs.build(training_runs.settings(**config))
        losses = [engine.train_batch(training_runs.data(engine, step)) for step in range(steps)]
    finally:
        logging.getLogger("pipemega").removeHandler(handler)
    loggers = [one for one in engine.steps.features if isinstance(one, CommsLogger)]
    rows = [
        (row.operation, row.group, row.ranks, row.calls, row.nbytes, row.completed)
        for one in loggers
        for row in one.rows
    ]
    tables = [line for line in lines if line.startswith("communication of step")]
    return {"rows": sorted(rows), "losses": losses, "tables": tables}
