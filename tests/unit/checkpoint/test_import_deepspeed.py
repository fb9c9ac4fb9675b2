"""Weights of DeepSpeed's checkpoints load, are imported, or are refused with a reason."""

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.checkpoint.deepspeed.deepspeed_folder import NameRules
from pipemega.checkpoint.deepspeed.deepspeed_weights import ReadOptions, read_deepspeed
from pipemega.checkpoint.deepspeed.weights_loading import ImportOptions, import_deepspeed
from pipemega.checkpoint.save_load import open_path
from pipemega.cli import main
from pipemega.errors import CheckpointError
from tests.unit.checkpoint.deepspeed_files import (
    write_masters,
    write_module,
    write_pipeline,
    write_universal,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "deepspeed_0.19.8"
WIDTH, WORDS = 4, 6
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
}


class Words(nn.Module):
    """An embedding with more than the tied weight, as Megatron-DeepSpeed's."""

    def __init__(self, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Embedding(3, width)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        return (self.words(ids) + self.positions(ids * 0)) * self.scale


def head(layer: Words, x: Tensor) -> Tensor:
    return x @ layer.words.weight.T


def model(width: int = WIDTH) -> PipelineModule:
    tied: dict[str, Any] = {"tied_weight_attr": "words.weight"}
    return PipelineModule(
        [
            TiedLayerSpec("embed", Words, WORDS, width, **tied),
            LayerSpec(nn.Linear, width, width),
            torch.tanh,
            LayerSpec(nn.LayerNorm, width),
            TiedLayerSpec("embed", Words, WORDS, width, forward_fn=head, **tied),
        ],
        nn.functional.cross_entropy,
    )


def engine_of(net: PipelineModule | None = None, **config: Any) -> Any:
    return initialize(net or model(), CONFIG | config)[0]


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def layers() -> dict[int, dict[str, Tensor]]:
    """What DeepSpeed writes for `model`: the tied layer is stored once."""
    words = {"words.weight": random(WORDS, WIDTH), "positions.weight": random(3, WIDTH)}
    return {
        0: words | {"scale": torch.tensor([2.0])},
        1: {"weight": random(WIDTH, WIDTH), "bias": random(WIDTH)},
        3: {"weight": random(WIDTH), "bias": random(WIDTH)},
    }


def logical(stored: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"layers.{p}.{n}": t for p, found in stored.items() for n, t in found.items()}


def assert_loaded(engine: Any, stored: dict[int, dict[str, Tensor]]) -> None:
    """Compare all parameters and buffers, also those of the second tied layer."""
    expected = logical(stored) | logical({4: dict(stored[0])})
    buffers = {n: b for s in engine.module for n, b in s.named_buffers()}
    found = {**engine.parameter_state(), **buffers}
    assert len(found) >= 8
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def imported(path: Path, out: Path, **options: Any) -> dict[str, Tensor]:
    reader = open_path(import_deepspeed(str(path), str(out), ImportOptions(**options)).path)
    return {key: reader.tensors.read_full(key) for key in reader.tensors.tensors}


def refused(path: Path, out: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        import_deepspeed(str(path), str(out), ImportOptions(**options))
    assert not out.exists() or not any(out.iterdir())
    return str(caught.value)


# Objects of other classes


RAN: list[str] = []


class Foreign:
    """An object of the user's client_state; unpickling it must not run anything."""

    def __reduce__(self) -> Any:
        return _run, ("__reduce__",)


class Plain:
    def __init__(self) -> None:
        self.value = 3


def _run(text: str) -> None:
    RAN.append(text)


def test_objects_of_the_client_state_are_left_out_by_name_and_run_no_code(tmp_path, caplog):
    stored = layers()
    state = {"buffer_names": ["tied_modules.embed.scale"], "epoch": 3}
    foreign = {"object": Foreign(), "plain": [Plain()]}
    write_pipeline(tmp_path, stored, state=state | foreign)
    engine = engine_of()
    path, client = engine.load_checkpoint(str(tmp_path), load_module_only=True)
    assert (path, client) == (tmp_path / "global_step7", {"epoch": 3})
    assert RAN == []
    assert_loaded(engine, stored)
    assert f"{__name__}._run" in caplog.text
    assert f"{__name__}.Plain" in caplog.text


def test_a_file_that_names_a_function_of_the_operating_system_is_refused(tmp_path):
    class Command:
        def __reduce__(self) -> Any:
            import os

            return os.system, ("true",)

    write_pipeline(tmp_path, layers(), state={"command": Command()})
    message = refused(tmp_path, tmp_path / "out")
    assert "mp_rank_00_model_states.pt cannot be loaded as data (weights_only)" in message
    assert "posix" in message


# Loading and importing


def test_a_pipeline_checkpoint_loads_directly_and_warns_of_what_is_not_loaded(tmp_path, caplog):
    stored = layers()
    write_pipeline(tmp_path, stored)
    engine = engine_of()
    engine.load_checkpoint(str(tmp_path))
    assert_loaded(engine, stored)
    assert engine.global_steps == 0
    assert "the optimizer state, the loss scale, the LR schedule, the step (7)" in caplog.text


def test_a_checkpoint_of_deepspeed_has_no_schedule_to_continue(tmp_path):
    stored = layers()
    write_pipeline(tmp_path, stored)
    load = {"load": str(tmp_path), "use_checkpoint_opt_param_scheduler": True}
    assert_loaded(engine_of(checkpoint=load), stored)


def test_an_imported_checkpoint_loads_as_weights_alone(tmp_path):
    stored = layers()
    write_pipeline(tmp_path / "ds", stored, state={"buffer_names": ["tied_modules.embed.scale"]})
    found = imported(tmp_path / "ds", tmp_path / "out")
    assert found.keys() == {
        f"{'buffers' if 'scale' in name else 'parameters'}/{name}" for name in logical(stored)
    }
    engine = engine_of(bf16={"enabled": True})
    with pytest.raises(CheckpointError, match=r"contains only weights \(DeepSpeed 0.19.8\): set"):
        engine.load_checkpoint(str(tmp_path / "out"))
    engine.load_checkpoint(str(tmp_path / "out"), load_module_only=True)
    # The fp32 values are in the master weights.
    for name, tensor in engine.parameter_state().items():
        where = name.replace("layers.4", "layers.0")
        assert torch.equal(tensor.float(), found[f"parameters/{where}"]), name


def test_copies_of_a_tied_weight_in_several_layer_files_are_loaded_once(tmp_path):
    """Tied layers without a forward_fn are stored by each of their stages."""
    stored = layers()
    write_pipeline(tmp_path / "ds", {**stored, 4: stored[0]})
    engine = engine_of()
    engine.load_checkpoint(str(tmp_path / "ds"))
    assert_loaded(engine, stored)
    import_deepspeed(str(tmp_path / "ds"), str(tmp_path / "out"), ImportOptions())
    other = engine_of()
    # The files do not say that "scale" is a buffer.
    other.load_checkpoint(str(tmp_path / "out"), load_module_only=True)
    assert_loaded(other, stored)


def test_another_model_is_refused_by_name_with_both_shapes(tmp_path):
    write_pipeline(tmp_path, layers())
    with pytest.raises(CheckpointError) as caught:
        engine_of(model(width=8)).load_checkpoint(str(tmp_path))
    assert "parameters/layers.0.words.weight is [6, 8] in this run and [6, 4] in the" in str(
        caught.value
    )


def test_a_missing_layer_file_is_an_error_that_names_the_parameter(tmp_path):
    stored = layers()
    del stored[3]
    write_pipeline(tmp_path, stored)
    with pytest.raises(CheckpointError, match=r"parameters/layers.3.weight is \[4\] in this run"):
        engine_of().load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("flat", [False, True], ids=["stage 1", "stage 3"])
def test_a_universal_checkpoint_loads_by_the_keys_of_tied_layers(tmp_path, flat):
    stored = layers()
    names = {f"{p}.{n}": t for p, found in stored.items() if p for n, t in found.items()}
    names |= {f"tied_modules.embed.{n}": t for n, t in stored[0].items()}
    write_universal(tmp_path / "ds", names, flat=flat)
    engine = engine_of()
    engine.load_checkpoint(str(tmp_path / "ds"))
    assert_loaded(engine, stored)
    if flat:
        message = refused(tmp_path / "ds", tmp_path / "out")
        assert "was converted from ZeRO stage 3 and has no shapes" in message
        return
    message = refused(tmp_path / "ds", tmp_path / "out")
    assert r"--name 'tied_modules\.embed\.(.+)=layers.POSITION.\1'" in message
    rules = NameRules({r"tied_modules\.embed\.(.+)": r"layers.0.\1"})
    found = imported(tmp_path / "ds", tmp_path / "out", names=rules)
    for name, tensor in logical(stored).items():
        assert torch.equal(found[f"parameters/{name}"], tensor)


def test_a_model_without_a_pipeline_loads_by_the_names_of_its_module(tmp_path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.inner(x))

    module = {name: torch.randn_like(tensor) for name, tensor in Net().state_dict().items()}
    nested = {"inner": {"weight": module["inner.weight"], "bias": module["inner.bias"]}}
    norms = {k: v for k, v in module.items() if k.startswith("norm")}
    write_module(tmp_path / "ds", [{**nested, **norms}])
    net = PipelineModule.from_module(Net(), torch.zeros(1, WIDTH), loss_fn=nn.functional.mse_loss)
    engine = engine_of(net)
    engine.load_checkpoint(str(tmp_path / "ds"))
    for name, tensor in engine.parameter_state().items():
        assert torch.equal(tensor, module[net.module_name(name)])
    found = imported(tmp_path / "ds", tmp_path / "out")
    assert found.keys() == {f"parameters/layers.0.{name}" for name in module}


# fp32 master weights


@pytest.mark.parametrize("data_size", [1, 2, 3])
def test_master_weights_of_zero_replace_the_half_precision_weights(tmp_path, data_size):
    stored = layers()
    half = {p: {n: t.bfloat16() for n, t in found.items()} for p, found in stored.items()}
    path = write_pipeline(tmp_path / "ds", half)
    names = {f"{p}.{n}": t for p, found in stored.items() if p for n, t in found.items()}
    tied = {f"tied_modules.embed.{n}": t for n, t in stored[0].items()}
    write_masters(path, names | tied, data_size)
    found = imported(tmp_path / "ds", tmp_path / "out")
    for name, tensor in logical(stored).items():
        assert torch.equal(found[f"parameters/{name}"], tensor), name
    no_masters = ImportOptions(read=ReadOptions(masters=False))
    reader = open_path(
        import_deepspeed(str(tmp_path / "ds"), str(tmp_path / "bf16"), no_masters).path
    )
    assert {dtype for _, dtype in reader.tensors.tensors.values()} == {torch.bfloat16}


def test_master_weights_of_another_checkpoint_are_refused(tmp_path):
    path = write_pipeline(tmp_path / "ds", {1: {"weight": random(4, 4).bfloat16()}})
    write_masters(path, {"1.weight": random(4, 4)}, data_size=2)
    message = refused(tmp_path / "ds", tmp_path / "out")
    assert "the fp32 master weight of '1.weight' in" in message
    assert "does not round to the weight of the model" in message
    assert "--no-masters" in message


# Tensor-parallel shards

GATED = {"1.mlp.dense_h_to_4h.weight": (16, 4, 0), "1.mlp.dense_4h_to_h.weight": (4, 8, 1)}
MEGATRON = {
    "0.word_embeddings.weight": (12, 4, 0),
    "0.position_embeddings.weight": (3, 4, None),
    "1.input_layernorm.weight": (4, None),
    "1.self_attention.query_key_value.weight": (12, 4, 0),
    "1.self_attention.query_key_value.bias": (12, 0),
    "1.self_attention.dense.weight": (4, 4, 1),
    "1.self_attention.dense.bias": (4, None),
    "2.weight": (4, None),
    "3.lm_head.weight": (12, 4, 0),
    **GATED,
}


_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
# What Megatron-DeepSpeed and GPT-NeoX store beside the weights.
MEGATRON_2023 = {"checkpoint_version": 3.0, "args": argparse.Namespace(**_HEADS)}
MEGATRON_2025 = {
    "checkpoint_version": 3.0,
    "args": argparse.Namespace(**_HEADS, ds_sequence_parallel_fpdt=False),
}
MEGATRON_2019 = {"checkpoint_version": 0, "args": argparse.Namespace(**_HEADS)}
NEOX = {"args": {"hidden_size": 4, "make_vocab_size_divisible_by": 128}}


def shards_of(name: str, size: int) -> tuple[Tensor, list[Tensor]]:
    *shape, dim = MEGATRON[name]
    full = random(*shape)
    if dim is None:
        return full, [full] * size
    if name == "1.mlp.dense_h_to_4h.weight":
        gate, up = full.chunk(2)
        pairs = zip(gate.chunk(size), up.chunk(size), strict=True)
        return full, [torch.cat(pair) for pair in pairs]
    return full, list(full.chunk(size, dim))


def test_tensor_parallel_shards_of_megatron_are_joined(tmp_path):
    full, files = {}, {p: [{}, {}] for p in range(4)}
    for name in MEGATRON:
        full[name], shards = shards_of(name, 2)
        for rank, shard in enumerate(shards):
            files[int(name[0])][rank][name[2:]] = shard.clone()
    path = write_pipeline(tmp_path / "ds", files, state=MEGATRON_2023)
    for rank in range(2):
        # Also with masters: each tensor rank has those of its shards.
        masters = {f"{p}.{n}": t for p, shards in files.items() for n, t in shards[rank].items()}
        write_masters(path, masters, data_size=2, rank=rank)
    options = ReadOptions(vocabulary=10)
    found = imported(tmp_path / "ds", tmp_path / "out", read=options)
    for name, tensor in full.items():
        without_padding = tensor[:10] if "word" in name or "head" in name else tensor
        assert torch.equal(found[f"parameters/layers.{name}"], without_padding), name


def test_shards_whose_names_say_nothing_are_refused_until_a_rule_is_given(tmp_path):
    full = random(4, 6)
    write_pipeline(tmp_path / "ds", {1: [{"own.weight": part} for part in full.chunk(2, 1)]})
    message = refused(tmp_path / "ds", tmp_path / "out")
    assert "1.own.weight has 2 shards of shape [4, 3], and its name does not say how" in message
    assert "--shards 'PATTERN=RULE'" in message
    options = ReadOptions(shards={r"\d+\.own\.weight": "columns"})
    found = imported(tmp_path / "ds", tmp_path / "out", read=options)
    assert torch.equal(found["parameters/layers.1.own.weight"], full)


FUSED = "self_attention.query_key_value"
SUB_PARAMETERS = {"patterns": [r"\d+\.self_attention.*"], "partition_dim": 0}


def fused_shards(sizes: tuple[int, ...]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return weight and bias, and 2 shards, each with a half of every part of `sizes` rows."""
    full = {f"{FUSED}.weight": random(sum(sizes), 4), f"{FUSED}.bias": random(sum(sizes))}
    parts = {name: [p.chunk(2) for p in tensor.split(sizes)] for name, tensor in full.items()}
    shards = [{n: torch.cat([p[r] for p in found]) for n, found in parts.items()} for r in (0, 1)]
    return full, shards


@pytest.mark.parametrize(
    ("sizes", "state", "shards"),
    [
        ((12,), MEGATRON_2023, {}),
        ((8,), MEGATRON_2023, {}),
        ((4, 4, 4), MEGATRON_2025, {}),
        ((4, 4, 4), MEGATRON_2019, {}),
        ((12,), NEOX, {}),
        ((4, 2, 2), NEOX, {}),
        ((4, 4, 4), {}, {r".*query_key_value.*": "thirds"}),
        ((4, 2, 2), {}, {r".*query_key_value.*": "blocks"}),
        *(
            ((4, 2, 2), {"universal_checkpoint_info": {"parameter_with_sub_params": [info]}}, {})
            for info in (
                {**SUB_PARAMETERS, "shape": ((4, 2, 2), -1)},
                {**SUB_PARAMETERS, "shape": [[4, 2, 2]]},
            )
        ),
        (
            (4, 4, 4),
            {
                "universal_checkpoint_info": {
                    "parameter_with_sub_params": [{**SUB_PARAMETERS, "shape": (3, -1)}]
                }
            },
            {},
        ),
    ],
)
def test_fused_attention_weights_are_joined_in_the_order_of_their_writer(
    tmp_path, sizes, state, shards
):
    full, parts = fused_shards(sizes)
    write_pipeline(tmp_path / "ds", {1: parts}, state=state)
    found = imported(tmp_path / "ds", tmp_path / "out", read=ReadOptions(shards=shards))
    for name, tensor in full.items():
        assert torch.equal(found[f"parameters/layers.1.{name}"], tensor)


@pytest.mark.parametrize(
    ("sizes", "state"),
    [
        ((12,), {}),
        ((12,), {"checkpoint_version": 3.0}),
        ((12,), {"args": argparse.Namespace(**_HEADS)}),
        ((12,), {"args": argparse.Namespace(lr=1), "checkpoint_version": 3.0}),
        # This version does not train grouped queries.
        ((4, 2, 2), MEGATRON_2025),
    ],
)
def test_fused_attention_weights_of_an_unknown_writer_are_refused_with_the_versions(
    tmp_path, sizes, state
):
    write_pipeline(tmp_path / "ds", {1: fused_shards(sizes)[1]}, state=state)
    message = refused(tmp_path / "ds", tmp_path / "out")
    assert f"1.{FUSED}.weight has 2 shards of shape [{sum(sizes) // 2}, 4]" in message
    assert "the files do not say in which order its rows are" in message
    assert "--shards '.*query_key_value.*=RULE'" in message
    assert "BigScience, Megatron-DeepSpeed until November 2024" in message
    assert "Megatron-DeepSpeed since December 2024" in message
    assert "GPT-NeoX with grouped queries" in message


def test_blocks_that_do_not_fit_the_shape_are_refused_with_the_sizes(tmp_path):
    write_pipeline(tmp_path / "ds", {1: fused_shards((4,))[1]})
    options = ReadOptions(shards={".*query_key_value.*": "blocks"})
    message = refused(tmp_path / "ds", tmp_path / "out", read=options)
    assert "has shards of 2 rows, which do not fit the rule 'blocks': 2 rows of queries" in message


def test_gated_linears_of_gpt_neox_are_joined_by_halves(tmp_path):
    gate, up = random(4, 4), random(4, 4)
    shards = [
        {"mlp.linear1.weight": torch.cat([g, u]), "mlp.linear2.weight": random(4, 2)}
        for g, u in zip(gate.chunk(2), up.chunk(2), strict=True)
    ]
    write_pipeline(tmp_path / "ds", {1: shards})
    found = imported(tmp_path / "ds", tmp_path / "out")
    assert torch.equal(found["parameters/layers.1.mlp.linear1.weight"], torch.cat([gate, up]))


def test_a_linear_named_dense_that_is_not_of_an_attention_needs_a_rule(tmp_path):
    """That of the output head of Megatron's BERT is replicated."""
    dense = random(4, 4)
    write_pipeline(tmp_path / "ds", {1: [{"lm_head.dense.weight": dense}] * 2})
    message = refused(tmp_path / "ds", tmp_path / "out")
    assert "1.lm_head.dense.weight has 2 shards of shape [4, 4], and its name does not" in message


def test_the_patterns_of_universal_checkpoint_info_join_shards(tmp_path):
    full, replicated = random(4, 6), random(4, 6)
    info = {
        "parameter_with_row_parallelism_patterns": [r"\d+.own.weight"],
        "tp_replicated_parameter_patterns": [r"tied_modules.embed.same.weight"],
        "original_vocab_size": 5,
    }
    shards = [
        {"own.weight": own, "same.weight": replicated, "word_embeddings.weight": words}
        for own, words in zip(full.chunk(2, 1), full.chunk(2, 1), strict=True)
    ]
    path = write_pipeline(tmp_path / "ds", {1: shards}, state={"universal_checkpoint_info": info})
    found = {name: tensor.full() for name, tensor in read_deepspeed(path).tensors.items()}
    assert torch.equal(found["1.own.weight"], full)
    assert torch.equal(found["1.same.weight"], replicated)
    assert torch.equal(found["1.word_embeddings.weight"], torch.cat(full.chunk(2, 1))[:5])


def test_replicated_shards_that_differ_are_refused_unless_their_mean_is_wanted(tmp_path):
    shards = [random(4), random(4)]
    write_pipeline(tmp_path / "ds", {1: [{"input_layernorm.weight": part} for part in shards]})
    message = refused(tmp_path / "ds", tmp_path / "out")
    assert "1.input_layernorm.weight [4] is replicated on the tensor ranks" in message
    assert "ranks 0 and 1 differ" in message
    options = ReadOptions(shards={r"1\.input_layernorm\.weight": "mean"})
    found = imported(tmp_path / "ds", tmp_path / "out", read=options)
    mean = (shards[0] + shards[1]) / 2
    assert torch.equal(found["parameters/layers.1.input_layernorm.weight"], mean)


# Refusals


def _without_state(path: Path) -> None:
    (path / "layer_01-model_states.pt").unlink()


def _experts(path: Path) -> None:
    (path / "layer_1_expert_0_mp_rank_00_model_states.pt").touch()


def _stage_3(path: Path) -> None:
    (path / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()


def _damaged(path: Path) -> None:
    file = path / "layer_01-model_states.pt"
    file.write_bytes(file.read_bytes()[:-200])


def _missing_shard(path: Path) -> None:
    shutil.copy(path / "layer_01-model_states.pt", path / "layer_01-model_01-model_states.pt")
    (path / "layer_01-model_states.pt").unlink()


def _missing_rank(path: Path) -> None:
    shutil.copy(path / "mp_rank_00_model_states.pt", path / "mp_rank_02_model_states.pt")


def _no_tensor(path: Path) -> None:
    torch.save({"weight": [1, 2]}, path / "layer_01-model_states.pt")


def _no_dict(path: Path) -> None:
    torch.save(torch.ones(1), path / "layer_01-model_states.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_state, "layer_XX-model_YY-model_states.pt files, which are missing"),
        (_experts, "is a checkpoint of a mixture of experts (layer_1_expert_0"),
        (_stage_3, "was saved with ZeRO stage 3 (zero_pp_rank_0_mp_rank_00_model_states.pt)"),
        (_damaged, "layer_01-model_states.pt cannot be loaded as data"),
        (_missing_shard, "is incomplete: layer_01-model_00-model_states.pt is missing"),
        (_missing_rank, "is incomplete: mp_rank_01_model_states.pt is missing"),
        (_no_tensor, "'weight' in"),
        (_no_dict, "layer_01-model_states.pt contains a Tensor, not a dict"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused_by_the_name_of_the_file(
    tmp_path, change, message
):
    path = write_pipeline(tmp_path / "ds", {1: {"weight": random(2, 2)}})
    change(path)
    assert message in refused(tmp_path / "ds", tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("layer_03-model_states.pt", "has a master weight of '3.norm.weight', and no file has"),
        ("bf16_zero_pp_rank_*_mp_rank_01_optim_states.pt", "zero_pp_rank_0_mp_rank_01_optim_stat"),
        ("*optim_states.pt layer_04-model_states.pt", "lists the parameter '4.norm.weight', and"),
        ("zero/3.lin.weight/fp32.pt", "lists the parameter '3.lin.weight', and no file has it"),
        ("zero/*/*", "is incomplete: zero/<name>/fp32.pt is missing"),
        ("../latest*", "contains global_step3, global_step3_universal: choose one with --tag"),
    ],
)
def test_a_copy_of_deepspeeds_files_that_is_not_complete_is_refused(tmp_path, file, message):
    shutil.copytree(GOLDEN / "pipeline", tmp_path / "ds")
    tag = "global_step3_universal" if "zero/" in file else "global_step3"
    for pattern in file.split():
        folder = tmp_path / "ds" / (tag if "../" not in pattern else ".")
        removed = list(folder.glob(pattern.removeprefix("../")))
        assert removed
        for path in removed:
            path.unlink()
    options = {} if "latest" in file else {"tag": tag}
    message_found = refused(tmp_path / "ds", tmp_path / "out", **options)
    assert message in message_found


def test_latest_that_names_no_checkpoint_is_refused_with_the_tags(tmp_path):
    write_pipeline(tmp_path / "ds", {1: {"weight": random(2, 2)}})
    (tmp_path / "ds" / "latest").write_text("global_step9")
    message = refused(tmp_path / "ds", tmp_path / "out")
    assert "latest names 'global_step9', which is missing" in message
    assert "contains global_step7: name one of them as the tag" in message
    with pytest.raises(CheckpointError, match="names 'global_step9', which is missing"):
        engine_of().load_checkpoint(str(tmp_path / "ds"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shards", "[=rows"], "--shards: the pattern '[' is not valid"),
        (["--shards", "w=rows"], "--shards: the pattern 'w' matches no name of the checkpoint"),
        (["--vocab-size", "7"], "no tensor with a name such as word_embeddings, lm_head"),
        (["--vocab-size", "0"], "the checkpoint has: 0.word_embeddings.weight [6, 4]"),
        (["--name", ".*="], "the name rules leave all tensors out"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, capsys, options, message):
    write_pipeline(tmp_path / "ds", {0: {"word_embeddings.weight": random(6, 4)}})
    folders = [str(tmp_path / "ds"), str(tmp_path / "out")]
    assert main(["checkpoint", "import-deepspeed", *folders, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_of_deepspeed_is_refused(tmp_path):
    assert "contains no checkpoint of DeepSpeed" in refused(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"2\\..*": "x"}, "the name rule '2\\\\..*' matches no name of the checkpoint"),
        ({"1\\..*": "layers.1.same"}, "both become 'layers.1.same'"),
        ({"1\\.(.*)": "own.\\1"}, "it became 'own."),
        ({"1\\.(.*": "layers.1.w"}, "is not valid"),
        ({"1\\..*": "layers.1.\\1"}, "is not valid"),
    ],
)
def test_a_name_rule_that_does_not_fit_is_refused(tmp_path, rules, message):
    write_pipeline(tmp_path / "ds", {1: {"weight": random(2, 2), "bias": random(2)}})
    with pytest.raises(CheckpointError) as caught:
        import_deepspeed(
            str(tmp_path / "ds"), str(tmp_path / "out"), ImportOptions(names=NameRules(rules))
        )
    assert message in str(caught.value)


def test_the_folder_of_deepspeeds_run_is_not_written(tmp_path):
    write_pipeline(tmp_path / "ds", {1: {"weight": random(2, 2)}})
    with pytest.raises(CheckpointError, match="whose file 'latest' would be replaced"):
        import_deepspeed(str(tmp_path / "ds"), str(tmp_path / "ds"), ImportOptions())
    assert (tmp_path / "ds" / "latest").read_text() == "global_step7"


# The command


def test_the_command_prints_the_names_and_what_was_left_out(tmp_path, capsys):
    path = write_pipeline(
        tmp_path / "ds", {1: {"weight": random(2, 2), "old": random(1)}}, state={"own": Plain()}
    )
    arguments = ["checkpoint", "import-deepspeed", str(path), str(tmp_path / "out")]
    assert main([*arguments, "--name", r"1\.old="]) == 0
    out = capsys.readouterr().out
    assert "global_step7: 1 tensors, 0.0 MB, float32" in out
    assert "  1.weight -> layers.1.weight\n  1.old: left out\n" in out
    assert f"left out, because loading them would run their code: {__name__}.Plain" in out
    (tmp_path / "names.json").write_text(r'{"1\\.old": null, "1\\.weight": "layers.2.kernel"}')
    again = [*arguments[:-1], str(tmp_path / "again"), "--names", str(tmp_path / "names.json")]
    assert main(again) == 0
    assert "  1.weight -> layers.2.kernel" in capsys.readouterr().out
    assert main([*arguments, "--shards", "1.weight=cols"]) == 2
    assert (
        "the rules are rows, columns, halves, thirds, blocks, replicated" in capsys.readouterr().err
    )
    assert main([*arguments, "--name", "weight"]) == 2
    assert "expected PATTERN=..., with a '='" in capsys.readouterr().err


def test_the_export_of_imported_weights_says_that_a_run_must_save_them_first(tmp_path, capsys):
    pytest.importorskip("transformers")
    write_pipeline(tmp_path / "ds", {1: {"weight": random(2, 2)}})
    import_deepspeed(str(tmp_path / "ds"), str(tmp_path / "out"), ImportOptions())
    assert main(["hf", "export", str(tmp_path / "out"), str(tmp_path / "hf")]) == 2
    assert "(DeepSpeed 0.19.8), and their names are not those of" in capsys.readouterr().err


# Files of DeepSpeed itself


def test_files_that_deepspeed_wrote_give_the_master_weights_of_its_own_converter():
    checkpoint = read_deepspeed(GOLDEN / "pipeline" / "global_step3")
    assert checkpoint.kind == "pipeline"
    assert checkpoint.has_masters
    assert checkpoint.buffers == {"1.scale"}
    assert checkpoint.client == {"epoch": 3}
    assert checkpoint.left_out["mp_rank_00_model_states.pt"] == (
        "__main__.Own",
        "argparse.Namespace",
    )
    universal = read_deepspeed(GOLDEN / "pipeline" / "global_step3_universal")
    assert universal.kind == "universal"
    names = {name.replace("tied_modules.embed", "1"): t for name, t in universal.tensors.items()}
    assert checkpoint.tensors.keys() == names.keys() | {"1.scale"}
    for name, tensor in names.items():
        assert torch.equal(checkpoint.tensors[name].full(), tensor.full()), name


def test_files_of_deepspeed_without_a_pipeline_are_imported(tmp_path):
    found = imported(GOLDEN / "module", tmp_path / "out")
    buffers = {key for key in found if key.startswith("buffers/")}
    assert {key.rpartition(".")[2] for key in buffers} == {
        "scale",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    weight = found["parameters/layers.0.blocks.0.lin.weight"]
    assert weight.dtype == torch.float32
    # A master weight has bits that bf16 has not.
    assert not torch.equal(weight, weight.bfloat16().float())
    # A frozen parameter has no master weight.
    assert found["parameters/layers.0.frozen.weight"].dtype == torch.bfloat16
