"""Placements: which pipeline rank holds which stage.

Four ranks, two chunks each:

    loop   rank 0   0 4        v   rank 0   0 7
           rank 1   1 5            rank 1   1 6
           rank 2   2 6            rank 2   2 5
           rank 3   3 7            rank 3   3 4

With one chunk per rank both are the same.
"""


def loop(pp_size: int, chunks: int = 1) -> tuple[int, ...]:
    """Place stage s on rank s mod pp_size.  Source: Narayanan et al. 2021, arXiv:2104.04473."""
    return tuple(stage % pp_size for stage in range(pp_size * chunks))


def v(pp_size: int, chunks: int = 2) -> tuple[int, ...]:
    """Place chunks down the ranks and up again in turn; no message at a turning point.

    Source: Qi et al. 2023, arXiv:2401.10241, section 6; with more than two chunks, the waves of
    Liu et al. 2023, arXiv:2308.15762.
    """
    down = tuple(range(pp_size))
    return tuple(rank for chunk in range(chunks) for rank in (down[::-1] if chunk % 2 else down))


def loop_and_v(pp_size: int, chunks: int) -> list[tuple[int, ...]]:
    """Return both placements, or the one if they are equal."""
    return list(dict.fromkeys((loop(pp_size, chunks), v(pp_size, chunks))))
