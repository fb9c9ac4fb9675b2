"""All arguments of Megatron-LM and Megatron-DeepSpeed that have no key, and why."""

from pipemega.compat.megatron.absent import Absent
from pipemega.compat.megatron.absent_model import ABSENT_OF_MODEL
from pipemega.compat.megatron.absent_run import ABSENT_OF_RUN

ABSENT: tuple[Absent, ...] = (*ABSENT_OF_MODEL, *ABSENT_OF_RUN)


def absent(name: str) -> Absent | None:
    """Return the first entry that has the argument; None if it is not known at all."""
    return next((entry for entry in ABSENT if entry.has(name)), None)
