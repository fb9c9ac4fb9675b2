"""Tests of the command line: output and exit codes."""

import json
import subprocess
import sys

import pytest

import pipemega
from pipemega.cli import COMMANDS, main
from pipemega.config import load
from pipemega.data.tokens.token_files import IndexedWriter
from pipemega.data.tokens.tokenizers import FastTokenizer
from tests.paper.config.config_tree import BASE


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE | {"mesh": {"tensor": 2, "pipeline": 2}, "log_level": "info"}))
    return path


def test_check_prints_ranks_batch_and_computed_values_and_warnings(config_file, capsys):
    assert main(["check", str(config_file), "--world", "8", "--set", "data.mock=true"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        "mesh 8 ranks = pipeline 2 x data 2 x tensor 2",
        "batch train_batch_size 4 = 2 (micro) x 1 (gas) x 2 (data)",
        "precision fp32",
        "length 100 steps, 400 samples, 12,800 tokens",
    ]
    for line in (
        "mesh.data 2 8 ranks / (tensor 2 x pipeline 2)",
        "train_batch_size 4 from train_micro_batch_size_per_gpu 2, data 2",
        "gradient_accumulation_steps 1 from train_micro_batch_size_per_gpu 2, data 2",
        "model.vocab_size 8,192 data.vocab_size of the mock data",
        "model.ffn_hidden_size 256 hidden_size 64 x 4",
        "model.kv_channels 16 hidden_size 64 / 4 heads",
        "pipeline.chunks 1 1f1b",
        "pipeline.partition 2 stages for the shortest simulated step; 'pipemega plan' shows them",
    ):
        assert line in lines
    warnings = [line for line in lines if line.startswith(("warning", "note", "ok"))]
    assert warnings[0].startswith("warning: log_level is ignored")
    assert warnings[1].startswith("warning: 1 micro-batch for 2 pipeline stages")
    assert warnings[2].startswith("note: gradient_clipping is not set; its default is 1")
    assert warnings[3] == "ok: this config can run on 8 ranks"


@pytest.mark.parametrize(
    ("partition", "meaning"),
    [
        ("auto", "for the shortest simulated step"),
        ("best", "equal in parameters"),
        ("uniform", "equal in layers"),
        ("type:Block", "equal in layers whose class matches 'Block'"),
        ("profile", "equal in time, measured when the run starts"),
    ],
)
def test_check_says_what_the_partition_balances(config_file, capsys, partition, meaning):
    words = ["--set", "data.mock=true", "--set", f"pipeline.partition={partition}"]
    assert main(["check", str(config_file), *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f" 2 stages {meaning}; 'pipemega plan' shows them " in printed


def test_check_prints_the_epochs_of_a_run_whose_steps_depend_on_the_data(config_file, capsys):
    words = ["--set", "training.train_steps=null", "--set", "training.epochs=3"]
    assert main(["check", str(config_file), *words]) == 0
    assert "length     3 epochs; the data determine the steps" in capsys.readouterr().out


def test_check_prints_the_steps_of_a_run_in_samples_with_a_growing_batch(config_file, capsys):
    words = ["--world", "8", "--set", "training.train_steps=null", "--set", "train_batch_size=16"]
    words += ["--set", "training.train_samples=100", "--set", "data.mock=true"]
    words += ["--set", "training.rampup_batch_size=[4,4,24]", "--set", "scheduler.type=cosine"]
    assert main(["check", str(config_file), *words]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "ramp-up 4 to 16 samples in 4 sizes; full from step 5 on, after 28 samples" in lines
    assert "length 8 steps, 92 samples, 2,944 tokens" in lines
    (schedule,) = [line for line in lines if line.startswith("scheduler")]
    assert schedule.startswith("scheduler cosine by sample")
    assert schedule.endswith("warmup_samples 0, decay_samples 100")
    file = "/does/not/exist"
    words += ["--set", f'pipeline.schedule={{"file": "{file}"}}']
    assert main(["check", str(config_file), *words]) == 1
    assert file in capsys.readouterr().err


def test_check_without_world_uses_the_smallest_number_of_ranks(config_file, capsys):
    assert main(["check", str(config_file)]) == 0
    out = capsys.readouterr().out
    assert "4 ranks = pipeline 2 x data 1 x tensor 2  (the smallest number that fits" in out


def test_check_prints_the_resolved_config_as_json_that_can_be_loaded(config_file, capsys):
    words = ["--set", "seed=7", "--format", "json"]
    assert main(["check", str(config_file), *words]) == 0
    assert load(capsys.readouterr().out) == load(config_file, ["seed=7"])


def test_check_names_the_files_that_exist_and_the_folders_that_will_be_created(
    config_file, tmp_path, capsys
):
    with IndexedWriter(tmp_path / "text", "uint16") as writer:
        writer.add_document([1, 2, 3])
    corpus, new = tmp_path / "text", tmp_path / "new"
    words = ["--set", f"data.data_path={corpus}", "--set", f"checkpoint.save={new}"]
    assert main(["check", str(config_file), *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"data.data_path {corpus} exists, 68 B, 3 tokens" in out
    assert f"checkpoint.save {new} will be created" in out
    assert "model.vocab_size unknown no tokenizer was found here" in out


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["pipeline.shedule=gpipe"], ["unknown key 'pipeline.shedule'; did you mean"]),
        (["mesh.data=1"], ["8 ranks were started, and the mesh takes"]),
        (["mesh.tensor=4", "mesh.pipeline=3"], ["8 ranks were started, and one copy"]),
        (["train_batch_size=6"], ["train_batch_size (6) must be a multiple of"]),
        (["zero_optimization.stage=2"], ["zero_optimization.stage 2 is not supported"]),
        (['pipeline.schedule={"file": "no.csv"}'], ["schedule.file 'no.csv' cannot be read"]),
        (
            ['data.data_path=["no/a", "no/b"]', "data.tokenizer=no/t.json"],
            ["no/a.bin and no/a.idx do not exist", "no/b.bin and", "tokenizer no/t.json does not"],
        ),
        (["data.data_path=FOLDER/damaged"], ["damaged.idx is not a Megatron index of"]),
        (
            ["data.mock=false", "data.tokenizer=FOLDER/t.json", "model.vocab_size=9"],
            ["model.vocab_size is 9, but the tokenizer"],
        ),
        (["data.corpus=no/text"], ["no file, folder or glob matches the corpus 'no/text'"]),
        (["checkpoint.load=no/run"], ["checkpoint.load: the folder no/run does not exist"]),
        (["checkpoint.save=CONFIG"], ["is a file, and must be a folder"]),
        (
            ["seed=-1", "mesh.data=3", "zero_optimization.stage=3", "checkpoint.load=no/run"],
            [
                "seed must be",
                "zero_optimization.stage 3 is not supported",
                "checkpoint.load: the folder no/run",
                "8 ranks were started",
            ],
        ),
    ],
)
def test_check_prints_every_error_on_a_line_and_ends_with_code_1(
    overrides, messages, config_file, tmp_path, capsys
):
    for name in ("damaged.bin", "damaged.idx"):
        (tmp_path / name).write_bytes(bytes(10))
    (tmp_path / "t.json").write_text(FastTokenizer.train(["some text " * 50], 270).to_json())
    places = {"CONFIG": str(config_file), "FOLDER": str(tmp_path)}
    words = overrides
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    sets = [word for override in words for word in ("--set", override)]
    assert main(["check", str(config_file), "--world", "8", *sets]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    title, *lines = printed.err.splitlines()
    if len(messages) == 1:
        assert title.startswith("error: ")
        lines = [title]
    else:
        assert title == f"error: {config_file} has {len(messages)} errors:"
    assert len(lines) == len(messages)
    for message in messages:
        assert any(message in line for line in lines), message


def test_an_invalid_config_ends_other_commands_with_code_2_and_a_line_for_each_error(
    config_file, capsys
):
    words = ["--set", "seed=-1", "--set", "mesh.tensr=2"]
    assert main(["plan", str(config_file), *words]) == 2
    title, *lines = capsys.readouterr().err.splitlines()
    assert title == f"error: {config_file} has 2 errors:"
    assert sorted(lines) == [
        "  seed must be an integer >= 0, not -1",
        "  unknown key 'mesh.tensr'; did you mean 'tensor'?",
    ]


def test_a_missing_file_is_one_line_and_exit_code_2(capsys):
    assert main(["check", "nowhere.json"]) == 2
    assert capsys.readouterr().err == (
        "error: cannot read the config 'nowhere.json': No such file or directory\n"
    )


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["check"], ["config", "x"]])
def test_invalid_arguments_end_with_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: pipemega" in capsys.readouterr().err


def test_schema_and_pages_are_printed(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Config"
    assert main(["config", "docs"]) == 0
    assert capsys.readouterr().out.startswith("# Config reference\n")
    assert main(["config", "deepspeed"]) == 0
    assert capsys.readouterr().out.startswith("# DeepSpeed keys\n")


def test_version_prints_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"pipemega {pipemega.__version__}\n"


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    # argparse prints the help of a long name on the next line.
    assert [name for name in COMMANDS if f"    {name} " not in printed.replace("\n", " \n")] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: pipemega {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--help", "--version", "check CONFIG"])
def test_the_command_line_runs_without_importing_torch(arguments, config_file):
    words = arguments.replace("CONFIG", str(config_file)).split()
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['pipemega', *{words!r}]\n"
        "try:\n    runpy.run_module('pipemega', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some text " * 50)
    prefix = "/proc/tokens"  # not even root can create a file there
    assert main(["data", "prepare", "--input", str(tmp_path), "--output-prefix", prefix]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: No such file or directory (/proc/.tokens.lock")


def test_a_closed_pipe_causes_no_traceback(config_file):
    program = "import sys; from pipemega.cli import main; sys.exit(main(['config', 'schema']))"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child.stdout.close()
    _, complaint = child.communicate()
    assert complaint == ""
    assert child.returncode == 1


def test_a_command_that_needs_torch_says_so_in_one_line(monkeypatch, capsys):
    def import_first(name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("pipemega.cli.import_first", import_first)
    assert main(["plan", "config.json"]) == 2
    assert capsys.readouterr().err == "error: pipemega plan needs torch: pip install torch\n"
