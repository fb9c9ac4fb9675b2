"""The channels of a placement, and the process group of each where a backend has no tags.

A channel is one direction across one stage boundary: first in, first out. A backend separates the
channels between two ranks in one of two ways:

    tags     gloo: messages are matched by tag, so one process group carries all channels
    queues   NCCL: tags are ignored, and the sends and receives of one group between two ranks run
             in one queue for both ways, in the order in which each rank posted them. Nothing is
             buffered. Where one rank has a send next and the other has no receive next, both wait
             for ever

With queues, each channel between two ranks therefore has a group of its own:

    loop, two ranks, two chunks         pair 0-1   A0 A1 A2 G0 G1 G2       6 groups
    loop, four ranks, two chunks        pair 0-1   A0 A4 G0 G4             4 groups, for all pairs
                                        pair 1-2   A1 A5 G1 G5
                                        pair 2-3   A2 A6 G2 G6
                                        pair 0-3   A3 G3

No smaller number fits every plan: two channels of opposite ways block each other as above, and two
channels of the same way need sends and receives in one common order, which plans do not have.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from pipemega.pipeline.plan.kinds import TRANSFER_OF_NAME
from pipemega.pipeline.plan.kinds import Direction as Direction

_BETWEEN_STAGES: tuple[Direction, ...] = ("activation", "gradient")
MessageOrder = Literal["tags", "queues"]
# When headers are sent; see `pipeline.transport`.
ShapeMode = Literal["declared", "cached", "exchanged"]


class Channel(NamedTuple):
    """One direction across the boundary between stage `boundary` and the next stage.

    In vocabulary parallelism: a transfer between a stage and the shard of rank `boundary`.
    """

    direction: Direction
    boundary: int

    @property
    def has_shard(self) -> bool:
        """Whether it belongs to vocabulary parallelism."""
        return self.direction not in _BETWEEN_STAGES

    @property
    def source(self) -> int:
        """The stage that sends."""
        assert not self.has_shard, f"{self} has a shard"
        return self.boundary + (self.direction == "gradient")

    @property
    def target(self) -> int:
        """The stage that receives."""
        assert not self.has_shard, f"{self} has a shard"
        return self.boundary + (self.direction == "activation")

    def ranks(self, rank_of_stage: Sequence[int]) -> tuple[int, int]:
        """Return the pipeline ranks that send and receive."""
        if not self.has_shard:
            return rank_of_stage[self.source], rank_of_stage[self.target]
        transfer = TRANSFER_OF_NAME[self.direction]
        stage = rank_of_stage[0 if transfer.at_first else -1]
        return (stage, self.boundary) if transfer.to_shards else (self.boundary, stage)


class Connection(NamedTuple):
    """A channel with queues: its process group, and the pipeline ranks that send and receive."""

    group: int
    source: int
    target: int
    channel: Channel


def channels(rank_of_stage: Sequence[int], vocabulary: bool = False) -> list[Channel]:
    """Return the channels between stages on different ranks.

    Args:
        vocabulary: also those of vocabulary parallelism.
    """
    found = [
        Channel(direction, boundary)
        for direction in _BETWEEN_STAGES
        for boundary in range(len(rank_of_stage) - 1)
        if rank_of_stage[boundary] != rank_of_stage[boundary + 1]
    ]
    if vocabulary:
        shards = range(max(rank_of_stage) + 1)
        directions: list[Direction] = [d for d in get_args(Direction) if d not in _BETWEEN_STAGES]
        with_shards = (Channel(direction, shard) for direction in directions for shard in shards)
        for channel in with_shards:
            source, target = channel.ranks(rank_of_stage)
            if source != target:
                found.append(channel)
    return found


def connections(rank_of_stage: Sequence[int], vocabulary: bool = False) -> list[Connection]:
    """Return the connections for queues, in the one order in which all ranks open them.

    The k-th channel between two ranks is in group k. So no group has two channels between the same
    ranks.
    """
    found: Counter[frozenset[int]] = Counter()
    made = []
    for channel in channels(rank_of_stage, vocabulary):
        source, target = channel.ranks(rank_of_stage)
        pair = frozenset((source, target))
        made.append(Connection(found[pair], source, target, channel))
        found[pair] += 1
    return sorted(made, key=lambda made: (made.group, min(made[1:3]), max(made[1:3])))


def connections_per_rank(rank_of_stage: Sequence[int], vocabulary: bool = False) -> tuple[int, ...]:
    """Return how many connections each rank has with queues.

    At most four per stage: two directions across the boundary before it and the one after it. With
    vocabulary parallelism at most five more on each rank without the first and the last stage, and
    as many more for each other rank on those.
    """
    count = Counter(rank for made in connections(rank_of_stage, vocabulary) for rank in made[1:3])
    return tuple(count[rank] for rank in range(max(rank_of_stage) + 1))
