"""Schedule "auto": times the first steps and then uses the best plan for the measured costs.

    steps          plan         what happens
    1              first        warm-up
    1              first        memory: what each instruction allocates
    4              first        timed; then rank 0 finds the best plan for the median times on the
                                stages of the run, and broadcasts it
    2              best         warm-up, and memory
    4              best         timed; predicted and measured step time are logged

The costs are cached in the user's cache folder, one file per model, mesh and machine: the next such
run starts with the best plan for them, on the best placement of all.  If its measured time differs
from the predicted one, the plan is searched again.
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

from pipemega.data.file_cache import atomic_path, user_cache_folder
from pipemega.distributed.mesh import Mesh, from_first
from pipemega.engine.plan_choice import ChosenPlan, MeasuredStages, PlanChooser, split_was_measured
from pipemega.engine.step_callbacks import StepCallback, TrainStep
from pipemega.errors import PipemegaError
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.layer_moves import Bounds
from pipemega.pipeline.plan.simulate import simulate
from pipemega.printing import percent
from pipemega.profiling.cost_estimation import measured_costs
from pipemega.profiling.trace import Trace

WARM_UP = 2
TIMED = 4
# If measured and predicted time differ by more than this, the predicted costs were wrong.
_TOLERANCE = 0.15
# Largest number of plan changes in one run.
_MAX_CHANGES = 2


class ScheduleTuner(StepCallback):
    """Selects the steps to trace, and after them the next plan.

    Args:
        mesh: of the run.
        plan: the first plan, lowered.
        bounds: of its stages.
        predicted: its seconds, if they are known from an earlier run.
        chooser: chooses the next plan, on rank 0.
        cache: file for the costs; None: do not cache them.
        log: of this rank.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: Plan,
        bounds: Bounds,
        predicted: float | None,
        chooser: PlanChooser,
        cache: Path | None,
        log: logging.Logger,
    ) -> None:
        self._mesh, self._plan, self._chooser = mesh, plan, chooser
        self._bounds = bounds
        self._cache, self._log = cache, log
        self._predicted = predicted
        self._steps, self._changes, self._done = 0, 0, False
        self._timed: list[Trace] = []
        self._memory_trace: Trace | None = None

    def before_step(self, step: TrainStep) -> None:
        if not self._measures(step):
            return
        at = self._steps % (WARM_UP + TIMED)
        if not self._done and at >= WARM_UP - 1:
            step.trace_memory = at < WARM_UP

    def after_step(self, step: TrainStep) -> None:
        """Collect the trace; after the last timed step, choose the next plan.

        Raises:
            ScheduleError: no plan fits into the memory limit.
        """
        if not self._measures(step):
            return
        self._steps += 1
        if step.trace is not None and step.trace_memory is not None:
            if step.trace_memory:
                self._memory_trace = step.trace
            else:
                self._timed.append(step.trace)
        if self._done or self._steps % (WARM_UP + TIMED):
            return
        plan = from_first(self._mesh.world, self._next_plan)
        self._timed.clear()
        if plan is None:
            self._done = True
            return
        self._plan = step.next_plan = plan
        self._changes += 1

    def _measures(self, step: TrainStep) -> bool:
        """Return whether the step has the plan that is measured, and not one of a ramp-up."""
        return step.plan.num_microbatches == self._plan.num_microbatches

    def _next_plan(self) -> Plan | None:
        """Return the plan for the following steps, on rank 0; None: keep the current one."""
        measured = statistics.median(trace.timeline.makespan for trace in self._timed)
        if self._predicted is not None:
            deviation = measured / self._predicted - 1.0
            self._log.info(
                f"schedule auto: step time of {self._plan.name}: predicted "
                f"{_ms(self._predicted)}, measured {_ms(measured)} "
                f"({percent(deviation, signed=True)})"
            )
            if abs(deviation) <= _TOLERANCE or self._changes >= _MAX_CHANGES:
                return None
        costs = measured_costs(self._timed)
        if self._memory_trace is not None:
            memory = measured_costs([self._memory_trace])
            costs = replace(costs, activation=memory.activation, kept=memory.kept)
        split = split_was_measured(self._plan)
        stages = MeasuredStages(self._bounds, self._plan.rank_of_stage, split, costs)
        self._save(stages)
        plan, costs = self._chooser.next_plan(self._plan, stages)
        best, now = simulate(plan, costs), simulate(self._plan, costs)
        self._predicted = best.makespan
        self._log.info(
            f"schedule auto: step time of {self._plan.name}: measured {_ms(measured)}, simulated "
            f"{_ms(now.makespan)}; the next steps run {plan.name}: "
            f"predicted {_ms(self._predicted)}, bubble {percent(best.bubble)}, at most "
            f"{max(best.peak) / 1e6:.0f} MB of activations on a rank"
        )
        return plan

    def _save(self, stages: MeasuredStages) -> None:
        if self._cache is None:
            return
        try:
            with atomic_path(self._cache) as path:
                path.write_text(json.dumps(asdict(stages)), encoding="utf-8")
        except (OSError, PipemegaError) as error:
            self._log.warning(f"schedule auto: cannot cache the costs for the next run: {error}")


def first_tuned_plan(
    chooser: PlanChooser, mesh: Mesh, cost_key: Mapping[str, Any], log: logging.Logger
) -> tuple[ChosenPlan, Path]:
    """Return the first plan, and the cache file of its measured costs; collective.

    Args:
        chooser: chooses the plans, on rank 0.
        cost_key: everything that the costs depend on, as JSON values.

    Raises:
        ConfigError, ScheduleError: as `PlanChooser.first_plan`.
    """
    file = _cache_file(cost_key, mesh.device)
    first = from_first(mesh.world, lambda: chooser.first_plan(_cached(file)))
    if first.seconds is None:
        log.info(
            f"schedule auto: the first {WARM_UP + TIMED} steps run {first.plan.name} and are "
            "measured; then the best plan replaces it"
        )
    else:
        log.info(
            f"schedule auto: {first.plan.name} from cached costs ({file}): predicted "
            f"{_ms(first.seconds)}"
        )
    return first, file


def _cache_file(cost_key: Mapping[str, Any], device: torch.device) -> Path:
    """Return the cache file of a model on a mesh on this machine."""
    machine = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    text = json.dumps({**cost_key, "machine": machine, "torch": torch.__version__}, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return user_cache_folder() / "schedules" / f"{name}.json"


def _cached(file: Path) -> MeasuredStages | None:
    """Return the cached costs; None if the file does not exist, is damaged or does not fit."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError, PipemegaError):
        found = json.loads(file.read_text(encoding="utf-8"))
        costs = CostModel(**{key: _as_tuple(value) for key, value in found["costs"].items()})
        ranks = tuple(map(int, found["rank_of_stage"]))
        bounds = tuple(map(int, found["bounds"]))
        if costs.num_stages == len(ranks) == len(bounds) - 1:
            return MeasuredStages(bounds, ranks, bool(found["split"]), costs)
    return None


def _as_tuple(value: float | Sequence[float] | None) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
