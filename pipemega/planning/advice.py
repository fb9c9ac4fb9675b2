"""Advice on a report: warnings, the recommended schedule, changes that make the run fit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipemega.config import Batch, Config, load
from pipemega.config.sections.transformer_sections import TransformerSection
from pipemega.errors import PipemegaError
from pipemega.pipeline.schedules import SCHEDULES
from pipemega.planning.estimate import Report, Request, estimate
from pipemega.planning.prediction import Prediction, Rates
from pipemega.printing import percent, show_bytes

# Warn above this bubble,
_LARGE_BUBBLE = 0.2
# above this ratio of the work of a rank to the mean,
_UNEVEN_WORK = 1.15
# and above this ratio of the bytes kept for W to the bytes held for B.
_LARGE_WEIGHT_HALF = 2.0
# Schedules are equally fast if their times differ by at most this fraction.
_SAME_TIME = 0.02
# A cut is better if the step of the current one takes this fraction longer.
_BETTER_CUT = 0.001
# A schedule that takes more than this many times as long is no good way to save memory.
MUCH_SLOWER = 1.5
# Number of suggestions to show if none of them makes the run fit.
_MAX_INSUFFICIENT = 4


class Suggestion(NamedTuple):
    """A change that was tried: what to set, and the peak memory in bytes with it."""

    change: str
    peak: int
    fits: bool


class Alternative(NamedTuple):
    """A faster change that fits: what to set, the share of time it saves, the peak in bytes."""

    change: str
    gain: float
    peak: int


@dataclass(frozen=True)
class Advice:
    """Advice on a report.

    Args:
        warnings: likely mistakes, the most costly first.
        best: the prediction of the schedule to use; None if no comparison was requested, or none of
            the compared schedules fits.
        recommendation: the schedule to use; None if no comparison was requested.
        suggestions: changes that reduce memory, if the run does not fit: those that make it fit,
            smallest first, or else a few that come closest.
        alternatives: faster changes, if the run fits into the memory of a device; fastest first.
    """

    warnings: tuple[str, ...]
    best: Prediction | None
    recommendation: str | None
    suggestions: tuple[Suggestion, ...]
    alternatives: tuple[Alternative, ...] = ()


def advise(report: Report) -> Advice:
    """Return the advice on `report`; if the memory is known, estimates the run with changes."""
    best = _best(report)
    return Advice(
        warnings=(*_bubble(report), *_balance(report), *_weight_half(report)),
        best=best,
        recommendation=_recommendation(report, best) if report.compared else None,
        suggestions=tuple(_suggestions(report)) if report.fits is False else (),
        alternatives=tuple(_alternatives(report)) if report.fits else (),
    )


def _bubble(report: Report) -> Iterator[str]:
    plan, bubble = report.prediction.plan, report.prediction.timeline.bubble
    if bubble <= _LARGE_BUBBLE:
        return
    p, m = plan.num_ranks, report.batch.num_microbatches
    text = f"bubble {percent(bubble, 0)}: on average a rank is idle for that share of each step"
    # (p - 1) / (m + p - 1) is 20 % for m = 4 (p - 1).
    if plan.name in ("gpipe", "1f1b") and m < 4 * (p - 1):
        text += (
            f"; {4 * (p - 1)} micro-batches (now {m}) reduce it to 20% if stages are equal: "
            f"increase gradient_accumulation_steps"
        )
    elif plan.name == "sequential":
        text += "; schedule '1f1b' overlaps the stages"
    yield text


def _balance(report: Report) -> Iterator[str]:
    stages, p = report.stages, report.topology.pipeline
    if p == 1:
        return
    if report.cut is not None:
        work = list(report.cut.work)
    else:
        work = [sum(s.flops for s in stages if s.rank == rank) for rank in range(p)]
    mean = sum(work) / p
    if not mean or max(work) <= _UNEVEN_WORK * mean:
        return
    rank = work.index(max(work))
    numbers = " and ".join(str(s.number) for s in stages if s.rank == rank)
    text = (
        f"pipeline rank {rank} (stage {numbers}) has {max(work) / mean:.2f} times the mean work "
        f"({'time' if report.cut else 'FLOPs'}); all other ranks wait for it"
    )
    last = report.prediction.layout.costs[-1].layer_flops
    if stages[-1].rank == rank and last and last[-1] > 0.1 * sum(last):
        text += f"; the head takes {percent(last[-1] / sum(last), 0)} of its forward"
        if sum(last[:-1]) > 0.01 * sum(last):
            text += ": give this stage fewer blocks"
    better = better_cut(report)
    yield text if better is None else f"{text}; {better}"


def better_cut(report: Report) -> str | None:
    """Return what a better cut would give; None if none was found."""
    cut = report.cut
    if cut is None or cut.slower < _BETTER_CUT:
        return None
    change = f"pipeline.partition to {list(cut.best)}"
    if report.request.config.pipeline.partition != "auto":
        change = f"pipeline.partition to 'auto', or to {list(cut.best)}"
    shorter = percent(1 - 1 / (1 + cut.slower))
    return (
        f"set {change}: the step is {shorter} shorter, peak memory {show_bytes(cut.best_peak)} "
        f"instead of {show_bytes(report.prediction.peak)}"
    )


def _weight_half(report: Report) -> Iterator[str]:
    held = sum(stage.held for stage in report.stages)
    kept = sum(stage.kept or 0 for stage in report.stages)
    is_auto = report.request.config.pipeline.schedule == "auto"  # it keeps its memory limit
    if is_auto or kept < _LARGE_WEIGHT_HALF * held:
        return
    text = (
        f"recomputation saves little memory under schedule '{report.prediction.plan.name}': I "
        f"recomputes the activations, and W needs them too, so from I to W a micro-batch keeps "
        f"{kept / held:.1f} times the memory that it keeps from F to I; '1f1b' and "
        f"'interleaved' do not split backward"
    )
    limit = report.request.config.pipeline.weight_queue_limit
    if limit == "auto":
        free = _with_changes(
            report.request, ["pipeline.weight_queue_limit=null"], report.request.world
        )
        assert free is not None, "the run has been estimated before"
        longer = report.prediction.timeline.makespan / free.timeline.makespan - 1
        text += (
            f"; so pipeline.weight_queue_limit 'auto' runs W earlier: "
            f"{show_bytes(report.prediction.peak)} instead of {show_bytes(free.peak)}, step "
            f"{percent(longer)} longer"
        )
    elif limit is None:
        change, *_ = _weight_limits(report)
        limited = _with_changes(report.request, [change], report.request.world)
        assert limited is not None, "the run has been estimated before"
        longer = limited.timeline.makespan / report.prediction.timeline.makespan - 1
        text += (
            f"; {change} holds the W of one micro-batch: {show_bytes(limited.peak)} instead of "
            f"{show_bytes(report.prediction.peak)}, step {percent(longer)} longer"
        )
    yield text


def _weight_limits(report: Report) -> list[str]:
    """Return overrides that limit the queue of W to one micro-batch, and to none."""
    largest = max((stage.kept or 0 for stage in report.stages), default=0)
    if not largest or report.request.config.pipeline.weight_queue_limit not in (None, "auto"):
        return []
    return [f"pipeline.weight_queue_limit={limit}" for limit in (largest, 0)]


def _best(report: Report) -> Prediction | None:
    fitting = [p for p in report.compared if p.fits(report.request.limit) is not False]
    if not fitting:
        return None
    own, shortest = report.prediction, fitting[0].timeline.makespan
    # Among schedules that are as fast as the fastest, the one with the lowest memory.
    fastest = [p for p in fitting if p.timeline.makespan <= (1 + _SAME_TIME) * shortest]
    return own if own in fastest else min(fastest, key=lambda p: p.peak)


def _recommendation(report: Report, best: Prediction | None) -> str:
    own = report.prediction
    if best is None:
        return "none of these fits"
    if best is own:
        same = percent(_SAME_TIME, 0)
        return f"keep '{own.plan.name}': no compared schedule that fits is more than {same} faster"
    name, peak = best.plan.name, show_bytes(best.peak)
    if report.fits is False:
        text = f"'{name}', the fastest that fits: peak memory {peak}"
        ratio = best.timeline.makespan / own.timeline.makespan
        if ratio > MUCH_SLOWER:
            text += f"; it takes {ratio:.1f} times as long as '{own.plan.name}': change other keys"
        return text
    gain = 1 - best.timeline.makespan / own.timeline.makespan
    return (
        f"'{name}': {percent(gain)} less time than '{own.plan.name}', "
        f"peak memory {peak} instead of {show_bytes(own.peak)}"
    )


def _suggestions(report: Report) -> list[Suggestion]:
    """Estimate the run with each change and return those that make it fit, or the closest."""
    suggestions = []
    for overrides, world in _changes(report):
        prediction = _with_changes(report.request, overrides, world)
        if prediction is not None and prediction.peak < report.prediction.peak:
            change = _as_options(overrides)
            if world is not None and world != report.topology.world_size:
                change += f" on {world} ranks"
            fits = prediction.peak <= (report.request.limit or 0)
            suggestions.append(Suggestion(change, prediction.peak, fits))
    suggestions.sort(key=lambda s: s.peak)
    return [s for s in suggestions if s.fits] or suggestions[:_MAX_INSUFFICIENT]


def _with_changes(
    request: Request, overrides: Sequence[str], world: int | None
) -> Prediction | None:
    """Predict the run with changed keys; None if it cannot run."""
    try:
        config = load(request.config, overrides)
        changed = replace(request, config=config, world=world, compare=(), quick=True)
        return estimate(changed).prediction
    except PipemegaError:
        return None


def _as_options(overrides: Iterable[str]) -> str:
    return " ".join(f"--set {override}" for override in overrides)


# Faster alternatives for a run that fits


def _alternatives(report: Report) -> list[Alternative]:
    """Estimate the run with changes that use more memory, and return those that are faster."""
    request = report.request
    if not request.rates.known:
        # The unit of relative times is the mean forward, which a change of the model changes.
        request = replace(request, rates=Rates(tflops=1.0))
    own = _with_changes(request, (), request.world)
    assert own is not None, "the run has been estimated before"
    found: list[Alternative] = []
    faster: list[list[str]] = []

    def attempt(overrides: list[str]) -> Alternative | None:
        changed = _with_changes(request, overrides, request.world)
        if changed is None or not changed.fits(request.limit):
            return None
        gain = 1 - changed.timeline.makespan / own.timeline.makespan
        return Alternative(_as_options(overrides), gain, changed.peak)

    for kind in _faster_changes(report):
        tried = [(attempt(overrides), overrides) for overrides in kind]
        useful = [(a, overrides) for a, overrides in tried if a and a.gain >= _SAME_TIME]
        if useful:
            best, overrides = max(useful, key=lambda entry: entry[0].gain)
            found.append(best)
            faster.append(overrides)
    if len(faster) > 1:
        both = attempt([override for overrides in faster for override in overrides])
        if both is not None and both.gain > max(a.gain for a in found):
            found.append(both)
    return sorted(found, key=lambda a: -a.gain)


def _faster_changes(report: Report) -> Iterator[list[list[str]]]:
    """Yield, for each kind of change, the overrides to try; of a kind only the best is shown."""
    config, batch = report.request.config, report.batch
    if report.topology.pipeline > 1:
        names = ("1f1b", "interleaved", "zb-h1", "zb-v")
        reset = _without_schedule_keys(config)
        yield [
            [f"pipeline.schedule={name}", *reset]
            for name in names
            if name != report.prediction.plan.name and config.pipeline.schedule != "auto"
        ]
    if report.request.rates.costs is not None:
        return  # the given seconds are for these micro-batches with this recomputation
    yield [*_other_micro_batches(config, batch)]
    if config.pipeline.activation_checkpoint_interval:
        yield [["pipeline.activation_checkpoint_interval=0"]]
    elif config.activation_checkpointing.number_checkpoints:
        yield [["activation_checkpointing.number_checkpoints=null"]]
    elif isinstance(config.model, TransformerSection) and report.request.model is None:
        lighter = {"full": ("selective", "none"), "selective": ("none",), "none": ()}
        reset = _all_blocks(config.model)
        yield [[f"model.recompute={name}", *reset] for name in lighter[config.model.recompute]]


def _all_blocks(model: TransformerSection) -> list[str]:
    """Return the overrides that remove the choice of blocks to recompute."""
    if model.recompute_method is None:
        return []
    return ["model.recompute_method=null", "model.recompute_num_layers=1"]


def _without_schedule_keys(config: Config) -> list[str]:
    """Return the overrides that remove keys which another schedule may refuse."""
    keys = []
    if config.pipeline.chunks != "auto":
        keys.append('pipeline.chunks="auto"')
    if config.pipeline.weight_queue_limit not in (None, "auto"):
        keys.append("pipeline.weight_queue_limit=null")
    return keys


def _other_micro_batches(config: Config, batch: Batch) -> Iterator[list[str]]:
    """Yield the overrides for other micro-batch sizes with the same train_batch_size."""
    samples = batch.train_batch_size // batch.data_size
    for factor in (4, 2, 0.5):
        size = factor * batch.micro_batch_size
        if size == int(size) and samples % size == 0:
            overrides = [f"train_micro_batch_size_per_gpu={int(size)}"]
            if config.train_batch_size is None:
                overrides.append(f"train_batch_size={batch.train_batch_size}")
            if config.gradient_accumulation_steps is not None:
                overrides.append(f"gradient_accumulation_steps={samples // int(size)}")
            yield overrides


# Changes that reduce memory


def _changes(report: Report) -> Iterator[tuple[list[str], int | None]]:
    """Yield (overrides of config keys, number of ranks) of the changes to try."""
    request = report.request
    config, world = request.config, request.world
    if request.model is None and isinstance(config.model, TransformerSection):
        if config.model.recompute == "none":
            yield ["model.recompute=selective"], world
        if config.model.recompute != "full" or config.model.recompute_method is not None:
            yield ["model.recompute=full", *_all_blocks(config.model)], world
    elif not config.pipeline.activation_checkpoint_interval:
        yield ["pipeline.activation_checkpoint_interval=1"], world
    if config.optimizer is not None:
        zero = config.zero_optimization
        if report.topology.data > 1 and zero.stage == 0:
            yield ["zero_optimization.stage=1"], world
        if request.device == "cuda" and not zero.offloads:
            yield ["zero_optimization.offload_optimizer.device=cpu"], world
    if report.batch.micro_batch_size % 2 == 0:
        smaller = [f"train_micro_batch_size_per_gpu={report.batch.micro_batch_size // 2}"]
        if config.gradient_accumulation_steps is not None:
            smaller.append(f"gradient_accumulation_steps={2 * report.batch.num_microbatches}")
        yield smaller, world
    for limit in _weight_limits(report):
        yield [limit], world
    if report.topology.pipeline > 1:
        for name in ("1f1b", "1f1b-v", "v-half", "v-min"):
            if name in SCHEDULES and name != report.prediction.plan.name:
                yield [f"pipeline.schedule={name}", *_without_schedule_keys(config)], world
    for axis, size in (("pipeline", config.mesh.pipeline), ("tensor", config.mesh.tensor)):
        # Use data ranks for the larger axis if possible, otherwise more ranks.
        total = report.topology.world_size * (1 if report.topology.data % 2 == 0 else 2)
        changes = [f"mesh.{axis}={2 * size}"]
        if config.mesh.data != "auto":
            changes.append('mesh.data="auto"')
        yield changes, total
