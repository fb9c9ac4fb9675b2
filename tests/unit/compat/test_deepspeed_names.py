"""The modules and names of DeepSpeed: each exists, or the error says what to use instead."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pipemega.compat.deepspeed as deepspeed
from pipemega.compat.deepspeed.virtual_modules import (
    ADVICE,
    MODULES,
    REFUSED,
    attribute,
    install_as_deepspeed,
)

# What scripts of 21 repositories use, as they write it.
IMPORTS = """
import pipemega.compat.deepspeed as deepspeed
import pipemega.compat.deepspeed.comm as dist
from pipemega.compat.deepspeed import PipelineModule, comm, get_accelerator, init_distributed
from pipemega.compat.deepspeed.accelerator import get_accelerator
from pipemega.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from pipemega.compat.deepspeed.moe.layer import MoE
from pipemega.compat.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from pipemega.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from pipemega.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from pipemega.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from pipemega.compat.deepspeed.runtime.dataloader import RepeatingLoader
from pipemega.compat.deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from pipemega.compat.deepspeed.runtime.pipe.engine import PipelineEngine
from pipemega.compat.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from pipemega.compat.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology, PipeModelDataParallelTopology, PipelineParallelGrid, ProcessTopology,
)
from pipemega.compat.deepspeed.runtime.utils import see_memory_usage, set_random_seed
from pipemega.compat.deepspeed.utils import RepeatingLoader, log_dist, logger, set_z3_leaf_modules
from pipemega.compat.deepspeed.utils.logging import logger

names = [
    deepspeed.add_config_arguments, deepspeed.initialize, deepspeed.init_distributed,
    deepspeed.checkpointing.configure, deepspeed.checkpointing.checkpoint,
    deepspeed.checkpointing.is_configured, deepspeed.checkpointing.get_cuda_rng_tracker,
    deepspeed.checkpointing.model_parallel_cuda_manual_seed,
    deepspeed.runtime.utils.set_random_seed, deepspeed.utils.RepeatingLoader,
    deepspeed.PipelineEngine, deepspeed.comm.get_rank, dist.all_reduce, deepspeed.__version__,
    deepspeed.version, deepspeed.utils.set_log_level_from_string,
    deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.NOT_AVAILABLE,
]
assert deepspeed.pipe.PipelineModule is PipelineModule is deepspeed.PipelineModule
"""


def test_the_names_that_scripts_use_can_be_imported() -> None:
    found: dict[str, object] = {}
    exec(IMPORTS, found)
    assert len(found["names"]) == 17  # type: ignore[arg-type]


def test_a_script_that_imports_deepspeed_gets_the_same_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    install_as_deepspeed()
    exec(IMPORTS.replace("pipemega.compat.deepspeed", "deepspeed"), {})
    pipe = importlib.import_module("deepspeed.pipe")
    assert pipe is sys.modules["pipemega.compat.deepspeed.pipe"]
    with pytest.raises(
        ImportError, match=r"has no 'moe\.experts': mixture-of-experts layers do not"
    ):
        importlib.import_module("deepspeed.moe.experts")


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in MODULES.items() for name in names]
)
def test_every_name_of_the_table_exists(path: str, name: str) -> None:
    assert attribute(path, name) is not None


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "from pipemega.compat.deepspeed.moe.layer import Experts",
            "mixture-of-experts layers do not",
        ),
        (
            "from pipemega.compat.deepspeed.runtime.pipe.schedule import TrainSchedule",
            "set pipeline.schedule in",
        ),
        (
            "import pipemega.compat.deepspeed.runtime.zero.offload_config",
            "set zero_optimization.offload_optimizer.device to 'cpu'",
        ),
        ("import pipemega.compat.deepspeed.ops.sparse_attention", "attention is dense"),
        (
            "from pipemega.compat.deepspeed.ops.adam import OnebitAdam",
            "there are FusedAdam and DeepSpeedCPUAdam",
        ),
        ("from pipemega.compat.deepspeed.pipe import PipelineModul", "did you mean"),
    ],
)
def test_an_import_that_does_not_exist_says_what_to_use(statement: str, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        exec(statement, {})


def test_a_star_import_of_schedules_that_are_not_used_is_no_error() -> None:
    """Scripts copy this line from DeepSpeed's examples."""
    exec("from pipemega.compat.deepspeed.runtime.pipe.schedule import *", {})


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            # As a torch with CUDA says it where there is no GPU.
            "raise RuntimeError('Found no NVIDIA driver on your system.')",
            "replace torch.cuda.set_device(i) by get_accelerator().set_device(i)",
        ),
        pytest.param(
            "import importlib.metadata as m\n"
            "raise m.PackageNotFoundError(\"The 'deepspeed>=0.9.3' distribution was not found\")",
            "use pipemega.Trainer and from_pretrained, or deepspeed.initialize in a loop",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_an_error_that_only_the_shim_causes_says_what_to_do(
    tmp_path: Path, script: str, message: str
) -> None:
    (tmp_path / "run.py").write_text(script)
    command = [sys.executable, "-m", "pipemega.compat.deepspeed", str(tmp_path / "run.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


def test_an_attribute_that_does_not_exist_says_what_to_use() -> None:
    assert not hasattr(deepspeed, "init_inference")
    with pytest.raises(AttributeError, match="`pipemega generate` generates text"):
        deepspeed.init_inference  # noqa: B018
    with pytest.raises(AttributeError, match=r"docs/coming_from\.md"):
        deepspeed.runtime.nothing_like_this  # noqa: B018


def test_advice_is_for_names_that_do_not_exist() -> None:
    known = {f"{path}.{name}".lstrip(".") for path, names in MODULES.items() for name in names}
    assert not {*ADVICE, *REFUSED} & (known | {*MODULES})


def test_log_summary_says_where_the_table_of_comms_logger_is(caplog):
    deepspeed.comm.log_summary(show_straggler=True)
    assert "at the end of step comms_logger.profile_step" in caplog.text


def test_the_accelerator_has_the_calls_of_scripts_without_a_gpu() -> None:
    accelerator = deepspeed.get_accelerator()
    if accelerator.device_type == "cuda":
        pytest.skip("for a CPU")
    assert accelerator.LongTensor([1, 2]).dtype == torch.int64
    assert accelerator.FloatTensor([1]).dtype == torch.float32
    state = accelerator.get_rng_state()
    first = torch.rand(3)
    accelerator.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    assert accelerator.default_generator(0) is torch.default_generator
    assert accelerator.memory_reserved() == accelerator.max_memory_reserved(0) == 0
    assert accelerator.memory_stats() == {}
    assert accelerator.reset_peak_memory_stats() is None
    assert 0 < accelerator.available_memory() <= accelerator.total_memory()
    assert accelerator.lazy_call(lambda: 3) == 3
    with accelerator.stream(accelerator.current_stream()):
        assert accelerator.pin_memory(first) is first
    with pytest.raises(AttributeError, match="there are no CUDA extensions"):
        accelerator.create_op_builder("FusedAdamBuilder")
    with pytest.raises(AttributeError, match="no 'no_such' on a cpu: use torch's call"):
        accelerator.no_such  # noqa: B018
