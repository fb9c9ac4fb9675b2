"""The data, the results and the state of one run of a plan on one pipeline rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipemega.distributed.torch_versions import gradient_edge
from pipemega.pipeline.messages import InputGradient, TensorMeta
from pipemega.pipeline.microbatch_loss import Loss, LossSums
from pipemega.pipeline.model.module import RngKey, Stage
from pipemega.pipeline.plan.instructions import Instruction, Plan, Program
from pipemega.pipeline.recorder import Recorder
from pipemega.pipeline.transport import Receive

# The same few in every micro-batch.
_meta = lru_cache(maxsize=1024)(TensorMeta)

Key = tuple[int, int]  # (stage, micro-batch)


@dataclass
class RankStages:
    """The part of the model that one pipeline rank executes.

    Args:
        rank: the pipeline rank.
        stages: the local stages, by stage number.
        num_stages: number of stages of the whole model.
        loss_fn: loss of the model; None if only outputs are computed.
        cast_inputs: casts the inputs of the first stage.
    """

    rank: int
    stages: Mapping[int, Stage]
    num_stages: int
    loss_fn: Loss | None
    cast_inputs: Callable[[Any], Any] = lambda tree: tree


@dataclass(frozen=True)
class MicroBatches:
    """The data of one run of a plan on one data rank.

    Args:
        inputs: one entry per micro-batch; used only on the rank of the first stage.
        labels: one entry per micro-batch; used only on the rank of the last stage.
        rng_keys: RNG keys for dropout, one per micro-batch; None in evaluation.
        loss_factor: initial gradient of each micro-batch's loss; contains the loss scale and the
            division by the number of micro-batches.
        shares: samples of each micro-batch, relative to a full one: the weight of its mean loss.
            None: all are full. One with share 0 completes a step: it is run, so that all ranks run
            the same instructions, but has no loss, no gradient and no output.
        keep_outputs: also return the outputs of the last layer.
        on_output: called with (outputs, labels) of each micro-batch, on the rank of the last stage.
        discard_grads: do not start reductions; the gradients are discarded.
        weight_per_sample: returns the weight of the losses of the step, over its samples, of which
            auxiliary losses are means; called in backward, and only by layers that have some.
        counted: the number of labels of each micro-batch that are not -100, where the host knows
            it; empty on a CPU.
    """

    inputs: Sequence[Any]
    labels: Sequence[Any]
    rng_keys: Sequence[RngKey] | None = None
    loss_factor: float = 1.0
    shares: Sequence[float] | None = None
    keep_outputs: bool = False
    on_output: Callable[[Any, Any], object] | None = None
    discard_grads: bool = False
    counted: Sequence[int | None] = ()
    weight_per_sample: Callable[[], float] = lambda: 1.0

    def share(self, microbatch: int) -> float:
        """Return the samples of a micro-batch, relative to a full one."""
        return 1.0 if self.shares is None else self.shares[microbatch]

    def counted_labels(self, microbatch: int) -> int | None:
        """Return the number of labels of a micro-batch that are not -100, if it is known."""
        return self.counted[microbatch] if self.counted else None

    @property
    def uses_outputs(self) -> bool:
        """Whether the caller gets the outputs of the last layer."""
        return self.keep_outputs or self.on_output is not None

    @property
    def has_other_shapes(self) -> bool:
        """Whether a micro-batch may have messages of other shapes than a full micro-batch."""
        return any(share not in (0, 1) for share in self.shares or ())


Handler = Callable[[Instruction], None]


class ComputeWrapper(ABC):
    """Runs the compute instructions of an executor, with something of its own around them."""

    needs_first_run = False
    """Whether a run of one micro-batch must come before the first step (`kernel_warmup`)."""

    @abstractmethod
    def begin(self, run: "ExecutionState", program: Program) -> None:
        """Prepare a run of `program`, the one of this rank, before its first message."""

    @abstractmethod
    def run(self, handler: Handler, step: Instruction) -> None:
        """Run `step` by `handler`."""


@dataclass
class Results:
    """Losses and outputs of a run on the rank of the last stage; empty on the other ranks."""

    losses: LossSums = field(default_factory=LossSums)
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True)
class InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward.

    Only the autograd graph of the output is kept; its values are at the next stage.
    """

    inputs: list[InputGradient]
    edges: list[GradientEdge]
    metas: list[TensorMeta]

    @classmethod
    def of(cls, inputs: list[InputGradient], output: Sequence[Tensor]) -> "InFlight":
        """Collect the state from the gradients of the input and the output of a forward."""
        differentiable = [tensor for tensor in output if tensor.requires_grad]
        return cls(
            inputs=inputs,
            edges=[gradient_edge(tensor) for tensor in differentiable],
            metas=[_meta(t.shape, t.dtype, False) for t in differentiable],
        )


@dataclass
class ExecutionState:
    """State of one run of a plan on this rank."""

    plan: Plan
    batch: MicroBatches
    recorder: Recorder
    # The backwards that complete the gradients of a stage.
    final_backwards: frozenset[Instruction] = frozenset()
    completed: int = 0  # instructions of the program
    results: Results = field(default_factory=Results)
    in_flight: dict[Key, InFlight] = field(default_factory=dict)
    # Outputs with their versions, by the stage that computed them, until the next stage takes them
    # or they are sent.
    activations: dict[Key, tuple[Any, list[int]]] = field(default_factory=dict)
    # Input gradients by the stage that computed them, until the previous stage takes them or they
    # are sent. Those of the output of the last stage are as if a next stage had computed them.
    gradients: dict[Key, list[Tensor]] = field(default_factory=dict)
    # Posted receives, by the stage that uses the message.
    activation_receives: dict[Key, Receive] = field(default_factory=dict)
    gradient_receives: dict[Key, Receive] = field(default_factory=dict)
    train: bool = field(init=False)

    def __post_init__(self) -> None:
        self.train = not self.plan.forward_only
