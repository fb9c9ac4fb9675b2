"""What a cut of the model costs, for logs and reports."""

from pipemega.pipeline.plan.stage_cut import Cut
from pipemega.printing import percent

# The old default, and how to keep it.
KEEP_OLD = "pipeline.partition 'parameters' divides the parameters evenly, the default before"


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


_MOST_SHARES = 8
