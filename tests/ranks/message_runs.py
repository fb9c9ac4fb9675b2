"""Runs on the pool whose messages go without tags, as over NCCL; test_pipeline.py checks them."""

from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega import PipelineModule
from pipemega.optimizer.post_validation import SpeculativeRunner
from pipemega.pipeline import connections
from pipemega.pipeline.execution_state import MicroBatches
from pipemega.pipeline.plan.channels import MessageOperations, ShapeMode
from pipemega.pipeline.plan.channels import connections as plan_connections
from pipemega.pipeline.plan.lowering import lower, warmup_cut
from pipemega.pipeline.schedules import forward_only
from tests.ranks.small_models import WIDTH, engine_of, microbatches, plain, squares, train


def train_without_tags(model: str, **config: Any) -> tuple[dict[str, Any], set[int]]:
    """Train with the process groups of a backend without tags; return also the tags in use."""
    with (
        mock.patch.object(connections, "message_order", return_value="queues"),
        mock.patch.object(dist, "isend", wraps=dist.isend) as sends,
    ):
        result = train(model, **config)
    return result, {call.kwargs.get("tag", 0) for call in sends.call_args_list}


def posted_messages(shapes: ShapeMode) -> tuple[list[Any], list[Any]]:
    """Return the sends and receives that steps and an evaluation post, and the predicted.

    Before the last step, its warm-up is discarded.
    """
    posted: list[Any] = []

    def record(kind: str, start: Any) -> Any:
        def call(tensor: Tensor, peer: int, group: dist.ProcessGroup, tag: int = 0) -> dist.Work:
            posted.append((kind, group.group_desc, peer))
            return start(tensor, peer, group=group, tag=tag)

        return call

    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(connections, "message_order", return_value="queues"),
            mock.patch.object(dist, "isend", record("send", dist.isend)),
            mock.patch.object(dist, "irecv", record("receive", dist.irecv)),
        ):
            boundary = torch.empty(3, 2, WIDTH, device="meta", requires_grad=True)
            net = PipelineModule(plain().specs, squares, boundary=boundary)
            # The stages do not move in the first step.
            settings = {"schedule": "interleaved", "shapes": shapes, "partition": "parameters"}
            engine = engine_of(net, mesh={"pipeline": 2}, pipeline=settings)
            posted.clear()  # the messages that open the connections
            for step in range(2):
                engine.train_batch(microbatches(step, 4))
            engine.eval_batch(microbatches(9, 3), 3)
            runner = SpeculativeRunner(engine.steps.executor, lambda: False, lambda: None)
            inputs, labels = zip(*microbatches(3, 4), strict=True)
            runner.run(engine.plan, lambda: MicroBatches(inputs, labels))
    finally:
        torch.set_default_dtype(torch.float32)
    evaluation = lower(forward_only(engine.plan.rank_of_stage, 3))
    training = MessageOperations(engine.plan, shapes)
    rank, cut = engine.mesh.pipeline.rank, warmup_cut(engine.plan)
    program, stop = cut.plan.programs[rank], cut.stop[rank]
    groups = {made.channel: made for made in plan_connections(engine.plan.rank_of_stage)}
    expected: list[Any] = []
    for _, posts, message in chain(
        training.step(engine.plan.programs[rank]),
        training.step(engine.plan.programs[rank]),
        MessageOperations(evaluation, shapes).step(evaluation.programs[rank]),
        training.program(program[:stop]),
        training.discard(stop, cut.unread[rank]),
        training.step(program),
    ):
        made = groups[message.channel]
        kind = "send" if made.source == rank else "receive"
        if posts:
            expected.append((kind, f"pipeline messages {made.group}", 1 - rank))
    return posted, expected
