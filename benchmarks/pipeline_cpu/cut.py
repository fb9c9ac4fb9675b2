"""Where the model is cut, for all systems alike: even ranks first, then even stages."""

from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise

from benchmarks.pipeline_cpu.model import Sizes


def blocks_before(sizes: Sizes, rank_of_stage: Sequence[int], split: int) -> list[int]:
    """How many transformer blocks come before each stage, with 0 in front and all at the end.

    The embedding is on the first stage, the final norm and the head on the last. Two stages are cut
    after `split` blocks. More are cut by matrix products: a block has 12 hidden² of them a
    token, the head vocabulary x hidden.
    """
    if len(rank_of_stage) == 2:
        return [0, split, sizes.layers]
    block, head = 12 * sizes.hidden, sizes.vocab

    def loads(cuts: tuple[int, ...]) -> tuple[int, int]:
        stages = [block * (stop - start) for start, stop in pairwise((0, *cuts, sizes.layers))]
        stages[-1] += head
        ranks = [0] * (max(rank_of_stage) + 1)
        for rank, load in zip(rank_of_stage, stages, strict=True):
            ranks[rank] += load
        return max(ranks), max(stages)

    numbers = range(1, sizes.layers + 1)
    cuts = min(combinations_with_replacement(numbers, len(rank_of_stage) - 1), key=loads)
    return [0, *cuts, sizes.layers]
