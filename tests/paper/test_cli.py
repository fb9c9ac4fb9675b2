"""The command line: what it prints, and how it ends."""

import json
import subprocess
import sys

import pytest

from pipemega.cli import COMMANDS, main
from pipemega.config import load
from tests.paper.config_tree import BASE


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE | {"mesh": {"tensor": 2, "pipeline": 2}, "log_level": "info"}))
    return path


def test_check_prints_the_resolved_config_the_equation_and_the_warnings(config_file, capsys):
    assert main(["check", str(config_file), "--world", "8", "--set", "seed=7"]) == 0
    config, _, rest = capsys.readouterr().out.partition("\n\n")
    assert load(config) == load(config_file, ["seed=7"])
    lines = rest.splitlines()
    assert lines[0] == (
        "train_batch_size 4 = 2 (micro) x 1 (gas) x 2 (data); "
        "world 8 = data 2 x tensor 2 x pipeline 2"
    )
    assert lines[1].startswith("warning: log_level is ignored")
    assert lines[2].startswith("warning: 1 micro-batches for 2 pipeline stages")
    assert lines[3].startswith("note: gradient_clipping is not given and is 1")


def test_check_without_a_world_takes_the_fewest_ranks_that_fit(config_file, capsys):
    assert main(["check", str(config_file)]) == 0
    assert "world 4 = data 1 x tensor 2 x pipeline 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--set", "pipeline.shedule=gpipe"],
            "error: unknown key 'pipeline.shedule'; did you mean",
        ),
        (["--world", "6"], "error: 6 ranks were started, and one copy of the model takes"),
        (["--world", "0"], "error: 0 ranks were started"),
        (
            ["--world", "8", "--set", "mesh.data=1"],
            "error: 8 ranks were started, and the mesh takes",
        ),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(arguments, message, config_file, capsys):
    assert main(["check", str(config_file), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1


def test_a_file_that_is_not_there_is_one_line_and_exit_code_2(capsys):
    assert main(["check", "nowhere.json"]) == 2
    assert capsys.readouterr().err == (
        "error: cannot read the config 'nowhere.json': No such file or directory\n"
    )


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["check"], ["config", "x"]])
def test_a_call_that_makes_no_sense_ends_with_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: pipemega" in capsys.readouterr().err


def test_schema_and_pages_are_printed(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Config"
    assert main(["config", "docs"]) == 0
    assert capsys.readouterr().out.startswith("# The config, key by key\n")
    assert main(["config", "deepspeed"]) == 0
    assert capsys.readouterr().out.startswith("# DeepSpeed's keys")


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    # argparse puts what a longer name does into the next line.
    assert [name for name in COMMANDS if f"    {name} " not in printed.replace("\n", " \n")] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_that_says_what_it_takes(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: pipemega {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--help", "check CONFIG"])
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


def test_a_reader_that_stops_early_causes_no_traceback(config_file):
    program = "import sys; from pipemega.cli import main; sys.exit(main(['config', 'schema']))"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child.stdout.close()
    _, complaint = child.communicate()
    assert complaint == ""
    assert child.returncode == 1
