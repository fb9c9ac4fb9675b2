"""The logger of a rank: rank 0 logs INFO and above, the others WARNING and above."""

import logging
import sys

from tqdm import tqdm

from pipemega.printing import coloured

NAME = "pipemega"


class _RankHandler(logging.Handler):
    """Writes to the current sys.stderr, above a progress bar if one is shown.

    The prefix of a warning or an error has a colour. Does nothing if the root logger has handlers:
    they get the record, too.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            prefix, message = self.format(record).split(":", 1)
            line = coloured(f"{prefix}:", record.levelname, sys.stderr) + message
            tqdm.write(line, file=sys.stderr)
        except Exception:
            self.handleError(record)


def get_logger(rank: int = 0) -> logging.Logger:
    """Return the "pipemega" logger, set up for this rank; may be called repeatedly.

    Rank 0 logs INFO and above; the others WARNING and above, with the rank in each line.
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
