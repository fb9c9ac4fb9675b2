"""The batch equation: train_batch_size = micro-batch size * micro-batches * data ranks."""

from dataclasses import dataclass

from pipemega.config.key_kinds import Section, honoured, ignored
from pipemega.config.model_transformer import near_multiples
from pipemega.config.value_types import Count
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
