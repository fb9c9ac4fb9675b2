"""What is worth saying of a plan: warnings, a recommendation, and what would make it fit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from pipemega.config import load
from pipemega.errors import PipemegaError
from pipemega.pipeline.partition import partition
from pipemega.pipeline.schedules import SCHEDULES
from pipemega.planning.outcome import Outcome
from pipemega.planning.quantities import show_bytes
from pipemega.planning.report import Report, Request, draw_up

LARGE_BUBBLE = 0.2
UNEVEN = 1.15
# Bytes kept for W over bytes held for B, from which on halves cost memory.
DEAR_HALVES = 2.0
# Schedules whose times differ by less than this are alike.
_GAIN = 0.02
# How many changes are shown where none of them is enough.
_NEARLY = 4


def warnings_of(report: Report) -> list[str]:
    """What is likely not meant, most costly first."""
    return [*_bubble(report), *_balance(report), *_halves(report)]


def _bubble(report: Report) -> Iterator[str]:
    outcome, timeline = report.outcome, report.outcome.timeline
    if timeline.bubble <= LARGE_BUBBLE:
        return
    p, m = outcome.plan.num_ranks, report.batch.num_microbatches
    text = f"bubble {timeline.bubble:.0%}: the ranks wait for that share of each step"
    # (p - 1) / (m + p - 1) at 20 % is m = 4 (p - 1).
    if outcome.plan.name in ("gpipe", "1f1b") and m < 4 * (p - 1):
        text += (
            f"; {4 * (p - 1)} micro-batches (now {m}) bring equal stages to 20% "
            f"(gradient_accumulation_steps)"
        )
    elif outcome.plan.name == "sequential":
        text += "; schedule '1f1b' overlaps the stages"
    yield text


def _balance(report: Report) -> Iterator[str]:
    stages, p = report.stages, report.topology.pipeline
    if p == 1:
        return
    work = [sum(s.flops for s in stages if s.rank == rank) for rank in range(p)]
    mean = sum(work) / p
    if not mean or max(work) <= UNEVEN * mean:
        return
    rank = work.index(max(work))
    here = [s for s in stages if s.rank == rank]
    numbers = " and ".join(str(s.number) for s in here)
    text = (
        f"pipeline rank {rank} (stage {numbers}) has {max(work) / mean:.2f} times the mean work, "
        f"and every other rank waits for it"
    )
    last = stages[-1]
    head = report.outcome.layout.costs[-1].layer_flops
    if last.rank == rank and head and head[-1] > 0.1 * sum(head):
        text += f"; its head is {head[-1] / sum(head):.0%} of its forward: fewer blocks beside it"
    bounds = _even_bounds(report)
    if bounds is not None:
        text += f"; by FLOPs: pipeline.partition {bounds}"
    yield text


def _even_bounds(report: Report) -> list[int] | None:
    """The cut that shares FLOPs out evenly, if it is another one."""
    layout = report.outcome.layout
    flops = [f for stage in layout.costs for f in stage.layer_flops]
    if len(layout.rank_of_stage) != report.topology.pipeline:
        return None
    bounds = partition(flops, len(layout.rank_of_stage))
    worst = max(sum(flops[a:b]) for a, b in pairwise(bounds))
    now = max(sum(flops[a:b]) for a, b in pairwise(layout.bounds))
    return bounds if worst < 0.97 * now else None


def _halves(report: Report) -> Iterator[str]:
    ratios = [s.kept / s.held for s in report.stages if s.kept and s.held]
    if ratios and max(ratios) >= DEAR_HALVES:
        yield (
            f"recomputation under schedule '{report.outcome.plan.name}': between the halves of its "
            f"backward a micro-batch keeps {max(ratios):.1f} times what it held before, since I "
            f"computes again what W needs; '1f1b' or 'interleaved' keep none of it"
        )


def recommendation(report: Report) -> str | None:
    """The schedule to take, of those compared; None without a comparison."""
    fitting = [o for o in report.others if o.fits(report.request.limit) is not False]
    if not report.others:
        return None
    if not fitting:
        return "none of these fits"
    own, quickest = report.outcome, fitting[0].timeline.makespan
    # Of those that are as good as the quickest, the one that holds least.
    alike = [o for o in fitting if o.timeline.makespan <= (1 + _GAIN) * quickest]
    best = own if own in alike else min(alike, key=lambda outcome: outcome.peak)
    if best is own:
        return f"keep '{own.plan.name}': nothing that fits is quicker by more than {_GAIN:.0%}"
    gain = 1 - best.timeline.makespan / own.timeline.makespan
    if report.fits is False:
        return f"'{best.plan.name}', the quickest that fits: {_peak(best)} on the fullest rank"
    return (
        f"'{best.plan.name}': {gain:.1%} less time than '{own.plan.name}', "
        f"{_peak(best)} against {_peak(own)} on the fullest rank"
    )


def _peak(outcome: Outcome) -> str:
    return show_bytes(outcome.peak)


class Way(NamedTuple):
    """A change that was tried: what to set, and the fullest rank's bytes with it."""

    change: str
    peak: int
    fits: bool


def ways_to_fit(report: Report) -> list[Way]:
    """Changes of a key, each planned anew: those that fit, the best first, or the nearest to it."""
    ways = []
    for overrides, world in _changes(report):
        try:
            config = load(report.request.config, overrides)
            request = replace(report.request, config=config, world=world, compare=())
            peak = draw_up(request).outcome.peak
        except PipemegaError:
            continue
        if peak < report.outcome.peak:
            change = " ".join(f"--set {override}" for override in overrides)
            if world is not None and world != report.topology.world_size:
                change += f" on {world} ranks"
            ways.append(Way(change, peak, peak <= (report.request.limit or 0)))
    ways.sort(key=lambda way: way.peak)
    fitting = [way for way in ways if way.fits]
    return fitting or ways[:_NEARLY]


def _changes(report: Report) -> Iterator[tuple[list[str], int | None]]:
    request: Request = report.request
    config, world = request.config, request.world
    if request.model is None and config.model is not None:
        if config.model.recompute == "none":
            yield ["model.recompute=selective"], world
        if config.model.recompute != "full":
            yield ["model.recompute=full"], world
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
    if report.topology.pipeline > 1:
        for name in ("1f1b", "1f1b-v", "v-half", "v-min"):
            if name in SCHEDULES and name != report.outcome.plan.name:
                chunks = [] if config.pipeline.chunks == "auto" else ['pipeline.chunks="auto"']
                yield [f"pipeline.schedule={name}", *chunks], world
    for axis, size in (("pipeline", config.mesh.pipeline), ("tensor", config.mesh.tensor)):
        # Data ranks make room where there are any; otherwise it takes more ranks.
        total = report.topology.world_size * (1 if report.topology.data % 2 == 0 else 2)
        changes = [f"mesh.{axis}={2 * size}"]
        if config.mesh.data != "auto":
            changes.append('mesh.data="auto"')
        yield changes, total
