"""`pipemega checkpoint export`: the tensors of any model on any mesh, unsharded, in one file."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipemega import PipelineModule, initialize
from pipemega.cli import main
from tests.ranks.checkpoint.checkpoint_runs import small_config, small_net
from tests.ranks.checkpoint.reshard_runs import build
from tests.ranks.checkpoint.test_reshard import config_of
from tests.ranks.pool import RankPool
from tests.ranks.traced_models import SmallResNet

safetensors = pytest.importorskip("safetensors.torch", reason="reads the exported files")


def engine_of(model: str, name: str) -> Any:
    if model == "gpt":
        return build(config_of(name))
    torch.manual_seed(5)
    config = small_config("AdamW", {"lr": 0.01}, mesh=config_of(name)["mesh"])
    if model == "layers":
        return initialize(small_net(statistics=True), config)[0]
    sample = torch.zeros(1, 3, 8, 8)
    net = PipelineModule.from_module(SmallResNet(), sample, loss_fn=torch.nn.MSELoss())
    return initialize(net, config)[0]


def save(model: str, name: str, folder: str) -> None:
    engine_of(model, name).save_checkpoint(folder)


def unsplit(model: str) -> dict[str, Tensor]:
    engine = engine_of(model, "alone")
    return {n: t.numpy() for n, t in (engine.parameter_state() | engine.buffer_state()).items()}


@pytest.mark.parametrize(
    ("model", "mesh", "ranks"),
    [
        ("gpt", "tp2 pp2", 4),
        ("layers", "dp2 pp2", 4),
        ("module", "pp2", 2),
    ],
)
def test_the_exported_tensors_are_those_of_the_unsplit_model(
    pool: RankPool, tmp_path: Path, model: str, mesh: str, ranks: int
) -> None:
    pool.run(ranks, save, model, mesh, str(tmp_path / "run"))
    (whole,) = pool.run(1, unsplit, model)
    out = tmp_path / "out.safetensors"
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(out)]) == 0
    exported = safetensors.load_file(out)
    assert exported.keys() == whole.keys()
    for name, values in whole.items():
        assert exported[name].dtype == torch.from_numpy(values).dtype
        assert torch.equal(exported[name], torch.from_numpy(values)), name


def test_an_existing_file_is_refused_and_a_folder_is_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = initialize(small_net(statistics=True), small_config("SGD", {"lr": 0.01}))[0]
    engine.save_checkpoint(tmp_path)
    out = tmp_path / "new" / "out.safetensors"
    command = ["checkpoint", "export", str(tmp_path), str(out)]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{out}: 12 tensors, 0.0 MB\n"
    assert list(out.parent.iterdir()) == [out]
    assert main(command) == 2
    assert f"{out} exists: name a new file, or delete it" in capsys.readouterr().err


def test_the_export_needs_no_safetensors(tmp_path: Path) -> None:
    """Only readers of the file need the package, which is an extra of pipemega."""
    engine = initialize(small_net(statistics=True), small_config("SGD", {"lr": 0.01}))[0]
    engine.save_checkpoint(tmp_path)
    out = tmp_path / "out.safetensors"
    code = (
        "import sys; sys.modules['safetensors'] = sys.modules['transformers'] = None\n"
        "from pipemega.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "checkpoint", "export", str(tmp_path), str(out)]
    subprocess.run(command, check=True, timeout=120)
    assert len(safetensors.load_file(out)) == 12
