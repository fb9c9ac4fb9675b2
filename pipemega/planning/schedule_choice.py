"""Schedule `auto` for a model on the meta device: the fastest plan within the memory limit.

Candidates are all named schedules and the result of a search, on every cut of the model: placements
loop and v, with each useful number of stages per rank. All are simulated with the costs of their
own stages; so the choice is never slower than a named schedule within the limit.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import gt

from pipemega.config.pipeline import PipelineSection
from pipemega.errors import ScheduleError
from pipemega.pipeline.autoschedule import Placement, chunk_counts, find_plan
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import Timeline, simulate
from pipemega.pipeline.schedules import AUTO, SCHEDULES, Sizes
from pipemega.pipeline.schedules.placement import loop, v
from pipemega.pipeline.schedules.sequential import sequential_on
from pipemega.planning.meta_model import MetaModel
from pipemega.planning.prediction import Prediction, predict
from pipemega.planning.rates import Rates
from pipemega.planning.units import show_bytes

# Effort of a search, lower for plans with more steps: it takes about 2 seconds on one core.
_EFFORT, _FULL_EFFORT_STEPS = 0.3, 1536
# Searches, each with a lower limit if the whole memory of the found plan is too high.
_MAX_SEARCHES = 4
# With more than 2 stages per rank, plans with more steps than this are not tried.
_MAX_STEPS = 12_000
_ROUNDING = 1e-9

Cut = tuple[int, ...]  # rank_of_stage


@dataclass(frozen=True)
class MemoryLimit:
    """Limits in bytes for every rank.

    Args:
        activations: of activations from F to B, and of what W needs from I to W.
        total: of the whole memory at the peak; None: no limit.
    """

    activations: float
    total: int | None = None

    def keeps(self, timeline: Timeline) -> bool:
        """Return whether the activations of each rank are within the limit."""
        return max(timeline.peak) <= self.activations * (1 + _ROUNDING)

    def keeps_total(self, prediction: Prediction) -> bool:
        """Return whether the whole memory of each rank is within the limit."""
        return self.total is None or prediction.peak <= self.total


@dataclass(frozen=True, eq=False)
class Choice:
    """The plan of schedule `auto`.

    Args:
        prediction: of the plan, which is named `auto`; its note describes the choice.
        origin: the named schedule that it is, or how the search found it.
        limit: that it keeps.
    """

    prediction: Prediction
    origin: str
    limit: MemoryLimit


@dataclass(frozen=True, eq=False)
class _Candidate:
    timeline: Timeline
    origin: str

    @property
    def rank(self) -> tuple[float, int]:
        """Sorts the fastest first; of equally fast ones that with fewer stages."""
        return float(f"{self.timeline.makespan:.9g}"), self.timeline.plan.num_stages


class ScheduleChooser:
    """Chooses the plan of schedule `auto`.

    Args:
        model: the model on its mesh.
        section: `chunks`, `memory_limit` and `partition` restrict the choice.
        num_microbatches: of a step.
        rates: times of the stages.
        cuts: the rank of each stage, for each cut to consider; None: all cuts that the section
            allows.
        quick: only named schedules with at most 2 stages per rank, without a search.
    """

    def __init__(
        self,
        model: MetaModel,
        section: PipelineSection,
        num_microbatches: int,
        rates: Rates,
        cuts: tuple[Cut, ...] | None = None,
        *,
        quick: bool = False,
    ) -> None:
        self._quick = quick
        self._model, self._section, self._rates = model, section, rates
        self._num_microbatches = num_microbatches
        self._cuts = cuts or tuple(self._all_cuts())

    def choose(self) -> Choice:
        """Return the fastest plan within the limit.

        Raises:
            ScheduleError: no plan keeps `memory_limit`.
        """
        began = time.monotonic()
        named = sorted(self._named(), key=lambda candidate: candidate.rank)
        limit = self._limit()
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
        plan = replace(best.timeline.plan, name=AUTO)
        prediction = predict(self._model, plan, self._rates)
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
            f"schedule auto is {origin} with {chunks} stage{'s' * (chunks > 1)} per rank: the "
            f"fastest of {len(self._cuts)} placements with at most {held} on a rank{same}; found "
            f"in {seconds:.0f} s"
        )

    def _all_cuts(self) -> Iterator[Cut]:
        ranks, chunks = self._model.num_ranks, self._section.stages_per_rank
        counts = (chunks,) if chunks else chunk_counts(ranks, *self._model.layer_counts)
        steps_per_chunk = 3 * ranks * self._num_microbatches
        for count in counts:
            most = 2 if self._quick else _MAX_STEPS // steps_per_chunk
            if count <= max(2, chunks or 0, most) and self._model.allows_stages(ranks * count):
                yield from dict.fromkeys((loop(ranks, count), v(ranks, count)))

    def _named(self) -> Iterator[_Candidate]:
        for cut in self._cuts:
            sizes = Sizes(
                self._model.num_ranks, self._num_microbatches, len(cut) // self._model.num_ranks
            )
            for family in SCHEDULES.values():
                if family.chunks_error(sizes.chunks) is None:
                    plan = family.plan(sizes)
                    if plan.rank_of_stage == cut:
                        yield self._candidate(plan, family.name)

    def _candidate(self, plan: Plan, origin: str) -> _Candidate:
        plan = self._model.limit_weight_queue(plan)
        layout = self._model.layout(plan)
        costs = self._rates.cost_model(layout, self._model.num_ranks)
        return _Candidate(simulate(plan, costs), origin)

    def _best(self, named: list[_Candidate], limit: MemoryLimit) -> _Candidate | None:
        """Return the fastest plan within the limit; None if there is none."""
        best = self._first_within(named, limit)
        found = None if self._quick else self._search(limit, best)
        return found or best

    def _first_within(
        self, sorted_by_time: list[_Candidate], limit: MemoryLimit
    ) -> _Candidate | None:
        for candidate in sorted_by_time:
            if limit.keeps(candidate.timeline) and limit.keeps_total(
                predict(self._model, candidate.timeline.plan, self._rates)
            ):
                return candidate
        return None

    def _limit(self) -> MemoryLimit:
        """Return the configured limit, or what 1F1B needs on its fullest rank."""
        if not isinstance(self._section.memory_limit, str):
            return MemoryLimit(self._section.memory_limit)
        sizes = Sizes(self._model.num_ranks, self._num_microbatches)
        plain = predict(self._model, SCHEDULES["1f1b"].plan(sizes), self._rates)
        return MemoryLimit(max(plain.timeline.peak), plain.peak)

    def _search(self, limit: MemoryLimit, best: _Candidate | None) -> _Candidate | None:
        """Return the fastest plan that the search finds; None if it finds none faster than `best`.

        The search limits activations only. If the whole memory of its plan is too high on a rank,
        it is repeated with a lower limit there.
        """
        limits = {cut: self._limits_of_ranks(cut, limit) for cut in self._cuts}
        for _ in range(_MAX_SEARCHES):
            placements = [
                placement for cut in self._cuts for placement in self._placements(cut, limits[cut])
            ]
            try:
                found = find_plan(
                    placements,
                    self._num_microbatches,
                    effort=_EFFORT * min(1.0, _FULL_EFFORT_STEPS / self._num_steps),
                )
            except ScheduleError:
                return None  # one micro-batch is too much
            candidate = self._candidate(found.plan, f"a new plan ({found.source})")
            if best is not None and candidate.rank >= best.rank:
                return None
            prediction = predict(self._model, found.plan, self._rates)
            if limit.keeps(candidate.timeline) and limit.keeps_total(prediction):
                return candidate
            cut = found.plan.rank_of_stage
            limits[cut] = tuple(
                held - max(0.0, peak - limit.activations, rank.total - (limit.total or rank.total))
                for held, peak, rank in zip(
                    limits[cut], candidate.timeline.peak, prediction.memory, strict=True
                )
            )
        return None

    @property
    def _num_steps(self) -> int:
        return 3 * 2 * self._model.num_ranks * self._num_microbatches

    def _placements(self, cut: Cut, limits: tuple[float, ...]) -> Iterator[Placement]:
        """Yield `cut` with the costs of split backward, and of whole backwards if those differ."""
        split, whole = (
            self._rates.cost_model(self._model.layout_of(cut, splits), self._model.num_ranks)
            for splits in (True, False)
        )
        yield Placement(cut, split, limits)
        needed = map(max, split.held_after_forward, split.held_after_input)
        if any(map(gt, needed, whole.held_after_forward)):
            # More than any limit, so that the search does not split a backward.
            kept = (2 * abs(sum(limits)) + 1,) * whole.num_stages
            yield Placement(cut, replace(whole, kept=kept), limits)

    def _limits_of_ranks(self, cut: Cut, limit: MemoryLimit) -> tuple[float, ...]:
        """Return the limit of the activations of each rank, which leaves room for the rest.

        The rest is estimated from one micro-batch after the other.
        """
        if limit.total is None:
            return (limit.activations,) * self._model.num_ranks
        plan = sequential_on(cut, min(self._num_microbatches, 32))
        known = predict(self._model, plan, self._rates)
        return tuple(
            min(limit.activations, limit.total - (rank.total - peak))
            for rank, peak in zip(known.memory, known.timeline.peak, strict=True)
        )
