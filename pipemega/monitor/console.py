"""What rank 0 shows while a run goes on: a progress bar, and lines that a program can read back."""

import math
import re
import sys
from collections import deque
from typing import TextIO

from tqdm import tqdm

from pipemega.monitor.records import EvalRecord, EventRecord, Record, StepRecord, TimelineRecord
from pipemega.monitor.sinks import Sink

# One "key value" of a line: the value is the last word, whatever words the key has.
PART = re.compile(r"(?P<key>[A-Za-z][A-Za-z/% ]*) (?P<value>\S+)")


class Console(Sink):
    """Lines on standard output, and a bar on standard error where that is a terminal.

        step 20/200 | consumed samples 640 | loss 6.1234 | lr 3.0000e-04 | grad norm 1.2340 | ...
        validation step 20 | consumed samples 640 | loss 6.0000 | perplexity 403.43 | ...

    A number that is not finite is shown as `nan`, `inf` or `-inf`.  One that is not known on this
    machine (MFU without a peak, loss scale without fp16) has no part in the line.

    Args:
        total_steps: of the whole run; None when nobody knows.
        steps_per_print: a line every so many steps, and one for the last; None or 0: no lines.
        progress: show the bar.
        lines, bar: where to; None: sys.stdout and sys.stderr.
    """

    name = "console"

    def __init__(
        self,
        total_steps: int | None = None,
        steps_per_print: int | None = 10,
        *,
        progress: bool = True,
        lines: TextIO | None = None,
        bar: TextIO | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._steps_per_print = steps_per_print or 0
        self._lines = sys.stdout if lines is None else lines
        self._bar_file = sys.stderr if bar is None else bar
        self._progress = progress and self._bar_file.isatty()
        self._bar: tqdm | None = None
        # The time left follows the pace of late, so that the slow first step does not stay in it.
        self._seconds: deque[float] = deque(maxlen=max(self._steps_per_print, 10))

    def write(self, record: Record) -> None:
        if isinstance(record, EvalRecord):
            self._say(eval_line(record))
            return
        if isinstance(record, TimelineRecord):
            self._say(timeline_line(record))
            return
        if isinstance(record, EventRecord):
            return  # the log has told it, in words
        self._seconds.append(record.step_seconds)
        self._advance(record)
        if self._is_due(record.step):
            self._say(step_line(record, self._total_steps, self._seconds_left(record.step)))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _is_due(self, step: int) -> bool:
        if not self._steps_per_print:
            return False
        return step % self._steps_per_print == 0 or step == self._total_steps

    def _seconds_left(self, step: int) -> float | None:
        if self._total_steps is None:
            return None
        pace = sum(self._seconds) / len(self._seconds)
        return max(self._total_steps - step, 0) * pace

    def _advance(self, record: StepRecord) -> None:
        if not self._progress:
            return
        if self._bar is None:  # only now is it known where a resumed run goes on
            self._bar = tqdm(
                total=self._total_steps,
                initial=record.step - 1,
                unit="step",
                file=self._bar_file,
                dynamic_ncols=True,
            )
        self._bar.set_postfix_str(f"loss {_decimal(record.loss)}", refresh=False)
        self._bar.update(record.step - self._bar.n)

    def _say(self, line: str) -> None:
        tqdm.write(line, file=self._lines)
        self._lines.flush()


def step_line(
    record: StepRecord, total_steps: int | None = None, seconds_left: float | None = None
) -> str:
    """The line of one step: parts "key value", joined by " | ", always in this order.

    step, consumed samples, loss, lr, grad norm, [loss scale], tokens/s, [TFLOP/s], [MFU],
    skipped, nan, [memory GiB], [ETA]; those in brackets only where they are known.
    """
    of_all = "" if total_steps is None else f"/{total_steps}"
    parts: list[tuple[str, str | None]] = [
        ("step", f"{record.step}{of_all}"),
        ("consumed samples", f"{record.consumed_samples}"),
        ("loss", _decimal(record.loss)),
        ("lr", f"{record.lr:.4e}"),
        ("grad norm", _decimal(record.grad_norm)),
        ("loss scale", _known(record.loss_scale, ".10g")),
        ("tokens/s", f"{record.tokens_per_second:.0f}"),
        ("TFLOP/s", _known(record.tflops_per_device, ".4g")),
        ("MFU %", None if record.mfu is None else f"{record.mfu * 100:.1f}"),
        ("skipped", f"{record.skipped_steps}"),
        ("nan", f"{record.nan_steps}"),
        ("memory GiB", _known(record.memory_gib, ".2f")),
        ("ETA", _duration(seconds_left)),
    ]
    return " | ".join(f"{key} {value}" for key, value in parts if value is not None)


def eval_line(record: EvalRecord) -> str:
    """The line of one evaluation, of the same form; its first key is "validation step"."""
    parts = [
        (f"{record.split} step", f"{record.step}"),
        ("consumed samples", f"{record.consumed_samples}"),
        ("loss", _decimal(record.loss)),
        ("perplexity", _decimal(record.perplexity)),
        ("seconds", f"{record.seconds:.2f}"),
    ]
    return " | ".join(f"{key} {value}" for key, value in parts)


def timeline_line(record: TimelineRecord) -> str:
    """The line of one measured timeline, of the same form; its first key is "timeline step"."""
    parts = [
        ("timeline step", f"{record.step}"),
        ("schedule", record.schedule),
        ("makespan ms", f"{record.makespan * 1e3:.2f}"),
        ("predicted ms", f"{record.predicted_makespan * 1e3:.2f}"),
        ("span ms", f"{record.span * 1e3:.2f}"),
        ("bubble %", f"{record.bubble * 100:.1f}"),
    ]
    return " | ".join(f"{key} {value}" for key, value in parts)


def parse_line(line: str) -> dict[str, str]:
    """Key -> value of a line of this module; {} for any other line."""
    matches = [PART.fullmatch(part) for part in line.strip().split(" | ")]
    if not all(matches) or len(matches) < 2:
        return {}
    return {match["key"]: match["value"] for match in matches if match is not None}


def _decimal(value: float | None) -> str | None:
    """Four decimals where they say enough, else an exponent; NaN is `nan`."""
    if value is None:
        return None
    fits = not math.isfinite(value) or value == 0 or 1e-2 <= abs(value) < 1e6
    return f"{value:.4f}" if fits else f"{value:.4e}"


def _known(value: float | None, spec: str) -> str | None:
    return None if value is None else format(value, spec)


def _duration(seconds: float | None) -> str | None:
    if seconds is None or not math.isfinite(seconds):
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
