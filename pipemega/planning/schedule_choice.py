"""Schedule `auto` for a model on the meta device: the fastest plan within the memory limit.

Candidates are all named schedules and the result of a search, on placements loop and v, with each
useful number of stages per rank. With pipeline.partition `auto` each candidate has the cut that is
best for it. All are simulated with the costs of their own stages; so the choice is never slower
than a named schedule within the limit.

`pipeline.vocabulary: "auto"` with schedule `auto`: whether the vocabulary is cut.

It is cut where the simulated step is shorter, within the memory limit: the best named schedule on
the best cut with the head in the last stage is compared with the same for a vocabulary cut over
the pipeline ranks. All times are from the fixed table, so a plan and its run agree.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import gt
from typing import NamedTuple

from pipemega.config import Config
from pipemega.config.sections.pipeline_sections import PipelineSection
from pipemega.errors import PipemegaError, ScheduleError
from pipemega.pipeline.autoschedule import Placement, chunk_counts, find_plan
from pipemega.pipeline.model.module import PipelineModule
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.partition import Bounds
from pipemega.pipeline.plan.simulate import Timeline, simulate
from pipemega.pipeline.schedules import AUTO, SCHEDULES, Sizes, named_plans
from pipemega.pipeline.schedules.building_blocks import loop_and_v
from pipemega.pipeline.schedules.one_f_one_b import sequential_on
from pipemega.planning.meta_model import MetaModel
from pipemega.planning.prediction import Prediction, Rates, predict
from pipemega.printing import show_bytes

# Effort of a search, lower for plans with more steps: it takes about 2 seconds on one core.
_EFFORT, _FULL_EFFORT_STEPS = 0.3, 1536
# Searches, each with a lower limit if the whole memory of the found plan is too high.
_MAX_SEARCHES = 4
# With more than 2 stages per rank, plans with more steps than this are not tried.
_MAX_STEPS = 12_000
_ROUNDING = 1e-9
# Share of the effort of the cut of one plan.
_CUT_EFFORT = 0.25
# Plans whose times differ by less than this fraction are compared by the times of whole stages;
# the largest number of them.
_SAME_TIME, _MAX_PREDICTED = 0.02, 8


@dataclass(frozen=True)
class MemoryLimit:
    """Limits in bytes for every rank.

    Args:
        activations: limit of activations from F to B, and of what W needs from I to W.
        total: limit of the whole memory at the peak; None: no limit.
    """

    activations: float
    total: int | None = None

    def keeps(self, prediction: Prediction) -> bool:
        """Return whether each rank is within the limits."""
        if max(prediction.timeline.peak) > self.activations * (1 + _ROUNDING):
            return False
        return self.total is None or prediction.peak <= self.total


@dataclass(frozen=True, eq=False)
class Choice:
    """The plan of schedule `auto`.

    Args:
        prediction: the prediction for the plan, named `auto`; its note describes the choice.
        origin: the named schedule that it is, or how the search found it.
        limit: the memory limit that the plan keeps.
    """

    prediction: Prediction
    origin: str
    limit: MemoryLimit


class Stages(NamedTuple):
    """The stages of a plan.

    Args:
        bounds: stage s is layers bounds[s] to bounds[s + 1] - 1.
        rank_of_stage: for each stage, its pipeline rank.
    """

    bounds: Bounds
    rank_of_stage: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Candidate:
    timeline: Timeline
    origin: str
    bounds: Bounds

    @property
    def stages(self) -> Stages:
        return Stages(self.bounds, self.timeline.plan.rank_of_stage)

    @property
    def rank(self) -> tuple[float, int]:
        """Sorts the fastest first; of equally fast ones that with fewer stages."""
        return float(f"{self.timeline.makespan:.9g}"), self.timeline.plan.num_stages


class ScheduleChooser:
    """Chooses the plan of schedule `auto`, and with pipeline.partition `auto` its cut.

    Args:
        model: the model on its mesh.
        section: `chunks`, `memory_limit` and `partition` restrict the choice.
        num_microbatches: number of micro-batches of a step.
        rates: times of the stages; measured times of layers (`rates.layers`) decide the cut too.
        stages: choose only the order of the instructions, on these stages; None: all stages that
            the section allows.
        quick: only named schedules with at most 2 stages per rank, without a search.
    """

    def __init__(
        self,
        model: MetaModel,
        section: PipelineSection,
        num_microbatches: int,
        rates: Rates,
        stages: Stages | None = None,
        *,
        quick: bool = False,
    ) -> None:
        self._quick = quick
        self._model, self._section, self._rates = model, section, rates
        self._num_microbatches, self._stages = num_microbatches, stages
        self._layers = rates.layers or model.layer_costs
        self._placements = tuple(self._all_placements()) if stages is None else (stages[1],)

    def choose(self) -> Choice:
        """Return the fastest plan within the limit.

        Raises:
            ScheduleError: no plan keeps `memory_limit`.
        """
        began = time.monotonic()
        limit = self._limit()
        named = sorted(self._named(limit), key=lambda candidate: candidate.rank)
        best = self._best(named, limit)
        if best is None and limit.total is not None:
            # Only with a fixed number of chunks, whose weights alone may be too large on a rank.
            limit = replace(limit, total=None)
            best = self._best(named, limit)
        if best is None:
            raise ScheduleError(
                f"pipeline.memory_limit: no plan on these stages keeps {limit.activations:,.0f} "
                f"bytes of activations on each rank: raise the limit, or set pipeline.chunks "
                f"to 'auto'"
            )
        prediction = self._predict(best)
        prediction = replace(prediction, plan=replace(prediction.plan, name=AUTO))
        note = self._describe(prediction, best.origin, limit, time.monotonic() - began)
        return Choice(replace(prediction, note=note), best.origin, limit)

    def _describe(
        self, prediction: Prediction, origin: str, limit: MemoryLimit, seconds: float
    ) -> str:
        chunks = prediction.chunks
        held = f"{show_bytes(limit.activations)} of activations"
        if limit.total is not None:
            held += f" and {show_bytes(limit.total)} in all"
        same = ", as 1f1b on its fullest rank" if self._section.memory_limit == "auto" else ""
        return (
            f"schedule auto is {origin} with {chunks} stage{'s' * (chunks > 1)} per rank "
            f"(bounds {list(prediction.layout.bounds)}): the fastest of {len(self._placements)} "
            f"placements with at most {held} on a rank{same}; found in {seconds:.0f} s"
        )

    def _all_placements(self) -> Iterator[tuple[int, ...]]:
        ranks, chunks = self._model.num_ranks, self._section.stages_per_rank
        counts = (chunks,) if chunks else chunk_counts(ranks, *self._model.layer_counts)
        steps_per_chunk = 3 * ranks * self._num_microbatches
        for count in counts:
            most = 2 if self._quick else _MAX_STEPS // steps_per_chunk
            if count <= max(2, chunks or 0, most) and self._model.allows_stages(ranks * count):
                yield from filter(self._model.has_labels, loop_and_v(ranks, count))

    def _named(self, limit: MemoryLimit) -> Iterator[_Candidate]:
        for place in self._placements:
            for plan in named_plans(place, self._model.num_ranks, self._num_microbatches):
                for bounds in self._cuts_of(plan, limit):
                    yield self._candidate(plan, plan.name, bounds)

    def _cuts_of(
        self, plan: Plan, limit: MemoryLimit, starts: tuple[Bounds, ...] = ()
    ) -> tuple[Bounds, ...]:
        """Return the cuts to try for `plan`: with and without the limit, if the cut is free.

        The limit of a cut applies to sums over layers, which are not quite the bytes of stages; so
        the cut without a limit may keep it. Both are checked with the bytes of whole stages.
        """
        if self._stages is not None:
            return (self._stages.bounds,)
        if not self._model.cuts_by_time:
            return (self._model.even_bounds(plan.num_stages),)
        found = [
            self._model.cut_within(plan, self._layers, held, starts, effort=_CUT_EFFORT).bounds
            for held in (None, limit.activations)
        ]
        if not self._rates.layers:
            # The cut of the named schedule.
            found.append(self._model.cut(plan).bounds)
        return tuple(dict.fromkeys(found))

    def _candidate(self, plan: Plan, origin: str, bounds: Bounds) -> _Candidate:
        plan = self._model.limit_weight_queue(plan, bounds)
        return _Candidate(simulate(plan, self._layers.cost_model(bounds)), origin, bounds)

    def _predict(self, candidate: _Candidate) -> Prediction:
        return predict(self._model, candidate.timeline.plan, self._rates, candidate.bounds)

    def _best(self, named: list[_Candidate], limit: MemoryLimit) -> _Candidate | None:
        """Return the fastest plan within the limit; None if there is none."""
        best = self._first_within(named, limit)
        found = None if self._quick else self._search(limit, named, best)
        if found is None or best is None:
            return found or best
        return min(best, found, key=self._predicted)

    def _predicted(self, candidate: _Candidate) -> float:
        """Return the time of a step by the times of whole stages."""
        return float(f"{self._predict(candidate).timeline.makespan:.9g}")

    def _first_within(
        self, sorted_by_time: list[_Candidate], limit: MemoryLimit
    ) -> _Candidate | None:
        """Return the fastest candidate within the limit.

        The times of whole stages are not quite sums over layers: they decide among candidates that
        are nearly equal by the latter.
        """
        within: list[_Candidate] = []
        for candidate in sorted_by_time:
            slowest = (1 + _SAME_TIME) * within[0].timeline.makespan if within else math.inf
            if candidate.timeline.makespan > slowest or len(within) == _MAX_PREDICTED:
                break
            if limit.keeps(self._predict(candidate)):
                within.append(candidate)
        return min(within, key=self._predicted, default=None)

    def _limit(self) -> MemoryLimit:
        """Return the configured limit, or what 1F1B needs on its fullest rank."""
        if not isinstance(self._section.memory_limit, str):
            return MemoryLimit(self._section.memory_limit)
        sizes = Sizes(self._model.num_ranks, self._num_microbatches)
        plain = predict(self._model, SCHEDULES["1f1b"].plan(sizes), self._rates)
        return MemoryLimit(max(plain.timeline.peak), plain.peak)

    def _search(
        self, limit: MemoryLimit, named: list[_Candidate], best: _Candidate | None
    ) -> _Candidate | None:
        """Return the fastest plan that the search finds; None if it finds none faster than `best`.

        The search limits activations only. If the whole memory of its plan is too high on a rank,
        it is repeated with a lower limit there.
        """
        limits = {stages: self._limits_of_ranks(stages, limit) for stages in self._cuts(named)}
        for _ in range(_MAX_SEARCHES):
            placements = {
                placement: stages
                for stages, held in limits.items()
                for placement in self._costs_on(stages, held)
            }
            try:
                found = find_plan(
                    tuple(placements),
                    self._num_microbatches,
                    effort=_EFFORT * min(1.0, _FULL_EFFORT_STEPS / self._num_steps),
                )
            except ScheduleError:
                return None  # one micro-batch is too much
            stages = placements[found.placement]
            origin = f"a new plan ({found.source})"
            cuts = (*self._cuts_of(found.plan, limit, (stages.bounds,)), stages.bounds)
            for bounds in dict.fromkeys(cuts):
                candidate = self._candidate(found.plan, origin, bounds)
                if best is None or candidate.rank < best.rank:
                    prediction = self._predict(candidate)
                    if limit.keeps(prediction):
                        return candidate
            if best is not None and candidate.rank >= best.rank:
                return None
            limits[stages] = tuple(
                held - max(0.0, peak - limit.activations, rank.total - (limit.total or rank.total))
                for held, peak, rank in zip(
                    limits[stages], prediction.timeline.peak, prediction.memory, strict=True
                )
            )
        return None

    def _cuts(self, named: list[_Candidate]) -> list[Stages]:
        """Return the stages on which the search starts.

        For each placement, they are the stages of its fastest named schedule. If the cut is free,
        also the stages with the most even times of the ranks.
        """
        found: dict[Stages, None] = {}
        for place in self._placements:
            known = [c.stages for c in named if c.stages.rank_of_stage == place]
            stages = known[0] if known else None
            if stages is None or (self._stages is None and self._model.cuts_by_time):
                even = self._model.even_time(place, self._layers)
                found[self._stages or Stages(even, place)] = None
            if stages is not None:
                found[stages] = None
        return list(found)

    @property
    def _num_steps(self) -> int:
        return 3 * 2 * self._model.num_ranks * self._num_microbatches

    def _costs_on(self, stages: Stages, limits: tuple[float, ...]) -> Iterator[Placement]:
        """Yield stages with the costs of split backward, and of whole backwards if those differ."""
        layers = self._layers
        if not self._rates.layers:
            # The search prefers plans with fewer instructions; measured costs have it already.
            layers = replace(layers, instruction=self._model.instruction_seconds)
        place, split = stages.rank_of_stage, layers.cost_model(stages.bounds)
        yield Placement(place, split, limits)
        if any(map(gt, split.held_after_input, split.held_after_forward)):
            # More than any limit, so that the search does not split a backward.
            kept = (2 * abs(sum(limits)) + 1,) * split.num_stages
            yield Placement(place, replace(split, kept=kept), limits)

    def _limits_of_ranks(self, stages: Stages, limit: MemoryLimit) -> tuple[float, ...]:
        """Return the limit of the activations of each rank, which leaves room for the rest.

        The rest is estimated from one micro-batch after the other.
        """
        if limit.total is None:
            return (limit.activations,) * self._model.num_ranks
        plan = sequential_on(stages.rank_of_stage, min(self._num_microbatches, 32))
        known = predict(self._model, plan, self._rates, stages.bounds)
        return tuple(
            min(limit.activations, limit.total - (rank.total - peak))
            for rank, peak in zip(known.memory, known.timeline.peak, strict=True)
        )


def within_memory_limit(
    model: MetaModel, section: PipelineSection, plan: Plan, bounds: Bounds
) -> Plan:
    """Return `plan`, or one on the same stages that keeps `memory_limit` if `plan` does not.

    Args:
        bounds: the bounds of the stages.

    Raises:
        ScheduleError: no plan keeps it.
    """
    limit, rates = section.memory_limit, Rates()
    if isinstance(limit, str) or MemoryLimit(limit).keeps(predict(model, plan, rates, bounds)):
        return plan
    stages = Stages(bounds, plan.rank_of_stage)
    arguments = model, section, plan.num_microbatches, rates, stages
    try:
        choice = ScheduleChooser(*arguments, quick=True).choose()
    except ScheduleError:
        choice = ScheduleChooser(*arguments).choose()
    return choice.prediction.plan


# The stages of a cut vocabulary are not measured: it must win more than this share of the time.
_LEAST_WIN = 0.1


def with_cut_vocabulary(config: Config, net: PipelineModule) -> Config | None:
    """Return `config` with a cut vocabulary in place of "auto"; None: the run cannot have it."""
    section = config.pipeline
    if section.vocabulary != "auto" or section.optimizer_sync != "fenced":
        return None
    if net.vocabulary is None or config.lora is not None or isinstance(section.partition, tuple):
        return None
    optimizer = "" if config.optimizer is None else config.optimizer.type.lower()
    if optimizer.endswith("lamb"):
        return None
    return config.model_copy(
        update={"pipeline": section.model_copy(update={"vocabulary": "parallel"})}
    )


def cut_wins(whole: MetaModel, cut: Config, num_microbatches: int) -> tuple[bool, str]:
    """Return whether the step of `cut` is shorter, and the two times as text.

    Args:
        whole: the model with its head in the last stage.
        cut: the config with a cut vocabulary.
    """
    layers, ranks = whole.layer_costs.total, whole.num_ranks
    if layers[-1] * ranks <= (1 + _LEAST_WIN) * sum(layers):
        return False, f"the head takes at most {1 + _LEAST_WIN:.2g} times the mean work of a rank"
    section = cut.pipeline
    try:
        other = whole.with_config(cut)
        stage, parallel = (
            ScheduleChooser(
                model, section, num_microbatches, Rates(layers=model.layer_costs), quick=True
            ).choose()
            for model in (whole, other)
        )
    except PipemegaError as error:
        return False, str(error)
    times = [choice.prediction.timeline.makespan for choice in (stage, parallel)]
    text = f"the simulated step takes {times[1] / times[0]:.2f} times as long with 'parallel'"
    limit = stage.limit
    if limit.total is not None:
        # Without a limit of the user the whole memory counts: what S keeps for T is less than what
        # a smaller head and embedding save.
        limit = replace(limit, activations=math.inf)
    if not limit.keeps(parallel.prediction):
        return False, f"{text}, and needs more memory than the limit"
    return times[1] < (1 - _LEAST_WIN) * times[0], text
