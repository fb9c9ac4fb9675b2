"""Results of the checks, as a table for people and as JSON values.  Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        check: name of the check, such as "clocks".
        text: what was found, with numbers.
        remedy: what to do; empty only if the status is "ok" or "skipped".
    """

    status: Status
    check: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.status in ("ok", "skipped"), f"{self.check}: no remedy"


def as_table(findings: Sequence[Finding]) -> str:
    """Return one line per finding, the remedy after the text, and a line that counts them."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        remedy = f"; remedy: {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.status:<7}  {finding.check:<{width}}  {finding.text}{remedy}")
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """Return the verdict in one line."""
    counts = {name: sum(f.status == name for f in findings) for name in ("failed", "warning")}
    if not any(counts.values()):
        return "ok: nothing to repair"
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    return f"{', '.join(parts)}: repair the failed checks first" if counts["failed"] else parts[0]


def has_failed(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "failed" for finding in findings)


def as_values(findings: Sequence[Finding], **facts: Any) -> dict[str, Any]:
    """Return JSON values: `ok`, `checks`, and `facts` under their names."""
    return {
        "ok": not has_failed(findings),
        **facts,
        "checks": [asdict(finding) for finding in findings],
    }


def listed(items: Sequence[object], most: int = 8) -> str:
    """Return the first items, separated by commas, and how many more there are."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers with runs folded: 0-3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
