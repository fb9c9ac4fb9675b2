"""DeepSpeed's names of parameters -> logical names.

pipeline    3.norm.weight              layers.3.norm.weight
module      encoder.norm.weight        layers.0.encoder.norm.weight
tied        tied_modules.embed.weight  needs a rule: the files do not say the position
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pipemega.errors import CheckpointError

_LOGICAL = re.compile(r"layers\.\d+\..+")
_NUMBERED = re.compile(r"\d+\..+")
_MOST_LISTED = 3


@dataclass(frozen=True)
class NameRules:
    """Translates names; the first rule that matches applies.

    Args:
        rules: regular expression that matches a whole name of DeepSpeed -> its replacement, with
            groups as \\1; None: leave the tensor out.
    """

    rules: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, replacement in self.rules.items():
            try:
                re.sub(pattern, replacement or "", "")
            except (re.error, IndexError) as error:
                raise CheckpointError(
                    f"the name rule {pattern!r} -> {replacement!r} is not valid: {error}"
                ) from error

    def translate(self, names: Iterable[str], kind: str) -> dict[str, str]:
        """Return DeepSpeed's name -> logical name, without the tensors that are left out.

        Args:
            kind: of the checkpoint: "pipeline", "module" or "universal".

        Raises:
            CheckpointError: a name has no position, two names become one, or a rule matches none.
        """
        names = list(names)
        numbered = kind == "pipeline" or (kind == "universal" and any(map(_is_of_pipeline, names)))
        used: set[str] = set()
        found: dict[str, str] = {}
        for name in names:
            logical = self._translate(name, numbered, used)
            if logical is not None:
                found[name] = logical
        unused = [pattern for pattern in self.rules if pattern not in used]
        if unused:
            raise CheckpointError(
                f"the name rule {unused[0]!r} matches no name of the checkpoint; it has: "
                f"{_listed(names)}"
            )
        _check(found)
        return found

    def _translate(self, name: str, numbered: bool, used: set[str]) -> str | None:
        for pattern, replacement in self.rules.items():
            if re.fullmatch(pattern, name):
                used.add(pattern)
                return None if replacement is None else re.sub(f"^{pattern}$", replacement, name)
        if not numbered:
            return f"layers.0.{name}"
        return f"layers.{name}" if _NUMBERED.fullmatch(name) else name


def _is_of_pipeline(name: str) -> bool:
    return _NUMBERED.fullmatch(name) is not None or name.startswith("tied_modules.")


def _check(found: Mapping[str, str]) -> None:
    wrong = [name for name, logical in found.items() if not _LOGICAL.fullmatch(logical)]
    if wrong:
        name = wrong[0]
        tied = re.match(r"tied_modules\.([^.]+)\.", name)
        pattern, position = (
            (rf"tied_modules\.{tied[1]}\.(.+)", "layers.POSITION.\\1")
            if tied
            else (re.escape(name), "layers.POSITION.NAME")
        )
        what = f"is a tied layer (key {tied[1]!r})" if tied else f"became '{found[name]}'"
        raise CheckpointError(
            f"the position of '{name}' in the pipeline is not known: it {what}, and a logical name "
            f"is layers.<position>.<name in the layer>. Add a rule with the position of its first "
            f"layer: --name '{pattern}={position}'"
        )
    sources: dict[str, str] = {}
    for name, logical in found.items():
        other = sources.setdefault(logical, name)
        if other != name:
            raise CheckpointError(
                f"'{other}' and '{name}' both become '{logical}': change the name rules"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more
