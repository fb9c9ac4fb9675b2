"""The batch equation: train_batch_size = micro-batch size * micro-batches * data ranks.

The number of samples of each step: constant, or increased by `training.rampup_batch_size`.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from pipemega.config.declarations import Count, Section, honoured, ignored
from pipemega.config.sections.run_sections import TrainingSection
from pipemega.config.sections.scheduler_section import RunLength
from pipemega.config.sections.transformer_sections import near_multiples
from pipemega.errors import ConfigError
from pipemega.printing import counted, percent

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


class BatchKeys(Section):
    """Samples per step; two of the three sizes are enough."""

    train_batch_size: Count | None = honoured(None, "Samples per optimizer step on all data ranks.")
    train_micro_batch_size_per_gpu: Count | None = honoured(None, "Samples per micro-batch.")
    gradient_accumulation_steps: Count | None = honoured(
        None, "Micro-batches per step of a data rank; null: computed from the other two, or 1."
    )
    managed_gradient_accumulation: bool = ignored(
        True,
        "DeepSpeed: the engine counts the micro-batches.",
        "train_batch always runs all micro-batches of a step",
        agrees=[True],
    )
    dataloader_drop_last: bool = honoured(
        False,
        "Drop the last samples of an epoch if they do not fill a step. false: with "
        "`training.epochs` they are a partial step. Without `training.epochs` the step is filled "
        "from the next epoch; a generator has no next epoch, so its incomplete last step is an "
        "error.",
    )
    vocabulary_size: Count | None = ignored(
        None,
        "DeepSpeed: warn if this size is slow on tensor cores.",
        "the vocabulary of the built-in GPT is padded to a fast size",
    )


@dataclass(frozen=True)
class Batch:
    """The solved batch equation for one data-parallel size.

    Attributes:
        train_batch_size: samples per optimizer step.
        micro_batch_size: samples per micro-batch.
        num_microbatches: micro-batches per step of one data rank.
        data_size, tensor_size, pipeline_size: sizes of the mesh axes.
        has_1f1b_bubble: the bubble of the schedule is (p - 1) / (m + p - 1).
    """

    train_batch_size: int
    micro_batch_size: int
    num_microbatches: int
    data_size: int
    tensor_size: int = 1
    pipeline_size: int = 1
    has_1f1b_bubble: bool = True

    @property
    def world_size(self) -> int:
        return self.data_size * self.tensor_size * self.pipeline_size

    @property
    def samples_per_slice(self) -> int:
        """Samples of one micro-batch on all data ranks together."""
        return self.micro_batch_size * self.data_size

    @property
    def equation(self) -> str:
        """The batch equation and the mesh equation as one line of text."""
        return (
            f"train_batch_size {self.train_batch_size} = {self.micro_batch_size} (micro) x "
            f"{self.num_microbatches} (gas) x {self.data_size} (data); "
            f"world {self.world_size} = data {self.data_size} x tensor {self.tensor_size} x "
            f"pipeline {self.pipeline_size}"
        )

    @property
    def bubble(self) -> float:
        """Share of a step in which a rank is idle: (p - 1) / (m + p - 1)."""
        idle = self.pipeline_size - 1
        return idle / (self.num_microbatches + idle)

    @property
    def warnings(self) -> tuple[str, ...]:
        p, m = self.pipeline_size, self.num_microbatches
        if m >= p or not self.has_1f1b_bubble:
            return ()
        return (
            f"{counted(m, 'micro-batch', 'es')} for {p} pipeline stages: the ranks are idle for "
            f"(p - 1) / (m + p - 1) = {p - 1} / {m + p - 1} = {percent(self.bubble, 0)} of each "
            f"step; {STEPS} {p} makes it {percent((p - 1) / (2 * p - 1), 0)}, {4 * (p - 1)} makes "
            f"it 20%",
        )


def solve(
    train: int | None, micro: int | None, steps: int | None, data: int, ranks_per_copy: int = 1
) -> tuple[int, int, int]:
    """Return (train, micro, steps) for `data` data ranks; None values are computed.

    As in DeepSpeed, the number of micro-batches is 1 if only one size is given.

    Args:
        ranks_per_copy: mesh.tensor * mesh.pipeline, for the error message.

    Raises:
        ConfigError: no integers solve the equation; the message gives the nearest that do.
    """
    if train is None and micro is None:
        given = f" ({STEPS} alone is not enough)" if steps else ""
        raise ConfigError(
            f"the batch size is not set{given}: set {TRAIN} or {MICRO}, or two of {TRAIN}, "
            f"{MICRO}, {STEPS}"
        )
    if train is None:
        assert micro is not None
        return micro * (steps or 1) * data, micro, steps or 1
    if micro is not None and steps is not None:
        _check_all(train, micro, steps, data, ranks_per_copy)
        return train, micro, steps
    if micro is not None:
        return train, micro, _quotient(train, (MICRO, micro), data)
    return train, _quotient(train, (STEPS, steps), data), steps or 1


def _quotient(train: int, factor: tuple[str, int | None], data: int) -> int:
    """Return train / (factor * data).

    Raises:
        ConfigError: it is not an integer.
    """
    name, size = factor
    per_step = (size or 1) * data
    if train % per_step == 0:
        return train // per_step
    product = f"{name} * mesh.data ({size} * {data} = {per_step})"
    if size is None:
        product = f"mesh.data ({data})"
    others = ""
    if size is not None and train % data == 0:
        fit = nearest_divisors(train // data, size)
        others = f"; or {name} {' or '.join(map(str, fit))}"
    raise ConfigError(
        f"{TRAIN} ({train}) must be a multiple of {product}; the nearest "
        f"{near_multiples(train, per_step)}{others}"
    )


def _check_all(train: int, micro: int, steps: int, data: int, ranks_per_copy: int) -> None:
    product = micro * steps * data
    if train == product:
        return
    ways = [f"{TRAIN} {product}"]
    for name, rest in ((MICRO, steps * data), (STEPS, micro * data)):
        if train % rest == 0:
            ways.append(f"{name} {train // rest}")
    if train % (micro * steps) == 0:
        fitting = train // (micro * steps)
        ways.append(
            f"{fitting} data ranks, which is {fitting * ranks_per_copy} ranks in total (now "
            f"{data * ranks_per_copy}; check torchrun --nproc_per_node)"
        )
    raise ConfigError(
        f"{TRAIN} ({train}) must be {MICRO} * {STEPS} * mesh.data "
        f"({micro} * {steps} * {data} = {product}); set {', or '.join(ways)}"
    )


def nearest_divisors(number: int, size: int) -> list[int]:
    """Return the divisors of `number` nearest to `size`, below and above."""
    below = next((d for d in range(min(size, number), 0, -1) if number % d == 0), None)
    above = next((d for d in range(size, number + 1) if number % d == 0), None)
    return sorted({d for d in (below, above) if d is not None})


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
