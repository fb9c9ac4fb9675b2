"""The section `compile`: DeepSpeed's keys and torch's modes."""

import pytest

from pipemega.config import Config, load
from pipemega.errors import ConfigError

BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}


def loaded(section: object) -> Config:
    return load({**BATCH, "compile": section})


def test_layers_are_compiled_by_default_on_gpus() -> None:
    for config in (load(BATCH), loaded({})):
        assert config.compile.applies("cuda")
        assert not config.compile.applies("cpu")
    for section in (None, False):
        assert not loaded(section).compile.applies("cuda")
    assert loaded(True).compile.applies("cpu")


@pytest.mark.parametrize(
    ("mode", "runs_as"),
    [("reduce-overhead", "default"), ("max-autotune", "max-autotune-no-cudagraphs")],
)
def test_a_mode_with_cuda_graphs_runs_without_them_and_a_warning_says_so(
    mode: str, runs_as: str
) -> None:
    config = loaded({"enabled": True, "mode": mode})
    assert config.compile.mode_without_graphs == runs_as
    (warning,) = config.warnings
    assert f"compile.mode {mode!r} runs as {runs_as!r}: a CUDA graph has one memory" in warning


def test_the_arguments_in_kwargs_are_keys_and_a_key_of_its_own_wins() -> None:
    arguments = {"mode": "max-autotune-no-cudagraphs", "dynamic": False, "backend": "eager"}
    section = loaded({"enabled": True, "backend": "inductor", "kwargs": arguments}).compile
    assert (section.mode, section.dynamic) == (arguments["mode"], False)
    assert section.backend == "inductor"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"enabled": True, "kwargs": {"fullgraph": True}},
            "compile.kwargs has 'fullgraph', which pipemega does not pass to torch.compile: "
            "remove it; backend, mode, dynamic are allowed",
        ),
        ({"deepcompile": True}, "set compile.enabled instead, which compiles each layer"),
        ({"mode": "fast"}, 'compile.mode must be "default" or "reduce-overhead" or'),
        ({"enabld": True}, "unknown key 'compile.enabld'; did you mean 'enabled'?"),
    ],
)
def test_what_does_not_exist_is_refused_by_the_name_of_its_key(
    section: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        loaded(section)
    assert message in str(refusal.value)


def test_an_option_of_deepcompile_is_ignored_with_a_warning() -> None:
    config = loaded({"enabled": True, "free_activation": True})
    assert config.warnings == ("compile.free_activation is ignored: DeepCompile is not used",)
