"""What the passes of vocabulary parallelism change in the memory of a rank.

    instruction       allocates                                   until
    E                 rows of the token ids                       F of the first stage
    RE                the rows of the other shards                F of the first stage
    F (last stage)    hidden; RH: a buffer for it                 T
    S                 exponentials; the partial result            T; C
    RP                the partial results of the other shards     C
    C                 gradient of hidden; normalizers             B or I; T
    B, I (first)      gradient of the rows; REG: a buffer for it  G

On the CPU, gloo keeps sent rows and partial results until the answer of the stage arrives, and
what the stage sends to the shards until the end of the step.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pipemega.pipeline.plan.instructions import Instruction
from pipemega.pipeline.plan.kinds import Kind
from pipemega.planning.shard_costs import ShardCosts
from pipemega.profiling.meta_kernels import DeviceType


class ShardChange(NamedTuple):
    """Bytes that an instruction adds, its temporary bytes with them, and what it frees first."""

    activations: int = 0
    messages: int = 0
    working: int = 0
    freed: int = 0


class ShardMemory:
    """The changes on one rank.

    Args:
        rank_of_stage: of the plan.
        num_ranks: pipeline ranks.
    """

    def __init__(
        self,
        costs: ShardCosts,
        rank_of_stage: Sequence[int],
        rank: int,
        num_ranks: int,
        device: DeviceType,
    ) -> None:
        self._costs, self._others = costs, num_ranks - 1
        self._last_stage = len(rank_of_stage) - 1
        self._is_first, self._is_last = rank_of_stage[0] == rank, rank_of_stage[-1] == rank
        self._gloo = device == "cpu"

    def of_pass(self, step: Instruction) -> ShardChange:
        """Return the change by a pass or a message of vocabulary parallelism."""
        c, others, first, last = self._costs, self._others, self._is_first, self._is_last
        sent = 0 if self._gloo else -1
        messages = {
            Kind.EMBED: c.rows,
            Kind.SEND_EMBEDDING: sent * c.rows,
            Kind.RECV_EMBEDDING: others * c.rows,
            Kind.RECV_HIDDEN: c.hidden,
            Kind.OUTPUT: c.partial,
            Kind.SEND_PARTIAL: sent * c.partial,
            Kind.RECV_PARTIAL: others * c.partial,
            Kind.LOSS: c.hidden + c.normalizers - (others + 1) * c.partial,
            Kind.RECV_NORMALIZER: c.normalizers,
            Kind.RECV_EMBEDDING_GRADIENT: c.rows,
        }.get(step.kind, 0)
        activations = freed = 0
        if step.kind is Kind.OUTPUT:
            activations = c.kept
        elif step.kind is Kind.OUTPUT_WEIGHT:
            activations = -c.kept - (c.hidden if last else 0)
            freed = c.partial if self._gloo and not last else 0
            messages -= freed + (0 if last else c.hidden)
            messages -= 0 if last and self._gloo else c.normalizers
        elif step.kind is Kind.EMBED_WEIGHT:
            freed = c.rows if self._gloo and not first else 0
            messages -= freed + (0 if first and self._gloo else c.rows)
        # The partial result is several tensors, which are copied into one message.
        packed = c.partial if step.kind is Kind.SEND_PARTIAL else 0
        return ShardChange(activations, messages, c.working.get(step.kind, packed), freed)

    def of_stage(self, step: Instruction) -> ShardChange:
        """Return the change by F, B or I in addition to that of its stage."""
        c, activations, messages, working = self._costs, 0, 0, 0
        if step.kind is Kind.FORWARD:
            if step.stage == 0:
                # The sum of all rows is a tensor of its own, which counts for the stage.
                messages, working = -(self._others + 1) * c.rows, c.rows
            if step.stage == self._last_stage:
                activations = c.hidden
        elif step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            messages += c.rows * (step.stage == 0) - c.hidden * (step.stage == self._last_stage)
        return ShardChange(activations, messages, working)
