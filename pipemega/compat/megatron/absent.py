"""What is said about an argument without a key."""

import fnmatch
from typing import Literal, NamedTuple

Effect = Literal["none", "differs", "refused"]


class Absent(NamedTuple):
    """Arguments without a counterpart.

    Args:
        effect: "none": the training is the same without it; "differs": the same training, but a
            detail that the reason names; "refused": the config would train something else.
        why: no key is needed, or what to use.
        names: separated by spaces, with `*` for any text.
        harmless: values with which the argument changes nothing.
    """

    effect: Effect
    why: str
    names: str
    harmless: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Return whether the argument `name` is one of these."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names.split())
