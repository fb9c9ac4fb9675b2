"""`add_arguments`: the arguments that every training script takes."""

import argparse

import pytest

import pipemega


def _parser() -> argparse.ArgumentParser:
    return pipemega.add_arguments(argparse.ArgumentParser(prog="train.py"))


def test_a_script_gets_the_config_and_the_changed_keys_beside_its_own_arguments() -> None:
    parser = _parser()
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args(
        ["--config", "ds.json", "--set", "mesh.pipeline=2", "--epochs", "3", "--set", "seed=7"]
    )
    assert (args.config, args.set, args.epochs) == ("ds.json", ["mesh.pipeline=2", "seed=7"], 3)


def test_without_set_no_key_changes() -> None:
    assert _parser().parse_args(["--config", "ds.json"]).set == []


@pytest.mark.parametrize("spelling", ["--local-rank=3", "--local_rank=3"])
def test_the_local_rank_of_a_launcher_is_accepted(spelling: str) -> None:
    assert _parser().parse_args(["--config", "ds.json", spelling]).config == "ds.json"


def test_help_says_that_the_local_rank_is_ignored() -> None:
    text = " ".join(_parser().format_help().split())
    assert "ignored, LOCAL_RANK is used" in text
    assert "--set KEY=VALUE change one key of the config" in text


def test_a_missing_config_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args([])
    assert "the following arguments are required: --config" in capsys.readouterr().err


def test_a_script_may_have_a_config_of_its_own() -> None:
    own = {"train_batch_size": 4}
    parser = pipemega.add_arguments(argparse.ArgumentParser(prog="train.py"), own)
    args = parser.parse_args(["--set", "seed=7"])
    assert pipemega.load_config(args.config, args.set).seed == 7
    assert pipemega.load_config(args.config, args.set).train_batch_size == 4
    assert parser.parse_args(["--config", "ds.json"]).config == "ds.json"
    assert "default: the config in the script" in " ".join(parser.format_help().split())
