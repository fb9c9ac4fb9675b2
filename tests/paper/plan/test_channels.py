"""Channels of a placement, and the connections that carry them where a backend has no tags."""

from collections import Counter

import pytest
from hypothesis import given

from pipemega.pipeline.plan.channels import Channel, channels, connections, connections_per_rank
from pipemega.pipeline.schedules.building_blocks import loop, v
from tests.paper.hand_made_plans import placements


def _by_pair(rank_of_stage):
    """The names of the channels between each two ranks, by group."""
    found = {}
    for made in connections(rank_of_stage):
        pair = "-".join(map(str, sorted((made.source, made.target))))
        name = f"{made.channel.direction[0].upper()}{made.channel.boundary}"
        found.setdefault(pair, {})[made.group] = name
    return {pair: " ".join(groups[k] for k in sorted(groups)) for pair, groups in found.items()}


def test_the_groups_are_those_of_the_drawing():
    assert _by_pair(loop(2, 2)) == {"0-1": "A0 A1 A2 G0 G1 G2"}
    assert _by_pair(loop(4, 2)) == {
        "0-1": "A0 A4 G0 G4",
        "1-2": "A1 A5 G1 G5",
        "2-3": "A2 A6 G2 G6",
        "0-3": "A3 G3",
    }
    # Stages 1 and 2 are on one rank and exchange no message.
    assert _by_pair(v(2)) == {"0-1": "A0 A2 G0 G2"}


@given(placements())
def test_no_group_has_two_channels_between_the_same_ranks(rank_of_stage):
    made = connections(rank_of_stage)
    assert sorted(link.channel for link in made) == sorted(channels(rank_of_stage))
    per_pair = Counter(frozenset((link.source, link.target)) for link in made)
    in_group = {(link.group, frozenset((link.source, link.target))) for link in made}
    assert len(in_group) == len(made)
    # No more groups than the pair with the most channels needs.
    assert {link.group for link in made} == set(range(max(per_pair.values(), default=0)))


@given(placements())
def test_a_connection_goes_from_the_rank_that_sends_to_the_rank_that_receives(rank_of_stage):
    for link in connections(rank_of_stage):
        assert link.source == rank_of_stage[link.channel.source]
        assert link.target == rank_of_stage[link.channel.target]
        assert link.source != link.target


@given(placements())
def test_a_rank_has_at_most_four_connections_per_stage(rank_of_stage):
    stages = Counter(rank_of_stage)
    for rank, count in enumerate(connections_per_rank(rank_of_stage)):
        assert count <= 4 * stages[rank]
    assert sum(connections_per_rank(rank_of_stage)) == 2 * len(channels(rank_of_stage))


@given(placements())
def test_ranks_that_open_their_connections_in_order_never_wait_for_each_other(rank_of_stage):
    """Each rank blocks in the first operation of a connection until its peer is in it."""
    mine = {
        rank: [link for link in connections(rank_of_stage) if rank in (link.source, link.target)]
        for rank in range(max(rank_of_stage) + 1)
    }
    while any(mine.values()):
        both_in_it = [
            links[0]
            for links in mine.values()
            if links and all(mine[r][0] == links[0] for r in (links[0].source, links[0].target))
        ]
        assert both_in_it, "all ranks wait"
        for link in set(both_in_it):
            mine[link.source].pop(0)
            mine[link.target].pop(0)


@pytest.mark.parametrize(
    ("rank_of_stage", "counts"),
    [
        (loop(4), (2, 4, 4, 2)),
        (loop(2, 2), (6, 6)),
        (loop(4, 2), (6, 8, 8, 6)),
        (v(4, 2), (4, 8, 8, 4)),
    ],
)
def test_inner_ranks_have_the_most_connections(rank_of_stage, counts):
    assert connections_per_rank(rank_of_stage) == counts


def test_an_activation_goes_to_the_next_stage_and_its_gradient_back():
    assert (Channel("activation", 3).source, Channel("activation", 3).target) == (3, 4)
    assert (Channel("gradient", 3).source, Channel("gradient", 3).target) == (4, 3)
