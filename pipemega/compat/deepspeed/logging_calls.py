"""`deepspeed.utils.logging`: the logger of pipemega, under DeepSpeed's names."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from pipemega.distributed.mesh import launched_rank
from pipemega.monitor import RankLogger, get_logger

logger = get_logger(launched_rank())


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; None or -1 in them: on all."""
    rank = launched_rank()
    shown = [rank] if not ranks or -1 in ranks else ranks
    RankLogger(rank).log(level, f"[Rank {rank}] {message}", ranks=shown)


def set_log_level_from_string(log_level_str: str, custom_logger: Any = None) -> None:
    """Set the level of `custom_logger`; rank 0 of pipemega logs INFO and above, others warnings."""
    if custom_logger is not None:
        custom_logger.setLevel(log_level_str.upper())


def print_rank_0(message: Any, debug: bool = False, force: bool = False) -> None:
    """Print on rank 0, if `debug` or `force` is set."""
    if launched_rank() == 0 and (debug or force):
        print(message)


@cache
def warning_once(message: str) -> None:
    """Log a warning once."""
    get_logger(launched_rank()).warning(message)


def log_summary(show_straggler: bool = False) -> None:
    """Log on rank 0 where the table of `comms_logger` is; `show_straggler` has no effect."""
    log_dist(
        "comms_logger logs its table once, at the end of step comms_logger.profile_step: see above",
        ranks=[0],
    )
