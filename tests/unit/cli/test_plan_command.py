"""`python -m pipemega plan`: output, errors and exit codes."""

import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipemega import LayerSpec, PipelineModule
from pipemega.cli import main
from pipemega.data.tokens.tokenizers import FastTokenizer, load_tokenizer
from pipemega.pipeline.schedules import SCHEDULES
from tests.sampling import some_cases

ROOT = Path(__file__).parents[3]
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


LARGE = ("llama_7b_tp4_pp4", "moe_671b_pp16")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.sweep) if path.stem in LARGE else path
        for path in CONFIGS
    ],
    ids=lambda path: path.stem,
)
def test_every_config_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, path)
    assert code == 0
    assert "memory per rank" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_model_of_175_billion_parameters_is_planned_in_seconds_and_without_its_memory(
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
    # 18 bytes per parameter of the rank: bf16, fp32 gradient, master, two moments.
    rank = report["outcome"]["memory"][1]
    static = rank["weights"] + rank["gradients"] + rank["masters"] + rank["optimizer"]
    assert static == pytest.approx(18 * rank["parameters"], rel=1e-4)
    # Korthikanti et al. 2022, arXiv:2205.05198, equation 4: 34 s b h / t per layer. 2 of them
    # are dropout masks, which this model does not have; 6 layers per stage.
    assert report["stages"][1]["held"] == pytest.approx(6 * 32 * 2048 * 12288 / 8, rel=0.01)


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_exit_code_is_0_if_the_run_fits_and_1_with_suggestions_if_not(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = plan(capsys, config_file, "--device-memory", "H100-80GB")
    assert code == 0
    assert "\nfits        " in out
    peak = json.loads(plan(capsys, config_file, "--format", "json")[1])["outcome"]["peak_bytes"]
    code, out, _ = plan(capsys, config_file, "--device-memory", f"{peak - 1}B")
    assert code == 1
    assert "does not fit  pipeline rank " in out
    table = out[out.index("\nchanges that make it fit\n") :].splitlines()[2:]
    assert table[0].split() == ["change", "step", "time", "peak"]
    (full,) = [line for line in table if line.startswith("  --set model.recompute=full ")]
    assert re.search(r" \+[\d.]+%  [\d.]+ MB$", full), "recomputation takes time"
    assert plan(capsys, config_file, "--device-memory", f"{peak}B")[0] == 0


def test_if_no_change_is_enough_the_closest_are_listed(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = plan(capsys, config_file, "--device-memory", "100KB")
    assert code == 1
    title, _, *closest = out[out.index("changes that reduce memory") :].splitlines()
    assert title.endswith(", not enough")
    assert 1 <= len(closest) <= 4
    assert all(line.startswith("  --set ") for line in closest)


def test_schedules_are_compared_fastest_first(
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


def test_a_schedule_that_cannot_run_is_listed_with_the_reason(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 4 blocks, embedding, positions, norm and head make 8 layers: 5 ranks have no 10 stages.
    words = ["--set", "mesh.pipeline=5", "--compare", "zb-v", "--set", "model.num_layers=4"]
    _, out, _ = plan(capsys, config_file, *words)
    assert "not possible  zb-v: pipeline.partition: more stages than layers: 8 layers" in out


def test_seconds_and_tokens_are_shown_only_if_speed_is_known(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    relative = plan(capsys, config_file)[1]
    assert "times the mean forward of a rank, by FLOPs" in relative
    assert "tokens/s" not in relative
    words = ["--costs", ".1,.1,.1", "--format", "json"]
    outcome = json.loads(plan(capsys, config_file, *words)[1])["outcome"]
    # 1F1B on 2 ranks: 8 micro-batches of .3, and one more to fill and drain.
    assert outcome["makespan"] == pytest.approx(9 * 0.3)
    assert outcome["tokens_per_second"] == pytest.approx(16 * 64 / outcome["makespan"])
    quick = json.loads(plan(capsys, config_file, "--tflops", "2e-3", "--format", "json")[1])
    slow = json.loads(plan(capsys, config_file, "--tflops", "1e-3", "--format", "json")[1])
    assert slow["outcome"]["makespan"] == pytest.approx(2 * quick["outcome"]["makespan"])
    linked = ["--tflops", "1e-3", "--link", "0.001", "--format", "json"]
    linked_time = json.loads(plan(capsys, config_file, *linked)[1])["outcome"]["makespan"]
    assert linked_time > slow["outcome"]["makespan"]


def test_the_vocabulary_is_that_of_the_tokenizer_file_or_a_stated_assumption(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(FastTokenizer.train(["some text " * 50], 270).to_json())
    size = load_tokenizer(path).vocab_size
    auto = ["--set", "model.vocab_size=auto", "--format", "json"]
    given = json.loads(plan(capsys, config_file, "--set", f"data.tokenizer={path}", *auto)[1])
    same = ["--set", f"model.vocab_size={size}", "--format", "json"]
    assert given["model"] == json.loads(plan(capsys, config_file, *same)[1])["model"]
    assert not any("vocabulary" in note for note in given["notes"])
    for words, text in (
        ([], "50,257 tokens is assumed: GPT-2's, because model.vocab_size is 'auto'"),
        (["--set", "data.tokenizer=no/t.json"], "the tokenizer no/t.json does not exist here"),
        (["--set", f"data.corpus={path}"], "8,192 tokens is assumed: data.vocab_size; the token"),
    ):
        notes = json.loads(plan(capsys, config_file, *words, *auto)[1])["notes"]
        assert any(text in note for note in notes), notes


def test_the_number_of_nccl_communicators_is_shown_for_pipelines_on_gpus(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pipeline 2 with one stage per rank: the world, one axis, and a connection in each way."""
    _, out, _ = plan(capsys, config_file)
    assert "\nNCCL        at most 4 communicators per rank\n" in out
    for words, count in (
        (["--world", "4"], 5),
        (["--set", "pipeline.schedule=interleaved"], 8),
        (["--set", "mesh.device=cpu"], None),
        (["--set", "mesh.pipeline=1", "--world", "2"], None),
    ):
        report = json.loads(plan(capsys, config_file, *words, "--format", "json")[1])
        assert report["nccl_communicators"] == count
    assert "NCCL" not in plan(capsys, config_file, "--set", "mesh.device=cpu")[1]


def test_the_time_of_the_whole_run_is_given_in_tokens_and_days(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["--set", "training.train_steps=1000000"]
    assert "run 1.02 B tokens in 1,000,000 steps; give --tflops or --costs to see the days" in (
        " ".join(plan(capsys, config_file, *steps)[1].split())
    )
    # 9 times .3 s a step, see above, so 31.25 days.
    timed = " ".join(plan(capsys, config_file, *steps, "--costs", ".1,.1,.1")[1].split())
    assert re.search(r"run 1.02 B tokens in 1,000,000 steps: 31.[23] days at 379 tokens/s", timed)
    words = [*steps, "--device-memory", "H100-80GB", "--format", "json"]
    report = json.loads(plan(capsys, config_file, *words)[1])
    assert report["tflops"] == pytest.approx(0.4 * 989.4)
    assert report["run_seconds"] == pytest.approx(1e6 * report["outcome"]["makespan"])
    assert any("times assume 395.8 TFLOP/s, 40% of the bf16 peak" in n for n in report["notes"])


def test_faster_changes_that_use_free_memory_are_listed(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels of this model are short: a larger micro-batch has fewer of them."""
    words = ["--set", "model.recompute=full", "--device-memory", "H100-80GB"]
    report = json.loads(plan(capsys, config_file, *words, "--format", "json")[1])
    changes = {entry["change"]: entry for entry in report["changes"]}
    gains = [entry["gain"] for entry in report["changes"]]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 0.02
    assert "--set model.recompute=none" in changes
    micro = next(change for change in changes if change.startswith("--set train_micro_batch"))
    # The row is the prediction of the changed config.
    options = micro.split()
    changed = json.loads(plan(capsys, config_file, *words, *options, "--format", "json")[1])
    before, after = report["outcome"]["makespan"], changed["outcome"]["makespan"]
    assert changes[micro]["gain"] == pytest.approx(1 - after / before)
    assert changes[micro]["peak"] == changed["outcome"]["peak_bytes"]
    assert changed["batch"]["train_batch_size"] == report["batch"]["train_batch_size"]
    out = plan(capsys, config_file, *words)[1]
    table = out[out.index("\nfaster changes that fit\n") :].splitlines()[3:]
    (row,) = [line for line in table if line.startswith("  --set model.recompute=none ")]
    assert re.search(r" -[\d.]+%  [\d.]+ MB$", row)


def test_a_change_of_recomputation_removes_the_choice_of_blocks(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "model.recompute=full", "--set", "model.recompute_method=block"]
    peak = json.loads(plan(capsys, config_file, *words, "--format", "json")[1])["outcome"]
    limit = f"{peak['peak_bytes'] - 1}B"
    code, out, _ = plan(capsys, config_file, *words, "--device-memory", limit)
    assert code == 1
    assert "recompute full, block 1" in " ".join(out.split())
    change = "--set model.recompute=full --set model.recompute_method=null"
    words += ["--device-memory", limit, "--format", "json"]
    changes = [
        entry["change"] for entry in json.loads(plan(capsys, config_file, *words)[1])["changes"]
    ]
    assert f"{change} --set model.recompute_num_layers=1" in changes


def test_no_change_is_listed_that_does_not_fit_or_that_costs_do_not_cover(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = ["--set", "model.recompute=full", "--format", "json"]
    peak = json.loads(plan(capsys, config_file, *full)[1])["outcome"]["peak_bytes"]
    tight = json.loads(plan(capsys, config_file, *full, "--device-memory", f"{peak}B")[1])
    assert all(entry["peak"] <= peak for entry in tight["changes"])
    # The seconds of --costs are for one micro-batch size and one kind of recomputation.
    words = ["--costs", ".1,.1,.1", "--device-memory", "80GB"]
    costs = json.loads(plan(capsys, config_file, *full, *words)[1])
    changes = [entry["change"] for entry in costs["changes"]]
    assert changes
    assert all(change.startswith("--set pipeline.schedule=") for change in changes)


def test_if_the_times_of_ranks_are_given_changes_that_reduce_memory_have_no_time(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--costs", ".1,.1,.1", "--device-memory", "100KB"]
    out = plan(capsys, config_file, *words)[1]
    table = out[out.index("changes that reduce memory") :].splitlines()[1:]
    assert table[0].split() == ["change", "peak"]
    assert all("%" not in line for line in table)


def test_numbers_in_tables_have_three_significant_digits(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = plan(capsys, config_file, "--compare", "1f1b,zb-h1", "--costs", ".1,.11,.12")[1]
    numbers = re.findall(r"(?<=  )(\d+\.\d+)(?=%|  | [GMK]B| m?s|$)", out, re.MULTILINE)
    assert len(numbers) > 20
    assert all(len(n.replace(".", "").lstrip("0")) == 3 for n in numbers), numbers


def test_the_line_of_the_cut_names_a_faster_one_and_the_key(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "model.vocab_size=4096", "--set", "pipeline.partition=uniform"]
    words += ["--set", "train_batch_size=4"]
    out = " ".join(plan(capsys, config_file, *words)[1].split())
    assert "cut [0, 4, 8]: the slowest rank takes " in out
    assert "set pipeline.partition to 'auto', or to [0, " in out
    assert "% shorter, peak memory " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world", "3"], "error: 3 ranks were started, and one copy of the model takes"),
        (["--device-memory", "lots"], "error: the device memory 'lots' is not a size: write 80GB"),
        (["--device-memory", "0GB"], "error: the device memory '0GB' is not a size"),
        (["--compare", "zbv"], "error: unknown schedule 'zbv'; did you mean 'zb-v'?"),
        (
            ["--set", "model=null"],
            "error: the config has no section 'model', which describes the model",
        ),
        (
            ["--set", "mesh.pipeline=9"],
            "error: mesh.pipeline (9) is more than the number of layers",
        ),
        (["--model", "nothing"], "error: --model 'nothing' names no function: write --model"),
        (["--model", "no_module:build"], "error: --model 'no_module:build' failed: ModuleNotF"),
        (
            ["--model", f"{__name__}:not_a_model"],
            f"error: --model '{__name__}:not_a_model' returned int: write --model MODULE:FUNCTION",
        ),
        (["--model", f"{__name__}:without_loss"], "error: the model has no loss_fn"),
        (
            ["--model", f"{__name__}:reading_values"],
            "error: layers.1 (ReadsValue) failed: RuntimeError: ",
        ),
    ],
)
def test_an_error_is_one_line_on_stderr_and_exit_code_2(
    words: list[str], message: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = plan(capsys, config_file, *words)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_missing_config_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = plan(capsys, "nowhere.json")
    assert code == 2
    assert err == "error: cannot read the config 'nowhere.json': No such file or directory\n"


@pytest.mark.parametrize("words", [["--costs", "1,2"], ["--tflops", "-1"], ["--link", "fast"]])
def test_invalid_numbers_are_rejected(
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


class ReadsValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.detach().sum().item()


def reading_values(micro_batch_size: int) -> tuple[PipelineModule, Any, Any]:
    _, inputs, labels = own_model(micro_batch_size)
    net = PipelineModule([nn.Linear(16, 4), ReadsValue()], loss_fn=nn.functional.cross_entropy)
    return net, inputs, labels


def test_a_users_model_is_planned_by_its_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({k: SMALL[k] for k in SMALL if k not in ("model", "bf16")}))
    words = ["--model", f"{__name__}:own_model", "--format", "json"]
    words += ["--set", "pipeline.partition=[0,1,3]"]
    code, out, _ = plan(capsys, path, *words)
    report = json.loads(out)
    assert code == 0
    assert report["model"] == {"parameters": 1348, "layers": 3, "precision": "fp32"}
    assert [stage["layers"] for stage in report["stages"]] == ["Linear", "tanh, Linear"]
    # The second stage keeps the output of tanh [2, 64], and the log softmax [2, 4] of the loss with
    # a weight [1]; fp32.
    assert report["stages"][1]["held"] == 4 * (128 + 8 + 1)


def test_a_plan_can_be_written_as_an_html_page(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    words = ["--format", "html", "--output", str(page), "--compare", "zb-h1"]
    code, _, _ = plan(capsys, config_file, *words)
    text = page.read_text(encoding="utf-8")
    assert code == 0
    assert re.search(
        "<p>Needs [\\d.]+ MB of device memory</p><dl>.*<dt>best alternative</dt>", text
    )
    assert [words for words in ("1f1b", "zb-h1", "zb-v") if f"<td>{words}</td>" in text] == [
        "1f1b",
        "zb-h1",
    ]
    assert "memory per rank, MB" in text
    assert "train_batch_size 16 = 2 (micro) x 8 (gas) x 1 (data)" in text


@pytest.mark.parametrize(
    ("size", "verdict"),
    some_cases(
        [
            ("1GB", r"good\"><p>✓ Fits: [\d.]+ MB of 1.00 GB<"),
            ("1MB", r"bad\"><p>✗ Does not fit: needs"),
        ],
        0,
    ),
)
def test_the_page_says_first_whether_the_run_fits_and_compares_all_schedules(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str, verdict: str
) -> None:
    page = tmp_path / "plan.html"
    words = ["--format", "html", "--output", str(page), "--device-memory", size]
    code, _, _ = plan(capsys, config_file, *words)
    text = page.read_text(encoding="utf-8")
    assert code == (size == "1MB")
    found = re.search(verdict, text)
    assert found is not None
    assert found.start() < text.index("memory of each pipeline rank") < text.index("<main")
    assert all(f"<td>{name}</td>" in text for name in SCHEDULES)
    written = re.search(r'application/json">(.*?)</script>', text, re.DOTALL)
    assert written is not None
    panels = json.loads(written[1])["panels"]
    assert panels[0]["mark"].startswith("in the config")
    assert panels[1]["mark"] == "best alternative"
    assert len(panels) == 2, "without --compare only these two are drawn"


def test_the_page_shows_what_the_best_alternative_takes_and_the_changes_that_make_the_run_fit(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`sequential` fits where 1F1B does not, but takes more than 1.5 times as long."""
    _, out, _ = plan(capsys, config_file, "--format", "json", "--compare", "1f1b,sequential")
    peaks = {entry["schedule"]: entry["peak_bytes"] for entry in json.loads(out)["compare"]}
    size = f"{(peaks['1f1b'] + peaks['sequential']) / 2e3:.0f}KB"
    page = tmp_path / "plan.html"
    words = ["--format", "html", "--output", page, "--device-memory", size]
    assert plan(capsys, config_file, *words, "--compare", "1f1b,sequential")[0] == 1
    text = page.read_text(encoding="utf-8")
    best = r"<dt>best alternative</dt><dd>sequential: [^<]* \(\+[5-9]\d\.\d%\), [^<]*, fits</dd>"
    assert re.search(best, text)
    assert "<h3>changes that make it fit</h3>" in text
    assert re.search(r"<td>--set model.recompute=full</td><td class=n>\+[\d.]+%</td>", text)


def test_the_steps_of_a_growing_batch_count_by_their_samples(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--costs", ".1,.1,.1", "--format", "json"]
    full = json.loads(plan(capsys, config_file, *words)[1])["batch"]["train_batch_size"]
    ramp = [full // 2, full // 2, full]
    words += ["--set", f"training.rampup_batch_size={ramp}", "--set", "training.train_steps=null"]
    words += ["--set", f"training.train_samples={4 * full + 1}"]
    report = json.loads(plan(capsys, config_file, *words)[1])
    # Two half steps, and three full ones.
    assert report["train_steps"] == 5
    assert report["run_seconds"] == pytest.approx(4 * report["outcome"]["makespan"])
