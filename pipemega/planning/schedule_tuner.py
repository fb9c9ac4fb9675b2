"""Schedule "auto": times the first steps and then uses the best plan for the measured costs.

    steps          plan         what happens
    1              first        warm-up
    1              first        memory: what each instruction allocates
    4              first        timed; then rank 0 finds the best plan for the median times, on the
                                stages of the run and on all others, and broadcasts it
                                if others are faster, the stages move (`stage_mover`)
    2              best         warm-up, and memory
    4              best         timed; predicted and measured step time are logged

If the measured time differs from the predicted one, the plan is searched again.  If the steps are
slower than before the stages moved, these move back.

The costs are cached in the user's cache folder, one file per model, mesh and machine: the next such
run starts with the best plan for them. It has the measured stages if the last run compared them
with others, or if others gain little (`measured_stages`).
"""

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipemega.distributed.mesh import from_first
from pipemega.engine.plan_choice import ChosenPlan
from pipemega.engine.run_setup import RunSetup
from pipemega.engine.stage_mover import describe_cut
from pipemega.engine.train_step import PlanChange, StepFeature, TrainStep
from pipemega.errors import PipemegaError
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds
from pipemega.pipeline.plan.simulate import CostModel, VocabularyCosts, simulate
from pipemega.planning.planner import (
    MeasuredStages,
    Planner,
    is_worth_moving,
    split_was_measured,
    stages_of,
)
from pipemega.planning.prediction import Prediction
from pipemega.printing import percent
from pipemega.profiling.measured_costs import measured_costs
from pipemega.profiling.step_trace import Trace
from pipemega.storage.build_once import atomic_path, user_cache_folder

WARM_UP = 2
TIMED = 4
# If measured and predicted time differ by more than this, the predicted costs were wrong.
_TOLERANCE = 0.15
# Largest number of plan changes in one run.
_MAX_CHANGES = 2


@dataclass(frozen=True)
class _Stages:
    """A plan with its stages, and the seconds that are predicted for a step."""

    plan: Plan
    bounds: Bounds
    seconds: float


@dataclass(frozen=True)
class _Next:
    """What the following steps run.

    Args:
        order: the plan on the current stages; also used if the stages cannot move.
        moved: the plan on better stages; None: there are none.
        is_last: nothing is measured after it.
    """

    order: _Stages
    moved: _Stages | None
    is_last: bool = False


@dataclass(frozen=True)
class _Before:
    """The measured seconds of a step before the stages moved, and what to return to.

    Args:
        costs: the measured costs of the stages; None on other ranks than 0.
    """

    seconds: float
    costs: MeasuredStages | None
    stages: _Stages


class ScheduleTuner(StepFeature):
    """Selects the steps to trace, and after them the next plan.

    Args:
        chooser: chooses the next plan, on rank 0.
        first: the first plan, and its seconds if they are known from an earlier run.
        bounds: the bounds of its stages.
        cache: file for the costs; None: do not cache them.
    """

    def __init__(
        self, chooser: Planner, first: ChosenPlan, bounds: Bounds, cache: Path | None
    ) -> None:
        self._chooser, self._mesh, self._log = chooser, chooser.mesh, chooser.log
        self._plan, self._predicted, self._bounds = first.plan, first.seconds, bounds
        self._cache = cache
        self._steps, self._changes, self._done = 0, 0, False
        self._timed: list[Trace] = []
        self._memory_trace: Trace | None = None
        self._wanted: _Next | None = None
        # On rank 0:
        self._measured = 0.0  # seconds of a step
        self._costs: MeasuredStages | None = None
        self._moves = True
        self._before: _Before | None = None

    def traces(self, step: TrainStep) -> bool | None:
        at = self._steps % (WARM_UP + TIMED)
        if not self._measures(step) or self._done or at < WARM_UP - 1:
            return None
        return at < WARM_UP

    def next_change(self, step: TrainStep, trace: Trace | None) -> PlanChange | None:
        """Collect the trace; after the last timed step, choose the next plan.

        Raises:
            ScheduleError: no plan fits into the memory limit.
        """
        if not self._measures(step):
            return None
        memory = self.traces(step)
        self._steps += 1
        if trace is not None and memory is not None:
            if memory:
                self._memory_trace = trace
            else:
                self._timed.append(trace)
        if self._done or self._steps % (WARM_UP + TIMED):
            return None
        self._wanted = wanted = from_first(self._mesh.world, self._next)
        self._timed.clear()
        if wanted is None:
            self._done = True
            return None
        better = wanted.moved
        moved = None if better is None else (better.plan, better.bounds)
        return PlanChange(wanted.order.plan, moved)

    def on_change(self, change: PlanChange, obstacle: str) -> None:
        wanted, self._wanted = self._wanted, None
        assert wanted is not None
        used = wanted.order
        if wanted.moved is not None and obstacle:
            self._moves = False
            plan, bounds = wanted.moved.plan, wanted.moved.bounds
            self._log.info(
                f"schedule auto: the stages stay, although a step on layers "
                f"{describe_cut(bounds, plan.rank_of_stage)} is predicted to take "
                f"{_ms(wanted.moved.seconds)}: {obstacle}"
            )
        elif wanted.moved is not None:
            used = wanted.moved
            self._before = _Before(self._measured, self._costs, wanted.order)
            self._bounds = used.bounds
        self._plan, self._predicted, self._done = used.plan, used.seconds, wanted.is_last
        self._changes += 1

    def _measures(self, step: TrainStep) -> bool:
        """Return whether the step has the plan that is measured, and not one of a ramp-up."""
        return step.plan.num_microbatches == self._plan.num_microbatches

    def _next(self) -> _Next | None:
        """Return what the following steps run, on rank 0; None: keep the current plan."""
        measured = statistics.median(trace.timeline.makespan for trace in self._timed)
        stages = self._measured_stages()
        self._measured, self._costs = measured, stages
        if self._predicted is not None:
            deviation = measured / self._predicted - 1.0
            self._log.info(
                f"schedule auto: step time of {self._plan.name}: predicted "
                f"{_ms(self._predicted)}, measured {_ms(measured)} "
                f"({percent(deviation, signed=True)})"
            )
            if self._before is not None and measured > self._before.seconds:
                return self._back(measured, self._before)
            if abs(deviation) <= _TOLERANCE or self._changes >= _MAX_CHANGES:
                if stages.tried_others:
                    self._save(stages)
                return None
        self._save(stages)
        free = self._chooser.best_stages(stages) if self._may_move else None
        plan, costs = self._chooser.next_plan(self._plan, stages, free)
        best, now = simulate(plan, costs), simulate(self._plan, costs)
        self._log.info(
            f"schedule auto: step time of {self._plan.name}: measured {_ms(measured)}, simulated "
            f"{_ms(now.makespan)}; the next steps run {plan.name}: "
            f"predicted {_ms(best.makespan)}, bubble {percent(best.bubble)}, at most "
            f"{max(best.peak) / 1e6:.0f} MB of activations on a rank"
        )
        order = _Stages(plan, self._bounds, best.makespan)
        if free is None or stages_of(free) == stages.stages:
            return _Next(order, None)
        return _Next(order, self._better_stages(free, stages, best.makespan))

    def _measured_stages(self) -> MeasuredStages:
        costs = measured_costs(self._timed)
        if self._memory_trace is not None:
            memory = measured_costs([self._memory_trace])
            costs = replace(costs, activation=memory.activation, kept=memory.kept)
        return MeasuredStages(
            self._bounds,
            self._plan.rank_of_stage,
            split_was_measured(self._plan),
            costs,
            tried_others=self._before is not None,
        )

    @property
    def _may_move(self) -> bool:
        return self._moves and self._chooser.counts_memory

    def _better_stages(
        self, best: Prediction, measured: MeasuredStages, seconds: float
    ) -> _Stages | None:
        """Return the stages of `best` if a step is predicted to be faster there, else None.

        Args:
            best: the fastest plan on any stages; they are not the current ones.
            seconds: predicted for the best plan on the current stages.
        """
        bounds, place = stages_of(best)
        best_seconds = best.timeline.makespan
        if not is_worth_moving(best, seconds):
            return None
        self._log.info(
            f"schedule auto: on other stages a step is predicted to take {_ms(best_seconds)} "
            f"instead of {_ms(seconds)}: layers "
            f"{describe_cut(*measured.stages)} -> {describe_cut(bounds, place)}"
        )
        return _Stages(self._chooser.lowered(best), bounds, best_seconds)

    def _back(self, measured: float, before: _Before) -> _Next:
        """Return the stages of before, because the steps are not faster on the current ones."""
        self._log.info(
            f"schedule auto: a step took {_ms(before.seconds)} before the stages moved and takes "
            f"{_ms(measured)} now: they move back"
        )
        if before.costs is not None:
            self._save(replace(before.costs, tried_others=True))
        current = _Stages(self._plan, self._bounds, measured)
        return _Next(current, before.stages, is_last=True)

    def _save(self, stages: MeasuredStages) -> None:
        if self._cache is None:
            return
        try:
            with atomic_path(self._cache) as path:
                path.write_text(json.dumps(asdict(stages)), encoding="utf-8")
        except (OSError, PipemegaError) as error:
            self._log.warning(f"schedule auto: cannot cache the costs for the next run: {error}")


class TunedPlans(Planner):
    """The plans of schedule `auto`: the first one, and what replaces it after measurements."""

    def __init__(self, setup: RunSetup) -> None:
        super().__init__(setup)
        # The passes of a cut vocabulary are not measured, so the plan of the first step stays.
        self._is_tuned = not setup.cuts_vocabulary and not self.shapes_follow
        is_tuned = not setup.cuts_vocabulary and not self.shapes_follow
        self._cache = _cache_file(_cost_key(setup), setup.mesh.device) if is_tuned else None

    def first(self, given: Plan | None) -> ChosenPlan:
        if self._cache is None:
            return self._from_first(lambda: self.first_plan(None))
        measured = _cached(self._cache) if self.mesh.rank == 0 else None
        first = self._from_first(lambda: self.first_plan(measured))
        if first.seconds is None:
            self.log.info(
                f"schedule auto: the first {WARM_UP + TIMED} steps run {first.plan.name} and are "
                "measured; then the best plan replaces it"
            )
        else:
            self.log.info(
                f"schedule auto: {first.plan.name} from cached costs ({self._cache}): predicted "
                f"{_ms(first.seconds)}"
            )
        return first

    def tuner(self, first: ChosenPlan, bounds: Bounds) -> StepFeature | None:
        return ScheduleTuner(self, first, bounds, self._cache) if self._cache else None


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


def _cost_key(setup: RunSetup) -> dict[str, Any]:
    """Return everything that the cost of a micro-batch on a layer depends on."""
    config, net = setup.config, setup.net
    sections = ["model", "activation_checkpointing", "fp16", "bf16", "data_types"]
    if config.compile.applies(setup.mesh.device.type):
        sections.append("compile")
    whole = config.to_dict()
    # Keys that came later are in it only if they are set: the caches of before are still found.
    later = {"cuda_graphs": True} if config.compile.cuda_graphs else {}
    if not config.activation_checkpointing.cpu_checkpointing:
        whole["activation_checkpointing"].pop("cpu_checkpointing", None)
    return later | {
        "layers": net.layer_names,
        "parameters": net.count_parameters(),
        "partition": config.pipeline.partition,
        "checkpoint_interval": config.pipeline.activation_checkpoint_interval,
        "mesh": str(setup.mesh.topology),
        "sequence_parallel": config.mesh.sequence_parallel,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        **{name: whole.get(name) for name in sections},
    }


def _cached(file: Path) -> MeasuredStages | None:
    """Return the cached costs; None if the file does not exist, is damaged or does not fit."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError, PipemegaError):
        found = json.loads(file.read_text(encoding="utf-8"))
        values = {key: _as_tuple(value) for key, value in found["costs"].items()}
        # Files of earlier versions have none.
        passes = VocabularyCosts(**values.pop("vocabulary", {}))
        costs = CostModel(**values, vocabulary=passes)
        ranks = tuple(map(int, found["rank_of_stage"]))
        bounds = tuple(map(int, found["bounds"]))
        if costs.num_stages == len(ranks) == len(bounds) - 1:
            tried = bool(found.get("tried_others"))
            return MeasuredStages(bounds, ranks, bool(found["split"]), costs, tried)
    return None


def _as_tuple(value: float | Sequence[float] | None) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
