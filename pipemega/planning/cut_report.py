"""What a cut of the model costs, for logs and reports."""

from dataclasses import dataclass

from pipemega.pipeline.plan.layer_moves import Bounds
from pipemega.pipeline.plan.stage_cut import Cut
from pipemega.planning.meta_model import MetaModel
from pipemega.planning.prediction import Prediction, predict
from pipemega.planning.rates import Rates
from pipemega.printing import percent

# The old default, and how to keep it.
KEEP_OLD = "pipeline.partition 'parameters' divides the parameters evenly, the default before"

# Stages whose share of the work the log shows.
_MOST_SHARES = 8


@dataclass(frozen=True)
class CutReport:
    """What the cut of a plan costs.

    Args:
        bounds: of the stages.
        work: share of the time of all instructions, for each pipeline rank.
        slower: by which fraction the step takes longer than with `best`; 0: no better cut was
            found.
        best: the bounds of the fastest cut that was found for this plan.
        best_peak: memory in bytes of the fullest rank with it.
    """

    bounds: Bounds
    work: tuple[float, ...]
    slower: float
    best: Bounds
    best_peak: int

    @property
    def imbalance(self) -> float:
        """The work of the slowest rank over the mean, less 1."""
        return max(self.work) * len(self.work) - 1


def report_cut(model: MetaModel, prediction: Prediction, rates: Rates) -> CutReport | None:
    """Return what the cut of `prediction` costs; None with one stage, or if its times are given."""
    plan, layout = prediction.plan.compute_only(), prediction.layout
    if plan.num_stages == 1 or rates.costs is not None:
        return None
    layers = rates.layers or model.layer_costs
    found = model.cut_within(plan, layers, None, [layout.bounds])
    best = prediction
    if found.bounds != layout.bounds:
        other = predict(model, plan, rates, found.bounds)
        best = min(prediction, other, key=lambda p: p.timeline.makespan)
    timeline = prediction.timeline
    busy = [timeline.busy(rank) for rank in range(plan.num_ranks)]
    return CutReport(
        layout.bounds,
        tuple(time / (sum(busy) or 1.0) for time in busy),
        timeline.makespan / best.timeline.makespan - 1 if best.timeline.makespan else 0.0,
        best.layout.bounds,
        best.peak,
    )


def explain(cut: Cut, even: Cut) -> str:
    """Return why the model has the cut `cut` and not `even`, for the log of a run."""
    plan, times = cut.timeline.plan, cut.costs
    stages = zip(times.forward, times.whole_backward, strict=True)
    work = [forward + backward for forward, backward in stages]
    shares = ", ".join(percent(w / sum(work), 0) for w in work[:_MOST_SHARES]) if sum(work) else ""
    more = ", ..." if len(work) > _MOST_SHARES else ""
    text = (
        f"partition auto: stages {list(cut.bounds)} (bounds of layers) for the shortest simulated "
        f"step of {plan.name}; share of the work by stage: {shares}{more}"
    )
    if cut.bounds == even.bounds:
        return f"{text}; even numbers of parameters give the same stages"
    longer = even.timeline.makespan / cut.timeline.makespan - 1
    return (
        f"{text}; with even numbers of parameters ({list(even.bounds)}) it is {percent(longer)} "
        f"longer ({KEEP_OLD})"
    )
