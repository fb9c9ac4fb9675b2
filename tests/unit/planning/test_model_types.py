"""Plans, checks and FLOPs of Hugging Face models and of models that users register."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import nn

from pipemega import LayerSpec, ModelContext, PipelineModule
from pipemega.cli import main
from pipemega.config import load, model_registry
from pipemega.config.model_registry import register_model
from pipemega.data.tokens.tokenizers import FastTokenizer
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError
from pipemega.layer_costs.counted_model import flops_per_token, forward_flops
from pipemega.layer_costs.stage_costs import Sample
from pipemega.models.build_model import build_from, sample_from
from pipemega.monitor import gpt_flops_per_token
from pipemega.pipeline.schedules import SCHEDULES
from pipemega.planning.estimate import Request, estimate
from pipemega.planning.meta_model import MetaModel, model_and_sample
from tests.sampling import some

BASE: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "mesh": {"pipeline": 2, "device": "cpu"},
}
GPT = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16,
    "vocab_size": 64, "make_vocab_size_divisible_by": 1,
}  # fmt: skip


class Images(BaseModel):
    """A classifier of images; without tokens."""

    width: int = 8
    fails: bool = False
    result: str = ""

    def build(self, context: ModelContext) -> Any:
        if self.fails:
            raise KeyError("width")
        if self.result:
            return self.result
        assert (context.tensor, context.data, context.micro_batch_size) == (1, 1, 2)
        assert context.dtype == torch.float32
        head = nn.Linear(4 * self.width, 10)  # built: on the meta device in a plan
        layers = [LayerSpec(nn.Conv2d, 3, self.width, 4, 4), nn.ReLU(), nn.Flatten(), head]
        return PipelineModule(layers, nn.functional.cross_entropy)

    def sample(self, context: ModelContext) -> tuple[Any, Any]:
        size = context.micro_batch_size
        return torch.zeros(size, 3, 8, 8), torch.zeros(size, dtype=torch.int64)


class Words(BaseModel):
    """A model of tokens, with a vocabulary from the data."""

    seq_length: int = 16

    def build(self, context: ModelContext) -> PipelineModule:
        assert context.vocab_size is not None
        size = context.vocab_size
        layers = [LayerSpec(nn.Embedding, size, 8), LayerSpec(nn.Linear, 8, size)]
        return PipelineModule(layers, lambda y, labels: y.sum() + 0 * labels.sum())


class Bare(BaseModel):
    """Says nothing of its inputs."""

    def build(self, context: ModelContext) -> PipelineModule:
        return PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], nn.functional.mse_loss)


@pytest.fixture(autouse=True)
def _types(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the types that other tests have registered.
    own = {name: model_registry._TYPES[name] for name in ("gpt", "hf")}
    monkeypatch.setattr(model_registry, "_TYPES", own)
    for kind in (Images, Words, Bare):
        register_model(kind.__name__.lower())(kind)


def config_of(type: str, **keys: Any) -> Any:
    return load({**BASE, "model": {"type": type, **keys}})


def test_a_registered_model_is_planned_with_its_own_sample() -> None:
    report = estimate(Request(config_of("images")))
    assert report.parameters == 3 * 8 * 16 + 8 + 32 * 10 + 10
    assert report.num_layers == 4
    assert report.tokens is None
    assert report.prediction.layout.input_bytes == 2 * 3 * 8 * 8 * 4


def test_a_registered_model_of_tokens_gets_the_vocabulary_of_the_data() -> None:
    config = config_of("words").model_copy(
        update={"data": load({**BASE, "data": {"mock": True, "vocab_size": 300}}).data}
    )
    report = estimate(Request(config))
    assert report.parameters == 300 * 8 + 8 * 300 + 300
    assert report.tokens == 16 * 16


def test_a_model_without_sample_and_seq_length_cannot_be_planned() -> None:
    with pytest.raises(ConfigError, match=r"model.type 'bare' has no method sample\(context\)"):
        estimate(Request(config_of("bare")))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fails": True}, "model.type 'images': build() failed: KeyError: 'width'"),
        ({"result": "net"}, "model.type 'images': build() returned str, and must return a"),
    ],
)
def test_errors_of_build_name_the_type(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        estimate(Request(config_of("images", **keys)))
    assert str(refusal.value).startswith(message)


def test_check_builds_a_registered_model_to_count_its_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BASE, "model": {"type": "images"}}))
    assert main(["check", str(path)]) == 0
    assert main(["check", str(path), "--set", "mesh.pipeline=8"]) == 1
    assert "has 8 stages, and the model has 4 layers" in capsys.readouterr().err
    assert main(["check", str(path), "--set", "model.fails=true"]) == 1
    assert "build() failed: KeyError" in capsys.readouterr().err


def test_counted_flops_are_those_of_the_formula_for_the_gpt() -> None:
    context = ModelContext.of(load({**BASE, "model": GPT}), Topology(2, 1, 1))
    net, (inputs, _) = build_from(context).on_meta(), sample_from(context)
    sizes = {key: GPT[key] for key in GPT if key != "make_vocab_size_divisible_by"}
    formula = gpt_flops_per_token(ffn_hidden_size=128, **sizes)
    assert flops_per_token(context) == formula
    assert 3 * forward_flops(net, inputs) / (2 * 16) == formula
    assert flops_per_token(ModelContext.of(config_of("images"), Topology(2, 1, 1))) == 0.0


def test_split_backward_of_tied_layers_is_planned_without_an_optimizer() -> None:
    mesh = {"pipeline": 2, "tensor": 2, "device": "cpu"}
    tree = {**BASE, "mesh": mesh, "pipeline": {"schedule": "zb-v"}, "model": GPT}
    # Both copies of the embedding, which are on one rank, have a gradient.
    without, with_one = (
        estimate(Request(load({**tree, **keys}))).prediction.memory[0].footprint
        for keys in ({}, {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
    )
    assert without.gradients == with_one.gradients > without.weights + 64 * 32 * 4 // 2


# Hugging Face models


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need it")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def hf_config(folder: Path, **changes: Any) -> Any:
    return load(
        {**BASE, **changes, "model": {"type": "hf", "path": str(folder), "pretrained": False}}
    )


def test_a_hugging_face_model_is_planned_like_the_same_gpt(hf_folder: Path) -> None:
    """The GPT in Llama style has the same FLOPs, messages and number of parameters."""
    gpt = {
        **GPT, "num_layers": 6, "ffn_hidden_size": 64, "num_query_groups": 2, "vocab_size": 96,
        "seq_length": 64, "position_embedding_type": "rope", "normalization": "RMSNorm",
        "swiglu": True, "add_bias_linear": False, "attention_dropout": 0, "hidden_dropout": 0,
        "untie_embeddings_and_output_weights": True,
    }  # fmt: skip
    config = hf_config(hf_folder)
    ours, theirs = estimate(Request(load({**BASE, "model": gpt}))), estimate(Request(config))
    assert theirs.parameters == ours.parameters
    assert theirs.tokens == ours.tokens == 16 * 64
    assert sum(s.flops for s in theirs.stages) == sum(s.flops for s in ours.stages)
    assert theirs.prediction.layout.costs[0].message == ours.prediction.layout.costs[0].message
    topology = Topology(2, 1, 1)
    assert flops_per_token(ModelContext.of(config, topology)) == pytest.approx(
        flops_per_token(ModelContext.of(load({**BASE, "model": gpt}), topology))
    )


def test_equal_layers_of_a_hugging_face_model_are_measured_once(hf_folder: Path) -> None:
    config, topology = hf_config(hf_folder), Topology(2, 1, 1)
    net, sample = model_and_sample(config, topology)
    model = MetaModel(config, net, sample, topology, "cpu")
    # Eight stages of one layer each: the first and the last differ from the blocks between.
    assert model.even_bounds(8) == tuple(range(9))
    model.layout_of(tuple(range(9)), (0, 1, 0, 1, 0, 1, 0, 1), splits_backward=True)
    assert len(model._counts._costs) == 3
    # The layers are these stages, so the times of the layers need no further run.
    assert len(model.layer_costs.forward) == 8
    assert len(model._counts._costs) == 3


class SameShapes(nn.Module):
    """Its layers have messages of one shape, and different costs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv1d(8, 8, k, padding=k // 2) for k in (1, 5, 3))
        self.d, self.e = nn.Conv1d(8, 8, 1), nn.AvgPool1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.e(self.d(self.c(self.b(self.a(x)))))


@pytest.mark.parametrize("sequence", [None, ["a", "b", "c", "d", "e"]])
def test_layers_of_a_factory_that_get_equal_messages_are_counted_one_by_one(
    sequence: list[str] | None,
) -> None:
    """All layers with inputs of one shape had the costs and the output of the first of them."""
    config, images = load(BASE), torch.zeros(2, 8, 16)

    def costs_of(module: Any) -> Any:
        net = PipelineModule.from_module(module, exec_seq=sequence, loss_fn=nn.functional.l1_loss)
        labels = torch.zeros(2, 8, 4)
        sample = Sample.like(images, labels)
        return MetaModel(config, net.on_meta(), sample, Topology(2, 1, 1), "cpu").layer_costs

    found = costs_of(SameShapes)
    assert found == costs_of(SameShapes())
    one, five, three, *_ = found.forward
    assert one < three < five


def test_check_reads_the_folder_of_a_hugging_face_model(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    tokenizer = FastTokenizer.train(["some text"], 300)
    (hf_folder / "tokenizer.json").write_text(tokenizer.to_json())
    path.write_text(json.dumps({**BASE, "model": {"type": "hf", "path": str(hf_folder)}}))

    def check(*changes: str) -> tuple[int, str]:
        code = main(["check", str(path), *(w for change in changes for w in ("--set", change))])
        out, err = capsys.readouterr()
        return code, out + err

    code, text = check()
    assert code == 1
    assert f"model.path: {hf_folder} has no safetensors, and model.pretrained is true" in text
    code, text = check("model.pretrained=false")  # with the tokenizer of the folder
    assert code == 1
    assert "model.vocab_size is 96, but the tokenizer" in text
    (hf_folder / "tokenizer.json").write_text(FastTokenizer.train([], 257).to_json())
    (hf_folder / "config.json").write_text(
        (hf_folder / "config.json").read_text().replace('"vocab_size": 96', '"vocab_size": 257')
    )
    code, text = check("model.pretrained=false")
    assert code == 0, text
    assert "model.seq_length              64" in text
    assert f"data.tokenizer is {hf_folder}: the tokenizer of the model" in text
    code, text = check("model.pretrained=false", "mesh.pipeline=16")
    assert (code, "has 16 stages, and the model has 8 layers" in text) == (1, True)
    code, text = check("model.path=nothing")
    assert (code, "model.path: the folder nothing does not exist" in text) == (1, True)
    code, text = check("model.pretrained=false", "model.seq_length=65")
    assert code == 0
    assert "model.seq_length is 65, and config.json of the model has max_position_emb" in text
    (hf_folder / "config.json").unlink()
    assert "has no config.json, which describes the model" in check()[1]


def test_a_sequence_longer_than_the_table_of_positions_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need it")
    transformers.GPT2Config(
        n_positions=64, n_embd=8, n_layer=2, n_head=2, architectures=["GPT2LMHeadModel"]
    ).save_pretrained(tmp_path)
    model = {"type": "hf", "path": str(tmp_path), "pretrained": False, "seq_length": 64}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**BASE, "model": model}))
    assert main(["check", str(path)]) == 0
    assert main(["check", str(path), "--set", "model.seq_length=65"]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "model.seq_length is 65, but GPT2LMHeadModel has a table of 64 positions" in text
    assert "(transformer.wpe): set model.seq_length to at most 64" in text


def plan_family(name: str, folder: Path) -> None:
    """Plan a family on 2 pipeline x 2 tensor ranks with every kind of backward."""
    from tests.ranks.hf import tiny_models

    tiny_models.CONFIGS[name]().save_pretrained(folder)
    task = dict.fromkeys(("t5", "mt5", "whisper"), "seq2seq") | {"vit": "image-classification"}
    task |= dict.fromkeys(("bert", "roberta"), "masked-lm")
    model = {
        "type": "hf", "path": str(folder), "pretrained": False,
        "task": task.get(name.split("-")[0], "causal-lm"),
    }  # fmt: skip
    if name != "vit":
        model["seq_length"] = 16
    mesh = {"pipeline": 2, "tensor": 2, "device": "cpu"}
    for schedule in ("1f1b", "zb-v"):
        config = load({**BASE, "mesh": mesh, "pipeline": {"schedule": schedule}, "model": model})
        report = estimate(Request(config))
        assert report.parameters > 10_000
        # A stage may have an embedding only.
        assert all(stage.time > 0 for stage in report.stages)
    assert schedule in SCHEDULES


@pytest.mark.parametrize("name", some(["gpt2", "t5"], 0))
@pytest.mark.filterwarnings("ignore")
def test_families_of_hugging_face_are_planned(name: str, tmp_path: Path) -> None:
    """gpt2 reads values to choose its mask; t5 has two stacks."""
    pytest.importorskip("transformers", reason="Hugging Face models need it")
    plan_family(name, tmp_path)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_every_family_of_hugging_face_is_planned(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face models need it")
    from tests.ranks.hf import tiny_models

    for name in tiny_models.CONFIGS:
        plan_family(name, tmp_path / name)
