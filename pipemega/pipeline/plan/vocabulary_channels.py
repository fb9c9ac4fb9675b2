"""The channels of the instructions of vocabulary parallelism."""

from collections.abc import Mapping
from typing import Final

from pipemega.pipeline.plan.channels import Channel, Direction
from pipemega.pipeline.plan.instructions import Instruction, Plan
from pipemega.pipeline.plan.kinds import Transfer

# Transfer -> the one before it in the opposite direction, whose result it was computed from: after
# its arrival the memory of that message is free.
PROVES: Final[Mapping[Direction, Direction]] = {
    "embedding gradient": "embedding",
    "partial": "hidden",
    "normalizer": "partial",
}


def vocabulary_channels(plan: Plan, transfer: Transfer, step: Instruction) -> tuple[Channel, ...]:
    """Return the channels over which `step` sends, receives or uses messages of `transfer`.

    None for a step without messages: on the rank of the stage, or of another transfer.
    """
    if step.kind not in (transfer.send, transfer.receive, transfer.user):
        return ()
    root = plan.root_of(transfer)
    rank = plan.rank_of_stage[root]
    if step.kind.has_shard:
        shards: tuple[int, ...] = (step.stage,)
    else:
        shards = tuple(range(plan.num_ranks)) if step.stage == root else ()
    return tuple(Channel(transfer.name, shard) for shard in shards if shard != rank)
