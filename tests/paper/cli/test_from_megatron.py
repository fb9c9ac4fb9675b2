"""`pipemega config from-megatron`: stdout, stderr and the exit code."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from pipemega.cli import main
from pipemega.config import load

ARGUMENTS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --train-iters 10 --mock-data --vocab-size 128"
)
SCRIPT = f"""\
#!/bin/bash
#SBATCH --nodes=2
CHECKPOINTS=$1
torchrun --nproc_per_node 4 --nnodes $SLURM_NNODES pretrain_gpt.py {ARGUMENTS} \\
    --save $CHECKPOINTS --tensor-model-parallel-size ${{TP:-1}}  # one node
torchrun pretrain_gpt.py {ARGUMENTS} --lr 0.5
"""


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, list[str]]:
    code = main(["config", "from-megatron", *words])
    printed = capsys.readouterr()
    config = json.loads(printed.out) if printed.out else None
    return code, config, printed.err.splitlines()


def test_the_config_of_arguments_is_printed_and_loads(capsys: pytest.CaptureFixture[str]) -> None:
    code, config, lines = run(capsys, ARGUMENTS + " --manual-gc")
    assert code == 0
    assert load(config).training.train_steps == 10
    assert "ignored: --manual-gc: Python's garbage collection is left alone" in lines


def test_a_script_gets_its_parameters_and_variables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    code, config, lines = run(capsys, str(script), "runs/a", "--var", "TP=2")
    assert (code, config["checkpoint"]["save"], config["mesh"]["tensor"]) == (0, "runs/a", 2)
    assert lines[-2:] == [
        "note: this is training 1 of 2 in the script (--launch), line 4",
        "note: start it with torchrun --nproc_per_node=4 --nnodes=2 pretrain_gpt.py --config FILE",
    ]
    monkeypatch.setenv("TP", "4")
    _, config, lines = run(capsys, str(script), "--set", "mesh.pipeline=2")
    assert config["mesh"] == {"tensor": 4, "pipeline": 2}
    assert config["checkpoint"]["save"] == "$1"
    _, config, _ = run(capsys, str(script), "--launch", "2")
    assert config["optimizer"]["params"]["lr"] == 0.5


def test_a_program_that_fine_tunes_is_refused_with_the_keys_of_such_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """finetune_llama.py of Megatron-DeepSpeed on alpaca_data.json gave a pretraining config."""
    script = f"deepspeed finetune_llama.py {ARGUMENTS} --data-path alpaca_data.json"
    code, config, lines = run(capsys, script)
    assert (code, config) == (2, None)
    assert "finetune_llama.py fine-tunes, and from-megatron converts pretraining" in lines[-1]
    assert "answers set data.format and data.path (docs/finetuning.md)" in lines[-1]
    assert run(capsys, script.replace("finetune_llama.py", "pretrain_gpt.py"))[0] != 2


def test_the_exit_code_says_if_the_config_is_that_of_the_launch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, config, lines = run(capsys, ARGUMENTS + " --num-experts 8 --moe-latent-size 32")
    assert (code, config["model"]["num_layers"]) == (1, 4)
    assert lines[1].startswith("refused: --moe-latent-size 32: experts take tokens of --hidden-")
    code, config, lines = run(capsys, ARGUMENTS + " --num-attention-heads 5")
    assert (code, config["model"]["num_attention_heads"]) == (1, 5)
    assert any("model.hidden_size (64) must be a multiple of" in line for line in lines)


def test_each_argument_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, lines = run(capsys, "--explain", ARGUMENTS)
    assert "--hidden-size -> model.hidden_size" in lines


def test_arguments_can_come_from_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(ARGUMENTS.replace(" --", "\n--")))
    assert run(capsys, "-")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.sh"], 'missing.sh is no file; arguments must be in quotes: "--num-layers 24'),
        ([ARGUMENTS, "--var", "TP"], "--var must be NAME=VALUE, not ['TP']"),
        ([ARGUMENTS, "--launch", "2"], "--launch must be from 1 to 1, not 2"),
        (["echo --lr 1\n"], "no training of Megatron was found"),
    ],
)
def test_a_wrong_use_is_an_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, config, lines = run(capsys, *words)
    assert (code, config) == (2, None)
    assert lines[0].startswith(f"error: {message}")
