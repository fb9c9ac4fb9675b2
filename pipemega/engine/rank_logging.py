"""The logs of the ranks of a run: the section `logging`, and the logger of scripts."""

from pathlib import Path

from pipemega.config import Config
from pipemega.distributed.mesh import Mesh, launched_rank, on_all_ranks
from pipemega.errors import ConfigError
from pipemega.monitor import RankLogger, configure_logging


def open_log(config: Config, mesh: Mesh) -> None:
    """Apply the section `logging` to this rank; collective.

    Raises:
        ConfigError: a rank does not exist, or a log file cannot be written; on every rank.
    """
    section = config.logging
    for key, ranks in (("ranks", section.ranks), ("file_ranks", section.file_ranks)):
        for rank in ranks if ranks != "all" else ():
            if rank >= mesh.world.size:
                raise ConfigError(
                    f"logging.{key} has the rank {rank}, and the ranks of this run are 0 to "
                    f"{mesh.world.size - 1}",
                    on_every_rank=True,
                )
    file = None
    if section.log_to_file is not None and section.writes_file(mesh.rank):
        file = Path(section.log_to_file) / f"rank_{mesh.rank}.log"

    def configure() -> None:
        try:
            configure_logging(mesh.rank, section.level, section.ranks, file)
        except OSError as error:
            raise ConfigError(
                f"logging.log_to_file: rank {mesh.rank} cannot write {file}: "
                f"{error.strerror or error}"
            ) from error

    if section.log_to_file is None:
        configure()
    else:
        on_all_ranks(mesh.world, configure)


def rank_logger() -> RankLogger:
    """Return the logger of this rank: `rank_logger().info("saved", ranks=[0])`."""
    return RankLogger(launched_rank())
