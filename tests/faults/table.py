"""The results of the fault tests, as the table in docs/reliability.md."""

import re
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.faults.fault_trials import Outcome

BEGIN, END = "<!-- table: make faults -->", "<!-- end of the table -->"

T = TypeVar("T")


@dataclass
class Row:
    """One kind of fault."""

    tried: int = 0
    survived: int = 0
    lost: int | None = None  # unknown if no run was resumed
    seconds: float = 0.0
    codes: frozenset[int] = frozenset()
    error_lines: int = 0


class ResultTable:
    """Counts the results of all tests."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._lock = threading.Lock()

    def check_all(
        self,
        fault: str,
        cases: Iterable[T],
        check: Callable[[T], Outcome | None],
        at_once: int = 5,
    ) -> None:
        """Check all cases, several at a time, because a case mostly waits.

        Raises:
            AssertionError: some cases failed; with their tracebacks.
        """
        cases = list(cases)
        with ThreadPoolExecutor(at_once) as threads:
            errors = list(threads.map(lambda case: self._try(fault, case, check), cases))
        failed = [f"=== {case}\n{text}" for case, text in zip(cases, errors, strict=True) if text]
        assert not failed, f"{len(failed)} of {len(cases)} failed\n" + "\n".join(failed)

    def _try(self, fault: str, case: T, check: Callable[[T], Outcome | None]) -> str:
        outcome, text = None, ""
        try:
            outcome = check(case)
        except BaseException:
            text = traceback.format_exc()
        with self._lock:
            row = self.rows.setdefault(fault, Row())
            row.tried += 1
            row.survived += not text
            if outcome is not None:
                row.lost = max(row.lost or 0, outcome.lost)
                row.seconds = max(row.seconds, outcome.seconds or 0.0)
                row.codes |= outcome.codes
                row.error_lines = max(row.error_lines, outcome.error_lines)
        return text

    def markdown(self) -> str:
        lines = [
            "| fault | tried | survived | most steps lost | most seconds until all had ended "
            "| exit codes of the ranks | most lines on stderr |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for name, row in self.rows.items():
            lost = "–" if row.lost is None else row.lost
            seconds = f"{row.seconds:.1f}" if row.seconds else "–"
            codes = ", ".join(map(str, sorted(row.codes))) or "–"
            # A test that reads the exit codes also counts the lines.
            error_lines = row.error_lines if row.codes else "–"
            cells = (name, row.tried, row.survived, lost, seconds, codes, error_lines)
            lines.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(lines) + "\n"

    def write_into(self, page: Path) -> None:
        """Replace the table between its two markers."""
        text = page.read_text(encoding="utf-8")
        pattern = re.compile(f"({re.escape(BEGIN)}\n).*({re.escape(END)})", re.DOTALL)
        assert pattern.search(text), f"{page} has no markers for the table"
        page.write_text(pattern.sub(rf"\1\n{self.markdown()}\n\2", text), encoding="utf-8")
