"""The logger of a rank: rank 0 tells what happens, the others only what is wrong."""

import logging
import sys

from tqdm import tqdm

NAME = "pipemega"


class _RankHandler(logging.Handler):
    """Writes to the standard error of the moment, above a progress bar if there is one.

    Silent where the program has set up logging for itself: its handlers see the record too.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def get_logger(rank: int = 0) -> logging.Logger:
    """The "pipemega" logger, set up for this rank; to be called any number of times.

    Rank 0 shows INFO and above; the others WARNING and above, each line with its rank.
    """
    logger = logging.getLogger(NAME)
    handler = next((h for h in logger.handlers if isinstance(h, _RankHandler)), None)
    if handler is None:
        handler = _RankHandler()
        logger.addHandler(handler)
    prefix = "" if rank == 0 else f"rank {rank} "
    handler.setFormatter(logging.Formatter(f"[{NAME}] {prefix}%(levelname)s: %(message)s"))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    return logger
