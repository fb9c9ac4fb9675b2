"""Console output of rank 0: a progress bar, and lines that `parse_line` can read."""

import math
import re
import sys
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from pipemega.monitor.logger import write_to_log_file
from pipemega.monitor.records import EpochRecord, EvalRecord, Record, StepRecord, TimelineRecord
from pipemega.monitor.sinks import Sink
from pipemega.printing import line_width, percent

# The parts to leave out, in this order, until a line fits a terminal. A count of zero has no news;
# the progress bar shows the ETA, too.
_LESS_IMPORTANT = (
    "consumed samples",
    "epoch",
    "skipped 0",
    "nan 0",
    "num zeros",
    "params norm",
    "loss scale",
    "z-loss",
    "balance loss",
    "in layer",
    "expert load",
    "TFLOP/s",
    "memory GiB",
    "ETA",
    "MFU %",
    "seconds",
    "span ms",
    "lr",
    "predicted ms",
    "tokens/s",
    "schedule",
    "grad norm",
    "perplexity",
)

# One "key value" of a line: the value is the last word, the key may have several words.
PART = re.compile(r"(?P<key>[A-Za-z][\w/%. -]*) (?P<value>[^\s|]+)")


def print_table(text: str) -> None:
    """Print lines to standard output, above a progress bar if one is shown."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


class Console(Sink):
    """Writes lines to standard output, and a progress bar to standard error if it is a terminal.

        step 20/200 | consumed samples 640 | loss 6.1234 | lr 3.0000e-04 | grad norm 1.2340 | ...
        epoch 2/10 | step 20 | consumed samples 640 | loss 6.5678 | seconds 3.20 | samples/s 100
        validation step 20 | consumed samples 640 | loss 6.0000 | perplexity 403.43 | ...

    Non-finite numbers are shown as `nan`, `inf` or `-inf`. Unknown numbers (MFU without a peak,
    loss scale without fp16) are left out. On a terminal a line has only the parts that fit.

    Args:
        total_steps, total_epochs: length of the whole run; None if unknown.
        steps_per_print: interval of the step lines; the last step has one, too. None or 0: no
            step lines.
        progress: show the progress bar.
        lines, bar: output streams; None: sys.stdout and sys.stderr.
    """

    name = "console"

    def __init__(
        self,
        total_steps: int | None = None,
        steps_per_print: int | None = 10,
        *,
        total_epochs: int | None = None,
        progress: bool = True,
        lines: TextIO | None = None,
        bar: TextIO | None = None,
    ) -> None:
        self._total_steps, self._total_epochs = total_steps, total_epochs
        self._steps_per_print = steps_per_print or 0
        self._lines = sys.stdout if lines is None else lines
        self._bar_file = sys.stderr if bar is None else bar
        self._progress = progress and self._bar_file.isatty()
        self._bar: tqdm | None = None
        # The ETA is computed from the latest steps only, without the slow first step.
        self._seconds: deque[float] = deque(maxlen=max(self._steps_per_print, 10))

    def write(self, record: Record) -> None:
        if isinstance(record, EvalRecord):
            self._print(eval_line(record))
        elif isinstance(record, EpochRecord):
            self._print(epoch_line(record, self._total_epochs))
        elif isinstance(record, TimelineRecord):
            self._print(timeline_line(record))
        elif isinstance(record, StepRecord):  # events are in the log
            self._seconds.append(record.step_seconds)
            self._advance(record)
            if self._is_due(record.step):
                self._print(self._step_line(record))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _is_due(self, step: int) -> bool:
        if not self._steps_per_print:
            return False
        return step % self._steps_per_print == 0 or step == self._total_steps

    def _step_line(self, record: StepRecord) -> str:
        left = self._seconds_left(record.step)
        return step_line(record, self._total_steps, left, total_epochs=self._total_epochs)

    def _seconds_left(self, step: int) -> float | None:
        if self._total_steps is None:
            return None
        mean = sum(self._seconds) / len(self._seconds)
        return max(self._total_steps - step, 0) * mean

    def _advance(self, record: StepRecord) -> None:
        if not self._progress:
            return
        if self._bar is None:  # the first record has the first step, also of a resumed run
            self._bar = tqdm(
                total=self._total_steps,
                initial=record.step - 1,
                unit="step",
                file=self._bar_file,
                dynamic_ncols=True,
            )
        if record.epoch is not None:
            of = _of(self._total_epochs)
            self._bar.set_description_str(f"epoch {record.epoch}{of}", refresh=False)
        self._bar.set_postfix_str(f"loss {_decimal(record.loss)}", refresh=False)
        self._bar.update(record.step - self._bar.n)

    def _print(self, line: str) -> None:
        write_to_log_file(line)
        if self._lines.isatty():
            line = fit(line, line_width(self._lines, len(line)))
        tqdm.write(line, file=self._lines)
        self._lines.flush()


def step_line(
    record: StepRecord,
    total_steps: int | None = None,
    seconds_left: float | None = None,
    *,
    total_epochs: int | None = None,
) -> str:
    """Return the line of one step: parts "key value" joined by " | ", always in this order.

    step, [epoch], consumed samples, [batch size], loss, lr, grad norm, [loss scale], [num zeros],
    [params norm], [expert load, in layer], [balance loss], [z-loss], tokens/s (samples/s if the
    tokens of a sample are unknown), [TFLOP/s], [MFU], skipped, nan, [memory GiB], [ETA]; the parts
    in brackets only if known.
    """
    epoch = None if record.epoch is None else f"{record.epoch}{_of(total_epochs)}"
    return _line(
        ("step", f"{record.step}{_of(total_steps)}"),
        ("epoch", epoch),
        ("consumed samples", f"{record.consumed_samples}"),
        ("batch size", _known(record.extra.get("batch_size"), "g")),
        ("loss", _decimal(record.loss)),
        ("lr", f"{record.lr:.4e}"),
        ("grad norm", _decimal(record.grad_norm)),
        ("loss scale", _known(record.loss_scale, ".10g")),
        ("num zeros", _known(record.num_zeros, "d")),
        ("params norm", _decimal(record.params_norm)),
        *_experts(record.extra),
        _rate(record),
        ("TFLOP/s", _known(record.tflops_per_device, ".4g")),
        ("MFU %", None if record.mfu is None else percent(record.mfu).rstrip("%")),
        ("skipped", f"{record.skipped_steps}"),
        ("nan", f"{record.nan_steps}"),
        ("memory GiB", _known(record.peak_gib, ".2f")),
        ("ETA", _duration(seconds_left)),
    )


def _experts(values: Mapping[str, float]) -> tuple[tuple[str, str | None], ...]:
    """Return the parts about experts: the largest load, its layer, and auxiliary losses."""
    prefix = "moe/load/layer_"
    loads = {name: load for name, load in values.items() if name.startswith(prefix)}
    if not loads:
        return ()
    return (
        ("expert load", _known(values["moe/max_load"], ".2f")),
        ("in layer", max(loads, key=loads.__getitem__).removeprefix(prefix)),
        ("balance loss", _decimal(values.get("moe/balance_loss"))),
        ("z-loss", _decimal(values.get("moe/z_loss"))),
    )


def epoch_line(record: EpochRecord, total_epochs: int | None = None) -> str:
    """Return the line of one epoch; its first key is "epoch"."""
    return _line(
        ("epoch", f"{record.epoch}{_of(total_epochs)}"),
        ("step", f"{record.step}"),
        ("consumed samples", f"{record.consumed_samples}"),
        ("loss", _decimal(record.loss)),
        ("seconds", f"{record.seconds:.2f}"),
        _rate(record),
    )


def eval_line(record: EvalRecord) -> str:
    """Return the line of one evaluation; its first key is "validation step", "test step", ..."""
    return _line(
        (f"{record.split} step", f"{record.step}"),
        ("consumed samples", f"{record.consumed_samples}"),
        *((name, _decimal(value)) for name, value in record.values.items()),
        ("seconds", f"{record.seconds:.2f}"),
    )


def _rate(record: StepRecord | EpochRecord) -> tuple[str, str]:
    if record.tokens_per_second is not None:
        return "tokens/s", f"{record.tokens_per_second:.0f}"
    rate = record.samples_per_second
    return "samples/s", f"{rate:.4g}" if rate < 1e3 else f"{rate:.0f}"


def _of(total: int | None) -> str:
    return "" if total is None else f"/{total}"


def _line(*parts: tuple[str, str | None]) -> str:
    return " | ".join(f"{key} {value}" for key, value in parts if value is not None)


def timeline_line(record: TimelineRecord) -> str:
    """Return the line of one measured timeline; its first key is "timeline step"."""
    return (
        f"timeline step {record.step} | schedule {record.schedule} | "
        f"makespan ms {record.makespan * 1e3:.2f} | "
        f"predicted ms {record.predicted_makespan * 1e3:.2f} | "
        f"span ms {record.span * 1e3:.2f} | bubble % {percent(record.bubble).rstrip('%')}"
    )


def fit(line: str, width: int) -> str:
    """Return the line without its less important parts, as few as needed for `width` columns."""
    first, *parts = line.split(" | ")
    for key in _LESS_IMPORTANT:
        if len(" | ".join([first, *parts])) <= width:
            break
        parts = [part for part in parts if part != key and part.rpartition(" ")[0] != key]
    return " | ".join([first, *parts])


def parse_line(line: str) -> dict[str, str]:
    """Return {key: value} of a line of this module; {} for any other line."""
    matches = [PART.fullmatch(part) for part in line.strip().split(" | ")]
    if not all(matches) or len(matches) < 2:
        return {}
    return {match["key"]: match["value"] for match in matches if match is not None}


def _decimal(value: float | None) -> str | None:
    """Format with four decimals, or with an exponent if the number is very small or large."""
    if value is None:
        return None
    fits = not math.isfinite(value) or value == 0 or 1e-2 <= abs(value) < 1e6
    value += 0.0  # makes -0.0 positive
    return f"{value:.4f}" if fits else f"{value:.4e}"


def _known(value: float | None, spec: str) -> str | None:
    return None if value is None else format(value, spec)


def _duration(seconds: float | None) -> str | None:
    if seconds is None or not math.isfinite(seconds):
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
