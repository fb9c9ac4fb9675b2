"""`flops_profiler`: FLOPs and times of the modules in one step, and their table."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import pipemega
from pipemega import LayerSpec, PipelineModule, TiedLayerSpec
from pipemega.engine.engine import Engine
from pipemega.errors import PipelineError
from pipemega.monitor import gpt_flops_per_token
from pipemega.profiling.flops_profile import FlopsProfile
from pipemega.profiling.module_profiler import ModuleCost
from tests.ranks.training_runs import LENGTH, MICRO, MODEL, VOCAB, build, data, settings
from tests.unit.compat import test_data_parallel_loop as loops


def gpt(steps: int = 2, model: dict[str, Any] | None = None, **section: Any) -> Engine:
    """Return the engine of a GPT after some steps of 4 micro-batches."""
    profiler = {"enabled": True, **section}
    engine = build(settings(model=model or {}, flops_profiler=profiler, train_batch_size=4 * MICRO))
    for step in range(steps):
        engine.train_batch(data(engine, step))
    return engine


def profile_of(engine: Engine) -> FlopsProfile:
    assert engine.steps.profiler is not None
    profile = engine.steps.profiler.profile
    assert profile is not None
    return profile


def costs_of(engine: Engine) -> dict[str, ModuleCost]:
    return {cost.name: cost for _, cost in profile_of(engine).modules}


def expected_flops() -> float:
    """Return the FLOPs of the forward of a micro-batch, by the formula of the log."""
    sizes = {key: MODEL[key] for key in ("num_layers", "hidden_size", "num_attention_heads")}
    per_token = gpt_flops_per_token(
        **sizes,  # type: ignore[arg-type]
        ffn_hidden_size=24,
        seq_length=LENGTH,
        # The head also computes the padding.
        vocab_size=-(-VOCAB // 8) * 8,
    )
    return per_token / 3 * MICRO * LENGTH


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_flops_of_a_gpt_are_those_of_the_formula_whatever_is_recomputed(
    recompute: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = gpt(model={"recompute": recompute})
    assert profile_of(engine).forward_flops == expected_flops()
    costs = costs_of(engine)
    tokens = MICRO * LENGTH
    assert costs["layers.2.mlp.up"].flops == 2 * tokens * 16 * 24
    assert costs["layers.2.mlp"].flops == 4 * tokens * 16 * 24
    assert costs["layers.2.attention.qkv"].parameters == 3 * 16 * 16 + 3 * 16
    assert costs["layers.0"].parameters == VOCAB * 16
    for name in ("layers.2", "layers.2.attention", "layers.2.attention.qkv", "layers.6"):
        assert costs[name].seconds > 0, name
    # No other step has a table.
    assert capsys.readouterr().out.count("flops profile of step 1\n") == 1
    engine.train_batch(data(engine, 2))
    assert "flops profile" not in capsys.readouterr().out


def test_a_profiled_step_trains_with_the_same_bits_and_leaves_no_hooks() -> None:
    plain, profiled = gpt(enabled=False), gpt(profile_step=2)
    for name, value in plain.parameter_state().items():
        assert torch.equal(profiled.parameter_state()[name], value), name
    assert not profiled.timers.enabled
    for module in profiled.module.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(stage.observer is None for stage in profiled.steps.model.stages.values())


def test_the_times_are_those_of_the_step_after_the_flops_were_counted() -> None:
    first, second = profile_of(gpt(profile_step=1)), profile_of(gpt(profile_step=2))
    assert (first.step, second.step) == (1, 2)
    assert first.forward_flops == second.forward_flops
    assert not first.ranks[0].only_timed
    assert second.ranks[0].only_timed
    (rank,) = second.ranks
    assert {"forward", "backward", "optimizer"} <= set(rank.seconds)
    assert rank.seconds["forward"] + rank.seconds["backward"] < rank.step
    # Four micro-batches; the timer also measures the loss.
    assert 4 * second.forward_seconds < rank.seconds["forward"]


def test_the_table_has_the_levels_and_classes_that_the_keys_select(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = gpt(1, module_depth=2, top_modules=2, recompute_fwd_factor=0.5, profile_step=0)
    capsys.readouterr()
    profile, section = profile_of(engine), engine.config.flops_profiler
    text = profile.text(section)
    assert "mesh        pipeline 1 x data 1 x tensor 1; 4 micro-batches of 2 samples\n" in text
    assert "(2 + recompute_fwd_factor 0.5) x forward" in text
    assert "for the speed of the others set flops_profiler.profile_step to 2 or more" in text
    assert {cost.level for _, cost in profile.modules} == {1, 2}
    assert re.search(r"\n1 +parameters  Block 5.88 K, TokenEmbedding 800\n", text)
    assert re.search(r"\n2 +parameters  Attention 3.26 K, MLP 2.42 K\n", text)
    assert re.search(r"\n    attention +Attention +0 +1.09 K +15.9% +36.9 KFLOP +17.3%  ", text)
    assert "qkv" not in text
    assert re.search(r"\n  layers.6 +VocabParallelHead .* in the loss\n", text + "\n")
    assert re.search(r"\n  layers.2 +Block .* .FLOP/s\n", text)
    short = profile.text(section.model_copy(update={"detailed": False, "top_modules": 0}))
    assert "module" not in short
    assert "Block" not in short


def test_the_table_goes_into_a_file_or_to_the_output_if_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "new" / "profile.txt"
    engine = gpt(1, output_file=str(path))
    assert path.read_text() == profile_of(engine).text(engine.config.flops_profiler) + "\n"
    assert "flops profile" not in capsys.readouterr().out
    with caplog.at_level(logging.WARNING):
        gpt(1, output_file=str(path / "below"))
    assert "flops_profiler.output_file cannot be written" in caplog.text
    assert "flops profile of step 1\n" in capsys.readouterr().out


def test_a_layer_that_runs_by_a_function_is_counted_too() -> None:
    """A tied head calls a function of the weight, and not the module."""
    net = PipelineModule(
        [
            TiedLayerSpec("words", nn.Embedding, 10, 4),
            LayerSpec(nn.Sequential, nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])[0]),
            lambda x: x @ torch.ones(4, 4),
            TiedLayerSpec("words", nn.Embedding, 10, 4, forward_fn=lambda e, x: x @ e.weight.T),
        ],
        loss_fn=lambda y, labels: nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten()),
    )
    engine, *_ = pipemega.initialize(
        net,
        {
            "train_batch_size": 2,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "flops_profiler": {"enabled": True},
        },
    )
    ids = torch.zeros(1, 3, dtype=torch.int64)
    engine.train_batch(iter([(ids, ids)] * 2))
    costs = costs_of(engine)
    assert costs["layers.1"].flops == 2 * (2 * 3 * 4 * 4)
    assert costs["layers.1.1"].flops == 2 * 3 * 4 * 4
    assert costs["layers.2"].flops == 2 * 3 * 4 * 4
    assert costs["layers.3"].flops == 2 * 3 * 4 * 10
    assert profile_of(engine).parameters == 40 + 2 * 20
    assert "Sequential" in profile_of(engine).text(engine.config.flops_profiler)


class Container(nn.Module):
    """Calls the modules of a list, and fails once if it is told to."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = linear(x)
        if self.fails:
            raise ValueError("as wanted")
        return x


def test_a_list_of_modules_has_the_sum_of_its_modules_in_the_users_own_loop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = {"enabled": True, "profile_step": 2}
    loop = loops.build(Container().double(), gradient_accumulation_steps=2, flops_profiler=section)
    for number in range(6):
        with torch.no_grad():
            loop(loops.data(number))  # an evaluation is not profiled
        loop.backward(loops.loss_of(loop(loops.data(number))))
        loop.step()
    costs = costs_of(loop.pipemega_engine)
    assert list(costs) == ["", "linears", "linears.0", "linears.1"]
    assert costs[""].flops == costs["linears"].flops == 2 * (2 * 2 * 3 * 3)
    assert costs["linears"].seconds == sum(costs[f"linears.{n}"].seconds for n in (0, 1))
    text = capsys.readouterr().out
    assert text.count("flops profile of step 2\n") == 1
    assert re.search(r"\nmodel +Container +0 +24 +100.0% +72.0 FLOP +100.0%  ", text)


@pytest.mark.parametrize("in_a_pipeline", [True, False])
def test_after_an_error_in_a_layer_no_operation_is_counted(in_a_pipeline: bool) -> None:
    module = Container().double()
    module.fails = True
    section = {"enabled": True}
    if in_a_pipeline:
        config = {
            "train_batch_size": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "flops_profiler": section,
        }
        net = PipelineModule([module], loss_fn=lambda y, _: y.sum())
        engine, *_ = pipemega.initialize(net, config)
        with pytest.raises(PipelineError, match="as wanted"):
            engine.train_batch(iter([(loops.data(0), loops.data(0))]))
    else:
        loop = loops.build(module, flops_profiler=section)
        with pytest.raises(Exception, match="as wanted"):
            loop(loops.data(0))
    assert _get_current_dispatch_mode_stack() == []
