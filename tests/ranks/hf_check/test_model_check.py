"""`pipemega hf check` on gloo ranks: equal models, and faults that it must find."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="needs transformers")

from pipemega import cli
from pipemega.cli import hf as cli_hf
from pipemega.hf import segments
from pipemega.hf_check import model_check
from pipemega.hf_check.check_report import report
from pipemega.hf_check.model_check import check_model
from pipemega.hf_check.split_run import SplitSettings, split_gradients

# Tensor ranks alone: each test starts two ranks.
TENSOR_2 = SplitSettings(pipeline=1, tensor=2)


def qwen3(**changes):
    from transformers import Qwen3Config

    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"], num_hidden_layers=3, hidden_size=256, **changes
    )


def without_entry(entry, split, batches):
    """Compute the gradients with a plan in which `entry` is missing."""
    whole = segments.styles_of
    segments.styles_of = lambda config: {k: v for k, v in whole(config).items() if k != entry}
    try:
        return split_gradients(split, batches)
    finally:
        segments.styles_of = whole


def test_the_check_finds_the_parameter_whose_entry_is_missing_in_the_plan(pool):
    """The loss of Qwen3 is right without the entry, and the gradient of q_norm is wrong."""

    def with_fault(world_size, function, *args):
        assert function is split_gradients
        return pool.run(world_size, without_entry, "self_attn.q_norm", *args)

    result = check_model(qwen3(), TENSOR_2, with_fault)
    assert not result.is_equal
    plain = result.comparisons[0]
    assert plain.loss_difference < 1e-14
    wrong = {d.name for c in result.comparisons for d in c.unequal}
    assert wrong == {f"model.layers.{i}.self_attn.q_norm.weight" for i in range(2)}
    *_, verdict = report(result, TENSOR_2)
    assert verdict.startswith("DIFFERENT: 2 gradients are not those of transformers' model")
    assert "self_attn.q_norm.weight" in verdict


def test_the_command_prints_the_differences_and_returns_0_if_all_are_equal(
    pool, tmp_path, monkeypatch, capsys
):
    qwen3().save_pretrained(tmp_path)
    monkeypatch.setattr(cli_hf, "prepare_ranks", lambda: None)
    monkeypatch.setattr(model_check, "launch_ranks", pool.run)
    arguments = ["hf", "check", str(tmp_path), "--tensor", "2", "--pipeline", "2"]
    assert cli.main([*arguments, "--schedule", "zb-v"]) == 0
    text, bars = capsys.readouterr()
    assert not bars
    assert "vocab_size 151936 -> 61" in text
    for kind in ("plain", "padded", "packed"):
        assert f"\n{kind}" in text
    assert text.rstrip().endswith("the loss and every gradient are those of transformers' model")


def test_the_command_returns_1_and_names_the_parameter_as_json(pool, tmp_path, monkeypatch, capsys):
    def with_fault(world_size, function, *args):
        return pool.run(world_size, without_entry, "self_attn.q_norm", *args)

    qwen3().save_pretrained(tmp_path)
    monkeypatch.setattr(cli_hf, "prepare_ranks", lambda: None)
    monkeypatch.setattr(model_check, "launch_ranks", with_fault)
    arguments = ["hf", "check", str(tmp_path / "config.json"), "--tensor", "2", "--pipeline", "1"]
    assert cli.main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"]
    assert "model.layers.1.self_attn.q_norm.weight" in found["batches"][0]["unequal"]


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_classifiers_are_checked_without_the_dropout_of_their_heads(pool, task):
    """Token classifiers have dropout 0.1 although the config of a Llama has no key for it."""
    from transformers import LlamaConfig

    split = SplitSettings(pipeline=2, task=task)
    result = check_model(LlamaConfig(pad_token_id=0, num_labels=3), split, pool.run)
    assert result.is_equal
    assert [c.kind for c in result.comparisons] == ["plain", "padded"]


def test_experts_on_several_ranks_are_checked(pool):
    """The small model keeps a number of experts that the ranks divide: 12, not 4."""
    from transformers import Qwen3MoeConfig

    split = SplitSettings(pipeline=1, expert=3)
    result = check_model(Qwen3MoeConfig(num_experts=12), split, pool.run)
    assert result.is_equal
    assert {c.key: c.new for c in result.changes if "experts" in c.key} == {
        "num_experts_per_tok": 2
    }
    *_, verdict = report(result, split)
    assert verdict.startswith("equal: on pipeline 1 x tensor 1 x expert 3")


def test_a_size_that_tensor_ranks_do_not_divide_is_refused_before_ranks_start():
    def never(*_):
        raise AssertionError("ranks were started")

    with pytest.raises(model_check.ConfigError, match=r"\(1537\).*multiple of the tensor ranks"):
        check_model(qwen3(intermediate_size=1537), TENSOR_2, never)


@pytest.mark.sweep
def test_the_command_checks_a_llama_of_7_billion_parameters(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "pipemega", "hf", "check", str(tmp_path), "--tensor", "2"]
    done = subprocess.run(
        [*command, "--schedule", "zb-v"], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM, 6.74 billion parameters" in done.stdout
    assert "equal: on pipeline 2 x tensor 2, schedule zb-v" in done.stdout
