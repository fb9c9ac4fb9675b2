"""`python -m pipemega schedule --format png | svg | html | trace`, and `--output`."""

import json

import pytest

from pipemega.cli import main
from pipemega.pipeline.schedules import build_plan

WORDS = ["schedule", "1f1b", "--pp", "2", "--microbatches", "3"]
FIRST_BYTES = {
    "png": (b"\x89PNG", "1f1b.png"),
    "svg": (b"<?xml", "1f1b.svg"),
    "html": (b"<!doctype html>", "1f1b.html"),
    "trace": (b"{", "1f1b.trace.json"),
}


@pytest.mark.parametrize("form", FIRST_BYTES)
def test_a_picture_is_written_to_a_file_named_after_its_schedule_and_the_name_is_printed(
    form, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "--format", form]) == 0
    first, name = FIRST_BYTES[form]
    written = (tmp_path / name).read_bytes()
    assert written.startswith(first)
    assert capsys.readouterr().out == f"{name}: {len(written):,} bytes\n"


def test_output_and_unit_set_the_file_and_the_unit_of_a_picture(tmp_path):
    file = tmp_path / "mine.svg"
    options = ["--format", "svg", "--output", str(file), "--unit", "ms", "--memory"]
    assert main([*WORDS, *options]) == 0
    assert "time (ms)" in file.read_text()
    assert "memory (" in file.read_text()


def test_output_sets_the_file_of_json(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert main([*WORDS, "--format", "json", "--output", str(file)]) == 0
    assert json.loads(file.read_text())["name"] == build_plan("1f1b", 2, 3).name
    assert str(file) in capsys.readouterr().out


def test_a_missing_folder_gives_a_one_line_error(tmp_path, capsys):
    file = tmp_path / "nowhere" / "plan.html"
    assert main([*WORDS, "--format", "html", "--output", str(file)]) == 2
    message = f"error: --output {file} cannot be written: No such file or directory"
    assert capsys.readouterr().err.strip() == message


def test_costs_reach_the_picture(tmp_path):
    file = tmp_path / "trace.json"
    options = ["--format", "trace", "--output", str(file), "--costs", "2,1,1", "--unit", "s"]
    assert main([*WORDS, *options]) == 0
    (event,) = [e for e in json.loads(file.read_text())["traceEvents"] if e["name"] == "F0@0"]
    assert event["dur"] == 2e6
