"""A script's `load_checkpoint` reads the folders that DeepSpeed wrote, and continues in them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipemega.compat.deepspeed as deepspeed
from pipemega.checkpoint.deepspeed.weights_loading import ImportOptions, import_deepspeed
from tests.unit.checkpoint.deepspeed_files import write_module, write_pipeline

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
}


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Words(nn.Module):
    """The tied weight is a property, as in Megatron-DeepSpeed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)

    @property
    def weight(self) -> nn.Parameter:
        return self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids)


class Net(nn.Module):
    """The head shares the weight of the embedding, so its state_dict has the weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids)) * self.scale


def head(layer: Words, x: Tensor) -> Tensor:
    return x @ layer.weight.T


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def pipeline_engine() -> Any:
    tied: dict[str, Any] = {"tied_weight_attr": "weight"}
    layers = [
        lambda ids: ids,
        deepspeed.pipe.TiedLayerSpec("embed", Words, **tied),
        deepspeed.pipe.LayerSpec(nn.Linear, 4, 4),
        deepspeed.pipe.TiedLayerSpec("embed", Words, forward_fn=head, **tied),
    ]
    net = deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=loss)
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)[0]


def test_a_pipeline_script_continues_from_a_folder_of_deepspeed(tmp_path: Path):
    words, linear = torch.randn(9, 4), {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    write_pipeline(tmp_path, {1: {"words.weight": words}, 2: linear}, state={"epoch": 3})
    engine = pipeline_engine()
    path, client = engine.load_checkpoint(str(tmp_path))
    assert (path, client) == (str(tmp_path / "global_step7"), {"epoch": 3})
    ids = torch.arange(6).view(2, 3)
    found = engine.eval_batch(iter([(ids, ids)]))
    hidden = nn.functional.linear(words[ids], linear["weight"], linear["bias"])
    assert torch.allclose(found, loss(hidden @ words.T, ids), atol=1e-6)
    # The script saves into the same folder; from now on it loads its own checkpoints.
    engine.train_batch(iter([(ids, ids)]))
    engine.save_checkpoint(str(tmp_path), client_state={"epoch": 4})
    path, client = pipeline_engine().load_checkpoint(str(tmp_path))
    assert (path, client) == (str(tmp_path / "global_step1"), {"epoch": 4})


def test_a_script_that_sets_no_seed_continues_in_another_process(tmp_path: Path):
    with torch.random.fork_rng():
        # torch draws another seed in each process.
        for seed in (1, 2):
            torch.manual_seed(seed)
            engine = pipeline_engine()
            path, _ = engine.load_checkpoint(str(tmp_path))
            assert (path is None) == (seed == 1)
            engine.save_checkpoint(str(tmp_path))


@pytest.mark.parametrize("way", ["directly", "imported"])
def test_a_shared_weight_may_be_stored_under_both_of_its_names(tmp_path: Path, way: str):
    weight = torch.randn(9, 4)
    module = {"embedding.weight": weight, "head.weight": weight.clone()}
    write_module(tmp_path / "ds", [module | {"scale": torch.tensor([2.0])}])
    engine = deepspeed.initialize(model=Net(), config=CONFIG)[0]
    if way == "directly":
        engine.load_checkpoint(str(tmp_path / "ds"))
    else:
        import_deepspeed(str(tmp_path / "ds"), str(tmp_path / "out"), ImportOptions())
        engine.load_checkpoint(str(tmp_path / "out"), load_module_only=True)
    ids = torch.arange(3).view(1, 3)
    assert torch.allclose(engine(ids), weight[ids] @ weight.T * 2.0)
