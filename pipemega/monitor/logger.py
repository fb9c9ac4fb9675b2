"""The logger of a rank: rank 0 logs INFO and above, the others WARNING and above.

`configure_logging` changes this, and adds the log file of the rank.
"""

import logging
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from pipemega.printing import coloured

NAME = "pipemega"

Ranks = Collection[int] | Literal["all"]

if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:  # Python 3.10 cannot subscript it
    _LoggerAdapter = logging.LoggerAdapter


class _RankHandler(logging.Handler):
    """Writes to the current sys.stderr, above a progress bar if one is shown.

    The prefix of a warning or an error has a colour. Does nothing if the root logger has handlers:
    they get the record, too.

    Attributes:
        lowest: level of all messages.
        ranks: the ranks that show messages below WARNING.
        shown_level: the lowest level that this rank shows.
    """

    lowest = logging.INFO
    ranks: Ranks = (0,)
    shown_level = logging.NOTSET

    def level_on(self, rank: int) -> int:
        """Return the lowest level that a rank shows."""
        shows = self.ranks == "all" or rank in self.ranks
        return self.lowest if shows else max(self.lowest, logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        is_for_rank = getattr(record, "is_for_rank", False)
        if record.levelno < self.shown_level and not is_for_rank:
            return
        root = logging.getLogger()
        if root.handlers:
            if not logging.getLogger(NAME).propagate:
                root.callHandlers(record)
            return
        try:
            prefix, message = self.format(record).split(":", 1)
            line = coloured(f"{prefix}:", record.levelname, sys.stderr) + message
            tqdm.write(line, file=sys.stderr)
        except Exception:
            self.handleError(record)


class _RankFile(logging.FileHandler):
    """The log file of a rank."""


def _rank_handler() -> _RankHandler:
    logger = logging.getLogger(NAME)
    handler = next((h for h in logger.handlers if isinstance(h, _RankHandler)), None)
    if handler is None:
        handler = _RankHandler()
        logger.addHandler(handler)
    return handler


def _files() -> list[_RankFile]:
    return [h for h in logging.getLogger(NAME).handlers if isinstance(h, _RankFile)]


def get_logger(rank: int = 0) -> logging.Logger:
    """Return the "pipemega" logger, set up for this rank; may be called repeatedly.

    Rank 0 logs INFO and above; the others WARNING and above, with the rank in each line.
    """
    logger, handler = logging.getLogger(NAME), _rank_handler()
    prefix = "" if rank == 0 else f"rank {rank} "
    handler.setFormatter(logging.Formatter(f"[{NAME}] {prefix}%(levelname)s: %(message)s"))
    handler.shown_level = handler.level_on(rank)
    # With a file, the logger takes messages that the rank does not show: not for root handlers.
    logger.setLevel(handler.lowest if _files() else handler.shown_level)
    logger.propagate = not _files()
    return logger


def configure_logging(rank: int, level: str, ranks: Ranks, file: Path | None) -> None:
    """Set up the logger of this rank by the config; replaces what an earlier call set.

    Args:
        level: lowest level: "debug", "info", "warning" or "error".
        ranks: the ranks that show messages below a warning.
        file: the log file of this rank, which is appended to; None: none.

    Raises:
        OSError: the file cannot be opened.
    """
    logger, handler = logging.getLogger(NAME), _rank_handler()
    handler.lowest, handler.ranks = logging.getLevelName(level.upper()), ranks
    for old in _files():
        if file is None or old.baseFilename != os.path.abspath(file):
            logger.removeHandler(old)
            old.close()
    if file is not None and not _files():
        file.parent.mkdir(parents=True, exist_ok=True)
        added = _RankFile(file, encoding="utf-8")
        text = f"%(asctime)s rank {rank} %(levelname)s: %(message)s"
        added.setFormatter(logging.Formatter(text))
        logger.addHandler(added)
    get_logger(rank)


def write_to_log_file(line: str, level: int = logging.INFO) -> None:
    """Write a line that is shown elsewhere to the log file of this rank, if it has one."""
    for file in _files():
        file.handle(logging.LogRecord(NAME, level, "", 0, line, None, None))


class RankLogger(_LoggerAdapter):
    """The logger of a rank for scripts: each method takes the ranks that log the message.

    log = pipemega.rank_logger()
    log.info("epoch %d", epoch)                 # on the ranks of the key logging.ranks
    log.info("stage %d is built", 1, ranks=[4]) # on rank 4
    """

    def __init__(self, rank: int) -> None:
        super().__init__(get_logger(rank), {})
        self.rank = rank

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message.

        Args:
            ranks: the ranks that log it, whatever `logging.ranks` is; None: the ranks in this key.
        """
        ranks: Iterable[int] | None = kwargs.pop("ranks", None)
        if ranks is None:
            self.logger.log(level, msg, *args, **kwargs)
        elif self.rank in ranks and level >= _rank_handler().lowest:
            extra = {"is_for_rank": True}
            name = self.logger.name
            self.logger.handle(
                self.logger.makeRecord(name, level, "", 0, msg, args, None, extra=extra)
            )
