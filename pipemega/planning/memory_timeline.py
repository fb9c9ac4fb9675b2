"""Counts the bytes that one rank holds during its program, instruction by instruction.

    instruction   allocates                             until
    RA            buffer of the input                   B
    F             saved activations; the output         B; the output is sent
    RG, B or I    gradient of the output                the end of B or I
                  gradient of the input                 it is sent
    I             tensors that W needs                  W

On the CPU, gloo keeps a sent activation until its gradient arrives and a sent gradient until the
end of the step. On CUDA a sent tensor is freed after the transfer; here the transfer takes no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipemega.pipeline.plan.instructions import Instruction, Kind, Plan
from pipemega.profiling.meta_costs import StageCosts
from pipemega.profiling.meta_kernels import DeviceType

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
    """

    activations: int
    messages: int
    working: int
    in_flight: int

    @property
    def total(self) -> int:
        return self.activations + self.messages + self.working


def peak_memory(
    plan: Plan, rank: int, costs: Sequence[StageCosts], device: DeviceType
) -> PeakMemory:
    """Return the peak memory of `rank` under the lowered `plan`.

    Args:
        costs: of every stage of the model.
    """
    return _MemoryTimeline(plan, rank, costs, device).run()


class _MemoryTimeline:
    """Memory of one rank, updated by each instruction."""

    def __init__(
        self, plan: Plan, rank: int, costs: Sequence[StageCosts], device: DeviceType
    ) -> None:
        self._plan, self._rank, self._costs, self._device = plan, rank, costs, device
        self._activations = self._messages = 0
        self._in_flight: set[Key] = set()
        self._before_backward: set[Key] = set()
        self._gradient_received: set[Key] = set()
        self._peak = PeakMemory(0, 0, 0, 0)

    def run(self) -> PeakMemory:
        handlers = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._weight_half,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECV_GRADIENT: self._receive_gradient,
        }
        in_flight = 0
        for step in self._plan.programs[self._rank]:
            handlers[step.kind](step)
            self._record_peak()
            in_flight = max(in_flight, len(self._in_flight))
        return replace(self._peak, in_flight=in_flight)

    def _record_peak(self, working: int = 0) -> None:
        if self._activations + self._messages + working > self._peak.total:
            self._peak = PeakMemory(self._activations, self._messages, working, 0)

    def _is_local(self, stage: int) -> bool:
        """Return whether the neighbour `stage` is on this rank, so that no message is sent."""
        ranks = self._plan.rank_of_stage
        return 0 <= stage < len(ranks) and ranks[stage] == self._rank

    def _shared(self, stage: int) -> int:
        """Return the bytes of the input that already count: in the batch or the previous stage."""
        if stage == 0:
            return self._costs[0].input
        if self._is_local(stage - 1):
            return self._costs[stage].input - self._costs[stage - 1].output
        return 0

    def _waits(self, stage: int) -> bool:
        """Return whether a micro-batch is between its F and its B or I at `stage`."""
        return any(key[0] == stage for key in self._before_backward)

    def _forward(self, step: Instruction) -> None:
        costs, stage = self._costs[step.stage], step.stage
        before = self._activations + self._messages
        # Another micro-batch keeps what only one keeps at a time.
        shared = costs.held_once if self._waits(stage) else 0
        self._activations += costs.held - self._shared(stage) - shared
        self._messages += costs.output
        if stage > 0:
            self._messages -= costs.input - self._shared(stage)
        kept = self._activations + self._messages - before
        self._record_peak(max(0, costs.working[0] - shared - kept))
        self._in_flight.add((stage, step.microbatch))
        self._before_backward.add((stage, step.microbatch))

    def _receive_activation(self, step: Instruction) -> None:
        self._messages += self._costs[step.stage].input

    def _send_activation(self, step: Instruction) -> None:
        if self._device == "cuda":
            self._messages -= self._costs[step.stage].output

    def _receive_gradient(self, step: Instruction) -> None:
        # Before the forward the shape is unknown; then B allocates the buffer.
        key = (step.stage, step.microbatch)
        if key in self._in_flight:
            self._messages += self._costs[step.stage].gradient_in
            self._gradient_received.add(key)

    def _backward(self, step: Instruction) -> None:
        costs, key = self._costs[step.stage], (step.stage, step.microbatch)
        local = self._is_local(step.stage + 1)
        if not local and key not in self._gradient_received:
            self._messages += costs.gradient_in
        if not local and self._device == "cpu":
            self._messages -= costs.output  # gloo frees the sent activation
        self._record_peak(costs.working[1])
        self._activations -= costs.held - self._shared(step.stage)
        self._before_backward.discard(key)
        if self._waits(step.stage):
            self._activations += costs.held_once
        if step.kind is Kind.BACKWARD_INPUT:
            self._activations += costs.kept
        else:
            self._in_flight.discard(key)
        self._messages += costs.gradient_out - costs.gradient_in

    def _weight_half(self, step: Instruction) -> None:
        costs = self._costs[step.stage]
        self._record_peak(costs.working[2])
        self._activations -= costs.kept
        self._in_flight.discard((step.stage, step.microbatch))

    def _send_gradient(self, step: Instruction) -> None:
        if self._device == "cuda":
            self._messages -= self._costs[step.stage].gradient_out
