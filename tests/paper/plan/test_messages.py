"""Rule 5: every message of a plan arrives under the transport, with tags and with queues.

`nccl_simulation` executes the same plans in another way; both must agree.
"""

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pipemega.errors import ScheduleError
from pipemega.pipeline.plan.channels import (
    UNLIMITED,
    Hardware,
    MessageOperations,
    MessageQueues,
    channels,
    connections,
    queues_of,
)
from pipemega.pipeline.plan.lowering import lower, warmup_cut
from pipemega.pipeline.plan.validate import validate_messages
from pipemega.pipeline.plan_selection import warmup_plan
from pipemega.pipeline.schedules import SCHEDULES, build_plan, forward_only
from tests.paper.hand_made_plans import hand_made, valid_plans
from tests.paper.plan.nccl_simulation import Simulation

SHAPES = ("declared", "cached", "exchanged")
FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])


def _plans(sizes, counts, chunk_counts):
    """All lowered plans of all schedules with these sizes."""
    for name, p, m, chunks in itertools.product(SCHEDULES, sizes, counts, chunk_counts):
        try:
            yield lower(build_plan(name, p, m, chunks))
        except ScheduleError:
            continue  # the schedule does not accept these sizes


def _transport_groups(plan):
    """The groups of the transport, for the simulation."""
    return {_key(made.channel): made.group for made in connections(plan.rank_of_stage)}


def _groups_of_chunks(plan):
    """One group per direction and chunk; channels of both ways can meet in one."""
    count = -(-plan.num_stages // plan.num_ranks)
    return {
        channel: (channel.direction, channel.boundary // plan.num_ranks % count)
        for channel in channels(plan.rank_of_stage)
    }


def _key(channel):
    return channel.direction[0].upper(), channel.boundary


def _queues(plan, group_of):
    """The queues if `group_of` are the process groups."""
    return {
        c: (group, frozenset((plan.rank_of_stage[c.source], plan.rank_of_stage[c.target])))
        for c, group in group_of.items()
    }


def _verdict(plan, group_of, shapes="declared", hardware=UNLIMITED):
    """Why rule 5 rejects the plan with these groups; None if it accepts it."""
    queue_of = _queues(plan, group_of)
    try:
        validate_messages(plan, "queues", shapes, queue_of=queue_of, hardware=hardware)
    except ScheduleError as error:
        return str(error)
    return None


def _assert_all_messages_arrive(plan):
    evaluation = lower(forward_only(plan.rank_of_stage, plan.num_microbatches))
    for order, shapes in itertools.product(("tags", "queues"), SHAPES):
        validate_messages(plan, order, shapes, discards=True)
        validate_messages(evaluation, order, shapes)
    groups = _transport_groups(plan)
    assert Simulation(evaluation, groups).run(steps=2)
    for shapes in SHAPES:
        assert Simulation(plan, groups, shapes).run(steps=2)
        assert Simulation(plan, groups, shapes).run_with_discarded_warmup()


@pytest.mark.parametrize("pp_size", [2, 3, 4])
def test_every_message_of_every_schedule_arrives(pp_size):
    for plan in _plans([pp_size], [1, 6], [None]):
        _assert_all_messages_arrive(plan)


@pytest.mark.sweep
@pytest.mark.parametrize("pp_size", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("chunks", [None, 3, 4])
def test_every_message_of_every_schedule_arrives_at_every_size(pp_size, chunks):
    for plan in _plans([pp_size], [1, 2, 4, 8, 16, 21], [chunks]):
        _assert_all_messages_arrive(plan)


@FEW
@given(valid_plans())
def test_every_message_of_any_valid_plan_arrives(plan):
    lowered = lower(plan)
    assume(lowered.is_lowered)
    _assert_all_messages_arrive(lowered)


def test_a_group_per_direction_and_chunk_deadlocks_on_two_ranks_with_several_chunks():
    """On two ranks, boundaries 0 and 1 are of the same chunk, and go opposite ways.

    Each rank posts a receive ahead of the send that the other rank waits for. With more ranks, the
    boundaries of a chunk are between different pairs.
    """
    rejected = set()
    for plan in _plans([2, 3, 4], [1, 2, 4], [None, 3]):
        verdict = _verdict(plan, _groups_of_chunks(plan))
        if verdict is not None:
            assert "deadlocks if the messages between two ranks run in the order" in verdict
            rejected.add((plan.name, plan.num_ranks))
    assert rejected == {("interleaved", 2), ("looped-bfs", 2), ("interleaved-zb", 2)}


@pytest.mark.sweep
def test_the_rule_and_the_simulation_reject_45_of_380_plans_with_a_group_per_chunk():
    plans = list(_plans([2, 3, 4, 8], [1, 2, 4, 8, 16], [None, 3, 4]))
    rejected = [plan for plan in plans if _verdict(plan, _groups_of_chunks(plan)) is not None]
    assert (len(rejected), len(plans)) == (45, 380)
    for plan in plans:
        groups = {_key(c): group for c, group in _groups_of_chunks(plan).items()}
        assert Simulation(plan, groups).run() == (plan not in rejected)


@st.composite
def _plans_with_groups(draw):
    plan = lower(draw(valid_plans()))
    crossing = channels(plan.rank_of_stage)
    most = draw(st.integers(1, max(1, len(crossing))))
    return plan, {c: draw(st.integers(1, most)) for c in crossing}


@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much])
@given(_plans_with_groups(), st.sampled_from(SHAPES))
def test_the_rule_agrees_with_the_simulation_for_any_groups(drawn, shapes):
    plan, group_of = drawn
    assume(plan.is_lowered)
    verdict = _verdict(plan, group_of, shapes)
    assume(verdict is None or "mixes messages" not in verdict)
    groups = {_key(channel): group for channel, group in group_of.items()}
    assert Simulation(plan, groups, shapes).run(steps=2) == (verdict is None)


def test_connections_that_are_opened_in_the_step_deadlock():
    """NCCL creates a communicator in its first operation, which blocks the hosts of both ranks."""
    stuck = {}
    for shapes in SHAPES:
        stuck[shapes] = {
            plan.name
            for plan in _plans([4], [1, 8], [None])
            if not Simulation(plan, _transport_groups(plan), shapes, opened=False).run()
        }
    assert stuck["cached"] == {"interleaved", "looped-bfs", "interleaved-zb", "1f1b-v"}
    assert stuck["declared"] == {*stuck["cached"], "zb-v", "dualpipe-v", "v-half", "v-min"}
    assert stuck["exchanged"] >= {"gpipe", *stuck["cached"]}


def test_one_group_per_way_mixes_the_messages_of_two_channels():
    """So two channels of the same way cannot share a group either."""
    mixed = set()
    for plan in _plans([2, 3], [1, 3], [None]):
        ranks = plan.rank_of_stage
        per_way = {c: ranks[c.source] < ranks[c.target] for c in channels(ranks)}
        if (verdict := _verdict(plan, per_way)) is not None:
            assert "mixes messages" in verdict
            mixed.add(plan.name)
    several_chunks = {name for name in SCHEDULES if SCHEDULES[name].default_chunks > 1}
    assert mixed == several_chunks - {"dualpipe-v"}


def test_a_deadlock_shows_the_waiting_ranks_the_queue_and_the_way_out():
    plan = lower(build_plan("interleaved", 2, 2))
    assert _verdict(plan, _groups_of_chunks(plan)) == (
        "schedule 'interleaved' deadlocks if the messages between two ranks run in the order in "
        "which they were posted, as over NCCL:\n"
        "  rank 0 waits at F0@2 for SA0@1; next in this queue: RA0@2 on rank 0, RA1@1 on rank 1\n"
        "  rank 1 waits at F1@1 for SA1@0; next in this queue: RA1@1 on rank 1, RA0@2 on rank 0\n"
        "  use another schedule, or gloo, which separates messages by tag (mesh.device 'cpu')\n"
        "    rank 0   .. SA0@0 RA0@2 F1@0 SA1@0 RA1@2 > F0@2 SA0@2 RG0@2 F1@2 SA1@2 RG1@2 ..\n"
        "    rank 1   RA0@1 RA1@1 F0@1 SA0@1 RA0@3 > F1@1 SA1@1 F0@3 RA1@3 B0@3 SG0@3 .."
    )


def test_a_message_that_arrives_as_another_one_is_shown_with_both_ranks():
    plan = lower(build_plan("interleaved", 2, 1))
    ranks = plan.rank_of_stage
    per_way = {c: ranks[c.source] < ranks[c.target] for c in channels(ranks)}
    lines = _verdict(plan, per_way).splitlines()
    assert lines[0].startswith("schedule 'interleaved' mixes messages if the messages between two")
    assert lines[1] == "  rank 1 sends SG0@3 when rank 0 receives RG0@0, in one queue"


def test_a_rank_that_waits_at_the_end_of_the_step_or_for_a_header_is_shown():
    plan = lower(hand_made("F0 F1", "F0 F1"))
    queues = MessageQueues(plan, queues_of(plan.rank_of_stage, "queues"))
    sender, receiver = (MessageOperations(plan, "cached") for _ in range(2))
    with pytest.raises(ScheduleError) as deadlock:
        queues.run([sender.step(plan.programs[0]), receiver.program(plan.programs[1][:1])])
    assert (
        "rank 0 waits at the end of the step for the header of RA0@1; next in this queue: the "
        "header of SA0@0 on rank 0, nothing on rank 1\n"
    ) in str(deadlock.value)


def test_the_warmup_that_is_discarded_leaves_no_message_behind():
    """A receive of a discarded message that nobody posts would take a message of the next run."""
    plan = lower(build_plan("1f1b", 3, 6))
    cut = warmup_cut(plan)
    assert any(cut.unread)
    queues = MessageQueues(cut.plan, queues_of(plan.rank_of_stage, "queues"))
    ranks = [MessageOperations(cut.plan, "cached") for _ in range(3)]
    heads = [program[:stop] for program, stop in zip(cut.plan.programs, cut.stop, strict=True)]
    queues.run([rank.program(head) for rank, head in zip(ranks, heads, strict=True)])
    with pytest.raises(ScheduleError, match=r"rank 1 waits at .* for RA1@2; next .* nothing on"):
        queues.run([rank.discard(stop, ()) for rank, stop in zip(ranks, cut.stop, strict=True)])


def test_a_pipeline_of_one_rank_has_no_messages():
    plan = lower(build_plan("interleaved", 1, 3, 2))
    assert validate_messages(plan, "queues", discards=True) is plan


# What a GPU adds: hardware queues, streams, loading of kernels; see docs/gpu.md.

LIMITS = (
    Hardware(queues=1),
    Hardware(queues=2),
    Hardware(queues=5),
    Hardware(streams=1),
    Hardware(streams=3),
    Hardware(loads=True),
    Hardware(queues=3, streams=2),
)


def _simulation(plan, shapes, hardware, **options):
    loads = "every" if hardware.loads else "never"
    return Simulation(
        plan,
        _transport_groups(plan),
        shapes,
        queues=hardware.queues,
        streams=hardware.streams,
        **{"loads": loads, **options},
    )


def _is_proven(plan, shapes, hardware):
    groups = {made.channel: made.group for made in connections(plan.rank_of_stage)}
    return _verdict(plan, groups, shapes, hardware) is None


@FEW
@given(valid_plans(), st.sampled_from(SHAPES), st.sampled_from(LIMITS))
def test_the_rule_agrees_with_the_simulation_of_limited_hardware(plan, shapes, hardware):
    lowered = lower(plan)
    assume(lowered.is_lowered)
    proven = _is_proven(lowered, shapes, hardware)
    assert _simulation(lowered, shapes, hardware).run(steps=2) == proven
    if proven:
        assert _simulation(lowered, shapes, hardware, buffers=True).run(steps=2)


def test_kernels_that_are_loaded_in_the_first_step_hang_and_the_warmup_prevents_it():
    hung = {shapes: set() for shapes in SHAPES}
    for plan in _plans([2, 3, 4], [2, 8], [None]):
        for shapes in SHAPES:
            if not _simulation(plan, shapes, UNLIMITED, loads="first").run():
                hung[shapes].add(plan.name)
        warmup = warmup_plan(plan)
        for shapes in SHAPES:
            assert _is_proven(warmup, shapes, Hardware(loads=True, queues=1)), warmup
            assert _simulation(warmup, shapes, Hardware(loads=True)).run()
    # With `declared` and `cached`, `sequential` posts the receive of a gradient before its forward.
    some = {"interleaved-zb", "zb-v", "dualpipe-v", "v-half", "v-min", "1f1b-v"}
    assert hung["exchanged"] == some
    assert hung["declared"] == hung["cached"] == {"sequential", *some}


@pytest.mark.parametrize(
    ("hardware", "condition", "way_out"),
    [
        (
            Hardware(queues=1),
            "if 1 hardware queues run messages and computation of a rank "
            "(CUDA_DEVICE_MAX_CONNECTIONS=1):",
            "start the job without CUDA_DEVICE_MAX_CONNECTIONS, which pipemega sets to 32",
        ),
        (
            Hardware(streams=1),
            "if the connections of a rank share 1 streams:",
            "use fewer stages per rank (pipeline.chunks)",
        ),
        (
            Hardware(loads=True),
            "if CUDA loads kernels while messages are posted (CUDA_MODULE_LOADING=LAZY):",
            "start the job without CUDA_MODULE_LOADING, which pipemega sets to EAGER",
        ),
    ],
)
def test_a_plan_that_hangs_on_limited_hardware_names_the_variable(hardware, condition, way_out):
    plan = lower(build_plan("1f1b", 2, 4))
    groups = {made.channel: made.group for made in connections(plan.rank_of_stage)}
    text = _verdict(plan, groups, hardware=hardware)
    assert text.startswith(f"schedule '1f1b' deadlocks {condition}\n")
    assert f"\n  {way_out}" in text
    assert "rank 0 waits at" in text
