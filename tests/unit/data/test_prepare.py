"""From text to token files: sources, tokenizer, preparation, and the two commands."""

import argparse
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipemega.cli import data as cli
from pipemega.data.tokens import corpus as corpus_module
from pipemega.data.tokens import prepare as prepare_module
from pipemega.data.tokens.corpus import Skipped, find_corpus
from pipemega.data.tokens.prepare import (
    PrepareOptions,
    manifest_of,
    prepare,
    read_manifest,
    tokenizer_of,
)
from pipemega.data.tokens.token_files import IndexedDataset, files_of
from pipemega.data.tokens.tokenizers import EOD, FastTokenizer, load_tokenizer
from pipemega.errors import ConfigError, DataError

TEXTS = [f"def function_{i}(x):\n    return x + {i}  # ünï☃\n" for i in range(40)]


def write_lines(path: Path, texts, key="text"):
    lines = "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts))
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(lines)
    else:
        path.write_text(lines, encoding="utf-8")
    return path


def texts_of(inputs, json_key="text"):
    skipped = Skipped()
    texts = [text for text, _ in find_corpus(inputs, json_key).documents(skipped)]
    return texts, skipped


@pytest.fixture
def lines(tmp_path):
    return write_lines(tmp_path / "text.jsonl", TEXTS)


# --- sources


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.jsonl.gz", "a.json.gz"])
def test_each_line_of_json_is_a_document(name, tmp_path):
    assert texts_of(write_lines(tmp_path / name, TEXTS))[0] == TEXTS
    assert texts_of(write_lines(tmp_path / name, TEXTS, "body"), "body")[0] == TEXTS


def test_each_text_file_is_a_document_compressed_or_not(tmp_path):
    (tmp_path / "b.txt").write_text("bé", encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert texts_of([tmp_path / "b.txt", tmp_path / "a.txt.gz"])[0] == ["bé", "packed"]


def test_folders_and_globs_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("z/2.txt", "z/1.txt", "a.txt", "b.md", ".hidden/x.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    everything = ["a.txt", "b.md", "z/1.txt", "z/2.txt"]
    assert texts_of(tmp_path)[0] == everything
    assert texts_of(f"{tmp_path}/*.txt")[0] == ["a.txt"]
    assert texts_of(f"{tmp_path}/**/*.txt")[0] == ["a.txt", "z/1.txt", "z/2.txt"]
    assert texts_of(f"{tmp_path}/[z]")[0] == ["z/1.txt", "z/2.txt"]
    assert texts_of([f"{tmp_path}/b.md", tmp_path])[0] == ["b.md", "a.txt", "z/1.txt", "z/2.txt"]


def test_files_that_are_not_text_are_skipped_in_a_folder_and_counted(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "text.txt").write_text("text")
    texts, skipped = texts_of(tmp_path)
    assert texts == ["text"]
    assert str(skipped) == "1 empty, 1 not UTF-8"


def damaged_gz(path):
    path.write_bytes(gzip.compress(b'{"text": "a long enough line"}\n' * 99)[:-20])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xff", r"a.txt is not UTF-8 text \(invalid start byte at byte 3\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', r"a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'\n["x"]\n', r"a.jsonl, line 2 is a list, but must be a JSON object"),
        (
            "a.jsonl",
            b'{"body": "x", "id": 1}',
            r"line 1 has no key 'text'; its keys are 'body', 'id': .*--j",
        ),
        ("a.jsonl", b'{"text": 7}', r"a.jsonl, line 1: 'text' must be text, not int"),
        ("a.txt.gz", b"plain", r"a.txt.gz cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", damaged_gz, r"a.jsonl.gz cannot be read: Compressed file ended before"),
    ],
)
def test_an_unreadable_input_is_named_with_its_line(name, content, message, tmp_path):
    path = tmp_path / name
    content(path) if callable(content) else path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts_of(path)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("nothing/*.txt", r"no file, folder or glob matches the corpus 'nothing/\*.txt'"),
        ([], "a corpus needs at least one file, folder or glob"),
        (["python-stdlib", "x"], r"'python-stdlib' \(it must be the only input"),
    ],
)
def test_an_input_without_files_is_refused(inputs, message):
    with pytest.raises(DataError, match=message):
        find_corpus(inputs)


def test_the_standard_library_corpus_has_no_tests_and_no_installed_packages():
    found = find_corpus("python-stdlib")
    names = {path.name for path in found.files}
    assert {"argparse.py", "ast.py", "socket.py"} <= names
    left_out = corpus_module.STDLIB_LEFT_OUT
    assert not any(left_out & set(path.parts[-4:-1]) for path in found.files)
    assert list(found.files) == sorted(found.files)
    assert found.num_bytes > 5_000_000
    assert find_corpus(["python-stdlib"]) == found


def test_a_python_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"this Python has no sources in .* data.corpus"):
        find_corpus("python-stdlib")


# --- tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return FastTokenizer.train(TEXTS, 300)


def test_decoding_returns_the_encoded_text(tokenizer):
    for text in ["", "plain", "tab\t\r\n  x", "ünï☃ 日本 \U0001f600", "\x00\x7f", f"a {EOD} b"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_is_deterministic_and_keeps_the_vocabulary_size(tokenizer):
    assert tokenizer.vocab_size == 300
    assert tokenizer.eod == 0
    assert FastTokenizer.train(iter(TEXTS), 300).to_json() == tokenizer.to_json()
    assert FastTokenizer.train(["ab"], 9999).vocab_size == 258


def test_a_batch_is_encoded_like_its_single_texts(tokenizer):
    batch = [ids.tolist() for ids in tokenizer.encode_batch(TEXTS[:3])]
    assert batch == [tokenizer.encode(text) for text in TEXTS[:3]]


def test_the_end_of_document_string_inside_a_text_is_encoded_as_text(tokenizer):
    assert tokenizer.eod not in tokenizer.encode(f"one {EOD} two")
    assert tokenizer.decode([tokenizer.eod]) == EOD


def test_a_tokenizer_is_saved_and_loaded(tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert (loaded.vocab_size, loaded.eod) == (300, 0)


def test_an_invalid_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"the tokenizer .*none.json does not exist"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad.json is not a tokenizer.json of the tokenizers pack"):
        load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match=r"data.vocab_size is 256, but .* at least 257"):
        FastTokenizer.train(TEXTS, 256)


# --- preparation


def test_each_document_of_a_corpus_is_encoded_and_ends_with_the_end_token(lines, tmp_path):
    done = prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300))
    data = IndexedDataset(tmp_path / "out")
    tokenizer = load_tokenizer(tokenizer_of(tmp_path / "out"))
    assert [data.get(i).tolist() for i in range(len(data))] == [
        [*tokenizer.encode(text), tokenizer.eod] for text in TEXTS
    ]
    assert (done.documents, done.tokens, done.dtype) == (40, data.num_tokens, "uint16")
    assert (done.vocab_size, done.eod, done.append_eod) == (300, 0, True)
    assert read_manifest(tmp_path / "out") == done


def test_a_given_tokenizer_is_used_and_the_end_of_document_is_optional(lines, tmp_path, tokenizer):
    (tmp_path / "given.json").write_text(tokenizer.to_json())
    prepare(
        lines, tmp_path / "out", PrepareOptions(tokenizer=tmp_path / "given.json", append_eod=False)
    )
    data = IndexedDataset(tmp_path / "out")
    assert data.get(7).tolist() == tokenizer.encode(TEXTS[7])


def test_a_tokenizer_without_an_end_of_document_is_refused(lines, tmp_path, tokenizer):
    text = tokenizer.to_json().replace(EOD, "<end>")
    (tmp_path / "given.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"given.json has no token '<\|endoftext\|>' .*no-append"):
        prepare(lines, tmp_path / "out", PrepareOptions(tokenizer=tmp_path / "given.json"))


def test_the_files_do_not_depend_on_the_number_of_workers(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "CHUNK_DOCUMENTS", 7)
    for workers in (0, 2):
        prepare(lines, tmp_path / f"out{workers}", PrepareOptions(vocab_size=300, workers=workers))
    for one, two in zip(files_of(tmp_path / "out0"), files_of(tmp_path / "out2"), strict=True):
        assert one.read_bytes() == two.read_bytes()


def kill_worker(*_):
    os._exit(1)


def test_a_dead_worker_is_reported_and_leaves_no_files(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "encode_chunk", kill_worker)
    with pytest.raises(DataError, match=r"a worker process that tokenized .* was killed"):
        prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300, workers=1))
    assert list(tmp_path.iterdir()) == [lines]


def test_prepared_files_are_reused(lines, tmp_path, monkeypatch):
    first = prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300))
    monkeypatch.setattr(FastTokenizer, "train", lambda *_: 1 / 0)
    said = []
    assert (
        prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300), say=said.append) == first
    )
    assert said == []


def change_input(lines, prefix):
    write_lines(lines, TEXTS[:9])


def cut_bin(lines, prefix):
    path = files_of(prefix)[0]
    path.write_bytes(path.read_bytes()[:-2])


def damage_manifest(lines, prefix):
    manifest_of(prefix).write_text("{")


def lose_tokenizer(lines, prefix):
    tokenizer_of(prefix).unlink()


@pytest.mark.parametrize("change", [change_input, cut_bin, damage_manifest, lose_tokenizer])
def test_files_that_do_not_match_are_prepared_again(change, lines, tmp_path):
    prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300))
    change(lines, tmp_path / "out")
    said = []
    done = prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300), say=said.append)
    assert said[0].startswith("training a tokenizer with 300 tokens on ")
    assert said[1].startswith(f"prepared {tmp_path / 'out'} in ")
    assert IndexedDataset(tmp_path / "out").num_tokens == done.tokens


def test_an_exception_while_preparing_leaves_no_file(lines, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "encode_chunk", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300))
    assert list(tmp_path.iterdir()) == [lines]


def test_an_exception_while_preparing_keeps_the_old_files(lines, tmp_path, monkeypatch):
    first = prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300))
    lines.write_text('{"text": "more"}\nno json\n')
    with pytest.raises(DataError, match=r"text.jsonl, line 2 is not JSON"):
        prepare(lines, tmp_path / "out", PrepareOptions(tokenizer=tokenizer_of(tmp_path / "out")))
    assert read_manifest(tmp_path / "out") == first
    assert IndexedDataset(tmp_path / "out").num_tokens == first.tokens


def _prepare_and_be_killed(lines, prefix):
    def be_killed(*_):
        os.kill(os.getpid(), 9)

    prepare_module.encode_chunk = be_killed
    prepare(lines, prefix, PrepareOptions(vocab_size=300))


def test_after_a_kill_no_final_file_exists_and_the_next_run_cleans_up(lines, tmp_path):
    process = multiprocessing.get_context("spawn").Process(
        target=_prepare_and_be_killed, args=(lines, tmp_path / "out")
    )
    process.start()
    process.join()
    assert process.exitcode == -9
    left = [path.name for path in tmp_path.iterdir() if path != lines]
    assert len(left) == 3  # the lock, and the beginnings of .bin and .tokenizer.json
    assert all(name.startswith(".out.") for name in left)
    prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300))
    assert not list(tmp_path.glob(".*"))


def test_a_corpus_without_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match=r"contains no text \(skipped: 1 empty, 0 not"):
        prepare(tmp_path / "empty.txt", tmp_path / "out", PrepareOptions(vocab_size=300))


def test_the_output_may_not_overwrite_the_input(tmp_path):
    path = write_lines(tmp_path / "out.manifest.json", TEXTS)
    with pytest.raises(DataError, match=r"would overwrite the input .*out.manifest.json"):
        prepare(path, tmp_path / "out", PrepareOptions(vocab_size=300))


def test_a_folder_that_cannot_be_created_is_named(lines):
    with pytest.raises(DataError, match=r"cannot write .*text.jsonl/out"):
        prepare(lines, lines / "out", PrepareOptions(vocab_size=300))


def test_a_long_preparation_reports_progress(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(prepare_module, "CHUNK_DOCUMENTS", 20)
    said = []
    prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300), say=said.append)
    assert [line for line in said if line.startswith("tokenized")] == ["tokenized 0 of 0 MB"] * 2


def test_a_tokenizer_is_trained_on_the_start_of_a_long_corpus(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "TRAINING_CHARACTERS", 50)
    said = []
    prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300), say=said.append)
    assert "training uses the first 50 characters" in said
    tokenizer = load_tokenizer(tokenizer_of(tmp_path / "out"))
    expected = FastTokenizer.train([TEXTS[0], TEXTS[1][: 50 - len(TEXTS[0])]], 300)
    assert tokenizer.to_json() == expected.to_json()


# --- commands


def run(*arguments) -> int:
    parser = argparse.ArgumentParser(prog="pipemega")
    cli.add_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["data", *map(str, arguments)])
    return parsed.func(parsed)


def test_data_prepare_reports_up_to_date_files(lines, tmp_path, capsys):
    arguments = ("prepare", "--input", lines, "--output-prefix", tmp_path / "out")
    arguments += ("--vocab-size", 300, "--workers", 0)
    assert run(*arguments) == 0
    said = capsys.readouterr()
    assert f"prepared {tmp_path / 'out'} in " in said.out
    assert said.err == ""
    assert run(*arguments, "--progress") == 0
    assert f"{tmp_path / 'out'} is up to date and is reused: 40 doc" in capsys.readouterr().out


def test_data_prepare_shows_a_progress_bar(lines, tmp_path, capsys):
    run("prepare", "--input", lines, "--output-prefix", tmp_path / "out",
        "--vocab-size", 300, "--workers", 0, "--progress", "--no-append-eod")  # fmt: skip
    assert "tokenizing: 100%" in capsys.readouterr().err
    assert read_manifest(tmp_path / "out").append_eod is False


def test_data_info_shows_statistics_and_a_document(lines, tmp_path, capsys):
    prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300))
    assert run("info", tmp_path / "out.bin") == 0
    shown = capsys.readouterr().out
    assert "documents             40" in shown
    assert "dtype                 uint16" in shown
    assert "vocabulary            300" in shown
    assert "def function_0(x):" in shown
    tokenizer_of(tmp_path / "out").unlink()
    run("info", tmp_path / "out")
    assert "first document" not in capsys.readouterr().out
    with pytest.raises(DataError, match="neither"):
        run("info", tmp_path / "none")


@pytest.mark.parametrize("command", ["prepare", "info"])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        run(command, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "PREFIX" in shown
    assert command == "info" or "pipemega data prepare --input" in shown


def test_a_tokenizer_and_a_vocabulary_size_exclude_each_other(lines, capsys):
    with pytest.raises(SystemExit) as ended:
        run("prepare", "--input", lines, "--output-prefix", "x",
            "--tokenizer", "t", "--vocab-size", 300)  # fmt: skip
    assert ended.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_preparing_text_imports_no_torch():
    names = "pipemega.data.tokens.prepare, pipemega.cli.data"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_token_arrays_have_the_dtype_of_the_file(lines, tmp_path):
    prepare(lines, tmp_path / "out", PrepareOptions(vocab_size=300))
    path = tokenizer_of(tmp_path / "out")
    ids, lengths = prepare_module.encode_chunk(path, ["one", "two two"], 0, "uint16")
    assert ids.dtype == np.uint16
    assert ids[np.cumsum(lengths) - 1].tolist() == [0, 0]
