"""The number of samples of each step: constant, or increased by `training.rampup_batch_size`."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from pipemega.config.batch_equation import MICRO, TRAIN, Batch
from pipemega.config.model_transformer import near_multiples
from pipemega.config.scheduler import RunLength
from pipemega.config.training import TrainingSection

RAMPUP = "training.rampup_batch_size"


@dataclass(frozen=True)
class BatchSizes:
    """The size of each step, as a function of the samples that earlier steps have consumed.

        rampup_batch_size [2, 2, 12], train_batch_size 6
        consumed samples    0 .. 5    6 .. 11    12 ..
        size                2         4          6

    Args:
        phases: (consumed samples, size), from the first step on: the size of the steps that begin
            at these samples or later.

    Source: the class RampupBatchsizeNumMicroBatches of Megatron-LM (core 0.4 to 0.15).
    """

    phases: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, rampup: tuple[int, int, int] | None, train_batch_size: int) -> "BatchSizes":
        """Return the sizes of `training.rampup_batch_size`, which `rampup_errors` has checked."""
        if rampup is None or rampup[0] == train_batch_size:
            return cls(((0, train_batch_size),))
        start, increment, samples = rampup
        increments = (train_batch_size - start) // increment
        phases = [(0, start)]
        for n in range(1, increments + 1):
            phases.append((_first_sample(n, samples / increments), start + n * increment))
        # The last of the phases that begin at the same sample counts.
        return cls(tuple(dict(phases).items()))

    @property
    def changes(self) -> bool:
        """Whether the size changes during the run."""
        return len(self.phases) > 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes, ascending; the last one is train_batch_size."""
        return tuple(size for _, size in self.phases)

    def at(self, consumed: int) -> int:
        """Return the size of the step that begins after `consumed` samples."""
        return self.phases[bisect_right(self.phases, consumed, key=lambda phase: phase[0]) - 1][1]

    def run_length(self, training: TrainingSection) -> RunLength:
        """Return the length of the run in all units that the config determines."""
        steps, samples = training.train_steps, training.train_samples
        if samples is not None:
            steps = self.steps_within(samples)
        elif steps is not None:
            samples = self.samples_of(steps)
        return RunLength(steps, training.epochs, samples)

    def steps_within(self, samples: int) -> int:
        """Return the number of whole steps within the first `samples` samples."""
        steps = consumed = 0
        for count, size in self._runs():
            fit = (samples - consumed) // size
            if count is None or fit < count:
                return steps + fit
            steps, consumed = steps + count, consumed + count * size
        raise AssertionError("the last size has no end")

    def samples_of(self, steps: int) -> int:
        """Return the samples of the first `steps` steps."""
        consumed = 0
        for count, size in self._runs():
            if count is None or steps < count:
                return consumed + steps * size
            steps, consumed = steps - count, consumed + count * size
        raise AssertionError("the last size has no end")

    def _runs(self) -> Iterator[tuple[int | None, int]]:
        """Yield (number of steps, size) for each size; None: all later steps."""
        consumed = 0
        ends = [begin for begin, _ in self.phases[1:]]
        for end, size in zip(ends, self.sizes, strict=False):
            count = max(0, -(-(end - consumed) // size))
            consumed += count * size
            yield count, size
        yield None, self.sizes[-1]


def _first_sample(increments: int, samples_each: float) -> int:
    """Return the first number of consumed samples after which a step has these increments.

    Megatron divides in floating point, so the exact quotient may be one sample off.
    """
    sample = int(increments * samples_each)
    while sample > 0 and int((sample - 1) / samples_each) >= increments:
        sample -= 1
    while int(sample / samples_each) < increments:
        sample += 1
    return sample


def samples_error(train_samples: int | None, sizes: BatchSizes) -> Iterator[str]:
    """Yield why `training.train_samples` is too small for a step."""
    first = sizes.at(0)
    if train_samples is not None and train_samples < first:
        source = f"first size of {RAMPUP}" if sizes.changes else TRAIN
        yield (
            f"training.train_samples ({train_samples}) is less than the samples of the first step, "
            f"the {source} ({first}), so the run would train nothing: set it to {first} or more"
        )


def rampup_errors(rampup: tuple[int, int, int] | None, batch: Batch) -> Iterator[str]:
    """Yield why the sizes of `training.rampup_batch_size` do not fit the batch of the config."""
    if rampup is None:
        return
    (start, increment, _), full = rampup, batch.train_batch_size
    name = f"{RAMPUP} {list(rampup)}"
    if start > full:
        yield (
            f"{name} starts with {start} samples, more than {TRAIN} ({full}): lower the number of "
            "samples of the first steps"
        )
        return
    if (full - start) % increment:
        yield (
            f"{name}: {TRAIN} minus the first size ({full} - {start} = {full - start}) must be a "
            f"multiple of the increment ({increment}); the nearest {TRAIN} "
            f"{near_multiples(full - start, increment, start)}"
        )
    unit = batch.samples_per_slice
    for what, size in (("the first size", start), ("the increment", increment)):
        if size % unit and start != full:
            yield (
                f"{name}: {what} ({size}) must be a multiple of {MICRO} * mesh.data "
                f"({batch.micro_batch_size} * {batch.data_size} = {unit}); the nearest "
                f"{near_multiples(size, unit)}"
            )
