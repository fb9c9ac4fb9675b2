"""The kinds of instructions, and the transfers of vocabulary parallelism.

With vocabulary parallelism every pipeline rank holds a shard of the embedding and of the output
head: rows of their weights. Its passes are instructions like F and B, and they exchange tensors
between all shards and one stage:

    transfer             from          to            after   used by
    embedding            each shard    first stage   E       F
    embedding gradient   first stage   each shard    B, I    G
    hidden               last stage    each shard    F       S
    partial              each shard    last stage    S       C
    normalizer           last stage    each shard    C       T
"""

from enum import Enum
from typing import Literal, NamedTuple

Direction = Literal[
    "activation",
    "gradient",
    # Vocabulary parallelism
    "embedding",
    "embedding gradient",
    "hidden",
    "partial",
    "normalizer",
]
"""The name of a channel: of a message between two stages, or of a transfer."""


class Kind(Enum):
    """Kind of an instruction; the value is its notation."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of the input and of the weights
    BACKWARD_INPUT = "I"  # gradient of the input; the previous stage waits for it
    BACKWARD_WEIGHT = "W"  # gradients of the weights; only the optimizer waits for them
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    # Vocabulary parallelism
    EMBED = "E"  # rows of the embedding that are in this shard
    EMBED_WEIGHT = "G"  # gradient of the embedding rows of this shard
    OUTPUT = "S"  # softmax over this shard, and its part of the gradient of hidden
    LOSS = "C"  # combines the parts of all shards: loss and gradient of hidden
    OUTPUT_WEIGHT = "T"  # gradient of the head rows of this shard
    SEND_EMBEDDING = "SE"
    RECV_EMBEDDING = "RE"
    SEND_EMBEDDING_GRADIENT = "SEG"
    RECV_EMBEDDING_GRADIENT = "REG"
    SEND_HIDDEN = "SH"
    RECV_HIDDEN = "RH"
    SEND_PARTIAL = "SP"
    RECV_PARTIAL = "RP"
    SEND_NORMALIZER = "SN"
    RECV_NORMALIZER = "RN"

    # Enum computes its hash in Python. Members are singletons, so the identity hash is enough; it
    # halves the time of functions on plans.
    __hash__ = object.__hash__

    @property
    def is_message(self) -> bool:
        return self in _MESSAGES

    @property
    def is_receive(self) -> bool:
        return self in _RECEIVES

    @property
    def is_vocabulary(self) -> bool:
        """Whether it belongs to vocabulary parallelism."""
        return self in _VOCABULARY

    @property
    def has_shard(self) -> bool:
        """Whether the number after @ is that of a shard, which is a pipeline rank."""
        return self in _WITH_SHARD


class Transfer(NamedTuple):
    """One of the five transfers between the shards and one stage.

    Args:
        name: of its channels.
        send, receive: kinds of its messages.
        after: kinds of the steps whose result is sent.
        user: kind of the step that uses the result.
        to_shards: from the stage to each shard; else from each shard to the stage.
        at_first: the stage is the first one; else the last.
        in_evaluation: an evaluation has it, too.
    """

    name: Direction
    send: Kind
    receive: Kind
    after: tuple[Kind, ...]
    user: Kind
    to_shards: bool
    at_first: bool
    in_evaluation: bool = False


TRANSFERS = (
    Transfer(
        "embedding",
        Kind.SEND_EMBEDDING,
        Kind.RECV_EMBEDDING,
        (Kind.EMBED,),
        Kind.FORWARD,
        to_shards=False,
        at_first=True,
        in_evaluation=True,
    ),
    Transfer(
        "embedding gradient",
        Kind.SEND_EMBEDDING_GRADIENT,
        Kind.RECV_EMBEDDING_GRADIENT,
        (Kind.BACKWARD, Kind.BACKWARD_INPUT),
        Kind.EMBED_WEIGHT,
        to_shards=True,
        at_first=True,
    ),
    Transfer(
        "hidden",
        Kind.SEND_HIDDEN,
        Kind.RECV_HIDDEN,
        (Kind.FORWARD,),
        Kind.OUTPUT,
        to_shards=True,
        at_first=False,
        in_evaluation=True,
    ),
    Transfer(
        "partial",
        Kind.SEND_PARTIAL,
        Kind.RECV_PARTIAL,
        (Kind.OUTPUT,),
        Kind.LOSS,
        to_shards=False,
        at_first=False,
        in_evaluation=True,
    ),
    Transfer(
        "normalizer",
        Kind.SEND_NORMALIZER,
        Kind.RECV_NORMALIZER,
        (Kind.LOSS,),
        Kind.OUTPUT_WEIGHT,
        to_shards=True,
        at_first=False,
    ),
)
TRANSFER_OF_SEND = {transfer.send: transfer for transfer in TRANSFERS}
TRANSFER_OF_RECEIVE = {transfer.receive: transfer for transfer in TRANSFERS}
TRANSFER_OF_NAME = {transfer.name: transfer for transfer in TRANSFERS}
VOCABULARY_PASSES = (
    Kind.EMBED,
    Kind.EMBED_WEIGHT,
    Kind.OUTPUT,
    Kind.LOSS,
    Kind.OUTPUT_WEIGHT,
)

_RECEIVES = frozenset({Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT, *TRANSFER_OF_RECEIVE})
_MESSAGES = _RECEIVES | {Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT, *TRANSFER_OF_SEND}
_VOCABULARY = frozenset({*VOCABULARY_PASSES, *TRANSFER_OF_SEND, *TRANSFER_OF_RECEIVE})
_WITH_SHARD = frozenset(
    {Kind.EMBED, Kind.EMBED_WEIGHT, Kind.OUTPUT, Kind.OUTPUT_WEIGHT}
    | {t.receive if t.to_shards else t.send for t in TRANSFERS}
)
