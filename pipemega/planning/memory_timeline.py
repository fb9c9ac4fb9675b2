"""Counts the bytes that one rank holds during its program, instruction by instruction.

    instruction   allocates                             until
    RA            buffer of the input                   B
    F             saved activations; the output         B; the output is sent
    RG, B or I    gradient of the output                the end of B or I
                  gradient of the input                 it is sent
    I             tensors that W needs                  W

The gradient of the input counts once if W needs it too.

With `activation_checkpointing.cpu_checkpointing` a part of what F has saved is freed after the next
compute step, and allocated again before the step that precedes B or I.

On the CPU, gloo keeps a sent activation until its gradient arrives and a sent gradient until the
end of the step. On CUDA a sent tensor is freed after the transfer; here the transfer takes no time.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipemega.layer_costs.stage_costs import StageCosts
from pipemega.layer_costs.tensor_meter import DeviceType
from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan
from pipemega.pipeline.plan.lowering import OffloadPoints, most_in_flight, offload_points
from pipemega.planning.memory import ShardCosts, ShardMemory

Key = tuple[int, int]  # (stage, micro-batch)


@dataclass(frozen=True)
class PeakMemory:
    """Bytes that a rank holds when it holds most.

    Args:
        activations: saved for backward, of all micro-batches.
        messages: received, waiting to be sent, or being sent.
        working: temporary memory of the instruction.
        in_flight: maximum number of micro-batches between F and the end of backward (of W if
            backward is split), over the whole step.
        host: host memory for the activations that are not on the device, most at one time.
        moved: bytes of activations that are copied to the host in a step, and back.
    """

    activations: int
    messages: int
    working: int
    in_flight: int
    host: int = 0
    moved: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.messages + self.working


def peak_memory(
    plan: Plan,
    rank: int,
    costs: Sequence[StageCosts],
    device: DeviceType,
    vocabulary: Sequence[ShardCosts] = (),
    *,
    has_graphs: bool = False,
) -> PeakMemory:
    """Return the peak memory of `rank` under the lowered `plan`.

    Args:
        costs: the costs of every stage of the model.
        vocabulary: for each rank, the costs of the vocabulary passes; empty: there are none.
        has_graphs: layers run as CUDA graphs.
    """
    shard = None
    if vocabulary:
        shard = ShardMemory(vocabulary[rank], plan.rank_of_stage, rank, plan.num_ranks, device)
    timeline = MemoryTimeline(plan.rank_of_stage, rank, costs, device, shard)
    if any(stage.moved for stage in costs):
        timeline.points = offload_points(plan.programs[rank])
    for step in plan.programs[rank]:
        timeline.run(step)
    if not has_graphs or device != "cuda":
        return timeline.peak
    # For each micro-batch in flight, graphs keep activations and temporary tensors in all steps.
    kept = sum(
        count * (costs[stage].held + sum(costs[stage].working))
        for stage, count in most_in_flight(plan.programs[rank]).items()
    )
    return replace(timeline.peak, activations=max(timeline.peak.activations, kept))


class _Bytes(NamedTuple):
    activations: int
    messages: int
    working: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.messages + self.working


def _total(held: _Bytes) -> int:
    return held.total


class MemoryTimeline:
    """Memory of one rank, updated by each instruction of a lowered plan.

    Args:
        rank_of_stage: the pipeline rank of each stage of the plan.
        costs: the costs of every stage of the model.
        shard: the changes by vocabulary parallelism, if the plan has it.

    Attributes:
        points: where activations move to the host and back.
    """

    def __init__(
        self,
        rank_of_stage: Sequence[int],
        rank: int,
        costs: Sequence[StageCosts],
        device: DeviceType,
        shard: ShardMemory | None = None,
    ) -> None:
        self._rank_of_stage, self._rank, self._shard = rank_of_stage, rank, shard
        self._costs, self._device = costs, device
        self._now = self._most = _Bytes(0, 0)
        self._in_flight: set[Key] = set()
        # By stage: micro-batches between their F and their B or I.
        self._waiting: Counter[int] = Counter()
        self._most_in_flight = 0
        self._gradient_received: set[Key] = set()
        # Between I and W: the gradient of the input, as long as it is not freed before W.
        self._kept_gradients: set[Key] = set()
        self.points = OffloadPoints(frozenset(), {})
        self._leaving = self._host = self._most_on_host = self._copied = 0
        # Instruction -> bytes at its peak, and after it.
        self._changes: dict[Kind, Callable[[Instruction], tuple[_Bytes, _Bytes]]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._weight_half,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECV_GRADIENT: self._receive_gradient,
        }

    @property
    def peak(self) -> PeakMemory:
        """The peak of the instructions that have run."""
        return PeakMemory(*self._most, self._most_in_flight, self._most_on_host, self._copied)

    def peak_of(self, step: Instruction) -> int:
        """Return the bytes at the peak of `step` if it runs next."""
        at_peak, after = self._change(step)
        return max(at_peak.total, after.total)

    def run(self, step: Instruction) -> None:
        """Run `step`."""
        if (back := self.points.fetched.get(step)) is not None:
            self._now = self._changed(self._costs[back[0]].moved)
        at_peak, self._now = self._change(step)
        self._most = max(self._most, at_peak, self._now, key=lambda held: held.total)
        if not step.kind.is_message:
            self._move(step)
        key = (step.stage, step.microbatch)
        if step.kind is Kind.FORWARD:
            self._in_flight.add(key)
            self._waiting[step.stage] += 1
        elif step.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self._in_flight.discard(key)
        elif step.kind is Kind.RECV_GRADIENT and key in self._in_flight:
            self._gradient_received.add(key)
        if step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self._waiting[step.stage] -= 1
            self._kept_gradients.discard((step.stage + 1, step.microbatch))
        if step.kind is Kind.BACKWARD_INPUT:
            self._kept_gradients.add(key)
        elif step.kind is Kind.BACKWARD_WEIGHT or self._frees_gradient(step):
            self._kept_gradients.discard(key)
        self._most_in_flight = max(self._most_in_flight, len(self._in_flight))

    def _move(self, step: Instruction) -> None:
        """Free what the compute step before `step` has saved, and copy what `step` has saved."""
        self._now = self._changed(-self._leaving)
        size = self._costs[step.stage].moved
        self._leaving = size if step in self.points.moved else 0
        self._copied += self._leaving
        self._host += self._leaving
        self._most_on_host = max(self._most_on_host, self._host)
        is_backward = step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        if is_backward and (step.stage, step.microbatch) in self.points.fetched.values():
            self._host -= size

    def _change(self, step: Instruction) -> tuple[_Bytes, _Bytes]:
        """Return the bytes at the peak of `step`, and after it."""
        shard = self._shard
        if shard is None:
            return self._changes[step.kind](step)
        if step.kind.is_vocabulary:
            activations, messages, working, freed = shard.of_pass(step)
            after = self._changed(activations, messages)
            more = max(0, working - freed - max(0, after.total - self._now.total))
            return max(self._now, after, key=_total)._replace(working=more), after
        activations, messages, before, _ = shard.of_stage(step)
        start = self._changed(working=before)
        if step.kind is Kind.FORWARD:  # what it adds up is freed when it begins
            self._now, messages = self._changed(messages=messages), 0
        at_peak, after = self._changes[step.kind](step)
        self._now = start._replace(working=0)
        after = after._replace(
            activations=after.activations + activations, messages=after.messages + messages
        )
        return max(at_peak, start, key=_total), after

    def _is_local(self, stage: int) -> bool:
        """Return whether the neighbour `stage` is on this rank, so that no message is sent."""
        ranks = self._rank_of_stage
        return 0 <= stage < len(ranks) and ranks[stage] == self._rank

    def _shared(self, stage: int) -> int:
        """Return the bytes of the input that already count: in the batch or the previous stage."""
        if stage == 0:
            return self._costs[0].input
        if self._is_local(stage - 1):
            return self._costs[stage].input - self._costs[stage - 1].output
        return 0

    def _changed(self, activations: int = 0, messages: int = 0, working: int = 0) -> _Bytes:
        return _Bytes(self._now.activations + activations, self._now.messages + messages, working)

    def _sent(self, messages: int) -> tuple[_Bytes, _Bytes]:
        """Return the bytes if the messages change by `messages`."""
        after = self._changed(messages=messages)
        return after, after

    def _forward(self, step: Instruction) -> tuple[_Bytes, _Bytes]:
        costs, stage = self._costs[step.stage], step.stage
        # Another micro-batch keeps what only one keeps at a time.
        once = costs.held_once if self._waiting[stage] else 0
        saved = costs.held - self._shared(stage) - once
        messages = costs.output
        if stage > 0:
            messages -= costs.input - self._shared(stage)
        after = self._changed(saved, messages)
        return after._replace(working=max(0, costs.working[0] - once - saved - messages)), after

    def _receive_activation(self, step: Instruction) -> tuple[_Bytes, _Bytes]:
        return self._sent(self._costs[step.stage].input)

    def _send_activation(self, step: Instruction) -> tuple[_Bytes, _Bytes]:
        return self._sent(-self._costs[step.stage].output if self._device == "cuda" else 0)

    def _receive_gradient(self, step: Instruction) -> tuple[_Bytes, _Bytes]:
        # Before the forward the shape is unknown; then B allocates the buffer.
        is_known = (step.stage, step.microbatch) in self._in_flight
        return self._sent(self._costs[step.stage].gradient_in if is_known else 0)

    def _backward(self, step: Instruction) -> tuple[_Bytes, _Bytes]:
        costs, messages = self._costs[step.stage], 0
        if not self._is_local(step.stage + 1):
            if (step.stage, step.microbatch) not in self._gradient_received:
                messages += costs.gradient_in
            if self._device == "cpu":
                messages -= costs.output  # gloo frees the sent activation
        is_whole = step.kind is Kind.BACKWARD
        working = costs.working[1]
        if is_whole and costs.whole_working is not None:
            working = costs.whole_working
        activations = (0 if is_whole else costs.kept) - (costs.held - self._shared(step.stage))
        if self._waiting[step.stage] > 1:
            activations += costs.held_once
        at_peak = self._changed(0, messages, working)
        messages += costs.gradient_out - costs.gradient_in
        if not is_whole:
            messages -= costs.kept_gradient
        if self._is_local(step.stage + 1):
            messages += self._in_kept(step.stage + 1, step.microbatch)
        return at_peak, self._changed(activations, messages)

    def _weight_half(self, step: Instruction) -> tuple[_Bytes, _Bytes]:
        costs, still_needed = self._costs[step.stage], self._in_kept(step.stage, step.microbatch)
        after = self._changed(-costs.kept, still_needed)
        return self._changed(working=costs.working[2]), after

    def _send_gradient(self, step: Instruction) -> tuple[_Bytes, _Bytes]:
        if not self._frees_gradient(step):
            return self._sent(0)
        kept = self._in_kept(step.stage, step.microbatch)
        return self._sent(kept - self._costs[step.stage].gradient_out)

    def _frees_gradient(self, step: Instruction) -> bool:
        return step.kind is Kind.SEND_GRADIENT and self._device == "cuda"

    def _in_kept(self, stage: int, microbatch: int) -> int:
        """Return the bytes of the gradient of the input of `stage` that count as kept for W."""
        waits = (stage, microbatch) in self._kept_gradients
        return self._costs[stage].kept_gradient if waits else 0
