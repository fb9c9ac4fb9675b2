"""A short hand for what a rank with two chunks in a v does."""

from collections import Counter

from pipemega.pipeline.instructions import Instruction, Kind, Program


class TwoChunks:
    """Writes the program of one rank, and counts the micro-batches.

    `F`, `B`, `I`, `W` are steps of the first chunk, `f`, `b`, `i`, `w` of the second, each of the
    next micro-batch that this chunk has not run that way; `*` is the weight half that has been
    open longest, of either chunk, and nothing where none is.

        rank 0 of 2, run("F f", times=2), run("b i *"):   F0@0 F0@3 F1@0 F1@3 B0@3 I1@3 W1@3
    """

    def __init__(self, pp_size: int, rank: int) -> None:
        self._stages = (rank, 2 * pp_size - 1 - rank)
        self._next: Counter[tuple[Kind, int]] = Counter()
        self._open: list[Instruction] = []  # weight halves whose input half has run
        self._steps: list[Instruction] = []

    @property
    def program(self) -> Program:
        return tuple(self._steps)

    def run(self, words: str, times: int = 1) -> None:
        """Appends the steps of `words`, as often as `times` says."""
        for word in words.split() * times:
            if word != "*":
                self._append(Kind(word.upper()), self._stages[word.islower()])
            elif self._open:
                self._append(Kind.BACKWARD_WEIGHT, self._open[0].stage)

    def run_rest(self) -> None:
        """Appends the weight halves that are open, those of the second chunk first."""
        for step in sorted(self._open, key=lambda step: (-step.stage, step.microbatch)):
            self._append(Kind.BACKWARD_WEIGHT, step.stage)

    def _append(self, kind: Kind, stage: int) -> None:
        # A whole backward is a backward of either half: the two count as one.
        counted = Kind.BACKWARD if kind is Kind.BACKWARD_INPUT else kind
        if kind is Kind.BACKWARD_WEIGHT:
            microbatch = next(step.microbatch for step in self._open if step.stage == stage)
            self._open.remove(Instruction(kind, stage, microbatch))
        else:
            microbatch = self._next[counted, stage]
            self._next[counted, stage] += 1
        if kind is Kind.BACKWARD_INPUT:
            self._open.append(Instruction(Kind.BACKWARD_WEIGHT, stage, microbatch))
        self._steps.append(Instruction(kind, stage, microbatch))
