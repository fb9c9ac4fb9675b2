"""Shorthand for the program of a rank with two chunks in a v placement."""

from collections import Counter

from pipemega.pipeline.plan.instructions import Instruction, Kind, Program


class TwoChunkProgram:
    """Builds the program of one rank from letters, and numbers the micro-batches.

    `F`, `B`, `I`, `W` are steps of the first chunk, `f`, `b`, `i`, `w` of the second, each for the
    next micro-batch for which this chunk has not run such a step. `*` is the oldest W of either
    chunk that can run; it adds nothing if there is none.

        rank 0 of 2, run("F f", times=2), run("b i *"):   F0@0 F0@3 F1@0 F1@3 B0@3 I1@3 W1@3
    """

    def __init__(self, pp_size: int, rank: int) -> None:
        self._stages = (rank, 2 * pp_size - 1 - rank)
        self._next: Counter[tuple[Kind, int]] = Counter()
        self._open: list[Instruction] = []  # W steps whose I has run
        self._steps: list[Instruction] = []

    @property
    def program(self) -> Program:
        return tuple(self._steps)

    def run(self, letters: str, times: int = 1) -> None:
        """Append the steps of `letters`, `times` times."""
        for letter in letters.split() * times:
            if letter != "*":
                self._append(Kind(letter.upper()), self._stages[letter.islower()])
            elif self._open:
                self._append(Kind.BACKWARD_WEIGHT, self._open[0].stage)

    def append_open_weights(self) -> None:
        """Append all W steps that can run, those of the second chunk first."""
        for step in sorted(self._open, key=lambda step: (-step.stage, step.microbatch)):
            self._append(Kind.BACKWARD_WEIGHT, step.stage)

    def _append(self, kind: Kind, stage: int) -> None:
        if kind is Kind.BACKWARD_WEIGHT:
            microbatch = next(step.microbatch for step in self._open if step.stage == stage)
            self._open.remove(Instruction(kind, stage, microbatch))
        else:
            # B and I share one count: a micro-batch has one or the other.
            counted = Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD
            microbatch = self._next[counted, stage]
            self._next[counted, stage] += 1
        if kind is Kind.BACKWARD_INPUT:
            self._open.append(Instruction(Kind.BACKWARD_WEIGHT, stage, microbatch))
        self._steps.append(Instruction(kind, stage, microbatch))
