"""Changes of a config that were tried: what makes the run fit, or a run that fits faster."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from pipemega.config import Config, load
from pipemega.config.sections.transformer_sections import TransformerSection
from pipemega.errors import PipemegaError
from pipemega.pipeline.schedules import AUTO
from pipemega.planning.estimate import Report, Request, estimate
from pipemega.planning.prediction import Prediction, Rates

# A change is faster if it saves at least this share of the time of a step.
_LEAST_GAIN = 0.02
# Number of changes to show if none of them makes the run fit.
_MAX_INSUFFICIENT = 4
# Schedules to try: the fast ones, and those that need little memory.
_FAST, _SMALL = ("1f1b", "interleaved", "zb-h1", "zb-v"), ("1f1b", "1f1b-v", "v-half", "v-min")
# From the least recomputation to the most.
_RECOMPUTE = ("none", "selective", "full")


class TriedChange(NamedTuple):
    """A change that was tried.

    Args:
        change: what to set, as options of the command line.
        ranks: number of ranks of the run with it.
        gain: share of the time of a step that it saves, negative if the step takes longer; None if
            the times of ranks are given, which are for a run without the change.
        peak: memory in bytes of the fullest rank.
        fits: whether the run then fits into the memory of a device.
    """

    change: str
    ranks: int
    gain: float | None
    peak: int
    fits: bool


def advise(report: Report) -> tuple[TriedChange, ...]:
    """Estimate the run with changes, and return those to choose from.

    If the run fits: faster ones that fit, the best of each key, and all of these together if that
    is faster still. Otherwise: those that make it fit, or else a few that come closest. The fastest
    are first, and those that take more ranks last. Empty if the memory of a device is not known.
    """
    if report.fits is None:
        return ()
    own, request = report.prediction, report.request
    if not request.rates.known:
        # The unit of relative times is the mean forward, which a change of the model changes.
        request = replace(request, rates=Rates(tflops=1.0))
    if request is not report.request or request.config.pipeline.schedule == AUTO:
        # Like the changed runs: in the same unit of time, and without a search.
        known = _with_changes(request, (), request.world)
        assert known is not None, "the run has been estimated before"
        own = known

    def attempt(overrides: Sequence[str], world: int | None) -> TriedChange | None:
        changed = _with_changes(request, overrides, world)
        if changed is None:
            return None
        text = " ".join(f"--set {override}" for override in overrides)
        ranks = world or report.topology.world_size
        if ranks != report.topology.world_size:
            text += f" on {ranks} ranks"
        gain = None
        if report.fits or request.rates.costs is None:
            gain = 1 - changed.timeline.makespan / own.timeline.makespan
        return TriedChange(text, ranks, gain, changed.peak, changed.fits(request.limit) is True)

    tried = {change: keys for keys, world in _changes(report) if (change := attempt(keys, world))}
    if not report.fits:
        smaller = [change for change in tried if change.peak < report.prediction.peak]
        fitting = sorted((change for change in smaller if change.fits), key=_order)
        closest = sorted(smaller, key=attrgetter("peak"))[:_MAX_INSUFFICIENT]
        return tuple(fitting or closest)
    best: dict[str, TriedChange] = {}  # of each key
    for change in sorted(tried, key=_order):
        if change.fits and change.gain is not None and change.gain >= _LEAST_GAIN:
            best.setdefault(tried[change][0].partition("=")[0], change)
    found = list(best.values())
    if len(found) > 1:
        every = attempt([key for change in found for key in tried[change]], request.world)
        if every is not None and every.fits and _order(every) < _order(found[0]):
            found.insert(0, every)
    return tuple(found)


def _order(change: TriedChange) -> tuple[int, float, int]:
    """Sorts the fastest first, and behind them those that take more ranks."""
    return change.ranks, -(change.gain or 0.0), change.peak


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


def _changes(report: Report) -> Iterator[tuple[list[str], int | None]]:
    """Yield (overrides of config keys, number of ranks) of the changes to try.

    They may make a run that fits faster, and reduce the memory of one that does not fit.
    """
    request, topology, fits = report.request, report.topology, report.fits
    config, world, pipeline = request.config, request.world, request.config.pipeline
    if topology.pipeline > 1 and not (fits and pipeline.schedule == AUTO):
        for name in _FAST if fits else _SMALL:
            if name != report.prediction.plan.name:
                yield [f"pipeline.schedule={name}", *_without_schedule_keys(config)], world
    if fits and request.rates.costs is not None:
        return  # the given seconds are for these micro-batches with this recomputation
    for overrides in (*_other_micro_batches(report), *_other_recomputation(report)):
        yield overrides, world
    if fits:
        return
    if config.optimizer is not None:
        zero = config.zero_optimization
        if topology.data > 1 and zero.stage == 0:
            yield ["zero_optimization.stage=1"], world
        if request.device == "cuda" and not zero.offloads:
            yield ["zero_optimization.offload_optimizer.device=cpu"], world
    largest = max((stage.kept or 0 for stage in report.stages), default=0)
    if largest and pipeline.weight_queue_limit in (None, "auto"):
        for limit in (largest, 0):  # the W of one micro-batch, and none
            yield [f"pipeline.weight_queue_limit={limit}"], world
    for axis, size in (("pipeline", config.mesh.pipeline), ("tensor", config.mesh.tensor)):
        # Use data ranks for the larger axis if possible, otherwise more ranks.
        total = topology.world_size * (1 if topology.data % 2 == 0 else 2)
        changes = [f"mesh.{axis}={2 * size}"]
        if config.mesh.data != "auto":
            changes.append('mesh.data="auto"')
        yield changes, total


def _without_schedule_keys(config: Config) -> list[str]:
    """Return the overrides that remove keys which another schedule may refuse."""
    keys = []
    if config.pipeline.chunks != "auto":
        keys.append('pipeline.chunks="auto"')
    if config.pipeline.weight_queue_limit not in (None, "auto"):
        keys.append("pipeline.weight_queue_limit=null")
    return keys


def _other_micro_batches(report: Report) -> Iterator[list[str]]:
    """Yield the overrides for other micro-batch sizes with the same train_batch_size."""
    config, batch = report.request.config, report.batch
    samples = batch.train_batch_size // batch.data_size
    for factor in (4, 2, 0.5) if report.fits else (0.5,):
        size = factor * batch.micro_batch_size
        if size == int(size) and samples % size == 0:
            overrides = [f"train_micro_batch_size_per_gpu={int(size)}"]
            if config.train_batch_size is None:
                overrides.append(f"train_batch_size={batch.train_batch_size}")
            if config.gradient_accumulation_steps is not None:
                overrides.append(f"gradient_accumulation_steps={samples // int(size)}")
            yield overrides


def _other_recomputation(report: Report) -> Iterator[list[str]]:
    """Yield the overrides for less recomputation if the run fits, for more if it does not."""
    config, fits = report.request.config, report.fits
    interval, model = config.pipeline.activation_checkpoint_interval, config.model
    if fits and interval:
        yield ["pipeline.activation_checkpoint_interval=0"]
    elif fits and config.activation_checkpointing.number_checkpoints:
        yield ["activation_checkpointing.number_checkpoints=null"]
    elif isinstance(model, TransformerSection) and report.request.model is None:
        all_blocks = []
        if model.recompute_method is not None:
            all_blocks = ["model.recompute_method=null", "model.recompute_num_layers=1"]
        if model.recompute_keep is not None:
            all_blocks.append("model.recompute_keep=null")
        now = _RECOMPUTE.index(model.recompute)
        # The next step after full recomputation of some blocks is full recomputation of all.
        for name in _RECOMPUTE[:now] if fits else _RECOMPUTE[now + (not all_blocks) :]:
            yield [f"model.recompute={name}", *all_blocks]
    elif not fits and not interval:
        yield ["pipeline.activation_checkpoint_interval=1"]
