"""`python -m pipemega plan`: what it prints, what it says of mistakes, how it ends."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipemega import LayerSpec, PipelineModule
from pipemega.cli import main
from pipemega.pipeline.schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.json"))

SMALL: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "mesh": {"pipeline": 2},
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 64,
        "vocab_size": 512,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return path


def plan(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main(["plan", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, path)
    assert code == 0
    assert "memory per rank" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_model_of_175_billion_is_planned_in_seconds_and_without_memory_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "175b.json"
    model = {
        **SMALL["model"],
        "num_layers": 96,
        "hidden_size": 12288,
        "num_attention_heads": 96,
        "seq_length": 2048,
        "vocab_size": 51200,
        "recompute": "selective",
    }
    mesh = {"pipeline": 16, "tensor": 8, "sequence_parallel": True}
    sizes = {"train_batch_size": 1536, "train_micro_batch_size_per_gpu": 1}
    path.write_text(json.dumps({**SMALL, **sizes, "mesh": mesh, "model": model}))
    before, started = _peak_megabytes(), time.perf_counter()
    code, out, _ = plan(capsys, path, "--world", "1024", "--format", "json")
    assert time.perf_counter() - started < 60
    assert _peak_megabytes() - before < 1000, "its weights alone are 350,000 MB"
    report = json.loads(out)
    assert code == 0
    assert report["model"]["parameters"] == pytest.approx(174.6e9, rel=0.001)
    # 18 bytes for each of the parameters of a rank: bf16, fp32 gradient, master, two moments.
    rank = report["outcome"]["memory"][1]
    always = rank["weights"] + rank["gradients"] + rank["masters"] + rank["optimizer"]
    assert always == pytest.approx(18 * rank["parameters"], rel=1e-4)
    # Korthikanti et al. 2022, arXiv:2205.05198, equation 4: 34 s b h / t a layer, of which 2 are
    # masks of dropout that this model has not; 6 layers a stage.
    assert report["stages"][1]["held"] == pytest.approx(6 * 32 * 2048 * 12288 / 8, rel=0.01)


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_what_fits_ends_with_0_and_what_does_not_with_1_and_ways_that_were_tried(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = plan(capsys, config_file, "--device-memory", "H100-80GB")
    assert code == 0
    assert "\nfits        " in out
    peak = json.loads(plan(capsys, config_file, "--format", "json")[1])["outcome"]["peak_bytes"]
    code, out, _ = plan(capsys, config_file, "--device-memory", f"{peak - 1}B")
    assert code == 1
    assert "does not fit  pipeline rank " in out
    assert "--set model.recompute=full: " in out
    assert ", fits\n" in out
    assert plan(capsys, config_file, "--device-memory", f"{peak}B")[0] == 0


def test_where_no_change_is_enough_the_nearest_are_named(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = plan(capsys, config_file, "--device-memory", "100KB")
    assert code == 1
    assert 1 <= out.count("not enough") <= 4


def test_schedules_stand_side_by_side_the_quickest_first(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = plan(capsys, config_file, "--compare", "all", "--format", "json")
    report = json.loads(out)
    assert code == 0
    names = [outcome["schedule"] for outcome in report["compare"]]
    assert sorted([*names, *report["refused"]]) == sorted([*SCHEDULES, "auto"])
    times = [outcome["makespan"] for outcome in report["compare"]]
    assert times == sorted(times)
    assert names[-1] == "sequential"
    assert all(outcome["tokens_per_second"] is None for outcome in report["compare"])
    (advice,) = report["advice"]
    assert "less time than '1f1b'" in advice


def test_a_schedule_that_cannot_take_the_sizes_is_listed_with_why(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 4 blocks, embedding, positions, norm and head make 8 layers: 5 ranks have no 10 stages.
    words = ["--set", "mesh.pipeline=5", "--compare", "zb-v", "--set", "model.num_layers=4"]
    _, out, _ = plan(capsys, config_file, *words)
    assert "not possible  zb-v: pipeline.partition: more stages than layers: 8 layers" in out


def test_seconds_and_tokens_are_claimed_only_where_speed_is_known(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    relative = plan(capsys, config_file)[1]
    assert "times a rank's mean forward, by FLOPs" in relative
    assert "tokens/s" not in relative
    words = ["--costs", ".1,.1,.1", "--format", "json"]
    outcome = json.loads(plan(capsys, config_file, *words)[1])["outcome"]
    # 1F1B on 2 ranks: 8 rounds of .3, and one more for the way there and back.
    assert outcome["makespan"] == pytest.approx(9 * 0.3)
    assert outcome["tokens_per_second"] == pytest.approx(16 * 64 / outcome["makespan"])
    quick = json.loads(plan(capsys, config_file, "--tflops", "2", "--format", "json")[1])
    slow = json.loads(plan(capsys, config_file, "--tflops", "1", "--format", "json")[1])
    assert slow["outcome"]["makespan"] == pytest.approx(2 * quick["outcome"]["makespan"])
    linked = ["--tflops", "1", "--link", "0.001", "--format", "json"]
    linked_time = json.loads(plan(capsys, config_file, *linked)[1])["outcome"]["makespan"]
    assert linked_time > slow["outcome"]["makespan"]


def test_warnings_name_the_stage_and_the_way_out(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "model.vocab_size=4096", "--set", "pipeline.partition=uniform"]
    words += ["--set", "train_batch_size=4"]
    out = " ".join(plan(capsys, config_file, *words)[1].split())
    assert "warning bubble " in out
    assert "4 micro-batches (now 2) bring equal stages to 20%" in out
    assert "warning pipeline rank 1 (stage 1) has 1." in out
    assert "its head is " in out
    assert "by FLOPs: pipeline.partition [0, " in out
    words = ["--set", "pipeline.schedule=zb-h1", "--set", "model.recompute=full"]
    out = " ".join(plan(capsys, config_file, *words)[1].split())
    assert "warning recomputation under schedule 'zb-h1': between the halves" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world", "3"], "error: 3 ranks were started, and one copy of the model takes"),
        (["--device-memory", "lots"], "error: the device memory 'lots' is no size: write 80GB"),
        (["--device-memory", "0GB"], "error: the device memory '0GB' is no size"),
        (["--compare", "zbv"], "error: unknown schedule 'zbv'; did you mean 'zb-v'?"),
        (["--set", "model=null"], "error: the config has no section 'model', which says what GPT"),
        (["--set", "model.vocab_size=auto"], "error: model.vocab_size is 'auto', which the"),
        (["--set", "mesh.pipeline=9"], "error: mesh.pipeline (9) is more than the layers"),
        (["--model", "nothing"], "error: --model 'nothing' names no function: write --model"),
        (["--model", "no_module:build"], "error: --model 'no_module:build' failed: ModuleNotF"),
        (
            ["--model", f"{__name__}:not_a_model"],
            f"error: --model '{__name__}:not_a_model' returned int: write --model MODULE:FUNCTION",
        ),
        (["--model", f"{__name__}:without_loss"], "error: the model has no loss_fn"),
        (["--model", f"{__name__}:peeking"], "error: layers.1 (Peeks) failed: RuntimeError: "),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(
    words: list[str], message: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = plan(capsys, config_file, *words)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_config_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = plan(capsys, "nowhere.json")
    assert code == 2
    assert err == "error: cannot read the config 'nowhere.json': No such file or directory\n"


@pytest.mark.parametrize("words", [["--costs", "1,2"], ["--tflops", "-1"], ["--link", "fast"]])
def test_numbers_that_are_none_are_refused(
    words: list[str], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        plan(capsys, config_file, *words)
    assert end.value.code == 2
    assert "give" in capsys.readouterr().err


def own_model(micro_batch_size: int) -> tuple[PipelineModule, Any, Any]:
    net = PipelineModule(
        [LayerSpec(nn.Linear, 16, 64), torch.tanh, nn.Linear(64, 4)],
        loss_fn=nn.functional.cross_entropy,
    )
    return net, torch.randn(micro_batch_size, 16), torch.randint(4, (micro_batch_size,))


def not_a_model(micro_batch_size: int) -> int:
    return micro_batch_size


def without_loss(micro_batch_size: int) -> tuple[PipelineModule, Any, Any]:
    return PipelineModule([nn.Linear(16, 4)] * 2), torch.randn(micro_batch_size, 16), None


class Peeks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.detach().sum().item()


def peeking(micro_batch_size: int) -> tuple[PipelineModule, Any, Any]:
    _, inputs, labels = own_model(micro_batch_size)
    net = PipelineModule([nn.Linear(16, 4), Peeks()], loss_fn=nn.functional.cross_entropy)
    return net, inputs, labels


def test_a_model_of_ones_own_is_planned_by_its_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({k: SMALL[k] for k in SMALL if k not in ("model", "bf16")}))
    words = ["--model", f"{__name__}:own_model", "--format", "json"]
    code, out, _ = plan(capsys, path, *words)
    report = json.loads(out)
    assert code == 0
    assert report["model"] == {"parameters": 1348, "layers": 3, "precision": "fp32"}
    assert [stage["layers"] for stage in report["stages"]] == ["Linear", "tanh, Linear"]
    # The second stage keeps its input [2, 64] for nothing, tanh's output, and the loss its log
    # softmax [2, 4] with a weight [1]; fp32.
    assert report["stages"][1]["held"] == 4 * (128 + 128 + 8 + 1)


def test_a_plan_is_also_a_page(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    words = ["--format", "html", "--output", str(page), "--compare", "zb-h1"]
    code, _, _ = plan(capsys, config_file, *words)
    text = page.read_text(encoding="utf-8")
    assert code == 0
    assert "schedules side by side" in text
    assert "memory per rank, MB" in text
    assert "train_batch_size 16 = 2 (micro) x 8 (gas) x 1 (data)" in text
