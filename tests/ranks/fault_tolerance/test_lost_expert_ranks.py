"""A rank that is lost in an exchange of tokens: no rank hangs, and its peers name the exchange."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist

from tests.ranks.engine.test_experts import Mesh, config_of
from tests.ranks.fault_tolerance.test_failures import messages
from tests.ranks.injected_faults import ACTIONS
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import build, data
from tests.sampling import some_cases

BLOCK = 5
"""All-to-alls of a block and a micro-batch: token counts, rows, results; gradients of the two."""


class Place(NamedTuple):
    """An exchange of micro-batch 1.

    Args:
        offset: number of the all-to-all within those of the micro-batch.
        layer: position of the layer.
        text: how an error names it.
    """

    offset: int
    layer: int
    text: str


COUNTS = Place(0, 2, "forward of micro-batch 1 at stage 0 (F1@0): the exchange of token counts")
ROWS = Place(4, 3, "forward of micro-batch 1 at stage 0 (F1@0): the all-to-all of tokens")
BACKWARD = Place(9, 2, "backward of micro-batch 1 at stage 0 (B1@0): the all-to-all of tokens")
SECOND_STAGE = Place(1, 3, "forward of micro-batch 1 at stage 1 (F1@1): the all-to-all of tokens")


@pytest.mark.parametrize(
    ("mesh", "place", "action"),
    some_cases(
        [
            ((1, 4, 1, 4), COUNTS, "kill"),
            ((1, 4, 1, 4), BACKWARD, "kill"),
            ((1, 4, 1, 2), ROWS, "kill"),
            ((2, 2, 1, 2), SECOND_STAGE, "kill"),
            ((1, 2, 1, 2), COUNTS, "hang"),
            ((1, 2, 1, 2), BACKWARD, "hang"),
        ],
        1,
    ),
)
def test_the_peers_of_a_lost_rank_name_the_layer_the_micro_batch_and_the_ranks(
    pool: RankPool, mesh: Mesh, place: Place, action: str
) -> None:
    """The last rank is lost before it takes part; the others wait in the exchange."""
    pipeline, data_size, _, expert = mesh
    ranks = pipeline * data_size
    config = config_of(mesh, "plain")
    config["mesh"]["timeout_seconds"] = 1 if action == "hang" else 30
    if pipeline > 1:
        config["pipeline"]["partition"] = [0, 3, 6]
    first = 2 * BLOCK // pipeline + place.offset
    raised = messages(pool, ranks, lose_last_rank, config, first, action)
    peers = range(ranks - expert, ranks)
    exchange = f"{place.text} for the experts of layers.{place.layer}"
    exchange += f" over ranks {', '.join(map(str, peers))}: "
    for rank, message in enumerate(raised[:-1]):
        assert message.startswith(f"PeerError: no response from rank {ranks - 1}: killed"), rank
        if rank in peers:
            assert exchange in message


def lose_last_rank(config: dict[str, Any], skipped: int, action: str) -> None:
    """Train; the last rank gets lost after it has started this number of all-to-alls."""
    engine = build(config)
    if dist.get_rank() < dist.get_world_size() - 1:
        engine.train_batch(data(engine, 0))
        return
    start, calls = dist.all_to_all_single, iter(range(1000))

    def lost(*args: Any, **options: Any) -> Any:
        if next(calls) == skipped:
            ACTIONS[action]()
        return start(*args, **options)

    with mock.patch.object(dist, "all_to_all_single", lost):
        engine.train_batch(data(engine, 0))
