"""The batch equation: train_batch_size = micro-batch * micro-batches * data ranks.  Floor 1."""

from dataclasses import dataclass

from pipemega.config.keys import Count, Section, honoured, ignored
from pipemega.config.model import near_multiples
from pipemega.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


class BatchKeys(Section):
    """How many samples go into a step; two of the three sizes are enough."""

    train_batch_size: Count | None = honoured(
        None, "Samples in an optimizer step, over all data ranks."
    )
    train_micro_batch_size_per_gpu: Count | None = honoured(
        None, "Samples that one data rank sends through the pipeline at a time."
    )
    gradient_accumulation_steps: Count | None = honoured(
        None, "Micro-batches of a data rank in a step; 1 if it does not follow from the others."
    )
    managed_gradient_accumulation: bool = ignored(
        True,
        "DeepSpeed: the engine counts the micro-batches.",
        "a step is one train_batch, and it always runs all its micro-batches",
        agrees=[True],
    )
    dataloader_drop_last: bool = honoured(
        False, "Leave out the last global batch of the data if it is not full."
    )
    vocabulary_size: Count | None = ignored(
        None, "DeepSpeed: warn if tensor cores do not like it.", "model.vocab_size is padded inside"
    )


@dataclass(frozen=True)
class Batch:
    """The solved equation of one data size.

    Attributes:
        train_batch_size: samples in an optimizer step.
        micro_batch_size: samples of one micro-batch.
        num_microbatches: micro-batches of one data rank in a step.
        data_size, tensor_size, pipeline_size: the axes of the mesh.
        fills: whether the bubble is (p - 1) / (m + p - 1), as of one whole stage per rank.
    """

    train_batch_size: int
    micro_batch_size: int
    num_microbatches: int
    data_size: int
    tensor_size: int = 1
    pipeline_size: int = 1
    fills: bool = True

    @property
    def world_size(self) -> int:
        return self.data_size * self.tensor_size * self.pipeline_size

    @property
    def equation(self) -> str:
        """Both products, with the names of their factors."""
        return (
            f"train_batch_size {self.train_batch_size} = {self.micro_batch_size} (micro) x "
            f"{self.num_microbatches} (gas) x {self.data_size} (data); "
            f"world {self.world_size} = data {self.data_size} x tensor {self.tensor_size} x "
            f"pipeline {self.pipeline_size}"
        )

    @property
    def bubble(self) -> float:
        """Share of a step in which a rank waits: (p - 1) / (m + p - 1)."""
        idle = self.pipeline_size - 1
        return idle / (self.num_microbatches + idle)

    @property
    def warnings(self) -> tuple[str, ...]:
        p, m = self.pipeline_size, self.num_microbatches
        if m >= p or not self.fills:
            return ()
        return (
            f"{m} micro-batches for {p} pipeline stages: the ranks stand idle for "
            f"(p - 1) / (m + p - 1) = {p - 1} / {m + p - 1} = {self.bubble:.0%} of each step; "
            f"{STEPS} {p} makes it {(p - 1) / (2 * p - 1):.0%}, {4 * (p - 1)} makes it 20%",
        )


def solve(
    train: int | None, micro: int | None, steps: int | None, data: int, ranks_per_copy: int = 1
) -> tuple[int, int, int]:
    """The three sizes for `data` data ranks, from those that are not None.

    DeepSpeed's rules: with one of them alone, the number of micro-batches is 1.

    Args:
        ranks_per_copy: mesh.tensor * mesh.pipeline, for the messages.

    Raises:
        ConfigError: no whole numbers solve the equation; the message has the nearest that do.
    """
    if train is None and micro is None:
        given = f"{STEPS} alone does not" if steps else "nothing does"
        raise ConfigError(
            f"the batch is not given: {given} say how many samples go into a step; give "
            f"{TRAIN} or {MICRO}, or two of {TRAIN}, {MICRO}, {STEPS}"
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
    """train / (factor * data), if that is a whole number."""
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
            f"{fitting} data ranks, which are {fitting * ranks_per_copy} ranks in all (this is for "
            f"{data * ranks_per_copy}: were all started, by torchrun --nproc_per_node?)"
        )
    raise ConfigError(
        f"{TRAIN} ({train}) must be {MICRO} * {STEPS} * mesh.data "
        f"({micro} * {steps} * {data} = {product}); what fits: {', or '.join(ways)}"
    )


def nearest_divisors(number: int, size: int) -> list[int]:
    """The divisors of `number` next to `size`, below and above."""
    below = next((d for d in range(min(size, number), 0, -1) if number % d == 0), None)
    above = next((d for d in range(size, number + 1) if number % d == 0), None)
    return sorted({d for d in (below, above) if d is not None})
