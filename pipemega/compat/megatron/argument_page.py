"""The table of all arguments, docs/megatron.md: made from the tables that the conversion uses."""

from collections.abc import Iterator
from pathlib import Path

from pipemega.compat.megatron.absent_arguments import ABSENT
from pipemega.compat.megatron.arguments import SECTIONS, Argument

_HEAD = Path(__file__).with_name("argument_page.md")
_EFFECTS = {
    "refused": ("Refused", "`from-megatron` cannot convert these arguments. It prints the reason, "
                "which may name an alternative, and its exit code is 1."),
    "differs": ("Without a key: a detail of the training differs", "The training is the same, "
                "except for the detail that the reason names."),
    "none": ("Without a key, because none is needed", "The results do not depend on these."),
}  # fmt: skip


def argument_page() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD.read_text(encoding="utf-8").rstrip()]
    for title, arguments in SECTIONS.items():
        lines += ["", f"## {title}", "", "| argument | key | value |", "| --- | --- | --- |"]
        lines += map(_row, arguments)
    for effect, (title, text) in _EFFECTS.items():
        lines += ["", f"## {title}", "", text, "", "| arguments | because |", "| --- | --- |"]
        lines += _absent_rows(effect)
    return "\n".join(lines) + "\n"


def _row(argument: Argument) -> str:
    names = ", ".join(f"`--{name}`" for name in (argument.name, *argument.aliases))
    keys = ", ".join(f"`{key}`" for key in argument.keys.split()) or "-"
    return f"| {names} | {keys} | {_escaped(argument.note)} |"


def _absent_rows(effect: str) -> Iterator[str]:
    for entry in ABSENT:
        if entry.effect == effect:
            names = ", ".join(f"`--{name}`" for name in entry.names.split())
            why = entry.why
            if entry.harmless:
                why += f" (accepted: {', '.join(f'`{value}`' for value in entry.harmless)})"
            yield f"| {names} | {_escaped(why)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
