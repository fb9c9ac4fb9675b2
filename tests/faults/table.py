"""What was tried and what came of it, as the table in docs/reliability.md."""

import re
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.faults.story import Outcome

BEGIN, END = "<!-- table: make faults -->", "<!-- end of the table -->"

T = TypeVar("T")


@dataclass
class Row:
    """One kind of fault."""

    tried: int = 0
    survived: int = 0
    lost: int = 0
    seconds: float = 0.0


class Ledger:
    """Counts over all tests."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._lock = threading.Lock()

    def each(
        self,
        fault: str,
        cases: Iterable[T],
        check: Callable[[T], Outcome | None],
        at_once: int = 5,
    ) -> None:
        """Checks all cases, several at a time since most of each is waiting; then fails if any did.

        Raises:
            AssertionError: with what each failed case had to say.
        """
        cases = list(cases)
        with ThreadPoolExecutor(at_once) as threads:
            said = list(threads.map(lambda case: self._try(fault, case, check), cases))
        failed = [f"=== {case}\n{text}" for case, text in zip(cases, said, strict=True) if text]
        assert not failed, f"{len(failed)} of {len(cases)} did not hold\n" + "\n".join(failed)

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
                row.lost = max(row.lost, outcome.lost)
                row.seconds = max(row.seconds, outcome.seconds or 0.0)
        return text

    def markdown(self) -> str:
        lines = [
            "| fault | tried | survived | most steps lost | most seconds until all had ended |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for name, row in self.rows.items():
            seconds = f"{row.seconds:.1f}" if row.seconds else "–"
            lines.append(f"| {name} | {row.tried} | {row.survived} | {row.lost} | {seconds} |")
        return "\n".join(lines) + "\n"

    def write_into(self, page: Path) -> None:
        """Puts the table between its two markers."""
        text = page.read_text(encoding="utf-8")
        pattern = re.compile(f"({re.escape(BEGIN)}\n).*({re.escape(END)})", re.DOTALL)
        assert pattern.search(text), f"{page} has no place for the table"
        page.write_text(pattern.sub(rf"\1\n{self.markdown()}\n\2", text), encoding="utf-8")
