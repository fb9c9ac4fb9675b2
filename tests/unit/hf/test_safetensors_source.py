"""SafetensorsSource: every shard of every tensor, and folders that cannot be loaded."""

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers
from safetensors.torch import load_file, save_file

from pipemega.errors import CheckpointError
from pipemega.hf.weights.safetensors_files import mark_transposed
from pipemega.hf.weights.safetensors_source import SafetensorsSource
from pipemega.parameters import Shard, attach_shard
from tests.ranks.hf import tiny_models

IN_CI = ("llama-tied", "mixtral", "t5")


def saved(model, folder, **options):
    """Save a model of transformers without its progress bar; return the source of the folder."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    return source_of(model, folder)


def source_of(model, folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    return SafetensorsSource(folder, config, type(model).__name__)


def shards_of(shape):
    """Replicated, the last half, and two blocks of which this rank has the second half."""
    yield Shard(shape)
    for dim, size in enumerate(shape):
        if size % 4 == 0:
            yield Shard(shape, dim=dim, ranges=((size // 2, size),))
            quarter = size // 4
            yield Shard(shape, dim=dim, ranges=((quarter, 2 * quarter), (3 * quarter, size)))


def local_of(shard, dtype):
    shape = list(shard.shape)
    if shard.dim is not None:
        shape[shard.dim] //= 2
        # With padding.
        shape[0] += shard.dim == 0
    local = torch.full(shape, 7, dtype=dtype)
    return attach_shard(nn.Parameter(local, requires_grad=False), shard)


def check_all_shards(source, state):
    for name, whole in state.items():
        for shard in shards_of(tuple(whole.shape)):
            local, expected = local_of(shard, whole.dtype), local_of(shard, whole.dtype)
            shard.copy_from_full(whole, expected)
            source.load(name, local)
            assert torch.equal(local, expected), (name, shard)


@pytest.mark.parametrize(
    "family",
    [
        family if family in IN_CI else pytest.param(family, marks=pytest.mark.sweep)
        for family in tiny_models.CONFIGS
    ],
)
def test_a_rank_reads_exactly_its_shard_of_each_tensor(family, tmp_path):
    model = tiny_models.whole_model(tiny_models.config_of(family))
    source = saved(model, tmp_path, max_shard_size="60KB")
    check_all_shards(source, model.state_dict())


def test_a_tensor_of_a_fused_stored_tensor_is_made_by_the_operations_of_transformers(tmp_path):
    # q, k and v are one tensor in the files and three in the model.
    config = transformers.NomicBertConfig(
        vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.NomicBertForMaskedLM(config)
    source = saved(model, tmp_path)
    assert not {name for name in model.state_dict() if "q_proj" in name} & set(source.files.entries)
    check_all_shards(source, model.state_dict())


def test_transposed_parameters_are_read_by_columns(tmp_path):
    model = tiny_models.whole_model(tiny_models.config_of("gpt2"))
    source = saved(model, tmp_path)
    name = "transformer.h.1.mlp.c_fc.weight"
    whole = model.state_dict()[name].T
    for shard in shards_of(tuple(whole.shape)):
        local, expected = local_of(shard, whole.dtype), local_of(shard, whole.dtype)
        mark_transposed(local)
        shard.copy_from_full(whole, expected)
        source.load(name, local)
        assert torch.equal(local, expected), shard


def test_a_rank_of_two_reads_half_of_the_experts_and_casts_them(tmp_path):
    model = tiny_models.whole_model(tiny_models.config_of("mixtral"))
    source = saved(model, tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = model.state_dict()[name]  # [4, 96, 32]
    shard = Shard(tuple(whole.shape), dim=1, ranges=((24, 48), (72, 96)))
    local = attach_shard(nn.Parameter(torch.empty(4, 48, 32, dtype=torch.bfloat16)), shard)
    source.load(name, local)
    assert source.files.bytes_read == whole.nbytes // 2
    expected = torch.cat([whole[:, 24:48], whole[:, 72:96]], dim=1).bfloat16()
    assert torch.equal(local, expected)


@pytest.fixture
def llama(tmp_path):
    """A folder with a tiny Llama in several files, and its model."""
    model = tiny_models.whole_model(tiny_models.config_of("llama"))
    saved(model, tmp_path, max_shard_size="60KB")
    return model, tmp_path


def rewrite(folder, change):
    """Rewrite the folder as one file after `change(tensors)`."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_shard_is_named(llama):
    model, folder = llama
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2 of the 3 files .* missing: model-00002-of-00003"):
        source_of(model, folder)


def test_a_damaged_shard_is_named(llama):
    model, folder = llama
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors is damaged"):
        source_of(model, folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "index.json is damaged"),
        ('{"weight_map": 3}', "index.json is damaged"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "'../x.safetensors', which is not in"),
    ],
)
def test_a_damaged_index_is_named(llama, text, message):
    model, folder = llama
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        source_of(model, folder)


def test_an_index_that_lists_a_tensor_in_the_wrong_file_is_refused(llama):
    model, folder = llama
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lists lm_head.weight in it, and it has no such"):
        source_of(model, folder)


def test_names_that_differ_are_listed_from_both_sides(llama):
    model, folder = llama

    def change(tensors):
        tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")

    rewrite(folder, change)
    expected = (
        r"files lack model.layers.0.mlp.up_proj.weight; no parameter fits "
        r"model.layers.0.mlp.gate.weight of the files"
    )
    with pytest.raises(CheckpointError, match=expected):
        source_of(model, folder)


def test_a_key_too_many_is_refused(llama):
    model, folder = llama
    rewrite(folder, lambda tensors: tensors.update({"model.layers.4.extra": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"no parameter fits model.layers.4.extra"):
        source_of(model, folder)


def test_frequencies_in_folders_of_older_versions_are_not_used(llama):
    model, folder = llama
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({key: torch.zeros(4)}))
    source_of(model, folder)


def test_other_shapes_are_listed_with_both_shapes(llama):
    model, folder = llama
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(40, 32)}))
    expected = r"lm_head.weight is \[40, 32\] in the files and \[37, 32\] in the model"
    with pytest.raises(CheckpointError, match=expected):
        source_of(model, folder)


def test_a_missing_expert_is_counted(tmp_path):
    model = tiny_models.whole_model(tiny_models.config_of("mixtral"))
    saved(model, tmp_path)
    expert = "model.layers.0.block_sparse_moe.experts.3"
    rewrite(tmp_path, lambda tensors: [tensors.pop(f"{expert}.w{i}.weight") for i in (1, 2, 3)])
    with pytest.raises(CheckpointError, match=r"experts.* has 4 experts .* files have 3 tensors"):
        source_of(model, tmp_path)


def test_the_dtype_of_a_quantized_tensor_is_refused(llama):
    model, folder = llama
    quantized = torch.zeros(37, 32).to(torch.float8_e4m3fn)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": quantized}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight in .* has the dtype F8_E4M3.*BF16"):
        source_of(model, folder)


def test_an_unknown_dtype_in_a_header_is_refused(tmp_path):
    model = tiny_models.whole_model(tiny_models.config_of("llama"))
    saved(model, tmp_path)
    header = json.dumps({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged .*F3"):
        source_of(model, tmp_path)


def test_pickled_weights_are_refused_with_the_conversion(llama):
    model, folder = llama
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin.*save_pretrained\(NEW_FOLDER\)"):
        source_of(model, folder)


def test_a_folder_without_weights_is_refused(llama):
    model, folder = llama
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor model.safe.*index"):
        source_of(model, folder)


def test_different_values_of_a_tied_tensor_are_refused(tmp_path):
    model = tiny_models.whole_model(tiny_models.config_of("llama-tied"))
    saved(model, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(37, 32)}))
    source = source_of(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight and lm_head.weight.*tie"):
        source.load("lm_head.weight", torch.zeros(37, 32))


def test_equal_values_of_a_tied_tensor_are_loaded(tmp_path):
    model = tiny_models.whole_model(tiny_models.config_of("llama-tied"))
    saved(model, tmp_path)
    words = model.state_dict()["model.embed_tokens.weight"]
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": words.clone()}))
    tensor = torch.zeros(37, 32)
    source_of(model, tmp_path).load("lm_head.weight", tensor)
    assert torch.equal(tensor, words)


def test_the_head_of_another_class_is_new_and_its_other_tensors_are_not_used(tmp_path, caplog):
    config = tiny_models.config_of("bert")
    pretraining = transformers.BertForPreTraining(config)
    saved(pretraining, tmp_path)
    with caplog.at_level("INFO", logger="pipemega"):
        source_of(transformers.BertForMaskedLM(config), tmp_path)
    assert "does not use bert.pooler.dense.bias" in caplog.text
    saved(transformers.BertModel(config), tmp_path / "base")
    source = source_of(transformers.BertForMaskedLM(config), tmp_path / "base")
    assert not source.has("cls.predictions.transform.dense.weight")
    assert source.has("bert.encoder.layer.0.output.dense.weight")
    assert "contains a BertModel, without cls.predictions." in caplog.text
