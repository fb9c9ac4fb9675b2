"""The console output of rank 0."""

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipemega.monitor import (
    Console,
    epoch_line,
    eval_line,
    parse_line,
    step_line,
    timeline_line,
)
from tests.unit.monitor.sample_records import (
    epoch_record,
    eval_record,
    step_record,
    timeline_record,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(
    console_records, total_steps=None, steps_per_print=10, total_epochs=None, bar=None, lines=None
) -> list[str]:
    lines, bar = lines or io.StringIO(), bar or io.StringIO()
    console = Console(total_steps, steps_per_print, total_epochs=total_epochs, lines=lines, bar=bar)
    for record in console_records:
        console.write(record)
    console.close()
    return lines.getvalue().splitlines()


def test_the_line_of_a_step_has_its_values_in_a_fixed_order():
    record = step_record(
        20,
        loss=6.12345,
        loss_scale=65536.0,
        tflops_per_device=151.234,
        mfu=0.4847,
        skipped_steps=1,
        peak_gib=41.5,
    )
    assert step_line(record, total_steps=200, seconds_left=3725.0) == (
        "step 20/200 | consumed samples 640 | loss 6.1235 | lr 3.0000e-04 | grad norm 1.2500 | "
        "loss scale 65536 | tokens/s 8192 | TFLOP/s 151.2 | MFU % 48.5 | skipped 1 | nan 0 | "
        "memory GiB 41.50 | ETA 1:02:05"
    )


def test_numbers_that_are_computed_on_request_follow_the_gradient_norm():
    line = step_line(step_record(num_zeros=12345678, params_norm=321.12341))
    assert " | grad norm 1.2500 | num zeros 12345678 | params norm 321.1234 | tokens/s " in line
    scalars = step_record(num_zeros=3, params_norm=2.5).scalars()
    assert (scalars["train/num_zeros"], scalars["train/params_norm"]) == (3, 2.5)


def test_the_line_of_a_step_names_the_layer_with_the_largest_load_of_an_expert():
    extra = {
        "moe/load/layer_2": 1.25, "moe/load/layer_13": 1.3201, "moe/max_load": 1.3201,
        "moe/balance_loss": 1.04, "moe/balance_loss/layer_2": 1.0,
    }  # fmt: skip
    line = step_line(step_record(extra=extra))
    assert " 1.2500 | expert load 1.32 | in layer 13 | balance loss 1.0400 | tokens/s " in line
    assert " | z-loss 9.2000 | " in step_line(step_record(extra=extra | {"moe/z_loss": 9.2}))
    assert parse_line(line)["in layer"] == "13"
    assert step_record(extra=extra).scalars()["moe/load/layer_2"] == 1.25


FULL = step_record(
    20,
    loss=6.12345,
    loss_scale=65536.0,
    tflops_per_device=151.234,
    mfu=0.4847,
    peak_gib=41.5,
)


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        (60, "step, loss, grad norm, tokens/s"),
        (80, "step, loss, lr, grad norm, tokens/s"),
        (100, "step, loss, lr, grad norm, tokens/s, MFU %"),
        (130, "step, loss, lr, grad norm, tokens/s, MFU %, memory GiB, ETA"),
        (
            250,
            "step, consumed samples, loss, lr, grad norm, loss scale, tokens/s, TFLOP/s, MFU %, "
            "skipped, nan, memory GiB, ETA",
        ),
    ],
)
def test_on_a_terminal_a_line_has_the_parts_that_fit(columns, keys, monkeypatch):
    """Longer lines were wrapped by the terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    (line,) = shown([FULL], total_steps=200, lines=Terminal())
    assert len(line) <= columns
    assert ", ".join(parse_line(line)) == keys
    full = step_line(FULL, 200, 0.0)
    assert set(line.split(" | ")[:-1]) <= set(full.split(" | "))


def test_a_count_of_skipped_steps_is_shown_before_the_less_important_parts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (line,) = shown([step_record(20, skipped_steps=3, nan_steps=1)], lines=Terminal())
    assert "skipped 3 | nan 1" in line


def test_validation_and_timeline_lines_fit_the_terminal_too(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    records = [eval_record(), epoch_record(), timeline_record()]
    assert shown(records, lines=Terminal()) == [
        "validation step 20 | loss 4.0000 | perplexity 54.5982",
        "epoch 2 | step 20 | loss 0.5000 | samples/s 157.5",
        "timeline step 10 | makespan ms 250.00 | bubble % 12.5",
    ]


def test_other_output_than_a_terminal_has_whole_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (line,) = shown([FULL], total_steps=200)
    assert len(parse_line(line)) == 13


def test_a_bubble_that_is_rounded_to_zero_has_no_minus_sign():
    """The console showed `bubble % -0.0`."""
    line = timeline_line(replace(timeline_record(), bubble=-2e-16))
    assert parse_line(line)["bubble %"] == "0.0"
    assert parse_line(step_line(step_record(loss=-0.0)))["loss"] == "0.0000"


def test_the_line_of_a_validation_has_loss_and_perplexity():
    assert eval_line(eval_record()) == (
        "validation step 20 | consumed samples 640 | loss 4.0000 | perplexity 54.5982 | "
        "seconds 1.50"
    )


def test_the_line_of_data_without_tokens_has_its_metrics_and_no_perplexity():
    record = eval_record(split="clean_10k", has_tokens=False, metrics={"top1": 0.25, "f1/cat": 1.0})
    line = eval_line(record)
    assert line == (
        "clean_10k step 20 | consumed samples 640 | loss 4.0000 | top1 0.2500 | f1/cat 1.0000 | "
        "seconds 1.50"
    )
    assert parse_line(line)["f1/cat"] == "1.0000"
    assert parse_line(line)["clean_10k step"] == "20"


def test_lines_of_a_run_with_epochs_show_them():
    (line,) = shown([epoch_record()], total_epochs=10)
    assert line == (
        "epoch 2/10 | step 20 | consumed samples 635 | loss 0.5000 | seconds 2.00 | samples/s 157.5"
    )
    assert epoch_line(epoch_record(tokens_per_second=640.0)).endswith("tokens/s 640")
    step = step_record(20, epoch=2, consumed_tokens=None, tokens_per_second=None)
    (line,) = shown([step], total_steps=100, total_epochs=10)
    parsed = parse_line(line)
    assert (parsed["step"], parsed["epoch"], parsed["samples/s"]) == ("20/100", "2/10", "64")
    assert "tokens/s" not in parsed
    bar = Terminal()
    shown([step], total_steps=100, total_epochs=10, bar=bar)
    assert "epoch 2/10" in bar.getvalue()


def test_the_line_of_a_timeline_has_measured_and_predicted_makespan():
    line = timeline_line(timeline_record())
    assert line == (
        "timeline step 10 | schedule zb-v | makespan ms 250.00 | predicted ms 200.00 | "
        "span ms 240.00 | bubble % 12.5"
    )
    assert parse_line(line)["bubble %"] == "12.5"
    assert shown([timeline_record()]) == [line]


def test_unknown_numbers_are_left_out():
    keys = parse_line(step_line(step_record(grad_norm=None)))
    assert list(keys) == [
        "step",
        "consumed samples",
        "loss",
        "lr",
        "tokens/s",
        "skipped",
        "nan",
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -3.5, 1e-7, 2.5e9])
def test_parse_line_reads_every_loss_that_is_shown(value):
    parsed = parse_line(step_line(step_record(loss=value, grad_norm=value)))
    for key in ("loss", "grad norm"):
        assert float(parsed[key]) == pytest.approx(value, rel=1e-4, nan_ok=True)


def test_nan_is_shown_as_nan():
    assert " | loss nan | " in step_line(step_record(loss=math.nan))
    assert " | loss nan | perplexity nan | " in eval_line(eval_record(loss=math.nan))


def test_a_perplexity_that_overflows_is_inf():
    assert parse_line(eval_line(eval_record(loss=1e4)))["perplexity"] == str(math.inf)


def test_parse_line_returns_nothing_for_other_lines():
    assert parse_line("[pipemega] INFO: stage 0 holds layers 0 to 3") == {}


def test_the_regular_expression_in_the_docs_reads_the_lines():
    page = Path(__file__, "../../../../docs/monitoring.md").resolve().read_text(encoding="utf-8")
    expression = re.search(r'^PART = re.compile\(r"(.*)"\)$', page, re.MULTILINE)
    assert expression is not None
    for line in re.findall(r"^((?:step|epoch|validation step) \d.*)$", page, re.MULTILINE):
        found = {m["key"]: m["value"] for m in re.finditer(expression[1], line)}
        assert found == parse_line(line)
        assert {"consumed samples", "loss"} <= set(found)


def test_a_line_is_printed_at_each_interval_and_for_the_last_step():
    lines = shown((step_record(n) for n in range(1, 8)), total_steps=7, steps_per_print=3)
    assert [parse_line(line)["step"] for line in lines] == ["3/7", "6/7", "7/7"]


@pytest.mark.parametrize("steps_per_print", [None, 0])
def test_without_steps_per_print_only_validation_lines_are_printed(steps_per_print):
    records = [step_record(1), eval_record(step=1)]
    lines = shown(records, total_steps=1, steps_per_print=steps_per_print)
    assert [line.split(" | ")[0] for line in lines] == ["validation step 1"]


def test_the_eta_is_computed_from_the_latest_steps():
    records = [step_record(n, step_seconds=100.0 if n == 1 else 2.0) for n in range(1, 21)]
    lines = shown(records, total_steps=50, steps_per_print=10)
    assert parse_line(lines[1])["ETA"] == "0:01:00"


def test_the_bar_is_shown_on_a_terminal_only():
    file, terminal = io.StringIO(), Terminal()
    records = [step_record(n) for n in (1, 2)]
    shown(records, total_steps=2, bar=file)
    shown(records, total_steps=2, bar=terminal)
    assert file.getvalue() == ""
    assert "2/2" in terminal.getvalue()
    assert "loss 3.2500" in terminal.getvalue()


def test_the_bar_of_a_resumed_run_starts_at_the_resumed_step():
    terminal = Terminal()
    shown([step_record(150)], total_steps=200, bar=terminal)
    assert "150/200" in terminal.getvalue()
