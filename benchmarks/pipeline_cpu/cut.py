"""Computes the stage bounds for all systems: balances ranks first, then stages."""

from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise

from benchmarks.pipeline_cpu.model import Sizes


def layer_bounds(sizes: Sizes, rank_of_stage: Sequence[int], split: int) -> list[int]:
    """Return the first layer of each stage, and the number of layers, as `build_layers` counts."""
    blocks = blocks_before(sizes, rank_of_stage, split)
    # The embedding is layer 0; the last layer is norm and head.
    return [0, *(1 + count for count in blocks[1:-1]), sizes.num_units]


def blocks_before(sizes: Sizes, rank_of_stage: Sequence[int], split: int) -> list[int]:
    """Return the number of transformer blocks before each stage: 0 first, the total last.

    The embedding is on the first stage, the final norm and the head on the last. Two stages split
    after `split` blocks. More stages are balanced by the matrix products per token: 12 hidden² of a
    block, vocabulary x hidden of the head.
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
