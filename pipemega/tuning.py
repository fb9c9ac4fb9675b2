"""Schedule "auto": measures the first steps and puts the plan in use that is best for them.

    steps          plan         what happens
    1              plain        warm-up
    1              plain        weighed: what each instruction leaves in memory
    4              plain        timed; then rank 0 makes the best plan for the medians, all take it
    2              the best     warm-up, and weighed
    4              the best     timed: the log has what was predicted and what was measured

The costs are kept in the user's cache, one file per model, mesh and machine: the next run on them
begins with the best plan. Where that does not take the time that was predicted, it is made again.
"""

import hashlib
import json
import logging
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pipemega.data.caching import atomic_path, user_cache_folder
from pipemega.errors import PipemegaError
from pipemega.mesh import Mesh, from_first
from pipemega.pipeline.choice import best_plan
from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.instructions import Plan
from pipemega.pipeline.lowering import lower
from pipemega.pipeline.measured import measured_costs
from pipemega.pipeline.simulate import simulate
from pipemega.pipeline.synthesis import Layout
from pipemega.pipeline.trace import Trace
from pipemega.pipeline.validate import validate
from pipemega.tracer import Tracer

WARM_UP = 2
TIMED = 4
# A step that takes so much more or less than predicted was predicted from the wrong costs.
_OFF = 0.15
# Rounds of measuring and choosing in one run.
_MOST_CHOICES = 2


class ScheduleTuner:
    """Says which steps are to be timed, and after which of them another plan comes; collective.

    Args:
        mesh: of the run.
        plan: that the run begins with, lowered.
        memory_limit: for the activations of a rank, in bytes; or "auto".
        costs: of an earlier run, which `plan` was made for; None: `plan` is a plain one.
        cache: where costs are kept; None: nowhere.
        log: of rank 0.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: Plan,
        memory_limit: float | str,
        costs: CostModel | None,
        cache: Path | None,
        log: logging.Logger,
    ) -> None:
        self._mesh, self._plan, self._limit = mesh, plan, memory_limit
        self._cache, self._log = cache, log
        self._predicted = None if costs is None else simulate(plan, costs).makespan
        self._steps = 0
        self._choices = 0
        self._timed: list[Trace] = []
        self._weighed: Trace | None = None
        self._asks = False
        self.done = False
        """Nothing is left to measure."""

    def prepare_step(self, tracer: Tracer) -> None:
        """Asks for what is to be measured in the step that begins now."""
        at = self._steps % (WARM_UP + TIMED)
        self._asks = not self.done and at >= WARM_UP - 1
        if self._asks:
            tracer.trace_next_step(memory=at < WARM_UP)

    def after_step(self, trace: Trace | None) -> Plan | None:
        """The plan from the next step on, if that is another.

        Args:
            trace: of the step, where `prepare_step` asked for it; read on rank 0.

        Raises:
            ScheduleError: no plan keeps the memory limit.
        """
        self._steps += 1
        if trace is not None and self._asks:
            if (self._steps - 1) % (WARM_UP + TIMED) < WARM_UP:
                self._weighed = trace
            else:
                self._timed.append(trace)
        if self.done or self._steps % (WARM_UP + TIMED):
            return None
        plan = from_first(self._mesh.world, self._judge)
        self._timed.clear()
        if plan is None:
            self.done = True
            return None
        self._plan = validate(lower(plan))
        self._choices += 1
        return self._plan

    def _judge(self) -> Plan | None:
        """On rank 0: the plan to go on with; None: the one there is."""
        measured = statistics.median(trace.timeline.makespan for trace in self._timed)
        if self._predicted is not None:
            off = measured / self._predicted - 1.0
            self._log.info(
                f"schedule auto: {self._plan.name} was predicted to take "
                f"{_ms(self._predicted)}, and takes {_ms(measured)} ({off:+.1%})"
            )
            if abs(off) <= _OFF or self._choices >= _MOST_CHOICES:
                return None
        costs = measured_costs(self._timed)
        if self._weighed is not None:
            weighed = measured_costs([self._weighed])
            costs = replace(costs, activation=weighed.activation, kept=weighed.kept)
        self._keep(costs)
        best = best_plan(
            [Layout(self._plan.rank_of_stage, costs)], self._plan.num_microbatches, self._limit
        )
        self._predicted = best.timeline.makespan
        self._log.info(
            f"schedule auto: {self._plan.name} took {_ms(measured)} "
            f"({_ms(simulate(self._plan, costs).makespan)} by its costs); from the next step on "
            f"{best.plan.name}, predicted {_ms(self._predicted)}, bubble "
            f"{best.timeline.bubble:.1%}, activations of at most "
            f"{max(best.timeline.peak) / 1e6:.0f} MB on a rank"
        )
        return best.plan

    def _keep(self, costs: CostModel) -> None:
        if self._cache is None:
            return
        try:
            with atomic_path(self._cache) as path:
                path.write_text(json.dumps(asdict(costs)), encoding="utf-8")
        except (OSError, PipemegaError) as error:
            self._log.warning(f"schedule auto: the costs cannot be kept for the next run: {error}")


def begin_tuning(
    plan: Plan,
    mesh: Mesh,
    memory_limit: float | str,
    about: Mapping[str, Any],
    log: logging.Logger,
) -> tuple[Plan, ScheduleTuner]:
    """The lowered plan to begin with, and what comes after it; collective.

    Args:
        plan: a plain one, for a run whose costs nobody knows yet.
        about: whatever tells models and meshes apart, as plain values.
    """
    file = _cache_file(about, mesh.device)

    def recall() -> tuple[Plan, CostModel] | None:
        costs = _kept_costs(file, plan.num_stages)
        if costs is None:
            return None
        layout = Layout(plan.rank_of_stage, costs)
        best = best_plan([layout], plan.num_microbatches, memory_limit)
        log.info(
            f"schedule auto: with the costs of an earlier run ({file}) {best.plan.name}, predicted "
            f"{_ms(best.timeline.makespan)}, bubble {best.timeline.bubble:.1%}"
        )
        return best.plan, costs

    known = from_first(mesh.world, recall)
    if known is None:
        log.info(
            f"schedule auto: the first {WARM_UP + TIMED} steps run {plan.name} and are timed; then "
            "the best plan takes over"
        )
    begin, costs = known or (plan, None)
    begin = validate(lower(begin))
    return begin, ScheduleTuner(mesh, begin, memory_limit, costs, file, log)


def _cache_file(about: Mapping[str, Any], device: torch.device) -> Path:
    """Where the costs of a model on a mesh on this machine are kept."""
    machine = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    text = json.dumps({**about, "machine": machine, "torch": torch.__version__}, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return user_cache_folder() / "schedules" / f"{name}.json"


def _kept_costs(file: Path, num_stages: int) -> CostModel | None:
    """The costs that an earlier run has kept; None where there are none to be used."""
    with suppress(OSError, ValueError, TypeError, RecursionError, PipemegaError):
        found = json.loads(file.read_text(encoding="utf-8"))
        costs = CostModel(**{key: _frozen(value) for key, value in found.items()})
        if costs.num_stages == num_stages:
            return costs
    return None


def _frozen(value: float | Sequence[float] | None) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
