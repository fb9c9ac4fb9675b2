"""What one rank holds while it runs its program: bytes, instruction by instruction.

    RA          a buffer for the input               until B
    F           what backward needs, the output      until B; until it is sent
    RG, B or I  the gradient of the output           until B or I is done
                the gradient of the input            until it is sent
    I           what W needs                         until W

On a CPU gloo's sends keep their tensor until the answer to it came, those of gradients until the
end of the step; on CUDA a sent tensor is let go when the transfer is done, which here is at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipemega.pipeline.instructions import Instruction, Kind, Plan
from pipemega.planning.kernels import DeviceType
from pipemega.planning.measure import StageCosts

Key = tuple[int, int]  # (stage, micro-batch)


@dataclass(frozen=True)
class Held:
    """What a rank holds at the moment at which it holds most.

    Args:
        activations: between F and the end of backward, over all micro-batches on their way.
        messages: arrived, waiting to be sent, or being sent.
        working: needed by the instruction itself.
        in_flight: the most forwards at one time, over the whole step, whose backward (with its
            weight half) is not done.
    """

    activations: int
    messages: int
    working: int
    in_flight: int

    @property
    def total(self) -> int:
        return self.activations + self.messages + self.working


def peak_of(plan: Plan, rank: int, costs: Sequence[StageCosts], device: DeviceType) -> Held:
    """The fullest moment of `rank` in the lowered `plan`.

    Args:
        costs: of every stage of the model.
    """
    return _Ledger(plan, rank, costs, device).play()


class _Ledger:
    def __init__(
        self, plan: Plan, rank: int, costs: Sequence[StageCosts], device: DeviceType
    ) -> None:
        self._plan, self._rank, self._costs, self._device = plan, rank, costs, device
        self._activations = self._messages = 0
        self._flying: set[Key] = set()
        self._gradient_there: set[Key] = set()
        self._peak = Held(0, 0, 0, 0)
        self._in_flight = 0

    def play(self) -> Held:
        run = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._weight_half,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECV_GRADIENT: self._receive_gradient,
        }
        waiting_for_w: set[Key] = set()
        for step in self._plan.programs[self._rank]:
            run[step.kind](step)
            self._note()
            if step.kind is Kind.BACKWARD_INPUT:
                waiting_for_w.add((step.stage, step.microbatch))
            elif step.kind is Kind.BACKWARD_WEIGHT:
                waiting_for_w.discard((step.stage, step.microbatch))
            self._in_flight = max(self._in_flight, len(self._flying) + len(waiting_for_w))
        peak = self._peak
        return Held(peak.activations, peak.messages, peak.working, self._in_flight)

    def _note(self, working: int = 0) -> None:
        if self._activations + self._messages + working > self._peak.total:
            self._peak = Held(self._activations, self._messages, working, 0)

    def _here(self, stage: int) -> bool:
        """Whether the neighbour `stage` is on this rank, so that nothing is sent."""
        homes = self._plan.rank_of_stage
        return 0 <= stage < len(homes) and homes[stage] == self._rank

    def _shared(self, stage: int) -> int:
        """Bytes of the input that count elsewhere: with the batch, or the stage before."""
        if stage == 0:
            return self._costs[0].input
        if self._here(stage - 1):
            return self._costs[stage].input - self._costs[stage - 1].output
        return 0

    def _forward(self, step: Instruction) -> None:
        costs, stage = self._costs[step.stage], step.stage
        before = self._activations + self._messages
        self._activations += costs.held - self._shared(stage)
        self._messages += costs.output
        if stage > 0:
            self._messages -= costs.input - self._shared(stage)
        stays = self._activations + self._messages - before
        self._note(max(0, costs.working[0] - stays))
        self._flying.add((stage, step.microbatch))

    def _receive_activation(self, step: Instruction) -> None:
        self._messages += self._costs[step.stage].input

    def _send_activation(self, step: Instruction) -> None:
        if self._device == "cuda":
            self._messages -= self._costs[step.stage].output

    def _receive_gradient(self, step: Instruction) -> None:
        # Before the forward has run nobody knows its shape: then the buffer is made in B.
        key = (step.stage, step.microbatch)
        if key in self._flying:
            self._messages += self._costs[step.stage].gradient_in
            self._gradient_there.add(key)

    def _backward(self, step: Instruction) -> None:
        costs, key = self._costs[step.stage], (step.stage, step.microbatch)
        handed_back = self._here(step.stage + 1)
        if not handed_back and key not in self._gradient_there:
            self._messages += costs.gradient_in
        if not handed_back and self._device == "cpu":
            self._messages -= costs.output  # answered
        self._note(costs.working[1])
        self._flying.discard(key)
        self._activations -= costs.held - self._shared(step.stage)
        if step.kind is Kind.BACKWARD_INPUT:
            self._activations += costs.kept
        self._messages += costs.gradient_out - costs.gradient_in

    def _weight_half(self, step: Instruction) -> None:
        costs = self._costs[step.stage]
        self._note(costs.working[2])
        self._activations -= costs.kept

    def _send_gradient(self, step: Instruction) -> None:
        if self._device == "cuda":
            self._messages -= self._costs[step.stage].gradient_out
