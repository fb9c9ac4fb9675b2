"""Rules about the size of the run: the batch equation, and the stage of ZeRO on the data ranks."""

from collections.abc import Collection, Iterable, Iterator

from pipemega.config.batch_equation import MICRO, STEPS, TRAIN
from pipemega.config.batch_sizes import RAMPUP
from pipemega.config.config import Config
from pipemega.config.key_kinds import Rule
from pipemega.config.launch_variables import launch_variables
from pipemega.config.source import KeyPath
from pipemega.errors import ConfigError

_SIZES = (TRAIN, MICRO, STEPS)


def size_rules(autos: Collection[KeyPath], world: int | None = None) -> tuple[Rule, ...]:
    """Return the rules.

    Args:
        autos: keys that are "auto" and have their default therefore.
        world: number of ranks; None: that of the launcher, if there is one.
    """
    unfilled = [name for name in _SIZES if (name,) in autos]

    def batch(config: Config) -> Iterable[str]:
        if unfilled and not (config.train_batch_size or config.train_micro_batch_size_per_gpu):
            raise ConfigError(_auto_batch(unfilled))
        config.batch(config.smallest_data_size)
        return ()

    def growing_batch(config: Config) -> Iterable[str]:
        config.batch_sizes(config.smallest_data_size)
        return ()

    def stage(config: Config) -> Iterator[str]:
        refusal = config.zero_refusal(_data_size(config, world))
        if refusal is not None:
            yield refusal

    return (
        Rule((*_SIZES, "mesh.data"), batch),
        Rule((RAMPUP, "training.train_samples", *_SIZES, "mesh.data"), growing_batch),
        Rule(("zero_optimization.stage", "mesh"), stage),
    )


def _auto_batch(unfilled: Collection[str]) -> str:
    are = "are" if len(unfilled) > 1 else "is"
    return (
        f'{", ".join(unfilled)} {are} "auto", so the batch size is not set: the Trainer of '
        f"transformers fills {'these keys' if len(unfilled) > 1 else 'this key'} from its "
        f"per_device_train_batch_size and gradient_accumulation_steps, and pipemega has no other "
        f"source for them. Set them, such as --set {MICRO}=1 --set {STEPS}=8"
    )


def _data_size(config: Config, world: int | None) -> int | None:
    """Return the number of data ranks, None if neither the config nor the launcher determine it."""
    mesh = config.mesh
    if mesh.data != "auto":
        return mesh.data
    ranks = world or launch_variables().number("WORLD_SIZE", 0)
    ranks_per_copy = mesh.tensor * mesh.pipeline
    if ranks and ranks % ranks_per_copy == 0:
        return ranks // ranks_per_copy
    known = config.train_batch_size and config.train_micro_batch_size_per_gpu
    return config.smallest_data_size if known and config.gradient_accumulation_steps else None
